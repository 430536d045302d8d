"""Compares a pipe with the plain model: the same script of calls, run once on each, every value written down.

The script is a training loop as a user writes it: rounds of forward, loss, backward and optimizer step, by a call and
by `train_step`, at two batch sizes, then a call in eval mode. After each step it writes down outputs, loss, gradients,
the caller's own tensors, every module's ``__dict__``, hooks, buffers and class, what the subject keeps outside its
modules, and the state of the random generators. The two records must be equal.
"""

from __future__ import annotations

import random
import re
import signal
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import nn

from autosplit import AutosplitError, Sample, autosplit
from benchmarks.strangers.freeze import differences, first_tensor, freeze, module_state

_ROOT = f"{Path(__file__).parents[2]}/"

ROWS = (7, 5, 7)
LIMIT_S = 240
TOLERANCE = 1e-8
PIPELINED_SHARE = 0.7  # more than 30% of the FLOPs outside is a collapse
Batch = tuple[tuple[Any, ...], dict[str, Any]]


def loss_by_hand(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return a mean over rows that autosplit has to prove."""
    flat = first_tensor(output).flatten(1)
    return ((flat - target[:, None]) ** 2).mean()


def loss_of_torch(output: Any, target: torch.Tensor) -> torch.Tensor:
    """Return one of torch's losses, over one value per row."""
    return nn.functional.mse_loss(first_tensor(output).flatten(1).mean(1), target)


@dataclass(frozen=True)
class Subject:
    """A model under test: how to build it afresh, its batches, and the state that it keeps outside its modules.

    ``build`` also resets whatever the model keeps in globals, closures and classes.
    """

    name: str
    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[Any, torch.Tensor], torch.Tensor] = loss_by_hand
    outside: Callable[[], Any] = lambda: None
    extra_loss: Callable[[nn.Module], torch.Tensor] | None = None
    leaf_inputs: bool = True
    between: Callable[[nn.Module, int], None] = lambda model, round_: None
    options: Mapping[str, Any] = field(default_factory=dict)
    rows: Sequence[int] = ROWS


@dataclass(frozen=True)
class Setup:
    """How the pipe runs: lanes, recompute, which of call and train_step comes first, and whether it gets a sample."""

    lanes: str = "threads"
    recompute: str = "never"
    order: tuple[str, ...] = ("call", "train_step")
    sample: bool = False
    devices: int = 2
    chunks: int = 3

    def __str__(self) -> str:
        return f"{self.lanes}, recompute {self.recompute}, {' then '.join(self.order)}{', sample' * self.sample}"


CALL_FIRST, STEP_FIRST = ("call", "train_step"), ("train_step", "call")
SETUPS = (
    Setup(),
    Setup(lanes="inline", order=STEP_FIRST, sample=True),
    Setup(recompute="always", order=STEP_FIRST),
    Setup(lanes="inline", recompute="block"),
    Setup(recompute="block", sample=True),
    Setup(lanes="inline", recompute="always"),
)


@dataclass(frozen=True)
class Result:
    """What one subject did under one setup."""

    name: str
    kind: str
    setup: str
    answer: str  # "pipelines", "once per step", "module tree", "refused"
    outcome: str  # "equal", "wrong", "refused", "raw error", "plain fails"
    off: str = ""
    error: str = ""
    chunks: int = 0
    share: float = 0.0
    cpu_s: float = 0.0
    notes: tuple[str, ...] = ()


class _Plain:
    """The plain model behind the two ways of the pipe."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def train_step(self, *args: Any, target: Any, loss_fn: Callable[..., torch.Tensor], **kwargs: Any) -> torch.Tensor:
        loss = loss_fn(self.model(*args, **kwargs), target)
        loss.backward()
        return loss.detach()


class Script:
    """One run of a subject: the record of what was seen, and how far it came."""

    def __init__(self, subject: Subject, setup: Setup, seed: int) -> None:
        self.subject, self.setup = subject, setup
        random.seed(seed)
        numpy.random.seed(seed)
        torch.manual_seed(seed)
        self.model = subject.build().double().train()
        self.seen: list[tuple[str, Any]] = []
        self.optimizer: torch.optim.Optimizer | None = None

    def batch(self, round_: int) -> tuple[Batch, torch.Tensor]:
        """Return the inputs and target of a round; the same for the plain model and the pipe."""
        with torch.random.fork_rng():
            torch.manual_seed(100 + round_)
            rows = self.subject.rows[round_ % len(self.subject.rows)]
            args, kwargs = self.subject.batch(rows)
            return (args, kwargs), torch.randn(rows, dtype=torch.float64)

    def run(self, runner: Any) -> None:
        """Run all rounds and the evaluation."""
        self._note("after the split")
        for round_ in range(3):
            self.subject.between(self.model, round_)
            for how in self.setup.order:
                self._train(runner, round_, how)
        self.model.eval()
        if runner is not self.model and isinstance(runner, nn.Module):
            runner.eval()
        (args, kwargs), _ = self.batch(1)
        for value in args:
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.requires_grad_()
        with torch.no_grad():
            output = runner(*args, **kwargs)
        self._note("eval", output=output, inputs=(args, kwargs))

    def _train(self, runner: Any, round_: int, how: str) -> None:
        self._optimizer()
        self.model.zero_grad()
        (args, kwargs), target = self.batch(round_)
        label = f"{how} {round_}"
        if how == "train_step":
            loss = runner.train_step(*args, target=target, loss_fn=self.subject.loss, **kwargs)
            self._note(label, loss=loss, inputs=(args, kwargs))
        else:
            leaves = [value for value in args if isinstance(value, torch.Tensor) and value.is_floating_point()]
            if self.subject.leaf_inputs:
                for leaf in leaves:
                    leaf.requires_grad_()
            output = runner(*args, **kwargs)
            loss = self.subject.loss(output, target)
            if self.subject.extra_loss is not None:
                loss = loss + self.subject.extra_loss(self.model)
            shown = freeze(output)
            loss.backward()
            grads = [leaf.grad for leaf in leaves]
            self._note(label, output=shown, loss=loss, inputs=(args, kwargs), input_grads=grads)
        self._optimizer()
        assert self.optimizer is not None
        self.optimizer.step()

    def _optimizer(self) -> None:
        parameters = list(self.model.parameters())
        if any(isinstance(parameter, nn.parameter.UninitializedParameter) for parameter in parameters):
            return
        known = [] if self.optimizer is None else self.optimizer.param_groups[0]["params"]
        if [id(p) for p in known] != [id(p) for p in parameters]:
            self.optimizer = torch.optim.SGD(parameters, lr=0.05, momentum=0.5)

    def _note(self, label: str, **values: Any) -> None:
        for name, value in values.items():
            self.seen.append((f"{label}: {name}", freeze(value)))
        self.seen.append((f"{label}: modules", module_state(self.model)))
        self.seen.append((f"{label}: outside", freeze(self.subject.outside())))
        generators = (torch.get_rng_state(), random.getstate(), str(numpy.random.get_state()))
        self.seen.append((f"{label}: generators", freeze(generators)))


def reading(pipe: Any) -> tuple[str, int, float]:
    """Return how the pipe's last call ran: the answer, the microbatches, and the share of FLOPs inside the pipeline."""
    if "self.module_tree(" in pipe.code:
        rows = re.search(r"chunks\s+\d+(?:, (\d+) used)?", pipe.report())
        return "module tree", int(rows.group(1) or 0) if rows else 0, 0.0
    cells = {int(found) for found in re.findall(r"y\d+_(\d+) = self\.stage", pipe.code)}
    plan = pipe.plan
    share = float(plan.class_flops.get("micro", 0.0))
    inside = len(cells) > 1 and share >= PIPELINED_SHARE
    return "pipelines" if inside else "once per step", len(cells), share


@contextmanager
def limited(seconds: int) -> Iterator[None]:
    """Raise a TimeoutError in the block after so many seconds."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def described(error: BaseException) -> str:
    """Return an error's class, text and innermost places."""
    frames = traceback.extract_tb(error.__traceback__)
    places = [
        f"{frame.filename.split('/site-packages/')[-1].split('/autosplit/', 1)[-1]}:{frame.lineno}" for frame in frames
    ]
    return f"{type(error).__name__}: {str(error)[:600]} [{' < '.join(places[:-4:-1])}]"


@dataclass
class _Attempt:
    """One run of the script: how it ended, and what was seen until then."""

    script: Script
    outcome: str = "equal"
    error: str = ""
    answer: str = "refused"
    chunks: int = 0
    share: float = 0.0

    def run(self, start: Callable[[Script], Any]) -> None:
        """Run the script on what ``start`` makes of its model."""
        runner = None
        try:
            with limited(LIMIT_S):
                runner = start(self.script)
                self.script.run(runner)
        except Exception as error:
            self.outcome = "refused" if isinstance(error, AutosplitError) else "raw error"
            self.error = described(error)
        if getattr(runner, "plan", None) is not None:
            self.answer, self.chunks, self.share = reading(runner)


def run_subject(subject: Subject, setup: Setup, seed: int = 0) -> Result:
    """Run the script on the plain model, then on the pipe, and compare what was seen."""
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        plain = _Attempt(Script(subject, setup, seed))
        plain.run(lambda script: _Plain(script.model))
    started = time.process_time()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        piped = _Attempt(Script(subject, setup, seed))
        piped.run(lambda script: split(script, setup, subject))
    outcome, error = piped.outcome, piped.error
    off = next(differences(plain.script.seen[: len(piped.script.seen)], piped.script.seen, TOLERANCE), "")
    if plain.error:
        outcome, error = "plain fails", f"plain: {plain.error}; pipe: {error or 'runs'}"
    elif off:
        outcome = "wrong"
    return Result(
        name=subject.name,
        kind=subject.kind,
        setup=str(setup),
        answer=piped.answer,
        outcome=outcome,
        off=off,
        error=error,
        chunks=piped.chunks,
        share=piped.share,
        cpu_s=round(time.process_time() - started, 2),
        notes=tuple(dict.fromkeys(str(warning.message).replace(_ROOT, "")[:200] for warning in caught)),
    )


def split(script: Script, setup: Setup, subject: Subject) -> Any:
    """Return the pipe of a script's model."""
    options = {"devices": setup.devices, "chunks": setup.chunks, "lanes": setup.lanes, "recompute": setup.recompute}
    if setup.sample:
        (args, kwargs), _ = script.batch(0)
        options["sample"] = Sample(*args, **kwargs)
    return autosplit(script.model, **{**options, **subject.options})


def as_record(result: Result) -> dict[str, Any]:
    """Return a result for a JSON file, without what is empty."""
    return {key: value for key, value in asdict(result).items() if value not in ("", (), None)}
