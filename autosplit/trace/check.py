"""Is a recording the model? Asked of real values on two rows, before the recording is accepted.

    for each seed      model   step 0 ─► step 1    digests of outputs, changed inputs, gradients, buffers, random state
                       graph   step 0 ─► step 1    the same from the same state; compared one by one

Two rows are a batch size that no recording was made at; two steps show what is carried from call to call; a second seed
shows randomness that a graph would freeze, and is left out where nothing is drawn. In step 0 the inputs require
gradients as the sample's do, in step 1 all floating-point ones do. Nothing of the model's own changes: see
:mod:`autosplit.trace.borrowed.state`. Each gradient is digested as it arrives and dropped. A large model goes backward
in the last step only.
"""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from autosplit.compare import REORDERED, ROUNDING, Digest, Item, Parts, compare, digest, tolerance
from autosplit.progress import phase
from autosplit.trace.borrowed import state
from autosplit.trace.borrowed.side_effects import changes, kept
from autosplit.trace.borrowed.state import stand_ins
from autosplit.trace.borrowed.surroundings import on_other_rows
from autosplit.trace.graph import INFO, TracedGraph
from autosplit.trace.inputs.objects import leaves_of
from autosplit.trace.recording.build import RawGraph
from autosplit.trace.recording.run import FlatInputs
from autosplit.trace.rows.probe import probe_rows

_BATCHES = ((2, True), (2, False), (5, True))
_SEEDS = (0, 1)
_STEPS = (0, 1)
_LARGE = 20_000_000
"""Parameters above which gradients are asked of the last step only."""
_NOISE = 1e-2
_ALL, _OWN, _NONE = 2, 1, 0
"""Which inputs require gradients in step 1: all floating-point ones, those of the sample; or nothing does."""
Answers = Callable[[Sequence[Any]], contextlib.AbstractContextManager[Any]]
Run = Callable[[list[Any]], Sequence[Any]]


@phase("tracing: is it the model")
def check_recording(
    model: nn.Module,
    recording: RawGraph | TracedGraph,
    inputs: FlatInputs,
    *,
    answers: Answers | None = None,
    loose: bool = False,
    changes_python: bool = False,
    logged: int = 0,
) -> str | None:
    """Compare a recording with the model it was made of, in the model's modes and this thread's grad mode and autocast.

    Args:
        model: the model; all its tensors, attributes, gradients and modes are as before at the end.
        recording: the graph and its root.
        inputs: the sample that the rows are taken from.
        answers: given the leaves of a call, returns a context in which the model's own Python gets the answers to value
            reads that the recording took.
        loose: allow what another order of additions can do, for a graph whose reductions were taken apart.
        changes_python: whether the model leaves more than tensors.
        logged: how many of the graph's last outputs are numbers that the model keeps, which are no outputs of its own.

    Returns:
        None where they agree, else what differs, in one clause.
    """
    checker = _Checker(
        model, recording, inputs, answers or (lambda leaves: contextlib.nullcontext()), loose, changes_python, logged
    )
    with state.random_state(), warnings.catch_warnings(), on_other_rows():
        warnings.simplefilter("ignore")  # the model's own warnings are for its own calls
        return checker.difference()


@dataclass
class _Checker:
    model: nn.Module
    recording: RawGraph | TracedGraph
    inputs: FlatInputs
    answers: Answers
    loose: bool
    changes_python: bool
    logged: int
    rows: int = 0
    vary: bool = False
    gradients: int = _ALL
    drew: bool = False

    def __post_init__(self) -> None:
        infos = [node.meta[INFO] for node in self.recording.graph.nodes if INFO in node.meta]
        self.made = {tensor.dtype for info in infos for tensor in info.tensors} if self.loose else set()
        self.written = {name for info in infos for name in info.writes}
        parameters = list(self.model.parameters())
        self.dtypes = {p.dtype for p in parameters}
        self.large = sum(p.numel() for p in parameters) > _LARGE

    def difference(self) -> str | None:
        """Return what differs between model and graph, or None."""
        try:
            expected = self._first()
        except Exception as error:  # whatever it is, there is nothing to compare with
            return f"the model itself raises {type(error).__name__} on few rows ({error})"
        for seed in _SEEDS if self.drew else _SEEDS[:1]:
            if seed != _SEEDS[0]:
                expected = self._watch(self._run_model, seed)
            if (difference := self._against(expected, seed)) is not None:
                return difference
        return None

    def _first(self) -> Parts:
        """Run the model on rows on which it runs, with gradients if it can."""
        errors = []
        kinds = (_ALL, _OWN, _NONE) if torch.is_grad_enabled() else (_NONE,)
        for self.rows, self.vary in _BATCHES:
            for self.gradients in kinds:
                try:
                    return self._watch(self._run_model, _SEEDS[0])
                except Exception as error:  # the next way may do
                    errors.append(error)
        raise errors[0]

    def _against(self, expected: Parts, seed: int) -> str | None:
        try:
            actual = self._watch(self._run_graph, seed)
        except Exception as error:
            return f"the graph raises {type(error).__name__} on {self.rows} rows ({error}), the model does not"
        wrong = [item for item in compare("", actual, expected, self._tolerance) if not item.equal]
        if not wrong:
            return None
        repeated = compare("", self._watch(self._run_model, seed), expected, self._tolerance)
        again = {(item.kind, item.name): item.difference for item in repeated}
        for item in wrong:
            noise = 4 * again.get((item.kind, item.name), 0.0)
            if not item.difference <= noise <= _NOISE:  # the model's own kernels may differ from run to run
                return f"{_said(item)} ({self.rows} rows, {item.kind}, seed {seed})"
        return None

    def _tolerance(self, dtype: torch.dtype) -> float:
        if not (dtype.is_floating_point or dtype.is_complex):
            return 0.0
        rounding = tolerance(ROUNDING, dtype, *self.dtypes)
        return max(rounding, tolerance(REORDERED, *self.made)) if self.made else rounding

    # -- runs ----------------------------------------------------------------------------------------------------
    def _watch(self, run: Run, seed: int) -> Parts:
        """Run all steps from the model's present state and the seed; digest what each leaves."""
        seed_all(seed)
        before = state.random_states()
        seen: dict[tuple[str, str], Any] = {}
        with stand_ins(self.model, self.recording.root, written=self.written) as (leaves, self.holders):
            for step in _STEPS:
                digests = self._step(run, leaves, step)
                seen |= {(f"step {step}", name): value for name, value in digests.items()}
        self.drew = before != state.random_states()
        return seen

    def _step(self, run: Run, parameters: dict[str, torch.Tensor], step: int) -> dict[str, Any]:
        leaves, args = self._inputs(step)
        positions = self.inputs.tensors()
        versions = {i: args[i]._version for i in positions}
        seen: dict[str, Any] = {}
        outputs = list(run(args))
        for number, value in enumerate(outputs):
            tensor = isinstance(value, torch.Tensor)
            kept = (
                digest(value, "with a gradient" if value.requires_grad else "without one") if tensor else _plain(value)
            )
            seen[f"output {number}"] = kept
        for index, version in versions.items():
            if args[index]._version != version:
                seen[f"input {self.inputs.names[index]}, which was changed,"] = digest(args[index])
        for name, buffer in self.model.named_buffers():
            seen[f"buffer {name}"] = digest(buffer)
        seen["torch's random state"], seen["Python's random state"] = state.random_states()
        if self.gradients != _NONE and (step == _STEPS[-1] or not self.large):
            named = {f"input {self.inputs.names[i]}": leaves[i] for i in positions}
            seen |= _gradients(outputs, parameters | named)
        return seen

    def _inputs(self, step: int) -> tuple[list[Any], list[Any]]:
        """Return the leaves of a step's call, and what the call is given: it may change that in place."""
        leaves: list[Any] = list(self.inputs.leaves)
        args = list(leaves)
        rows = range(step * self.rows, (step + 1) * self.rows)
        for index in self.inputs.tensors():
            leaf, dim = leaves[index], self.inputs.batch_dims[index]
            with torch.no_grad():
                tensor = leaf.detach().clone() if dim is None else self._rows(leaf.detach(), dim, rows)
            wants = leaf.requires_grad or (step > 0 and self.gradients == _ALL)
            able = tensor.is_floating_point() or tensor.is_complex()
            tensor.requires_grad_(wants and able and self.gradients != _NONE)
            if isinstance(leaf, nn.Parameter):
                leaves[index] = args[index] = nn.Parameter(tensor, tensor.requires_grad)
                continue
            leaves[index] = tensor
            args[index] = tensor.clone() if tensor.requires_grad else tensor
        return leaves, args

    def _rows(self, leaf: torch.Tensor, dim: int, rows: Sequence[int]) -> torch.Tensor:
        if leaf.is_meta:
            return leaf.new_empty([*leaf.shape[:dim], len(rows), *leaf.shape[dim + 1 :]])
        if self.vary:
            return probe_rows(leaf, dim, rows)
        return leaf.index_select(dim, torch.tensor([r % leaf.shape[dim] for r in rows], device=leaf.device))

    def _run_model(self, leaves: list[Any]) -> Sequence[Any]:
        args, kwargs = self.inputs.rebuild(leaves)
        if not self.changes_python:
            with self.answers(leaves):
                return leaves_of(self.model.forward(*args, **kwargs))
        before = self.holders.read()
        with self.answers(leaves):
            outputs = leaves_of(self.model.forward(*args, **kwargs))
        known = {id(t) for t in (*leaves, *self.model.parameters(), *self.model.buffers())}
        outputs += kept(changes(self.holders, before), known)
        for holder, content in zip(self.holders.found, before, strict=True):
            if holder.place[1] != "_buffers":  # both steps are compared from where one recording was made
                holder.write(content)
        return outputs

    def _run_graph(self, leaves: list[Any]) -> Sequence[Any]:
        interpreter = fx.Interpreter(self.recording.root, graph=self.recording.graph)
        outputs = interpreter.run(self.rows, *(leaves[i] for i in self.inputs.tensors()))
        return outputs[: len(outputs) - self.logged]


def _gradients(outputs: Sequence[Any], leaves: Mapping[str, torch.Tensor]) -> dict[str, Digest]:
    """Digest the gradients of a sum in which every element of the outputs has a weight of its own.

    Each is dropped before the next one is there: what lives is one gradient, not all.
    """
    seen: dict[str, Digest] = {}

    def take(name: str, leaf: torch.Tensor) -> None:
        if leaf.grad is not None:
            seen[f"the gradient of {name}"] = digest(leaf.grad)
        leaf.grad = None

    wanted = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    roots = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
    if not roots or not wanted:
        return seen
    hooks = [leaf.register_post_accumulate_grad_hook(partial(take, name)) for name, leaf in wanted.items()]
    try:
        torch.autograd.backward(roots, [cotangent(root) for root in roots], inputs=list(wanted.values()))
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def cotangent(tensor: torch.Tensor) -> torch.Tensor:
    """Return a weight for every element of an output, no two neighbours alike."""
    places = torch.arange(tensor.numel(), dtype=torch.float32, device=tensor.device)
    return places.mul_(0.7).cos_().add_(0.1).reshape(tensor.shape).to(tensor.dtype)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (bool, int, float, str, bytes, type(None))) else type(value)


def _said(item: Item) -> str:
    """Return what differs, in one clause; an item's kind is the step."""
    return f"{item.name} {f'is {item.detail}' if item.detail else f'differs by {item.difference:.1e} of its size'}"


# -- random numbers ----------------------------------------------------------------------------------------------
def seed_all(seed: int) -> None:
    """Seed the default generators of torch, Python and numpy."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)
    random.seed(seed)
    np.random.seed(seed)
