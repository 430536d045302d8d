// What the charts over the step share: a canvas with one row per device, a time axis, hover, selection and keys.

const KIND_NAMES = ["forward", "backward", "input gradient", "weight gradients"];
const AFTER = 0.02; // of the step: the strip behind it, for the optimizer's step

/** Colours of the page as they are now; canvases do not follow a style sheet by themselves. */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const read = (name) => style.getPropertyValue(`--${name}`).trim();
  return {
    kinds: ["forward", "backward", "input", "weight"].map((name) => read(`kind-${name}`)),
    onKinds: read("on-kind"),
    parts: ["parameters", "gradients", "optimizer", "activations", "transient"].map((name) => read(`part-${name}`)),
    ink: read("ink"),
    muted: read("muted"),
    line: read("line"),
    panel: read("panel"),
    idle: read("idle"),
    limit: read("limit"),
    accent: read("accent"),
    font: getComputedStyle(document.body).fontFamily,
  };
}

class LaneChart {
  constructor(app, canvas, { top, row, gap }) {
    Object.assign(this, { app, canvas, top, row, gap });
    this.hovered = null;
    canvas.addEventListener("pointermove", (event) => this.hover(event));
    canvas.addEventListener("pointerleave", () => this.leave());
    canvas.addEventListener("pointerdown", (event) => this.press(event));
    canvas.addEventListener("pointerup", (event) => this.release(event));
    canvas.addEventListener("pointercancel", () => (this.pressed = null));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
  }

  get lanes() {
    return this.app.schedule.lanes;
  }

  get timeline() {
    return this.app.result.timeline;
  }

  /** When a lane's actions start and end: as predicted, or as they were recorded. */
  timesOf(lane, measured = false) {
    return (measured ? this.app.recorded : this.timeline).lanes[lane];
  }

  /** Whether a place of a row, in pixels below its top, is of the recorded step. */
  isMeasured() {
    return false;
  }

  /** The devices that share each row of the chart. */
  get rows() {
    return this.lanes.map((_, lane) => [lane]);
  }

  /** The part of the step that is drawn. */
  get view() {
    return this.app.view;
  }

  rowTop(lane) {
    const row = lane < this.lanes.length ? this.rows.findIndex((own) => own.includes(lane)) : this.rows.length;
    return this.top + row * (this.row + this.gap);
  }

  x(time) {
    const { from, to } = this.view;
    return this.left + ((time - from) / (to - from)) * this.plot;
  }

  time(x) {
    const { from, to } = this.view;
    return from + ((x - this.left) / this.plot) * (to - from);
  }

  measure() {
    this.room = this.canvas.parentElement.clientWidth;
  }

  /** Fit the canvas to its place on the page and return its context, in CSS pixels. */
  prepare() {
    const width = this.room;
    const height = this.rowTop(this.lanes.length) + 4;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    const wide = width >= 640;
    Object.assign(this, { width, height, wide, right: wide ? 70 : 4 });
    if (this.canvas.width !== Math.round(width * ratio) || this.canvas.height !== Math.round(height * ratio)) {
      this.canvas.width = Math.round(width * ratio);
      this.canvas.height = Math.round(height * ratio);
      this.canvas.style.width = `${width}px`;
      this.canvas.style.height = `${height}px`;
    }
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, height);
    context.font = `11px ${this.app.colours.font}`;
    context.textBaseline = "middle";
    const names = this.app.data.devices.map((name, lane) => context.measureText(`${lane}  ${name}`).width);
    this.left = wide ? Math.min(Math.max(...names, 70) + 14, 170) : 34;
    this.plot = width - this.left - this.right;
    return context;
  }

  drawAxis(context) {
    const { view } = this;
    const { colours } = this.app;
    context.fillStyle = colours.muted;
    context.strokeStyle = colours.line;
    context.lineWidth = 1;
    context.textAlign = "center";
    context.beginPath();
    let end = -Infinity;
    const times = ticks(view.from, view.to, Math.max(2, this.plot / 90));
    const labels = timeLabels(times);
    for (const [k, time] of times.entries()) {
      const x = Math.round(this.x(time)) + 0.5;
      context.moveTo(x, this.top - 6);
      context.lineTo(x, this.rowTop(this.lanes.length) - this.gap);
      const text = labels[k];
      const half = context.measureText(text).width / 2;
      const centre = Math.min(Math.max(x, half), this.width - half);
      if (centre - half > end + 6) {
        context.fillText(text, centre, this.top - 14);
        end = centre + half;
      }
    }
    context.stroke();
  }

  drawLabel(context, lane, { under = "", right = [], apart = 15, last = lane } = {}) {
    const { colours, data } = this.app;
    const number = last > lane ? `${lane}–${last}` : String(lane);
    const middle = this.rowTop(lane) + this.row / 2;
    context.textAlign = "left";
    context.fillStyle = colours.ink;
    let name = data.devices[lane];
    if (last > lane) name = "alike";
    const label = () => (this.wide ? `${number}  ${name}` : number);
    // The end of a long name tells more than its start.
    while (context.measureText(label()).width > this.left - 10 && name.length > 1) name = `…${name.slice(2)}`;
    context.fillText(label(), 2, under && this.wide ? middle - apart / 2 : middle);
    if (!this.wide) return;
    context.fillStyle = colours.muted;
    if (under) context.fillText(under, 2, middle + apart / 2);
    context.textAlign = "right";
    right.forEach((line, k) => context.fillText(line, this.width - 2, middle + apart * (k - (right.length - 1) / 2)));
  }

  /** Keep what is drawn inside the plot. */
  clipped(context, draw) {
    context.save();
    context.beginPath();
    context.rect(this.left, 0, this.plot, this.height);
    context.clip();
    draw();
    context.restore();
  }

  /** The action of a lane that runs at a time, or null in a bubble; `near`: else the one that is closest. */
  actionAt(lane, time, { near = false, measured = false } = {}) {
    const { start, end } = this.timesOf(lane, measured);
    let [low, high] = [0, start.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (start[middle] <= time) low = middle + 1;
      else high = middle;
    }
    const before = low - 1;
    if (before >= 0 && time < end[before]) return before;
    if (!near || !start.length) return null;
    if (before < 0) return 0;
    return low < start.length && start[low] - time < time - end[before] ? low : before;
  }

  place(event) {
    const box = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const lane = this.rows[Math.floor((y - this.top) / (this.row + this.gap))]?.[0] ?? -1;
    const inside = lane >= 0 && y - this.rowTop(lane) <= this.row;
    if (!inside || x < this.left || x > this.left + this.plot) return { x, lane: null };
    return { x, lane, time: this.time(x), measured: this.isMeasured(y - this.rowTop(lane)) };
  }

  hover(event) {
    if (this.pressed && Math.abs(event.clientX - this.pressed.x) > 4) {
      this.app.pan(((this.pressed.last - event.clientX) / this.plot) * (this.app.view.to - this.app.view.from));
      this.pressed.last = event.clientX;
      this.pressed.moved = true;
      this.app.tip.hide();
      return;
    }
    const { lane, time, measured } = this.place(event);
    const lines = lane === null ? null : this.figures(lane, time, measured);
    if (lines) this.app.tip.show(event, lines);
    else this.app.tip.hide();
    const action = lane === null ? null : this.actionAt(lane, time, { measured });
    this.app.point(action === null ? null : { lane, action });
  }

  leave() {
    this.pressed = null;
    this.app.tip.hide();
    this.app.point(null);
  }

  press(event) {
    this.pressed = { x: event.clientX, last: event.clientX, moved: false };
  }

  release(event) {
    const moved = this.pressed?.moved;
    this.pressed = null;
    if (moved) return;
    const { lane, time, measured } = this.place(event);
    const action = lane === null ? null : this.actionAt(lane, time, { measured });
    this.app.select(action === null ? null : { lane, action });
  }

  wheel(event) {
    if (!event.ctrlKey) return;
    event.preventDefault();
    this.app.zoom(event.deltaY < 0 ? 1.25 : 0.8, this.time(event.offsetX));
  }

  key(event) {
    const { app } = this;
    const chosen = app.selected;
    const go = {
      ArrowRight: () => this.step(1),
      ArrowLeft: () => this.step(-1),
      ArrowDown: () => this.cross(1),
      ArrowUp: () => this.cross(-1),
      Home: () => this.choose(chosen?.lane ?? 0, 0),
      End: () => this.choose(chosen?.lane ?? 0, this.lanes[chosen?.lane ?? 0].count - 1),
      Enter: () => app.zoomTo(chosen),
      Escape: () => (app.zoomed ? app.whole() : app.select(null)),
      "+": () => app.zoom(1.5),
      "=": () => app.zoom(1.5),
      "-": () => app.zoom(1 / 1.5),
      0: () => app.whole(),
      m: () => app.showNext(),
    }[event.key];
    if (!go || event.altKey || event.metaKey || event.ctrlKey) return;
    event.preventDefault();
    go();
  }

  step(by) {
    const chosen = this.app.selected;
    if (!chosen) return this.choose(0, 0);
    return this.choose(chosen.lane, chosen.action + by);
  }

  cross(by) {
    const chosen = this.app.selected;
    if (!chosen) return this.choose(0, 0);
    const lane = Math.min(Math.max(chosen.lane + by, 0), this.lanes.length - 1);
    const how = { near: true, measured: this.app.shown === "measured" };
    const own = this.app.inView[chosen.lane];
    return this.choose(lane, this.actionAt(lane, (own.start[chosen.action] + own.end[chosen.action]) / 2, how));
  }

  choose(lane, action) {
    this.app.select({ lane, action: Math.min(Math.max(action ?? 0, 0), this.lanes[lane].count - 1) });
    this.app.reveal();
    const box = this.canvas.getBoundingClientRect();
    const top = box.top + this.rowTop(lane);
    if (top < 0 || top + this.row > window.innerHeight) window.scrollBy({ top: top - window.innerHeight / 2 });
  }

  /** Where an action is drawn, in CSS pixels of the canvas. */
  rectangle(lane, action) {
    const own = this.timeline.lanes[lane];
    const [x, end] = [this.x(own.start[action]), this.x(own.end[action])];
    return { x, y: this.rowTop(lane), width: end - x, height: this.row };
  }

  drawSelection(context, { x, y, width, height }) {
    context.lineWidth = 4;
    context.strokeStyle = this.app.colours.panel;
    context.strokeRect(x - 1, y - 1, Math.max(width, 3) + 2, height + 2);
    context.lineWidth = 2;
    context.strokeStyle = this.app.colours.ink;
    context.strokeRect(x - 1, y - 1, Math.max(width, 3) + 2, height + 2);
  }
}

/** The one tooltip: a title and figures, near the pointer and inside the window. */
class Tip {
  constructor(box) {
    this.box = box;
  }

  show(event, [title, ...figures]) {
    this.box.replaceChildren(element("strong", "", title), ...figures.map((line) => element("div", "", line)));
    this.box.hidden = false;
    const { offsetWidth, offsetHeight } = this.box;
    const x = Math.min(event.clientX + 14, window.innerWidth - offsetWidth - 6);
    const below = event.clientY + 18;
    const y = below + offsetHeight > window.innerHeight ? event.clientY - offsetHeight - 10 : below;
    this.box.style.left = `${Math.max(x, 4)}px`;
    this.box.style.top = `${Math.max(y, 4)}px`;
  }

  hide() {
    this.box.hidden = true;
  }
}
