// Which cluster and measure are shown, what is marked, and when it is asked for again. All of that is in the address, so that
// an alert can link to it: #cluster=…&measure=…&row=…&at=… (seconds since 1970).
import { Heat, css } from "/live/heat.js";
import { count, get, make, note, reach, table } from "/live/parts.js";

const LEVELS_MS = 500;
const TABLES_MS = 2000;
const PATIENCE_MS = 10000;
const OLD_S = 10; // verdicts of a judge that keeps up are half as old
const COLORS = 6;
const LISTED = 16; // ranks of one deadlock
const heat = new Heat(get("canvas"));
const state = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
const failures = {}; // part of the page → what is wrong with it
const shown = {}; // part of the page → what was drawn, so that an unchanged answer is not drawn again
let setup = { measures: [], dashboard_url: "" };
let picked = null; // {row, x}
let round = 0; // of the newest request for levels: an older answer is dropped

async function ask(path, query = {}) {
  const answer = await reach(`${path}?${new URLSearchParams(query)}`, {}, "Fleet does not answer. Is it still running?", PATIENCE_MS);
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({ error: `HTTP ${answer.status}` }));
  throw Object.assign(new Error(body.error), { status: answer.status });
}
const admin = async (name, query) => (await ask(`/api/v1/admin/${name}`, query)).json();

function remember(changes) {
  Object.assign(state, changes);
  for (const [key, value] of Object.entries(state)) if (value === "" || value === undefined) delete state[key];
  history.replaceState(null, "", `#${new URLSearchParams(state)}`);
}

const measure = () => setup.measures.find((one) => one.name === state.measure) || setup.measures[0];
const value = (level) => { const { best, worst } = measure(); return best + ((worst - best) * level) / 250; };
const clock = (wall_s) => new Date(wall_s * 1000).toISOString().slice(11, 19);

function say(level) {
  if (level === undefined) return "not known";
  const text = value(level).toFixed(2);
  if (measure().name !== "slowdown") return text;
  return level >= 250 ? `${text} times its peers or more` : `${text} times its peers`;
}

function describePicked() {
  const name = heat.names[picked.row];
  const wall = heat.wall(picked.x);
  const when = picked.x === heat.width - 1 ? "now" : wall === undefined ? "before the first column" : `at ${clock(wall)} UTC`;
  return `${name}, ${when}: ${say(heat.level(picked.x, picked.row))}`;
}

function showPicked() {
  const box = get("mark");
  box.hidden = !picked || picked.row < heat.top || picked.row >= heat.top + heat.n_shown;
  if (!picked) return;
  const { clientWidth: width, clientHeight: height } = get("canvas");
  const rowHeight = height / heat.n_shown;
  Object.assign(box.style, {
    left: `${(picked.x * width) / heat.width - 2}px`, width: `${width / heat.width + 4}px`,
    top: `${(picked.row - heat.top) * rowHeight - 2}px`, height: `${rowHeight + 4}px`,
  });
  const text = describePicked();
  if (get("picked").textContent !== text) get("picked").textContent = text;
}

function pick(row, x) {
  picked = { row: Math.min(Math.max(row, 0), heat.names.length - 1), x: Math.min(Math.max(x, 0), heat.width - 1) };
  const before = heat.top;
  heat.reveal(picked.row);
  if (heat.top !== before) heat.draw();
  const wall = heat.wall(picked.x);
  remember({ row: heat.names[picked.row], at: picked.x === heat.width - 1 || wall === undefined ? "" : String(wall) });
  showPicked();
}

// What the address names, once its row is there.
function pickNamed() {
  const row = heat.names.indexOf(state.row);
  if (row < 0) return;
  let x = heat.width - 1;
  if (state.at) while (x > 0 && heat.wall(x - 1) !== undefined && heat.wall(x) > Number(state.at)) x -= 1;
  picked = { row, x };
  heat.reveal(row);
}

function showEnds() {
  get("begin").textContent = `${clock(heat.beginWall)} UTC`;
  get("end").textContent = `${clock(heat.nowWall)} UTC`;
  const { names, top, n_shown: n } = heat;
  get("rows").textContent = n ? `${names[top]} (top) to ${names[top + n - 1]}: ${count(n)} of ${count(names.length)} ${heat.facts.rows}` : "";
}

function showLegend() {
  const levels = Array.from({ length: COLORS }, (_, i) => Math.round((i * 250) / (COLORS - 1)));
  get("legend").replaceChildren(...levels.map((level) => {
    const key = make("span", undefined, { class: "key" });
    key.style.background = css(level);
    return make("li", [key, say(level)]);
  }), make("li", [make("span", undefined, { class: "key" }), say()]));
}

async function updateLevels() {
  const mine = ++round;
  if (!state.cluster || !measure()) return;
  const query = { cluster_id: state.cluster, measure: measure().name, after: heat.taken, version: heat.version };
  try {
    const answer = await ask("/live/levels", query);
    const buffer = await answer.arrayBuffer();
    if (mine !== round) return;
    if (heat.take(buffer)) {
      if (state.row !== undefined) pickNamed();
      heat.draw();
    } else {
      heat.drawNow();
    }
    showEnds();
    get("missing").hidden = !heat.facts.n_missing;
    get("missing").textContent = `${count(heat.facts.n_missing)} rows are not shown: Fleet keeps no more.`;
    showPicked();
    performance.mark("levels-shown");
  } catch (error) {
    if (mine !== round) return;
    if (error.status !== 404) throw error;
    heat.clear();
    heat.draw();
  }
}

function link(node, text) {
  if (!setup.dashboard_url) return text;
  const address = setup.dashboard_url.replaceAll("{node_id}", encodeURIComponent(node));
  return make("a", text, { href: address, rel: "noreferrer" });
}

function draw(part, answer, build) {
  const text = JSON.stringify(answer);
  if (shown[part] === text) return;
  shown[part] = text;
  const focused = get(part).contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  get(part).replaceChildren(...build(answer));
  const again = focused && [...get(part).querySelectorAll("[data-key]")].find((one) => one.dataset.key === focused);
  if (again) again.focus({ preventScroll: true });
}

const cost = (one) => {
  const hours = `${(one.lost_gpu_s / 3600).toFixed(2)} GPU-hours`;
  return one.amount === null ? hours : `${hours}, ${one.amount.toFixed(2)} ${one.currency}`;
};

function rowButton(one) {
  const button = make("button", one.row, { type: "button", "data-key": one.row });
  button.addEventListener("click", () => {
    if (measure().name !== "slowdown") {
      remember({ measure: "slowdown" });
      chooseMeasure();
    }
    const row = heat.names.indexOf(one.row);
    if (row >= 0) pick(row, heat.width - 1);
    else remember({ row: one.row, at: "" });
    get("heat").focus();
  });
  return button;
}

function buildFindings({ total, findings, old_s }) {
  const age = old_s ? [note(`Verdicts are ${old_s} s old.`)] : [];
  if (!total) return [...age, note("Nothing is said against any rank.")];
  return [...age, table("findings", `${count(total)} of this cluster's ranks, costliest first`, [
    ["Rank", (one) => [rowButton(one)]],
    ["Verdict", (one) => one.verdict],
    ["Cause", (one) => one.cause || one.reason || "asked, or not known"],
    ["Others that waited", (one) => count(one.n_victims), (one) => one.n_victims],
    ["Cost so far", cost, (one) => one.lost_gpu_s],
    ["Node", (one) => [link(one.node_id, one.node_id)]],
  ], findings)];
}

function buildHang(answer) {
  const { roots, deadlocks, standing_s } = answer || { roots: [], deadlocks: [] };
  if (!roots.length && !deadlocks.length) return [note("No job stands still.")];
  const standing = `Standing for ${Math.round(standing_s)} s`;
  const parts = [];
  if (roots.length) parts.push(buildRoots(roots, standing));
  if (deadlocks.length) parts.push(buildCircles(deadlocks, standing));
  return parts;
}

function buildRoots(roots, standing) {
  return table("hang", `${standing}; others wait for these`, [
    ["Rank", (one) => String(one.rank)],
    ["Node", (one) => [link(one.node_id, one.node_id)]],
    ["Cause", (one) => one.cause],
    ["Communicator", (one) => one.comm],
    ["Ranks that wait", (one) => count(one.blocks.length), (one) => one.blocks.length],
  ], roots);
}

// A circle may have every rank of a job: its first ones show which job it is.
function buildCircles(deadlocks, standing) {
  const list = (ranks) => `ranks ${ranks.slice(0, LISTED).join(", ")}${ranks.length > LISTED ? " and others" : ""} wait for each other`;
  return table("circles", `${standing}; deadlocked: none of these can go on before another one does`, [
    ["Deadlock", list],
    ["Ranks that wait", (ranks) => count(ranks.length), (ranks) => ranks.length],
  ], deadlocks);
}

const share = (number) => (number === null || number === undefined ? "none" : number.toFixed(3));

function buildClusters({ clusters }) {
  if (!clusters.length) return [note("No node has reported yet.")];
  return [table("clusters", "Health scores of each cluster's nodes, and the score below which one is a straggler", [
    ["Cluster", (one) => one.cluster_id],
    ["Threshold", (one) => (one.panic_mode ? `${share(one.threshold)}, withheld: panic` : share(one.threshold)), (one) => one.threshold ?? -1],
    ["Median", (one) => share(one.median), (one) => one.median ?? -1],
    ["MAD", (one) => share(one.mad), (one) => one.mad ?? -1],
    ["Quorum", (one) => (one.quorum_met ? "yes" : "no")],
    ["Active nodes", (one) => count(one.active_nodes), (one) => one.active_nodes],
    ["Stragglers", (one) => count(one.straggler_count), (one) => one.straggler_count],
  ], clusters)];
}

function buildExporters({ exporters }) {
  if (!exporters.length) return [note("No exporter with a queue is configured.")];
  return [table("exporters", "Whether what is sent on arrives", [
    ["Exporter", (one) => one.exporter],
    ["State", (one) => one.trouble || "takes data"],
    ["Batches that wait", (one) => `${count(one.n_waiting)} of ${count(one.capacity)}`, (one) => one.n_waiting],
  ], exporters)];
}

function chooseMeasure() {
  round += 1; // an answer about what was shown before must not be taken for one about this
  get("measure").value = measure() ? measure().name : "";
  heat.clear();
  picked = null;
  get("picked").textContent = "Nothing marked.";
  if (measure()) showLegend();
}

function offer(select, names, titles, chosen) {
  const text = JSON.stringify(names);
  if (shown[select] !== text) {
    shown[select] = text;
    get(select).replaceChildren(...names.map((name, i) => make("option", titles[i], { value: name })));
  }
  if (get(select).value !== chosen) get(select).value = chosen;
}

async function updateTables() {
  const { clusters } = await admin("clusters", { limit: 1000 });
  const names = clusters.map((one) => one.cluster_id);
  if (!state.cluster && names.length) remember({ cluster: names[0] });
  const known = state.cluster && !names.includes(state.cluster) ? [...names, state.cluster] : names;
  offer("cluster", known, known, state.cluster || "");
  draw("clusters", { clusters }, buildClusters);
  draw("exporters", await admin("exporters"), buildExporters);
  if (!state.cluster) return;
  const mine = clusters.find((one) => one.cluster_id === state.cluster);
  const summary = mine ? `${count(mine.known_nodes)} nodes, ${count(mine.straggler_count)} below the threshold` : "no node of this cluster reports now";
  if (get("summary").textContent !== summary) get("summary").textContent = summary;
  const cluster = state.cluster;
  const nothing = (error) => { if (error.status !== 404) throw error; return null; };
  const found = await admin("findings", { cluster_id: cluster }).catch(nothing);
  const hang = await admin("hang", { cluster_id: cluster }).catch(nothing);
  if (cluster !== state.cluster) return; // another was chosen meanwhile
  const { total, findings, age_s } = found || { total: 0, findings: [], age_s: 0 };
  draw("findings", { total, findings, old_s: age_s > OLD_S ? Math.round(age_s) : 0 }, buildFindings);
  draw("hang", hang, buildHang);
}

// What is wrong with each part of the page; two that say the same are one.
function report(part, failure) {
  failures[part] = failure;
  const text = [...new Set(Object.values(failures))].filter(Boolean).join(" ");
  if (get("status").textContent !== text) get("status").textContent = text;
}

// On a timer, and at once when the page is looked at again; what a round says that a newer one overtook is dropped.
function repeat(update, interval_ms) {
  let timer = 0;
  let newest = 0;
  const run = async () => {
    clearTimeout(timer);
    const mine = ++newest;
    let failure;
    if (get("follow").checked && !document.hidden) {
      failure = "";
      await update().catch((error) => { failure = error.message; });
    }
    if (mine !== newest) return;
    if (failure !== undefined) report(update.name, failure);
    timer = setTimeout(run, interval_ms);
  };
  document.addEventListener("visibilitychange", () => { if (!document.hidden) run(); });
  run();
}

const showTables = () => updateTables().catch((error) => report(updateTables.name, error.message));
get("cluster").addEventListener("change", () => { remember({ cluster: get("cluster").value, row: "", at: "" }); chooseMeasure(); showTables(); });
get("measure").addEventListener("change", () => { remember({ measure: get("measure").value, row: "", at: "" }); chooseMeasure(); });
get("canvas").addEventListener("click", (event) => {
  if (!heat.names.length) return;
  const { width, height } = get("canvas").getBoundingClientRect();
  pick(heat.top + Math.floor((event.offsetY * heat.n_shown) / height), Math.floor((event.offsetX * heat.width) / width));
});
get("heat").addEventListener("keydown", (event) => {
  if (!heat.names.length || event.ctrlKey || event.metaKey || event.altKey) return;
  const { row, x } = picked || { row: heat.worst(1)[0] || 0, x: heat.width - 1 };
  const page = Math.max(1, Math.round(heat.n_shown / 10));
  const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-page, 0], PageDown: [page, 0], Home: [-row, 0], End: [heat.names.length, 0] };
  if (event.key in moves) pick(picked ? row + moves[event.key][0] : row, picked ? x + moves[event.key][1] : x);
  else if (event.key === "+" || event.key === "=") heat.zoom(row, 0.5);
  else if (event.key === "-") heat.zoom(row, 2);
  else if (event.key === "0") heat.showAll();
  else return;
  event.preventDefault();
  heat.draw();
  showEnds();
  showPicked();
});
addEventListener("resize", () => { heat.draw(); showPicked(); });
addEventListener("hashchange", () => {
  for (const key of Object.keys(state)) delete state[key];
  Object.assign(state, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
  chooseMeasure();
  showTables();
});

async function begin() {
  try {
    setup = await admin("live");
  } catch (error) {
    report("begin", error.message);
    setTimeout(begin, TABLES_MS);
    return;
  }
  report("begin", "");
  offer("measure", setup.measures.map((one) => one.name), setup.measures.map((one) => one.title), state.measure || "");
  chooseMeasure();
  repeat(updateTables, TABLES_MS);
  repeat(updateLevels, LEVELS_MS);
}
begin();
