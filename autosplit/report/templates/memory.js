// What devices hold: at their fullest moment, and over the step where the plan knows it.

const ALIKE = 0.01;
const PART_NAMES = ["parameters", "gradients", "optimizer state", "activations", "transient"];

const sum = (sizes) => sizes.reduce((total, size) => total + size, 0);

class MemoryChart extends LaneChart {
  constructor(app, canvas) {
    const many = app.schedule.lanes.length > 16;
    super(app, canvas, { top: 26, row: many ? 24 : 76, gap: many ? 4 : 14 });
    this.many = many;
  }

  /** Neighbours that hold alike at every moment share a row; where a cut is moved, each has its own. */
  get rows() {
    if (this.app.moved || this.app.recorded?.held) return super.rows;
    this.folded ??= foldedLanes(this.app);
    return this.folded;
  }

  get view() {
    return this.app.steady ? this.app.wholeView() : this.app.view;
  }

  /** The bytes of each part at a moment: an action, or the optimizer's step behind the last. */
  parts(lane, moment) {
    const { data, result } = this.app;
    const own = data.curves[lane].map((values) => at(values, moment));
    if (!result.memory) return own;
    const moved = result.memory[lane];
    const states = own[0] + own[1] + own[2];
    for (const kind of [0, 1, 2]) own[kind] += states ? (moved.fixed * own[kind]) / states : kind ? 0 : moved.fixed;
    own[3] += moved.activations[moment];
    own[4] += moved.transient[moment];
    return own.map((value) => Math.max(value, 0));
  }

  scale() {
    const { data } = this.app;
    const peak = Math.max(...this.app.peaks(), 1);
    const capacity = Math.max(...devicesOf(data).map((own) => own.capacity ?? 0));
    const held = Math.max(0, ...(this.app.recorded?.held ?? []).map((sizes) => Math.max(...sizes)));
    const most = Math.max(peak, held);
    return { peak, most: 1.06 * (capacity <= 3 * most ? Math.max(most, capacity) : most), capacity };
  }

  draw() {
    const context = this.prepare();
    this.drawAxis(context);
    const { most } = this.scale();
    this.rows.forEach((lanes) => {
      const { data, colours } = this.app;
      const [index, last] = [lanes[0], lanes[lanes.length - 1]];
      const peak = Math.max(...lanes.map((lane) => this.app.peaks()[lane]));
      const capacity = devicesOf(data)[index].capacity;
      const share = capacity ? `${Math.round((100 * peak) / capacity)}%` : "";
      const two = { last, under: bytes(peak), right: capacity ? [`${share} of`, bytes(capacity)] : [] };
      this.drawLabel(context, index, this.many ? { last, right: [share || bytes(peak)] } : two);
      const bottom = this.rowTop(index) + this.row;
      context.fillStyle = colours.idle;
      context.fillRect(this.left, this.rowTop(index), this.plot, this.row);
      this.clipped(context, () => this.drawAreas(context, index, (size) => bottom - (size / most) * this.row));
      if (capacity && capacity <= most) this.drawLimit(context, bottom - (capacity / most) * this.row);
      this.clipped(context, () => this.drawHeld(context, index, (size) => bottom - (size / most) * this.row));
    });
    this.clipped(context, () => this.drawMoment(context));
  }

  drawLimit(context, y) {
    context.strokeStyle = this.app.colours.limit;
    context.lineWidth = 1.5;
    context.setLineDash([6, 3]);
    context.beginPath();
    context.moveTo(this.left, y);
    context.lineTo(this.left + this.plot, y);
    context.stroke();
    context.setLineDash([]);
  }

  /** What the device was measured to hold when each action had been issued, as a line over the areas. */
  drawHeld(context, lane, height) {
    const { recorded, colours } = this.app;
    if (!recorded?.held || this.app.shown === "predicted") return;
    context.strokeStyle = colours.ink;
    context.lineWidth = 1.5;
    context.beginPath();
    recorded.held[lane].forEach((size, k) => {
      if (size !== null) context.lineTo(this.x(recorded.lanes[lane].end[k]), height(size));
    });
    context.stroke();
  }

  drawAreas(context, lane, height) {
    const { view } = this;
    const { colours } = this.app;
    const { start, end } = this.timeline.lanes[lane];
    const count = start.length;
    const corners = [];
    const pixel = (view.to - view.from) / this.plot;
    for (let k = 0; k < count; k++) {
      const until = k + 1 < count ? start[k + 1] : this.timeline.step;
      if (until < view.from || start[k] > view.to) continue;
      const held = this.parts(lane, k);
      const last = corners[corners.length - 1];
      if (last && start[k] - last[0] < pixel / 2) {
        // Of moments that share a pixel the fullest is drawn.
        if (sum(held) > sum(last[1])) last[1] = held;
        continue;
      }
      corners.push([k ? start[k] : 0, held]);
      if (until > end[k]) corners.push([end[k], [...held.slice(0, 4), 0]]);
    }
    corners.push([this.timeline.step, this.parts(lane, count)]);
    const stop = this.timeline.step * (1 + AFTER);
    const base = new Float64Array(corners.length);
    PART_NAMES.forEach((_, part) => {
      const tops = corners.map(([, held], k) => base[k] + held[part]);
      context.beginPath();
      corners.forEach(([time], k) => {
        const until = k + 1 < corners.length ? corners[k + 1][0] : stop;
        context.lineTo(this.x(time), height(tops[k]));
        context.lineTo(this.x(until), height(tops[k]));
      });
      for (let k = corners.length - 1; k >= 0; k--) {
        const until = k + 1 < corners.length ? corners[k + 1][0] : stop;
        context.lineTo(this.x(until), height(base[k]));
        context.lineTo(this.x(corners[k][0]), height(base[k]));
      }
      context.fillStyle = colours.parts[part];
      context.fill();
      if (part < 4) this.drawEdge(context, corners, tops, stop, height);
      base.set(tops);
    });
  }

  /** A thin line between two parts, so that they are told apart without their colours too. */
  drawEdge(context, corners, tops, stop, height) {
    context.beginPath();
    corners.forEach(([time], k) => {
      const until = k + 1 < corners.length ? corners[k + 1][0] : stop;
      context.lineTo(this.x(time), height(tops[k]));
      context.lineTo(this.x(until), height(tops[k]));
    });
    context.strokeStyle = this.app.colours.panel;
    context.lineWidth = 0.75;
    context.stroke();
  }

  drawMoment(context) {
    const chosen = this.app.selected;
    if (!chosen) return;
    const { x, y, width, height } = this.rectangle(chosen.lane, chosen.action);
    context.strokeStyle = this.app.colours.ink;
    context.lineWidth = 2;
    context.strokeRect(x, y, Math.max(width, 2), height);
  }

  figures(lane, time) {
    const { data, schedule } = this.app;
    const count = schedule.lanes[lane].count;
    const { start, end } = this.timeline.lanes[lane];
    if (time < 0 || time > this.timeline.step * (1 + AFTER)) return null;
    let title = "optimizer's step";
    let held = this.parts(lane, count);
    if (time <= this.timeline.step) {
      const action = this.actionAt(lane, time);
      const before = action ?? Math.max(0, start.findLastIndex((begins) => begins <= time));
      held = this.parts(lane, before);
      if (action === null && time >= end[before]) held[4] = 0;
      title = action === null ? "idle" : this.app.nameOf(lane, action);
    }
    const total = sum(held);
    const lines = held.map((size, part) => `${PART_NAMES[part]}: ${bytes(size)}`).reverse();
    return [`${data.devices[lane]}, ${title}: ${bytes(total)}`, ...lines];
  }
}

/** Runs of neighbouring devices whose curves differ by at most a hundredth of the peak at every moment. */
function foldedLanes({ data, schedule }) {
  const totals = schedule.lanes.map((lane) => totalsOf(data, lane));
  const devices = devicesOf(data);
  const alike = (one, other) =>
    totals[one].length === totals[other].length &&
    devices[one].capacity === devices[other].capacity &&
    totals[one].every((size, k) => Math.abs(size - totals[other][k]) <= ALIKE * devices[one].peak);
  const found = [];
  data.devices.forEach((_, lane) => {
    const run = found[found.length - 1];
    if (run && alike(run[0], lane)) run.push(lane);
    else found.push([lane]);
  });
  return found;
}

/** Whether a device holds its peak, from the prediction's range; null where no capacity is known. */
function verdictOf({ peak, low, high, capacity, reserve }) {
  if (capacity === null) return null;
  const ranged = low !== null && high !== null;
  if ((ranged ? high : peak) <= capacity - reserve) return "fits";
  return (ranged ? low : peak / 1.05) <= capacity ? "borderline" : "no";
}

const MARKS = { fits: "✓ fits", borderline: "≈ borderline", no: "✕ no" };

/** A device as the page shows it now: the plan's figures, and what moved cuts add. */
function deviceNow(app, lane) {
  const own = devicesOf(app.data)[lane];
  const moved = app.result.memory?.[lane];
  if (!moved || !app.moved) return own;
  const states = own.parts[0] + own.parts[1] + own.parts[2];
  const parts = own.parts.map((size, part) =>
    part < 3 ? Math.max(0, size + (states ? (moved.fixed * size) / states : 0)) : size,
  );
  parts[3] = Math.max(0, moved.peak - parts[0] - parts[1] - parts[2] - parts[4]);
  const shift = (size) => (size === null ? null : size + moved.grown);
  return { ...own, parts, peak: moved.peak, low: shift(own.low), high: shift(own.high) };
}

/** The rows of peaks: a stacked bar with the range and the capacity, and the figures beside it. */
function drawPeaks(app, body) {
  const now = app.data.devices.map((_, lane) => deviceNow(app, lane));
  const ends = now.map((own, lane) =>
    Math.max(own.high ?? 0, own.peak, sum(own.parts), app.data.recorded?.peaks[lane] ?? 0),
  );
  const largest = Math.max(...ends, 1);
  const most = Math.max(largest, ...now.map((own) => (own.capacity <= 3 * largest ? own.capacity : 0)));
  const rows = now.map((own, lane) => {
    const row = element("tr");
    row.append(element("th", "", `${lane}  ${app.data.devices[lane]}`));
    const bar = element("div", "stack");
    own.parts.forEach((size, part) => {
      const piece = element("span", `part-${part}`);
      piece.style.width = `${(100 * size) / most}%`;
      bar.append(piece);
    });
    if (own.low !== null && own.high !== null) bar.append(marker("range", own.low / most, (own.high - own.low) / most));
    if (own.capacity !== null && own.capacity <= most) bar.append(marker("capacity", own.capacity / most, 0));
    const seen = app.data.recorded?.peaks[lane] ?? null;
    if (seen !== null) bar.append(marker("seen", seen / most, 0));
    bar.title = own.parts.map((size, part) => `${PART_NAMES[part]} ${bytes(size)}`).join(", ");
    const named = (name, className, text) => Object.assign(element("td", className, text), { title: name });
    const cell = element("td", "wide");
    cell.append(bar);
    const verdict = verdictOf(own);
    const range = own.low === null || own.high === null ? "" : `${bytes(own.low)} to ${bytes(own.high)}`;
    row.append(
      element("td", `verdict ${verdict ?? "unknown"}`, MARKS[verdict] ?? "not judged"),
      cell,
      named("peak", "number", bytes(own.peak)),
      ...(app.counted ? [named("measured", "number", seen === null ? "–" : bytes(seen))] : []),
      named("range", "number muted", range || "–"),
      named("capacity", "number", own.capacity === null ? "–" : bytes(own.capacity)),
    );
    return row;
  });
  body.replaceChildren(...rows);
}

function marker(name, from, width) {
  const made = element("i", name);
  made.style.left = `${100 * from}%`;
  if (width) made.style.width = `${100 * width}%`;
  return made;
}
