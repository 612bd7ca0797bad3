// What every view is made of. Everything shown comes from traced programs: it is set as text, never as markup.

export const get = (id) => document.getElementById(id);

export function make(name, content, attributes = {}) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (Array.isArray(content)) element.append(...content);
  else if (content !== undefined) element.textContent = content;
  return element;
}

export function svg(name, attributes, children = []) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

export class Refused extends Error {}

// A reading request that no answer came to is sent once more: a browser cancels what connects while any interface of its machine
// comes or goes (a VPN, a container), and the server is there.
const AGAIN_MS = 300;
const PATIENCE_MS = 120000; // answers about a large recording take long
export async function reach(address, options, silent, patience_ms = PATIENCE_MS) {
  try {
    return await fetchWhole(address, options, patience_ms);
  } catch (error) {
    if (error.name === "AbortError") throw new Error(silent);
    await new Promise((resolve) => setTimeout(resolve, AGAIN_MS));
  }
  try {
    return await fetchWhole(address, options, patience_ms);
  } catch {
    throw new Error(silent);
  }
}

// Given up when nothing came for so long: a connection may be dead at its other end only. A large answer over a slow line has
// all the time that it needs.
async function fetchWhole(address, options, patience_ms) {
  const control = new AbortController();
  const light = () => setTimeout(() => control.abort(), patience_ms);
  let fuse = light();
  try {
    const answer = await fetch(address, { ...options, signal: control.signal });
    const parts = [];
    const reader = answer.body && answer.body.getReader();
    for (let part = reader && (await reader.read()); part && !part.done; part = await reader.read()) {
      clearTimeout(fuse);
      fuse = light();
      parts.push(part.value);
    }
    return new Response(parts.length ? new Blob(parts) : null, { status: answer.status, headers: answer.headers });
  } finally {
    clearTimeout(fuse);
  }
}

const kept = new Map(); // address → what was answered last, with its tag

export async function ask(name, query = "") {
  const address = `/api/v1/${name}${query ? `?${query}` : ""}`;
  const before = kept.get(address);
  const headers = {};
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  if (before) headers["If-None-Match"] = before.tag;
  const answer = await reach(address, { headers }, "The server does not answer. Is `ingero dashboard` still running?");
  if (answer.status === 304) return before.body;
  if (answer.status === 401) {
    kept.clear();
    throw new Refused(token ? "The server does not know this token." : "");
  }
  let body;
  try {
    body = await answer.json();
  } catch {
    throw new Error(`The server answered HTTP ${answer.status} without JSON.`);
  }
  if (!answer.ok) throw new Error(body.error);
  if (kept.size > 40) kept.delete(kept.keys().next().value);
  kept.set(address, { tag: answer.headers.get("ETag"), body });
  return body;
}

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 1 });
export const count = (value) => value.toLocaleString("en");
export const percent = (share) => `${number.format(share * 100)} %`;

export function duration(us) {
  if (us >= 1e6) return `${(us / 1e6).toFixed(2)} s`;
  if (us >= 1e3) return `${number.format(us / 1e3)} ms`;
  return `${number.format(us)} µs`;
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let size = Math.abs(value);
  let unit = 0;
  while (size >= 1024 && unit < units.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${value < 0 ? "−" : ""}${number.format(size)} ${units[unit]}`;
}

export function who(one) {
  const rank = one.rank === null || one.rank === undefined ? "" : `, rank ${one.rank}`;
  return `${one.process || "node"}${one.pid ? ` (${one.pid}${rank})` : ""}${one.node ? ` on ${one.node}` : ""}`;
}

const sorting = new Map(); // table → column and direction that the reader chose

// Columns are [heading, cell of a row, value to sort by]; a value makes the column sortable and right-aligned.
export function table(key, caption, columns, rows) {
  const body = make("tbody");
  const heads = columns.map(([text, , value], i) => {
    const head = make("th", value ? undefined : text, { scope: "col" });
    if (value) {
      head.className = "number";
      const button = make("button", text, { type: "button", "data-key": `sort-${key}-${i}` });
      button.addEventListener("click", () => {
        const now = sorting.get(key);
        sorting.set(key, { i, isDown: !(now && now.i === i && now.isDown) });
        fill();
      });
      head.append(button);
    }
    return head;
  });
  const fill = () => {
    const chosen = sorting.get(key);
    const shown = [...rows];
    if (chosen) {
      const value = columns[chosen.i][2];
      shown.sort((a, b) => (chosen.isDown ? value(b) - value(a) : value(a) - value(b)));
    }
    heads.forEach((head, i) => {
      if (chosen && chosen.i === i) head.setAttribute("aria-sort", chosen.isDown ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...shown.map((row) => make("tr", columns.map(([, cell, value], i) =>
      make(i ? "td" : "th", cell(row), i ? { class: value ? "number" : "" } : { scope: "row" })))));
  };
  fill();
  const whole = make("table", [make("caption", caption), make("thead", [make("tr", heads)]), body]);
  return make("div", [whole], { class: "scroll", tabindex: "0", role: "region", "aria-label": caption });
}

export const note = (text) => make("p", text, { class: "note" });

// A course over time as an area; points are [seconds, value]. The figure's caption says in words what it shows.
export function course(text, points, top, unit) {
  const [first, last] = [points[0][0], points[points.length - 1][0]];
  const span = Math.max(last - first, 1e-9);
  const at = points.map(([s, value]) => [((s - first) / span) * 1000, 100 - (Math.max(value, 0) / Math.max(top, 1e-9)) * 98]);
  const line = at.map(([x, y]) => `${x.toFixed(1)},${y.toFixed(1)}`).join(" ");
  const image = svg("svg", { viewBox: "0 0 1000 100", preserveAspectRatio: "none", role: "img", "aria-label": text }, [
    svg("polygon", { points: `0,100 ${line} 1000,100` }),
    svg("polyline", { points: line }),
  ]);
  const scale = make("div", [make("span", unit(top)), make("span", unit(0))], { class: "scale", "aria-hidden": "true" });
  const ends = make("div", [make("span", `${first.toFixed(2)} s`), make("span", `${last.toFixed(2)} s`)], { class: "ends", "aria-hidden": "true" });
  return make("figure", [make("figcaption", text), make("div", [scale, image], { class: "plot" }), ends]);
}
