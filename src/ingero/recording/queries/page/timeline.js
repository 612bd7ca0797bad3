// What each thread was doing when. Keys: + and − zoom, arrows move, 0 shows all; drag selects a span.
import { ask, count, make, note, percent, svg, table, who } from "/parts.js";

const BINS = 240;
let view = null; // [from, to] in seconds from the part's first event, or null for all

export const setView = (from, to) => { view = [from, to]; };
export const resetView = () => { view = null; };
export const isZoomed = () => view !== null;

function bars(track) {
  const filled = new Array(BINS).fill(0);
  return track.shares.map(([category, shares]) => {
    const parts = [];
    shares.forEach((share, i) => {
      if (!share) return;
      const height = Math.min(share, 100 - filled[i]);
      parts.push(`M${i} ${100 - filled[i]}h1v${-height}h-1z`);
      filled[i] += height;
    });
    return svg("path", { d: parts.join(""), class: `c${category}` });
  });
}

function slices(track, [from, to]) {
  const scale = BINS / Math.max(to - from, 1e-12);
  return track.slices.map(([start, us, op, category, depth]) => {
    const x = (start - from) * scale;
    const width = Math.max((us / 1e6) * scale, 0.3);
    const top = Math.min(depth, 3) * 20;
    const text = `${track.ops[op]} at ${start.toFixed(6)} s for ${us.toFixed(1)} µs`;
    return svg("rect", { x, width, y: top, height: 100 - top, class: `c${category}` }, [Object.assign(svg("title", {}), { textContent: text })]);
  });
}

function lane(label, children, text) {
  const image = svg("svg", { viewBox: `0 0 ${BINS} 100`, preserveAspectRatio: "none", role: "img", "aria-label": text }, children);
  return make("div", [make("div", label, { class: "label", title: label }), image], { class: "lane" });
}

const thread = (track) => (track.tid === track.pid ? "" : ` ${track.thread} ${track.tid}`);
const describe = (track) => `${who(track)}${thread(track)} · ${track.what}`;

function incidentLane(incidents, [from, to]) {
  const scale = BINS / Math.max(to - from, 1e-12);
  const inView = incidents.filter((one) => one.end_s >= from && one.start_s <= to);
  if (!inView.length) return [];
  const height = 100 / inView.length;
  const marks = inView.map((one, i) => svg("rect", {
    x: (Math.max(one.start_s, from) - from) * scale,
    width: Math.max((Math.min(one.end_s, to) - Math.max(one.start_s, from)) * scale, 1),
    y: i * height, height: height * 0.85, class: `incident-${one.severity.toLowerCase()}`,
  }, [Object.assign(svg("title", {}), { textContent: `${one.severity}: ${one.title}` })]));
  return [lane("incidents", marks, `Incidents in view: ${inView.map((one) => one.title).join("; ")}`)];
}

function legend(said) {
  const used = new Set(said.tracks.flatMap((track) => track.shares.map(([category]) => category)));
  const items = said.categories.flatMap((name, i) => (used.has(i)
    ? [make("li", [make("span", undefined, { class: `key c${i}`, "aria-hidden": "true" }), name])] : []));
  return make("ul", items, { class: "legend", "aria-label": "Colours" });
}

function axis(from, to) {
  const step = (to - from) / 4;
  const digits = Math.min(Math.max(1 - Math.floor(Math.log10(Math.max(step, 1e-9))), 0), 9);
  const marks = [0, 1, 2, 3, 4].map((i) => make("span", `${(from + i * step).toFixed(digits)} s`));
  return make("div", [make("div", "", { class: "label" }), make("div", marks, { class: "ends" })], { class: "lane axis", "aria-hidden": "true" });
}

function move(said, how, refresh) {
  const [from, to] = [said.from_s, said.to_s];
  const [width, middle] = [to - from, (from + to) / 2];
  const spans = {
    in: [middle - width / 4, middle + width / 4],
    out: [middle - width, middle + width],
    earlier: [from - width / 2, to - width / 2],
    later: [from + width / 2, to + width / 2],
    all: [0, said.last_s],
  };
  let [first, last] = spans[how];
  if (first < 0) [first, last] = [0, Math.min(last - first, said.last_s)];
  if (last > said.last_s) [first, last] = [Math.max(first - (last - said.last_s), 0), said.last_s];
  view = last - first >= said.last_s * 0.999 ? null : [first, last];
  refresh();
}

const KEYS = { "+": "in", "=": "in", "-": "out", ArrowLeft: "earlier", ArrowRight: "later", 0: "all" };
const BUTTONS = { in: "Zoom in", out: "Zoom out", earlier: "Earlier", later: "Later", all: "Show all" };

function selecting(drawing, said, refresh) {
  let begin = null;
  const band = make("div", undefined, { class: "band", hidden: "" });
  const place = (event) => {
    const box = drawing.querySelector("svg").getBoundingClientRect();
    return { box, share: Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1) };
  };
  drawing.addEventListener("pointerdown", (event) => {
    if (event.button || !event.target.closest("svg")) return;
    begin = place(event).share;
    drawing.setPointerCapture(event.pointerId);
  });
  drawing.addEventListener("pointermove", (event) => {
    if (begin === null) return;
    const { box, share } = place(event);
    const outer = drawing.getBoundingClientRect();
    band.hidden = false;
    band.style.left = `${box.left - outer.left + Math.min(begin, share) * box.width}px`;
    band.style.width = `${Math.abs(share - begin) * box.width}px`;
  });
  drawing.addEventListener("pointerup", (event) => {
    if (begin === null) return;
    const { share } = place(event);
    const [from, to] = [Math.min(begin, share), Math.max(begin, share)];
    begin = null;
    band.hidden = true;
    if (to - from < 0.005) return;
    const width = said.to_s - said.from_s;
    setView(said.from_s + from * width, said.from_s + to * width);
    refresh();
  });
  drawing.append(band);
}

export async function showTimeline(query, { refresh }) {
  const span = view ? `from_s=${view[0]}&to_s=${view[1]}` : "";
  const said = await ask("timeline", [query, `bins=${BINS}`, span].filter(Boolean).join("&"));
  const { incidents } = await ask("incidents", query);
  if (!said.tracks.length && !view) return [note("There are no calls or waits here yet.")];
  const seen = [said.from_s, said.to_s];
  const tools = make("div", Object.entries(BUTTONS).map(([how, text]) => {
    const button = make("button", text, { type: "button", "data-key": `timeline-${how}` });
    button.addEventListener("click", () => move(said, how, refresh));
    return button;
  }), { class: "tools", role: "group", "aria-label": "What is in view" });
  const isSingle = said.tracks.some((track) => track.slices.length);
  const showing = make("p", `${seen[0].toFixed(6)} s to ${seen[1].toFixed(6)} s${isSingle ? ", every row drawn; point at one for its name" : ""}${view ? "; following pauses while zoomed" : ""}`, { class: "note" });
  const isOneNode = new Set(said.tracks.map((track) => track.node)).size < 2;
  const short = (track) => `${track.process} (${track.pid})${thread(track)} · ${track.what}${isOneNode ? "" : ` · ${track.node}`}`;
  const lanes = said.tracks.map((track) => lane(short(track), isSingle ? slices(track, seen) : bars(track),
    `${describe(track)}: busy ${track.busy_pct} % of the view${track.row_share === 1 ? "" : " by the rows alone"}, ${count(track.rows)} rows`));
  const drawing = make("div", [...incidentLane(incidents, seen), ...lanes, axis(...seen)],
    { class: "drawing", tabindex: "0", role: "group", "data-key": "timeline",
      "aria-label": "Timeline. Plus and minus zoom, arrows move, zero shows all. The same as a table follows." });
  drawing.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    move(said, KEYS[event.key], refresh);
  });
  if (lanes.length) selecting(drawing, said, refresh);
  const left = said.tracks_left_out ? [note(`${count(said.tracks_left_out)} quieter tracks are left out.`)] : [];
  const mean = (shares) => shares.reduce((sum, share) => sum + share, 0) / shares.length / 100;
  const rows = table("tracks", "Tracks in view", [
    ["Track", describe],
    ["Mostly", (track) => track.shares.map(([c, shares]) => [mean(shares), said.categories[c]]).sort((a, b) => b[0] - a[0])
      .slice(0, 3).map(([share, name]) => `${name} ${percent(share)}`).join(", ")],
    ["Busy", (track) => percent(track.busy_pct / 100), (track) => track.busy_pct],
    ["Rows", (track) => count(track.rows), (track) => track.rows],
    ["Of all calls", (track) => track.row_share === null ? "not counted" : percent(track.row_share), (track) => track.row_share ?? -1],
  ], said.tracks);
  const isWhole = said.tracks.every((track) => track.row_share === 1);
  const partly = isWhole ? [] : [note("Not every call has a row: what is drawn, and how busy a track is, is of the rows alone. The table says which share of the calls they are.")];
  const empty = said.tracks.length ? [] : [note("Nothing happened in this span.")];
  return [tools, showing, legend(said), ...empty, drawing, ...left, ...partly, rows];
}
