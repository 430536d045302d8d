// The model as a strip of units, with a handle on every cut: drag it, or move it with the arrow keys.

const HANDLE = 14; // pixels that a handle covers of the units beside it

class CutEditor {
  constructor(app, { strip, canvas, handles, labels }) {
    Object.assign(this, { app, strip, canvas, labels });
    const { units } = app.data;
    // A stage's units stay together, in model order: every cut of this order is legal.
    this.order = units.map((_, unit) => unit).sort((a, b) => units[a].stage - units[b].stage || a - b);
    this.own = app.data.stages.slice(1).map((_, k) => this.order.findIndex((unit) => units[unit].stage > k));
    this.cuts = [...this.own];
    const time = this.order.map((unit) => units[unit].forward_s + units[unit].backward_s);
    const total = time.reduce((sum, own) => sum + own, 0);
    const least = total ? total / (4 * time.length) : 1;
    this.edges = [0];
    for (const own of time) this.edges.push(this.edges[this.edges.length - 1] + Math.max(own, least));
    this.handles = this.cuts.map((_, k) => this.makeHandle(k));
    handles.replaceChildren(...this.handles);
  }

  get moved() {
    return this.cuts.some((cut, k) => cut !== this.own[k]);
  }

  /** The stage of every unit, in the plan's order of units. */
  stages() {
    const found = new Array(this.order.length);
    let stage = 0;
    this.order.forEach((unit, place) => {
      while (stage < this.cuts.length && place >= this.cuts[stage]) stage++;
      found[unit] = stage;
    });
    return found;
  }

  name(place) {
    return this.app.data.units[this.order[place]].name;
  }

  makeHandle(k) {
    const handle = element("div", "handle");
    handle.tabIndex = 0;
    handle.setAttribute("role", "slider");
    handle.setAttribute("aria-label", `cut between stage ${k} and stage ${k + 1}`);
    handle.append(element("span", "", String(k + 1)));
    handle.addEventListener("keydown", (event) => this.key(event, k));
    handle.addEventListener("pointerdown", (event) => {
      handle.setPointerCapture(event.pointerId);
      handle.focus({ preventScroll: true });
      this.dragged = k;
      event.preventDefault();
    });
    handle.addEventListener("pointermove", (event) => {
      if (this.dragged === k) this.drag(event, k);
      else this.app.tip.show(event, this.figures(k));
    });
    for (const end of ["pointerup", "pointercancel"]) handle.addEventListener(end, () => (this.dragged = null));
    handle.addEventListener("pointerleave", () => this.app.tip.hide());
    handle.addEventListener("blur", () => (this.dragged = null));
    return handle;
  }

  limits(k) {
    const low = (this.cuts[k - 1] ?? 0) + 1;
    const high = (this.cuts[k + 1] ?? this.order.length) - 1;
    return [low, high];
  }

  drag(event, k) {
    const box = this.canvas.getBoundingClientRect();
    const place = ((event.clientX - box.left) / box.width) * this.edges[this.edges.length - 1];
    const [low, high] = this.limits(k);
    let best = low;
    for (let cut = low; cut <= high; cut++) {
      if (Math.abs(this.edges[cut] - place) < Math.abs(this.edges[best] - place)) best = cut;
    }
    this.move(k, best);
    this.app.tip.show(event, this.figures(k));
  }

  key(event, k) {
    const [low, high] = this.limits(k);
    const to = {
      ArrowRight: this.cuts[k] + 1,
      ArrowUp: this.cuts[k] + 1,
      ArrowLeft: this.cuts[k] - 1,
      ArrowDown: this.cuts[k] - 1,
      PageUp: this.cuts[k] + 10,
      PageDown: this.cuts[k] - 10,
      Home: low,
      End: high,
    }[event.key];
    if (event.key === "Escape") this.move(k, Math.min(Math.max(this.own[k], low), high));
    else if (event.key === "Enter") this.app.say(this.figures(k).join(", "));
    else if (to === undefined || event.altKey || event.metaKey || event.ctrlKey) return;
    else this.move(k, Math.min(Math.max(to, low), high));
    event.preventDefault();
  }

  move(k, to) {
    if (this.cuts[k] === to) return;
    this.cuts[k] = to;
    this.app.recut();
  }

  reset() {
    this.cuts = [...this.own];
    this.app.recut();
  }

  figures(k) {
    const { data, result } = this.app;
    return [
      `cut between stage ${k} and ${k + 1}`,
      `behind ${this.name(this.cuts[k] - 1)}, before ${this.name(this.cuts[k])}`,
      `sends ${bytes(data.units[this.order[this.cuts[k] - 1]].sent_bytes)} per microbatch`,
      `step ${seconds(result.step)} (${change(result.step, data.step_s)})`,
    ];
  }

  /** Write a unit's name on it, or as much of its end as there is room for. */
  drawName(context, name, left, wide) {
    const parts = name.split(".");
    const texts = parts.map((_, k) => parts.slice(k).join("."));
    const text = texts.find((own) => context.measureText(own).width + 6 < wide);
    context.fillStyle = this.app.colours.onKinds;
    if (text) context.fillText(text, left + wide / 2, 12);
  }

  measure() {
    const around = getComputedStyle(this.strip.parentElement);
    const padding = parseFloat(around.paddingLeft) + parseFloat(around.paddingRight);
    this.room = this.strip.parentElement.clientWidth - padding;
  }

  draw() {
    const { colours } = this.app;
    const width = Math.max(this.room, 36 * (this.cuts.length + 1));
    const height = 46;
    const ratio = Math.min(window.devicePixelRatio || 1, 2);
    this.strip.style.width = `${width}px`;
    Object.assign(this.canvas, { width: Math.round(width * ratio), height: Math.round(height * ratio) });
    const context = this.canvas.getContext("2d");
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.font = `11px ${colours.font}`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const x = (place) => (this.edges[place] / this.edges[this.edges.length - 1]) * width;
    let stage = 0;
    for (let place = 0; place < this.order.length; place++) {
      while (stage < this.cuts.length && place >= this.cuts[stage]) stage++;
      const here = this.app.data.units[this.order[place]].stage === stage;
      context.fillStyle = here ? colours.kinds[F] : colours.kinds[B];
      const wide = x(place + 1) - x(place);
      context.globalAlpha = stage % 2 ? 0.86 : 1;
      context.fillRect(x(place), 0, wide > 3 ? wide - 1 : wide, height);
      context.globalAlpha = 1;
      const [left, right] = [place, place + 1].map((edge) => (this.cuts.includes(edge) ? HANDLE / 2 : 0));
      this.drawName(context, this.name(place), x(place) + left, wide - left - right);
    }
    const ends = [0, ...this.cuts, this.order.length];
    this.labels.replaceChildren(
      ...ends.slice(1).map((end, k) => {
        const wide = x(end) - x(ends[k]);
        const [first, last] = [this.name(ends[k]), this.name(end - 1)];
        const range = first === last ? first : `${first} to ${last}`;
        const full = `stage ${k}: ${range}`;
        const fits = context.measureText(full).width + 24 < wide;
        const label = element("span", "", fits ? full : wide > 60 ? `stage ${k}` : wide > 14 ? String(k) : "");
        label.title = range;
        label.style.left = `${(50 * (x(end) + x(ends[k]))) / width}%`;
        return label;
      }),
    );
    this.handles.forEach((handle, k) => {
      const [low, high] = this.limits(k);
      handle.style.left = `${(100 * x(this.cuts[k])) / width}%`;
      handle.setAttribute("aria-valuemin", low);
      handle.setAttribute("aria-valuemax", high);
      handle.setAttribute("aria-valuenow", this.cuts[k]);
      handle.setAttribute("aria-valuetext", this.figures(k).slice(1).join(", "));
    });
  }
}

/** Which units are elsewhere than in the plan: "layers.3 → stage 1"; runs of neighbours are one entry. */
function movesOf(data, stages) {
  const runs = [];
  stages.forEach((stage, unit) => {
    if (stage === data.units[unit].stage) return;
    const run = runs[runs.length - 1];
    if (run && run.stage === stage && run.last === unit - 1) run.last = unit;
    else runs.push({ first: unit, last: unit, stage });
  });
  const name = (unit) => data.units[unit].name;
  return runs.map(({ first, last, stage }) => {
    const count = last - first + 1;
    return `${name(first)}${count > 1 ? ` to ${name(last)} (${count} units)` : ""} → stage ${stage}`;
  });
}

/** The moves as the command line takes them; null where only a part of a module moved, which has no name there. */
function commandOf(data, stages) {
  const paths = data.units.map(({ name }) => name.replace(/ \(\d+\)$/, ""));
  const moves = new Set();
  for (const [unit, stage] of stages.entries()) {
    if (stage === data.units[unit].stage) continue;
    const parts = paths[unit].split(".");
    const prefixes = parts.map((_, k) => parts.slice(0, k + 1).join("."));
    const lies = (prefix, other) => paths[other] === prefix || paths[other].startsWith(`${prefix}.`);
    const whole = prefixes.find((prefix) => stages.every((to, other) => to === stage || !lies(prefix, other)));
    if (whole === undefined || !/^[\w.]+$/.test(whole)) return null;
    moves.add(`--move ${whole}=${stage}`);
  }
  return ["--plan plan.json", ...moves].join(" ");
}

/** The rows that compare a moved cut with the plan: the whole, then every stage that changed. */
function drawComparison(app, body) {
  const { data, result } = app;
  const worst = (peaks) => Math.max(...peaks);
  const rows = [
    ["step", seconds(data.step_s), seconds(result.step), change(result.step, data.step_s)],
    ["bubble", percent(data.bubble), percent(result.bubble), ""],
    [
      "slowest device, per microbatch",
      seconds(data.bottleneck_s),
      seconds(result.bottleneck),
      change(result.bottleneck, data.bottleneck_s),
    ],
    [
      "largest peak",
      bytes(worst(devicesOf(data).map((own) => own.peak))),
      bytes(worst(app.peaks())),
      change(worst(app.peaks()), worst(devicesOf(data).map((own) => own.peak))),
    ],
  ];
  data.stages.forEach((stage, k) => {
    const [was, now] = [stage.forward_s + stage.backward_s, result.times.forward[k] + result.times.backward[k]];
    if (now !== was) rows.push([`time of stage ${k}`, seconds(was), seconds(now), change(now, was)]);
  });
  body.replaceChildren(
    ...rows.map(([title, ...cells]) => {
      const row = element("tr");
      const names = ["plan", "moved", "change"];
      const named = (text, k) => Object.assign(element("td", "number", text), { title: names[k] });
      row.append(element("th", "", title), ...cells.map(named));
      return row;
    }),
  );
}
