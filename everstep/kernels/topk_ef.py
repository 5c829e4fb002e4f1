"""Exact top-k with error feedback, in one pass over the gradient.

    accumulated = residual + gradient
    chosen      = the k largest by magnitude, exactly k, the lowest index winning among equals
    out         = accumulated, the chosen cleared

What is not finite counts as magnitude zero and stays in `out`: it is never sent. An element is read twice and written
once (12 bytes; 16 where `out` is not the residual), whatever k is. The k-th magnitude of the step before says from
where on an element is a candidate, as gradients change slowly (Li et al., "Near-Optimal Sparse Allreduce", PPoPP 2022);
the result does not depend on it. Error feedback: Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", 2018.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from everstep.kernels import native
from everstep.kernels.library import operator

Pair = tuple[torch.Tensor, torch.Tensor]


def topk_ef(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    *,
    out: torch.Tensor | None = None,
    bound: torch.Tensor | None = None,
) -> Pair:
    """Return the k elements of `residual` + `gradient` that are largest in magnitude; leave the others in `out`.

    Args:
        gradient: fp32, (n,), contiguous, n < 2**31; not written to.
        residual: fp32, (n,); None = zero, and nothing is left anywhere.
        k: how many, 0 <= k <= n.
        out: fp32, (n,), for the new residual; may be `residual` itself. Given if and only if `residual` is.
        bound: fp32, (1,). In: the k-th magnitude of the step before, which only makes this one faster (0 or NaN: not
            known). Out: that of this step (0 with k = 0); NaN if an accumulated element was not finite.

    Returns:
        The places, int32, (k,), ascending, and the values, fp32, (k,); a chosen one that is not finite is sent as 0.

    Raises:
        ValueError: a shape, k, or the presence of `out` is wrong.
        TypeError: something is not fp32.
    """
    n = gradient.numel()
    if (residual is None) != (out is None):
        raise ValueError("topk_ef: `out` is wanted if and only if a residual is given")
    for name, tensor, size in (
        ("gradient", gradient, n),
        ("residual", residual, n),
        ("out", out, n),
        ("bound", bound, 1),
    ):
        if tensor is not None:
            _check(name, tensor, size, gradient.device)
    if not 0 <= k <= n < 2**31:
        raise ValueError(f"topk_ef: expected 0 <= k <= n < 2**31, got k = {k}, n = {n}")
    if out is gradient:
        raise ValueError("topk_ef: `out` is the gradient, which is not to be written to")
    return _op(gradient, residual, k, out, bound)  # type: ignore[no-any-return]


def _check(name: str, tensor: torch.Tensor, size: int, device: torch.device) -> None:
    if tensor.dtype != torch.float32:
        raise TypeError(f"topk_ef: expected {name} as float32, got {tensor.dtype}")
    if tensor.shape != (size,) or not tensor.is_contiguous() or tensor.device != device:
        raise ValueError(
            f"topk_ef: expected {name} contiguous, of shape ({size},) on {device}, "
            f"got shape {tuple(tensor.shape)}, stride {tensor.stride()} on {tensor.device}"
        )


def reference(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    out: torch.Tensor | None,
    bound: torch.Tensor | None,
) -> Pair:
    """Compute it in plain torch: the specification, and the way without a C library."""
    accumulated = gradient if residual is None else torch.add(residual, gradient, out=out)
    finite = accumulated.isfinite()
    size = torch.where(finite, accumulated.abs(), 0.0)
    kth = size.topk(k, sorted=False).values.min() if k else size.new_full((), torch.inf)
    chosen = size > kth
    equal = (size == kth).nonzero().squeeze(1)
    chosen[equal[: k - int(chosen.sum())]] = True
    indices = chosen.nonzero().squeeze(1)
    values = torch.where(finite, accumulated, 0.0)[indices]
    if out is not None:
        out.masked_fill_(chosen & finite, 0.0)
    if bound is not None:
        bound.copy_(torch.where(finite.all(), kth if k else 0.0, torch.nan))
    return indices.int(), values


@functools.cache
def _functions() -> Any:
    library = native.library()
    if library is not None:
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        library.everstep_topk_ef_room.argtypes = [int64, int64]
        library.everstep_topk_ef_room.restype = int64
        library.everstep_topk_ef.argtypes = [*[pointer] * 3, int64, int64, *[pointer] * 5]
        library.everstep_topk_ef.restype = None
    return library


def _cpu(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    out: torch.Tensor | None,
    bound: torch.Tensor | None,
) -> Pair:
    library = _functions()
    if library is None:
        return reference(gradient, residual, k, out, bound)
    n = gradient.numel()
    room = library.everstep_topk_ef_room(n, k)
    scratch = torch.empty(room, dtype=torch.int32), torch.empty(room)
    indices, values = torch.empty(k, dtype=torch.int32), torch.empty(k)
    tensors = map(native.pointer, (gradient, residual, out))
    library.everstep_topk_ef(*tensors, n, k, *map(native.pointer, (indices, values, bound, *scratch)))
    return indices, values


def _cuda(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    out: torch.Tensor | None,
    bound: torch.Tensor | None,
) -> Pair:
    raise NotImplementedError


def _fake(
    gradient: torch.Tensor,
    residual: torch.Tensor | None,
    k: int,
    out: torch.Tensor | None,
    bound: torch.Tensor | None,
) -> Pair:
    return gradient.new_empty((k,), dtype=torch.int32), gradient.new_empty((k,))


_op = operator(
    "topk_ef(Tensor gradient, Tensor? residual, SymInt k, Tensor(a!)? out, Tensor(b!)? bound) -> (Tensor, Tensor)",
    cpu=_cpu,
    cuda=_cuda,
    fake=_fake,
)
