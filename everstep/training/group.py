"""What a train step needs of a process group; `actors` holds the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch


class Pending(Protocol):
    """An operation that goes on by itself."""

    def done(self) -> bool:
        """Whether it has ended; never waits."""
        ...

    def wait(self) -> None:
        """Wait for its end. May raise an `Interruption`."""
        ...


class Group(Protocol):
    """A formed process group. Every wait is bounded and may raise an `Interruption`."""

    world_rank: int
    world_size: int

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all workers, in place, with the same bits on each."""
        ...

    def begin_all_reduce(self, tensor: torch.Tensor) -> Pending:
        """Begin to sum `tensor` as `all_reduce` does; every worker begins the same sums in the same order."""
        ...

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every worker's `tensor` (equal shapes), by world rank."""
        ...

    def all_to_all(self, tensor: torch.Tensor, outgoing: Sequence[int], incoming: Sequence[int]) -> torch.Tensor:
        """Send each worker its part of `tensor` and return what the others sent, one after the other by world rank.

        Args:
            tensor: (sum of outgoing,).
            outgoing: elements for each world rank, in this order in `tensor`.
            incoming: elements from each world rank.
        """
        ...
