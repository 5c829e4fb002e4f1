"""A writer of generation 1 in a process of its own, which stops itself (SIGSTOP) at one named point.

    python -m tests.faults.writer URL RUN POINT KIND SHARD

It appends one step after the other to two shards and prints `ack LSN CRC CRC` for each step that is durable: all puts
done, and then a look that found no newer generation. Ends with `fenced` and code 3.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import pyarrow as pa

from everstep.core.errors import Fenced
from everstep.core.rng import fold
from everstep.storage.chain import Chain
from everstep.storage.keys import BaseKey, ManifestKey, SegmentKey, parse
from everstep.storage.store import Buffer, Pace, open_store

SHARDS = (0, 1)
STOP_AT = 6  # the step at which it stops; bases are due every third
BASES = 3
LAST = 12
KINDS = {SegmentKey: "segment", BaseKey: "base", ManifestKey: "manifest"}


def value(lsn: int, shard: int, generation: int) -> int:
    """What a step adds to a shard's state: other values for another generation, so that a mixture shows."""
    return fold(generation, lsn, shard) % (1 << 40)


def record(lsn: int, shard: int, generation: int) -> pa.RecordBatch:
    return pa.record_batch({"lsn": [lsn], "value": [value(lsn, shard, generation)]})


def state_batch(state: int) -> pa.RecordBatch:
    return pa.record_batch({"state": [state]})


def append(chain: Chain, shard: int, lsn: int) -> str:
    """Put one step of one shard; return the object's checksum."""
    chain.put_segment(shard, lsn, lsn, [record(lsn, shard, chain.manifest.generation)])
    return chain.tails()[shard][1]


def write_round(chain: Chain, lsn: int, states: dict[int, int]) -> None:
    keys = [chain.put_base(shard, lsn, [state_batch(state)]) for shard, state in states.items()]
    chain.name_bases([chain.proved(key) for key in keys])


class Stopper:
    """Stops this process the first time it passes the point."""

    def __init__(self, point: str, kind: str, shard: int) -> None:
        self.point, self.kind, self.shard = point, kind, shard
        self.lsn = 0

    def at(self, point: str, kind: str = "", shard: int = 0) -> None:
        if (point, kind, shard) == (self.point, self.kind, self.shard) and self.lsn == STOP_AT:
            os.kill(os.getpid(), signal.SIGSTOP)

    def put(self, point: str, name: str) -> None:
        key = parse(name.partition("/")[2])
        self.at(point, KINDS.get(type(key), "") if key else "", getattr(key, "shard", 0))


class Watched:
    """A store whose puts pass the points `before_put` and `after_put`."""

    def __init__(self, inner: Any, stopper: Stopper) -> None:
        self.inner, self.url, self.stopper = inner, inner.url, stopper

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        self.stopper.put("before_put", key)
        self.inner.put(key, data, pace=pace)
        self.stopper.put("after_put", key)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def write(chain: Chain, stopper: Stopper) -> None:
    states = dict.fromkeys(SHARDS, 0)
    for lsn in range(1, LAST + 1):
        stopper.lsn = lsn
        crcs = [append(chain, shard, lsn) for shard in SHARDS]
        states = {shard: state + value(lsn, shard, 1) for shard, state in states.items()}
        stopper.at("before_check")
        chain.check_tenure()
        stopper.at("after_check")
        print("ack", lsn, *crcs, flush=True)
        stopper.at("after_ack")
        if lsn % BASES == 0:
            write_round(chain, lsn, states)
            print("named", lsn, flush=True)
            stopper.at("after_naming")


def main(url: str, run: str, point: str, kind: str, shard: str) -> int:
    stopper = Stopper(point, kind, int(shard))
    store = open_store(url)
    if hasattr(store, "trace"):
        store.trace = stopper.put
    try:
        write(Chain.attach(Watched(store, stopper), run, 1), stopper)
    except Fenced:
        print("fenced", flush=True)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
