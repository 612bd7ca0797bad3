// The heat map: a byte a rank and column, drawn on a canvas of one pixel a column. Where more ranks than pixels are shown, a
// pixel has the worst of its ranks.

const UNKNOWN = 255;
const TOP = 250;
const WIDTHS = [60, 180]; // columns of a map that has not more yet
// From a dark blue over a pale grey to red: neither end is green, and the middle is the lightest.
const STOPS = [[38, 70, 120], [75, 125, 165], [190, 200, 200], [240, 200, 110], [230, 115, 40], [175, 20, 30]];

function color(level) {
  const at = (Math.min(level, TOP) / TOP) * (STOPS.length - 1);
  const low = Math.min(Math.floor(at), STOPS.length - 2);
  return STOPS[low].map((from, i) => Math.round(from + (STOPS[low + 1][i] - from) * (at - low)));
}

const PALETTE = new Uint32Array(256);
for (let level = 0; level <= TOP; level += 1) {
  const [red, green, blue] = color(level);
  PALETTE[level] = (255 << 24) | (blue << 16) | (green << 8) | red; // little endian RGBA
}
export const css = (level) => `rgb(${color(level).join(" ")})`;

export class Heat {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.clear();
  }

  clear() {
    this.names = [];
    this.columns = []; // oldest first, each a Uint8Array with a byte a row
    this.walls = []; // seconds since 1970 of each column
    this.now = null; // the column of this moment, which is not kept
    this.version = 0;
    this.taken = 0;
    this.top = 0;
    this.n_shown = 0;
    this.isWhole = true;
    this.facts = null;
  }

  // Takes an answer of /live/levels; returns whether rows or kept columns changed.
  take(buffer) {
    const length = new DataView(buffer).getUint32(0, true);
    const facts = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    const isOther = facts.names !== undefined;
    if (isOther) {
      this.names = facts.names;
      this.columns = [];
      this.walls = [];
    }
    this.facts = facts;
    const rows = facts.n_rows;
    const all = facts.walls_s.map((_, i) => new Uint8Array(buffer, 4 + length + i * rows, rows));
    this.now = all.pop();
    this.nowWall = facts.walls_s.pop();
    this.columns.push(...all);
    this.walls.push(...facts.walls_s);
    const extra = this.columns.length - facts.n_columns;
    if (extra > 0) {
      this.columns.splice(0, extra);
      this.walls.splice(0, extra);
    }
    this.version = facts.version;
    this.taken = facts.taken;
    if (this.isWhole || this.n_shown > rows) this.showAll();
    return isOther || all.length > 0;
  }

  showAll() {
    this.top = 0;
    this.n_shown = this.names.length;
    this.isWhole = true;
  }

  zoom(row, factor) {
    const wanted = Math.round(this.n_shown * factor);
    this.n_shown = Math.max(Math.min(8, this.names.length), Math.min(wanted, this.names.length));
    this.isWhole = this.n_shown === this.names.length;
    this.top = Math.round(Math.min(Math.max(row - this.n_shown / 2, 0), this.names.length - this.n_shown));
  }

  reveal(row) {
    if (row < this.top) this.top = row;
    if (row >= this.top + this.n_shown) this.top = row - this.n_shown + 1;
  }

  // One more than the columns that are kept: that of this moment.
  get width() {
    if (!this.facts) return 1;
    return 1 + (WIDTHS.find((width) => this.columns.length <= width) || this.facts.n_columns);
  }

  get beginWall() { return this.nowWall - (this.width - 1) * this.facts.column_s; }

  column(x) {
    const at = x - (this.width - 1 - this.columns.length);
    return at === this.columns.length ? this.now : this.columns[at];
  }

  wall(x) {
    const at = x - (this.width - 1 - this.columns.length);
    return at === this.columns.length ? this.nowWall : this.walls[at];
  }

  level(x, row) {
    const column = this.column(x);
    return column && column[row] !== UNKNOWN ? column[row] : undefined;
  }

  // Everything, in one image.
  draw() {
    const height = this.fit();
    const image = this.context.createImageData(this.width, height);
    const pixels = new Uint32Array(image.data.buffer);
    for (let x = this.width - 1 - this.columns.length; x < this.width; x += 1) this.paint(this.column(x), pixels, x, this.width, height);
    this.context.putImageData(image, 0, 0);
  }

  // The column of this moment alone.
  drawNow() {
    const height = this.fit();
    const image = this.context.createImageData(1, height);
    this.paint(this.now, new Uint32Array(image.data.buffer), 0, 1, height);
    this.context.putImageData(image, this.width - 1, 0);
  }

  fit() {
    const height = Math.max(1, Math.min(this.n_shown, Math.round(this.canvas.clientHeight * (window.devicePixelRatio || 1))));
    if (this.canvas.width !== this.width || this.canvas.height !== height) {
      this.canvas.width = this.width;
      this.canvas.height = height;
    }
    return height;
  }

  paint(column, pixels, x, width, height) {
    if (!column) return;
    for (let y = 0; y < height; y += 1) {
      const from = this.top + Math.floor((y * this.n_shown) / height);
      const to = this.top + Math.floor(((y + 1) * this.n_shown) / height);
      let worst = -1;
      for (let row = from; row < to; row += 1) if (column[row] !== UNKNOWN && column[row] > worst) worst = column[row];
      if (worst >= 0) pixels[y * width + x] = PALETTE[worst];
    }
  }

  // The rows that are worst now.
  worst(count) {
    const rows = [];
    for (let row = 0; row < this.now.length; row += 1) if (this.now[row] !== UNKNOWN) rows.push(row);
    return rows.sort((a, b) => this.now[b] - this.now[a]).slice(0, count);
  }
}
