// Incidents, and the machine.
import { ask, count, course, duration, make, note, percent, who } from "/parts.js";

const SEVERITIES = { HIGH: "high", MEDIUM: "medium", LOW: "low" };

function card(one, showSpan) {
  const article = make("article", undefined, { class: `incident ${SEVERITIES[one.severity] || "low"}` });
  const badge = make("span", one.severity, { class: "badge" });
  article.append(make("h2", [badge, ` ${one.title}`]));
  const list = make("dl");
  const row = (term, ...values) => list.append(make("dt", term), ...values.map((value) => make("dd", Array.isArray(value) ? value : String(value))));
  row("who", who(one));
  const part = one.window_share ? `, ${percent(one.window_share)} of the time watched` : "";
  row("when", `${one.start_s.toFixed(3)} s to ${one.end_s.toFixed(3)} s; lost ${duration(one.lost_ms * 1000)}${part}`);
  for (const cause of one.causes) {
    const share = percent(cause.share);
    const bar = make("meter", share, { min: 0, max: 1, value: cause.share, "aria-label": `share of the lost time: ${share}` });
    row("cause", [bar, make("strong", ` ${share} ${cause.name}`)], ...cause.evidence);
  }
  if (one.places.length) row("where", ...one.places);
  if (one.ruled_out.length) row("not it", ...one.ruled_out.map((out) => `${out.name}: ${out.why}`));
  if (one.fix.length) row("do", ...one.fix);
  const most = one.coverage.at_most;
  let seen = one.coverage.seen === null ? "" : ` of at least ${count(one.coverage.seen)} seen`;
  if (most !== null) seen = ` of about ${count(one.coverage.seen)}, at most ${count(most)} seen`;
  const lost = one.coverage.lost ? `, ${count(one.coverage.lost)} lost` : "";
  row("data", `${one.coverage.state}: ${count(one.coverage.stored)} rows${seen}${lost}`);
  const button = make("button", "Show on the timeline", { type: "button", "data-key": `show-${one.id}`, "aria-label": `Show on the timeline: ${one.title}` });
  button.addEventListener("click", () => showSpan(one.start_s, one.end_s));
  article.append(list, button);
  return article;
}

const ofCalls = (one) => one.at_most === null ? count(one.seen) : `about ${count(one.seen)} (at most ${count(one.at_most)})`;
const plain = (rules) => rules.map((rule) => rule.replaceAll("_", " ")).join(", ");
const many = (n, one) => `${count(n)} ${one}${n === 1 ? "" : "s"}`;

function facts(rows) {
  return make("dl", rows.flatMap(([term, value]) => (value ? [make("dt", term), make("dd", value)] : [])));
}

function openCard(one) {
  const title = one.title || plain(one.rules);
  return make("article", [
    make("h3", [make("span", "UNKNOWN", { class: "badge" }), ` ${title}`]),
    facts([["who", who(one)], ["missing", one.missing], ["do", one.how]]),
  ], { class: "unknown" });
}

function lookedCard(looked, part) {
  const seconds = part.duration_s.toFixed(1);
  const asked = part.asked_s ? ` (${(part.asked_s[1] - part.asked_s[0]).toFixed(1)} s were asked for)` : "";
  const events = part.truncated
    ? `the newest ${count(part.events)} of ${count(part.events_stored)} events`
    : many(part.events, "event");
  const groups = part.coverage.map((one) => `${one.group} ${count(one.stored)} of ${ofCalls(one)}`).join(", ");
  return [make("h2", "What was looked at"), make("article", [facts([
    ["part", `${events} of ${part.processes === 1 ? "1 process" : `${count(part.processes)} processes`}: ${seconds} s${asked}`],
    ["not there", part.missing],
    ["calls with a row", groups],
    ["judged", plain(looked.judged) || "nothing"],
    ["could not be judged", plain(looked.unknown)],
    ["nothing of it recorded", plain(looked.nothing_recorded)],
  ])], { class: "looked" })];
}

function verdict(looked, part) {
  if (!part.events) return make("p", part.events_stored ? "There are no events in this part." : "There are no events here yet.", { class: "open" });
  const checked = looked.judged.length
    ? `${many(looked.judged.length, "kind")} of problem looked for and not found`
    : "nothing could be looked for";
  const open = looked.unknown.length ? `; ${count(looked.unknown.length)} could not be judged, see below` : "";
  const rest = looked.nothing_recorded.length ? `; of ${count(looked.nothing_recorded.length)} nothing was recorded` : "";
  const isHealthy = looked.judged.length && !looked.unknown.length && !part.missing;
  return make("p", `No incident: ${checked}${open}${rest}.`, { class: isHealthy ? "healthy" : "open" });
}

export async function showIncidents(query, { showSpan }) {
  const { incidents, unknown, looked, window: part } = await ask("incidents", query);
  const open = unknown.length ? [make("h2", "What could not be judged"), ...unknown.map(openCard)] : [];
  const found = incidents.length ? incidents.map((one) => card(one, showSpan)) : [verdict(looked, part)];
  return [...found, ...open, ...lookedCard(looked, part)];
}

function load(shots, label, key) {
  const first = Date.parse(shots[0].timestamp);
  const points = shots.map((shot) => [(Date.parse(shot.timestamp) - first) / 1000, shot[key]]);
  const most = Math.max(...points.map(([, value]) => value));
  const now = points[points.length - 1][1];
  const isPercent = key.endsWith("percent");
  const unit = (value) => (isPercent ? `${value.toFixed(0)} %` : value.toFixed(1));
  return course(`${label}: ${unit(now)} at the end, ${unit(most)} at most`, points, isPercent ? 100 : Math.max(most, 1), unit);
}

export async function showMachine(query) {
  const { snapshots } = await ask("snapshots");
  const known = await ask("capabilities", query);
  const shown = snapshots.length < 2
    ? [note("The recording holds no samples of the machine's load.")]
    : [load(snapshots, "CPU", "cpu_percent"), load(snapshots, "Memory", "mem_percent"), load(snapshots, "Load average", "load_avg")];
  const items = (isThere) => known.filter((one) => one.available === isThere)
    .map((one) => make("li", isThere || !one.required_tool ? one.label : `${one.label}: needs ${one.required_tool}`));
  return [
    ...shown,
    make("h2", "In this recording"), make("ul", items(true), { class: "columns" }),
    make("h2", "Not in it"), make("ul", items(false), { class: "columns" }),
  ];
}
