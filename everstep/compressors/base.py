"""What a compressor is, and their registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from everstep.core.registry import Registry


@dataclass(frozen=True)
class Sparse:
    """A few elements of a flat gradient: ascending `indices` (int64, (k,)) and their `values` (fp32, (k,))."""

    indices: torch.Tensor
    values: torch.Tensor


class Compressor(Protocol):
    """Chooses what to send of an accumulated gradient (error feedback: compressed + residual = accumulated)."""

    def __call__(self, accumulated: torch.Tensor) -> Sparse:
        """Return the chosen elements of `accumulated` (fp32, (n,)); the same for the same bits, always k of them."""
        ...


COMPRESSORS: Registry[Callable[[float], Compressor]] = Registry("compressor")


def build_compressor(method: str, density: float) -> Compressor | None:
    """Return the compressor called `method`, or None for "none".

    Args:
        method: a registered name or `package.module:Thing`, called with `density`.
        density: the share of elements to keep, in (0, 1].
    """
    return None if method == "none" else COMPRESSORS.get(method)(density)
