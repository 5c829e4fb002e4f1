"""A run lived at random against a dictionary of what each step's state must be."""

from __future__ import annotations

from dataclasses import dataclass

import hypothesis.strategies as st
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from everstep.core.errors import Fenced, StepNotKept, StoreError
from everstep.storage.chain import Chain
from everstep.storage.keys import DataKey
from everstep.storage.memory import MemoryStore
from everstep.storage.plan import plan_restore, reachable
from everstep.storage.store import Buffer, Pace

SHARDS = 3
shard_ids = st.integers(0, SHARDS - 1)


class Fragile(MemoryStore):
    """Dies on demand: before the next put takes effect, or after it and before the answer."""

    dies: str | None = None

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        when, self.dies = self.dies, None
        if when != "before":
            super().put(key, data)
        if when:
            raise StoreError("the process died")


@dataclass
class Writer:
    """A chain and, by shard, the token of every step it believes in; the state at lsn L is the first L tokens."""

    chain: Chain
    tokens: list[list[int]]


class ChainMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = Fragile()
        self.next_token = 0
        self.zombies: list[Writer] = []

    @initialize()
    def create(self) -> None:
        chain = Chain.create(self.store, "r", settings={}, shards=SHARDS, exactness="bitwise")
        self.writer = Writer(chain, [[] for _ in range(SHARDS)])
        for shard in range(SHARDS):
            self._base(self.writer, shard, 0)

    def _rows(self, tokens: list[int]) -> list[pa.RecordBatch]:
        return [pa.record_batch({"token": pa.array(tokens, pa.int64())})]

    def _base(self, writer: Writer, shard: int, lsn: int) -> None:
        writer.chain.put_base(shard, lsn, self._rows(writer.tokens[shard][:lsn]))

    def _segment(self, writer: Writer, shard: int, steps: int) -> None:
        fresh = list(range(self.next_token, self.next_token + steps))
        self.next_token += steps
        first = len(writer.tokens[shard]) + 1
        writer.tokens[shard] += fresh
        try:
            writer.chain.put_segment(shard, first, first + steps - 1, self._rows(fresh))
        except StoreError:
            generation = writer.chain.manifest.generation
            stored = writer.chain.listing().segments(shard)
            if not any((key.generation, key.first) == (generation, first) for key in stored):
                del writer.tokens[shard][first - 1 :]
            raise

    @rule(shard=shard_ids, steps=st.integers(1, 4))
    def append(self, shard: int, steps: int) -> None:
        self._segment(self.writer, shard, steps)
        self.writer.chain.check_tenure()

    @rule(shard=shard_ids, back=st.integers(0, 5))
    def base(self, shard: int, back: int) -> None:
        generation = self.writer.chain.manifest.generation
        spans = [span for span in self.writer.chain.manifest.lineage if span.shard == shard]
        start = next(span.first for span in spans if span.generation == generation) - 1
        self._base(self.writer, shard, max(start, len(self.writer.tokens[shard]) - back))

    @rule(
        cut=st.sampled_from(["common", "each"]), at=st.one_of(st.none(), st.integers(0, 12)), claims=st.integers(0, 1)
    )
    def take_over(self, cut: str, at: int | None, claims: int) -> None:
        for _ in range(claims):  # a takeover that died after its claim
            Chain.open(self.store, "r").fence()
        self.zombies.append(Writer(self.writer.chain, [list(tokens) for tokens in self.writer.tokens]))
        chain = Chain.take_over(self.store, "r", cut=cut, at=at)  # type: ignore[arg-type]
        if cut == "common":
            end = min(len(tokens) for tokens in self.writer.tokens)
            end = end if at is None else min(end, at)
            for tokens in self.writer.tokens:
                del tokens[end:]
        self.writer = Writer(chain, self.writer.tokens)

    @precondition(lambda self: self.zombies)
    @rule(data=st.data(), shard=shard_ids, steps=st.integers(1, 4), what=st.sampled_from(["segment", "base"]))
    def zombie_write(self, data: st.DataObject, shard: int, steps: int, what: str) -> None:
        zombie = data.draw(st.sampled_from(self.zombies))
        try:
            if what == "segment":
                self._segment(zombie, shard, steps)
            else:
                self._base(zombie, shard, len(zombie.tokens[shard]))
        except Fenced:
            del zombie.tokens[shard][-steps:]
        with pytest.raises(Fenced):
            zombie.chain.check_tenure()
        with pytest.raises(Fenced):
            zombie.chain.update()

    @rule(shard=shard_ids, steps=st.integers(1, 4), when=st.sampled_from(["before", "after"]))
    def crash(self, shard: int, steps: int, when: str) -> None:
        self.store.dies = when
        with pytest.raises(StoreError):
            self._segment(self.writer, shard, steps)
        generation = self.writer.chain.manifest.generation
        self.writer = Writer(Chain.attach(self.store, "r", generation), self.writer.tokens)

    @rule(step=st.integers(0, 20))
    def restore(self, step: int) -> None:
        reader = Chain.open(self.store, "r")
        end = min(len(tokens) for tokens in self.writer.tokens)
        if step > end:
            with pytest.raises(StepNotKept):
                plan_restore(reader.manifest, reader.listing(), target=step)
            step = end
        plan = plan_restore(reader.manifest, reader.listing(), target=step)
        for part in plan.shards:
            state = self._tokens(reader, part.base)
            for use in part.segments:
                rows = self._tokens(reader, use.key)
                assert use.first == len(state) + 1
                state += rows[use.first - use.key.first : use.last - use.key.first + 1]
            assert state == self.writer.tokens[part.shard][:step]

    def _tokens(self, reader: Chain, key: DataKey) -> list[int]:
        return [token for batch in reader.read(key).batches for token in batch.column(0).to_pylist()]

    @invariant()
    def every_shard_reaches_what_was_acknowledged(self) -> None:
        reader = Chain.open(self.store, "r")
        listing = reader.listing()
        reached = [reachable(reader.manifest, listing, shard) for shard in range(SHARDS)]
        assert reached == [len(tokens) for tokens in self.writer.tokens]
        plan = plan_restore(reader.manifest, listing)
        assert (plan.target, plan.highest) == (min(reached), max(reached))
        assert listing.strays == ()


TestChain = ChainMachine.TestCase
TestChain.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
