"""The log of a loop of its user's own, as the loop sees it. Made by `everstep.attach`."""

from __future__ import annotations

import atexit
import math
import sys
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from everstep.actors import session
from everstep.actors.context import EXACTNESS
from everstep.actors.log_link import LogLink
from everstep.actors.log_words import Opened, Progress
from everstep.actors.moving import from_arrays
from everstep.core import clock
from everstep.core.errors import EverstepError, Failure, SettingsError
from everstep.platform.settings import JobSettings
from everstep.training.generators import captured as generators
from everstep.training.generators import put_back
from everstep.training.live import Captured, LiveModel
from everstep.training.optimizer import advance_scheduler
from everstep.training.ranks import Ranks
from everstep.training.record import StepResult
from everstep.training.state import NOTE

FAREWELL_S = 10.0  # for the last steps of a program that ends without `close`
ARRIVAL_S = 120.0


@dataclass(frozen=True)
class Restored:
    """Where a run goes on.

    Attributes:
        step: the last finished step, counted from 1.
        cursor: what was handed over with it; None if nothing was.
        exactness: what going on from here promises: "bitwise", "close" or "warm".
        reason: why that is not "bitwise"; "" if it is.
    """

    step: int
    cursor: Any
    exactness: str
    reason: str


class Log:
    """Logs one run's steps.

    Args:
        live: the model and the optimizer.
        link: this process's end of the log.
        opened: as the keeper opened it.
        ranks: this process among those of its program.
        scheduler: set by `restore`; None: not handed over.
        settings: of the run.
        own: whether the connection to Ray is ours to end.
    """

    def __init__(
        self, live: LiveModel, link: LogLink, opened: Opened, ranks: Ranks, *,
        scheduler: LRScheduler | None, settings: JobSettings, own: bool,
    ) -> None:  # fmt: skip
        self.lsn = opened.lsn
        self._live, self._link, self._opened, self._ranks = live, link, opened, ranks
        self._scheduler, self._settings, self._own = scheduler, settings, own
        self._replay = live.replay()
        self._first = opened.lsn + 1
        self._scheduled = scheduler.last_epoch if scheduler is not None else 0  # where the schedule began
        self._used = 0  # where it stood when the optimizer's step began
        self._set = opened.fresh  # whether model and log have the same state
        self._pending: Captured | None = None
        self._overflow = False  # the optimizer was called, and told by a loss scaler to leave the step out
        self._calls: bool | None = None  # whether `step` has to call the optimizer; None: not known yet
        self._calling = self._closed = False
        self._ended = clock.monotonic()
        self._hook = live.optimizer.register_step_pre_hook(self._before_step)
        atexit.register(self._abandon)

    def restore(self) -> Restored | None:
        """Set model, optimizer, scheduler and, if they were logged, the generators as they were after the last step.

        On every rank, before the first step. None for a run without steps.
        """
        if self._opened.fresh:
            return None
        if self._closed or self.lsn >= self._first:
            raise SettingsError("restore() comes after a step", hint="call it on every rank before the first step")
        lsn, tensors = self._link.state()
        if lsn != self.lsn:  # another rank is ahead of this one
            raise SettingsError(f"the log is at step {lsn}, it was opened at {self.lsn}", hint="restore on every rank")
        self._live.load(from_arrays(tensors), lsn)
        self._set = True
        if lsn == 0:
            return None
        loop, rng = self._live.noted("loop") or {}, self._live.noted("rng")
        self._place(lsn, loop)
        if rng and len(rng) > self._ranks.world_rank:
            put_back(rng[self._ranks.world_rank])
        cursor = self._live.noted("cursor")
        exactness, reason = self._promise(loop, cursor, rng)
        if self._ranks.world_rank == 0:
            self.say(f"restored step {lsn}: {exactness}{f' ({reason})' if reason else ''}", replay=False)
        return Restored(lsn, cursor, exactness, reason)

    def step(
        self, loss: Tensor | float | None = None, cursor: Any = None, rng: bool = False, *, skipped: bool = False
    ) -> None:
        """Log one optimizer step: right after `optimizer.step()`, or in its place, with the gradients reduced.

        Args:
            loss: goes into the log as world rank 0 has it.
            cursor: any JSON value, such as the place in the data; `restore` gives back world rank 0's.
            rng: log the global generators of this rank; alike on every rank.
            skipped: a loss scaler left the step out (its scale went down): a step without a change.

        Raises:
            SettingsError: an optimizer step was taken that is not in the log, or would be taken twice.
            Failure: what ended the log.
        """
        self._link.check()
        captured = self._taken(skipped)
        lsn, began = self.lsn + 1, clock.monotonic()
        hyper = captured.hyper if captured else self._live.hyper()
        try:
            notes = self._notes(cursor, rng, hyper)
        except SettingsError:
            self._pending = captured  # the optimizer's step was taken: it may still be logged
            raise
        result = StepResult(
            lsn, self._opened.group_epoch, captured.delta if captured else None,
            self._scalars(loss, hyper, began), hyper, notes, self._digests(lsn),
        )  # fmt: skip
        self._live.state.lsn = self.lsn = lsn
        self._link.offer(result)
        if lsn == self._first:
            self._state_exactness(cursor, rng)
        now = clock.monotonic()
        self._link.progress = Progress(lsn, now - self._ended, now - began, self._link.progress.exactness)
        self._ended = now

    def close(self) -> None:
        """Make every step durable and close the log; on every rank.

        Raises:
            StateMismatch: the log does not lead to the state that the model has.
            Failure: something did not become durable.
        """
        if self._closed:
            return
        self._link.check()
        self._refuse_pending("close()")
        if not self._link.arrived(self.lsn, ARRIVAL_S):
            self._link.check()
            raise Failure(
                f"step {self.lsn} did not reach the checkpoint actors within {ARRIVAL_S:.0f} s",
                hint="look into Ray's logs of the actors; what is durable is kept",
            )
        self._ranks.wait()
        try:
            durable = self._ranks.decide(self._finish)
        finally:
            self._leave()
        if self._ranks.world_rank == 0:
            self.say(f"closed; {durable} steps are durable", replay=False)

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self._abandon()

    def say(self, what: str, *, replay: bool = True) -> None:
        """Print one line about the run."""
        exactness, reason = self._replay
        more = f"; replay {exactness}{f' ({reason})' if reason else ''}" if replay else ""
        print(f"everstep: run {self._settings.run.name!r} {what}{more}", file=sys.stderr, flush=True)

    # ---- a step ----

    def _before_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run by torch right before the optimizer's step."""
        if len(args) > 1 and args[1] is not None or kwargs.get("closure") is not None:
            raise SettingsError(
                "optimizer.step(closure) computes gradients where nobody sees them",
                hint="call the closure yourself, then optimizer.step()",
            )
        self._refuse_pending("optimizer.step()")
        if not self._set:
            raise SettingsError(
                f"run {self._settings.run.name!r} has {self.lsn} steps and another state than the model",
                hint="call log.restore() before the first step, or choose another run name",
            )
        if getattr(optimizer, "grad_scale", None) is not None:
            raise SettingsError(
                "the gradients are still scaled: this fused optimizer unscales them itself",
                hint="call scaler.unscale_(optimizer) before scaler.step(optimizer)",
            )
        found = getattr(optimizer, "found_inf", None)
        self._overflow = found is not None and bool(found)
        self._calls = self._calling
        self._used = self._scheduler.last_epoch if self._scheduler is not None else 0
        if not self._overflow:
            self._pending = self._live.capture(self.lsn + 1)

    def _refuse_pending(self, what: str) -> None:
        if self._pending is not None:
            raise SettingsError(
                f"{what} after step {self.lsn + 1}, which was not logged",
                hint="call log.step() once after each optimizer.step()",
            )

    def _taken(self, skipped: bool) -> Captured | None:
        """Return what the optimizer consumed, having it take its step if it has not; None for a skipped step."""
        if skipped:
            self._refuse_pending("step(skipped=True)")
        overflow, self._overflow = self._overflow, False
        if skipped or overflow:
            return None
        if self._pending is None:
            self._call()
        captured, self._pending = self._pending, None
        return captured

    def _call(self) -> None:
        grads = [p.grad for p in self._live.params if p.grad is not None]
        # The loop may have a loss scaler that has just left its first step out: nothing may be made of such gradients.
        if self._calls is False or not grads or (self._calls is None and not all(map(_finite, grads))):
            raise SettingsError(
                f"step {self.lsn + 1}: optimizer.step() was not called, and there are no gradients to call it with",
                hint="call log.step() after optimizer.step(); if a loss scaler left the step out: skipped=True",
            )
        self._calling = True
        try:
            self._live.optimizer.step()
        except BaseException:
            self._pending = None
            raise
        finally:
            self._calling = False

    def _notes(self, cursor: Any, rng: bool, hyper: list[dict[str, Any]]) -> dict[str, Tensor]:
        """Return what shard 0 has of this step: changed buffers, and the notes that a resumed loop needs."""
        states = self._ranks.gather(generators()) if rng else None
        if 0 not in self._live.owned:
            return {}
        loop: dict[str, Any] = {"world_size": self._ranks.world_size}
        if self._scheduler is not None:
            loop |= {"used": self._used - self._scheduled, "scheduler": self._scheduler.last_epoch - self._scheduled}
        elif (after := self._live.hyper()) != hyper:
            loop["hyper"] = after
        out: dict[str, Tensor] = {}
        for key, value in (("cursor", cursor), ("loop", loop), ("rng", states)):
            changed = self._live.note(key, value)
            if changed is not None:
                out[NOTE + key] = changed
        return self._live.changed() | out

    def _scalars(self, loss: Tensor | float | None, hyper: list[dict[str, Any]], now: float) -> dict[str, float | int]:
        value = loss.detach() if isinstance(loss, Tensor) else loss
        return {
            "loss": math.nan if value is None else float(value),
            "grad_norm": math.nan,
            "clip": 1.0,
            "lr": float(hyper[0].get("lr", 0.0)),
            "samples": 0,
            "data_epoch": 0,
            "world_size": self._ranks.world_size,
            "seconds": now - self._ended,
        }

    def _digests(self, lsn: int) -> dict[int, str]:
        every = self._settings.run.digest_every
        if self._replay[0] != "bitwise" or not every or (lsn % every and lsn != self._first):
            return {}
        return {shard: self._live.digest(shard) for shard in self._live.owned}

    # ---- what is promised ----

    def _state_exactness(self, cursor: Any, rng: bool) -> None:
        """Say once what a program that goes on with this run can expect."""
        missing = [what for what, given in (("cursor", cursor is not None), ("rng", rng)) if not given]
        reasons = [f"log.step() got no {' and no '.join(missing)}"] if missing else []
        reasons += self._unseen()
        if reasons and self._replay[0] == "bitwise":
            self._link.progress = Progress(exactness="warm")
        if reasons and self._ranks.world_rank == 0:
            self.say(f"can be resumed warm only: {'; '.join(reasons)}", replay=False)

    def _unseen(self) -> list[str]:
        """Return what belongs to the state of this loop and is not in the log."""
        out = []
        if self._scheduler is None and any("initial_lr" in g for g in self._live.optimizer.param_groups):
            out.append("the optimizer has a scheduler that was not handed over")
        if self._ranks.world_size > 1 and any(name.startswith("buffer/") for name in self._live.state.fixed):
            out.append("buffers are those of world rank 0")
        return out

    def _promise(self, loop: dict[str, Any], cursor: Any, rng: Any) -> tuple[str, str]:
        size = self._ranks.world_size
        found = [(self._replay[0], self._replay[1]), (self._opened.exactness, "the run was no more before")]
        if loop.get("world_size", size) != size:
            found.append(("close", f"the world size was {loop['world_size']}, now it is {size}"))
        found += [("warm", f"no {what} was logged") for what, value in (("cursor", cursor), ("rng", rng)) if not value]
        worst = max((level for level, _ in found), key=EXACTNESS.index)
        return worst, next((why for level, why in found[::-1] if level == worst and worst != "bitwise"), "")

    def _place(self, lsn: int, loop: dict[str, Any]) -> None:
        """Set the schedule, or else the hyper-parameters, as they were at the end of step `lsn`."""
        if self._scheduler is None:
            for group, values in zip(self._live.optimizer.param_groups, loop.get("hyper") or [], strict=False):
                group.update({key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})
            return
        # Once a step, before or after log.step(): it has taken as many as the optimizer. Else as far as it was seen.
        regular = loop.get("used", lsn - 1) == lsn - 1
        for _ in range((lsn if regular else loop["scheduler"]) + self._scheduled - self._scheduler.last_epoch):
            advance_scheduler(self._scheduler)

    # ---- the end ----

    def _finish(self) -> int:
        if self.lsn == 0 or not self._set:
            return self._link.release(end=True)
        return self._link.close(self.lsn, self._live.digest())

    def _abandon(self) -> None:
        """Best effort at the end of a program that did not close the log: what it finished shall not be lost."""
        if self._closed:
            return
        try:
            self._link.arrived(self.lsn, FAREWELL_S)
            if self._ranks.world_rank == 0 and self._link.failure is None:
                self._link.release(end=self._own)
        except (EverstepError, OSError, RuntimeError) as error:  # the program ends for another reason: that is shown
            print(f"everstep: the last steps could not be saved: {error}", file=sys.stderr)
        finally:
            self._leave(together=False)

    def _leave(self, *, together: bool = True) -> None:
        self._closed = True
        self._hook.remove()
        atexit.unregister(self._abandon)
        self._link.stop()
        if self._own and self._ranks.world_rank:
            session.disconnect(True)
        if together:
            self._ranks.wait()  # world rank 0 may take the cluster with it
        if self._ranks.world_rank == 0:
            session.disconnect(self._own)


def _finite(grad: Tensor) -> bool:
    return bool(torch.isfinite(grad).all())
