// Operations, memory and collectives.
import { ask, bytes, count, course, duration, make, note, percent, table, who } from "/parts.js";

// What the numbers are of, when not every call has a row.
const ofRows = (share) => {
  if (share === 1) return "";
  return share === null ? "Calls without a row were not counted: these numbers are of the rows alone."
    : `${percent(share)} of the calls have a row: numbers from rows are of those alone.`;
};
const BASES = { counted: "every call", rows: "every call", estimate: "estimate", unknown: "rows alone" };

let wanted = ""; // text in the filter of operations

export async function showOps(query) {
  const { ops } = await ask("ops", query);
  const graphs = await ask("graph-metrics", query);
  if (!ops.length) return [note("There are no events here yet.")];
  const holder = make("div");
  const field = make("input", undefined, { id: "op-filter", type: "search", "data-key": "op-filter", autocomplete: "off" });
  field.value = wanted;
  const fill = () => {
    const chosen = ops.filter((op) => `${op.operation} ${who(op)}`.toLowerCase().includes(wanted.toLowerCase()));
    holder.replaceChildren(chosen.length ? operations(chosen) : note("No operation is called that."));
  };
  field.addEventListener("input", () => { wanted = field.value; fill(); });
  fill();
  const filter = make("p", [make("label", "Only ", { for: "op-filter" }), field], { class: "filter" });
  return [filter, holder, ...graphFacts(graphs)];
}

function operations(ops) {
  return table("ops", "Operations, most time first", [
    ["Operation", (op) => op.operation],
    ["Process", (op) => who(op)],
    ["Calls", (op) => count(op.count), (op) => op.count],
    ["Total", (op) => duration(op.total_ms * 1000), (op) => op.total_ms],
    ["p50", (op) => duration(op.p50_us), (op) => op.p50_us],
    ["p95", (op) => duration(op.p95_us), (op) => op.p95_us],
    ["p99", (op) => duration(op.p99_us), (op) => op.p99_us],
    ["max", (op) => duration(op.max_us), (op) => op.max_us],
    ["Time", (op) => percent(op.wall_pct / 100), (op) => op.wall_pct],
    ["Numbers are of", (op) => BASES[op.basis]],
  ], ops);
}

function graphFacts(graphs) {
  if (!graphs.total_events) return [];
  const rate = graphs.launch_rate_per_sec === undefined ? "" : `, ${graphs.launch_rate_per_sec} launches a second`;
  const each = graphs.avg_capture_dur_us === undefined ? "" : `, ${duration(graphs.avg_capture_dur_us)} for a capture`;
  return [make("h2", "CUDA graphs"), make("p",
    `${count(graphs.captures)} captures, ${count(graphs.instantiations)} instantiations, ${count(graphs.launches)} launches${each}${rate}. ${ofRows(graphs.row_share)}`)];
}

export async function showMemory(query) {
  const { processes } = await ask("memory", query);
  if (!processes.length) return [note("No process allocated device memory in this part.")];
  return processes.map((one) => {
    const facts = [
      `${count(one.allocations)} allocations of ${bytes(one.allocated_bytes)} in all, ${count(one.frees)} frees`,
      one.failed ? `${count(one.failed)} calls failed` : "",
      one.frees_unmatched ? `${count(one.frees_unmatched)} frees of what was allocated before this part` : "",
      one.is_exact ? "every call has a row" : `${ofRows(one.row_share)} What is held is not known: an allocation or a free may be missing.`,
    ];
    const basis = one.is_exact ? "" : ", by the rows alone";
    const text = `Device memory of ${who(one)}${basis}: ${bytes(one.held_bytes)} held at the end, ${bytes(one.peak_bytes)} at most`;
    const list = make("ul", facts.filter(Boolean).map((fact) => make("li", fact)));
    const drawn = one.series.length > 1 ? [course(text, one.series, one.peak_bytes, bytes)] : [make("p", text)];
    const held = one.held.length ? [table(`held-${one.node}-${one.pid}`, `Still held by ${who(one)}${basis}, most first`, [
      ["Size of one", (size) => bytes(size.bytes)],
      ["How many", (size) => count(size.count), (size) => size.count],
      ["Together", (size) => bytes(size.bytes * size.count), (size) => size.bytes * size.count],
    ], one.held)] : [];
    return make("article", [make("h2", who(one)), ...drawn, list, ...held]);
  });
}

export async function showCollectives(query) {
  const { collectives } = await ask("collectives", query);
  if (!collectives.length) return [note("No collective was recorded in this part.")];
  return collectives.map((one) => {
    const waits = one.wait_p50_us === null ? "" : ` The first to arrive waits ${duration(one.wait_p50_us)} longer than the last (median).`;
    const how = one.is_blocking ? "" : " The calls only enqueue, so their times do not say who was late.";
    const share = one.row_share === 1 ? "" : ` ${ofRows(one.row_share)} Who came last is said of operations with a row of every rank.`;
    const text = `${count(one.operations)} operations of ${bytes(one.bytes)} among ${one.ranks_of || "?"} ranks; ${one.ranks.length} recorded.${waits}${how}${share}`;
    return make("article", [
      make("h2", `${one.op} on ${one.comm}`), make("p", text),
      table(`ranks-${one.comm}-${one.op}`, `Time inside ${one.op} by rank; the last to arrive is inside for the least time`, [
        ["Rank", (rank) => String(rank.rank)],
        ["Process", (rank) => who({ ...rank, rank: null })],
        ["Calls", (rank) => count(rank.count), (rank) => rank.count],
        ["p50", (rank) => duration(rank.p50_us), (rank) => rank.p50_us],
        ["p99", (rank) => duration(rank.p99_us), (rank) => rank.p99_us],
        ["max", (rank) => duration(rank.max_us), (rank) => rank.max_us],
        ["Came last", (rank) => (one.is_blocking ? `${count(rank.came_last)} of ${count(one.compared)}` : "–"), (rank) => rank.came_last],
      ], one.ranks),
    ]);
  });
}
