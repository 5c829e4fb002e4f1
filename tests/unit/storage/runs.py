"""Small runs for tests of collection, pins and forks: the state of a shard at lsn L is the numbers 1 to L."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
import pytest

from everstep.core import clock
from everstep.storage.chain import Chain
from everstep.storage.keys import DataKey
from everstep.storage.memory import MemoryStore
from everstep.storage.plan import RestorePlan, plan_restore
from everstep.storage.retention import Retention
from everstep.storage.store import Buffer, ObjectInfo, Pace, Store

SHARDS = 2
NOW_OLD = Retention(rounds=1, young_s=0.0, min_age_s=0.0)


def rows(*values: int) -> list[pa.RecordBatch]:
    return [pa.record_batch({"value": pa.array(values, pa.int64())})]


def train(chain: Chain, first: int, last: int, *, segment: int = 5, sign: int = 1) -> None:
    """Write the steps `first` to `last`."""
    for shard in range(SHARDS):
        for begin in range(first, last + 1, segment):
            end = min(begin + segment - 1, last)
            chain.put_segment(shard, begin, end, rows(*(sign * lsn for lsn in range(begin, end + 1))))


def merge(chain: Chain, lsn: int, *, name: bool = True, shards: Iterable[int] = range(SHARDS)) -> None:
    """Write a base of every shard."""
    keys = [chain.put_base(shard, lsn, rows(*range(1, lsn + 1))) for shard in shards]
    if name:
        chain.name_bases([chain.proved(key) for key in keys])


def start(store: Store, run: str = "r", upto: int = 0, every: int = 10, key_id: str = "") -> Chain:
    """Return a run of `upto` steps with a round every `every`."""
    chain = Chain.create(store, run, settings={"lr": 0.1}, shards=SHARDS, exactness="bitwise", key_id=key_id)
    merge(chain, 0)
    for first in range(1, upto + 1, every):
        train(chain, first, min(first + every - 1, upto))
        merge(chain, min(first + every - 1, upto))
    return chain


def state(chain: Chain, step: int | None = None) -> list[list[int]]:
    """Restore a step with what the store says now; by shard, the numbers."""
    reader = Chain.open(chain.store, chain.run)
    return carried_out(reader, plan_restore(reader.manifest, reader.listing(), target=step))


def carried_out(chain: Chain, plan: RestorePlan) -> list[list[int]]:
    found = []
    for part in plan.shards:
        numbers = values(chain, part.base)
        for use in part.segments:
            numbers += values(chain, use.key)[use.first - use.key.first : use.last - use.key.first + 1]
        found.append(numbers)
    return found


def values(chain: Chain, key: DataKey) -> list[int]:
    return [value for batch in chain.read(key).batches for value in batch.column(0).to_pylist()]


def keys_of(plan: RestorePlan) -> list[DataKey]:
    return [key for part in plan.shards for key in (part.base, *(use.key for use in part.segments))]


def expected(step: int) -> list[list[int]]:
    return [list(range(1, step + 1))] * SHARDS


def names(store: Store, prefix: str = "") -> list[str]:
    return [info.key for info in store.list(prefix)]


class Clock:
    """Stands still until it is moved."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1e9
        monkeypatch.setattr(clock, "wall", lambda: self.now)


class Recording(MemoryStore):
    """Notes every verb; calls `before` with each."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, str]] = []

    def _note(self, verb: str, key: str) -> None:
        self.calls.append((verb, key))

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        self._note("put", key)
        super().put(key, data)

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        self._note("list", prefix)
        return super().list(prefix, after)

    def delete(self, key: str) -> None:
        self._note("delete", key)
        super().delete(key)

    def sweep(self, older_than_s: float) -> int:
        self._note("sweep", str(older_than_s))
        return super().sweep(older_than_s)
