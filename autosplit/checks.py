"""What callers may choose by name or number, and its checks; without torch, so that a wrong word costs no second.

The functions of `autosplit` and the command line ask the same ones: `autosplit` before it looks at the model, the
command line before it imports torch.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autosplit.errors import DeviceError, InputError, ScheduleError
from autosplit.schedule.catalog import SCHEDULES as _CATALOG
from autosplit.schedule.memory.updates import HOSTED
from autosplit.units import parse_bytes

if TYPE_CHECKING:
    from cost_models.machines import MachineSpec

MACHINE = "8xH100-SXM5-80GB"
"""The machine that a plan on paper assumes by default."""
RESERVE = "3%"
"""What every device keeps free: predictions of reserved memory were up to a fifth below an H100's."""
ALLOCATORS = ("default", "expandable")
"""Settings of torch's caching allocator on CUDA: by default, or with expandable segments."""
_TORCHS = ("none", "sgd", "momentum", "adam", "adamw", "adafactor", "muon")
OPTIMIZERS = (*_TORCHS, "lion", "adamw8bit", "paged_adamw", "paged_adamw8bit", HOSTED)
"""Those of torch, lion_pytorch, bitsandbytes and DeepSpeed; what each keeps: `autosplit.schedule.memory.updates`."""
OFFLOAD = ("optimizer", "activations")
"""What lies on the host on paper: the state of the optimizer, which steps there; what blocks save for the backward."""
SCHEDULES = ("auto", *_CATALOG)
LANES = ("auto", "inline", "threads")
FEED = ("all", "first_last")
OUTPUTS = ("last", "all")
FSDP_RESHARD = ("never", "always")
TORCHRUN = "torchrun"
BATCH_NORM = ("micro", "full")
"""What a training norm with running statistics normalises at once: a microbatch, or the whole batch."""
RNG = ("auto", "plain", "counter")
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""The modes of ``torch.compile``."""
COMPILE_ARGUMENTS = ("backend", "mode", "options", "dynamic")
"""What ``torch.compile`` is given by the caller; a stage is always one graph."""
RECOMPUTE = ("never", "always", "except_last", "block")
"""What a stage recomputes in its backward: nothing, all, all except for the last microbatch, or block by block."""
PRECISIONS = ("fp32", "amp_bf16", "amp_fp16", "bf16", "bf16_fp32_master", "fp8")
"""The arithmetic and the stored copies of training that costs assume; they do not set what runs."""
MASTERS = ("bf16_fp32_master", "fp8")
"""The precisions whose optimizer updates fp32 weights beside the model's own in bf16."""
CUT = ("modules", "operations")
"""Where cuts fall: between modules where that costs less than 2% of the step, or between any two operations."""
FIND = ("best", "smallest", "largest_batch", "largest_sequence")
"""What a plan on paper answers: the best for these devices, the fewest devices, the largest batch, the longest rows."""
EXPORTS = ("torch-csv", "torchtitan", "torchtitan-toml", "megatron", "megatron-args")
"""The forms in which other tools take a plan: torch's schedule; torchtitan's and Megatron's layouts and settings."""

_MOST_PRICE = 1e6
_PART = 4
"""Characters from which on a part of a valid name stands for it: ``fp16`` for ``amp_fp16``."""
_LEAST_BYTES = 2**20
"""A limit without a unit below this is a slip: what was meant is GiB."""
_MOST_BYTES, _MOST_STATE = 2**60, 2**20
"""Of a device, and of a parameter element's state: what is above is a slip, and would not fit a plan's numbers."""


def choose(name: str, value: Any, valid: Iterable[Any]) -> Any:
    """Return ``value`` when it is one of ``valid``, else raise an InputError that lists them."""
    options = tuple(valid)
    if value not in options:
        raise InputError(not_available(f"{name}={value!r}", value, options))
    return value


def not_available(what: str, value: Any, valid: Iterable[Any]) -> str:
    """Say that a value is not available, what near it is, and what there is; ``what`` is how the caller wrote it."""
    options = tuple(valid)
    return f"{what} is not available{meant(value, options)}; valid: {', '.join(map(repr, options))}"


def meant(value: Any, valid: Iterable[Any]) -> str:
    """Return `` (did you mean ...?)`` where a text is near one of the valid ones, else nothing."""
    names = [name for name in valid if isinstance(name, str)]
    if not isinstance(value, str):
        return ""
    text = value.lower()
    longer = [name for name in names if len(text) >= _PART and text in name]
    near = longer or difflib.get_close_matches(text, names, n=1, cutoff=0.55)
    return f" (did you mean {near[0]!r}?)" if near else ""


def check_chunks(chunks: Any) -> int:
    """Return ``chunks`` as an int of at least one."""
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise InputError(f"chunks={chunks!r}: give the number of microbatches as an int of at least 1")
    return chunks


def check_replicas(replicas: Any, *, devices: int) -> tuple[int, ...] | None:
    """Return the replicas of each stage, which take up all devices: empty for None, and None for "auto"."""
    if replicas is None or replicas == "auto":
        return () if replicas is None else None
    listed = isinstance(replicas, (list, tuple)) and len(replicas) > 0
    if not listed or any(isinstance(count, bool) or not isinstance(count, int) or count < 1 for count in replicas):
        raise InputError(f"replicas={replicas!r}: give how many devices each stage has, such as [2, 1, 1], or 'auto'")
    if sum(replicas) != devices:
        raise InputError(
            f"replicas={list(replicas)} are {sum(replicas)} devices in {len(replicas)} stages, and devices names "
            f"{devices}; give numbers that add up to that"
        )
    return tuple(replicas)


def check_optimizer(optimizer: Any) -> str | int:
    """Return the optimizer's name, or its state bytes per parameter element."""
    if isinstance(optimizer, int) and not isinstance(optimizer, bool):
        if 0 <= optimizer <= _MOST_STATE:
            return optimizer
        raise InputError(f"optimizer={optimizer}: give 0 to {_MOST_STATE} bytes of state per parameter element")
    return str(choose("optimizer", optimizer, OPTIMIZERS))


def check_offload(
    offload: Any, *, optimizer: str | int, schedule: str, recompute: tuple[str, ...] | None
) -> dict[str, Any]:
    """Return what lies on the host, and by that the optimizer and what is recomputed; InputError where they differ."""
    words = offload.replace(" ", "").split(",") if isinstance(offload, str) else offload or ()
    asked = {choose("offload", word, OFFLOAD) for word in words} | ({"optimizer"} if optimizer == HOSTED else set())
    steps, keeps = "optimizer" in asked, "activations" in asked
    if steps and optimizer not in ("adam", "adamw", HOSTED):
        raise InputError(f"offload={offload!r} steps Adam on the host; leave optimizer={optimizer!r} or offload= out")
    if keeps and (set(recompute or ()) - {"never"} or schedule in ("forward", "zb_h1", "zb_v")):
        raise InputError(
            f"offload={offload!r} copies what would be recomputed, for backwards in one part; leave "
            f"recompute={recompute!r} and schedule={schedule!r} out"
        )
    hosted = {"optimizer": HOSTED if steps else optimizer, "recompute": ("never",) if keeps else recompute}
    return {"offload": tuple(sorted(asked)), **hosted}


def check_memory_limit(limit: Any) -> int | tuple[int | None, ...] | None:
    """Return bytes from a number or a text such as "70GiB", or from a list of these or a text such as "24GiB,12GiB"."""
    if isinstance(limit, str) and "," in limit:
        limit = [None if each.strip() in ("", "None") else each for each in limit.split(",")]
    if isinstance(limit, (list, tuple)):
        return tuple(map(_memory_limit, limit))
    return _memory_limit(limit)


def _memory_limit(limit: int | float | str | None) -> int | None:
    if limit is None:
        return None
    limit_bytes = _bytes("memory_limit", limit)
    if limit_bytes <= 0:
        raise InputError(f"memory_limit={limit!r}: give a positive number of bytes, or text such as '70GiB'")
    if isinstance(limit, str) and limit.strip().replace(".", "").isdecimal() and limit_bytes < _LEAST_BYTES:
        raise InputError(
            f"memory_limit={limit!r} is {limit_bytes} bytes; write the unit: '{limit.strip()}GiB', or "
            f"'{limit.strip()}B' if bytes are meant"
        )
    return limit_bytes


def check_reserve(reserve: int | float | str | None) -> int | float:
    """Return what every device keeps free: bytes as an int, or of a text such as "3%" the share; None is none."""
    if isinstance(reserve, str) and reserve.strip().endswith("%"):
        return _share(reserve)
    reserve_bytes = 0 if reserve is None else _bytes("reserve", reserve)
    if reserve_bytes < 0:
        raise InputError(
            f"reserve={reserve!r}: give a number of bytes that is not negative, or text such as '2GiB' or '3%'"
        )
    return reserve_bytes


def check_allocator(allocator: str | None) -> str:
    """Return the allocator's setting; None is that of ``PYTORCH_CUDA_ALLOC_CONF``, or of its newer name."""
    if allocator is not None:
        return str(choose("allocator", allocator, ALLOCATORS))
    text = os.environ.get("PYTORCH_ALLOC_CONF", os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))
    return "expandable" if "expandable_segments:true" in text.lower().replace(" ", "") else "default"


def _share(text: str) -> float:
    try:
        share = float(text.strip().removesuffix("%")) / 100
    except ValueError as error:
        raise InputError(f"reserve={text!r} is no percentage; write a number before the sign, such as '3%'") from error
    if not 0 <= share < 1:
        raise InputError(f"reserve={text!r}: give a percentage from 0% to less than 100% of a device")
    return share


def _bytes(name: str, value: Any) -> int:
    try:
        size = parse_bytes(value)
    except InputError as error:
        raise InputError(f"{name}={error}") from error
    if size > _MOST_BYTES:
        raise InputError(f"{name}={value!r} is more than 1024 PiB; give what one device has, such as '70GiB'")
    return size


def check_price(price: Any) -> float | None:
    """Return US dollars per device and hour from a number or a text such as "2.10/h"; None is none."""
    text = str(price).strip().removeprefix("$").removesuffix("/h").strip()
    try:
        value = None if price is None else float(text)
    except ValueError:
        value = 0.0
    if value is not None and not 0 < value < _MOST_PRICE:
        raise InputError(f"price={price!r}: give US dollars per device and hour, such as 2.1 or '2.10/h'")
    return value


def check_recompute(recompute: Any, *, stages: int) -> tuple[str, ...] | None:
    """Return what every stage recomputes as a tuple of one, or one entry per stage; None for "auto"."""
    if isinstance(recompute, str):
        choose("recompute", recompute, ("auto", *RECOMPUTE))
        return None if recompute == "auto" else (recompute,)
    valid = (
        f"'auto', {', '.join(map(repr, RECOMPUTE))}, or a list with one of {', '.join(map(repr, RECOMPUTE))} per stage"
    )
    if not isinstance(recompute, (list, tuple)):
        raise InputError(f"recompute={recompute!r} is not available; valid: {valid}")
    if len(recompute) != stages:
        raise InputError(f"recompute={recompute!r} has {len(recompute)} entries for {stages} stages; valid: {valid}")
    unknown = next((entry for entry in recompute if entry not in RECOMPUTE), None)
    if unknown is not None:
        index = list(recompute).index(unknown)
        raise InputError(f"recompute[{index}]={unknown!r} is not available{meant(unknown, RECOMPUTE)}; valid: {valid}")
    return tuple(recompute) if len(set(recompute)) > 1 else (recompute[0],)


def check_precision(precision: Any) -> str | None:
    """Return the precision; None is the model's own."""
    checked: str | None = choose("precision", precision, (None, *PRECISIONS))
    return checked


def resolve_machine(devices: Any, *, network: str | None = None) -> MachineSpec:
    """Return the machine that is planned for: a text, a machine file, or a list of names of devices, files or specs.

    ``network`` is what each of its hosts has, such as "100Gbit". Raises DeviceError for a name that is not known, with
    the nearest ones, and for a network that is no speed or has one host.
    """
    machine = _machine_of(devices)
    if network is None:
        return machine
    from cost_models.registry import networked

    try:
        return networked(machine, str(network))
    except ValueError as error:
        raise DeviceError(str(error)) from error


def _machine_of(devices: Any) -> MachineSpec:
    import cost_models

    if isinstance(devices, cost_models.MachineSpec):
        return devices
    entries = list(devices) if isinstance(devices, (list, tuple)) else [devices]
    if not all(isinstance(entry, (str, Path, cost_models.DeviceSpec)) for entry in entries):
        raise DeviceError(
            f"devices={devices!r} names no devices to plan for; give a text such as '8xH100-SXM5-80GB', or a list of "
            "names, for example ['A100-SXM4-80GB', 'L4-24GB'] (autosplit devices lists them)"
        )
    try:
        return cost_models.machine(devices)
    except ValueError as error:
        raise DeviceError(str(error)) from error


def check_backward(schedule: str, actions: Iterable[Iterable[str]]) -> None:
    """Raise ScheduleError when a schedule, or the actions of each lane that it has, are forwards only."""
    texts = [text for lane in actions for text in lane]
    if schedule == "forward" or (texts and not any(set("BI") & set(text) for text in texts)):
        raise ScheduleError(
            f"schedule {schedule!r} has no backward, so train_step has nothing to follow; call pipe(x) for outputs "
            "alone, or split with a schedule that trains, such as schedule='1f1b'"
        )
