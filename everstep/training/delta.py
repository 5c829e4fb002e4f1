"""The delta: what all workers hold after the exchange, and how it becomes gradients again.

It holds what came out of the exchange and the factor of clipping: a replica has nothing left to compute but one product
and the optimizer step itself. The same functions write it into gradients in a worker and in a replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from everstep import kernels
from everstep.compressors import Codes
from everstep.training.layout import Layout, ShardRange, Slot

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Delta:
    """What the optimizer consumed in one step, over all shards: `values` times `clip`, in fp32.

    Attributes:
        values: fp32, (n,) when dense, (nnz,) when sparse.
        indices: int32, (nnz,), ascending places in the flat gradient; None when dense.
        unused: positions (in layout order) of the parameters that got no gradient at all.
        codes: what `values` was read from, where it was quantised.
        clip: the factor that clipping by global norm puts on every value.
    """

    values: Floats
    indices: Ints | None
    unused: frozenset[int]
    codes: Codes | None = None
    clip: float = 1.0

    def part(self, shard: ShardRange) -> ShardDelta:
        """Return what belongs to one shard: views, with indices counted from the shard's start."""
        unused = tuple(sorted(slot - shard.first for slot in self.unused if shard.first <= slot < shard.last))
        low, high, local = shard.start, shard.stop, None
        if self.indices is not None:
            low, high = (int(at) for at in np.searchsorted(self.indices, [shard.start, shard.stop]))
            local = self.indices[low:high] - np.int32(shard.start)
        coded = None if self.codes is None else Coded.cut(self.codes, low, high)
        return ShardDelta(self.values[low:high], local, unused, coded, self.clip)


@dataclass(frozen=True)
class Coded:
    """Consecutive quantised values: whole blocks, of which the first `skip` values are somebody else's.

    Attributes:
        codes: as the log has them (`kernels.quantise`), bytes.
        scales: fp32, one a block.
        bits: of one code.
        skip: values before the first that counts.
    """

    codes: bytes
    scales: Floats
    bits: int
    skip: int

    @classmethod
    def cut(cls, codes: Codes, low: int, high: int) -> Coded:
        """Return the values `low` to `high` (not included) of `codes`."""
        block = kernels.BLOCK[codes.bits]
        first = low // block
        start, stop = first * block * codes.bits // 8, -(-high * codes.bits // 8)
        raw = codes.codes[start:stop].numpy().tobytes()
        return cls(raw, codes.scales[first : -(-high // block)].numpy(), codes.bits, low - first * block)

    def values(self, size: int) -> Floats:
        """Return the `size` values (fp32) that count."""
        dtype = torch.int8 if self.bits == 8 else torch.uint8
        codes = torch.frombuffer(bytearray(self.codes), dtype=dtype) if self.codes else torch.empty(0, dtype=dtype)
        read = kernels.dequantise(codes, torch.from_numpy(self.scales.copy()), self.skip + size, self.bits)
        values: Floats = read.numpy()[self.skip :]
        return values


@dataclass(frozen=True)
class ShardDelta:
    """One shard's part of a delta; `indices` (int32) and `unused` count from the shard's first element and slot."""

    values: Floats
    indices: Ints | None
    unused: tuple[int, ...]
    coded: Coded | None = None
    clip: float = 1.0

    def consumed(self) -> ShardDelta:
        """Return it with the factor on its values, as the optimizer consumed them."""
        if self.clip == 1:
            return self
        return ShardDelta(self.values * np.float32(self.clip), self.indices, self.unused)


def write_gradient(flat: torch.Tensor, values: torch.Tensor, indices: torch.Tensor | None) -> None:
    """Write a delta into a flat fp32 gradient (n,); zero where a sparse delta names nothing."""
    if indices is not None:
        flat.zero_()
        flat.index_copy_(0, indices.long(), values)
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
