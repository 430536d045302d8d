// The step: a row per device, a bar per action, hatched where the device waits, lines for what travels.
// With a recorded step a row has two strips: the prediction above, what was measured below.

const TRANSFER_ROOM = 40; // pixels per microbatch from which on transfers between neighbours are drawn
const PLACE_BAND = 3; // pixels of the band that tells a device's second stage from its first
const STRIPS = 2; // pixels between the two strips of a row

class TimelineChart extends LaneChart {
  constructor(app, canvas) {
    const many = app.schedule.lanes.length > 16;
    super(app, canvas, { top: 26, row: 0, gap: many ? 3 : 8 });
    this.strip = many ? 14 : 26;
    if (many && app.recorded) this.strip = 10;
  }

  draw() {
    const { app } = this;
    this.row = app.shown === "both" ? 2 * this.strip + STRIPS : this.strip;
    const context = this.prepare();
    this.drawAxis(context);
    this.hatch = stripes(context, app.colours);
    this.lanes.forEach((lane, index) => {
      this.drawLabel(context, index, this.labels(index));
      this.clipped(context, () => this.strips().forEach((strip) => this.drawLane(context, lane, index, strip)));
    });
    this.clipped(context, () => {
      const perMicrobatch = (this.x(this.timeline.step) - this.x(0)) / app.schedule.microbatches;
      app.transfersShown = perMicrobatch >= TRANSFER_ROOM && app.shown === "predicted";
      // One that passes other devices would lie on their bars: it is drawn with its own action only.
      const near = (source, target, mb) => Math.abs(app.laneOf(source, mb) - app.laneOf(target, mb)) === 1;
      if (app.transfersShown) this.drawTransfers(context, near, 1);
      if (app.selected) {
        const { lane, action } = app.selected;
        for (const { measured } of this.strips()) this.drawSelection(context, this.rectangle(lane, action, measured));
      }
      if (app.shown === "measured") return;
      for (const one of [app.selected, app.pointed]) {
        const own = app.actionOf(one);
        if (own) this.drawTransfers(context, (...ends) => concerns(own, ...ends), 2);
      }
    });
  }

  /** The strips of a row: whether each is measured, and how far below the row's top it begins. */
  strips() {
    const { shown } = this.app;
    if (shown !== "both") return [{ measured: shown === "measured", down: 0 }];
    return [
      { measured: false, down: 0 },
      { measured: true, down: this.strip + STRIPS },
    ];
  }

  isMeasured(down) {
    return this.strips().some((strip) => strip.measured && down >= strip.down);
  }

  labels(lane) {
    const { shown } = this.app;
    const idle = (timeline) => `${percent(1 - timeline.lanes[lane].busy / timeline.step)} idle`;
    if (shown === "predicted") return { right: [idle(this.timeline)] };
    if (shown === "measured") return { right: [idle(this.app.recorded)] };
    return { under: "measured", right: [idle(this.timeline), idle(this.app.recorded)], apart: this.strip + STRIPS };
  }

  rectangle(lane, action, measured = this.app.shown === "measured") {
    const own = this.timesOf(lane, measured);
    const [x, end] = [this.x(own.start[action]), this.x(own.end[action])];
    const down = measured && this.app.shown === "both" ? this.strip + STRIPS : 0;
    return { x, y: this.rowTop(lane) + down, width: end - x, height: this.strip };
  }

  drawLane(context, lane, index, { measured, down }) {
    const { colours, view } = this.app;
    const { start, end } = this.timesOf(index, measured);
    const y = this.rowTop(index) + down;
    const [from, to] = [this.x(0), this.x(measured ? this.app.recorded.step : this.timeline.step)];
    context.fillStyle = colours.idle;
    context.fillRect(from, y, to - from, this.strip);
    context.fillStyle = this.hatch;
    context.fillRect(from, y, to - from, this.strip);
    context.textAlign = "center";
    const place = new Map(lane.stages.map((stage, k) => [stage, k]));
    for (let k = Math.max(0, this.firstEndingAfter(end, view.from)); k < lane.count && start[k] < view.to; k++) {
      const [x, stop] = [this.x(start[k]), this.x(end[k])];
      const width = Math.max(stop - x - (stop - x > 4 ? 1 : 0), 0.5);
      context.fillStyle = colours.kinds[lane.kind[k]];
      context.fillRect(x, y, width, this.strip);
      const band = Math.min(PLACE_BAND * place.get(lane.stage[k]), this.strip / 2);
      if (band) {
        // A device's later stages stand on a band of the panel's colour, as in the legend.
        context.fillStyle = colours.panel;
        context.fillRect(x, y + this.strip - band, width, band);
      }
      if (width < 14 || this.strip < 14) continue;
      context.fillStyle = colours.onKinds;
      const full = `${lane.stage[k]}${"FBIW"[lane.kind[k]]}${lane.mb[k]}`;
      const room = (text) => context.measureText(text).width + 4 < width;
      const text = [full, String(lane.mb[k])].find(room);
      if (text) context.fillText(text, x + width / 2, y + this.strip / 2 + 0.5);
    }
  }

  firstEndingAfter(end, time) {
    let [low, high] = [0, end.length];
    while (low < high) {
      const middle = (low + high) >> 1;
      if (end[middle] <= time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  /** Draw the transfers that `shown` takes: from the end of the action that made the values to their arrival. */
  drawTransfers(context, shown, width) {
    const { app } = this;
    context.strokeStyle = app.colours.ink;
    context.fillStyle = app.colours.ink;
    context.globalAlpha = width > 1 ? 1 : 0.45;
    context.lineWidth = width;
    context.beginPath();
    app.eachTransfer((source, target, mb, backward, leaves, arrives) => {
      if (arrives < app.view.from || leaves > app.view.to || !shown(source, target, mb, backward)) return;
      const [above, below] = [app.laneOf(source, mb), app.laneOf(target, mb)];
      const down = above < below;
      const y = this.rowTop(above) + (down ? this.strip : 0);
      const end = this.rowTop(below) + (down ? 0 : this.strip);
      const x = this.x(arrives);
      context.moveTo(this.x(leaves), y);
      context.lineTo(x, end);
      context.moveTo(x - 2.5, end - (down ? 4 : -4));
      context.lineTo(x, end);
      context.lineTo(x + 2.5, end - (down ? 4 : -4));
    });
    context.stroke();
    context.globalAlpha = 1;
  }

  figures(lane, time, measured = false) {
    const action = this.actionAt(lane, time, { measured });
    if (action !== null) return this.app.describe(lane, action);
    const step = measured ? this.app.recorded.step : this.timeline.step;
    if (time < 0 || time > step) return null;
    const { start, end } = this.timesOf(lane, measured);
    const next = start.findIndex((begins) => begins > time);
    const stop = next < 0 ? step : start[next];
    const from = next === 0 ? 0 : end[(next < 0 ? start.length : next) - 1];
    const name = `Bubble on ${this.app.data.devices[lane]}${measured ? ", measured" : ""}`;
    return [name, `idle for ${seconds(stop - from)}`, `${seconds(from)} to ${seconds(stop)}`];
  }
}

/** Whether a transfer comes from, or goes to, an action. */
function concerns({ stage, kind, mb }, source, target, microbatch, backward) {
  if (mb !== microbatch || kind === W) return false;
  return backward === (kind !== F) && (stage === source || stage === target);
}

/** When the recorded step's actions ran, lane by lane as the schedule has them; null where there are none to draw. */
function readRecorded({ recorded }) {
  if (!recorded || !recorded.lanes.length) return null;
  const lanes = recorded.lanes.map((flat) => {
    const start = Float64Array.from({ length: flat.length / 2 }, (_, k) => flat[2 * k]);
    const end = Float64Array.from({ length: flat.length / 2 }, (_, k) => flat[2 * k + 1]);
    return { start, end, busy: end.reduce((total, stop, k) => total + stop - start[k], 0) };
  });
  return { lanes, step: recorded.step, held: recorded.held };
}

function stripes(context, colours) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 8;
  const pen = tile.getContext("2d");
  pen.strokeStyle = colours.line;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const shift of [-8, 0, 8]) {
    pen.moveTo(shift, 8);
    pen.lineTo(shift + 8, 0);
  }
  pen.stroke();
  return context.createPattern(tile, "repeat");
}
