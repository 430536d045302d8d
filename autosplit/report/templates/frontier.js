// The plans that the search weighed: step time against the largest peak.

const WIDE = 4; // times the smallest peak: from there on their axis is logarithmic

class FrontierChart {
  constructor(app, svg) {
    Object.assign(this, { app, svg, chosen: app.data.frontier.findIndex((own) => own.plan) });
    if (this.chosen < 0) this.chosen = 0;
    svg.addEventListener("keydown", (event) => this.key(event));
  }

  measure() {
    this.room = this.svg.parentElement.clientWidth;
  }

  draw() {
    const { data } = this.app;
    const { room } = this;
    if (room === this.drawn) return; // its colours follow the style sheet, its points do not move
    const focused = this.points?.includes(document.activeElement);
    this.drawn = room;
    const [width, height] = [room, 300];
    const [left, right, top, bottom] = [64, 18, 24, 40];
    const capacity = Math.max(...devicesOf(data).map((own) => own.capacity ?? 0));
    const peaks = data.frontier.map((own) => own.peak_bytes);
    const reach = capacity && capacity <= 2 * Math.max(...peaks) ? [...peaks, capacity] : peaks;
    // Where sizes differ by much, what lies near the capacity would be one heap on a plain axis.
    const wide = Math.max(...reach) > WIDE * Math.min(...reach) && Math.min(...reach) > 0;
    const most = (wide ? 1.3 : 1.08) * Math.max(...reach);
    const least = wide ? Math.min(...reach) / 1.3 : 0;
    const steps = data.frontier.map((own) => own.step_s);
    const pad = 0.08 * (Math.max(...steps) - Math.min(...steps) || Math.max(...steps));
    const [from, to] = [Math.max(0, Math.min(...steps) - pad), Math.max(...steps) + pad];
    const x = (step) => left + ((step - from) / (to - from)) * (width - left - right);
    const up = wide ? (peak) => Math.log(peak / least) / Math.log(most / least) : (peak) => peak / most;
    const y = (peak) => height - bottom - up(peak) * (height - top - bottom);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    const drawn = [];
    const times = ticks(from, to, Math.max(2, (width - left - right) / 90));
    const labels = timeLabels(times);
    for (const [k, step] of times.entries()) {
      drawn.push(svgElement("line", { class: "grid", x1: x(step), x2: x(step), y1: top, y2: height - bottom }));
      drawn.push(svgElement("text", { class: "axis", x: x(step), y: height - 22, "text-anchor": "middle" }, labels[k]));
    }
    for (const size of wide ? byteDecades(least, most) : byteTicks(most, 5)) {
      drawn.push(svgElement("line", { class: "grid", x1: left, x2: width - right, y1: y(size), y2: y(size) }));
      drawn.push(svgElement("text", { class: "axis", x: left - 6, y: y(size) + 4, "text-anchor": "end" }, bytes(size)));
    }
    drawn.push(svgElement("text", { class: "axis", x: width - right, y: height - 4, "text-anchor": "end" }, "step time"));
    drawn.push(svgElement("text", { class: "axis", x: 2, y: 11 }, "largest peak"));
    if (capacity && capacity <= most) {
      drawn.push(svgElement("line", { class: "limit", x1: left, x2: width - right, y1: y(capacity), y2: y(capacity) }));
      const words = { class: "axis", x: left + 6, y: y(capacity) - 5 };
      drawn.push(svgElement("text", words, `capacity ${bytes(capacity)}`));
    }
    this.points = data.frontier.map((own, k) => this.point(own, k, x(own.step_s), y(own.peak_bytes)));
    this.svg.replaceChildren(...drawn, ...this.points);
    if (focused) this.points[this.chosen].focus();
  }

  point(own, k, x, y) {
    const shape = {
      fits: () => svgElement("circle", { cx: x, cy: y, r: 6 }),
      borderline: () => svgElement("path", { d: `M${x} ${y - 7}l7 12h-14z` }),
      no: () => svgElement("path", { d: `M${x - 6} ${y - 6}l12 12m0 -12l-12 12`, class: "cross" }),
    }[own.verdict]();
    const group = svgElement("g", { class: `point ${own.verdict}`, role: "img", "aria-label": this.figures(own).join(", ") });
    group.setAttribute("tabindex", k === this.chosen ? "0" : "-1");
    if (own.plan) group.append(svgElement("circle", { class: "ring", cx: x, cy: y, r: 12 }));
    group.append(svgElement("circle", { class: "reach", cx: x, cy: y, r: 14 }), shape);
    group.addEventListener("pointermove", (event) => this.app.tip.show(event, this.figures(own)));
    group.addEventListener("pointerleave", () => this.app.tip.hide());
    group.addEventListener("focus", () => this.mark(k));
    return group;
  }

  mark(k) {
    this.chosen = k;
    this.points.forEach((point, other) => point.setAttribute("tabindex", other === k ? "0" : "-1"));
    byId("alternatives")
      ?.querySelectorAll("tbody tr")
      .forEach((row, other) => row.classList.toggle("chosen", other === k));
  }

  figures(own) {
    return [
      own.plan ? `${own.title} (this plan)` : own.title,
      `step ${seconds(own.step_s)}`,
      `largest peak ${bytes(own.peak_bytes)}${own.replayed ? "" : " (by formula)"}`,
      MARKS[own.verdict],
    ];
  }

  key(event) {
    const last = this.points.length - 1;
    const to = {
      ArrowRight: Math.min(this.chosen + 1, last),
      ArrowDown: Math.min(this.chosen + 1, last),
      ArrowLeft: Math.max(this.chosen - 1, 0),
      ArrowUp: Math.max(this.chosen - 1, 0),
      Home: 0,
      End: last,
    }[event.key];
    if (event.key === "Escape") document.activeElement.blur();
    if (to === undefined) return;
    event.preventDefault();
    this.points[to].focus();
  }
}
