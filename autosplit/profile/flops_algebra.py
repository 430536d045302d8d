"""Floating-point operations of transforms, of dense linear algebra and of distances, which torch's counter leaves out.

Transforms: 5 N log2 N for a complex one of N points and half of that for a real one, the count by which FFT libraries
are compared (Frigo and Johnson, Proc. IEEE 93, 2005). Factorisations: leading terms (Golub and Van Loan, Matrix
Computations, 4th ed., 2013). Iterative ones (eigenvalues, singular values) have no count that shapes give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def algebra_formulas() -> Mapping[str, Callable[..., int]]:
    """Return the formulas by the name of the aten operation; called as those of torch's registry."""
    return {
        "_fft_c2c": _complex_transform,
        "_fft_r2c": _real_transform,
        "_fft_c2r": _real_transform_back,
        "linalg_cholesky_ex": _cholesky,
        "linalg_lu_factor_ex": _lu,
        "linalg_lu": _lu,
        "linalg_lu_solve": _lu_solve,
        "_linalg_solve_ex": _solve,
        "linalg_inv_ex": _inverse,
        "linalg_solve_triangular": _triangular_solve,
        "linalg_qr": _qr,
        "_euclidean_dist": _distances,
        "_cdist_forward": _distances,
    }


def _transforms(shape: Sequence[int], dims: Sequence[int], factor: float) -> int:
    points = math.prod(shape[dim] for dim in dims)
    return round(factor * math.prod(shape) * math.log2(points)) if points else 0


def _complex_transform(source: Any, dims: Sequence[int], *_: Any, **__: Any) -> int:
    return _transforms(source.shape, dims, 5.0)


def _real_transform(source: Any, dims: Sequence[int], *_: Any, **__: Any) -> int:
    return _transforms(source.shape, dims, 2.5)


def _real_transform_back(_source: Any, dims: Sequence[int], *_: Any, out_val: Any, **__: Any) -> int:
    return _transforms(out_val.shape, dims, 2.5)


def _matrices(matrix: Any) -> int:
    return math.prod(matrix.shape[:-2])


def _cholesky(matrix: Any, *_: Any, **__: Any) -> int:
    return _matrices(matrix) * matrix.shape[-1] ** 3 // 3


def _lu(matrix: Any, *_: Any, **__: Any) -> int:
    rows, columns = matrix.shape[-2:]
    least = min(rows, columns)
    return int(_matrices(matrix) * (least**2 * (max(rows, columns) - least / 3)))


def _columns(right: Any, matrix: Any) -> int:
    return int(right.shape[-1]) if right.dim() == matrix.dim() else 1


def _lu_solve(factors: Any, _pivots: Any, right: Any, *_: Any, **__: Any) -> int:
    return _matrices(factors) * 2 * factors.shape[-1] ** 2 * _columns(right, factors)


def _solve(matrix: Any, right: Any, *_: Any, **__: Any) -> int:
    return _lu(matrix) + _matrices(matrix) * 2 * matrix.shape[-1] ** 2 * _columns(right, matrix)


def _inverse(matrix: Any, *_: Any, **__: Any) -> int:
    return _matrices(matrix) * 2 * matrix.shape[-1] ** 3


def _triangular_solve(matrix: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(matrix.shape[-1]) * int(right.numel())


def _qr(matrix: Any, *_: Any, **__: Any) -> int:
    """Return the cost of the factors; Q itself is made of them at as much again."""
    rows, columns = matrix.shape[-2:]
    least, most = min(rows, columns), max(rows, columns)
    return int(_matrices(matrix) * 4 * least**2 * (most - least / 3))


def _distances(left: Any, right: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """Return a product and two sums for each pair of points and dimension of space."""
    return 3 * out_val.numel() * left.shape[-1]
