"""Traces of made-up transformer stages: residual stream, norms, linears, weights' gradients, recompute, autocast."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

from autosplit.memory.pieces import Change, Held, Recompute, StageTrace, StageTraces, Step


@dataclass(frozen=True)
class Layer:
    """Bytes of one block: residual stream, hidden activation, and weight.

    ``cast``: of the weight under autocast; ``scratch``: what the activation's forward needs while it runs.
    """

    stream: int
    hidden: int
    weight: int
    cast: int = 0
    scratch: int = 0


@dataclass(frozen=True)
class Stage:
    """Some blocks, with ``logits`` behind them where it is the last stage."""

    layers: tuple[Layer, ...]
    logits: int = 0


class _Writer:
    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.ids = count(100)
        self.alive: dict[int, int] = {}
        self.gradients: dict[int, str] = {}
        self.kept: dict[int, str] = {}
        self.split: dict[str, Held] = {}
        self.gradient_ids = {name: next(self.ids) for name in self.weights()}
        self.cast_ids = {name: next(self.ids) for name in self.weights()}

    def weights(self) -> Iterator[str]:
        for index, _ in enumerate(self.stage.layers):
            yield from (f"{index}.up", f"{index}.down")

    def new(self, size: int) -> Change:
        storage = next(self.ids)
        self.alive[storage] = size
        return storage, size

    def drop(self, storage: int) -> Change:
        return storage, -self.alive.pop(storage)

    def cast(self, name: str, layer: Layer, *, first: bool) -> tuple[Change, ...]:
        if not layer.cast or not first:
            return ()
        self.kept[self.cast_ids[name]] = name
        return ((self.cast_ids[name], layer.cast),)

    def forward(self, index: int, layer: Layer, x: int, *, first: bool) -> tuple[list[Step], dict[str, int]]:
        """A block: x -> norm -> up -> act -> down -> + x."""
        steps, made = [], {"x": x}

        def node(name: str, *changes: Change) -> None:
            steps.append(Step(f"{index}.{name}", changes))

        for name, size, cast in (
            ("norm", layer.stream, False),
            ("up", layer.hidden, True),
            ("act", layer.hidden, False),
            ("down", layer.stream, True),
        ):
            change = self.new(size)
            made[name] = change[0]
            node(name, *(self.cast(f"{index}.{name}", layer, first=first) if cast else ()), change)
            if name == "act" and layer.scratch:
                scratch = self.new(layer.scratch)
                node(name, scratch, self.drop(scratch[0]))
        out = self.new(layer.stream)
        made["out"] = out[0]
        node("add", out, self.drop(made.pop("down")))
        return steps, made

    def backward(self, index: int, layer: Layer, made: dict[str, int], cotangent: int, *, mode: str) -> list[Step]:
        """The block's backward; frees what it saved but its input."""
        steps = []

        def gradient(name: str) -> tuple[Change, ...]:
            storage = self.gradient_ids[name]
            if mode == "later":
                return ((storage, layer.weight), (storage, -layer.weight))
            self.gradients[storage] = name
            return ((storage, layer.weight),)

        def node(name: str, *changes: Change) -> None:
            steps.append(Step(f"{index}.{name}", changes))

        into_act = self.new(layer.hidden)
        node("down", into_act, *gradient(f"{index}.down"), self.drop(made["act"]))
        into_up = self.new(layer.hidden)
        node("act", into_up, self.drop(into_act[0]), self.drop(made["up"]))
        into_norm = self.new(layer.stream)
        node("up", into_norm, *gradient(f"{index}.up"), self.drop(into_up[0]), self.drop(made["norm"]))
        into_x = self.new(layer.stream)
        node("norm", into_x, self.drop(into_norm[0]))
        total = self.new(layer.stream)
        node("add", total, self.drop(into_x[0]), self.drop(cotangent))
        self.result = total[0]
        if mode == "first":
            self.split[f"{index}.down"] = Held((made["act"],), layer.stream, (self.gradient_ids[f"{index}.down"],))
            self.split[f"{index}.up"] = Held((made["norm"],), layer.hidden, (self.gradient_ids[f"{index}.up"],))
        return steps


def trace(stage: Stage, how: str = "never") -> StageTrace:
    """Return a stage's trace under "never", "block" or "always" recompute."""
    writer = _Writer(stage)
    boundary = writer.new(stage.layers[0].stream)
    forward, made, inputs = [Step("", (boundary,))], [], [boundary[0]]
    for index, layer in enumerate(stage.layers):
        steps, own = writer.forward(index, layer, inputs[-1], first=True)
        forward += steps
        dead = [own.pop(name) for name in ("norm", "up", "act")] if how != "never" else []
        if how == "always" and index:
            dead.append(inputs[-1])
        forward.append(Step(f"{index}.add", tuple(writer.drop(storage) for storage in dead)))
        made.append(own)
        inputs.append(own["out"])
    if stage.logits:
        logits = writer.new(stage.logits)
        forward.append(Step("loss", (logits,)))
        inputs.append(logits[0])
    left = dict(writer.alive)
    passes = {}
    for mode in ("first", "later"):
        writer.alive = dict(left)
        passes[mode] = _backward(writer, stage, how, [dict(own) for own in made], list(inputs), mode=mode)
    return StageTrace(tuple(forward), passes["first"], passes["later"], writer.gradients, writer.kept, writer.split)


def _backward(
    writer: _Writer, stage: Stage, how: str, made: list[dict[str, int]], inputs: list[int], *, mode: str
) -> tuple[Step, ...]:
    result = inputs[-1]
    cotangent = writer.new(writer.alive[result])
    steps = [Step("", (cotangent,))]
    if stage.logits:
        into = writer.new(stage.layers[-1].stream)
        steps.append(Step("loss", (into, writer.drop(cotangent[0]))))
        cotangent = into
    writer.result = cotangent[0]
    if how == "always":
        x = inputs[0]
        for index, layer in enumerate(stage.layers):
            again, made[index] = writer.forward(index, layer, x, first=False)
            steps += again
            x = made[index]["out"]
    for index in reversed(range(len(stage.layers))):
        layer = stage.layers[index]
        if how == "block":
            again, own = writer.forward(index, layer, inputs[index], first=False)
            steps += [*again, Step(f"{index}.add", (writer.drop(own.pop("out")),))]
            made[index] |= own
        steps += writer.backward(index, layer, made[index], writer.result, mode=mode)
        if made[index]["out"] != result:
            steps.append(Step(f"{index}.add", (writer.drop(made[index]["out"]),)))
    rest = list(writer.alive)
    return (*steps, Step("", tuple(writer.drop(storage) for storage in rest)))


def traces(stage: Stage, recompute: Recompute = "never") -> StageTraces:
    """Return the traces that a stage needs under ``recompute``; "except_last" recomputes the stage as a whole."""
    how = "block" if recompute == "block" else "always"
    return StageTraces(
        recompute=recompute,
        never=trace(stage) if recompute in ("never", "except_last") else None,
        recomputed=trace(stage, how) if recompute != "never" else None,
    )


def model(stages: int, *, cast: bool = False, scratch: int = 0) -> tuple[Stage, ...]:
    """Return stages of unequal width and depth; the last has logits, those with an odd number scratch."""
    built = []
    for index in range(stages):
        width = 64 + 8 * (index % 3)
        layer = Layer(stream=width, hidden=4 * width, weight=900 + 50 * index, cast=450 if cast else 0)
        layer = replace(layer, scratch=scratch if index % 2 else 0)
        built.append(Stage((layer,) * (2 + index % 2), logits=1000 if index == stages - 1 else 0))
    return tuple(built)
