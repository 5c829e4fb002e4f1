"""Blocks of 256 elements as int8, or of 64 as int4, with one fp32 scale each.

    scale = largest |x| of the block * fp32(1 / L)          L = 127 (8 bits) or 7 (4 bits)
    q     = rint(x / scale), half to even, at most L in magnitude; 0 where the scale is 0
    read  = q * scale

Each in fp32, rounded once. A block with an element that is not finite has the scale NaN and reads as NaN. The error
x - read is itself an fp32 number (Sterbenz, "Floating-Point Computation", 1974), so it can be fed back exactly.
An element takes 4 bytes read and 1.016 (0.56) written. Blocks: Dettmers et al., "8-bit Optimizers via Block-wise
Quantization", ICLR 2022.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch

from everstep.kernels import native
from everstep.kernels.library import operator

BLOCK = {8: 256, 4: 64}  # elements to a scale, by bits
LEVELS = {8: 127.0, 4: 7.0}
CODES = {8: torch.int8, 4: torch.uint8}


def quantise(values: torch.Tensor, bits: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes and scales of `values`.

    Args:
        values: fp32, (n,), contiguous.
        bits: 8 or 4.

    Returns:
        Codes: int8, (n,), or with 4 bits uint8, (ceil(n / 2),), two a byte, the first in the low half, 8 added to each.
        Scales: fp32, (ceil(n / BLOCK[bits]),).

    Raises:
        ValueError: the shape or `bits` is wrong.
        TypeError: the values are not fp32.
    """
    _check("quantise", "values", values, torch.float32, None)
    if bits not in BLOCK:
        raise ValueError(f"quantise: expected 8 or 4 bits, got {bits}")
    return _quantise(values, bits)  # type: ignore[no-any-return]


def dequantise(codes: torch.Tensor, scales: torch.Tensor, n: int, bits: int = 8) -> torch.Tensor:
    """Return the n values, fp32, (n,), that codes and scales as `quantise` makes them stand for.

    Raises:
        ValueError: a shape or `bits` is wrong.
        TypeError: a type is.
    """
    if bits not in BLOCK:
        raise ValueError(f"dequantise: expected 8 or 4 bits, got {bits}")
    _check("dequantise", "codes", codes, CODES[bits], codes_size(n, bits))
    _check("dequantise", "scales", scales, torch.float32, blocks(n, bits))
    return _dequantise(codes, scales, n, bits)  # type: ignore[no-any-return]


def codes_size(n: int, bits: int) -> int:
    """Return how many bytes the codes of n values take."""
    return n if bits == 8 else (n + 1) // 2


def blocks(n: int, bits: int) -> int:
    """Return how many scales n values have."""
    return (n + BLOCK[bits] - 1) // BLOCK[bits]


def _check(what: str, name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int | None) -> None:
    if tensor.dtype != dtype:
        raise TypeError(f"{what}: expected {name} as {dtype}, got {tensor.dtype}")
    if tensor.dim() != 1 or not tensor.is_contiguous() or (size is not None and tensor.numel() != size):
        wanted = "n" if size is None else size
        raise ValueError(f"{what}: expected {name} contiguous, of shape ({wanted},), got {tuple(tensor.shape)}")


def reference_quantise(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise in plain torch: the specification, and the way without a C library."""
    n, levels = values.numel(), LEVELS[bits]
    padded = values.new_zeros((blocks(n, bits), BLOCK[bits]))
    padded.view(-1)[:n] = values
    largest = padded.abs().amax(1, keepdim=True)
    scales = torch.where(largest.isfinite(), largest * (torch.ones_like(largest) / levels), torch.nan)
    codes = torch.where(scales > 0, (padded / scales).round().clamp(-levels, levels), 0.0).view(-1)
    if bits == 8:
        return codes[:n].to(torch.int8), scales.squeeze(1)
    halves = (codes[: 2 * codes_size(n, bits)] + 8).to(torch.uint8)
    return halves[::2] | halves[1::2] << 4, scales.squeeze(1)


def reference_dequantise(codes: torch.Tensor, scales: torch.Tensor, n: int, bits: int) -> torch.Tensor:
    """Read codes in plain torch: the specification, and the way without a C library."""
    if bits == 4:
        codes = torch.stack([codes & 15, codes >> 4], 1).view(-1)[:n].to(torch.int8) - 8
    return codes.float() * scales.repeat_interleave(BLOCK[bits])[:n]


@functools.cache
def _functions() -> Any:
    library = native.library()
    if library is not None:
        pointer, int64 = ctypes.c_void_p, ctypes.c_int64
        for bits in BLOCK:
            getattr(library, f"everstep_quantise{bits}").argtypes = [pointer, int64, pointer, pointer]
            getattr(library, f"everstep_dequantise{bits}").argtypes = [pointer, pointer, int64, pointer]
    return library


def _quantise_cpu(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    library, n = _functions(), values.numel()
    if library is None:
        return reference_quantise(values, bits)
    codes, scales = _quantise_fake(values, bits)
    function = library.everstep_quantise8 if bits == 8 else library.everstep_quantise4
    function(native.pointer(values), n, native.pointer(codes), native.pointer(scales))
    return codes, scales


def _dequantise_cpu(codes: torch.Tensor, scales: torch.Tensor, n: int, bits: int) -> torch.Tensor:
    library = _functions()
    if library is None:
        return reference_dequantise(codes, scales, n, bits)
    values = scales.new_empty((n,))
    function = library.everstep_dequantise8 if bits == 8 else library.everstep_dequantise4
    function(native.pointer(codes), native.pointer(scales), n, native.pointer(values))
    return values


def _quantise_cuda(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    raise NotImplementedError


def _dequantise_cuda(codes: torch.Tensor, scales: torch.Tensor, n: int, bits: int) -> torch.Tensor:
    raise NotImplementedError


def _quantise_fake(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    n = values.numel()
    return values.new_empty((codes_size(n, bits),), dtype=CODES[bits]), values.new_empty((blocks(n, bits),))


_quantise = operator(
    "quantise(Tensor values, int bits) -> (Tensor, Tensor)",
    cpu=_quantise_cpu,
    cuda=_quantise_cuda,
    fake=_quantise_fake,
)
_dequantise = operator(
    "dequantise(Tensor codes, Tensor scales, SymInt n, int bits) -> Tensor",
    cpu=_dequantise_cpu,
    cuda=_dequantise_cuda,
    fake=lambda codes, scales, n, bits: scales.new_empty((n,)),
)
