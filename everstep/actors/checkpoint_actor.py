"""The checkpoint actor: receives records, holds the replica, has them written.

Receiving only appends, so calls come back at once. Three threads do the rest: one writes segments, one bases, one
merges a long backlog. Records are acknowledged when they are here, and named durable when they are in the store and no
newer generation was seen after that.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pyarrow as pa
import torch

from everstep.actors.environment import actor, control, ray
from everstep.actors.injector import StoreInjector
from everstep.actors.moving import from_arrays, to_arrays
from everstep.actors.spec import Ack, CheckpointerSpec, begun_here, recipe_of, store_of
from everstep.core import clock
from everstep.core.errors import EverstepError, StoreError
from everstep.platform.settings import from_dict
from everstep.platform.tuner import Intervals
from everstep.storage.chain import Chain
from everstep.storage.keys import BaseKey
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.plan import plan_restore, reachable
from everstep.training.base_writer import BaseWriter
from everstep.training.blueprint import Blueprint
from everstep.training.log_writer import LogWriter
from everstep.training.record import lsn_of, payload_crc
from everstep.training.replica import Replica
from everstep.training.restore import plan_records, read_residual, restore
from everstep.training.shard_state import ShardState, to_batches

IDLE_S = 0.05  # how often the writer looks whether something has become due
LEND_S = 30.0  # for so long after the state was taken the records after it are kept, for whoever catches up
RETRY_S = 0.25  # how long it leaves a store alone that has just refused


@actor(num_cpus=0, max_restarts=0)
class CheckpointActor:
    """Owns some shards of one run's log in one generation.

    Args:
        spec: what to own, and since when.
    """

    def __init__(self, spec: CheckpointerSpec) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        self.settings = from_dict(dict(spec.settings))
        self.refused: tuple[float, str] | None = None  # since when the store refuses, and what it says
        self.base_error = ""
        self.fatal: EverstepError | None = None
        self._opened = False
        self._flush, self._idle, self._settled = threading.Event(), threading.Event(), threading.Event()
        try:
            self._open()
        except EverstepError as error:  # told to whoever asks for anything; an actor that dies could not say why
            self.fatal = error
            return
        self._opened = True
        self._cpu_start = clock.process_cpu()
        for name, target in (("segments", self._segments), ("bases", self._bases), ("backlog", self._backlog)):
            threading.Thread(target=target, name=name, daemon=True).start()

    def _open(self) -> None:
        """Open the log and restore the owned shards."""
        spec = self.spec
        self.blueprint = Blueprint(recipe_of(self.settings))
        store = store_of(self.settings)
        with begun_here(self.settings):
            self.chain = Chain.attach(store, self.settings.run.name or "", spec.generation)
        self.injector = StoreInjector(self.settings.faults, self.chain, spec.index, spec.killable)
        if hasattr(store, "trace"):
            store.trace = self.injector.trace
        began = clock.monotonic()
        states, based, fresh = self._restored()
        self._load_s = clock.monotonic() - began
        self.replica = Replica(states, spec.group_epoch)
        intervals = spec.intervals
        self.bases = BaseWriter(self.chain, self.replica, base_interval=intervals.base_interval, based=based)
        for key in fresh:
            self.bases.prove(key)
        self.writer = LogWriter(
            self.chain, self.replica, self.bases, segment_steps=intervals.segment_steps, max_lag_s=intervals.max_lag_s
        )

    def ready(self) -> None:
        """Return once the owned shards are restored. Raises what kept them from it."""
        if self.fatal is not None:
            raise self.fatal

    def put(self, group_epoch: int, lsn: int, records: Sequence[tuple[int, pa.Buffer]], complete: int) -> Ack:
        """Take one worker's records of a step."""
        taken = self.replica.put(group_epoch, lsn, records, complete)
        return self._ack(refused=not taken)

    def hold(self, group_epoch: int, lsn: int, shard: int, values: pa.Buffer) -> None:
        """Take the dense values of a step that a worker is still taking."""
        self.replica.hold(group_epoch, lsn, shard, values)

    def put_residual(self, group_epoch: int, lsn: int, number: int, of: int, data: pa.Buffer) -> None:
        """Take one slice of a compressor snapshot, the `number`th of `of`: fp32, its part of the residual."""
        if group_epoch >= self.replica.group_epoch:
            self.writer.take_residual(lsn, number, of, data)

    def begin_epoch(self, group_epoch: int, keep: int | None = None) -> Ack:
        """Refuse older group epochs; drop provisional records above `keep`. Raises as `ready`."""
        if not self._opened:
            self.ready()
        return self._ack(refused=not self.replica.begin_epoch(group_epoch, keep))

    @control
    def advance(self, complete: int) -> None:
        """Learn the complete lsn."""
        self.replica.advance(complete)

    @control
    def status(self) -> dict[str, Any]:
        """Return where this actor stands."""
        if not self._opened:
            return {"index": self.spec.index, "generation": self.spec.generation, "fatal": self.fatal}
        since, said = self.refused or (None, "")
        return {
            "index": self.spec.index,
            "generation": self.spec.generation,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "received": self.replica.received(),
            "durable": self.replica.durable(),
            "merged": self.replica.merged(),
            "slices": {key: sorted(numbers) for key, numbers in self.writer.slices.copy().items()},
            "proved": list(self.bases.proved),
            "tails": self.chain.tails(),
            "bytes_written": self.writer.bytes_written,
            "held_bytes": self.replica.held_bytes(),
            "costs": self._costs(),
            "store_error_s": None if since is None else clock.monotonic() - since,
            "store_error": said,
            "base_error": self.base_error,
            "fatal": self.fatal or self.replica.mismatch,
            "cpu": clock.process_cpu() - self._cpu_start,
        }

    @control
    def flush(self, timeout_s: float) -> Ack:
        """Write all complete records now; return when that is done or the time is over."""
        deadline = clock.monotonic() + timeout_s
        while clock.monotonic() < deadline and self.fatal is None:
            self._idle.clear()
            self._flush.set()
            self._idle.wait(timeout=RETRY_S)
            if not self.writer.waiting():
                break
        return self._ack()

    @control
    def settle(self, timeout_s: float) -> None:
        """Begin no more bases; return when the one under way is written and proved, or the time is over."""
        self.bases.settle()
        self._settled.wait(timeout_s)

    @control
    def retune(self, intervals: Intervals) -> None:
        """Cut segments and write bases at other intervals from now on."""
        self.writer.segment_steps, self.writer.max_lag_s = intervals.segment_steps, intervals.max_lag_s
        self.bases.base_interval = intervals.base_interval

    @control
    def state(self, lsn: int | None = None) -> tuple[int, dict[str, Any]]:
        """Return (lsn, tensors) of the owned shards: merged now, or restored from the store at an older `lsn`."""
        with self.replica.merge_lock:
            if lsn is None:
                self.replica.lend(LEND_S)
                lsn = self.replica.complete
                states = [self.replica.merge(shard, lsn) for shard in self.spec.shards]  # it may have grown since
            else:
                states = list(restore(self.chain, self.blueprint, target=lsn, shards=self.spec.shards)[0].values())
            return lsn, to_arrays({n: t for state in states for n, t in state.state.tensors().items()})

    @control
    def records(self, after: Mapping[int, int]) -> tuple[int, dict[int, list[pa.Buffer]]] | None:
        """Return (complete lsn, packed records above `after` by owned shard); None: some are here no more."""
        self.replica.lend(LEND_S)
        with self.replica.merge_lock:
            complete = self.replica.complete
            found = {shard: self.replica.held(shard, after[shard], complete) for shard in self.spec.shards}
        if any(batches is None for batches in found.values()):
            return None
        return complete, {shard: [batch.serialize() for batch in batches or ()] for shard, batches in found.items()}

    @control
    def digests(self) -> tuple[int, dict[str, str]]:
        """Return (lsn, digest of every tensor) of the merged state."""
        with self.replica.merge_lock:
            lsn, out = self.replica.complete, dict[str, str]()
            for shard in self.spec.shards:
                out |= self.replica.merge(shard, lsn).state.tensor_digests()
            return lsn, out

    @control
    def expect_recomputed(self, after: int) -> None:
        """Compare the records that workers send again, from `after` + 1 on, with those that are logged."""
        self.flush(self.settings.checkpoint.storage_timeout_s)
        listing = self.chain.listing()
        later = frozenset(base for base in listing.bases() if base.lsn > after)
        for shard in self.spec.shards:
            end = reachable(self.chain.manifest, listing, shard, later)
            plan = plan_restore(self.chain.manifest, listing, target=end, shards=[shard], exclude=later)
            records = plan_records(self.chain, plan.shards[0])
            self.replica.expect(shard, {lsn_of(b): payload_crc(b) for b in records if lsn_of(b) > after})

    @control
    def residual(self, snapshot: CompressorSnapshot) -> dict[int, Any]:
        """Return the slices of a compressor snapshot: fp32 arrays by number."""
        found = read_residual(self.chain, snapshot)
        return {number: tensor.numpy() for number, tensor in found.items()}

    @control
    def rebase(self, lsn: int, tensors: Mapping[str, Any]) -> Ack:
        """Start all owned shards again from a worker's state at `lsn`; what is not durable of them is given up."""
        given = from_arrays(tensors)
        self.writer.declare_gap(lsn, "the records' holders died together")
        for shard in self.spec.shards:
            fresh = self.blueprint.shard_state(shard)
            fresh.state.load({name: t for name, t in given.items() if fresh.state.owns(name)}, lsn)
            self.bases.prove(self.chain.put_base(shard, lsn, to_batches(fresh.state.tensors())))
            self.replica.rebase(shard, fresh)
        return self._ack()

    @control
    def die(self) -> None:
        """Be killed: the fault `kill_checkpointer`."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _ack(self, *, refused: bool = False) -> Ack:
        replica = self.replica
        return Ack(self.spec.index, replica.received(), replica.durable(), replica.released(), refused)

    def _restored(self) -> tuple[dict[int, ShardState], dict[int, int], list[BaseKey]]:
        """Return each owned shard at its own last lsn, the lsn of its base, and the bases that are its first."""
        listing = self.chain.listing()
        states: dict[int, ShardState] = {}
        based: dict[int, int] = {}
        fresh: list[BaseKey] = []
        ends: dict[int, list[int]] = {}
        for shard in self.spec.shards:
            ends.setdefault(reachable(self.chain.manifest, listing, shard), []).append(shard)
        for shard in ends.pop(-1, []):
            states[shard], based[shard] = self.blueprint.shard_state(shard), 0
            fresh.append(self.chain.put_base(shard, 0, to_batches(states[shard].state.tensors())))
        for end, shards in ends.items():
            found, plan, _ = restore(self.chain, self.blueprint, target=end, shards=shards)
            states |= found
            based |= {part.shard: part.base.lsn for part in plan.shards}
            self.injector.restoring(end)
        return {shard: states[shard] for shard in self.spec.shards}, based, fresh

    def _costs(self) -> dict[str, float]:
        """Return what this actor's part of the log costs; see `platform.costs.Costs`."""
        return {
            "segment_s": self.writer.cpu_a_cut,
            "lag_s": self.writer.put_s,
            "bytes_per_step": self.writer.bytes_per_step,
            "base_s": self.bases.cpu_a_round,
            "round_bytes": float(self.bases.round_bytes),
            "replay_s": self.replica.replay_s(),
            "load_s": self._load_s,
        }

    def _segments(self) -> None:
        while self.fatal is None:
            flush = self._flush.is_set()
            self._flush.clear()
            if not self._attempt(partial(self._write_segments, flush), self._store_refused):
                self._idle.set()
                self._flush.wait(timeout=IDLE_S)

    def _write_segments(self, flush: bool) -> bool:
        wrote = self.writer.work(flush=flush)
        self.refused = None
        return wrote

    def _bases(self) -> None:
        while self.fatal is None:
            if not self._attempt(self._write_base, self._base_refused):
                if self.bases.settled:
                    self._settled.set()
                clock.sleep(IDLE_S)
        self._settled.set()

    def _write_base(self) -> bool:
        wrote = self.bases.work()
        self.base_error = "" if wrote else self.base_error
        return wrote

    def _backlog(self) -> None:
        while self.fatal is None:
            if not self._attempt(self.replica.merge_backlog, self._store_refused):
                clock.sleep(IDLE_S)

    def _attempt(self, work: Callable[[], bool], refused: Callable[[StoreError, float], None]) -> bool:
        """Do a piece of work. A store that refuses is shown, and asked again later: nothing is dropped."""
        began = clock.monotonic()
        try:
            return work()
        except StoreError as error:
            refused(error, began)
            clock.sleep(RETRY_S)
        except EverstepError as error:
            self.fatal = error
        return False

    def _base_refused(self, error: StoreError, began: float) -> None:
        """Bases may be late without harm: more segments have to be replayed until they come."""
        self.base_error = str(error)

    def _store_refused(self, error: StoreError, began: float) -> None:
        now, check = clock.monotonic(), self.settings.checkpoint
        self.refused = self.refused or (began, str(error))
        if check.on_storage_loss == "continue" and now - self.refused[0] > check.storage_timeout_s:
            self.writer.leave_gap()
