"""The exchange: from every worker's own gradient to the delta that all of them hold, by residual policy.

One buffer travels: the gradient with the *tail* behind it (the loss, flags and counters, summed over workers), or the
tail and the message that a compressor makes of the gradient. So a step costs one collective, one more when buffers
changed (each is two, an all-to-all and an all-gather, where sums go along the tree), and the stretches of a gradient
that was reduced while backward ran (`training.overlap`).

    replicated  exchange dense, then compress: same bits everywhere, shrinks the log, not the network
    survivor    compress, then exchange: shrinks both; every worker has a residual of its own
    none        like survivor, without error feedback
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from everstep import kernels
from everstep.compressors import Codes, Compressed, Compressor, Reducer, finite
from everstep.training.delta import Delta, Ints
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
        indices: int32, (nnz,), ascending; None when dense.
        codes: what `values` was read from, where one quantised message is the whole delta.
        residual: this worker's next residual (n,), not yet committed; None without error feedback.
        tail: the summed tail.
        finite: whether every value is.
        network_bytes: sent by all workers together (ring algorithms; along the tree, what `tree_reduce` says).
    """

    values: torch.Tensor
    indices: torch.Tensor | None
    codes: Codes | None
    residual: torch.Tensor | None
    tail: torch.Tensor
    finite: bool
    network_bytes: int

    def delta(self, unused: frozenset[int], clip: float) -> Delta:
        """Return what the optimizer consumes, in the host's memory.

        Args:
            unused: positions of the parameters that got no gradient.
            clip: the factor on all values.
        """
        codes = self.codes and Codes(self.codes.codes.cpu(), self.codes.scales.cpu(), self.codes.bits)
        return Delta(self.values.cpu().numpy(), self.indices_numpy(), unused, codes, clip)

    def indices_numpy(self) -> Ints | None:
        """Return the indices as a NumPy array in the host's memory."""
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
        self, layout: Layout, tail: Tail, compressor: Compressor | Reducer | None, policy: str, window: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.layout, self.tail, self.compressor, self.policy = layout, tail, compressor, policy
        self.device = device
        self._window, self._count = window, 1 if compressor else window + 3
        self._turn = 0
        self.residual: torch.Tensor | None = None
        if compressor and policy != "none":
            self.residual = torch.zeros(layout.size, device=device)
        self._spare = None if self.residual is None else torch.empty_like(self.residual)
        self._pending: tuple[int, torch.Tensor] | None = None
        self.renew()

    def send_all(self) -> None:
        """Compress no more: what is left behind is forgotten."""
        self.compressor = self.residual = self._spare = self._pending = None
        self._count = self._window + 3
        self.renew()

    def renew(self) -> None:
        """Take new buffers: an operation of an ended group may still write into the old ones."""
        size = self.layout.size + self.tail.size
        self._buffers = [torch.zeros(size, device=self.device) for _ in range(self._count)]

    def next_buffer(self) -> torch.Tensor:
        """Return the buffer for the next step's gradient and tail, not read by anybody any more."""
        self._turn = (self._turn + 1) % self._count
        return self._buffers[self._turn]

    @property
    def dense(self) -> bool:
        """Whether the whole gradient is reduced, before or without compression."""
        return self.compressor is None or self.policy == "replicated"

    def stage(
        self, wire: torch.Tensor, group: Group, lsn: int, sums: Sums | None = None, *, reduced: bool = False
    ) -> Reduced:
        """Exchange `wire` (gradient, then tail; overwritten) for step `lsn` and return the result.

        Args:
            wire: (n + tail,), this worker's own; with `sums` only what its tail counts by worker is read.
            group: the process group.
            lsn: the step.
            sums: wires of this worker's micro-shards, (n + tail,) each, to be added along the tree (overwritten);
                None where the order of workers is order enough.
            reduced: the gradient is summed already, the tail is not.

        Raises:
            Interruption: the group broke; nothing has changed.
        """
        self._pending = None
        if self.dense:
            return self._dense(wire, group, lsn, sums, reduced)
        assert sums is None, self.policy  # refused in the settings: what a worker chooses depends on its share
        if isinstance(self.compressor, Reducer):
            return self._sketched(self.compressor, wire, group, lsn)
        assert self.compressor is not None  # else it were dense
        return self._own(self.compressor, wire, group, lsn)

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

    def _dense(self, wire: torch.Tensor, group: Group, lsn: int, sums: Sums | None, reduced: bool) -> Reduced:
        size = self.layout.size
        if sums is None:
            group.all_reduce(wire[size:] if reduced else wire)
            sent = 2 * (group.world_size - 1) * wire.numel() * 4
        else:
            sums.vectors[0][size:] += wire[size:]  # small integers: any place in the tree will do
            sent = tree_reduce(sums.vectors, sums.micro_shards, group, wire)
        gradient, tail = wire[:size], wire[size:].clone()
        if self.compressor is None:
            return Reduced(gradient, None, None, None, tail, finite(gradient), sent)
        assert isinstance(self.compressor, Compressor)  # else refused in the settings
        chosen, residual = self._compress(self.compressor, gradient, lsn)
        return Reduced(chosen.values, chosen.indices, chosen.codes, residual, tail, chosen.finite, sent)

    def _own(self, compressor: Compressor, wire: torch.Tensor, group: Group, lsn: int) -> Reduced:
        size, start = self.layout.size, 4 * self.tail.size
        gradient, tail = wire[:size], wire[size:]
        chosen, residual = self._compress(compressor, gradient, lsn)
        if not chosen.finite:  # told to everybody through the tail; what was chosen is thrown away
            tail[self.tail.broken] = 1
        elif residual is not None:  # a peer may finish this step with our part even if we do not
            self._pending = (lsn, residual)
        message = torch.cat([tail.view(torch.uint8), compressor.message(chosen, size)])
        parts = group.all_gather(message)
        sent = (group.world_size - 1) * group.world_size * message.numel()
        tail = torch.stack([part[:start].view(torch.float32) for part in parts]).sum(0)
        whole = _sum([compressor.read(part[start:], size, lsn) for part in parts], size)
        good = self._good(tail, whole, lsn)
        return Reduced(whole.values, whole.indices, whole.codes, residual, tail, good, sent)

    def _sketched(self, reducer: Reducer, wire: torch.Tensor, group: Group, lsn: int) -> Reduced:
        gradient, tail = wire[: self.layout.size], wire[self.layout.size :]
        accumulated = gradient if self.residual is None else torch.add(self.residual, gradient, out=self._spare)
        if not finite(accumulated):
            tail[self.tail.broken] = 1
            accumulated.zero_()
        sent = 0

        def all_reduce(tensor: torch.Tensor) -> None:
            nonlocal sent
            group.all_reduce(tensor)
            sent += 2 * (group.world_size - 1) * tensor.numel() * 4

        whole, mine = reducer.reduce(accumulated, lsn, all_reduce, first=group.world_rank == 0)
        residual = None if self.residual is None else accumulated.sub_(mine)
        if residual is not None:
            self._pending = (lsn, residual)
        all_reduce(tail)
        good = self._good(tail, whole, lsn)
        return Reduced(whole.values, None, None, residual, tail.clone(), good, sent)

    def _good(self, tail: torch.Tensor, whole: Compressed, lsn: int) -> bool:
        """Whether the step can be taken; else our residual stays as it is."""
        good = bool(tail[self.tail.broken] == 0) and finite(whole.values)
        if not good and self.residual is not None:
            self._pending = (lsn, self.residual)
        return good

    def _compress(
        self, compressor: Compressor, gradient: torch.Tensor, lsn: int
    ) -> tuple[Compressed, torch.Tensor | None]:
        if self.residual is None:
            return compressor.compress(gradient, lsn), None
        assert self._spare is not None
        return compressor.feed_back(self.residual, gradient, lsn, self._spare), self._spare


def _sum(parts: list[Compressed], size: int) -> Compressed:
    """Add what the workers sent, by world rank, so that the sums have the same bits everywhere."""
    if len(parts) == 1:
        return parts[0]
    indices = [part.indices for part in parts if part.indices is not None]
    if indices:
        places, values = kernels.merge(torch.stack(indices), torch.stack([part.values for part in parts]), size)
        return Compressed(values, places)
    total = parts[0].values
    for part in parts[1:]:
        total += part.values
    return Compressed(total)


def used_flags(tail: torch.Tensor, names: Tail) -> np.ndarray:
    """Return which parameters got a gradient from at least one micro-shard."""
    return (tail[names.used] > 0).cpu().numpy()
