"""From stored objects to states: runs a restore plan, and plans again around objects that prove to be damaged."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import pyarrow as pa
import torch

from everstep.core.errors import ChainError, CorruptObject, ObjectMissing
from everstep.storage.chain import Chain
from everstep.storage.keys import CompressorKey
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.plan import RestorePlan, ShardPlan, plan_restore
from everstep.training.blueprint import Blueprint
from everstep.training.record import lsn_of
from everstep.training.shard_state import ShardState, from_batches

Damage = dict[str, str]  # object path -> what is wrong with it


def restore(
    chain: Chain,
    blueprint: Blueprint,
    *,
    target: int | None = None,
    shards: Collection[int] | None = None,
    exclude: frozenset[str] = frozenset(),
) -> tuple[dict[int, ShardState], RestorePlan, Damage]:
    """Return the states of `shards` (None: all) at `target` (None: the last step that all of them reach).

    Objects named in `exclude` are not used. A damaged base is left out and an older one taken; a damaged segment only
    if a later base bridges it.

    Returns:
        The states by shard, the plan that was carried out, and the damage that was found on the way.

    Raises:
        ChainError: the step cannot be restored; the message names the damaged or missing object.
    """
    damage: Damage = {}
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
        try:
            return {part.shard: run_plan(chain, blueprint, part) for part in plan.shards}, plan, damage
        except _Damaged as error:
            damage[error.path] = error.message


class _Damaged(CorruptObject):
    """A damaged object, with its path, so that the plan can leave it out."""

    path = ""


def run_plan(chain: Chain, blueprint: Blueprint, plan: ShardPlan) -> ShardState:
    """Load a shard's base and apply its segments in order."""
    state = blueprint.shard_state(plan.shard)
    base = _read(chain, plan.base)
    state.state.load(from_batches(base), plan.base.lsn)
    for batch in plan_records(chain, plan):
        state.merge(batch)
    return state


def plan_records(chain: Chain, plan: ShardPlan) -> Iterator[pa.RecordBatch]:
    """Yield the records that a shard plan names, in order."""
    for use in plan.segments:
        for batch in _read(chain, use.key):
            if use.first <= lsn_of(batch) <= use.last:
                yield batch


def _read(chain: Chain, key: object) -> list[pa.RecordBatch]:
    try:
        return chain.read(key).batches  # type: ignore[arg-type]  # any data key
    except (CorruptObject, ObjectMissing) as error:
        damaged = _Damaged(error.message, hint=error.hint)
        damaged.path = key.path  # type: ignore[attr-defined]
        raise damaged from error


def read_residual(chain: Chain, generation: int, lsn: int, slices: Collection[int]) -> dict[int, torch.Tensor]:
    """Return slices of a compressor snapshot by number: fp32 residuals."""
    out = {}
    for number in slices:
        stored = chain.read(CompressorKey(generation, lsn, number))
        out[number] = from_batches(stored.batches)["residual"]
    return out


def best_snapshot(chain: Chain, upto: int) -> CompressorSnapshot | None:
    """Return the last complete compressor snapshot not after `upto`; None for the start, where residuals are zero."""
    return max((s for s in chain.manifest.compressor if s.lsn <= upto), key=lambda s: s.lsn, default=None)
