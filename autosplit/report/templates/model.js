// A step on the clock, and what moved cuts change: the sums of schedule/simulate.py and planning/recost.py.

const [F, B, I, W] = [0, 1, 2, 3];
const AGAIN = { never: () => 0, except_last: (count) => (count - 1) / count };

/** The schedule of the plan: per lane the stage, kind and microbatch of each action, and what is in flight then. */
function readSchedule(data) {
  const microbatches = data.microbatches;
  const split = new Uint8Array(data.stages.length * microbatches);
  const lanes = data.lanes.map((flat, index) => {
    const count = flat.length / 3;
    const lane = { index, count, stage: new Int32Array(count), kind: new Uint8Array(count), mb: new Int32Array(count) };
    for (let k = 0; k < count; k++) {
      lane.stage[k] = flat[3 * k];
      lane.kind[k] = flat[3 * k + 1];
      lane.mb[k] = flat[3 * k + 2];
      if (lane.kind[k] === I) split[lane.stage[k] * microbatches + lane.mb[k]] = 1;
    }
    return lane;
  });
  const keeps = lanes.some((lane) => lane.kind.some((kind) => kind !== F));
  for (const lane of lanes) {
    lane.stages = data.stages.map((_, stage) => stage).filter((stage) => data.stages[stage].lane === lane.index);
    lane.held = inFlight(lane, keeps);
  }
  return { lanes, microbatches, split, keeps };
}

/** Microbatches that each stage of a lane holds while each of its actions runs: from F to B, or to W. */
function inFlight(lane, keeps) {
  const width = lane.stages.length;
  const held = new Int32Array(lane.count * width);
  const now = new Int32Array(width);
  for (let k = 0; k < lane.count; k++) {
    const place = lane.stages.indexOf(lane.stage[k]);
    if (lane.kind[k] === F) now[place] += 1;
    held.set(now, k * width);
    if (lane.kind[k] === B || lane.kind[k] === W || !keeps) now[place] -= 1;
  }
  return held;
}

/** When each action starts and ends. An action starts when its lane is free and what it needs has ended and arrived. */
function simulate(data, schedule, times) {
  const { lanes, microbatches, split } = schedule;
  const last = data.stages.length - 1;
  const ends = new Float64Array((last + 1) * microbatches * 4).fill(NaN);
  const slot = (stage, kind, mb) => (stage * microbatches + mb) * 4 + kind;
  const gradient = (stage, mb) => slot(stage, split[stage * microbatches + mb] ? I : B, mb);
  const { coming, back } = delaysOf(data, times.transfers);
  const length = [
    times.forward,
    times.backward,
    times.backward.map((whole, stage) => whole - times.weight[stage]),
    times.weight,
  ];
  const ready = (stage, kind, mb) => {
    if (kind === W) return ends[slot(stage, I, mb)];
    let at = kind === F ? 0 : ends[slot(stage, F, mb)];
    // Math.max of a NaN is NaN: what has not ended yet makes the action wait.
    if (kind === F && stage > 0) at = Math.max(at, ends[slot(stage - 1, F, mb)]);
    if (kind !== F && stage < last) at = Math.max(at, ends[gradient(stage + 1, mb)]);
    for (const [other, seconds] of (kind === F ? coming : back)[stage]) {
      at = Math.max(at, ends[kind === F ? slot(other, F, mb) : gradient(other, mb)] + seconds);
    }
    return at;
  };
  const found = lanes.map((lane) => ({
    start: new Float64Array(lane.count),
    end: new Float64Array(lane.count),
    next: 0,
    free: 0,
    busy: 0,
  }));
  for (let moved = true; moved; ) {
    moved = false;
    lanes.forEach((lane, index) => {
      const own = found[index];
      for (; own.next < lane.count; own.next++) {
        const [stage, kind, mb] = [lane.stage[own.next], lane.kind[own.next], lane.mb[own.next]];
        const start = Math.max(own.free, ready(stage, kind, mb));
        if (Number.isNaN(start)) break;
        own.start[own.next] = start;
        own.end[own.next] = ends[slot(stage, kind, mb)] = own.free = start + length[kind][stage];
        own.busy += length[kind][stage];
        moved = true;
      }
    });
  }
  const step = Math.max(0, ...found.map((own) => own.free));
  const busy = found.reduce((sum, own) => sum + own.busy, 0);
  const endOf = (stage, kind, mb) => ends[kind === F ? slot(stage, F, mb) : gradient(stage, mb)];
  return { lanes: found, step, bubble: step ? 1 - busy / (step * lanes.length) : 0, endOf };
}

/** By waiting stage, the stages of other lanes whose values travel to it, and for how long. */
function delaysOf(data, transfers) {
  const coming = data.stages.map(() => []);
  const back = data.stages.map(() => []);
  for (const [producer, consumer, forward, backward] of transfers) {
    if (data.stages[producer].lane === data.stages[consumer].lane) continue;
    coming[consumer].push([producer, forward]);
    back[producer].push([consumer, backward]);
  }
  return { coming, back };
}

/** What the units of each stage add up to; `ratios` say which part of what is kept stays under "block". */
function sumsOf(data, stages, ratios) {
  const { forward, backward, weight, fixed, kept, transient, sent } = data.units;
  const members = data.stages.map(() => []);
  stages.forEach((stage, unit) => members[stage].push(unit));
  return members.map((units, stage) => {
    const total = (column) => units.reduce((sum, unit) => sum + column[unit], 0);
    const recompute = data.stages[stage].recompute;
    const again = (AGAIN[recompute] ?? (() => 1))(data.microbatches);
    const ratio = ratios[stage];
    let most = Math.max(...units.map((unit) => transient[unit]));
    let keeps = total(kept);
    if (recompute === "block") {
      most = Math.max(...units.map((unit) => transient[unit] + (1 - ratio) * kept[unit]));
      keeps *= ratio;
    } else if (recompute !== "never") {
      // A stage that is done again whole keeps what enters it; of the first one's inputs nothing changes.
      const before = members[stage - 1];
      const entering = before ? sent[before[before.length - 1]] : 0;
      most += Math.max(0, keeps - entering);
      keeps = entering;
    }
    return {
      forward: total(forward),
      backward: total(backward) + again * total(forward),
      weight: total(weight),
      fixed: total(fixed),
      kept: keeps,
      transient: most,
      sent: sent[units[units.length - 1]],
    };
  });
}

function keptRatios(data, schedule) {
  return data.stages.map((stage, index) => {
    const lane = schedule.lanes[stage.lane];
    const place = lane.stages.indexOf(index);
    let most = 0;
    for (let k = 0; k < lane.count; k++) most = Math.max(most, lane.held[k * lane.stages.length + place]);
    const kept = most * data.units.stage.reduce((sum, own, unit) => sum + (own === index ? data.units.kept[unit] : 0), 0);
    return stage.recompute === "block" && kept > 0 ? Math.min(1, stage.activations / kept) : 1;
  });
}

const scaled = (own, was, now) => (now === was ? own : was > 0 ? own * (now / was) : own + now);

function bottleneck(data, forward, backward) {
  const loads = data.lanes.map(() => 0);
  data.stages.forEach((stage, index) => (loads[stage.lane] += forward[index] + backward[index]));
  return Math.max(...loads);
}

/** The plan's own times, as `simulate` takes them. */
function planTimes(data) {
  const column = (name) => data.stages.map((stage) => stage[name]);
  return { forward: column("forward"), backward: column("backward"), weight: column("weight"), transfers: data.transfers };
}

/** What the plan costs with each unit in the stage that `stages` says; `planned` is its own step as simulated. */
function recost(data, schedule, stages, planned = simulate(data, schedule, planTimes(data))) {
  const ratios = keptRatios(data, schedule);
  const [old, now] = [sumsOf(data, data.units.stage, ratios), sumsOf(data, stages, ratios)];
  const own = planTimes(data);
  const column = (name) => data.stages.map((stage, k) => scaled(stage[name], old[k][name], now[k][name]));
  const transfers = data.transfers.map(([producer, consumer, forward, backward]) => {
    const was = old[producer].sent;
    const share = consumer === producer + 1 && was > 0 ? now[producer].sent / was : 1;
    return [producer, consumer, share * forward, share * backward];
  });
  const times = { forward: column("forward"), backward: column("backward"), weight: column("weight"), transfers };
  const timeline = simulate(data, schedule, times);
  const memory = schedule.lanes.map((lane) => movedMemory(data, lane, old, now));
  return {
    times,
    timeline,
    step: data.step + (timeline.step - planned.step),
    bubble: timeline.bubble,
    bottleneck:
      data.bottleneck + (bottleneck(data, times.forward, times.backward) - bottleneck(data, own.forward, own.backward)),
    memory,
    peaks: memory.map((lane) => lane.peak),
  };
}

/** A device's peak after the move, and by how much its parts change at each of its actions and in the optimizer's step. */
function movedMemory(data, lane, old, now) {
  const width = lane.stages.length;
  const change = (name, stage) => now[stage][name] - old[stage][name];
  const fixed = lane.stages.reduce((sum, stage) => sum + change("fixed", stage), 0);
  const activations = new Float64Array(lane.count + 1);
  const transient = new Float64Array(lane.count + 1);
  let [was, is] = [-Infinity, -Infinity];
  const base = data.curves ? totalsOf(data.curves[lane.index]) : null;
  const start = lane.stages.reduce((sum, stage) => sum + old[stage].fixed, 0);
  for (let k = 0; k <= lane.count; k++) {
    let before = base ? base[k] : start;
    if (k < lane.count) {
      lane.stages.forEach((stage, place) => {
        const count = lane.held[k * width + place];
        activations[k] += count * change("kept", stage);
        if (!base) before += count * old[stage].kept;
      });
      transient[k] = change("transient", lane.stage[k]);
      if (!base) before += old[lane.stage[k]].transient;
    }
    was = Math.max(was, before);
    is = Math.max(is, before + fixed + activations[k] + transient[k]);
  }
  const grown = Math.floor(is - was + 0.5);
  return { peak: data.memory[lane.index].peak + grown, grown, fixed, activations, transient };
}

/** A kind's bytes at moment `k`; a kind that never changes is one number. */
const at = (values, k) => (typeof values === "number" ? values : values[k]);

function totalsOf(curve) {
  return Array.from({ length: curve.moments }, (_, k) => curve.kinds.reduce((sum, values) => sum + at(values, k), 0));
}
