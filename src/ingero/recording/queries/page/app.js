// Which view is shown, of which part, and when it is asked for again.
import { ask, count, get, make, Refused } from "/parts.js";
import { showIncidents, showMachine } from "/overview.js";
import { showStacks } from "/flame.js";
import { showCollectives, showMemory, showOps } from "/tables.js";
import { isZoomed, resetView, setView, showTimeline } from "/timeline.js";

const VIEWS = {
  incidents: showIncidents, timeline: showTimeline, stacks: showStacks, ops: showOps,
  memory: showMemory, collectives: showCollectives, machine: showMachine,
};
const LEAST_MS = 2000;
const REST = 4; // times as long as the last answer took: following never takes more than a fifth of the server
let active = "incidents";
let round = 0; // of the newest request: an older answer is dropped
let timer = 0;
let isLinked = false;
let shown = {}; // view → what was drawn, so that an unchanged answer is not drawn again

// Not the panel's own id: the browser would begin there with the Tab key.
function asked() {
  const view = location.hash.replace("#view=", "");
  return VIEWS[view] ? view : "";
}

function mark(name) {
  if (!performance.getEntriesByName(name).length) performance.mark(name);
}

function summarise(o) {
  const parts = [o.file, `${count(o.event_count)} events`];
  if (o.duration_s !== undefined) parts.push(`${o.duration_s.toFixed(1)} s from ${o.first.slice(0, 19).replace("T", " ")} UTC`);
  if (o.gpu && o.gpu.model) parts.push(o.gpu.model);
  if (get("summary").textContent !== parts.join(" · ")) get("summary").textContent = parts.join(" · ");
  mark("summary-shown");
}

// Beside every view: no number on the page has what is named here.
function warn(recording) {
  const lines = [recording.missing, ...recording.not_probed].filter(Boolean);
  const said = lines.join("\n");
  if (get("missing").dataset.said === said) return;
  get("missing").dataset.said = said;
  get("missing").hidden = !lines.length;
  get("missing").replaceChildren(make("ul", lines.map((line) => make("li", line))));
}

async function linkFleet() {
  const { fleet } = await ask("links");
  if (fleet) get("fleet").href = fleet;
  get("fleet").hidden = !fleet;
}

function fail(error) {
  const isRefused = error instanceof Refused;
  const wasHidden = get("access").hidden;
  get("access").hidden = !isRefused;
  if (!isRefused || error.message) get("status").textContent = error.message;
  if (!isRefused && !performance.getEntriesByName("summary-shown").length) get("summary").textContent = "Nothing to show yet";
  if (isRefused && wasHidden) get("token").focus();
  if (isRefused) {
    get("summary").textContent = "Locked";
    shown = {};
    warn({ missing: "", not_probed: [] });
    for (const id of Object.keys(VIEWS)) get(id).replaceChildren();
  }
}

function draw(panel, content) {
  const key = panel.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  const scrolled = window.scrollY;
  panel.replaceChildren(...content);
  if (key !== undefined) {
    const again = [...panel.querySelectorAll("[data-key]")].find((element) => element.dataset.key === key);
    (again && !again.disabled ? again : panel).focus({ preventScroll: true });
  }
  window.scrollTo({ top: scrolled });
}

async function update({ isForced = false } = {}) {
  clearTimeout(timer);
  const mine = ++round;
  const began = performance.now();
  const view = active;
  const panel = get(view);
  if (!panel.hasChildNodes()) draw(panel, [make("p", "Looking…", { class: "note loading" })]);
  panel.setAttribute("aria-busy", "true");
  try {
    const recording = await ask("recording");
    if (!isLinked) await linkFleet();
    isLinked = true;
    summarise(recording);
    warn(recording);
    const query = get("part").value;
    const state = JSON.stringify([recording, query]);
    if (isForced || shown[view] !== state) {
      const content = await VIEWS[view](query, { refresh: () => update({ isForced: true }), showSpan });
      if (mine !== round) return;
      draw(panel, content);
      shown[view] = state;
      mark(`${view}-shown`);
    }
    get("status").textContent = "";
    get("access").hidden = true;
  } catch (error) {
    if (mine !== round) return;
    if (panel.querySelector(".loading")) panel.replaceChildren();
    fail(error);
  }
  panel.setAttribute("aria-busy", "false");
  timer = setTimeout(follow, Math.max(LEAST_MS, REST * (performance.now() - began)));
}

function follow() {
  const isPaused = active === "timeline" && isZoomed();
  if (get("live").checked && get("access").hidden && !document.hidden && !isPaused) update();
  else timer = setTimeout(follow, LEAST_MS);
}

function choose(view, { isFocused = false } = {}) {
  active = view;
  for (const id of Object.keys(VIEWS)) {
    const isChosen = id === view;
    get(id).hidden = !isChosen;
    get(`tab-${id}`).setAttribute("aria-selected", String(isChosen));
    get(`tab-${id}`).tabIndex = isChosen ? 0 : -1;
  }
  if (isFocused) get(`tab-${view}`).focus();
  if (asked() !== view) history.replaceState(null, "", `#view=${view}`);
  update();
}

function showSpan(from, to) {
  const room = Math.max((to - from) * 0.1, 1e-4);
  setView(Math.max(from - room, 0), to + room);
  delete shown.timeline;
  choose("timeline", { isFocused: true });
}

const names = Object.keys(VIEWS);
get("tabs").addEventListener("click", (event) => {
  const tab = event.target.closest("[role=tab]");
  if (tab) choose(tab.getAttribute("aria-controls"));
});
get("tabs").addEventListener("keydown", (event) => {
  const steps = { ArrowRight: 1, ArrowLeft: -1 };
  const at = names.indexOf(active);
  const next = { Home: 0, End: names.length - 1 }[event.key] ?? (event.key in steps ? (at + steps[event.key] + names.length) % names.length : undefined);
  if (next === undefined) return;
  event.preventDefault();
  choose(names[next], { isFocused: true });
});
get("part").addEventListener("change", () => { resetView(); update({ isForced: true }); });
get("live").addEventListener("change", () => { if (get("live").checked) update(); });
get("access").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", get("token").value);
  get("token").value = "";
  update({ isForced: true });
});
document.addEventListener("visibilitychange", () => {
  if (document.hidden) return;
  clearTimeout(timer);
  follow();
});
window.addEventListener("hashchange", () => { if (asked() && asked() !== active) choose(asked()); });
choose(asked() || "incidents");
