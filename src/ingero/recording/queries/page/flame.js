// Code paths as an icicle: the outermost function on top, width is time. Arrows walk, Enter zooms, Escape shows all.
import { ask, count, duration, make, note, percent, table } from "/parts.js";

const LEAST = 0.003; // of the shown width: narrower frames are not drawn
let op = "";
let path = []; // names from the root to the frame that fills the width

const find = (root) => {
  let here = root;
  for (const name of path) {
    const next = here.children.find((child) => child.name === name);
    if (!next) { path = []; return root; }
    here = next;
  }
  return here;
};

function lay(node, left, width, depth, names, into) {
  into.push({ node, left, width, depth, names });
  let x = left;
  for (const child of [...node.children].sort((a, b) => b.total_us - a.total_us)) {
    const part = node.total_us ? width * (child.total_us / node.total_us) : 0;
    if (part >= LEAST) lay(child, x, part, depth + 1, [...names, child.name], into);
    x += part;
  }
  return into;
}

const hue = (name) => [...name.split(" (")[0]].reduce((sum, letter) => (sum * 31 + letter.charCodeAt(0)) % 6, 7);

function hottest(root) {
  const own = new Map();
  const walk = (node, parent) => {
    if (!node.children.length && parent) {
      const found = own.get(parent.name) || { name: parent.name, us: 0, calls: 0, ops: new Set() };
      found.us += node.total_us;
      found.calls += node.calls;
      found.ops.add(node.name);
      own.set(parent.name, found);
    }
    node.children.forEach((child) => walk(child, node));
  };
  walk(root, null);
  return [...own.values()].sort((a, b) => b.us - a.us).slice(0, 20);
}

function tree(root, refresh) {
  const top = find(root);
  const frames = lay(top, 0, 1, 0, path, []);
  const details = make("p", "Point at a frame, or walk with the arrow keys.", { class: "note", id: "frame-details" });
  const box = make("div", undefined, { class: "flame", role: "tree", "aria-label": "Code paths by time", "aria-describedby": "frame-details" });
  box.style.height = `${(Math.max(...frames.map((frame) => frame.depth)) + 1) * 24}px`;
  const say = ({ node }) => {
    details.textContent = `${node.name}: ${duration(node.total_us)}, ${percent(root.total_us ? node.total_us / root.total_us : 0)}, ${count(node.calls)} calls`;
  };
  const elements = frames.map((frame, i) => {
    const element = make("div", frame.node.name, {
      role: "treeitem", "aria-level": frame.depth + 1, tabindex: i ? "-1" : "0", class: `frame h${hue(frame.node.name)}`,
      "data-key": `frame-${frame.names.join("/")}`, "aria-selected": "false",
      "aria-label": `${frame.node.name}, ${duration(frame.node.total_us)}, ${percent(root.total_us ? frame.node.total_us / root.total_us : 0)}`,
    });
    Object.assign(element.style, { left: `${frame.left * 100}%`, width: `${frame.width * 100}%`, top: `${frame.depth * 24}px` });
    element.addEventListener("pointerenter", () => say(frame));
    element.addEventListener("focus", () => say(frame));
    element.addEventListener("click", () => { path = frame.names; refresh(); });
    return element;
  });
  const go = (i) => {
    elements.forEach((element, at) => {
      element.tabIndex = at === i ? 0 : -1;
      element.setAttribute("aria-selected", String(at === i));
    });
    elements[i].focus();
  };
  const isChild = (of, one) => one.depth === of.depth + 1 && one.names.length && one.names.slice(0, -1).join("\n") === of.names.join("\n");
  box.addEventListener("keydown", (event) => {
    const now = elements.indexOf(document.activeElement);
    if (now < 0) return;
    const here = frames[now];
    const parent = frames.findIndex((one) => isChild(one, here));
    const siblings = frames.flatMap((one, i) => (parent >= 0 && isChild(frames[parent], one) ? [i] : []));
    const next = {
      ArrowDown: frames.findIndex((one) => isChild(here, one)), ArrowUp: parent,
      ArrowRight: siblings[siblings.indexOf(now) + 1], ArrowLeft: siblings[siblings.indexOf(now) - 1], Home: 0,
    }[event.key];
    if (event.key === "Enter" || event.key === " ") { path = here.names; refresh(); }
    else if (event.key === "Escape") { path = []; refresh(); }
    else if (next === undefined && !event.key.startsWith("Arrow")) return;
    else if (next !== undefined && next >= 0) go(next);
    event.preventDefault();
  });
  box.append(...elements);
  return [details, box];
}

export async function showStacks(query, { refresh }) {
  const { ops } = await ask("ops", query);
  const said = await ask("stacks", [query, op ? `op=${encodeURIComponent(op)}` : ""].filter(Boolean).join("&"));
  const names = [...new Set(ops.map((one) => one.operation))].sort();
  const choice = make("select", [make("option", "every operation", { value: "" }), ...names.map((name) => make("option", name, { value: name }))],
    { id: "flame-op", "data-key": "flame-op" });
  choice.value = op;
  choice.addEventListener("change", () => { op = choice.value; path = []; refresh(); });
  const all = make("button", "Show all", { type: "button", "data-key": "flame-all" });
  all.disabled = !path.length;
  all.addEventListener("click", () => { path = []; refresh(); });
  const tools = make("div", [make("label", "Stacks of", { for: "flame-op" }), choice, all], { class: "tools" });
  if (!said.root.children.length) {
    return [tools, note("No row of this part carries a stack. Record them with `ingero trace --stack`.")];
  }
  const left = said.left_out ? `; ${count(said.left_out)} rarer stacks are left out` : "";
  const share = said.call_share === 1 ? "" : said.call_share === null ? " How many calls have none was not counted."
    : ` ${percent(said.call_share)} of these operations' calls have a stack: calls and times are of those alone.`;
  return [
    tools, note(`${count(said.rows)} rows with ${count(said.stacks)} stacks${left}. Time is that of the calls, not of the CPU.${share}`),
    ...tree(said.root, refresh),
    table("hottest", "Functions that make the calls, most time first", [
      ["Function", (one) => one.name],
      ["Calls what", (one) => [...one.ops].sort().join(", ")],
      ["Calls", (one) => count(one.calls), (one) => one.calls],
      ["Time in them", (one) => duration(one.us), (one) => one.us],
    ], hottest(said.root)),
  ];
}
