"""How much of a GPU's best rate a product or an attention of given sides reaches, and what that best rate is.

```
    columns ──►                       a product's result is cut into tiles, one for each multiprocessor at a time;
    ┌────┬────┬────┬─┐ rows           tiles at the edges compute what nobody asked for, and in the last wave
    │ 0  │ 1  │ 2  │3│  │             some multiprocessors have nothing to do
    ├────┼────┼────┼─┤  ▼
    │ 0  │ 1  │ 2  │3│     4 multiprocessors: two waves for 6.6 tiles' worth of results
    └────┴────┴────┴─┘
```

NVIDIA, Matrix Multiplication Background User's Guide (docs.nvidia.com/deeplearning/performance): tile and wave
quantization, and larger tiles being more efficient.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from math import ceil
from typing import Annotated

from pydantic import Field

from cost_models.specs import Spec

Share = Annotated[float, Field(gt=0, le=1)]
Sides = tuple[int, int, int, int]

_TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.8), (64, 64, 0.65))
"""Rows and columns of a tile, and its rate over that of the largest: the guide's figures, rounded."""
_TILE_START = 64
"""What a tile costs beside its products, in inner elements: it is loaded and stored; a prior."""
_SPLITS = (1, 2, 4, 8)
"""In how many parts a kernel cuts the inner side of a product with few tiles."""
_SPLIT_COST = 0.9
_ATTENTION_TILE, _ATTENTION_START = 128, 200
"""Queries of a tile of attention, and what it costs beside its products, in keys. At 512, 1k and 2k keys
FlashAttention-2 reaches about 0.72, 0.86 and 0.93 of what it does at 16k (arXiv 2307.08691, figure 5: recalled)."""


class ArchitectureSpec(Spec):
    """The shares of a device's peaks that large kernels reach on one architecture.

    Attributes:
        arithmetic: by class of work; ``matmul.fp8`` is that of one arithmetic, ``attention.64`` of heads up to a width.
        memory: share of the memory bandwidth by class of work.
    """

    arithmetic: dict[str, Share] = Field(default_factory=dict)
    memory: dict[str, Share] = Field(default_factory=dict)


@cache
def architecture(name: str | None) -> ArchitectureSpec:
    """Return what is known of the kernels of an architecture, by its compute capability.

    What is not known of 8.6 is taken to be as on 8.0; of any other unknown one nothing is known.
    """
    for known in (name, f"{str(name).partition('.')[0]}.0"):
        source = files("cost_models") / "architectures" / f"{known}.json"
        if source.is_file():
            return ArchitectureSpec.model_validate_json(source.read_bytes())
    return ArchitectureSpec(sources={})


@cache
def product_share(sides: Sides, multiprocessors: int) -> float:
    """Return the rate of a product over that of a large one."""
    batch, rows, columns, inner = sides
    best = 0.0
    for high, wide, rate in _TILES:
        for across, along in ((rows, columns), (columns, rows)):
            tiles = batch * ceil(across / high) * ceil(along / wide)
            for parts in _SPLITS:
                waves, length = ceil(tiles * parts / multiprocessors), inner / parts + _TILE_START
                done = batch * rows * columns * inner / (waves * multiprocessors * high * wide * length)
                best = max(best, rate * done * (1.0 if parts == 1 else _SPLIT_COST))
    return best


@cache
def attention_share(sides: Sides, multiprocessors: int) -> float:
    """Return the rate of an attention over that of one with many keys and heads."""
    heads, queries, keys, _ = sides
    tiles = heads * queries / _ATTENTION_TILE
    waves = ceil(heads * ceil(queries / _ATTENTION_TILE) / multiprocessors)
    return tiles / (waves * multiprocessors) * keys / (keys + _ATTENTION_START)
