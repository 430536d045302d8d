"""How a batch is cut into microbatches."""

from __future__ import annotations


def sizes_of(rows: int, chunks: int, min_rows: int, *, like: str = "tensor_split") -> tuple[int, ...]:
    """Return the rows of each microbatch, at most ``chunks`` of at least ``min_rows``.

    They are cut as ``torch.tensor_split`` cuts, sizes as even as can be, or as ``torch.chunk`` does: all of one size
    but for a smaller last one, which may give fewer.
    """
    if like == "chunk":
        size = max(-(-rows // chunks), min_rows)
        whole, rest = divmod(rows, size)
        if rest >= min_rows or not whole:
            return (*[size] * whole, *[rest] * (rest > 0))
        return (*[size] * (whole - 1), size + rest)
    count = max(1, min(chunks, rows // min_rows))
    base, extra = divmod(rows, count)
    return tuple(base + (i < extra) for i in range(count))
