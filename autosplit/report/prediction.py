"""What a plan amounts to: step, imbalance, bottleneck and its proof, the verdict on every device, and other plans."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from autosplit.planning.explain.verdicts import DeviceVerdict, binding, device_verdicts
from autosplit.planning.plan.fields import Generation, MeshAlternative
from autosplit.planning.plan.plan import Plan
from autosplit.report.document import Section, column, room_beside, table_width
from autosplit.report.words import clip, format_rate, format_usd, numbers, recompute_words, schedule_words, size_words
from autosplit.units import format_bytes, format_seconds, plural

COLLAPSED_SHARE = 0.5
HINDERED_SHARE = 0.1
_VERDICTS = {"fits": "fits; ", "borderline": "borderline: ", "no": "DOES NOT FIT: "}
_TERMS = {
    "states": "parameters, gradients and optimizer state",
    "activations": "activations",
    "transient": "what lives inside one operation",
}


def shares(plan: Plan) -> bool:
    """Tell whether stages are not simply one per device, in order."""
    return bool(plan.replicas) or any(stage.lane != stage.index for stage in plan.stages)


def prediction(plan: Plan) -> Section:
    """Return the facts that the plan's tables amount to."""
    unit = "device" if shares(plan) else "stage"
    totals = [0.0] * max(stage.lane + stage.replicas for stage in plan.stages)
    for stage in plan.stages:
        for lane in range(stage.lane, stage.lane + stage.replicas):
            totals[lane] += (stage.forward_s + stage.backward_s) / stage.replicas
    mean = sum(totals) / len(totals)
    slowest = totals.index(max(totals))
    ratio = f"{max(totals) / mean:.2f}" if mean else "1.00"
    steps = plan.objective == "step_time"
    step = f"{format_seconds(plan.step_s)}, bubble {plan.bubble:.1%}"
    if plan.overhead_s:
        step += f", {format_seconds(plan.overhead_s)} of it the runtime's and for lanes that share the host's memory"
    bottleneck = f"{format_seconds(plan.bottleneck_s)} per microbatch"
    facts = (
        ("step", f"{step}, {proof(plan)}" if steps else step),
        *_hangs_on(plan),
        *_speed(plan),
        *price(plan),
        ("imbalance", f"{ratio} (slowest {unit} over the mean; the slowest is {unit} {slowest})"),
        ("bottleneck", bottleneck if steps else f"{bottleneck}, {proof(plan)}"),
        *_classes(plan),
        ("memory", f"{_VERDICTS[plan.verdict] if binding(plan) else ''}{memory_words(plan)}"),
    )
    return Section("Prediction", facts=facts)


def generation(plan: Plan) -> Iterator[Section]:
    """Yield what generating text takes beside reading the prompts, which the plan is of."""
    made = plan.generation
    if made is None:
        return
    rows, total = sum(plan.microbatch_rows), sum(made.cache_bytes)
    each = ", ".join(f"{format_bytes(size)} on stage {stage}" for stage, size in enumerate(made.cache_bytes))
    prefill = f"{format_rate(plan.tokens_per_s or 0)} tokens/s"
    facts = [
        ("cache", f"{format_bytes(total)} at the last token, {format_bytes(total // rows)} of a row: {each}"),
        ("prefill", f"{format_seconds(plan.step_s)} for {plural(rows, 'prompt')}: {prefill}"),
        *_schedules(plan, made, rows),
        ("cut", "by the bytes that a token reads: weights and cache"),
    ]
    if made.largest_batch is not None and made.largest_prompt is not None:
        longest = made.largest_prompt + made.new if made.largest_prompt else 0
        words = f"about {plural(made.largest_batch, 'row')} of {made.prompt + made.new} tokens; "
        words += f"the longest context of {plural(rows, 'row')} is about {longest} tokens"
        facts.append(("fits", words))
    yield Section(f"Generating {made.new} tokens behind prompts of {made.prompt}", facts=tuple(facts))


def _schedules(plan: Plan, made: Generation, rows: int) -> Iterator[tuple[str, str]]:
    """Yield how long a token of all rows takes in many groups and in one, and which of these is planned."""
    many = "as many groups as stages" if made.groups == 1 else plural(made.groups, "group")
    ways = {"throughput": (made.throughput_s, f"{many} in turn, all stages at work")}
    ways["latency"] = made.latency_s, "one group, one stage at work at a time"
    for name, (other_s, words) in ways.items():
        planned = (name == "latency") == (made.groups == 1)
        seconds = made.decode_s if planned else other_s
        if seconds is None or not (planned or 1 not in (rows, len(plan.stages))):
            continue
        words += f": {format_seconds(seconds)} from one token of all rows to the next, "
        words += f"{format_rate(rows / seconds)} tokens/s{' (planned)' * planned}"
        if planned and made.issue_s > seconds:
            words += f"; the host issues kernels for {format_seconds(made.issue_s)}: the pace without CUDA graphs"
        if rows == 1 < len(plan.stages):
            words += "; a batch of one row keeps one of the devices at work, give more rows for the others"
        yield name, words


def proof(plan: Plan) -> str:
    """Return how far from the best cut the plan's is, and of which plans that is the best: others than cuts may win."""
    if plan.status != "optimal" and plan.lower_bound_s <= 0:
        return "no lower bound is known"
    again = all(stage.recompute != "never" for stage in plan.stages)
    fixed = "schedule, chunks and recompute" if again else "schedule and chunks"
    if plan.status == "optimal":
        return f"the least of all cuts with the same {fixed}"
    bound = f"lower bound {format_seconds(plan.lower_bound_s)}"
    return f"at most {plan.gap:.1%} above the least of all cuts with the same {fixed} ({bound})"


def _hangs_on(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield between what times the step may come out, and how much longer it is where something is slower."""
    if plan.step_low_s is None or plan.step_high_s is None:
        return
    hangs = [f"with {each.what} {each.ratio - 1:.0%} longer" for each in plan.sensitivity]
    yield "range", f"{format_seconds(plan.step_low_s)} to {format_seconds(plan.step_high_s)}; {', '.join(hangs)}"


def _speed(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield how many tokens or rows a second has, and which part of the devices' arithmetic the model uses."""
    if plan.rows_per_s is None:
        return
    rows = f"{format_rate(plan.rows_per_s)} rows/s"
    speed = rows if plan.tokens_per_s is None else f"{format_rate(plan.tokens_per_s)} tokens/s ({rows})"
    counted = "model FLOPs utilisation (MFU, causal attention counted in full)"
    used = "" if plan.mfu is None else f", {plan.mfu:.1%} {counted}"
    yield "speed", f"{speed}{used}"


def price(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what the tokens and an hour of all devices cost."""
    if plan.price is not None:
        tokens = plan.price.usd_per_billion_tokens
        per_tokens = "" if tokens is None else f"{format_usd(tokens)} per 1B tokens, "
        yield "price", f"{per_tokens}{format_usd(plan.price.usd_per_hour)} per hour ({plan.price.source})"


def _classes(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield the share of FLOPs per class, and what a large ``full`` share means for the pipeline."""
    each = ", ".join(f"{name} {plan.class_flops.get(name, 0.0):.1%}" for name in ("micro", "full", "shared"))
    yield "classes", f"{each} of the forward FLOPs"
    full = plan.class_flops.get("full", 0.0)
    if full < HINDERED_SHARE:
        return
    state = "has collapsed" if full >= COLLAPSED_SHARE else "is held back"
    count = max(stage.lane + stage.replicas for stage in plan.stages)
    stages = plural(count, "device" if shares(plan) else "stage")
    limit = 1 / (full + (1 - full) / count)
    yield (
        "pipeline",
        f"The pipeline {state}: {full:.0%} of the work mixes rows of the batch and runs once, on merged "
        f"values, outside the microbatches; {stages} can be at most {limit:.2f} times as fast as one.",
    )


def memory_words(plan: Plan) -> str:
    """Return the numbers of the device that is nearest to its capacity; the verdict stands before or above them."""
    tightest = binding(plan)
    if tightest is None:
        worst = max(device_verdicts(plan), key=lambda verdict: verdict.peak_bytes)
        peak = f"the largest peak is {format_bytes(worst.peak_bytes)} on {_holder(plan, worst)}"
        return f"not judged: no capacity is known (memory_limit= sets one), {peak}"
    holder = _holder(plan, tightest)
    numbers = f"needs {needs_words(tightest)}, {tightest.device} has {has_words(tightest)}"
    if plan.verdict == "fits":
        return f"the tightest is {holder}: it {numbers}"
    if plan.verdict == "borderline":
        return f"{holder} {numbers}{odds_words(tightest)}"
    way_out = "" if plan.changes else "; more devices, more chunks or a smaller batch need less"
    return f"{holder} {numbers}; {term_words(tightest)}{way_out}"


def needs_words(device: DeviceVerdict) -> str:
    """Return a device's peak, with its range where one was predicted."""
    peak = format_bytes(device.peak_bytes)
    if device.low_bytes == device.high_bytes:
        return peak
    return f"{peak} ({format_bytes(device.low_bytes)} to {format_bytes(device.high_bytes)})"


def odds_words(device: DeviceVerdict) -> str:
    """Return how likely a device has the room, where that is known."""
    if device.odds is None:
        return ""
    about = "above 95%" if device.odds > 0.95 else "below 5%" if device.odds < 0.05 else f"of about {device.odds:.0%}"
    return f"; fits with a chance {about}"


def has_words(device: DeviceVerdict) -> str:
    """Return a device's capacity, and the part of it that is kept in reserve."""
    reserve = f", {format_bytes(device.reserve_bytes)} of it in reserve" if device.reserve_bytes else ""
    return f"{format_bytes(device.capacity_bytes or 0)}{reserve}"


def term_words(device: DeviceVerdict) -> str:
    """Return what takes the most of a device's peak, and how much."""
    if device.term == "states" and device.capacity_bytes is not None and device.states_bytes > device.capacity_bytes:
        return f"its {_TERMS['states']} alone are {format_bytes(device.states_bytes)}"
    return f"{format_bytes(device.term_bytes)} of that are {_TERMS[device.term]}"


def _holder(plan: Plan, device: DeviceVerdict) -> str:
    return f"device {device.lane}" if shares(plan) else f"stage {device.stages[0]}"


FRONTIER_ROWS = 12
MESH_ROWS = 8


def verdicts(plan: Plan, *, width: int | None) -> Iterator[Section]:
    """Yield one row per device, where a capacity is known: what it needs and has, and what most of that is."""
    rows = device_verdicts(plan)
    if all(row.verdict is None for row in rows):
        return
    ranged = any(row.low_bytes != row.high_bytes for row in rows)
    several = any(row.stages != (row.lane,) for row in rows)
    stages = [column("stages", rows, lambda row: numbers(row.stages), align="left")] if several else []
    columns = (
        column("needs", rows, lambda row: format_bytes(row.peak_bytes)),
        *([column("range", rows, _range, align="left")] if ranged else []),
        column("has", rows, lambda row: size_words(row.capacity_bytes)),
        column("verdict", rows, _verdict, align="left"),
        column("most of it", rows, _most, align="left"),
    )
    device = column("device", rows, lambda row: f"{row.lane}: {row.device}", align="left")
    if width is not None and table_width([device, *stages, *columns]) > width:
        # The table of stages has the names of the devices, and which stages they run.
        device, stages = column("device", rows, lambda row: str(row.lane)), []
    yield Section("Verdict per device", columns=(device, *stages, *columns))
    tightest = binding(plan)
    if tightest is not None and tightest.items:
        yield _range_of(tightest)


def _range_of(device: DeviceVerdict) -> Section:
    """Return what a device's range is made of: each item's least and most, and where that is from."""
    columns = (
        column("item", device.items, lambda item: item.name, align="left"),
        column("least", device.items, lambda item: format_bytes(item.low_bytes)),
        column("most", device.items, lambda item: format_bytes(item.high_bytes)),
        column("", device.items, lambda item: item.source, align="left"),
    )
    below = "the peak is in its range nine times in ten: items are uniform and independent, their sum is normal"
    return Section(f"Range of the peak of device {device.lane}", columns=columns, below=(below,))


def _verdict(row: DeviceVerdict) -> str:
    """Return the verdict, and of a borderline one the odds."""
    odds = f", {row.odds:.0%}" if row.verdict == "borderline" and row.odds is not None else ""
    return f"{row.verdict or '-'}{odds}"


def changes(plan: Plan) -> Iterator[Section]:
    """Yield what would make a plan fit, the cheapest first."""
    if plan.changes:
        title = "What would give it room to spare" if plan.verdict == "borderline" else "What would make it fit"
        if plan.verdict == "fits":
            title = "What would need less"
        yield Section(f"{title}, the cheapest first", points=tuple(change.text for change in plan.changes))


def frontier(plan: Plan, *, width: int | None) -> Iterator[Section]:
    """Yield the plans that none beats in both step and peak, the fastest first."""
    if len(plan.frontier) < 2:
        return
    chosen = plan.alternative.choice
    shown = [row for index, row in enumerate(plan.frontier) if index < FRONTIER_ROWS or row.choice == chosen]
    left = len(plan.frontier) - len(shown)
    below = [f"and {left} slower ones that need less"] if left else []
    if not all(row.replayed for row in shown):
        below.append("~: by the solver's formula, not replayed")
    setting = (
        column("chunks", shown, lambda row: str(row.chunks)),
        column(
            "schedule", shown, lambda row: schedule_words(row.schedule, row.virtual_stages, row.replicas), align="left"
        ),
    )
    outcome = (
        column("step", shown, lambda row: format_seconds(row.step_s)),
        column("largest peak", shown, lambda row: f"{'' if row.replayed else '~'}{format_bytes(row.peak_bytes)}"),
        column("verdict", shown, lambda row: row.verdict, align="left"),
        column("", shown, lambda row: "this plan" if row.choice == chosen else "", align="left"),
    )
    room = room_beside([*setting, *outcome], width=width)
    recompute = column("recompute", shown, lambda row: clip(recompute_words(row.recompute), width=room), align="left")
    yield Section(
        "Plans that none beats in both step and memory", columns=(*setting, recompute, *outcome), below=tuple(below)
    )


def meshes(plan: Plan) -> Iterator[Section]:
    """Yield other meshes that were planned, the fastest first, and those that their lower bounds rule out."""
    planned = [row for row in plan.meshes if not row.bound]
    if planned:
        yield _planned_meshes(plan, planned)
    small = [row for row in plan.meshes if row.bound and row.verdict == "no"]
    slow = [row for row in plan.meshes if row.bound and row.verdict != "no"]
    texts = {
        "parameters, gradients and optimizer state alone are more than a device has": small,
        "by the lower bounds of their steps no better than the plan": slow,
    }
    points = tuple(f"{plural(len(rows), 'mesh')}, {why}: {_some(rows)}" for why, rows in texts.items() if rows)
    if points:
        yield Section("Meshes that were not searched", points=points)


def _some(rows: Sequence[MeshAlternative]) -> str:
    more = f", and {len(rows) - MESH_ROWS} more" if len(rows) > MESH_ROWS else ""
    return "; ".join(str(row.mesh) for row in rows[:MESH_ROWS]) + more


def _planned_meshes(plan: Plan, rows: Sequence[MeshAlternative]) -> Section:
    shown = rows[:MESH_ROWS]
    columns = (
        column("mesh", shown, lambda row: str(row.mesh), align="left"),
        column("step", shown, lambda row: format_seconds(row.step_s)),
        column("against this plan", shown, lambda row: f"{row.step_s / plan.step_s - 1:+.0%}" if plan.step_s else ""),
        column("verdict", shown, lambda row: row.verdict or "-", align="left"),
    )
    left = (f"and {len(rows) - len(shown)} more",) if len(rows) > len(shown) else ()
    return Section("Other meshes that were planned", columns=columns, below=left)


def _range(row: DeviceVerdict) -> str:
    low, high = format_bytes(row.low_bytes), format_bytes(row.high_bytes)
    (number, unit), other = low.split(), high.split()[1]
    return f"{number if unit == other else low} to {high}"


def _most(row: DeviceVerdict) -> str:
    return f"{row.term} {row.term_bytes / row.peak_bytes:.0%}" if row.peak_bytes else "-"
