"""The checkpoint actor: receives records, holds the replica, writes segments and bases.

Receiving only appends, so calls come back at once; a writer thread does the rest. Records are acknowledged when they
are here and named durable when they are in the store and no newer generation was seen after that.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from everstep.actors import environment  # noqa: F401  # before ray
import ray  # isort: skip

import torch

from everstep.actors.spec import Ack, CheckpointerSpec, recipe_of
from everstep.core import clock
from everstep.core.errors import EverstepError, StoreError
from everstep.platform.settings import JobSettings, from_dict
from everstep.storage.chain import Chain
from everstep.storage.plan import plan_restore, reachable
from everstep.storage.store import open_store
from everstep.training.blueprint import Blueprint
from everstep.training.record import lsn_of, payload_crc
from everstep.training.replica import Replica
from everstep.training.restore import plan_records, read_residual, restore, run_plan
from everstep.training.shard_state import ShardState, to_batches

IDLE_S = 0.05  # how often the writer looks whether something has become due
MERGE_BYTES = 256 << 20  # a backlog that is merged without being asked for


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"control": 4})
class CheckpointActor:
    """Owns some shards of one run's log in one generation.

    Args:
        spec: what to own, and since when.
    """

    def __init__(self, spec: CheckpointerSpec) -> None:
        torch.set_num_threads(1)
        self.spec = spec
        settings: JobSettings = from_dict(dict(spec.settings))
        self.blueprint = Blueprint(recipe_of(settings))
        assert settings.run.name is not None
        self.chain = Chain.attach(open_store(settings.run.store), settings.run.name, spec.generation)
        self.replica = Replica(self._restored(), spec.group_epoch)
        self.written = {"segments": 0, "bases": 0, "compressor": 0}
        self.base_lsn = dict.fromkeys(spec.shards, 0)
        self.slices: dict[int, set[int]] = {}  # compressor snapshots: stored slices by lsn
        self.error: tuple[float, str] | None = None  # since when the store refuses, and what it says
        self.fatal: EverstepError | None = None
        self._cpu_start = clock.process_cpu()
        self._residuals: list[tuple[int, int, int, pa.Buffer]] = []
        self._flush = threading.Event()
        self._wake = threading.Condition()
        self._idle = threading.Event()
        threading.Thread(target=self._write_for_ever, name="writer", daemon=True).start()

    def put(self, group_epoch: int, lsn: int, records: Sequence[tuple[int, pa.Buffer]], complete: int) -> Ack:
        """Take one worker's records of a step."""
        taken = self.replica.put(group_epoch, lsn, records, complete)
        return self._ack(refused=not taken)

    def put_residual(self, group_epoch: int, lsn: int, number: int, slices: int, data: pa.Buffer) -> None:
        """Take one slice of a compressor snapshot: fp32, the slice's part of the residual."""
        if group_epoch >= self.replica.group_epoch:
            with self._wake:
                self._residuals.append((lsn, number, slices, data))

    def begin_epoch(self, group_epoch: int, keep: int | None = None) -> Ack:
        """Refuse older group epochs; drop provisional records above `keep`."""
        return self._ack(refused=not self.replica.begin_epoch(group_epoch, keep))

    @ray.method(concurrency_group="control")
    def advance(self, complete: int) -> None:
        """Learn the complete lsn."""
        self.replica.advance(complete)

    @ray.method(concurrency_group="control")
    def status(self) -> dict[str, Any]:
        """Return where this actor stands."""
        since, what = self.error or (None, "")
        fatal = self.fatal or self.replica.mismatch
        return {
            "index": self.spec.index,
            "pid": os.getpid(),
            "node": ray.get_runtime_context().get_node_id(),
            "group_epoch": self.replica.group_epoch,
            "generation": self.spec.generation,
            "received": self.replica.received(),
            "durable": self.replica.durable(),
            "merged": self.replica.merged(),
            "complete": self.replica.complete,
            "slices": {lsn: sorted(numbers) for lsn, numbers in self.slices.items()},
            "store_error_s": None if since is None else clock.monotonic() - since,
            "store_error": what,
            "fatal": fatal,
            "cpu": clock.process_cpu() - self._cpu_start,
        }

    @ray.method(concurrency_group="control")
    def flush(self, timeout_s: float) -> Ack:
        """Write all complete records now; return when that is done or the time is over."""
        deadline = clock.monotonic() + timeout_s
        while clock.monotonic() < deadline and self.fatal is None:
            self._idle.clear()
            self._flush.set()
            self._idle.wait(timeout=0.5)
            if all(durable >= self.replica.complete for durable in self.replica.durable().values()):
                break
        return self._ack()

    @ray.method(concurrency_group="control")
    def state(self, lsn: int | None = None) -> tuple[int, dict[str, Any]]:
        """Return (lsn, tensors by canonical name) of the owned shards: merged now, or restored at an older `lsn`.

        Tensors come as (dtype name, shape, bytes), since Ray moves NumPy arrays without copies but not tensors.
        """
        with self.replica.merge_lock:
            if lsn is None or lsn == self.replica.complete:
                states = [self.replica.merge(shard) for shard in self.spec.shards]
                lsn = self.replica.complete
            else:
                restored, _, _ = restore(self.chain, self.blueprint, target=lsn, shards=self.spec.shards)
                states = list(restored.values())
            return lsn, {n: _as_array(t) for state in states for n, t in state.state.tensors().items()}

    @ray.method(concurrency_group="control")
    def digests(self) -> tuple[int, dict[str, str]]:
        """Return (lsn, digest of every tensor) of the merged state."""
        with self.replica.merge_lock:
            out: dict[str, str] = {}
            for shard in self.spec.shards:
                out |= self.replica.merge(shard).state.tensor_digests()
            return self.replica.complete, out

    @ray.method(concurrency_group="control")
    def expect_recomputed(self, after: int) -> None:
        """Compare the records that workers send again, from `after` + 1 on, with those that are logged."""
        self.flush_now()
        listing = self.chain.listing()
        for shard in self.spec.shards:
            end = reachable(self.chain.manifest, listing, shard)
            if end <= after:
                continue
            plan = plan_restore(self.chain.manifest, listing, target=after, shards=[shard])
            whole = plan_restore(self.chain.manifest, listing, target=end, shards=[shard], exclude=_bases_above(listing, after))
            del plan
            records = plan_records(self.chain, whole.shards[0])
            self.replica.expect(shard, {lsn_of(b): payload_crc(b) for b in records if lsn_of(b) > after})

    @ray.method(concurrency_group="control")
    def residual(self, generation: int, lsn: int, slices: Sequence[int]) -> dict[int, Any]:
        """Return slices of a compressor snapshot: fp32 arrays by number."""
        found = read_residual(self.chain, generation, lsn, slices)
        return {number: tensor.numpy() for number, tensor in found.items()}

    @ray.method(concurrency_group="control")
    def rebase(self, lsn: int, tensors: Mapping[str, Any]) -> Ack:
        """Start all owned shards again from a worker's state: the records before it are lost to the log, not to the run."""
        given = {name: from_array(value) for name, value in tensors.items()}
        for shard in self.spec.shards:
            fresh = self.blueprint.shard_state(shard)
            fresh.state.load({n: t for n, t in given.items() if _in_shard(n, fresh)}, lsn)
            self.chain.put_base(shard, lsn, to_batches(fresh.state.tensors()))
            self.base_lsn[shard] = lsn
            self.replica.rebase(shard, fresh)
        return self._ack()

    @ray.method(concurrency_group="control")
    def die(self) -> None:
        """Be killed: the fault `kill_checkpointer`."""
        os.kill(os.getpid(), signal.SIGKILL)

    def flush_now(self) -> None:
        """Write everything complete from the calling thread's point of view."""
        self._idle.clear()
        self._flush.set()
        self._idle.wait(timeout=30)

    def _ack(self, *, refused: bool = False) -> Ack:
        return Ack(self.spec.index, self.replica.received(), self.replica.durable(), refused)

    def _restored(self) -> dict[int, ShardState]:
        """Return each owned shard at its own last lsn; a shard without a base gets its first."""
        listing, out = self.chain.listing(), {}
        for shard in self.spec.shards:
            end = reachable(self.chain.manifest, listing, shard)
            if end < 0:
                out[shard] = self.blueprint.shard_state(shard)
                self.chain.put_base(shard, 0, to_batches(out[shard].state.tensors()))
            else:
                states, _, _ = restore(self.chain, self.blueprint, target=end, shards=[shard])
                out[shard] = states[shard]
        return out

    def _write_for_ever(self) -> None:
        while self.fatal is None:
            flush = self._flush.is_set()
            self._flush.clear()
            try:
                wrote = self._write_due(flush)
                self.error = None
            except StoreError as error:  # kept, shown, and tried again: nothing is dropped
                self.error = self.error or (clock.monotonic(), str(error))
                wrote = False
                clock.sleep(IDLE_S * 4)
            except EverstepError as error:
                self.fatal = error
                wrote = False
            if not wrote:
                self._idle.set()
                self._flush.wait(timeout=IDLE_S)

    def _write_due(self, flush: bool) -> bool:
        intervals = self.spec.intervals
        cuts = self.replica.cut(intervals.segment_steps, intervals.max_lag_s, all_of_it=flush)
        for cut in cuts:
            self.chain.put_segment(cut.shard, cut.first, cut.last, cut.batches)
        if cuts:
            self.chain.check_tenure()
        for cut in cuts:
            self.replica.written(cut)
        return bool(cuts) | self._write_residual() | self._write_base()

    def _write_residual(self) -> bool:
        with self._wake:
            due = self._residuals[:1]
        for lsn, number, slices, data in due:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.float32)
            self.chain.put_compressor(lsn, number, to_batches({"residual": tensor}), {"slices": str(slices)})
            self.slices.setdefault(lsn, set()).add(number)
            with self._wake:
                self._residuals.pop(0)
        return bool(due)

    def _write_base(self) -> bool:
        """Write the base of one shard if one is due, from its merged state; one shard at a time, in the background."""
        every = self.spec.intervals.base_interval
        target = self.replica.complete // every * every
        for shard in self.spec.shards:
            if max(self.base_lsn[shard], self.replica.states[shard].lsn) < target or (
                self.base_lsn[shard] < target and self.replica.states[shard].lsn == target
            ):
                with self.replica.merge_lock:
                    state = self.replica.merge(shard, target)
                    if state.lsn == target:
                        self.chain.put_base(shard, target, to_batches(state.state.tensors()))
                self.base_lsn[shard] = target
                return True
        if self.replica.held_bytes() > MERGE_BYTES:
            with self.replica.merge_lock:
                for shard in self.spec.shards:
                    self.replica.merge(shard)
        return False


def _bases_above(listing: Any, lsn: int) -> frozenset[str]:
    return frozenset(base.path for base in listing.bases() if base.lsn > lsn)


def _as_array(tensor: torch.Tensor) -> tuple[str, list[int], Any]:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    raw = flat.view(torch.uint8).numpy().copy() if flat.numel() else np.empty(0, np.uint8)
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), raw


def from_array(value: tuple[str, list[int], Any]) -> torch.Tensor:
    """Return the tensor that `CheckpointActor.state` sent, in memory of its own."""
    kind, shape, raw = value
    dtype: torch.dtype = getattr(torch, kind)
    flat = torch.from_numpy(np.array(raw, copy=True)).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)
    return flat.view(shape)


def as_arrays(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Return tensors in the form that `rebase` takes and `state` returns."""
    return {name: _as_array(tensor) for name, tensor in tensors.items()}


def _in_shard(full: str, fresh: ShardState) -> bool:
    if full in fresh.state.fixed:
        return True
    name = full.removeprefix("optimizer/").rpartition("/")[0] if full.startswith("optimizer/") else full[6:]
    return name in fresh.state.params


_ = run_plan
