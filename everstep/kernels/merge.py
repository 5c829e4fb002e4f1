"""Adding up sparse vectors in a fixed order: of the same rows always the same bits, whoever adds them.

    sum at a place = 0.0 + the values that the rows have there, in the order of the rows

which is what zeros and `index_add_` row by row give on a CPU (on a GPU that is in no fixed order). The rows are
ascending, so one range of places after another is added up while it stays in the cache: 8 bytes are read of each
element, and 4 written of each place of a dense sum.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from everstep.kernels import native
from everstep.kernels.library import operator


def merge(indices: torch.Tensor, values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum of w sparse vectors of length n, sparse.

    Args:
        indices: int32, (w, k), each row ascending and distinct, in [0, n).
        values: fp32, (w, k).
        n: below 2**31.

    Returns:
        The u places that any row has, int32, (u,), ascending, and the sums there, fp32, (u,).

    Raises:
        ValueError: a shape is wrong, a place is not in [0, n), or a row is found not to be ascending.
        TypeError: a type is wrong.
    """
    _check("merge", indices, values, n)
    return _merge(indices, values, n)  # type: ignore[no-any-return]


def merge_dense(
    indices: torch.Tensor, values: torch.Tensor, n: int, *, scale: float = 1.0, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the sum of w sparse vectors of length n, dense, times `scale`.

    Args:
        indices: int32, (w, k), each row ascending and distinct, in [0, n).
        values: fp32, (w, k).
        n: below 2**31.
        scale: each sum is multiplied by it (rounded to fp32) once.
        out: fp32, (n,), where it goes; None = a new tensor.

    Raises:
        ValueError: a shape is wrong, a place is not in [0, n), or a row is found not to be ascending.
        TypeError: a type is wrong.
    """
    _check("merge_dense", indices, values, n)
    if out is None:
        out = values.new_empty((n,))
    if out.dtype != torch.float32:
        raise TypeError(f"merge_dense: expected out as float32, got {out.dtype}")
    if out.shape != (n,) or not out.is_contiguous() or out.device != values.device:
        raise ValueError(f"merge_dense: expected out contiguous, of shape ({n},), got {tuple(out.shape)}")
    _merge_dense(indices, values, scale, out)
    return out


def _check(what: str, indices: torch.Tensor, values: torch.Tensor, n: int) -> None:
    if indices.dtype != torch.int32 or values.dtype != torch.float32:
        raise TypeError(f"{what}: expected indices as int32 and values as float32, got {indices.dtype}, {values.dtype}")
    if indices.dim() != 2 or indices.shape != values.shape or indices.device != values.device:
        raise ValueError(
            f"{what}: expected indices and values of one shape (w, k), "
            f"got {tuple(indices.shape)} on {indices.device}, {tuple(values.shape)} on {values.device}"
        )
    if not indices.is_contiguous() or not values.is_contiguous():
        raise ValueError(f"{what}: expected contiguous tensors, got {indices.stride()}, {values.stride()}")
    if not 0 <= n < 2**31:
        raise ValueError(f"{what}: expected 0 <= n < 2**31, got {n}")


def _refuse(n: int) -> ValueError:
    return ValueError(f"merge: expected ascending rows of places in [0, {n}); these are not")


def _check_ends(indices: torch.Tensor, n: int) -> None:
    # the rows are ascending: their ends tell
    if indices.numel() and (int(indices[:, 0].min()) < 0 or int(indices[:, -1].max()) >= n):
        raise _refuse(n)


def reference_merge(indices: torch.Tensor, values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Merge in plain torch: the specification, and the way without a C library."""
    _check_ends(indices, n)
    places, where = torch.unique(indices, return_inverse=True)
    sums = values.new_zeros(places.shape)
    for row, added in zip(where, values, strict=True):
        sums.index_add_(0, row, added)
    return places, sums


def reference_merge_dense(indices: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    """Merge in plain torch: the specification, and the way without a C library."""
    _check_ends(indices, out.numel())
    out.zero_()
    for row, added in zip(indices, values, strict=True):
        out.index_add_(0, row, added)
    if scale != 1.0:
        out.mul_(scale)


@functools.cache
def _functions() -> Any:
    library = native.library()
    if library is not None:
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        library.everstep_merge.argtypes = [pointer, pointer, int64, int64, int64, *[pointer] * 5]
        library.everstep_merge.restype = int64
        library.everstep_merge_range.restype = int64
        library.everstep_merge_dense.argtypes = [*[pointer] * 2, *[int64] * 3, ctypes.c_float, pointer, pointer]
    return library


def _merge_cpu(indices: torch.Tensor, values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    library, (w, k) = _functions(), indices.shape
    if library is None:
        return reference_merge(indices, values, n)
    most, size = min(w * k, n), library.everstep_merge_range()
    places, sums = indices.new_empty(most), values.new_empty(most)
    work = torch.zeros(size), torch.zeros(size // 64, dtype=torch.int64), torch.empty(w, dtype=torch.int64)
    tensors = map(native.pointer, (places, sums, *work))
    u = library.everstep_merge(native.pointer(indices), native.pointer(values), w, k, n, *tensors)
    if u < 0:
        raise _refuse(n)
    return places[:u], sums[:u]


def _merge_dense_cpu(indices: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    library, (w, k), n = _functions(), indices.shape, out.numel()
    if library is None:
        return reference_merge_dense(indices, values, scale, out)
    cursors = torch.empty(w, dtype=torch.int64)
    tensors = native.pointer(out), native.pointer(cursors)
    if library.everstep_merge_dense(native.pointer(indices), native.pointer(values), w, k, n, scale, *tensors):
        raise _refuse(n)


def _merge_cuda(indices: torch.Tensor, values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError


def _merge_dense_cuda(indices: torch.Tensor, values: torch.Tensor, scale: float, out: torch.Tensor) -> None:
    raise NotImplementedError


def _merge_fake(indices: torch.Tensor, values: torch.Tensor, n: int) -> tuple[torch.Tensor, torch.Tensor]:
    u = torch.library.get_ctx().new_dynamic_size()
    return indices.new_empty((u,)), values.new_empty((u,))


_merge = operator(
    "merge(Tensor indices, Tensor values, SymInt n) -> (Tensor, Tensor)",
    cpu=_merge_cpu,
    cuda=_merge_cuda,
    fake=_merge_fake,
)
_merge_dense = operator(
    "merge_dense(Tensor indices, Tensor values, float scale, Tensor(a!) out) -> ()",
    cpu=_merge_dense_cpu,
    cuda=_merge_dense_cuda,
    fake=lambda indices, values, scale, out: None,
)
