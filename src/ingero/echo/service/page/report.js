// One week of what waiting cost, as Echo's questions tell it to this bearer. What is shown is in the address, for a link or a
// bookmark: #week=2026-11-16&cluster=…&node=…. A number that is not known is shown as not known.
import { count, get, make, note, reach, Refused, table } from "/report/parts.js";

const DAY_MS = 86400000;
const WEEKS = 26;
const ROWS = 100;
const TOP = 20;
const ACTIONS = 25; // the most that Echo estimates
const UNKNOWN = "not known";
const state = {};
let round = 0; // of the newest request: an older answer is dropped

async function send(path, body) {
  const token = sessionStorage.getItem("token");
  const headers = { "Content-Type": "application/json" };
  if (token) headers.Authorization = `Bearer ${token}`;
  const request = { method: "POST", headers, body: JSON.stringify(body) };
  const answer = await reach(path, request, "Echo does not answer. Is it still running?");
  if (answer.status === 401) throw new Refused(token ? "Echo does not know this token." : "");
  const said = await answer.json().catch(() => ({ error: `Echo answered HTTP ${answer.status} without JSON.` }));
  if (!answer.ok) throw new Error(said.error);
  return said.result;
}
const ask = (name, args) => send(`/api/v2/tools/fleet.cluster.${name}`, { args });

function readAddress() {
  for (const key of Object.keys(state)) delete state[key];
  Object.assign(state, Object.fromEntries(new URLSearchParams(location.hash.slice(1))));
}
function show(changes) {
  const next = { ...state, ...changes };
  for (const [key, value] of Object.entries(next)) if (!value) delete next[key];
  location.hash = new URLSearchParams(next).toString();
}

const dayOf = (ms) => new Date(ms).toISOString().slice(0, 10);
const mondayOf = (ms) => ms - (ms % DAY_MS) - ((new Date(ms).getUTCDay() + 6) % 7) * DAY_MS;
const clock = (text) => `${text.slice(0, 16).replace("T", " ")} UTC`;

const missing = () => make("span", UNKNOWN, { class: "unknown-value" });
function gpuTime(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  return Math.abs(seconds) >= 360 ? `${(seconds / 3600).toFixed(2)} GPU-hours` : `${seconds.toFixed(1)} GPU-seconds`;
}
const money = (paid) => {
  const parts = Object.entries(paid).map(([currency, amount]) => `${amount.toFixed(2)} ${currency}`);
  return parts.length ? parts.join(", ") : UNKNOWN;
};
const who = (one) => `${one.node_id || "nobody in particular"}${one.rank === null || one.rank < 0 ? "" : `, rank ${one.rank}`}`;
const known = (text) => (text === UNKNOWN ? [missing()] : text);

// GPU time and money by currency of some rows or totals.
function sum(rows, seconds, amount) {
  const paid = {};
  let gpu_s = 0;
  for (const one of rows) {
    gpu_s += seconds(one) || 0;
    const part = amount(one);
    if (part !== null && part !== undefined && one.currency) paid[one.currency] = (paid[one.currency] || 0) + part;
  }
  return { gpu_s, paid };
}
const charged = (rows) => sum(rows, (one) => one.charged_gpu_seconds, (one) => one.charged_amount);
const nobody = (rows) => sum(rows, (one) => one.unattributed_gpu_seconds, (one) => one.unattributed_amount);
const lost = (rows) => sum(
  rows, (one) => one.charged_gpu_seconds + one.unattributed_gpu_seconds,
  (one) => (one.currency ? (one.charged_amount || 0) + (one.unattributed_amount || 0) : null),
);
const unpriced = (rows) => sum(rows.filter((one) => !one.currency), (one) => one.charged_gpu_seconds + one.unattributed_gpu_seconds, () => null);

// Before is null where it is not known.
function change(now, before) {
  if (before === null) return UNKNOWN;
  if (!before) return now ? "new" : "none";
  const share = (now - before) / before;
  return `${share > 0 ? "+" : "−"}${Math.abs(share * 100).toFixed(0)} %`;
}
function changeCell(now, before) {
  if (before === null) return [missing()];
  return [make("span", change(now, before), { class: now > before ? "up" : now < before ? "down" : "" })];
}

function buildCost(now, before, isOver) {
  if (!now.length && !before.length) return [note("No cost of waiting is known of this week or the one before: no cost record has arrived.")];
  const past = (one) => (before.length ? one.before.gpu_s : null);
  const lines = [["Lost to waiting", lost], ["Charged to nodes", charged], ["Charged to nobody", nobody], ["Without a price", unpriced]];
  const rows = lines.map(([name, of]) => ({ name, now: of(now), before: of(before) }));
  const cells = (part, one) => {
    if (!part.gpu_s && !Object.keys(part.paid).length) return "none";
    return one.name === "Without a price" ? gpuTime(part.gpu_s) : `${gpuTime(part.gpu_s)}; ${money(part.paid)}`;
  };
  const said = isOver ? "" : "The week is not over: so far, against the whole week before. ";
  return [
    table("cost", "GPU time that ranks waited for others, and what that time costs", [
      ["Part", (one) => one.name],
      [isOver ? "This week" : "This week so far", (one) => cells(one.now, one), (one) => one.now.gpu_s],
      ["The week before", (one) => (before.length ? cells(one.before, one) : [missing()]), (one) => one.before.gpu_s],
      ["Change of GPU time", (one) => changeCell(one.now.gpu_s, past(one)), (one) => one.now.gpu_s - one.before.gpu_s],
    ], rows),
    note(`${said}This is a part of what the provider bills for the same GPUs, not beside it.`),
  ];
}

function buildClusters(now, before) {
  const names = [...new Set([...now, ...before].map((one) => one.cluster_id))];
  const rows = names.map((name) => {
    const [mine, past] = [now, before].map((totals) => totals.filter((one) => one.cluster_id === name));
    return { name, lost: lost(mine), charged: charged(mine), past: past.length ? lost(past).gpu_s : null };
  });
  rows.sort((a, b) => b.lost.gpu_s - a.lost.gpu_s);
  return [table("clusters", `${count(rows.length)} clusters, largest loss first`, [
    ["Cluster", (one) => [choose(one.name, { cluster: one.name, node: "" })]],
    ["Lost to waiting", (one) => gpuTime(one.lost.gpu_s), (one) => one.lost.gpu_s],
    ["Money", (one) => known(money(one.lost.paid)), (one) => Math.max(0, ...Object.values(one.lost.paid))],
    ["Charged to nodes", (one) => gpuTime(one.charged.gpu_s), (one) => one.charged.gpu_s],
    ["Change from the week before", (one) => changeCell(one.lost.gpu_s, one.past), (one) => one.lost.gpu_s - (one.past ?? 0)],
  ], rows)];
}

function choose(text, changes) {
  const button = make("button", text, { type: "button", "data-key": `${text}-${JSON.stringify(changes)}` });
  button.addEventListener("click", () => show(changes));
  return button;
}

function saved(one) {
  if (one.saved_gpu_seconds === null) return [missing()];
  const price = one.saved_amount === null ? "" : `; ${one.saved_amount.toFixed(2)} ${one.currency}`;
  return `${gpuTime(one.saved_gpu_seconds)} ± ${gpuTime(one.saved_standard_error_gpu_seconds)}${price}`;
}

function buildActions({ rows, savings, assumption, not_seen, n_cut }) {
  if (!rows.length) return [note("No action of a remediator took effect in this week, as far as Echo knows.")];
  const worth = new Map(savings.map((one) => [`${one.cluster_id} ${one.action_id}`, one]));
  const acted = rows.map((row) => ({ ...row, ...worth.get(`${row.cluster_id} ${row.action_id}`) }));
  const total = sum(savings.filter((one) => one.saved_gpu_seconds !== null), (one) => one.saved_gpu_seconds, (one) => one.saved_amount);
  const unknown = savings.filter((one) => one.saved_gpu_seconds === null);
  const sums = savings.length > unknown.length ? `Together they saved ${gpuTime(total.gpu_s)}; ${money(total.paid)}.` : "";
  return [
    table("actions", "Nodes that were taken out of service, newest first", [
      ["Node", (one) => [choose(who({ rank: null, ...one }), { cluster: one.cluster_id, node: one.node_id })]],
      ["Cluster", (one) => one.cluster_id],
      ["When", (one) => clock(one.acted_at)],
      ["By, and now", (one) => `${one.actuator || UNKNOWN}, ${one.state}`],
      ["Lost until then", (one) => known(gpuTime(one.lost_gpu_seconds)), (one) => one.lost_gpu_seconds ?? -1],
      ["Would have lost", (one) => known(gpuTime(one.would_have_lost_gpu_seconds)), (one) => one.would_have_lost_gpu_seconds ?? -1],
      ["Stood still", (one) => known(gpuTime(one.standstill_gpu_seconds)), (one) => one.standstill_gpu_seconds ?? -1],
      ["Saved", saved, (one) => one.saved_gpu_seconds ?? -Infinity],
    ], acted),
    note(`${sums} Assumed: ${assumption}. Not seen: ${not_seen}. Saved is time of all GPUs of the job, ± its standard error; lost is that of those that waited.`),
    make("ul", unknown.map((one) => make("li", `Not known of ${who(one)} in ${one.cluster_id}: ${one.unknown}.`)), { class: "reasons" }),
    ...(n_cut ? [note(`${count(n_cut)} older actions are not shown.`)] : []),
  ];
}

const isCharged = (one) => Boolean(one.node_id);
const beyond = (n) => (n > TOP ? [note(`${count(n - TOP)} with smaller losses are not shown here; the sums above have them.`)] : []);

// isWhole: Echo left out no row; where it did, what is missing in the week before is not known.
function buildNodes(rows, past, isWhole) {
  const nodes = rows.filter(isCharged);
  if (!nodes.length) return [note("No charge to a node is known of this week.")];
  const key = (one) => [one.cluster_id, one.node_id, one.rank].join(" ");
  const told = new Set(past.map((one) => one.cluster_id));
  const sums = new Map();
  for (const one of past) sums.set(key(one), (sums.get(key(one)) || 0) + (one.gpu_seconds || 0));
  const before = (one) => sums.get(key(one)) ?? (isWhole && told.has(one.cluster_id) ? 0 : null);
  return [
    table("nodes", "Largest loss first", [
      ["Node", (one) => [choose(who(one), { cluster: one.cluster_id, node: one.node_id })]],
      ["Cluster", (one) => one.cluster_id],
      ["Job", (one) => (one.job ? one.job : [missing()])],
      ["GPUs that waited", (one) => [one.gpu_model, one.provider].filter(Boolean).join(", ") || [missing()]],
      ["Others waited", (one) => gpuTime(one.gpu_seconds), (one) => one.gpu_seconds],
      ["Money", (one) => known(one.amount === null ? UNKNOWN : `${one.amount.toFixed(2)} ${one.currency}`), (one) => one.amount ?? -1],
      ["Change", (one) => changeCell(one.gpu_seconds, before(one)), (one) => one.gpu_seconds - (before(one) ?? 0)],
      ["Actions", (one) => count(one.n_actions), (one) => one.n_actions],
    ], nodes.slice(0, TOP)),
    ...beyond(nodes.length),
  ];
}

function buildJobs(rows, isWhole) {
  const jobs = new Map();
  for (const one of rows.filter(isCharged)) {
    const key = `${one.cluster_id} ${one.job ?? ""}`;
    jobs.set(key, [...(jobs.get(key) || []), one]);
  }
  const sums = [...jobs.values()].map((of) => ({ ...of[0], n: new Set(of.map(who)).size, ...sum(of, (one) => one.gpu_seconds, (one) => one.amount) }));
  if (!sums.length) return [note("No charge to a job is known of this week.")];
  sums.sort((a, b) => b.gpu_s - a.gpu_s);
  return [
    table("jobs", "By the job that the week's verdicts name for a rank; where they name none or several, it is not known", [
      ["Job", (one) => (one.job ? one.job : [missing()])],
      ["Cluster", (one) => one.cluster_id],
      ["Others waited", (one) => gpuTime(one.gpu_s), (one) => one.gpu_s],
      ["Money", (one) => known(money(one.paid)), (one) => Math.max(0, ...Object.values(one.paid))],
      ["Ranks charged", (one) => count(one.n), (one) => one.n],
    ], sums.slice(0, TOP)),
    ...beyond(sums.length),
    ...(isWhole ? [] : [note("Only the 1 000 largest charges are summed up here.")]),
  ];
}

async function buildStory(span) {
  const args = { ...span, cluster_id: state.cluster, node_id: state.node, limit: ROWS };
  const [found, done] = await Promise.all([ask("anomaly_list", args), ask("remediation", args)]);
  const entries = [
    ...found.rows.map((one) => ({ ts: one.ts, what: `${one.kind}${one.severity ? ` (${one.severity})` : ""}`, says: one.summary || "" })),
    ...done.rows.map((one) => ({ ts: one.ts, what: one.entry === "action" ? `action ${one.action_id}: ${one.state}` : "decision", says: one.note || "" })),
  ];
  if (!entries.length) return [note("Echo keeps no verdict, incident or decision of this node from this week.")];
  entries.sort((a, b) => (a.ts < b.ts ? 1 : -1));
  const n_cut = found.n_cut + done.n_cut;
  return [
    table("story", "Verdicts, incidents, decisions and actions, newest first", [
      ["When", (one) => clock(one.ts)], ["What", (one) => one.what], ["In words", (one) => one.says],
    ], entries),
    ...(n_cut ? [note(`${count(n_cut)} older ones are not shown.`)] : []),
  ];
}

function offer(select, values, texts, chosen) {
  select.replaceChildren(...values.map((value, i) => make("option", texts[i], { value })));
  select.value = chosen;
}

function spanOf(monday, n_weeks) {
  const end = Math.min(monday + 7 * DAY_MS, Math.floor(Date.now() / 1000) * 1000);
  const days = Math.floor((end - monday) / DAY_MS) + (n_weeks - 1) * 7;
  const seconds = ((end - monday) % DAY_MS) / 1000;
  return { time_window: `${days}d${days || seconds ? seconds : 1}s`, until: new Date(end).toISOString() };
}

async function update() {
  const mine = ++round;
  get("status").textContent = "";
  const newest = mondayOf(Date.now());
  const asked = Date.parse(`${state.week}T00:00:00Z`);
  const monday = Number.isNaN(asked) ? newest : mondayOf(asked);
  const [span, both] = [spanOf(monday, 1), spanOf(monday, 2)];
  const scope = state.cluster ? { cluster_id: state.cluster } : {};
  const [all, here, acted] = await Promise.all([
    ask("cost_by_week", { ...both, limit: 1 }), ask("cost_by_week", { ...both, ...scope, limit: 1000 }),
    ask("savings", { ...span, ...scope, limit: ACTIONS }),
  ]);
  if (mine !== round) return;
  const isNow = (one) => Date.parse(one.week) === monday;
  const [now, before] = [here.totals.filter(isNow), here.totals.filter((one) => !isNow(one))];
  const clusters = [...new Set(all.totals.map((one) => one.cluster_id))].sort();
  if (state.cluster && !clusters.includes(state.cluster)) clusters.push(state.cluster);
  offer(get("cluster"), ["", ...clusters], ["all that this token may read", ...clusters], state.cluster || "");
  const weeks = Array.from({ length: WEEKS }, (_, i) => dayOf(newest - i * 7 * DAY_MS));
  if (!weeks.includes(dayOf(monday))) weeks.push(dayOf(monday));
  offer(get("week"), weeks, weeks, dayOf(monday));
  const total = lost(now);
  get("summary").textContent = now.length ? `${gpuTime(total.gpu_s)} lost to waiting, ${money(total.paid)}` : "No cost is known of this week";
  get("cost").replaceChildren(...buildCost(now, before, monday !== newest));
  get("clusters-section").hidden = Boolean(state.cluster) || clusters.length < 2;
  get("clusters").replaceChildren(...(get("clusters-section").hidden ? [] : buildClusters(now, before)));
  get("actions").replaceChildren(...buildActions(acted));
  get("nodes").replaceChildren(...buildNodes(here.rows.filter(isNow), here.rows.filter((one) => !isNow(one)), !here.n_cut));
  get("jobs").replaceChildren(...buildJobs(here.rows.filter(isNow), !here.n_cut));
  get("main").hidden = false;
  get("access").hidden = true;
  const isChosen = Boolean(state.node && state.cluster);
  get("story-section").hidden = !isChosen;
  if (isChosen) {
    const story = await buildStory(span);
    if (mine !== round) return;
    get("story-title").textContent = `What happened to ${state.node}`;
    get("story").replaceChildren(...story);
    get("story-title").focus();
  }
  performance.mark("report-shown");
}

async function attempt() {
  try {
    await update();
  } catch (error) {
    const isRefused = error instanceof Refused;
    get("status").textContent = error.message;
    if (!isRefused) return;
    get("summary").textContent = "Nothing to show yet";
    get("main").hidden = true;
    get("access").hidden = false;
    get("token").focus();
  }
}

get("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", get("token").value);
  get("token").value = "";
  attempt();
});
get("week").addEventListener("change", () => show({ week: get("week").value, node: "" }));
get("cluster").addEventListener("change", () => show({ cluster: get("cluster").value, node: "" }));
addEventListener("hashchange", () => { readAddress(); attempt(); });
readAddress();
attempt();
