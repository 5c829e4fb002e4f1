"""Elias-Fano: ascending indices in about a byte each at 1 %, within 7 % of what any code of random places takes.

Of each index the r low bits stand packed, then the rest in a bit vector, one 1 for each: r + 2 bits or a little less
an index. The message needs no n to be read:

    byte 0                      r = floor(log2(n / k)), at most 30
    bytes 1 ... 1 + ceil(kr/8)  low bits: those of index 0 first, of each the lowest first
    the others                  bit (index_j >> r) + j is 1 for each j; the lowest bit of a byte first, the rest 0

Elias, "Efficient storage and retrieval by content and address of static files", 1974; Fano, 1971. Both directions work
in parallel: the low part has a fixed width, and the j-th 1 of a bit vector is found by counting.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np
import torch

from everstep.kernels import native
from everstep.kernels.library import operator

LARGEST = 2**31 - 1


def packed_size(k: int, n: int) -> int:
    """Return how many bytes k indices below n take packed."""
    if k == 0:
        return 1
    r = low_bits(k, n)
    return 1 + (k * r + 7) // 8 + (((n - 1) >> r) + k + 7) // 8


def low_bits(k: int, n: int) -> int:
    """Return r, how many low bits of each of k indices below n stand by themselves."""
    return int(n // k).bit_length() - 1 if k else 0


def pack(indices: torch.Tensor, n: int) -> torch.Tensor:
    """Return `indices` packed.

    Args:
        indices: int32, (k,), ascending, distinct, in [0, n).
        n: how many places there are, k <= n < 2**31.

    Returns:
        uint8, (packed_size(k, n),).

    Raises:
        ValueError: the indices are not such.
        TypeError: they are not int32.
    """
    if indices.dtype != torch.int32:
        raise TypeError(f"pack: expected indices as int32, got {indices.dtype}")
    if indices.dim() != 1 or not indices.is_contiguous():
        raise ValueError(f"pack: expected indices contiguous, of shape (k,), got {tuple(indices.shape)}")
    if not indices.numel() <= n < 2**31:
        raise ValueError(f"pack: expected k <= n < 2**31, got k = {indices.numel()}, n = {n}")
    return _pack(indices, n)  # type: ignore[no-any-return]


def unpack(packed: torch.Tensor, k: int) -> torch.Tensor:
    """Return the k indices that `packed` holds; safe whatever its bytes are.

    Args:
        packed: uint8, (m,), made by `pack`.
        k: how many indices.

    Returns:
        int32, (k,), ascending, distinct, not below 0 (that none is above some n is for the caller to check).

    Raises:
        ValueError: it is no code of k indices.
        TypeError: it is not uint8.
    """
    if packed.dtype != torch.uint8:
        raise TypeError(f"unpack: expected packed as uint8, got {packed.dtype}")
    if packed.dim() != 1 or not packed.is_contiguous() or not 0 <= k <= 8 * packed.numel():
        raise ValueError(f"unpack: expected (m,) bytes of k <= 8 m indices, got {tuple(packed.shape)}, k = {k}")
    return _unpack(packed, k)  # type: ignore[no-any-return]


def _refuse_indices(n: int) -> ValueError:
    return ValueError(f"pack: expected indices ascending, distinct and in [0, {n}); these are not")


def _refuse_code(k: int, m: int) -> ValueError:
    return ValueError(f"unpack: expected the Elias-Fano code of {k} indices below 2**31; these {m} bytes are none")


def reference_pack(indices: torch.Tensor, n: int) -> torch.Tensor:
    """Pack in NumPy (torch has no packbits): the specification, and the way without a C library."""
    places, k = indices.numpy().astype(np.int64), indices.numel()
    if k and not (places[0] >= 0 and places[-1] < n and (np.diff(places) > 0).all()):
        raise _refuse_indices(n)
    r = low_bits(k, n)
    low = (places[:, None] >> np.arange(r)) & 1
    high = np.zeros((packed_size(k, n) - 1 - (k * r + 7) // 8) * 8, np.uint8)
    high[(places >> r) + np.arange(k)] = 1
    bits = [np.packbits(part.ravel().astype(np.uint8), bitorder="little") for part in (low, high)]
    return torch.from_numpy(np.concatenate([np.array([r], np.uint8), *bits]))


def reference_unpack(packed: torch.Tensor, k: int) -> torch.Tensor:
    """Unpack in NumPy: the specification, and the way without a C library."""
    code, m = packed.numpy(), packed.numel()
    if m < 1 or code[0] > 30 or (m - 1) * 8 < k * int(code[0]):
        raise _refuse_code(k, m)
    r = int(code[0])
    cut = 1 + (k * r + 7) // 8
    low = np.unpackbits(code[1:cut], bitorder="little")[: k * r].reshape(k, r).astype(np.int64)
    high = np.flatnonzero(np.unpackbits(code[cut:], bitorder="little"))
    if len(high) != k:
        raise _refuse_code(k, m)
    indices = ((high - np.arange(k)) << r) + (low << np.arange(r)).sum(1)
    if k and not (indices[-1] <= LARGEST and (np.diff(indices) > 0).all()):
        raise _refuse_code(k, m)
    return torch.from_numpy(indices.astype(np.int32))


@functools.cache
def _functions() -> Any:
    library = native.library()
    if library is not None:
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        library.everstep_pack.argtypes = [pointer, int64, int64, ctypes.c_int, pointer, int64]
        library.everstep_unpack.argtypes = [pointer, int64, int64, pointer]
    return library


def _pack_cpu(indices: torch.Tensor, n: int) -> torch.Tensor:
    library, k = _functions(), indices.numel()
    if library is None:
        return reference_pack(indices, n)
    packed = torch.empty(packed_size(k, n), dtype=torch.uint8)
    r, m = low_bits(k, n), packed.numel()
    if library.everstep_pack(native.pointer(indices), k, n, r, native.pointer(packed), m):
        raise _refuse_indices(n)
    return packed


def _unpack_cpu(packed: torch.Tensor, k: int) -> torch.Tensor:
    library = _functions()
    if library is None:
        return reference_unpack(packed, k)
    indices = torch.empty(k, dtype=torch.int32)
    if library.everstep_unpack(native.pointer(packed), packed.numel(), k, native.pointer(indices)):
        raise _refuse_code(k, packed.numel())
    return indices


def _pack_cuda(indices: torch.Tensor, n: int) -> torch.Tensor:
    raise NotImplementedError


def _unpack_cuda(packed: torch.Tensor, k: int) -> torch.Tensor:
    raise NotImplementedError


_pack = operator(
    "pack(Tensor indices, SymInt n) -> Tensor",
    cpu=_pack_cpu,
    cuda=_pack_cuda,
    fake=lambda indices, n: indices.new_empty((packed_size(indices.numel(), n),), dtype=torch.uint8),
)
_unpack = operator(
    "unpack(Tensor packed, SymInt k) -> Tensor",
    cpu=_unpack_cpu,
    cuda=_unpack_cuda,
    fake=lambda packed, k: packed.new_empty((k,), dtype=torch.int32),
)
