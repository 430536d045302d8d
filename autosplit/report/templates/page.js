// The page: what is chosen, what is in view, and who draws again when that changes.

const TEXTURE_SLOT = 30; // pixels of a microbatch on the slowest device below which bars are a texture
const STEADY_SLOT = 64; // pixels of a microbatch in the view of the steady state

class App {
  constructor(data) {
    this.data = data;
    this.schedule = readSchedule(data);
    this.selected = null;
    this.pointed = null;
    this.tip = new Tip(byId("tip"));
    this.colours = palette();
    this.recorded = readRecorded(data);
    this.counted = (data.recorded?.peaks ?? []).some((peak) => peak !== null);
    this.shown = this.recorded ? "both" : "predicted";
    this.planned = this.asPlanned();
    this.result = this.planned;
    this.view = this.wholeView();
    this.steady = false;
    this.timelineChart = new TimelineChart(this, byId("timeline"));
    this.memoryChart = data.curves ? new MemoryChart(this, byId("memory")) : null;
    this.frontierChart = data.frontier.length > 1 ? new FrontierChart(this, byId("frontier")) : null;
    this.cutEditor = null;
    if (data.units.length && data.stages.length > 1) {
      const names = { strip: byId("strip"), canvas: byId("units"), handles: byId("handles"), labels: byId("stage-labels") };
      this.cutEditor = new CutEditor(this, names);
      byId("reset").addEventListener("click", () => this.cutEditor.reset());
    }
    for (const choice of this.choices()) choice.addEventListener("change", () => this.show(choice.value));
    byId("zoom-in").addEventListener("click", () => this.zoom(1.5));
    byId("zoom-out").addEventListener("click", () => this.zoom(1 / 1.5));
    byId("zoom-whole").addEventListener("click", () => this.whole());
    const beside = data.step_s - this.result.timeline.step;
    byId("beside").textContent = seconds(beside);
    byId("beside-note").hidden = beside < 1e-3 * data.step_s;
    this.followTheme();
    const main = document.querySelector("main");
    let width = main.clientWidth;
    new ResizeObserver(() => {
      if (width === main.clientWidth) return;
      width = main.clientWidth;
      this.draw();
    }).observe(main);
  }

  asPlanned() {
    const { data } = this;
    const times = planTimes(data);
    const timeline = simulate(data, this.schedule, times);
    return { times, timeline, step: data.step_s, bubble: data.bubble, bottleneck: data.bottleneck_s, memory: null };
  }

  get moved() {
    return this.cutEditor?.moved ?? false;
  }

  peaks() {
    return this.result.memory ? this.result.peaks : devicesOf(this.data).map((own) => own.peak);
  }

  // --- what is in view -----------------------------------------------------------------------------------------------

  wholeView() {
    const recorded = this.shown === "predicted" ? 0 : this.recorded.step;
    const predicted = this.shown === "measured" ? 0 : this.result.timeline.step;
    return { from: 0, to: (Math.max(predicted, recorded) || 1e-9) * (1 + AFTER) };
  }

  /** Begin with the middle of the step where its bars would be a texture; the memory chart shows all of it. */
  showSteady() {
    const { timelineChart: chart, data, result } = this;
    if (this.recorded || !data.bottleneck_s) return;
    const slot = (chart.plot * data.bottleneck_s) / result.timeline.step;
    const span = (chart.plot / STEADY_SLOT) * data.bottleneck_s;
    if (slot >= TEXTURE_SLOT || span >= result.timeline.step) return;
    this.look((result.timeline.step - span) / 2, span);
    this.steady = true;
    byId("steady-note").hidden = false;
    this.draw();
  }

  choices() {
    return [...document.querySelectorAll("input[name=shown]")];
  }

  /** Show the predicted step, the recorded one, or both. */
  show(which) {
    this.shown = which;
    for (const choice of this.choices()) choice.checked = choice.value === which;
    this.whole();
  }

  showNext() {
    const names = this.choices().map((choice) => choice.value);
    if (names.length) this.show(names[(names.indexOf(this.shown) + 1) % names.length]);
  }

  get zoomed() {
    const whole = this.wholeView();
    return this.view.to - this.view.from < 0.999 * whole.to;
  }

  /** The times of the lanes that the keys go along. */
  get inView() {
    return this.shown === "measured" ? this.recorded.lanes : this.result.timeline.lanes;
  }

  zoom(factor, about = this.middle()) {
    const span = (this.view.to - this.view.from) / factor;
    const share = (about - this.view.from) / (this.view.to - this.view.from);
    this.look(about - share * span, span);
  }

  middle() {
    const chosen = this.selected;
    if (!chosen) return (this.view.from + this.view.to) / 2;
    const own = this.inView[chosen.lane];
    return (own.start[chosen.action] + own.end[chosen.action]) / 2;
  }

  pan(by) {
    this.look(this.view.from + by, this.view.to - this.view.from);
  }

  look(from, span) {
    const whole = this.wholeView().to;
    const width = Math.min(Math.max(span, whole * 1e-5), whole);
    const start = Math.min(Math.max(from, 0), whole - width);
    this.view = { from: start, to: start + width };
    this.leaveSteady();
    this.draw();
  }

  whole() {
    this.view = this.wholeView();
    this.leaveSteady();
    this.draw();
  }

  leaveSteady() {
    this.steady = false;
    byId("steady-note").hidden = true;
  }

  /** Show an action large, with some of what runs beside it. */
  zoomTo(chosen) {
    if (!chosen) return;
    const own = this.inView[chosen.lane];
    const length = Math.max(own.end[chosen.action] - own.start[chosen.action], this.result.timeline.step * 1e-4);
    this.look(own.start[chosen.action] - 4 * length, 9 * length);
  }

  /** Move the view as little as needed to have the chosen action in it. */
  reveal() {
    const chosen = this.selected;
    const own = this.inView[chosen.lane];
    const [start, end] = [own.start[chosen.action], own.end[chosen.action]];
    const span = this.view.to - this.view.from;
    if (start < this.view.from) this.look(start - 0.1 * span, span);
    else if (end > this.view.to) this.look(end - 0.9 * span, span);
  }

  // --- what is chosen ------------------------------------------------------------------------------------------------

  select(chosen) {
    this.selected = chosen;
    this.say(chosen ? this.describe(chosen.lane, chosen.action).join(" · ") : "");
    this.draw();
  }

  /** The action under the pointer shows its transfers. */
  point(at) {
    if (at?.lane === this.pointed?.lane && at?.action === this.pointed?.action) return;
    this.pointed = at;
    this.drawSoon();
  }

  actionOf(at) {
    if (!at) return null;
    const lane = this.schedule.lanes[at.lane];
    return { stage: lane.stage[at.action], kind: lane.kind[at.action], mb: lane.mb[at.action] };
  }

  say(text) {
    byId("details").textContent = text;
  }

  laneOf(stage, mb) {
    const { lane, replicas } = this.data.stages[stage];
    return lane + (mb % replicas);
  }

  nameOf(lane, action) {
    const own = this.schedule.lanes[lane];
    return `stage ${own.stage[action]}, ${KIND_NAMES[own.kind[action]]}, microbatch ${own.mb[action]}`;
  }

  describe(lane, action) {
    const { start, end } = this.result.timeline.lanes[lane];
    const waited = start[action] - (action ? end[action - 1] : 0);
    const lines = [
      `${this.nameOf(lane, action)} on ${this.data.devices[lane]}`,
      `takes ${seconds(end[action] - start[action])}`,
      `from ${seconds(start[action])} to ${seconds(end[action])}`,
    ];
    if (waited > 1e-12) lines.push(`the device waited ${seconds(waited)} before`);
    if (this.recorded) lines.push(...this.measuredWords(lane, action, end[action] - start[action]));
    const own = this.schedule.lanes[lane];
    const chosen = { stage: own.stage[action], kind: own.kind[action], mb: own.mb[action] };
    this.eachTransfer((source, target, mb, backward, leaves, arrives) => {
      if (!concerns(chosen, source, target, mb, backward)) return;
      const what = backward ? "gradients" : "values";
      if (source === chosen.stage) lines.push(`${what} reach stage ${target} after ${seconds(arrives - leaves)}`);
      else lines.push(`${what} of stage ${source} came at ${seconds(arrives)}`);
    });
    return lines;
  }

  measuredWords(lane, action, predicted) {
    const { start, end } = this.recorded.lanes[lane];
    const took = end[action] - start[action];
    const lines = [
      `measured: ${seconds(took)} (${change(took, predicted)}), from ${seconds(start[action])} to ${seconds(end[action])}`,
    ];
    const held = this.recorded.held?.[lane][action] ?? null;
    if (held !== null) lines.push(`measured: its device held ${bytes(held)} then`);
    return lines;
  }

  eachTransfer(visit) {
    const { data, result, schedule } = this;
    for (const [producer, consumer, forward, backward] of result.times.transfers) {
      if (data.stages[producer].lane === data.stages[consumer].lane) continue;
      for (let mb = 0; mb < schedule.microbatches; mb++) {
        const there = result.timeline.endOf(producer, F, mb);
        visit(producer, consumer, mb, false, there, there + forward);
        if (!schedule.keeps) continue;
        const back = result.timeline.endOf(consumer, B, mb);
        visit(consumer, producer, mb, true, back, back + backward);
      }
    }
  }

  // --- moved cuts ----------------------------------------------------------------------------------------------------

  recut() {
    const whole = !this.zoomed;
    this.stages = this.cutEditor.stages();
    this.result = this.moved ? recost(this.data, this.schedule, this.stages, this.planned.timeline) : this.planned;
    if (whole) this.view = this.wholeView();
    this.showMoves();
    this.drawSoon();
  }

  showMoves() {
    const { data, result } = this;
    byId("moved").hidden = !this.moved;
    byId("comparison").hidden = !this.moved;
    byId("unmoved").hidden = this.moved;
    if (!this.moved) return;
    const worst = this.worstVerdict();
    byId("moved-step").textContent = `${seconds(result.step)} (${change(result.step, data.step_s)})`;
    byId("moved-bubble").textContent = percent(result.bubble);
    byId("moved-peak").textContent = `${bytes(Math.max(...this.peaks()))}${worst ? `, ${MARKS[worst]}` : ""}`;
    byId("moves").replaceChildren(...movesOf(data, this.stages).map((text) => element("li", "", text)));
    const command = commandOf(data, this.stages);
    byId("as-command").hidden = command === null;
    byId("command").textContent = command ?? "";
    drawComparison(this, byId("comparison-rows"));
  }

  worstVerdict() {
    const found = this.data.devices.map((_, lane) => verdictOf(deviceNow(this, lane)));
    return ["no", "borderline", "fits"].find((verdict) => found.includes(verdict)) ?? null;
  }

  // --- drawing -------------------------------------------------------------------------------------------------------

  drawSoon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => {
      this.waiting = false;
      this.draw();
    });
  }

  draw() {
    // All places are measured before anything is changed: else the browser lays the page out once per chart.
    for (const chart of [this.timelineChart, this.memoryChart, this.frontierChart, this.cutEditor]) chart?.measure();
    this.timelineChart.draw();
    this.memoryChart?.draw();
    this.frontierChart?.draw();
    this.cutEditor?.draw();
    if (this.peaksOf !== this.result) drawPeaks(this, byId("peaks"));
    this.peaksOf = this.result;
    byId("zoom-out").disabled = byId("zoom-whole").disabled = !this.zoomed;
    byId("above").hidden = !this.memoryChart || !(this.memoryChart.scale().capacity > this.memoryChart.scale().most);
    byId("transfer-hint").hidden = this.transfersShown || !this.data.transfers.length;
  }

  followTheme() {
    const root = document.documentElement;
    const again = () => {
      this.colours = palette();
      this.draw();
    };
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
    byId("theme").addEventListener("change", (event) => {
      root.dataset.theme = event.target.value;
      again();
    });
    let before = null;
    addEventListener("beforeprint", () => {
      before = root.dataset.theme;
      root.dataset.theme = "light";
      again();
    });
    addEventListener("afterprint", () => {
      root.dataset.theme = before ?? "auto";
      again();
    });
  }
}

const app = new App(JSON.parse(byId("plan").textContent));
App.recost = recost; // for who wants to cost a cut from the console
app.draw();
app.showSteady();
app.readyMs = performance.now();
document.documentElement.dataset.ready = String(Math.round(app.readyMs));
window.autosplitPage = app;
