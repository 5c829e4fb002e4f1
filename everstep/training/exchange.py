"""The exchange: from every worker's own gradient to the delta that all of them hold, by residual policy.

One buffer travels: the gradient (dense) or the chosen elements (sparse), and behind it the *tail*: the loss, flags and
counters, summed over workers. So a step costs one collective, and one more only when buffers changed (each is two,
an all-to-all and an all-gather, where sums go along the tree).

    replicated  exchange dense, then compress: same bits everywhere, shrinks the log, not the network
    survivor    compress, then exchange: shrinks both; every worker has a residual of its own
    none        like survivor, without error feedback
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from everstep.compressors import Compressor, Sparse
from everstep.training.delta import Ints
from everstep.training.group import Group
from everstep.training.layout import Layout
from everstep.training.tree import Sums, tree_reduce


class Tail:
    """Names the elements that ride behind the gradient (fp32, small integers and the loss).

    Args:
        slots: number of parameters; one "got a gradient" flag each.
        buffers: number of buffers; one "changed" flag each.
        shards: number of shards; the lag of each shard's acknowledged lsn, from its owner.
    """

    def __init__(self, slots: int, buffers: int, shards: int) -> None:
        self.used = slice(0, slots)
        self.changed = slice(slots, slots + buffers)
        self.lag = slice(slots + buffers, slots + buffers + shards)
        self.loss = self.lag.stop
        self.broken = self.loss + 1  # how many workers had a non-finite gradient
        self.stop = self.broken + 1  # how many workers were asked to stop after this step
        self.size = self.stop + 1


@dataclass(frozen=True)
class Reduced:
    """What came out of an exchange, the same on every worker.

    Attributes:
        values: fp32, (n,) dense or (nnz,) sparse.
        indices: int64, (nnz,), ascending; None when dense.
        residual: this worker's next residual (n,), not yet committed; None without error feedback.
        tail: the summed tail.
        finite: whether every value is.
        network_bytes: sent by all workers together (ring algorithms; along the tree, what `tree_reduce` says).
    """

    values: torch.Tensor
    indices: torch.Tensor | None
    residual: torch.Tensor | None
    tail: torch.Tensor
    finite: bool
    network_bytes: int

    def indices_numpy(self) -> Ints | None:
        """Return the indices as a NumPy array on the host."""
        return None if self.indices is None else self.indices.cpu().numpy()


class Exchange:
    """Reduces gradients and keeps the residual; `stage` changes nothing until `commit`.

    Args:
        layout: the places in the flat gradient.
        tail: the elements behind it.
        compressor: what to send; None for everything.
        policy: "replicated", "survivor" or "none".
        window: how many finished steps may still be read by a sender; a dense delta lives in one of these buffers.
        device: where gradients live.
    """

    def __init__(
        self, layout: Layout, tail: Tail, compressor: Compressor | None, policy: str, window: int, device: torch.device
    ) -> None:
        self.layout, self.tail, self.compressor, self.policy = layout, tail, compressor, policy
        self.device = device
        self._count = 1 if compressor else window + 3
        self._turn = 0
        self.residual: torch.Tensor | None = None
        if compressor and policy != "none":
            self.residual = torch.zeros(layout.size, device=device)
        self._spare = None if self.residual is None else torch.empty_like(self.residual)
        self._pending: tuple[int, torch.Tensor] | None = None
        self.renew()

    def renew(self) -> None:
        """Take new buffers: an operation of an ended group may still write into the old ones."""
        size = self.layout.size + self.tail.size
        self._buffers = [torch.zeros(size, device=self.device) for _ in range(self._count)]

    def next_buffer(self) -> torch.Tensor:
        """Return the buffer for the next step's gradient and tail, not read by anybody any more."""
        self._turn = (self._turn + 1) % self._count
        return self._buffers[self._turn]

    def stage(self, wire: torch.Tensor, group: Group, lsn: int, sums: Sums | None = None) -> Reduced:
        """Exchange `wire` (gradient, then tail; overwritten) for step `lsn` and return the result.

        Args:
            wire: (n + tail,), this worker's own; with `sums` only what its tail counts by worker is read.
            group: the process group.
            lsn: the step.
            sums: wires of this worker's micro-shards, (n + tail,) each, to be added along the tree (overwritten);
                None where the order of workers is order enough.

        Raises:
            Interruption: the group broke; nothing has changed.
        """
        self._pending = None
        if self.compressor is None or self.policy == "replicated":
            return self._dense(wire, group, sums)
        assert sums is None, self.policy  # refused in the settings: what a worker chooses depends on its share
        return self._sparse(wire, group, lsn)

    def commit(self, reduced: Reduced) -> None:
        """Make a staged residual the residual."""
        if reduced.residual is not None:
            self.residual, self._spare = reduced.residual, self.residual
        self._pending = None

    def preload(self, lsn: int, residual: torch.Tensor) -> None:
        """Hold a residual of our own, from a snapshot at `lsn`, until `adopt` is called with that step's state."""
        self._pending = (lsn, residual.to(self.device))

    def adopt(self, lsn: int, residual: torch.Tensor | None, *, skipped: bool = False) -> None:
        """Take the residual that belongs to a state received from elsewhere, at step `lsn`.

        Replicated: the giver's. Survivor: our own staged one if the giver finished the step that we had contributed to
        (the one before, if that step was `skipped`), else zero, since a residual of our own cannot be rebuilt.
        """
        if self.residual is None:
            return
        if skipped and self._pending is not None and self._pending[0] == lsn:
            self._pending = None
            return
        if residual is not None:
            self.residual.copy_(residual)
        elif self._pending is not None and self._pending[0] == lsn:
            if self._pending[1] is not self.residual:
                self.residual, self._spare = self._pending[1], self.residual
        else:
            self.residual.zero_()
        self._pending = None

    def _dense(self, wire: torch.Tensor, group: Group, sums: Sums | None) -> Reduced:
        size = self.layout.size
        if sums is None:
            group.all_reduce(wire)
            sent = 2 * (group.world_size - 1) * wire.numel() * 4
        else:
            sums.vectors[0][size:] += wire[size:]  # small integers: any place in the tree will do
            sent = tree_reduce(sums.vectors, sums.micro_shards, group, wire)
        gradient, tail = wire[:size], wire[size:].clone()
        finite = _finite(gradient)
        if self.compressor is None or not finite:
            return Reduced(gradient, None, None, tail, finite, sent)
        chosen, residual = self._compress(self.compressor, gradient)
        return Reduced(chosen.values, chosen.indices, residual, tail, _finite(chosen.values), sent)

    def _sparse(self, wire: torch.Tensor, group: Group, lsn: int) -> Reduced:
        assert self.compressor is not None
        size = self.layout.size
        gradient, tail = wire[:size], wire[size:]
        if not _finite(gradient):  # told to everybody through the tail; what is chosen is thrown away
            tail[self.tail.broken] = 1
            gradient.zero_()
        chosen, residual = self._compress(self.compressor, gradient)
        if residual is not None:  # a peer may finish this step with our part even if we do not
            self._pending = (lsn, residual)
        message = torch.cat([tail, chosen.values, chosen.indices.to(torch.int32).view(torch.float32)])
        parts = group.all_gather(message)
        sent = (group.world_size - 1) * group.world_size * message.numel() * 4
        count, start = chosen.values.numel(), self.tail.size
        tail = torch.stack([part[:start] for part in parts]).sum(0)
        gradient.zero_()
        named = torch.zeros(size, dtype=torch.bool, device=self.device)
        for part in parts:  # by world rank, so the sums have the same bits everywhere
            indices = part[start + count :].contiguous().view(torch.int32).long()
            gradient[indices] += part[start : start + count]
            named[indices] = True
        indices = torch.nonzero(named).view(-1)
        values = gradient[indices]
        finite = bool(tail[self.tail.broken] == 0) and _finite(values)
        if not finite and self.residual is not None:  # the step will be left out; our residual stays as it is
            self._pending = (lsn, self.residual)
        return Reduced(values, indices, residual, tail, finite, sent)

    def _compress(self, compressor: Compressor, gradient: torch.Tensor) -> tuple[Sparse, torch.Tensor | None]:
        if self.residual is None:
            return compressor(gradient), None
        assert self._spare is not None
        accumulated = torch.add(self.residual, gradient, out=self._spare)
        chosen = compressor(accumulated)
        accumulated[chosen.indices] = 0
        return chosen, accumulated


def _finite(gradient: torch.Tensor) -> bool:
    if bool(torch.isfinite(gradient.sum())):
        return True
    return bool(torch.isfinite(gradient).all())  # the sum may overflow where no element does


def used_flags(tail: torch.Tensor, names: Tail) -> np.ndarray:
    """Return which parameters got a gradient from at least one micro-shard."""
    return (tail[names.used] > 0).cpu().numpy()
