"""The delta: what all workers hold after the exchange, and how it becomes gradients again.

It holds what the optimizer consumed (after reduction, compression and clipping), so that a replica has nothing left to
compute but the optimizer step itself. The same functions write it into gradients in a worker and in a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from everstep.training.layout import Layout, ShardRange, Slot

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Delta:
    """What the optimizer consumed in one step, over all shards.

    Attributes:
        values: fp32, (n,) when dense, (nnz,) when sparse.
        indices: int64, (nnz,), ascending places in the flat gradient; None when dense.
        unused: positions (in layout order) of the parameters that got no gradient at all.
    """

    values: Floats
    indices: Ints | None
    unused: frozenset[int]

    def part(self, shard: ShardRange) -> ShardDelta:
        """Return what belongs to one shard: views, with indices counted from the shard's start."""
        unused = tuple(sorted(slot - shard.first for slot in self.unused if shard.first <= slot < shard.last))
        if self.indices is None:
            return ShardDelta(self.values[shard.start : shard.stop], None, unused)
        low, high = np.searchsorted(self.indices, [shard.start, shard.stop])
        local = (self.indices[low:high] - shard.start).astype(np.int32)
        return ShardDelta(self.values[low:high], local, unused)


@dataclass(frozen=True)
class ShardDelta:
    """One shard's part of a delta; `indices` (int32) and `unused` count from the shard's first element and slot."""

    values: Floats
    indices: npt.NDArray[np.int32] | None
    unused: tuple[int, ...]


def write_gradient(flat: torch.Tensor, values: torch.Tensor, indices: torch.Tensor | None) -> None:
    """Write a delta into a flat fp32 gradient (n,); zero where a sparse delta names nothing."""
    if indices is not None:
        flat.zero_()
        flat[indices] = values
    elif flat.data_ptr() != values.data_ptr():
        flat.copy_(values)


def gradient_views(
    flat: torch.Tensor, slots: Sequence[Slot], unused: frozenset[int] | set[int]
) -> dict[str, torch.Tensor | None]:
    """Cut a flat gradient into the parameters' own shapes; None where a parameter got no gradient.

    Args:
        flat: fp32, starting at the first slot's first element.
        slots: consecutive slots.
        unused: positions within `slots`.
    """
    base = slots[0].start
    return {
        slot.name: None if at in unused else flat[slot.start - base : slot.stop - base].view(slot.shape)
        for at, slot in enumerate(slots)
    }


def untouched(layout: Layout, used: npt.NDArray[np.bool_], indices: Ints | None) -> frozenset[int]:
    """Return the slots that get no gradient: unused by every micro-shard, and not named by a sparse delta."""
    idle = ~used
    if indices is not None and idle.any():
        borders = np.fromiter((slot.start for slot in layout.slots), np.int64, len(layout.slots))
        counts = np.diff(np.searchsorted(indices, np.append(borders, layout.size)))
        idle &= counts == 0
    return frozenset(int(slot) for slot in np.flatnonzero(idle))
