"""PowerSGD: each gradient matrix as a product of two thin ones, found by one step of subspace iteration.

Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization",
NeurIPS 2019, algorithm 1, with error feedback by algorithm 2.

    M    a parameter's accumulated gradient, (m, n): the first dimension by all others    `matrix`
    Q    where the iteration starts, (n, r)                                               `start`
    P    sum over workers of M Q, (m, r), then orthonormal                                `left`
    Q'   sum over workers of M^T P, (n, r)                                                `right`

What is sent is P Q'^T; each worker keeps M - P P^T M of its own. Vectors, and matrices that two thin ones would not
make smaller, are summed as they are. Deviations: Q is drawn anew by (seed, step) instead of taken from the step before,
so that there is no state beyond the residual (the paper's "without warm start", which it finds a little worse); P is
orthonormalised by QR, by world rank 0 for all, since another processor may round it otherwise, and the product is
summed in a fixed order. The log gets the dense result.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from everstep.compressors.base import COMPRESSORS, Compressed, Reducer, Spec, finite
from everstep.core.rng import fold


@dataclass(frozen=True)
class _Matrix:
    """A parameter that is worth it: its place in the flat gradient and its (m, n)."""

    start: int
    rows: int
    columns: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


@COMPRESSORS.register("powersgd")
class PowerSGD(Reducer):
    """Rank-r matrices by `rank` of the settings."""

    def __init__(self, spec: Spec) -> None:
        super().__init__(spec)
        self.matrices = _matrices(spec.shapes, spec.rank)
        borders = [0, *(at for m in self.matrices for at in (m.start, m.start + m.rows * m.columns))]
        borders.append(sum(math.prod(shape) for shape in spec.shapes))
        self.rests = [slice(*pair) for pair in zip(borders[::2], borders[1::2], strict=True) if pair[0] < pair[1]]

    def reduce(
        self, accumulated: torch.Tensor, lsn: int, all_reduce: Callable[[torch.Tensor], None], *, first: bool
    ) -> tuple[Compressed, torch.Tensor]:
        """Return the sum over workers, approximated, and this worker's own part of it (both fp32, (n,))."""
        matrices = [matrix.of(accumulated) for matrix in self.matrices]
        starts = [self.start(matrix, lsn).to(accumulated.device) for matrix in self.matrices]
        lefts = _summed([matrix @ start for matrix, start in zip(matrices, starts, strict=True)], all_reduce)
        lefts = _summed([torch.linalg.qr(left).Q if first else torch.zeros_like(left) for left in lefts], all_reduce)
        own = [matrix.T @ left for matrix, left in zip(matrices, lefts, strict=True)]
        rights = _summed([*own, *(accumulated[rest] for rest in self.rests)], all_reduce)
        total, mine = torch.empty_like(accumulated), torch.empty_like(accumulated)
        for at, (matrix, left) in enumerate(zip(self.matrices, lefts, strict=True)):
            _product(left, rights[at], matrix.of(total))
            _product(left, own[at], matrix.of(mine))
        for rest, summed in zip(self.rests, rights[len(own) :], strict=True):
            total[rest], mine[rest] = summed, accumulated[rest]
        return Compressed(total, finite=finite(total)), mine

    def start(self, matrix: _Matrix, lsn: int) -> torch.Tensor:
        """Return Q of a matrix in a step, uniform in [-1, 1): raw words of a generator that is the same everywhere."""
        shape, key = (matrix.columns, self.spec.rank), fold(self.spec.seed, "powersgd", lsn, matrix.start)
        words = np.random.Philox(key=key).random_raw(math.prod(shape)) >> np.uint64(40)
        return torch.from_numpy(words.astype(np.float32) * np.float32(2.0**-23) - np.float32(1)).view(shape)


def _matrices(shapes: Sequence[tuple[int, ...]], rank: int) -> list[_Matrix]:
    found, start = [], 0
    for shape in shapes:
        rows, size = (shape[0] if shape else 1), math.prod(shape)
        columns = size // max(rows, 1)
        if len(shape) > 1 and rank * (rows + columns) < size and rank <= min(rows, columns):
            found.append(_Matrix(start, rows, columns))
        start += size
    return found


def _summed(parts: Sequence[torch.Tensor], all_reduce: Callable[[torch.Tensor], None]) -> list[torch.Tensor]:
    """Sum tensors over workers, all of them in one collective."""
    flat = torch.cat([part.reshape(-1) for part in parts]) if parts else torch.empty(0)
    if flat.numel():
        all_reduce(flat)
    pieces = torch.split(flat, [part.numel() for part in parts])
    return [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]


def _product(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor) -> None:
    """Write left @ right.T to `out`, column by column: a matrix product may add in another order elsewhere."""
    out.zero_()
    for column in range(left.shape[1]):
        out += left[:, column, None] * right[None, :, column]
