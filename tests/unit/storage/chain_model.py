"""What a run must hold, kept beside it: the token of every step. A shard's state at lsn L is its first L tokens."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import pyarrow as pa

from everstep.core.errors import StepNotKept
from everstep.storage.chain import Chain
from everstep.storage.keys import CompressorKey, DataKey
from everstep.storage.manifest import Base, Manifest
from everstep.storage.plan import RestorePlan, plan_restore, reachable
from everstep.storage.retention import Retention
from everstep.storage.store import Buffer, Pace, Store

SHARDS = 2


def rows(tokens: Iterable[int]) -> list[pa.RecordBatch]:
    return [pa.record_batch([pa.array(tokens, pa.int64())], ["token"])]


def tokens_of(chain: Chain, key: DataKey) -> list[int]:
    return [token for batch in chain.read(key).batches for token in batch.column(0).to_pylist()]


def restored(chain: Chain, plan: RestorePlan) -> list[list[int]]:
    """Carry a plan out; by shard, the tokens."""
    states = []
    for part in plan.shards:
        state = tokens_of(chain, part.base)
        for use in part.segments:
            assert use.first == len(state) + 1
            state += tokens_of(chain, use.key)[use.first - use.key.first : use.last - use.key.first + 1]
        states.append(state)
    return states


def keys_of(plan: RestorePlan) -> list[DataKey]:
    return [key for part in plan.shards for key in (part.base, *(use.key for use in part.segments))]


@dataclass
class Zombie:
    """A fenced writer that does not know it, and what it believes in."""

    chain: Chain
    tokens: list[list[int]]


@dataclass
class RunModel:
    """One run.

    Attributes:
        writer: the process that trains; None when it was fenced or deleted.
        tokens: by shard, of every step that the writer put, acknowledged or not.
        acked: by shard, how many were acknowledged: stored, and no newer generation seen after that.
        holes: by shard, lsns without a record (the store was lost for a while; bases bridge it).
        dead: steps that need not be restorable any more.
    """

    name: str
    writer: Chain | None
    tokens: list[list[int]] = field(default_factory=lambda: [[] for _ in range(SHARDS)])
    acked: list[int] = field(default_factory=lambda: [0] * SHARDS)
    holes: list[set[int]] = field(default_factory=lambda: [set() for _ in range(SHARDS)])
    dead: set[int] = field(default_factory=set)
    zombies: list[Zombie] = field(default_factory=list)
    deleted: bool = False
    haunted: bool = False  # a process may have gone on writing after the run was deleted; what it left is a known limit
    busy: bool = False  # the writer is stopped inside an operation

    def end(self) -> int:
        return min(self.acked)

    def dismiss(self) -> None:
        """The writer was fenced. What it goes on putting may still lie before the next cut, so it shares the tokens."""
        if self.writer is not None:
            self.zombies.append(Zombie(self.writer, self.tokens))
        self.writer = None

    def adopt(self, manifest: Manifest, *, common: bool, at: int | None) -> None:
        """A new generation begins where its lineage says; nothing acknowledged may be missing."""
        generation = manifest.generation
        cuts = {span.shard: span.first - 1 for span in manifest.lineage if span.generation == generation}
        for shard, cut in cuts.items():
            least = min(self.acked) if common else self.acked[shard]
            assert cut >= (least if at is None else min(least, at)), f"{self.name}: acknowledged steps were cut off"
            assert cut <= (len(self.tokens[shard]) if at is None else max(at, 0)), "cut behind what was ever written"
        self.dismiss()
        self.tokens = [tokens[: cuts[shard]] for shard, tokens in enumerate(self.tokens)]
        for shard, cut in cuts.items():
            self.acked[shard] = cut
            self.holes[shard] = {lsn for lsn in self.holes[shard] if lsn <= cut}
        self.dead = {step for step in self.dead if step < self.end()}

    def collected(self, before: Manifest, keep: Retention) -> None:
        """A collection dropped objects: all may be gone but what the promise names."""
        rounds: dict[int, dict[int, Base]] = {}
        for base in before.bases:
            rounds.setdefault(base.round, {})[base.shard] = base
        whole = [number for number, found in sorted(rounds.items()) if self._whole(list(found.values()))]
        if not whole:
            return
        high = {number: max(base.lsn for base in rounds[number].values()) for number in whole}
        floor = whole[-keep.rounds :][0]
        for_ever: list[int] = []
        for number in whole[: whole.index(floor)]:
            if keep.every and (not for_ever or number >= for_ever[-1] + keep.every):
                for_ever.append(number)
        self.dead |= set(range(high[floor])) - {high[number] for number in for_ever}

    def _whole(self, bases: list[Base]) -> bool:
        high = max(base.lsn for base in bases)
        return len(bases) == SHARDS and all(
            high <= len(self.tokens[base.shard]) and not any(base.lsn < lsn <= high for lsn in self.holes[base.shard])
            for base in bases
        )

    def forked(self, name: str, step: int, chain: Chain) -> RunModel:
        """Return the model of a fork; steps before its bases are the parent's."""
        first = max(base.lsn for base in chain.manifest.bases)
        return RunModel(
            name, chain, [tokens[:step] for tokens in self.tokens], [step] * SHARDS,
            [{lsn for lsn in holes if lsn <= step} for holes in self.holes], set(range(first)),
        )  # fmt: skip

    def check(self, store: Store) -> None:
        """Whoever opens the run now finds all that was acknowledged."""
        reader = Chain.open(store, self.name)
        listing = reader.listing()
        for shard in range(SHARDS):
            reached = reachable(reader.manifest, listing, shard)
            assert self.acked[shard] <= reached <= len(self.tokens[shard]), f"{self.name}: shard {shard} at {reached}"
        assert listing.strays == ()
        there = set(listing.compressor())
        for snapshot in reader.manifest.compressor:
            for number in range(snapshot.slices):
                assert CompressorKey(snapshot.generation, snapshot.lsn, number, snapshot.run) in there

    def check_step(self, store: Store, step: int) -> None:
        """A step is restored to its tokens; only a dead one may be refused, and only with an error that says so."""
        reader = Chain.open(store, self.name)
        try:
            plan = plan_restore(reader.manifest, reader.listing(), target=step)
        except StepNotKept:
            assert step in self.dead or step > self.end(), f"{self.name}: step {step} is gone"
            return
        assert restored(reader, plan) == [tokens[:step] for tokens in self.tokens]

    def check_all(self, store: Store) -> None:
        """Steps that are kept, the first, the last and some between, have a plan."""
        reader = Chain.open(store, self.name)
        listing = reader.listing()
        kept = sorted(set(range(self.end() + 1)) - self.dead)
        for step in {kept[0], *kept[:: 1 + len(kept) // 6], kept[-1]}:
            plan_restore(reader.manifest, listing, target=step)


class Observed:
    """The store that all processes share; `manifests` are the highest that were ever written, by run."""

    def __init__(self, inner: Store) -> None:
        self.inner, self.url = inner, inner.url
        self.manifests: dict[str, Manifest] = {}
        self.changed: list[tuple[Manifest, Manifest]] = []

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        self.inner.put(key, data)
        run, _, path = key.partition("/")
        if path.startswith("manifest/"):
            manifest = Manifest.from_json(bytes(data))
            before = self.manifests.get(run)
            if before is None or manifest.version > before.version:
                self.manifests[run] = manifest
                if before is not None:
                    self.on_manifest(before, manifest)

    def on_manifest(self, before: Manifest, after: Manifest) -> None:
        """Called with every two that follow each other; replaced by the machine."""

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes | bytearray:
        return self.inner.get(key, start, length)

    def list(self, prefix: str, after: str = "") -> list:  # type: ignore[type-arg]
        return self.inner.list(prefix, after)

    def tops(self) -> tuple[str, ...]:
        return self.inner.tops()

    def delete(self, key: str) -> None:
        self.inner.delete(key)

    def sweep(self, older_than_s: float) -> int:
        return self.inner.sweep(older_than_s)


class Ids:
    """Stands in for the module uuid, so that one seed gives one history."""

    def __init__(self) -> None:
        self._count = itertools.count()

    def uuid4(self) -> Ids:
        return self

    @property
    def hex(self) -> str:
        return f"{next(self._count):012x}"
