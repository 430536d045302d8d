"""Errors of other packages in words: the error, what caused it, and the usual way out."""

from __future__ import annotations

import importlib.metadata

_MOST_CHARACTERS = 500
_TORCHVISION = "torchvision"


def with_cause(error: BaseException) -> str:
    """Return an error in one line, with the first error of the chain that led to it.

    Packages that import their parts late, as transformers does, raise a general ModuleNotFoundError from the import
    that failed.
    """
    chain = [error]
    while (before := chain[-1].__cause__ or chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    cause = f" (caused by {_line(chain[-1])})" if len(chain) > 1 else ""
    return f"{_line(error)}{cause}{_way_out(chain)}"


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST_CHARACTERS]}"


def _way_out(chain: list[BaseException]) -> str:
    """Return what helps where torchvision was built for another torch: its operators are then not there."""
    if not any(_TORCHVISION in str(error) for error in chain):
        return ""
    versions = {name: _version(name) for name in ("torch", _TORCHVISION)}
    return (
        f"; most likely {_TORCHVISION} {versions[_TORCHVISION]} was built for another torch than {versions['torch']}, "
        f"which is installed: install the {_TORCHVISION} of that release, or uninstall {_TORCHVISION}"
    )


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of an unknown version"
