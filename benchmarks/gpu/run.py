"""One part of the GPU benchmark: at most eight minutes on the device, one file of results.

    python -m benchmarks.gpu.run --part step [--device cuda:0] [--small] [--json FILE]
    python -m benchmarks.gpu.run --list

Figures go to ``benchmarks/results/<part>-<device>.json``, such as ``step-h200.json``: the device, versions, the date,
``checks`` (name, asked, measured, ok), ``figures``, ``missing``: what could not be measured, and why, and ``failed``:
what ended in an error, which exits with 1. The file is written whenever something of a part is done, with ``finished``
false until all is. With
``--device cpu --small`` every part runs in seconds on tiny sizes: a dry run, which shows that nothing is misspelt. Its
file says so, and it is written only where ``--json`` says.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks import pairs
from benchmarks.gpu.part import Found, Part, Setting, Spread, finite, milliseconds, settled

PARTS = {
    "step": "one stage against the plain model; four stages on one card against a plain loop and torchgpipe",
    "memory": "peaks predicted without a GPU against the allocator's",
    "measured": "the measured profile against stages run alone",
    "twin_unet": "U-Net (5, 64) at 2, 4 and 8 stages, simulated from stages measured alone",
    "twin_amoebanet": "AmoebaNet-D (18, 256), likewise",
    "twin_resnet": "ResNet-101, likewise",
    "twin_gpt2": "GPT-2 XL, likewise",
    "races": "random delays around every transfer: the bits of the single stream",
}
RESULTS = Path(__file__).parents[1] / "results"
DRY = "a dry run on the CPU with tiny sizes: it shows that the part runs, and no figure in it is a GPU's"
SMALL = "a run with tiny sizes: it shows that the part runs, and its figures are of nothing"


def is_there(name: str) -> bool:
    """Tell whether a part's module is there."""
    return importlib.util.find_spec(f"benchmarks.gpu.{name.partition('_')[0]}") is not None


def part(name: str) -> Part:
    """Return what runs a part; raises ValueError where its module is missing."""
    module, _, rest = name.partition("_")
    if not is_there(name):
        raise ValueError(f"there is no benchmarks/gpu/{module}.py in this version")
    run = importlib.import_module(f"benchmarks.gpu.{module}")
    return run.run_for(rest) if rest else run.run


def machine(setting: Setting) -> dict[str, Any]:
    """Return what the figures depend on: the host as for every benchmark, and the device."""
    found = {**pairs.facts(), "device": setting.short_name, "device_name": "CPU"}
    if setting.cuda:
        own = torch.cuda.get_device_properties(setting.device)
        found |= {
            "device_name": own.name,
            "device_bytes": own.total_memory,
            "multiprocessors": own.multi_processor_count,
            "capability": f"{own.major}.{own.minor}",
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "tf32": [torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32],
        }
    return found


def write(
    path: Path, name: str, setting: Setting, facts: dict[str, Any], found: Found, *, finished: bool = True
) -> None:
    """Write the file of results, as `benchmarks.pairs.write` does, with what is missing and what it is worth.

    A number that is not finite is null there, and its check does not hold. The file is there as a whole or as it was.
    """
    settings = {**finite(found.settings), "small": setting.small, "device": str(setting.device)}
    figures = [finite(figure) for figure in found.figures]
    checks = [settled(check) for check in found.checks if math.isfinite(check.measured)]
    lost = [check for check in found.checks if not math.isfinite(check.measured)]
    whole = path.with_name(f"{path.name}.new")
    pairs.write(whole, benchmark=name, settings=settings, machine=facts, figures=figures, checks=checks)
    content = json.loads(whole.read_text(encoding="utf-8"))
    content["checks"] += [{"name": check.name, "asked": check.asked, "measured": None, "ok": False} for check in lost]
    infinite = [f"{check.name}: it came out as {check.measured}" for check in lost]
    infinite += [f"{_name(figure)}: a number in it is not finite" for figure in found.figures if _lost(figure)]
    worth = {"dry_run": DRY} if not setting.cuda else {"dry_run": SMALL} if setting.small else {}
    head = {
        "benchmark": name,
        "device": setting.short_name,
        "date": facts["date"],
        **worth,
        "finished": finished,
        "missing": [*found.missing, *infinite],
        "failed": found.failed,
    }
    whole.write_text(json.dumps({**head, **content}, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    whole.replace(path)


@contextlib.contextmanager
def saving(path: Path | None, name: str, setting: Setting, facts: dict[str, Any]) -> Iterator[None]:
    """Have what is found in here written down wherever something of it is done; no path: nowhere."""
    try:
        if path is not None:
            Found.save = staticmethod(lambda so_far: write(path, name, setting, facts, so_far, finished=False))
        yield
    finally:
        Found.save = None


def _lost(figure: Mapping[str, Any]) -> bool:
    """Tell whether a number of a figure is not finite; None is None before and after."""
    plain = {key: asdict(value) if isinstance(value, Spread) else value for key, value in figure.items()}
    return json.dumps(plain) != json.dumps(finite(plain))


def _name(figure: Mapping[str, Any]) -> str:
    """Return what a figure is of: its texts."""
    return ", ".join(value for value in figure.values() if isinstance(value, str)) or "a figure"


def check_device(device: torch.device, *, small: bool) -> None:
    """Raise ValueError where a device is not there, or a CPU is asked for a GPU's figures."""
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"--device {device} is neither cpu nor a CUDA device")
    if device.type == "cpu" and not small:
        raise ValueError("a CPU gives no figures of a GPU; for a dry run add --small")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no {device}: torch {torch.__version__} sees {torch.cuda.device_count()} GPUs")


def report(found: Found) -> str:
    """Return what was found as text: figures, checks, what is missing."""
    rows = [milliseconds(figure) for figure in found.figures]
    kinds: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    checks = [settled(check) for check in found.checks]
    shown = [
        {"check": c.name, "asked": c.asked, "measured": f"{c.measured:g}", "": "" if c.ok else "no"} for c in checks
    ]
    missing = [f"missing: {text}" for text in found.missing] + [f"failed: {text}" for text in found.failed]
    return "\n\n".join([*(pairs.table(own) for own in kinds.values()), pairs.table(shown), *missing])


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = pairs.parser(__doc__)
    asked = parser.add_mutually_exclusive_group(required=True)
    asked.add_argument("--part", choices=list(PARTS), metavar="PART")
    asked.add_argument("--list", action="store_true", help="print the parts")
    parser.add_argument("--device", default="cuda:0", type=torch.device)
    parser.add_argument("--small", action="store_true", help="tiny sizes: a dry run")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run a part, print what was found, and write the file."""
    arguments = parser().parse_args(argv)
    if arguments.list:
        print(*(f"{name:16} {text}" for name, text in PARTS.items()), sep="\n")
        return
    try:
        check_device(arguments.device, small=arguments.small)
        chosen = part(arguments.part)
    except ValueError as error:
        raise SystemExit(str(error)) from error
    setting = Setting(arguments.device, arguments.small, arguments.json)
    if setting.path is None and setting.cuda and not setting.small:
        setting = replace(setting, path=RESULTS / f"{arguments.part}-{setting.short_name}.json")
    facts = machine(setting)
    print(f"{arguments.part} on {facts['device_name']}\n{pairs.facts_text(facts)}", flush=True)
    with saving(setting.path, arguments.part, setting, facts):
        found = chosen(setting)
    print(report(found))
    if setting.path is not None:
        write(setting.path, arguments.part, setting, facts, found)
        print(f"written: {setting.path}")
    if found.failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
