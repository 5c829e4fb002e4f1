"""The runs of a store: damaged ones are rows like the others, and break nothing."""

from __future__ import annotations

import pyarrow as pa

from everstep.storage.chain import Chain
from everstep.storage.collect import delete_run
from everstep.storage.fork import fork
from everstep.storage.keys import ManifestKey
from everstep.storage.memory import MemoryStore
from everstep.storage.runs import forks_of, list_runs

ROWS = [pa.record_batch({"value": pa.array([1], pa.int64())})]


def start(store: MemoryStore, run: str, upto: int = 4) -> Chain:
    chain = Chain.create(store, run, settings={}, shards=2, exactness="bitwise")
    for shard in range(2):
        chain.put_base(shard, 0, ROWS)
        chain.put_segment(shard, 1, upto, ROWS)
    return chain


def test_every_run_is_a_row_whatever_is_wrong_with_it() -> None:
    store = MemoryStore()
    start(store, "whole", 7)
    start(store, "b")
    data, when = store._objects[name := f"b/{ManifestKey(1).path}"]
    store._objects[name] = (data[:-20], when)
    start(store, "lost")
    store.delete(f"lost/{ManifestKey(1).path}")
    for key in start(store, "baseless").listing().bases(1):
        store.delete(f"baseless/{key.path}")
    Chain.create(store, "logless", settings={}, shards=0, exactness="close")
    store.put("notes/readme.txt", b"not a run")
    store.put("loose", b"not a run")

    rows = {row["run"]: row for row in list_runs(store)}
    assert list(rows) == ["b", "baseless", "logless", "lost", "whole"]
    whole = rows["whole"]
    assert (whole["state"], whole["generation"], whole["last_restorable"]) == ("open", 1, 7)
    assert (whole["exactness"], whole["origin"], whole["problem"]) == ("bitwise", None, None)
    assert whole["bytes"] == sum(i.size for i in store.list("whole/g")) and whole["created"].endswith("+00:00")
    assert rows["b"]["state"] == "damaged" and "checksum" in rows["b"]["problem"]
    assert rows["lost"]["state"] == "damaged" and "lost/g000001" in rows["lost"]["problem"]
    assert rows["baseless"]["state"] == "open" and "shard 1" in rows["baseless"]["problem"]
    assert (rows["logless"]["problem"], rows["logless"]["exactness"]) == (None, "close")


def test_forks_and_what_they_hold() -> None:
    store = MemoryStore()
    parent = start(store, "parent")
    fork(parent, 3, "child", settings={}, exactness="bitwise")
    assert [(held["run"], held["objects"]) for held in forks_of(parent)] == [("child", 4)]

    delete_run(parent)
    rows = {row["run"]: row for row in list_runs(store)}
    assert (rows["child"]["origin"], rows["child"]["last_restorable"]) == ("parent@3", 3)
    assert (rows["parent"]["state"], rows["parent"]["problem"]) == ("deleted", None)
