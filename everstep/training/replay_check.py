"""Replaying all that a run keeps, from the oldest base of each range on, and comparing it with all that was logged.

Compared on the way: each digest in a record (by the shard itself), and the content of each later base with the state
that the replay has come to there. After a contradiction the replay goes on from the next base.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import pyarrow as pa

from everstep.core.errors import ChainError, EverstepError, ObjectMissing, StateMismatch
from everstep.storage.chain import Chain
from everstep.storage.check import Problem
from everstep.storage.keys import BaseKey, DataKey, inside
from everstep.storage.listing import Listing
from everstep.storage.plan import ShardPlan, counting
from everstep.storage.stretches import KeptShard, Stretch
from everstep.training.blueprint import Blueprint
from everstep.training.restore import plan_records
from everstep.training.shard_state import ShardState, from_batches
from everstep.training.state import combine_digests, tensor_digest

HINT = "if this is another processor or torch than the run's, verify it there; else the object was replaced"


@dataclass
class Replayed:
    """What a replay came to.

    Attributes:
        step: the last lsn that all shards come to; None if there is none.
        digest: of the whole state there; None if some shard does not come by.
        steps: replayed ones, over all ranges.
        ranges: what was replayed, by range.
        compared: logged digests, one a shard and step.
        bases: bases whose content was compared.
        logged: the highest step at which every parameter shard's digest was logged and reached; 0 if there is none.
        highest: the highest lsn that any shard shows.
        problems: contradictions.
    """

    step: int | None = None
    digest: str | None = None
    steps: int = 0
    ranges: list[dict[str, int]] = field(default_factory=list)
    compared: int = 0
    bases: int = 0
    logged: int = 0
    highest: int | None = None
    problems: list[Problem] = field(default_factory=list)


def replay_all(chain: Chain, blueprint: Blueprint, listing: Listing, broken: Collection[DataKey]) -> Replayed:
    """Replay every range that is kept, in every shard.

    Args:
        chain: the run.
        blueprint: what to build its states with.
        listing: a look at its objects.
        broken: objects not to use.
    """
    manifest, out = chain.manifest, Replayed()
    for kept in manifest.kept:
        parts = [KeptShard(manifest, listing, shard, kept, broken) for shard in manifest.shards]
        ends = [_ends(part) for part in parts]
        last = kept == manifest.kept[-1]
        step = min(ends) if min(ends) >= 0 else None
        runs = [_ShardReplay(chain, blueprint, part, step if last else None, out) for part in parts]
        for run in runs:
            run.run()
        first = min((part.bases[0].lsn for part in parts if part.bases), default=kept.first - 1)
        out.ranges.append({"first": first + 1, "last": max(ends), "shards": len(parts)})
        out.steps += max(0, max(ends) - first)
        if last:
            out.step = step
            out.digest = _digest([run.tensors for run in runs])
            out.logged = min((run.logged for run in runs if run.part.shard), default=0)
    shown: list[int] = []
    for bases, uses in (counting(manifest, listing, shard) for shard in manifest.shards):
        shown += [*(base.lsn for base in bases), *(use.last for use in uses)]
    out.highest = max(shown, default=None)
    return out


def _digest(parts: list[dict[str, str] | None]) -> str | None:
    """Return the digest of a state from those of its shards' tensors; None if a shard's are missing."""
    whole: dict[str, str] = {}
    for part in parts:
        if part is None:
            return None
        whole |= part
    return combine_digests(whole)


def _ends(part: KeptShard) -> int:
    """Return the lsn that the last stretch of a shard ends at; -1 if it has none."""
    at, after = -1, part.first - 2
    while stretch := part.stretch(after):
        at = after = stretch.end
    return at


class _ShardReplay:
    """The replay of one shard in one range."""

    def __init__(self, chain: Chain, blueprint: Blueprint, part: KeptShard, at: int | None, out: Replayed) -> None:
        self.chain, self.blueprint, self.part, self.at, self.out = chain, blueprint, part, at, out
        self.exact = "close" not in (blueprint.exactness, chain.manifest.exactness)
        self.tensors: dict[str, str] | None = None  # digests of the state at lsn `at`; None: it did not come by
        self.logged = 0

    def run(self) -> None:
        """Replay stretch after stretch."""
        after = self.part.first - 2
        while stretch := self.part.stretch(after):
            after = self._stretch(stretch)

    def _stretch(self, stretch: Stretch) -> int:
        """Replay one stretch; return the lsn above which to look for the next base."""
        state = self.blueprint.shard_state(self.part.shard)
        state.verify = self.exact
        try:
            state.state.load(from_batches(self.chain.read(stretch.base).batches), stretch.base.lsn)
            self._passed(state, stretch.base)
            plan = ShardPlan(self.part.shard, stretch.base, stretch.uses, stretch.end)
            for batch in plan_records(self.chain, plan):
                state.merge(batch)
                self._note(state, batch)
                self._passed(state, stretch.base)
        except (ChainError, ObjectMissing, StateMismatch) as error:
            self.out.problems.append(self._problem(stretch, state.lsn, error))
            return max(stretch.base.lsn, state.lsn - 1)
        return stretch.end

    def _problem(self, stretch: Stretch, lsn: int, error: EverstepError) -> Problem:
        key: DataKey = stretch.base
        if isinstance(error, StateMismatch) and lsn > stretch.base.lsn:
            key = next((use.key for use in stretch.uses if use.first <= lsn <= use.last), key)
        return Problem(inside(self.chain.run, key), error.message, HINT)

    def _note(self, state: ShardState, batch: pa.RecordBatch) -> None:
        if batch.column("digest")[0].as_py() is not None and self.exact:
            self.out.compared += 1
            self.logged = state.lsn

    def _passed(self, state: ShardState, start: BaseKey) -> None:
        """Compare the bases that lie where the replay is now, and keep the digests of the step that was asked for."""
        if state.lsn == self.at:
            self.tensors = state.state.tensor_digests()
        for base in self.part.bases:
            if base.lsn == state.lsn and base != start and self.exact:
                self._compare(state, base)

    def _compare(self, state: ShardState, base: BaseKey) -> None:
        stored = {n: tensor_digest(t) for n, t in from_batches(self.chain.read(base).batches).items()}
        replayed = state.state.tensor_digests()
        self.out.bases += 1
        wrong = sorted(name for name in {*stored, *replayed} if stored.get(name) != replayed.get(name))
        if wrong:
            what = f"is not the state that step {base.lsn} replays to: {len(wrong)} of {len(replayed)} tensors differ, "
            self.out.problems.append(Problem(inside(self.chain.run, base), f"{what}the first is {wrong[0]}", HINT))
