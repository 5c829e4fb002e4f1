"""One step as a transaction: gradients, exchange, stage, then commit everything together.

Until the commit nothing that belongs to the state has changed: buffers are put back after every micro-shard, the
residual is written into a second buffer, the optimizer has not run. So a step may be aborted anywhere before, and the
state keeps the bits of the step before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from everstep.core import clock
from everstep.core.errors import RunFailed
from everstep.training.blueprint import Blueprint
from everstep.training.delta import Delta, gradient_views, untouched, write_gradient
from everstep.training.exchange import Exchange, Reduced, Tail, used_flags
from everstep.training.group import Group
from everstep.training.optimizer import advance_scheduler, build_scheduler, hyper_parameters
from everstep.training.record import StepResult
from everstep.training.seeding import seed_all, step_seed
from everstep.training.state import TrainState, combine_digests, tensor_bytes, tensor_digest

POINTS = ("before_exchange", "after_exchange", "before_commit", "after_commit", "after_send")


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
        self.buffers = {n: t for n, t in state.fixed.items() if n.startswith("buffer/")}
        self.torn = False  # a commit failed half-way: this state may not be used any more
        self.network_bytes = 0  # of the last step, by all workers together
        self.align_schedule()

    def align_schedule(self) -> None:
        """Bring the schedule to the state's lsn: it is a function of the steps taken, so nothing of it is stored."""
        assert self.state.optimizer is not None
        for group in self.state.optimizer.param_groups:
            group.pop("initial_lr", None)
        fresh = self.blueprint.live_state().optimizer
        assert fresh is not None
        for group, new in zip(self.state.optimizer.param_groups, fresh.param_groups, strict=True):
            group.update({key: value for key, value in new.items() if key != "params"})
        self.scheduler = build_scheduler(self.recipe.scheduler, self.recipe.scheduler_options, self.state.optimizer)
        for _ in range(self.state.lsn):
            advance_scheduler(self.scheduler)

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
        changes = self._gradients(wire, batches, mine, lsn)
        tail = wire[self.exchange.layout.size :]
        for shard, lag in lags.items():
            tail[self.tail.lag.start + shard] = lag
        tail[self.tail.stop] = float(stop)
        self.at("before_exchange", lsn)
        reduced = self.exchange.stage(wire, group, lsn)
        self.at("after_exchange", lsn)
        staged = self._stage(reduced, wire, changes, group, lsn)
        self.at("before_commit", lsn)
        hyper = self._commit(staged, wire)
        result = StepResult(
            lsn, group_epoch, staged.delta, self._scalars(staged, group, hyper, started), hyper,
            staged.buffers, self._digests(lsn, owned),
        )  # fmt: skip
        self.at("after_commit", lsn)
        return result, reduced.tail

    def _gradients(
        self, wire: torch.Tensor, batches: Sequence[Any], mine: Sequence[int], lsn: int
    ) -> dict[str, torch.Tensor]:
        """Fill the wire with the summed gradient of my micro-shards; return how they changed the buffers."""
        model, task, recipe = self.blueprint.model, self.blueprint.task, self.recipe
        size = self.exchange.layout.size
        wire[size:].zero_()
        start = {name: buffer.clone() for name, buffer in self.buffers.items()}
        changes: dict[str, torch.Tensor] = {}
        model.train()
        model.zero_grad(set_to_none=True)
        loss_sum = 0.0
        try:
            for micro_shard, batch in zip(mine, batches, strict=True):
                seed_all(step_seed(recipe.seed, lsn, micro_shard))
                with self._autocast():
                    loss = task.loss(model, batch) / recipe.micro_shards
                loss.backward()  # type: ignore[no-untyped-call]
                loss_sum += float(loss.detach())
                self._collect_buffers(start, changes, micro_shard)
        finally:
            self._put_back(start)
        self._flatten(wire)
        tail = wire[size:]
        tail[self.tail.loss] = loss_sum
        for at, name in enumerate(self.buffers):
            tail[self.tail.changed.start + at] = float(name in changes)
        return changes

    def _autocast(self) -> Any:
        if self.recipe.autocast is None:
            return nullcontext()
        return torch.autocast(self.exchange.device.type, dtype=torch.bfloat16)

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
    def _collect_buffers(
        self, start: Mapping[str, torch.Tensor], changes: dict[str, torch.Tensor], micro_shard: int
    ) -> None:
        """Add what this micro-shard did to the buffers, and put the step's first value back.

        Float buffers: the mean over micro-shards of (new - old). Others: the bytes of micro-shard 0, as floats.
        """
        for name, buffer in self.buffers.items():
            if torch.equal(buffer, start[name]):
                continue
            if buffer.is_floating_point():
                change = (buffer - start[name]).float().reshape(-1) / self.recipe.micro_shards
            else:
                change = torch.frombuffer(bytearray(tensor_bytes(buffer)), dtype=torch.uint8).float()
                change = change.to(buffer.device) * (micro_shard == 0)
            changes[name] = change if name not in changes else changes[name] + change
            buffer.copy_(start[name])

    @torch.no_grad()
    def _put_back(self, start: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in self.buffers.items():
            buffer.copy_(start[name])

    @torch.no_grad()
    def _stage(
        self, reduced: Reduced, wire: torch.Tensor, changes: Mapping[str, torch.Tensor], group: Group, lsn: int
    ) -> Staged:
        self.network_bytes = reduced.network_bytes
        loss = float(reduced.tail[self.tail.loss])
        if not (reduced.finite and loss - loss == 0):
            if self.recipe.on_nonfinite == "stop":
                raise RunFailed(
                    f"step {lsn}: the {'loss' if reduced.finite else 'gradient'} is not finite (loss {loss})",
                    hint='lower optimizer.lr or set optimizer.clip_norm; run.on_nonfinite = "skip" leaves it out',
                )
            return Staged(reduced, None, float("nan"), 1.0, {})
        buffers = self._exchange_buffers(reduced.tail, changes, group)
        norm = float(torch.linalg.vector_norm(reduced.values))
        clip = 1.0
        if self.recipe.clip_norm is not None and norm > self.recipe.clip_norm:
            clip = self.recipe.clip_norm / (norm + 1e-6)
            reduced.values.mul_(clip)
        indices = reduced.indices_numpy()
        unused = untouched(self.exchange.layout, used_flags(reduced.tail, self.tail), indices)
        return Staged(reduced, Delta(reduced.values.cpu().numpy(), indices, unused), norm, clip, buffers)

    def _exchange_buffers(
        self, tail: torch.Tensor, changes: Mapping[str, torch.Tensor], group: Group
    ) -> dict[str, torch.Tensor]:
        """Reduce the changed buffers, if any changed on any worker, and return their new values."""
        flags = tail[self.tail.changed].cpu()
        names = [name for name, flag in zip(self.buffers, flags, strict=True) if flag > 0]
        if not names:
            return {}
        lengths = [self._length(self.buffers[name]) for name in names]
        empty = [torch.zeros(length, device=self.exchange.device) for length in lengths]
        wire = torch.cat([changes.get(name, zero) for name, zero in zip(names, empty, strict=True)])
        group.all_reduce(wire)
        self.network_bytes += 2 * (group.world_size - 1) * wire.numel() * 4
        self.at("after_exchange", self.state.lsn + 1)
        out = {}
        for name, change in zip(names, torch.split(wire, lengths), strict=True):
            old = self.buffers[name]
            if old.is_floating_point():
                out[name] = old + change.view(old.shape).to(old.dtype)
            else:
                raw = change.to(torch.uint8).cpu().numpy().tobytes()
                out[name] = torch.frombuffer(bytearray(raw), dtype=old.dtype).view(old.shape).to(old.device)
        return out

    @staticmethod
    def _length(buffer: torch.Tensor) -> int:
        return buffer.numel() * (1 if buffer.is_floating_point() else buffer.element_size())

    def _commit(self, staged: Staged, wire: torch.Tensor) -> list[dict[str, Any]]:
        """Take the step; from here on it is finished."""
        assert self.state.optimizer is not None
        hyper = hyper_parameters(self.state.optimizer)
        self.torn = True
        if staged.delta is not None:
            flat = wire[: self.exchange.layout.size]
            write_gradient(flat, staged.reduced.values, staged.reduced.indices)
            if staged.reduced.indices is None and self._writes_gradients():
                flat = flat.clone()  # the delta is still to be logged
            self.state.apply(gradient_views(flat, self.exchange.layout.slots, staged.delta.unused))
            self.state.set_fixed(staged.buffers)
            self.exchange.commit(staged.reduced)
        self.state.lsn += 1
        advance_scheduler(self.scheduler)
        self.torn = False
        return hyper

    def _writes_gradients(self) -> bool:
        """Whether the optimizer's form may use gradients as scratch memory (foreach SGD with Nesterov does)."""
        assert self.state.optimizer is not None
        return any(group.get("foreach") or group.get("fused") for group in self.state.optimizer.param_groups)

    def _scalars(
        self, staged: Staged, group: Group, hyper: Sequence[Mapping[str, Any]], started: float
    ) -> dict[str, float | int]:
        samples = self.state.lsn * self.recipe.global_size
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
