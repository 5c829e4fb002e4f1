"""Where each parameter lies: in the flat gradient, and in which shard of the log.

A shard is a run of whole parameter tensors, so that per-tensor optimizers replay shard by shard, and it is cut by
bytes alone, never by rank or world size. Shard 0 is the step's own (scalars and buffers); parameter shards count
from 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Slot:
    """One trainable parameter: its name, shape and place in the flat gradient."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    group: int


@dataclass(frozen=True)
class ShardRange:
    """One parameter shard: slots `first:last`, elements `start:stop` of the flat gradient."""

    shard: int
    first: int
    last: int
    start: int
    stop: int


@dataclass(frozen=True)
class Layout:
    """The order of all trainable parameters and their cut into shards."""

    slots: tuple[Slot, ...]
    ranges: tuple[ShardRange, ...]

    @property
    def size(self) -> int:
        """Elements of the flat gradient."""
        return self.slots[-1].stop

    @property
    def shards(self) -> range:
        """All shard numbers, the step's own shard 0 included."""
        return range(len(self.ranges) + 1)

    def range_of(self, shard: int) -> ShardRange:
        """Return the range of parameter shard `shard` (1 or higher)."""
        return self.ranges[shard - 1]

    def slots_of(self, shard: int) -> tuple[Slot, ...]:
        """Return the slots of parameter shard `shard`."""
        part = self.range_of(shard)
        return self.slots[part.first : part.last]


def plan_layout(names: Sequence[str], tensors: Sequence[torch.Tensor], groups: Sequence[int], shards: int) -> Layout:
    """Lay `tensors` out one after the other and cut them into at most `shards` runs of nearly equal bytes."""
    slots: list[Slot] = []
    start = 0
    for name, tensor, group in zip(names, tensors, groups, strict=True):
        slots.append(Slot(name, tuple(tensor.shape), start, start + tensor.numel(), group))
        start += tensor.numel()
    count = min(shards, len(slots))
    cuts = [0]
    for part in range(1, count):  # the border nearest to an equal share, leaving a slot for every later shard
        ideal = start * part / count
        allowed = range(cuts[-1] + 1, len(slots) - (count - part) + 1)
        cuts.append(min(allowed, key=lambda slot: abs(slots[slot].start - ideal)))
    cuts.append(len(slots))
    ranges = tuple(
        ShardRange(shard, first, last, slots[first].start, slots[last - 1].stop)
        for shard, (first, last) in enumerate(zip(cuts, cuts[1:], strict=False), start=1)
    )
    return Layout(tuple(slots), ranges)


def layout_of(model: nn.Module, groups: Sequence[Sequence[str]], shards: int) -> Layout:
    """Return the layout of a model's trainable parameters, in the order of `model.named_parameters()`.

    Args:
        model: the model; tied parameters count once, under their first name.
        groups: the names of the parameters in each optimizer group.
        shards: the number of parameter shards wanted; never more than there are tensors.
    """
    group_of = {name: index for index, names in enumerate(groups) for name in names}
    named = [(name, p) for name, p in model.named_parameters() if name in group_of]
    return plan_layout([n for n, _ in named], [p for _, p in named], [group_of[n] for n, _ in named], shards)
