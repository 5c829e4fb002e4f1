"""One step as a transaction: gradients, exchange, stage, then commit everything together.

Until the commit nothing that belongs to the state has changed: buffers are put back after every micro-shard, the
residual is written into a second buffer, the optimizer has not run. So a step may be aborted anywhere before, and the
state keeps the bits of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from everstep.core import clock
from everstep.core.errors import RunFailed
from everstep.training.blueprint import Blueprint
from everstep.training.buffers import Buffers, TreeBuffers
from everstep.training.data import batches_upto, to_device
from everstep.training.delta import Delta, gradient_views, untouched, write_gradient
from everstep.training.exchange import Exchange, Reduced, Tail, used_flags
from everstep.training.group import Group
from everstep.training.optimizer import advance_scheduler, hyper_parameters, spares_gradients
from everstep.training.overlap import Stretches
from everstep.training.record import StepResult
from everstep.training.seeding import seed_all, step_seed
from everstep.training.state import TrainState, combine_digests, tensor_digest
from everstep.training.tree import Sums

POINTS = ("before_exchange", "after_exchange", "before_commit", "after_commit", "after_send")


def autocast(kind: str | None, device: torch.device) -> AbstractContextManager[Any]:
    """Return the context to compute losses in: "bf16", or None for the model's own precision."""
    return nullcontext() if kind is None else torch.autocast(device.type, dtype=torch.bfloat16)


@dataclass(frozen=True)
class Staged:
    """A step that is computed and not yet taken."""

    reduced: Reduced
    delta: Delta | None
    grad_norm: float
    clip: float
    buffers: Mapping[str, torch.Tensor]


class TrainStep:
    """Takes steps on the live state of one worker.

    Args:
        blueprint: the built recipe.
        state: the live state; its parameters are those of `blueprint.model`.
        exchange: reduces gradients and holds the residual.
        tail: names of what rides along.
        at: called at each of `POINTS` with (point, lsn); may raise or never return (fault injection).
    """

    def __init__(
        self, blueprint: Blueprint, state: TrainState, exchange: Exchange, tail: Tail, at: Callable[[str, int], None]
    ) -> None:
        self.blueprint, self.state, self.exchange, self.tail, self.at = blueprint, state, exchange, tail, at
        self.recipe = blueprint.recipe
        bitwise, count = self.recipe.determinism == "bitwise", self.recipe.micro_shards
        self.sums = Sums(count) if bitwise else None  # of gradient and tail, along the tree
        self.buffers = (TreeBuffers if bitwise else Buffers)(blueprint.model, state.fixed, count)
        self.stretches: Stretches | None = None  # reduces them while backward runs
        if self.recipe.overlap and not bitwise and exchange.dense:
            self.stretches = Stretches(exchange.layout.slots, state.params)
        self.exposed_s = 0.0  # of the last step: reducing that backward did not hide
        self.beats = 0  # micro-shards computed, evaluation included: a sign of life where no step ends for long
        self.torn = False  # a commit failed half-way: this state may not be used any more
        self.network_bytes = 0  # of the last step, by all workers together
        self.align_schedule()

    def beat(self) -> None:
        """Count one more sign of life."""
        self.beats += 1

    def align_schedule(self) -> None:
        """Bring the schedule to the state's lsn: it is a function of the steps taken, so nothing of it is stored."""
        assert self.state.optimizer is not None
        self.scheduler = self.blueprint.schedule(self.state.optimizer, self.state.lsn)

    def run(
        self,
        batches: Sequence[Any],
        mine: Sequence[int],
        group: Group,
        group_epoch: int,
        *,
        lags: Mapping[int, int],
        stop: bool,
        owned: Sequence[int],
    ) -> tuple[StepResult, torch.Tensor]:
        """Take the next step and return what it leaves for the log, and the summed tail.

        Args:
            batches: one batch for each micro-shard of this worker.
            mine: the numbers of these micro-shards.
            group: the process group.
            group_epoch: its formation, stamped on the record.
            lags: for each owned shard, how many finished steps its checkpoint actor has not acknowledged.
            stop: ask everybody to stop after this step.
            owned: shards whose digest this worker computes.

        Raises:
            Interruption: the group broke; the state has the bits of the step before.
            RunFailed: the gradient is not finite and `on_nonfinite` is "stop".
        """
        started = clock.monotonic()
        lsn = self.state.lsn + 1
        wire = self.exchange.next_buffer()
        overlapped = self._gradients(wire, batches, mine, lsn, group)
        tail = wire[self.exchange.layout.size :]
        for shard, lag in lags.items():
            tail[self.tail.lag.start + shard] = lag
        tail[self.tail.stop] = float(stop)
        self.at("before_exchange", lsn)
        waiting = clock.monotonic()
        if overlapped is not None:
            overlapped.finish()
        reduced = self.exchange.stage(wire, group, lsn, self.sums, reduced=overlapped is not None)
        self.exposed_s = clock.monotonic() - waiting
        self.at("after_exchange", lsn)
        staged = self._stage(reduced, group, lsn)
        self.at("before_commit", lsn)
        hyper = self._commit(staged, wire)
        result = StepResult(
            lsn, group_epoch, staged.delta, self._scalars(staged, group, hyper, started), hyper,
            staged.buffers, self._digests(lsn, owned),
        )  # fmt: skip
        self.at("after_commit", lsn)
        return result, reduced.tail

    def _gradients(
        self, wire: torch.Tensor, batches: Sequence[Any], mine: Sequence[int], lsn: int, group: Group
    ) -> Stretches | None:
        """Sum the gradients of my micro-shards, in the wire or along the tree; note how they changed the buffers.

        Returns:
            What is being reduced already, and has to be finished; None if nothing is.
        """
        overlapped = self.stretches if self.stretches and self.stretches.worth_it and group.world_size > 1 else None
        model, task, recipe = self.blueprint.model, self.blueprint.task, self.recipe
        size = self.exchange.layout.size
        wire[size:].zero_()
        if self.sums is not None:
            self.sums.clear()
        if self.stretches is not None:
            self.stretches.end()  # of a step that was aborted
        self.buffers.begin()
        model.train()
        model.zero_grad(set_to_none=True)
        loss_sum = 0.0
        try:
            for micro_shard, batch in zip(mine, batches, strict=True):
                seed_all(step_seed(recipe.seed, lsn, micro_shard))
                with autocast(recipe.autocast, self.exchange.device):
                    loss = task.loss(model, to_device(batch, self.exchange.device)) / recipe.micro_shards
                if overlapped is not None and micro_shard == mine[-1]:
                    overlapped.begin(wire, group)
                loss.backward()  # type: ignore[no-untyped-call]
                if self.sums is None:
                    loss_sum += float(loss.detach())
                else:
                    self._add_leaf(self.sums, micro_shard, float(loss.detach()))
                self.buffers.collect(micro_shard)
                self.beat()
        finally:
            self.buffers.put_back()
        tail = wire[size:]
        if self.sums is None:
            if overlapped is None:
                self._flatten(wire)
            tail[self.tail.loss] = loss_sum
        tail[self.tail.changed] = torch.tensor(self.buffers.flags(), device=tail.device)
        return overlapped

    def _add_leaf(self, sums: Sums, micro_shard: int, loss: float) -> None:
        """Add one micro-shard's gradient, flags and loss to the sums along the tree."""
        size = self.exchange.layout.size
        leaf = sums.spare(size + self.tail.size, self.exchange.device)
        leaf[size:].zero_()
        self._flatten(leaf)
        leaf[size + self.tail.loss] = loss
        sums.add((micro_shard, micro_shard + 1), leaf)

    @torch.no_grad()
    def _flatten(self, wire: torch.Tensor) -> None:
        """Copy every parameter's gradient to its place and drop it; flag those that have one."""
        size = self.exchange.layout.size
        for at, slot in enumerate(self.exchange.layout.slots):
            param = self.state.params[slot.name]
            if param.grad is None:
                wire[slot.start : slot.stop].zero_()
            else:
                wire[slot.start : slot.stop].copy_(param.grad.reshape(-1))
                wire[size + at] = 1
                param.grad = None

    @torch.no_grad()
    def _stage(self, reduced: Reduced, group: Group, lsn: int) -> Staged:
        self.network_bytes = reduced.network_bytes
        loss = float(reduced.tail[self.tail.loss])
        if not (reduced.finite and loss - loss == 0):
            if self.recipe.on_nonfinite == "stop":
                raise RunFailed(
                    f"step {lsn}: the {'loss' if reduced.finite else 'gradient'} is not finite (loss {loss})",
                    hint="`everstep resume RUN@STEP --skip-batches N` goes back to before a spike and leaves N batches "
                    'out; or run.on_nonfinite = "skip" leaves such steps out; or lower optimizer.lr',
                )
            return Staged(reduced, None, float("nan"), 1.0, {})
        buffers = self._exchange_buffers(reduced.tail, group)
        norm = float(torch.linalg.vector_norm(reduced.values))
        clip = 1.0
        if self.recipe.clip_norm is not None and norm > self.recipe.clip_norm:
            clip = self.recipe.clip_norm / (norm + 1e-6)
        used = used_flags(reduced.tail, self.tail)
        unused = untouched(self.exchange.layout, used, reduced.indices_numpy())
        return Staged(reduced, reduced.delta(unused, clip), norm, clip, buffers)

    def _exchange_buffers(self, tail: torch.Tensor, group: Group) -> dict[str, torch.Tensor]:
        """Reduce the buffers that changed on any worker, and return their new values."""
        wire, sent = self.buffers.reduce(tail[self.tail.changed], group)
        if wire is None:
            return {}
        self.network_bytes += sent
        self.at("after_exchange", self.state.lsn + 1)
        return self.buffers.values(wire)

    def _commit(self, staged: Staged, wire: torch.Tensor) -> list[dict[str, Any]]:
        """Take the step; from here on it is finished."""
        assert self.state.optimizer is not None
        hyper = hyper_parameters(self.state.optimizer)
        self.torn = True
        if staged.delta is not None:
            flat = self._consumed(staged, wire[: self.exchange.layout.size])
            self.state.apply(gradient_views(flat, self.exchange.layout.slots, staged.delta.unused))
            self.state.set_fixed(staged.buffers)
            self.exchange.commit(staged.reduced)
        self.state.lsn += 1
        self.torn = False
        advance_scheduler(self.scheduler)
        return hyper

    def _consumed(self, staged: Staged, flat: torch.Tensor) -> torch.Tensor:
        """Return the gradient that the optimizer consumes; the delta, which is still to be logged, stays as it is."""
        assert self.state.optimizer is not None
        reduced = staged.reduced
        values = reduced.values if staged.clip == 1 else reduced.values * staged.clip
        if reduced.indices is not None:
            write_gradient(flat, values, reduced.indices)
            return flat
        return values if staged.clip != 1 or spares_gradients(self.state.optimizer) else values.clone()

    def _scalars(
        self, staged: Staged, group: Group, hyper: Sequence[Mapping[str, Any]], started: float
    ) -> dict[str, float | int]:
        samples = batches_upto(self.state.lsn, self.recipe.skips) * self.recipe.global_size
        return {
            "loss": float(staged.reduced.tail[self.tail.loss]),
            "grad_norm": staged.grad_norm,
            "clip": staged.clip,
            "lr": float(hyper[0].get("lr", 0.0)),
            "samples": samples,
            "data_epoch": (samples - 1) // self.samples_per_epoch,
            "world_size": group.world_size,
            "seconds": clock.monotonic() - started,
        }

    samples_per_epoch = 1  # set by the worker once its data set is built

    def _digests(self, lsn: int, owned: Sequence[int]) -> dict[int, str]:
        """Return the digest of each owned shard's state, on the steps that log one."""
        every = self.recipe.digest_every
        if not owned or not every or lsn % every:
            return {}
        tensors = self.state.tensors()
        out = {}
        for shard in owned:
            names = {slot.name for slot in self.exchange.layout.slots_of(shard)} if shard else set()
            part = {n: t for n, t in tensors.items() if _belongs(n, names, shard, self.state.fixed)}
            out[shard] = combine_digests({n: tensor_digest(t) for n, t in part.items()})
        return out


def _belongs(full: str, names: set[str], shard: int, fixed: Mapping[str, torch.Tensor]) -> bool:
    if shard == 0:
        return full in fixed
    if full.startswith("optimizer/"):
        return full.removeprefix("optimizer/").rpartition("/")[0] in names
    return full.removeprefix("param/") in names
