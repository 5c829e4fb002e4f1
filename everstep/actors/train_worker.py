"""The train worker: long-lived, takes steps in whatever group it is put into, and hands each step to the log.

One thread trains; the control group answers meanwhile, also while a collective is stuck.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from everstep.actors.auto import Auto
from everstep.actors.catching_up import Shadow
from everstep.actors.environment import NAMESPACE, actor, control, ray
from everstep.actors.injector import Injector, kill_actor, kill_cluster
from everstep.actors.levelling import Levelled, Standing, level
from everstep.actors.moving import from_arrays, to_arrays
from everstep.actors.notebook import Notebook
from everstep.actors.process_group import ProcessGroup, connect
from everstep.actors.sender import Sender
from everstep.actors.snapshots import Snapshots
from everstep.actors.spec import Formation, Formed, RunResult, WorkerSpec, actor_name, begun_here, recipe_of, store_of
from everstep.actors.state_transfer import delta_crc
from everstep.actors.times import Times
from everstep.core import clock
from everstep.core.errors import EverstepError, Interruption
from everstep.platform.settings import from_dict
from everstep.storage.chain import Chain
from everstep.tasks import build_dataset
from everstep.training.blueprint import Blueprint
from everstep.training.data import BatchLoader
from everstep.training.evaluate import evaluate
from everstep.training.exchange import Exchange, Tail
from everstep.training.history import evaluation_name
from everstep.training.record import StepResult
from everstep.training.state import combine_digests
from everstep.training.train_step import TrainStep
from everstep.training.tree import share


@actor(max_restarts=0)
class TrainWorker:
    """One worker, or a spare that has everything built and waits.

    Args:
        spec: what to build.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        self.settings = from_dict(dict(spec.settings))
        self.device = torch.device("cuda" if self.settings.workers.gpus else "cpu")
        self.group: ProcessGroup | None = None
        self.formation: Formation | None = None
        self.checkpointers: list[Any] = []
        self.times = Times()
        self.loss: tuple[float, float] = (float("nan"), float("nan"))  # of the first and the last step
        self._validation: Any = None
        self._rendezvous: tuple[tuple[str, int], Any] | None = None
        self._over = threading.Event()
        self._ended_epoch = -1
        self._stopping = False
        self._owned: tuple[int, ...] = ()
        self._mine: range = range(0)
        self._last: StepResult | None = None
        self._whole = False  # whether the state is the run's; a fresh worker's is only a place to put it
        self._shadow: Shadow | None = None  # of a newcomer that catches up
        self._unbuilt: EverstepError | None = None
        try:
            self._build()
        except EverstepError as error:  # told to whoever asks; an actor that dies could not say why
            self._unbuilt = error

    def _build(self) -> None:
        """Build everything a step needs: a spare then only has to be told which place to take."""
        check, run = self.settings.checkpoint, self.settings.run
        self.blueprint = Blueprint(recipe_of(self.settings))
        self.blueprint.model.to(self.device)
        self.state = self.blueprint.live_state()
        self.loader = self._make_loader()
        with begun_here(self.settings):
            self.chain = Chain.open(store_of(self.settings), run.name or "")
        self.notebook = Notebook(lambda: self.chain)
        self.injector = Injector(self.settings.faults, self.chain, self._strike)
        self.sender = Sender(self.blueprint.layout, self.spec.shards, check.window, check.queue_bytes, self.injector.at)
        self.train_step = self._make_step()
        replicated, every = self.blueprint.recipe.residual == "replicated", self.spec.compressor_interval
        self.snapshots = Snapshots(self.sender, self.train_step.exchange, replicated=replicated, every=every)
        self.auto = Auto(self.chain, self.notebook) if self.blueprint.recipe.compressor == "auto" else None
        self._check = int(combine_digests(self.state.tensor_digests())[:15], 16)

    def _make_loader(self) -> BatchLoader:
        dataset = build_dataset(self.blueprint.task, "train")
        batch = self.settings.batch
        loader = BatchLoader(
            dataset, seed=self.settings.run.seed, global_size=batch.global_size, micro_shards=batch.micro_shards,
            workers=batch.loader_workers, collate=getattr(self.blueprint.task, "collate", None), skips=batch.skips,
        )  # fmt: skip
        self._samples = len(dataset)  # type: ignore[arg-type]  # sized, checked when built
        return loader

    def _make_step(self) -> TrainStep:
        recipe, layout = self.blueprint.recipe, self.blueprint.layout
        buffers = sum(name.startswith("buffer/") for name in self.state.fixed)
        tail = Tail(len(layout.slots), buffers, len(layout.shards))
        compressor = self.blueprint.compressor()
        window = self.settings.checkpoint.window
        exchange = Exchange(layout, tail, compressor, recipe.residual, window, self.device)
        step = TrainStep(self.blueprint, self.state, exchange, tail, self.injector.at)
        step.samples_per_epoch = self._samples
        if step.stretches is not None and compressor is None:
            step.stretches.on_reduced = lambda *stretch: self.sender.offer_early(self.state.lsn + 1, *stretch)
        return step

    # ---- control: answered at any time ----

    @control
    def retune(self, compressor_interval: int) -> None:
        """Take compressor snapshots at another interval from now on."""
        self.snapshots.every = compressor_interval

    @control
    def status(self) -> dict[str, Any]:
        """Return where this worker stands."""
        if self._unbuilt is not None:
            raise self._unbuilt
        formation = self.formation
        return {
            "identity": self.spec.identity,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "world_rank": formation.world_rank if formation else None,
            "world_size": formation.world_size if formation else 0,
            "group_epoch": formation.group_epoch if formation else -1,
            "lsn": self._lsn(),
            "entered": self.group.entered if self.group else 0,
            "computing": self.group is not None and self.group.entered == self.group.left,
            "beats": self.train_step.beats,
            "loss": self.loss[1],
            "step_s": self.times.recent(),
            "stall_s": self.times.recent_stall(),
            "snapshot_s": self.snapshots.seconds,
            "queue_bytes": self.sender.held_bytes,
        }

    @control
    def step_after(self, wall: float) -> float | None:
        """Return when the first step was finished after `wall`, or None if none was yet."""
        return self.times.step_after(wall)

    @control
    def end_epoch(self, group_epoch: int) -> None:
        """Leave the group of this epoch, and of any before."""
        self._ended_epoch = max(self._ended_epoch, group_epoch)
        formation = self.formation
        if formation is None or formation.group_epoch <= group_epoch:
            self._over.set()

    @control
    def request_stop(self, group_epoch: int) -> None:
        """Ask the whole group of this epoch to stop after the same step."""
        if self.formation is not None and self.formation.group_epoch == group_epoch:
            self._stopping = True

    @control
    def connect_checkpointers(self, checkpointers: Sequence[Any]) -> None:
        """Send records to these checkpoint actors from now on."""
        self.checkpointers = list(checkpointers)
        if self.formation is not None:
            self.sender.begin_epoch(self.formation.group_epoch, self._owned, self.checkpointers)

    # ---- the training thread ----

    def come_out(self) -> RunResult:
        """Return once whatever this worker did before has ended: a new fault handler's first question."""
        return RunResult("broken", self._lsn(), "the fault handler was restarted")

    def prepare(self, checkpointers: Sequence[Any]) -> int:
        """Take the replica's state and the records after it, while the others train; return the step reached."""
        self._shadow = Shadow(self.blueprint, checkpointers)
        self._shadow.approach()
        return self._shadow.lsn

    def begin(self) -> None:
        """Take this worker's first state for the run's: only for a run without a log."""
        self._whole = True

    def load(self, lsn: int, parts: Sequence[Mapping[str, Any]], residual: Any) -> None:
        """Take over a state that checkpoint actors sent.

        Args:
            lsn: the step it belongs to.
            parts: tensors by canonical name, one mapping an actor.
            residual: fp32 array (n,), or None for zero.
        """
        tensors = {name: tensor for part in parts for name, tensor in from_arrays(part).items()}
        self._shadow = None
        self.state.load(tensors, lsn)
        self.train_step.exchange.adopt(lsn, None if residual is None else torch.tensor(residual))
        self._settle(int(combine_digests(self.state.tensor_digests())[:15], 16))

    def load_residual(self, lsn: int, residual: Any) -> None:
        """Take over this worker's own residual (fp32, (n,)), which `form` then leaves alone."""
        self.train_step.exchange.preload(lsn, torch.tensor(residual))

    def residual(self) -> Any:
        """Return a copy of this worker's own residual (fp32, (n,)), which it leaves to another; None without one."""
        residual = self.train_step.exchange.residual
        return None if residual is None else residual.detach().cpu().numpy().copy()

    def inherit(self, residual: Any) -> None:
        """Add what a leaving worker had not sent (fp32, (n,)) to what this one has not."""
        own = self.train_step.exchange.residual
        if own is not None and residual is not None:
            own += torch.tensor(residual, device=own.device)

    def form(self, formation: Formation, checkpointers: Sequence[Any]) -> Formed | RunResult:
        """Join a new group, give or take the state where somebody is behind, and go to the next step."""
        if formation.group_epoch <= self._ended_epoch:
            return RunResult("broken", self._lsn(), f"group epoch {formation.group_epoch} has ended")
        self.formation, self._stopping = formation, False
        self._over.clear()
        if formation.group_epoch <= self._ended_epoch:  # ended between the question and the clearing
            self._over.set()
        try:
            return self._join(formation, checkpointers)
        except Interruption as interruption:
            self._leave()
            return RunResult("broken", self._lsn(), interruption.message)

    def run(self, until: int, evaluate_first: bool) -> RunResult:
        """Take steps up to `until`, or until something ends the run; never raises."""
        cpu = clock.thread_cpu()
        try:
            if evaluate_first:
                self._evaluate()
            return RunResult(self._steps(until), self.state.lsn)
        except Interruption as interruption:
            return RunResult("broken", self._lsn(), interruption.message)
        except EverstepError as error:
            return RunResult("failed", self._lsn(), error.message, error)
        except Exception:  # the user's own code; the fault handler decides whether to try again
            return RunResult("error", self._lsn(), traceback.format_exc())
        finally:
            self.times.cpu += clock.thread_cpu() - cpu
            if self.state.lsn < until:
                self._leave()

    def resend(self, group_epoch: int, have: Mapping[int, int]) -> dict[int, int]:
        """Send the checkpoint actors every record above `have` that this worker holds; return what they have then."""
        return self.sender.resend(group_epoch, have, self.state.lsn)

    def drain(self) -> dict[int, int]:
        """Wait until all records are acknowledged; return what the checkpoint actors have."""
        return self.sender.drain()

    def tensors(self) -> tuple[int, dict[str, Any]]:
        """Return (lsn, the whole state) in the form checkpoint actors take."""
        return self.state.lsn, to_arrays(self.state.tensors())

    def digest(self) -> tuple[int, str]:
        """Return (lsn, digest of the whole state)."""
        return self.state.lsn, self.state.digest()

    def measures(self) -> dict[str, Any]:
        """Return what this worker measured of itself."""
        return self.times.measures() | {
            "sender_cpu": self.sender.cpu,
            "network_bytes_per_step": self.train_step.network_bytes,
            "loss_first": self.loss[0],
            "loss_last": self.loss[1],
            "full_bytes": sum(t.numel() * t.element_size() for t in self.state.tensors().values()),
        }

    @control
    def die(self) -> None:
        """Be killed."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _join(self, formation: Formation, checkpointers: Sequence[Any]) -> Formed:
        self._leave()
        self.train_step.exchange.renew()
        self.injector.world_rank = formation.world_rank
        self.group = ProcessGroup(
            self._connected(formation.rendezvous), formation.group_epoch, formation.world_rank, formation.world_size,
            self.device, self._over,
        )  # fmt: skip
        self._catch_up()
        note = self.auto.decide(self.group, self.train_step.exchange, self.device) if self.auto else ""
        levelled = self._level(self.group)
        micro, size, place = self.settings.batch.micro_shards, formation.world_size, formation.world_rank
        self._mine = share(micro, size, place)
        self._owned = tuple(s for s in self.sender.actor_of if s % size == place)
        self.checkpointers = list(checkpointers)
        self.sender.begin_epoch(formation.group_epoch, self._owned, self.checkpointers)
        self.loader.start(self.state.lsn + 1, self._mine)
        return Formed(self.state.lsn, levelled.received, levelled.drifted, note)

    def _leave(self) -> None:
        """Leave the group, so that peers which wait for us come out at once."""
        if self.group is not None:
            self.group.close()

    def _steps(self, until: int) -> str:
        assert self.group is not None and self.formation is not None
        while self.state.lsn < until:
            lsn = self.state.lsn + 1
            started = clock.monotonic()
            batches = self.loader.step(lsn)
            result, tail = self.train_step.run(
                batches, self._mine, self.group, self.formation.group_epoch,
                lags=self.sender.lags(self._owned, self.state.lsn), stop=self._stopping, owned=self._owned,
            )  # fmt: skip
            complete = lsn - 1 - int(tail[self.train_step.tail.lag].max())
            self._last = result
            stalled = self.sender.stalled
            self.sender.offer(result, complete)
            self.snapshots.take(lsn, self.formation, self.checkpointers)
            self._count(result, started, self.sender.stalled - stalled)
            every = self.settings.eval.every
            if every and lsn % every == 0:
                self._evaluate()
            if float(tail[self.train_step.tail.stop]) > 0:
                self._stopping = False
                return "stopped" if self.state.lsn < until else "finished"
        return "finished"

    def _count(self, result: StepResult, started: float, stalled: float) -> None:
        loss = float(result.scalars["loss"])
        self.loss = (loss if result.lsn == 1 else self.loss[0], loss)
        self.times.add(clock.monotonic() - started, stalled, self.train_step.exposed_s, clock.wall())

    def _evaluate(self) -> None:
        assert self.group is not None
        split = self.settings.eval.split
        if self._validation is None:
            self._validation = build_dataset(self.blueprint.task, split)
        values = evaluate(self.blueprint, self._validation, self.group, self.device, self.train_step.beat)
        if self.group.world_rank == 0:
            lsn, generation = self.state.lsn, self.chain.manifest.generation
            body = {"lsn": lsn, "generation": generation, "split": split, **values}
            self.notebook.event(evaluation_name(lsn, generation), body)

    def _lsn(self) -> int:
        return self.state.lsn if self._whole and not self.train_step.torn else -1

    def _connected(self, address: tuple[str, int]) -> Any:
        if self._rendezvous is None or self._rendezvous[0] != address:
            self._rendezvous = (address, connect(address))
        return self._rendezvous[1]

    def _catch_up(self) -> None:
        """Take a newcomer's own copy as the state, brought to the border; what is wrong with it shows when levelled."""
        if self._shadow is None:
            return
        try:
            self._shadow.advance()
        except (ray.exceptions.RayError, EverstepError):
            return  # it is behind, then, and gets the state
        if self._shadow.level():
            self.state.load(self._shadow.tensors(), self._shadow.lsn)

    def _level(self, group: ProcessGroup) -> Levelled:
        """Come to the state of the group, or give it."""
        joining, self._shadow = self._shadow is not None, None
        skipped = self._last is not None and self._last.lsn == self.state.lsn and self._last.delta is None
        standing = Standing(self.state.lsn if joining else self._lsn(), self._checksum(), joining, skipped)
        replicated = self.blueprint.recipe.residual == "replicated"
        levelled = level(group, self.state, self.train_step.exchange, standing, replicated=replicated)
        if levelled.changed:
            self._settle(levelled.check)
        return levelled

    def _settle(self, check: int) -> None:
        """The state was replaced: what was derived from the old one is made anew."""
        self._check, self._last, self._whole = check, None, True
        self.train_step.torn = False
        self.train_step.align_schedule()

    def _checksum(self) -> int:
        """Return a number that two workers share if they took the same last step."""
        if self._last is not None and self._last.lsn == self.state.lsn:
            self._check = delta_crc(self._last.delta, self._last.lsn)
        return self._check

    def _strike(self, kind: str, target: int) -> None:
        """Carry out a fault that hits another process."""
        if kind == "kill_checkpointer":
            kill_actor(self.checkpointers[target])
        elif kind == "kill_everything":
            kill_cluster(self.spec.killable)
        else:
            kill_actor(ray.get_actor(actor_name(self.settings.run.name or "", "handler"), namespace=NAMESPACE))
