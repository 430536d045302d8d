"""What belongs to the caller's thread holds in the lanes too, forward and backward, and does not stay there."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from autosplit import autosplit
from tests.equivalence.equality import LANES
from tests.models.three_layers import Model
from tests.runtime.watching import (
    SPOT,
    STAGES,
    WIDTH,
    Functions,
    Operations,
    Watch,
    autocast_state,
    build,
    default_dtype,
    refusal,
    value_of,
    watch,
)

pytestmark = pytest.mark.usefixtures("no_watch_yet")


def in_all(observe: Callable[[], Any], context: Callable[[], Any] = contextlib.nullcontext) -> dict[str, Any]:
    """Return what every lane sees in the forward, the backward and both parts of train_step, under a context each."""
    pipe = build("threads")
    found: dict[str, Any] = {}

    def note(part: str, run: Callable[[], Any]) -> None:
        with context():
            run()  # the call that plans, if it is the first of its kind
            values = watch(observe, run)
        assert all(value == values[0] for value in values), part
        found[part] = values[0]

    note("forward", lambda: pipe(value_of()))
    outputs = [pipe(value_of()) for _ in range(2)]
    note("backward", lambda: outputs.pop().float().sum().backward())
    note("step", lambda: pipe.train_step(value_of(), target=value_of(), loss_fn=lambda o, t: F.mse_loss(o.float(), t)))
    return found


def same(value: Any) -> dict[str, Any]:
    return dict.fromkeys(("forward", "backward", "step"), value)


# -- what travels ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_grad_and_inference_mode(mode: Callable[[], Any]) -> None:
    pipe = build("threads")

    def run() -> None:
        with mode():
            pipe(value_of())

    run()
    values = watch(lambda: (torch.is_grad_enabled(), torch.is_inference_mode_enabled()), run)
    assert set(values) == {(mode is torch.enable_grad, mode is torch.inference_mode)}


def test_a_step_has_gradients_also_under_no_grad() -> None:
    pipe = build("threads")

    def run() -> None:
        with torch.no_grad():
            pipe.train_step(value_of(), target=value_of(), loss_fn=F.mse_loss)

    run()
    assert set(watch(torch.is_inference_mode_enabled, run)) == {False}
    assert all(parameter.grad is not None for parameter in pipe.parameters())


@pytest.mark.parametrize(("dtype", "cache"), [(torch.bfloat16, True), (torch.float16, False)])
def test_settings_hold_in_lanes_that_compute_with_one_thread_each(dtype: torch.dtype, cache: bool) -> None:
    def observe() -> tuple[Any, ...]:
        deterministic = torch.are_deterministic_algorithms_enabled()
        return autocast_state(), refusal(), deterministic, torch.get_num_threads()

    @contextlib.contextmanager
    def settings() -> Iterator[None]:
        torch.use_deterministic_algorithms(True)
        try:
            with (
                torch.autocast("cpu", dtype=dtype, cache_enabled=cache),
                torch.autograd.graph.disable_saved_tensors_hooks("not here"),
            ):
                yield
        finally:
            torch.use_deterministic_algorithms(False)

    before = torch.get_num_threads()
    assert in_all(observe, settings) == same(((True, dtype, cache), "not here", True, 1))
    assert torch.get_num_threads() == before


def test_autocast_is_off_in_a_backward_outside_its_context() -> None:
    pipe = build("threads")
    with torch.autocast("cpu", torch.bfloat16):
        output = pipe(value_of())
    assert set(watch(autocast_state, lambda: output.sum().backward())) == {(False, torch.bfloat16, True)}


class Casts(TorchDispatchMode):
    """Counts casts to bfloat16 of tensors with the shape of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten._to_copy.default and args[0].shape == (WIDTH, WIDTH):
            self.count += 1
        return result


@pytest.mark.parametrize("lanes", LANES)
def test_a_weight_is_cast_once_for_all_microbatches_and_again_in_the_next_context(lanes: str) -> None:
    pipe = build(lanes)
    with torch.autocast("cpu", torch.bfloat16):
        pipe(value_of())
    with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
        pipe(value_of())
        assert casts.count == STAGES
        pipe(value_of())
        assert casts.count == STAGES
    with torch.no_grad():
        for parameter in pipe.parameters():
            parameter.zero_()
    with torch.autocast("cpu", torch.bfloat16):
        assert not pipe(value_of()).any()


class Nested(nn.Module):
    """Switches autocast off for its middle layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for layer in (self.first, self.middle, self.last):
            layer.register_forward_pre_hook(Watch.look)

    def forward(self, value: Tensor) -> Tensor:
        value = torch.tanh(self.first(value))
        with torch.autocast("cpu", enabled=False):
            value = torch.tanh(self.middle(value.float()))
        return self.last(value)


def test_autocast_inside_the_model_under_the_callers() -> None:
    outputs = []
    for lanes in LANES:
        torch.manual_seed(0)
        pipe = autosplit(Nested(), devices=["cpu"] * STAGES, chunks=4, lanes=lanes)
        with torch.autocast("cpu", torch.bfloat16):
            pipe(value_of())
            Watch.seen, Watch.observe = [], staticmethod(lambda: torch.is_autocast_enabled("cpu"))
            outputs.append(pipe(value_of()))
        assert Counter(value for _, value in Watch.seen) == {True: 8, False: 4}
    assert outputs[0].dtype == torch.bfloat16
    assert torch.equal(*outputs)


def test_default_dtype() -> None:
    assert in_all(lambda: torch.zeros(1).dtype, lambda: default_dtype(torch.float64)) == same(torch.float64)


@pytest.mark.parametrize(
    ("mode", "forward", "backward"),
    [(Functions, "tanh", None), (Operations, "aten.tanh.default", "aten.tanh_backward.default")],
)
def test_modes_see_every_operation_of_every_lane(mode: Any, forward: str, backward: str | None) -> None:
    pipe = build("threads")
    pipe(value_of()).sum().backward()
    with mode() as outer, mode() as inner:
        output = pipe(value_of())
        output.sum().backward()
    for seen in (outer.seen, inner.seen):
        for name in filter(None, (forward, backward)):
            lanes = Counter(thread for function, thread in seen if function == name)
            assert sorted(lanes.values()) == [4] * STAGES
            assert threading.current_thread().name not in lanes


def test_context_variables_and_what_a_stage_sets_stays_there() -> None:
    def observe() -> str:
        spot = SPOT.get()
        SPOT.set("a stage")
        return spot

    pipe = build("threads")
    watch(observe, lambda: pipe(value_of()))
    token = SPOT.set("the caller")
    values = watch(observe, lambda: pipe(value_of()))
    assert Counter(values) == {"the caller": STAGES, "a stage": 3 * STAGES}  # one copy of the context per lane
    assert SPOT.get() == "the caller"
    SPOT.reset(token)


@pytest.mark.parametrize("flush", [True, False])
def test_flushed_denormals(flush: bool) -> None:
    def observe() -> bool:
        return sys.float_info.min / 2 == 0.0

    pipe = build("threads")
    pipe(value_of())
    before = observe()
    torch.set_flush_denormal(flush)
    try:
        assert observe() is flush
        output = pipe(value_of())
        assert set(watch(observe, lambda: pipe(value_of()))) == {flush}
        assert set(watch(observe, output.sum().backward)) == {flush}
    finally:
        torch.set_flush_denormal(before)
    assert set(watch(observe, lambda: pipe(value_of()))) == {before}


def root(model: Any, value: Tensor) -> Tensor:
    """The square root of zeros: its gradient is infinite, times zero."""
    return model.b((model.a(value) * 0).sqrt())


@pytest.mark.parametrize("lanes", LANES)
def test_anomaly_mode_names_the_forward(lanes: str) -> None:
    pipe = autosplit(Model(root).float(), devices=["cpu"] * 2, chunks=3, lanes=lanes)
    pipe(value_of())
    with pytest.warns(UserWarning, match=r"Anomaly Detection has been enabled|Traceback of forward call") as told:
        _backward_that_fails(pipe)
    assert any("Error detected in MulBackward0" in str(w.message) and ".mul(0)" in str(w.message) for w in told)
    assert all(parameter.grad is None for name, parameter in pipe.named_parameters() if name.startswith("a."))
    assert not torch.is_anomaly_enabled()
    pipe(value_of()).sum().backward()


def _backward_that_fails(pipe: Any) -> None:
    with torch.autograd.detect_anomaly():
        output = pipe(value_of())
        with pytest.raises(RuntimeError, match="'MulBackward0' returned nan values"):
            output.sum().backward()


# -- hooks on saved tensors ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("step", [False, True], ids=["call", "train_step"])
def test_hooks_on_saved_tensors_are_called_in_the_callers_thread(step: bool) -> None:
    found = []
    for lanes in LANES:
        pipe, packed, unpacked, threads = build(lanes), [], [], set()

        def pack(tensor: Tensor, packed: Any = packed, threads: Any = threads) -> tuple[int, Tensor]:
            packed.append(tuple(tensor.shape))
            threads.add(threading.current_thread())
            return len(packed), tensor.detach().clone()

        def unpack(entry: tuple[int, Tensor], unpacked: Any = unpacked, threads: Any = threads) -> Tensor:
            unpacked.append(entry[0])
            threads.add(threading.current_thread())
            return entry[1]

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            if step:
                pipe.train_step(value_of(), target=value_of(), loss_fn=F.mse_loss)
            else:
                output = pipe(value_of())
        if not step:
            output.sum().backward()
        assert threads == {threading.current_thread()}
        assert sorted(unpacked) == list(range(1, len(packed) + 1))
        found.append((Counter(packed), [parameter.grad for parameter in pipe.parameters()]))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(a, b) for a, b in zip(found[0][1], found[1][1], strict=True))


# -- what does not leak ----------------------------------------------------------------------------------------------
def everything() -> dict[str, Any]:
    """Return all that a thread has of its own, as far as it shows."""
    with torch.autograd.graph.disable_saved_tensors_hooks("probing"):
        pass  # it would raise if hooks were left behind
    return {
        "grad": torch.is_grad_enabled(),
        "inference": torch.is_inference_mode_enabled(),
        "autocast": autocast_state(),
        "device": torch.empty(1).device.type,
        "functions": torch.overrides._get_current_function_mode_stack(),
        "operations": torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        "hooks": refusal(),
        "flush": sys.float_info.min / 2 == 0.0,
        "spot": SPOT.get(),
        "anomaly": torch.is_anomaly_enabled(),
        "dtype": torch.get_default_dtype(),
    }


@contextlib.contextmanager
def much_set() -> Iterator[None]:
    token = SPOT.set("the caller")
    torch.set_flush_denormal(True)
    try:
        with (
            torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
            torch.autograd.graph.disable_saved_tensors_hooks("not here"),
            default_dtype(torch.float64),
            Operations(),
            Functions(),
        ):
            yield
    finally:
        torch.set_flush_denormal(False)
        SPOT.reset(token)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("fails", ["nowhere", "forward", "backward"])
def test_nothing_stays_behind(fails: str, inference: bool) -> None:
    pipe = build("threads")
    pipe(value_of()).sum().backward()
    with much_set():
        pipe(value_of())
    caller = everything()
    lanes = watch(everything, lambda: pipe(value_of()).sum().backward())
    mode = torch.inference_mode if inference else torch.enable_grad
    Watch.observe = staticmethod(everything)
    with much_set(), mode():
        Watch.fails = fails == "forward"
        inside = pytest.raises(ArithmeticError, match="a stage fails") if Watch.fails else contextlib.nullcontext()
        with inside:
            output = pipe(value_of())
        if fails == "backward" and not inference:
            Watch.fails = True
            with pytest.raises(ArithmeticError, match="a stage fails"):
                output.sum().backward()
    Watch.fails = False
    assert everything() == caller
    assert watch(everything, lambda: pipe(value_of()).sum().backward()) == lanes
