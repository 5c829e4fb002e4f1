"""A process group that is formed and re-formed inside living actors, and never waits without a bound.

No wait blocks in C++, but for connecting to peers that have all come: it polls, and leaves as soon as the fault handler
ends the group epoch. (So there are no point-to-point operations: gloo completes those only inside `wait`. Its
all-to-all is polled like any collective.) An operation that is still in flight then goes to a graveyard together with
its group and buffers: a stopped peer may wake and finish it, and a group's destructor may wait for its operations.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from everstep.core import clock
from everstep.core.errors import EpochOver, GroupBroken

TIMEOUT = timedelta(minutes=30)  # of the group itself; hangs are bounded by polling, long before
CONNECT = timedelta(seconds=30)
SPINS = 200  # polls without sleeping: a collective of a megabyte takes a millisecond or two
PAUSE_S = 0.0005
MEET_S = 0.002

_graveyard: list[Any] = []


def connect(address: tuple[str, int]) -> Any:
    """Connect to the rendezvous store that the fault handler hosts."""
    host, port = address
    return dist.TCPStore(host, port, None, False, timeout=CONNECT)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Begun:
    """A sum that goes on by itself, see `training.group.Pending`."""

    group: ProcessGroup
    work: Any
    tensor: torch.Tensor

    def done(self) -> bool:
        """Whether it has ended."""
        return bool(self.work.is_completed())

    def wait(self) -> None:
        """Wait for its end. Raises as any operation of a group."""
        self.group.end(self)


class ProcessGroup:
    """One formation of the group: gloo on CPU, NCCL on CUDA.

    Args:
        store: the rendezvous store; each group epoch has its own prefix in it.
        group_epoch: the number of this formation.
        world_rank: this worker's place, from 0.
        world_size: the number of workers.
        device: where the tensors live.
        over: set by the fault handler to end this group epoch.
    """

    def __init__(
        self, store: Any, group_epoch: int, world_rank: int, world_size: int,
        device: torch.device, over: threading.Event,
    ) -> None:  # fmt: skip
        self.world_rank, self.world_size = world_rank, world_size
        self.device = device
        self.entered = 0  # collectives begun: the worker that lags behind here is the one that hangs
        self.left = 0  # and those that came to their end
        self._begun: dict[int, tuple[Any, Any, torch.Tensor]] = {}  # and nobody waits for yet
        self._over = over
        prefix = dist.PrefixStore(  # type: ignore[attr-defined]
            f"group-epoch-{group_epoch}", store
        )
        try:
            self._meet(prefix)
            self._group: Any = self._make(prefix, world_rank, world_size)
        except RuntimeError as error:
            raise GroupBroken(f"forming group epoch {group_epoch} failed: {error}") from error

    def _meet(self, store: Any) -> None:
        """Wait until everybody has come: connecting waits in C++ for one who never does, and nothing ends that."""
        store.add("here", 1)
        while store.add("here", 0) < self.world_size:
            if self._over.is_set():
                raise EpochOver("the fault handler ended this group epoch")
            clock.sleep(MEET_S)

    def _make(self, store: Any, world_rank: int, world_size: int) -> Any:
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = TIMEOUT
            return dist.ProcessGroupNCCL(store, world_rank, world_size, options)
        return dist.ProcessGroupGloo(store, world_rank, world_size, TIMEOUT)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sum `tensor` over all workers, in place."""
        self._wait(lambda group: group.allreduce([tensor]), tensor)

    def begin_all_reduce(self, tensor: torch.Tensor) -> Begun:
        """Begin to sum `tensor` over all workers, in place."""
        if self._group is None:
            raise GroupBroken("this worker has left its group")
        try:
            work = self._group.allreduce([tensor])
        except RuntimeError as error:
            self.close()
            raise GroupBroken(f"a collective failed: {str(error).splitlines()[0]}") from error
        self._begun[id(work)] = (self._group, work, tensor)
        return Begun(self, work, tensor)

    def end(self, begun: Begun) -> None:
        """Wait for an operation that was begun. Raises as any."""
        self._wait(lambda _: begun.work, begun.tensor)
        self._begun.pop(id(begun.work), None)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return every worker's `tensor`, by world rank."""
        parts = [torch.empty_like(tensor) for _ in range(self.world_size)]
        self._wait(lambda group: group.allgather([parts], [tensor]), tensor, parts)
        return parts

    def all_to_all(self, tensor: torch.Tensor, outgoing: Sequence[int], incoming: Sequence[int]) -> torch.Tensor:
        """Return what every worker sent to this one, by world rank; see `training.group.Group`."""
        out, counts = tensor.new_empty(sum(incoming)), (list(incoming), list(outgoing))
        options = dist.AllToAllOptions()
        self._wait(lambda group: group.alltoall_base(out, tensor, *counts, options), tensor, out)
        return out

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor` on every worker with what world rank `source` has in it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = source, 0
        self._wait(lambda group: group.broadcast([tensor], options), tensor)

    def close(self) -> None:
        """Leave the group: its sockets close, so that peers waiting for us notice at once."""
        _graveyard.extend(begun for begun in self._begun.values() if not begun[1].is_completed())
        self._begun.clear()
        self._group = None

    def _wait(self, begin: Any, *buffers: Any) -> None:
        """Begin an operation and poll it to its end.

        Raises:
            EpochOver: the fault handler ended this group epoch meanwhile.
            GroupBroken: a peer is gone.
        """
        if self._group is None:
            raise GroupBroken("this worker has left its group")
        self.entered += 1
        try:
            work = begin(self._group)
            polls = 0
            while not work.is_completed():
                if self._over.is_set():
                    _graveyard.append((self._group, work, buffers))
                    self.close()
                    raise EpochOver("the fault handler ended this group epoch")
                polls += 1
                clock.sleep(0 if polls < SPINS else PAUSE_S)
            work.wait()
            self.left += 1
        except RuntimeError as error:
            self.close()
            raise GroupBroken(f"a collective failed: {str(error).splitlines()[0]}") from error
