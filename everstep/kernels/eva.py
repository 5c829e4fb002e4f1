"""Eva's preconditioning of many layers at once, in place: a rank-one correction of each gradient matrix.

    G <- (G - c b a^T) / damping,   c = b^T G a / (damping + |a|^2 |b|^2)

G is (m, n), a the mean input of the layer (n,), b the mean gradient of its output (m,): by Sherman and Morrison this is
(v v^T + damping I)^-1 vec(G) for v = vec(b a^T). Eva-s of a matrix is `damping` times it, with its own two vectors.

Bytes an element: 12 (4 to find c, 8 to apply it). Sums stand in a fixed order: the same bits in every run, and on the
CPU with every number of threads. Source: L. Zhang et al., Eva: Practical Second-order Optimization with
Kronecker-vectorized Approximation, ICLR 2023, and arXiv 2308.02123; the formula is that of the authors' code.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from everstep.kernels import cuda
from everstep.kernels.library import operator

THREADS = 256
TILE = 1 << 14  # elements of a matrix that a block works through

Tensors = Sequence[torch.Tensor]


def reference(gradient: torch.Tensor, a: torch.Tensor, b: torch.Tensor, damping: float) -> torch.Tensor:
    """Return the preconditioned gradient (m, n) of one layer in float64."""
    G, a, b = gradient.double(), a.double(), b.double()
    c = (b @ G @ a) / (damping + (a @ a) * (b @ b))
    return (G - c * torch.outer(b, a)) / damping


def _cpu(gradients: Tensors, a: Tensors, b: Tensors, damping: float) -> None:
    for G, a_l, b_l in zip(gradients, a, b, strict=True):
        c = _dot(b_l, torch.mv(G, a_l)) / (damping + _dot(a_l, a_l) * _dot(b_l, b_l))
        G.addr_(b_l, a_l, beta=1 / damping, alpha=-c / damping)


def _dot(x: torch.Tensor, y: torch.Tensor) -> float:
    """Sum the products in float64, in NumPy's order: torch's own depends on the number of threads."""
    return float(np.multiply(x.numpy(), y.numpy(), dtype=np.float64).sum())


def _cuda(gradients: Tensors, a: Tensors, b: Tensors, damping: float) -> None:
    rows = tuple(
        (G.data_ptr(), a_l.data_ptr(), b_l.data_ptr(), *G.shape) for G, a_l, b_l in zip(gradients, a, b, strict=True)
    )
    device = gradients[0].device
    layers, tiles = _tables(rows, device)
    partial = torch.empty(len(tiles), device=device)
    coefficient = torch.empty(len(rows), device=device)
    cuda.launch("eva.cu", "eva_dot", len(tiles), THREADS, layers, tiles, partial)
    cuda.launch("eva.cu", "eva_coefficient", len(rows), THREADS, layers, partial, coefficient, np.float64(damping))
    cuda.launch("eva.cu", "eva_apply", len(tiles), THREADS, layers, tiles, coefficient, np.float32(1 / damping))


@functools.lru_cache(maxsize=16)
def _tables(rows: tuple[tuple[int, ...], ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the kernels read: a row for each layer, a row (layer, tile of it) for each block.

    Both follow from the addresses and shapes alone, which are mostly those of the step before: they are kept.
    """
    counts = [-(-m * n // TILE) for *_, m, n in rows]
    firsts = list(itertools.accumulate(counts, initial=0))
    layers = [[*row, first, count, 0] for row, first, count in zip(rows, firsts, counts, strict=False)]
    tiles = [[layer, tile] for layer, count in enumerate(counts) for tile in range(count)]
    return (
        torch.tensor(layers, dtype=torch.int64).to(device),
        torch.tensor(tiles, dtype=torch.int32).reshape(-1, 2).to(device),
    )


def _fake(gradients: Tensors, a: Tensors, b: Tensors, damping: float) -> None:
    return None


_eva = operator(
    "eva(Tensor(a!)[] gradients, Tensor[] a, Tensor[] b, float damping) -> ()", cpu=_cpu, cuda=_cuda, fake=_fake
)


def eva(gradients: Tensors, a: Tensors, b: Tensors, damping: float) -> None:
    """Precondition gradients in place, each by the two vectors of its layer.

    Args:
        gradients: matrices (m, n), float32, contiguous, all on one device; overwritten.
        a: for each the vector (n,), float32.
        b: for each the vector (m,), float32.
        damping: added to the curvature; above zero, of the unit of |a|^2 |b|^2.

    Raises:
        ValueError: lists of unlike length, shapes that do not fit, a damping that is not above zero.
        TypeError: a tensor is not float32.
    """
    if not len(gradients) == len(a) == len(b):
        raise ValueError(f"as many a and b as gradients are wanted, got {len(gradients)}, {len(a)} and {len(b)}")
    if not damping > 0:
        raise ValueError(f"damping must be above zero, got {damping}")
    for layer, (G, a_l, b_l) in enumerate(zip(gradients, a, b, strict=True)):
        _check(layer, G, a_l, b_l, gradients[0].device)
    if gradients:  # torch cannot tell which device an operator without a tensor is for
        _eva(list(gradients), list(a), list(b), damping)


def _check(layer: int, G: torch.Tensor, a: torch.Tensor, b: torch.Tensor, device: torch.device) -> None:
    if G.dim() != 2 or (b.shape, a.shape) != (G.shape[:1], G.shape[1:]):
        raise ValueError(
            f"layer {layer}: gradient (m, n), a (n,) and b (m,) are wanted, got {tuple(G.shape)}, {tuple(a.shape)} "
            f"and {tuple(b.shape)}"
        )
    for tensor in (G, a, b):
        if tensor.dtype != torch.float32:
            raise TypeError(f"layer {layer}: float32 is wanted, got {tensor.dtype}")
        if tensor.device != device or not tensor.is_contiguous():
            raise ValueError(f"layer {layer}: contiguous tensors on {device} are wanted, got {tensor.device}")
