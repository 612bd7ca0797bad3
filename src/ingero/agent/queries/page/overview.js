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
  if (one.ruled_out.length) row("not it", ...one.ruled_out.map((out) => `${out.name}: ${out.why}`));
  if (one.fix.length) row("do", ...one.fix);
  const seen = one.coverage.seen === null ? "" : ` of at least ${count(one.coverage.seen)} seen`;
  const lost = one.coverage.lost ? `, ${count(one.coverage.lost)} lost` : "";
  row("data", `${one.coverage.state}: ${count(one.coverage.stored)} rows${seen}${lost}`);
  const button = make("button", "Show on the timeline", { type: "button", "data-key": `show-${one.id}`, "aria-label": `Show on the timeline: ${one.title}` });
  button.addEventListener("click", () => showSpan(one.start_s, one.end_s));
  article.append(list, button);
  return article;
}

export async function showIncidents(query, { showSpan }) {
  const { incidents, window: part } = await ask("incidents", query);
  const seconds = part.duration_s.toFixed(1);
  const looked = part.truncated
    ? `Looked at the newest ${count(part.events)} of ${count(part.events_stored)} events: ${seconds} s.`
    : `Looked at ${count(part.events)} events: ${seconds} s.`;
  if (incidents.length) return [note(looked), ...incidents.map((one) => card(one, showSpan))];
  const says = part.events ? "No incident: every rule looked and found nothing." : "There are no events here yet.";
  return [make("p", says, { class: "healthy" }), note(looked)];
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
