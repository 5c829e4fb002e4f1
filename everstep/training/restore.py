"""From stored objects to states: runs a restore plan, and plans again around objects that prove to be damaged.

Shards are restored side by side, each with its next object on the way while the last one is being replayed. Every
thread keeps torch to itself: one thread a shard uses the processor better than many threads an operation.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait

import pyarrow as pa
import torch

from everstep.core.errors import ChainError, CorruptObject, ObjectMissing
from everstep.storage.chain import Chain
from everstep.storage.keys import CompressorKey, DataKey
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.plan import RestorePlan, SegmentUse, ShardPlan, plan_restore
from everstep.training.blueprint import Blueprint
from everstep.training.record import lsn_of, rows
from everstep.training.shard_state import ShardState, from_batches

Damage = dict[DataKey, str]  # what is wrong with an object


def restore(
    chain: Chain,
    blueprint: Blueprint,
    *,
    target: int | None = None,
    shards: Collection[int] | None = None,
    exclude: frozenset[DataKey] = frozenset(),
) -> tuple[dict[int, ShardState], RestorePlan, Damage]:
    """Return the states of `shards` (None: all) at `target` (None: the last step that all of them reach).

    Objects in `exclude` are not used. A damaged base is left out and an older one taken; a damaged segment only if a
    later base bridges it.

    Returns:
        The states by shard, the plan that was carried out, and the damage that was found on the way.

    Raises:
        ChainError: the step cannot be restored; the message names the damaged or missing objects.
    """
    damage: Damage = {}
    done: dict[ShardPlan, ShardState] = {}
    while True:
        try:
            plan = plan_restore(
                chain.manifest, chain.listing(), target=target, shards=shards, exclude=exclude | frozenset(damage)
            )
        except ChainError as error:
            if not damage:
                raise
            found = "\n".join(damage.values())
            raise type(error)(f"{found}\n{error.message}", hint=error.hint) from error
        done = {part: done[part] for part in plan.shards if part in done}  # damage elsewhere changes nothing for them
        new, found_now = _run_plans(chain, blueprint, [part for part in plan.shards if part not in done])
        done |= new
        damage |= found_now
        if not found_now:
            return {part.shard: done[part] for part in plan.shards}, plan, damage


class _Damaged(CorruptObject):
    """A damaged object, with its key, so that the plan can leave it out."""

    key: DataKey


class _Cancelled(Exception):
    """Another shard failed."""


def _run_plans(
    chain: Chain, blueprint: Blueprint, plans: Sequence[ShardPlan]
) -> tuple[dict[ShardPlan, ShardState], Damage]:
    """Run plans side by side; return the states, and the first damage of each shard that met any.

    Any other error ends all of them, and is raised.
    """
    workers = max(1, min(len(plans), os.cpu_count() or 1))
    failed, threads = threading.Event(), torch.get_num_threads()
    try:
        with (
            ThreadPoolExecutor(workers, "read") as readers,
            ThreadPoolExecutor(workers, "restore", torch.set_num_threads, (1,)) as pool,
        ):
            futures = [pool.submit(_run_plan, chain, blueprint, part, readers, failed) for part in plans]
            try:
                wait(futures)
            except BaseException:  # such as an interrupt from the keyboard
                failed.set()
                raise
    finally:
        torch.set_num_threads(threads)  # this thread has them still; it is what new threads start with
    for error in [future.exception() for future in futures]:
        if error is not None and not isinstance(error, _Cancelled):
            raise error
    ended = {part: future.result() for part, future in zip(plans, futures, strict=True)}
    states = {part: state for part, state in ended.items() if isinstance(state, ShardState)}
    return states, {error.key: error.message for error in ended.values() if isinstance(error, _Damaged)}


def _run_plan(
    chain: Chain, blueprint: Blueprint, plan: ShardPlan, readers: Executor, failed: threading.Event
) -> ShardState | _Damaged:
    """Load a shard's base and apply its segments in order; return the damage if there is any.

    Args:
        chain: where the objects are.
        blueprint: what to build the state with.
        plan: what to load and apply.
        readers: fetch and check the next object meanwhile.
        failed: set when this shard fails; stops this shard when another one has set it.
    """
    try:
        objects = _ahead(readers, chain, [plan.base, *(use.key for use in plan.segments)])
        state = blueprint.shard_state(plan.shard, blank=True)
        state.state.load(from_batches(next(objects), adopt=True), plan.base.lsn, adopt=True)
        for batch in _records(plan.segments, objects):
            if failed.is_set():
                raise _Cancelled
            state.merge(batch)
        return state
    except _Damaged as error:
        return error
    except BaseException:
        failed.set()
        raise


def plan_records(chain: Chain, plan: ShardPlan) -> Iterator[pa.RecordBatch]:
    """Yield the records that a shard plan names, in order."""
    return _records(plan.segments, (_read(chain, use.key) for use in plan.segments))


def _records(uses: Iterable[SegmentUse], objects: Iterable[list[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    for use, batches in zip(uses, objects, strict=True):
        for record in (record for batch in batches for record in rows(batch)):
            if use.first <= lsn_of(record) <= use.last:
                yield record


def _ahead(readers: Executor, chain: Chain, keys: Sequence[DataKey]) -> Iterator[list[pa.RecordBatch]]:
    """Yield objects in order; while one is being used the next is being read."""
    coming = readers.submit(_read, chain, keys[0])
    for key in keys[1:]:
        batches = coming.result()
        coming = readers.submit(_read, chain, key)
        yield batches
    yield coming.result()


def _read(chain: Chain, key: DataKey) -> list[pa.RecordBatch]:
    try:
        return chain.read(key).batches
    except (CorruptObject, ObjectMissing) as error:
        damaged = _Damaged(error.message, hint=error.hint)
        damaged.key = key
        raise damaged from error


def read_residual(chain: Chain, snapshot: CompressorSnapshot) -> dict[int, torch.Tensor]:
    """Return the slices of a compressor snapshot by number: fp32 residuals."""
    out = {}
    for number in range(snapshot.slices):
        stored = chain.read(CompressorKey(snapshot.generation, snapshot.lsn, number, snapshot.run))
        out[number] = from_batches(stored.batches, adopt=True)["residual"]
    return out


def best_snapshot(chain: Chain, upto: int) -> CompressorSnapshot | None:
    """Return the last complete compressor snapshot not after `upto`; None for the start, where residuals are zero."""
    return max((s for s in chain.manifest.compressor if s.lsn <= upto), key=lambda s: s.lsn, default=None)
