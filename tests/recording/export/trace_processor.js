/* Perfetto's trace processor (WebAssembly) without a browser: loads a trace, answers SQL as JSON.
 *
 * Usage: node trace_processor.js WEB_DIST TRACE SQL...  It speaks TraceProcessorRpc (protos/perfetto/trace_processor/
 * trace_processor.proto of Perfetto v52): a stream of length-delimited messages in field 1, one request and one method each.
 */
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");

const [webDist, trace, ...queries] = process.argv.slice(2);
const APPEND = 1, FINALIZE = 2, QUERY = 3;
const REQUEST = 2, FATAL_ERROR = 5, APPEND_DATA = 101, QUERY_ARGS = 103, APPEND_RESULT = 201, QUERY_RESULT = 203;
const CELL = { NULL: 1, VARINT: 2, FLOAT64: 3, STRING: 4 };

function varint(value) {
  const bytes = [];
  for (; value > 127; value = Math.floor(value / 128)) bytes.push((value % 128) | 128);
  return Buffer.from([...bytes, value]);
}
const number = (field, value) => Buffer.concat([varint(field * 8), varint(value)]);
const bytes = (field, value) => Buffer.concat([varint(field * 8 + 2), varint(value.length), value]);

/* Fields of a message as [number, value]; a value is a BigInt, a Buffer or eight bytes. */
function* fields(message) {
  let at = 0;
  const next = () => {
    let value = 0n;
    for (let shift = 0n; ; shift += 7n) {
      value |= BigInt(message[at] & 127) << shift;
      if (message[at++] < 128) return value;
    }
  };
  while (at < message.length) {
    const key = Number(next());
    let value;
    if (key % 8 === 0) value = next();
    else if (key % 8 === 1) value = message.subarray(at, (at += 8));
    else {
      const length = Number(next());
      value = message.subarray(at, (at += length));
    }
    yield [Math.floor(key / 8), value];
  }
}
function varints(message) {
  const values = [];
  let value = 0n, shift = 0n;
  for (const byte of message) {
    value |= BigInt(byte & 127) << shift;
    shift += 7n;
    if (byte < 128) {
      values.push(Number(BigInt.asIntN(64, value)));
      value = shift = 0n;
    }
  }
  return values;
}

class Answer {
  columns = [];
  rows = [];
  row = [];

  add(message) {
    for (const [field, value] of fields(message)) {
      if (field === 1) this.columns.push(value.toString());
      if (field === 2 && value.length) throw new Error(value.toString());
      if (field === 3) this.addBatch(value);
    }
  }

  addBatch(batch) {
    const parts = { cells: [], numbers: [], floats: [], texts: [] };
    for (const [field, value] of fields(batch)) {
      if (field === 1) parts.cells = varints(value);
      if (field === 2) parts.numbers = varints(value);
      if (field === 3) for (let i = 0; i < value.length; i += 8) parts.floats.push(value.readDoubleLE(i));
      if (field === 5) parts.texts = value.toString().split("\0");
    }
    for (const cell of parts.cells) {
      const take = { [CELL.VARINT]: parts.numbers, [CELL.FLOAT64]: parts.floats, [CELL.STRING]: parts.texts }[cell];
      if (!take && cell !== CELL.NULL) throw new Error(`cell type ${cell}`);
      this.row.push(take ? take.shift() : null);
      if (this.row.length === this.columns.length) this.rows.push(this.row.splice(0));
    }
  }
}

/* The bundle is a web worker's: it finds a worker's globals here, and its module in the folder. */
function start(onReply) {
  const worker = {
    console: { ...console, log() {}, warn() {} }, WebAssembly, TextDecoder, TextEncoder, URL, performance, setTimeout, Uint8Array, TypeError,
    importScripts() {}, WorkerGlobalScope: class {}, location: { href: "http://localhost/" },
    XMLHttpRequest: class {
      open(_method, name) {
        this.name = path.basename(name);
      }
      send() {
        const file = fs.readFileSync(path.join(webDist, this.name));
        this.response = file.buffer.slice(file.byteOffset, file.byteOffset + file.length);
      }
    },
  };
  worker.self = worker;
  vm.runInNewContext(fs.readFileSync(path.join(webDist, "engine_bundle.js"), "utf8"), worker);
  const port = { postMessage: onReply };
  worker.onmessage({ data: port });
  return (message) => port.onmessage({ data: new Uint8Array(message) });
}

const answers = queries.map(() => new Answer());
let current = -1;
const send = start((reply) => {
  for (const [, message] of fields(Buffer.from(reply))) {
    for (const [field, value] of fields(message)) {
      if (field === FATAL_ERROR) throw new Error(value.toString());
      if (field === QUERY_RESULT && current >= 0) answers[current].add(value);
      if (field === APPEND_RESULT) for (const [inner, text] of fields(value)) if (inner === 2 && text.length) throw new Error(text.toString());
    }
  }
});
let seq = 0;
const ask = (method, ...rest) => send(bytes(1, Buffer.concat([number(1, seq++), number(REQUEST, method), ...rest])));

setTimeout(() => {
  ask(APPEND, bytes(APPEND_DATA, fs.readFileSync(trace)));
  ask(FINALIZE);
  queries.forEach((sql, i) => {
    current = i;
    ask(QUERY, bytes(QUERY_ARGS, bytes(1, Buffer.from(sql))));
  });
  const named = ({ columns, rows }) => rows.map((row) => Object.fromEntries(row.map((cell, i) => [columns[i], cell])));
  process.stdout.write(JSON.stringify(answers.map(named)));
}, 0);
