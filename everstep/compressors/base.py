"""What a compressor is: what it sends of an accumulated gradient, as a message, and what it leaves behind.

Error feedback is the same for all: accumulated = residual + gradient; what is sent plus the new residual is the
accumulated gradient again, exactly (Stich, Cordonnier and Jaggi, "Sparsified SGD with Memory", NeurIPS 2018,
algorithm 1; Karimireddy et al., "Error Feedback Fixes SignSGD", ICML 2019).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from everstep import kernels
from everstep.core.registry import Registry

ROUNDING = 1e-6  # 0.29 * 100 is 28.999999999999996


@dataclass(frozen=True)
class Spec:
    """What a compressor is built from: the settings of the job and what it is for.

    Attributes:
        density: the share of elements that a sparse one keeps, in (0, 1].
        seed: of the run; a random one draws by (seed, step), so that every worker draws the same.
        feedback: whether what is left behind comes back in the next step.
        rank: of the matrices that a low-rank one sends, at least 1.
        shapes: of the parameters, one after the other in the flat gradient.
    """

    density: float = 0.01
    seed: int = 0
    feedback: bool = True
    rank: int = 2
    shapes: tuple[tuple[int, ...], ...] = ()

    def kept(self, size: int) -> int:
        """Return k, how many of `size` elements a sparse compressor keeps: at least one."""
        return max(1, int(size * self.density + ROUNDING)) if size else 0


@dataclass(frozen=True)
class Codes:
    """What `kernels.quantise` made of some values: `codes` and `scales`, `bits` wide."""

    codes: torch.Tensor
    scales: torch.Tensor
    bits: int

    def values(self, size: int) -> torch.Tensor:
        """Return the `size` values (fp32) that they stand for."""
        values: torch.Tensor = kernels.dequantise(self.codes, self.scales, size, self.bits)
        return values


@dataclass(frozen=True)
class Compressed:
    """What is sent of an accumulated gradient.

    Attributes:
        values: fp32, (k,), as the receivers will have them; (n,) when everything is sent.
        indices: int32, (k,), ascending places of the values; None when everything is sent.
        codes: what `values` was read from, where it was quantised.
        finite: whether every element of the accumulated gradient was; else the step has to be left out.
    """

    values: torch.Tensor
    indices: torch.Tensor | None = None
    codes: Codes | None = None
    finite: bool = True


class Compressor(ABC):
    """Chooses what to send. The same bits in give the same bits out, and messages of the same size."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @abstractmethod
    def compress(self, accumulated: torch.Tensor, lsn: int) -> Compressed:
        """Return what is sent of `accumulated` (fp32, (n,), not written to) in step `lsn`."""

    def feed_back(self, residual: torch.Tensor, gradient: torch.Tensor, lsn: int, out: torch.Tensor) -> Compressed:
        """Return what is sent of `residual` + `gradient`, and leave the rest in `out` (all fp32, (n,))."""
        sent = self.compress(torch.add(residual, gradient, out=out), lsn)
        if sent.indices is None:
            out -= sent.values
        else:
            out[sent.indices] -= sent.values
        return sent

    def message(self, sent: Compressed, size: int) -> torch.Tensor:
        """Return what travels between workers for `size` elements: uint8, as long for any values."""
        parts = [sent.values] if sent.codes is None else [sent.codes.scales, sent.codes.codes]
        return torch.cat([part.view(torch.uint8) for part in parts])

    @abstractmethod
    def read(self, message: torch.Tensor, size: int, lsn: int) -> Compressed:
        """Return what `message` made of an accumulated gradient of `size` elements in step `lsn`."""


class Reducer(ABC):
    """Sums over workers by itself, by collectives on something smaller than the gradient."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec

    @abstractmethod
    def reduce(
        self, accumulated: torch.Tensor, lsn: int, all_reduce: Callable[[torch.Tensor], None], *, first: bool
    ) -> tuple[Compressed, torch.Tensor]:
        """Return what all workers get of the sum of their accumulated gradients, and this worker's part in it.

        Args:
            accumulated: this worker's, fp32, (n,), not written to.
            lsn: the step.
            all_reduce: sums a tensor over all workers, in place.
            first: whether this is world rank 0.

        Returns:
            The reduced gradient with the same bits on each worker, and (fp32, (n,)) what of `accumulated` went into it:
            the rest is the residual.
        """


COMPRESSORS: Registry[Callable[[Spec], Compressor | Reducer]] = Registry("compressor")


def build_compressor(method: str, spec: Spec) -> Compressor | Reducer | None:
    """Return the compressor called `method`, a registered name or `package.module:Thing`; None for "none"."""
    return None if method == "none" else COMPRESSORS.get(method)(spec)


def finite(values: torch.Tensor) -> bool:
    """Return whether every element is finite."""
    if bool(torch.isfinite(values.sum())):
        return True
    return bool(torch.isfinite(values).all())  # the sum may overflow where no element does
