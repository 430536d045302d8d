// A step on the clock as schedule/simulate.py has it, and what moved cuts change of it.

const [F, B, I, W] = [0, 1, 2, 3];
const AGAIN = { never: () => 0, except_last: (count) => (count - 1) / count };

/** Whether a stage runs on a lane: its replicas are on lanes that follow each other. */
const runsOn = (stage, lane) => lane >= stage.lane && lane < stage.lane + stage.replicas;

/** The schedule of the plan: per lane the stage, kind and microbatch of each action, and what is in flight then. */
function readSchedule(data) {
  const microbatches = data.microbatches;
  const split = new Uint8Array(data.stages.length * microbatches);
  const lanes = data.lanes.map((actions, index) => {
    const count = actions.length;
    const lane = { index, count, stage: new Int32Array(count), kind: new Uint8Array(count), mb: new Int32Array(count) };
    for (const [k, action] of actions.entries()) {
      const [, stage, kind, mb] = action.match(/(\d+)([FBIW])(\d+)/);
      lane.stage[k] = stage;
      lane.kind[k] = "FBIW".indexOf(kind);
      lane.mb[k] = mb;
      if (lane.kind[k] === I) split[lane.stage[k] * microbatches + lane.mb[k]] = 1;
    }
    return lane;
  });
  const keeps = lanes.some((lane) => lane.kind.some((kind) => kind !== F));
  for (const lane of lanes) {
    lane.stages = data.stages.map((_, stage) => stage).filter((stage) => runsOn(data.stages[stage], lane.index));
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

/** What each device holds at its fullest moment; buffers count as parameters, as in its curve. */
function devicesOf(data) {
  return data.devices.map((_, lane) => {
    const own = data.stages.filter((stage) => runsOn(stage, lane)).map((stage) => stage.memory);
    const total = (name) => own.reduce((sum, memory) => sum + memory[`${name}_bytes`], 0);
    const parts = [total("parameter") + total("buffer"), ...["gradient", "optimizer", "activation", "transient"].map(total)];
    const { peak_bytes: peak, low_bytes: low, high_bytes: high, capacity_bytes: capacity, reserve_bytes: reserve } = own[0];
    return { peak, low, high, capacity, reserve, parts };
  });
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
  const members = data.stages.map(() => []);
  stages.forEach((stage, unit) => members[stage].push(data.units[unit]));
  return members.map((units, stage) => {
    const total = (figure) => units.reduce((sum, unit) => sum + unit[figure], 0);
    const recompute = data.stages[stage].recompute;
    const again = (AGAIN[recompute] ?? (() => 1))(data.microbatches);
    const ratio = ratios[stage];
    let most = Math.max(...units.map((unit) => unit.transient_bytes));
    let keeps = total("kept_bytes");
    if (recompute === "block") {
      most = Math.max(...units.map((unit) => unit.transient_bytes + (1 - ratio) * unit.kept_bytes));
      keeps *= ratio;
    } else if (recompute !== "never") {
      // A stage that is done again whole keeps what enters it; of the first one's inputs nothing changes.
      const before = members[stage - 1];
      const entering = before ? before[before.length - 1].sent_bytes : 0;
      most += Math.max(0, keeps - entering);
      keeps = entering;
    }
    return {
      forward_s: total("forward_s"),
      backward_s: total("backward_s") + again * total("forward_s"),
      weight_s: total("weight_s"),
      fixed: total("static_bytes"),
      kept: keeps,
      transient: most,
      sent: units[units.length - 1].sent_bytes,
    };
  });
}

function keptRatios(data, schedule) {
  return data.stages.map((stage, index) => {
    const lane = schedule.lanes[stage.lane];
    const place = lane.stages.indexOf(index);
    let most = 0;
    for (let k = 0; k < lane.count; k++) most = Math.max(most, lane.held[k * lane.stages.length + place]);
    const kept = most * data.units.reduce((sum, unit) => sum + (unit.stage === index ? unit.kept_bytes : 0), 0);
    return stage.recompute === "block" && kept > 0 ? Math.min(1, stage.memory.activation_bytes / kept) : 1;
  });
}

const scaled = (own, was, now) => (now === was ? own : was > 0 ? own * (now / was) : own + now);

function bottleneck(data, forward, backward) {
  const loads = data.lanes.map(() => 0);
  data.stages.forEach((stage, index) => (loads[stage.lane] += (forward[index] + backward[index]) / stage.replicas));
  return Math.max(...loads);
}

/** The plan's own times, as `simulate` takes them. */
function planTimes(data) {
  const column = (name) => data.stages.map((stage) => stage[name]);
  const transfers = data.transfers.map((own) => [own.producer, own.consumer, own.forward_s, own.backward_s]);
  return { forward: column("forward_s"), backward: column("backward_s"), weight: column("weight_s"), transfers };
}

/** What the plan costs with each unit in the stage that `stages` says; `planned` is its own step as simulated. */
function recost(data, schedule, stages, planned = simulate(data, schedule, planTimes(data))) {
  const ratios = keptRatios(data, schedule);
  const [old, now] = [data.units.map((unit) => unit.stage), stages].map((own) => sumsOf(data, own, ratios));
  const own = planTimes(data);
  const column = (name) => data.stages.map((stage, k) => scaled(stage[name], old[k][name], now[k][name]));
  const transfers = own.transfers.map(([producer, consumer, forward, backward]) => {
    const was = old[producer].sent;
    const share = consumer === producer + 1 && was > 0 ? now[producer].sent / was : 1;
    return [producer, consumer, share * forward, share * backward];
  });
  const times = { forward: column("forward_s"), backward: column("backward_s"), weight: column("weight_s"), transfers };
  const timeline = simulate(data, schedule, times);
  const memory = schedule.lanes.map((lane) => movedMemory(data, lane, old, now));
  return {
    times,
    timeline,
    step: data.step_s + (timeline.step - planned.step),
    bubble: timeline.bubble,
    bottleneck:
      data.bottleneck_s + (bottleneck(data, times.forward, times.backward) - bottleneck(data, own.forward, own.backward)),
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
  const base = data.curves ? totalsOf(data, lane) : null;
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
  return { peak: devicesOf(data)[lane.index].peak + grown, grown, fixed, activations, transient };
}

/** A kind's bytes at moment `k`; a kind that never changes is one number. */
const at = (values, k) => (typeof values === "number" ? values : values[k]);

/** What a device holds in all at each of its actions and in the optimizer's step. */
function totalsOf(data, lane) {
  const kinds = data.curves[lane.index];
  return Array.from({ length: lane.count + 1 }, (_, k) => kinds.reduce((sum, values) => sum + at(values, k), 0));
}
