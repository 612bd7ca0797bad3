"use strict";
// Everything shown comes from traced programs: it is set as text, never as markup.
const get = (id) => document.getElementById(id);
const make = (name, text, attributes = {}) => {
  const element = document.createElement(name);
  if (text !== undefined) element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};
const svg = (name, attributes) => {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
};

class Refused extends Error {}

async function ask(name) {
  const token = sessionStorage.getItem("token");
  const headers = token ? { Authorization: `Bearer ${token}` } : {};
  const answer = await fetch(`/api/v1/${name}`, { headers });
  if (answer.status === 401) throw new Refused("This server wants a bearer token.");
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}

function showOverview(o) {
  const parts = [o.file, `${o.event_count.toLocaleString()} events`];
  if (o.duration_s !== undefined) parts.push(`${o.duration_s.toFixed(1)} s from ${o.first}`);
  if (o.gpu && o.gpu.model) parts.push(o.gpu.model);
  get("summary").textContent = parts.join(" · ");
}

function showIncidents({ incidents }) {
  const box = get("incidents");
  if (!incidents.length) {
    box.replaceChildren(make("p", "No incident: every rule looked and found nothing."));
    return;
  }
  box.replaceChildren(...incidents.map((one) => {
    const card = make("article", undefined, { class: one.severity });
    card.append(make("h3", `${one.severity} · ${one.title}`));
    const list = make("dl");
    const row = (term, ...children) => {
      const value = make("dd");
      value.append(...children);
      list.append(make("dt", term), value);
    };
    const lost = one.lost_ms >= 1000 ? `${(one.lost_ms / 1000).toFixed(2)} s` : `${one.lost_ms.toFixed(1)} ms`;
    row("when", `${one.start_s.toFixed(3)} s to ${one.end_s.toFixed(3)} s, lost ${lost}`);
    row("who", `${one.process || "node"} ${one.pid ? `(pid ${one.pid})` : ""} ${one.node}`);
    for (const cause of one.causes) {
      const share = `${(cause.share * 100).toFixed(1)} %`;
      const bar = make("meter", share, { min: 0, max: 1, value: cause.share, "aria-label": `${cause.name}: ${share}` });
      row("cause", bar, ` ${share} ${cause.name}`);
      for (const fact of cause.evidence) row("", fact);
    }
    for (const out of one.ruled_out) row("not it", `${out.name}: ${out.why}`);
    for (const step of one.fix) row("do", step);
    const seen = one.coverage.seen === null ? "" : ` of at least ${one.coverage.seen} seen`;
    row("data", `${one.coverage.state}: ${one.coverage.stored} rows${seen}`);
    card.append(list);
    return card;
  }));
}

function showOps({ ops }) {
  get("ops").replaceChildren(...ops.slice(0, 60).map((op) => {
    const line = make("tr");
    const cells = [`${op.process} (${op.pid})`, op.operation, op.count.toLocaleString(),
      op.p50_us, op.p95_us, op.p99_us, op.max_us, op.wall_pct];
    line.append(...cells.map((cell) => make("td", String(cell))));
    return line;
  }));
}

function showLoad({ snapshots }) {
  if (snapshots.length < 2) {
    get("load").replaceChildren(make("p", "The recording holds no load samples."));
    return;
  }
  const draw = (label, key) => {
    const values = snapshots.map((shot) => shot[key]);
    const at = snapshots.map((shot) => Date.parse(shot.timestamp));
    const span = Math.max(at[at.length - 1] - at[0], 1);
    const points = values.map((value, i) => `${((at[i] - at[0]) / span) * 1000},${100 - value}`).join(" ");
    const figure = make("figure");
    const text = `${label}: ${values[values.length - 1].toFixed(0)} %, most ${Math.max(...values).toFixed(0)} %`;
    const image = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": text });
    image.append(svg("polyline", { points }));
    figure.append(make("figcaption", text), image);
    return figure;
  };
  get("load").replaceChildren(draw("CPU", "cpu_percent"), draw("memory", "mem_percent"));
}

const shows = { overview: showOverview, snapshots: showLoad, incidents: showIncidents, ops: showOps };
let isBusy = false;

async function update() {
  if (isBusy) return;
  isBusy = true;
  try {
    for (const [name, show] of Object.entries(shows)) show(await ask(name));
    get("status").textContent = "";
    get("access").hidden = true;
  } catch (error) {
    get("status").textContent = error.message;
    if (error instanceof Refused) {
      get("access").hidden = false;
      get("token").focus();
    }
  } finally {
    isBusy = false;
  }
}

get("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", get("token").value);
  update();
});
setInterval(() => { if (get("live").checked && get("access").hidden && !document.hidden) update(); }, 5000);
update();
