"""Hooks on saved tensors stay in the caller's thread; what a call brings into the lanes is gone when it is over."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.equivalence.equality import LANES
from tests.runtime.watching import (
    SPOT,
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
