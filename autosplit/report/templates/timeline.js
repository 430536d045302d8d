// The step: a row per device, a bar per action, hatched where the device waits, lines for what travels.

const TRANSFER_ROOM = 24; // pixels per microbatch from which on all transfers are drawn

class TimelineChart extends LaneChart {
  constructor(app, canvas) {
    const many = app.schedule.lanes.length > 16;
    super(app, canvas, { top: 26, row: many ? 14 : 26, gap: many ? 3 : 8 });
  }

  draw() {
    const { app } = this;
    const context = this.prepare();
    this.drawAxis(context);
    this.hatch = stripes(context, app.colours);
    this.lanes.forEach((lane, index) => {
      const { busy } = this.timeline.lanes[index];
      this.drawLabel(context, index, { right: [`${percent(1 - busy / this.timeline.step)} idle`] });
      this.clipped(context, () => this.drawLane(context, lane, index));
    });
    this.clipped(context, () => {
      const perMicrobatch = (this.x(this.timeline.step) - this.x(0)) / app.schedule.microbatches;
      app.transfersShown = perMicrobatch >= TRANSFER_ROOM;
      if (app.transfersShown) this.drawTransfers(context, () => true, 1);
      this.drawSelection(context);
      const chosen = app.chosenAction();
      if (chosen) this.drawTransfers(context, (...ends) => concerns(chosen, ...ends), 2);
    });
  }

  drawLane(context, lane, index) {
    const { colours, view } = this.app;
    const { start, end } = this.timeline.lanes[index];
    const y = this.rowTop(index);
    const [from, to] = [this.x(0), this.x(this.timeline.step)];
    context.fillStyle = colours.idle;
    context.fillRect(from, y, to - from, this.row);
    context.fillStyle = this.hatch;
    context.fillRect(from, y, to - from, this.row);
    context.textAlign = "center";
    const place = new Map(lane.stages.map((stage, k) => [stage, k]));
    for (let k = Math.max(0, this.firstEndingAfter(end, view.from)); k < lane.count && start[k] < view.to; k++) {
      const [x, stop] = [this.x(start[k]), this.x(end[k])];
      const width = Math.max(stop - x - (stop - x > 4 ? 1 : 0), 0.5);
      context.fillStyle = colours.kinds[lane.kind[k]];
      context.fillRect(x, y, width, this.row);
      if (place.get(lane.stage[k])) {
        // Of several stages on a device the later ones are stronger; the text on them stays readable.
        context.globalAlpha = (0.35 * place.get(lane.stage[k])) / (lane.stages.length - 1);
        context.fillStyle = colours.ink;
        context.fillRect(x, y, width, this.row);
        context.globalAlpha = 1;
      }
      if (width < 14 || this.row < 14) continue;
      context.fillStyle = colours.onKinds;
      const full = `${lane.stage[k]}${"FBIW"[lane.kind[k]]}${lane.mb[k]}`;
      const room = (text) => context.measureText(text).width + 4 < width;
      const text = [full, String(lane.mb[k])].find(room);
      if (text) context.fillText(text, x + width / 2, y + this.row / 2 + 0.5);
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
      const [above, below] = [app.data.stages[source].lane, app.data.stages[target].lane];
      const down = above < below;
      const y = this.rowTop(above) + (down ? this.row : 0);
      const end = this.rowTop(below) + (down ? 0 : this.row);
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

  figures(lane, time) {
    const action = this.actionAt(lane, time);
    if (action !== null) return this.app.describe(lane, action);
    if (time < 0 || time > this.timeline.step) return null;
    const { start, end } = this.timeline.lanes[lane];
    const next = start.findIndex((begins) => begins > time);
    const stop = next < 0 ? this.timeline.step : start[next];
    const from = next === 0 ? 0 : end[(next < 0 ? start.length : next) - 1];
    const name = `Bubble on ${this.app.data.devices[lane]}`;
    return [name, `idle for ${seconds(stop - from)}`, `${seconds(from)} to ${seconds(stop)}`];
  }
}

/** Whether a transfer comes from, or goes to, an action. */
function concerns({ stage, kind, mb }, source, target, microbatch, backward) {
  if (mb !== microbatch || kind === W) return false;
  return backward === (kind !== F) && (stage === source || stage === target);
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
