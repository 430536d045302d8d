"""Which hooks only observe.

Those of the caller's are not called in runs of which the caller is told nothing. A hook that may return a value is part
of what the model computes, and runs in all runs. So do torch's own, such as weight norms, and those by which
transformers' models collect their outputs. Those of ``torch.utils.module_tracker`` observe.
"""

from __future__ import annotations

import dis
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

COLLECTS = "transformers.utils.output_capturing"


def silence(tables: Iterable[dict[int, Callable[..., Any]]]) -> None:
    """Put a function that does nothing in the place of each hook that only observes."""
    for table in tables:
        for key, hook in table.items():
            if only_observes(hook):
                table[key] = _nothing


def only_observes(hook: Callable[..., Any]) -> bool:
    """Tell whether a hook returns None by its code, and is neither torch's nor one that collects outputs.

    One that makes outputs require gradients does more than that.
    """
    return _returns_none(*code_of(hook))


def is_of_model(hook: Callable[..., Any]) -> bool:
    """Tell whether a hook is recorded with the model: it collects outputs, or lets them require gradients alone."""
    home, code = code_of(hook)
    return home == COLLECTS or (code is not None and code.co_names == ("requires_grad_",) and not code.co_freevars)


def code_of(hook: Callable[..., Any]) -> tuple[str, types.CodeType | None]:
    """Return the Python module of the function that a hook calls, and its code where it has any."""
    while isinstance(hook, functools.partial):
        hook = hook.func
    function = hook if hasattr(hook, "__code__") else getattr(hook, "__func__", None) or type(hook).__call__
    return str(getattr(function, "__module__", "")), getattr(function, "__code__", None)


@functools.lru_cache(maxsize=1024)
def _returns_none(home: str, code: types.CodeType | None) -> bool:
    if home == "torch.utils.module_tracker":
        return True
    if code is None or home == COLLECTS or home.partition(".")[0] == "torch" or "requires_grad_" in code.co_names:
        return False
    steps = list(dis.get_instructions(code))
    ends = [number for number, step in enumerate(steps) if step.opname in ("RETURN_VALUE", "RETURN_CONST")]
    returned = [steps[n] if steps[n].opname == "RETURN_CONST" else steps[n - 1] for n in ends]
    return all(step.opname in ("LOAD_CONST", "RETURN_CONST") and step.argval is None for step in returned)


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for a hook that only observes."""
