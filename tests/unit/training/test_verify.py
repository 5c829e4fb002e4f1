"""Proving a stored run: each thing that can be wrong is broken alone, and named; and all of them are found at once."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
import torch

from everstep.core.errors import ChainError, UnknownName
from everstep.storage.chain import Chain
from everstep.storage.collect import collect
from everstep.storage.fork import fork
from everstep.storage.keys import BaseKey, CompressorKey, DataKey, ManifestKey, SegmentKey
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.memory import MemoryStore
from everstep.storage.objects import crc_of, encode
from everstep.storage.retention import Retention
from everstep.training.shard_state import from_batches, to_batches
from everstep.training.verify import as_error, verify
from tests.unit.training.test_restore import STEPS, Stored
from tests.unit.training.worlds import toy_recipe


class Finished(Stored):
    """A run that has ended as runs do: bases named, a compressor snapshot, closed with its digest and its tails."""

    def __init__(self) -> None:
        super().__init__(toy_recipe(norm=True, shards=2, digest_every=2), owned=True)
        self.chain.name_bases([self.chain.proved(key) for key in self.chain.listing().bases()])
        for number in (0, 1):
            self.chain.put_compressor(4, number, to_batches({"residual": torch.ones(3)}), {})
        self.chain.update(compressor=(CompressorSnapshot(1, 4, 2),))
        self.chain.add_event("eval-000000000003-g000001", {"lsn": 3, "generation": 1, "loss": 0.5})
        tails = {str(shard): crc for shard, (_, crc) in self.chain.tails().items()}
        closing = {"last_lsn": STEPS, "digest": self.digests[STEPS], "tails": tails}
        self.chain.update(state="closed", closing=closing)
        self.chain.add_event(f"summary-{self.chain.manifest.version:06d}", {"steps": STEPS})

    def verify(self, run: str = "r", **options: Any) -> dict[str, Any]:
        return verify(self.store, run, lambda _: self.recipe, **options)

    def problems(self) -> list[tuple[str, str]]:
        return [(row["object"], row["what"]) for row in self.verify()["problems"]]

    def only(self, name: str, *parts: str) -> None:
        """Check that one thing is wrong: the object of this name, with these words in what is said of it."""
        found = self.problems()
        assert [where for where, _ in found] == [name], found
        assert all(part in found[0][1] for part in parts), found

    def key(self, kind: type[DataKey], shard: int, lsn: int) -> Any:
        """The object of a shard that begins (or lies) at an lsn."""
        keys = [key for key, _ in self.chain.listing().objects if isinstance(key, kind)]
        return next(k for k in keys if getattr(k, "shard", shard) == shard and lsn in vars(k).values())

    def swap(self, key: DataKey, batches: Sequence[pa.RecordBatch]) -> None:
        """Put another intact object in the place of one."""
        header = self.chain.read(key).header
        self.write(f"r/{key.path}", bytes(memoryview(encode(header, batches))))

    def name_as_it_is(self, key: BaseKey) -> None:
        """Have the manifest name a base with the checksum that it has now."""
        data = self.store.get(f"r/{key.path}")
        known = self.chain.manifest.bases
        self.chain.update(
            bases=tuple(replace(b, crc32c=crc_of(data), size=len(data)) if b.key == key else b for b in known)
        )

    def write(self, name: str, data: bytes) -> None:
        self.store._objects[name] = (data, self.store._objects[name][1])

    def flip(self, name: str) -> None:
        data = bytearray(self.store.get(name))
        data[len(data) // 2] ^= 1
        self.write(name, bytes(data))

    def slower(self, lsn: int) -> SegmentKey:
        """Change a segment of the step's own shard in a way that no replay notices."""
        key: SegmentKey = self.key(SegmentKey, 0, lsn)
        batches = self.chain.read(key).batches
        at = batches[0].schema.get_field_index("seconds")
        self.swap(key, [batch.set_column(at, batch.schema.field(at), pa.array([9.0])) for batch in batches])
        return key


@pytest.fixture
def run() -> Finished:
    return Finished()


def test_a_whole_run_is_proved_and_left_as_it_was(run: Finished) -> None:
    before = dict(run.store._objects)
    found = run.verify()
    assert found["problems"] == [] and as_error("r", found) is None
    assert (found["step"], found["digest"], found["equal"]) == (STEPS, run.digests[STEPS], True)
    assert found["live_digest"] == run.digests[STEPS] and found["replayed_steps"] == STEPS
    assert found["objects_checked"] == len(before) and found["manifests"] == len(run.chain.listing().versions())
    assert found["digests_compared"] == 3 * (STEPS // 2) and found["bases_compared"] == 2 * 3
    assert found["replayed"] == [{"first": 1, "last": STEPS, "shards": 3}]
    assert run.store._objects == before
    json.dumps(found)


def test_nothing_is_collected_under_it(run: Finished) -> None:
    seen = []

    class Watching(MemoryStore):
        def get(self, key: str, start: int = 0, length: int | None = None) -> bytes:
            if key.startswith("r/g"):
                seen.append(len(self.list("r/pins/")))
            return super().get(key, start, length)

    store = Watching()
    store._objects = run.store._objects
    assert verify(store, "r", lambda _: run.recipe)["problems"] == []
    assert set(seen) == {1} and not store.list("r/pins/")


def test_a_run_that_is_not_there(run: Finished) -> None:
    with pytest.raises(UnknownName, match="known: r"):
        run.verify("s")


# --- one thing is wrong


@pytest.mark.parametrize(("kind", "shard", "lsn"), [(SegmentKey, 1, 4), (BaseKey, 2, 6), (BaseKey, 1, 0)])
def test_a_damaged_object(run: Finished, kind: type[Any], shard: int, lsn: int) -> None:
    key = run.damage(kind, shard, lsn)
    run.only(f"r/{key.path}", "checksum")


def test_a_damaged_slice_of_a_snapshot(run: Finished) -> None:
    name = f"r/{CompressorKey(1, 4, 1).path}"
    run.flip(name)
    run.only(name, "checksum")


def test_a_missing_slice_of_a_snapshot(run: Finished) -> None:
    name = f"r/{CompressorKey(1, 4, 0).path}"
    run.store.delete(name)
    run.only(name, "missing", "one of 2 slices", "snapshot at 4")


@pytest.mark.parametrize("version", [1, 2])
def test_a_damaged_manifest(run: Finished, version: int) -> None:
    name = f"r/{ManifestKey(version).path}"
    run.flip(name)
    run.only(name, "damaged")


def test_the_highest_manifest_is_damaged(run: Finished) -> None:
    name = f"r/{ManifestKey(run.chain.manifest.version).path}"
    run.flip(name)
    found = run.problems()  # what the one below says is still proved
    assert found[0][0] == name and "damaged" in found[0][1]
    assert run.verify()["digest"] == run.digests[STEPS]


def test_a_hole_in_the_manifests(run: Finished) -> None:
    name = f"r/{ManifestKey(2).path}"
    run.store.delete(name)
    run.only(name, "missing", "no hole")


def test_the_highest_manifest_is_missing(run: Finished) -> None:
    name = f"r/{ManifestKey(run.chain.manifest.version).path}"
    run.store.delete(name)
    run.only(name, "missing", "event summary-")


def test_a_generation_that_no_manifest_knows(run: Finished) -> None:
    run.chain.add_event("eval-000000000009-g000002", {"lsn": 9, "generation": 2, "loss": 0.1})
    run.only(f"r/{ManifestKey(run.chain.manifest.version + 1).path}", "missing", "generation 2")
    run.store.delete("r/events/eval-000000000009-g000002.json")
    run.store.put("r/g000003/log/s0000/000000000001-000000000002.arrow", run.store.get("r/" + run.slower(1).path))
    assert any("g000003" in what and "generation 1" in what for _, what in run.problems())


def test_a_damaged_event(run: Finished) -> None:
    name = "r/events/eval-000000000003-g000001.json"
    run.write(name, run.store.get(name).replace(b"0.5", b"0.4"))
    run.only(name, "checksum")
    run.write(name, b"{")
    run.only(name, "JSON")


def test_an_event_of_the_first_runs_has_no_checksum(run: Finished) -> None:
    run.store.put("r/events/eval-000000000001.json", b'{"write_id": "x", "body": {"lsn": 1, "loss": 2.0}}')
    assert run.problems() == []


def test_a_damaged_pin(run: Finished) -> None:
    fork(run.chain, 5, "f", settings={}, exactness="bitwise")
    name = run.store.list("r/pins/")[0].key
    run.write(name, b"[]")
    run.only(name, "JSON with the objects")


def test_a_named_base_is_missing(run: Finished) -> None:
    name = f"r/{run.key(BaseKey, 2, 6).path}"
    run.store.delete(name)
    run.only(name, "missing", "manifest")


def test_another_intact_object_in_the_place_of_a_named_base(run: Finished) -> None:
    key = run.key(BaseKey, 1, 3)
    stored = run.chain.read(key)
    run.swap(key, to_batches(dict(reversed(from_batches(stored.batches).items()))))  # the same state, other bytes
    run.only(f"r/{key.path}", stored.crc, "manifest")


def test_another_intact_segment_in_the_middle(run: Finished) -> None:
    run.slower(4)
    follower = run.key(SegmentKey, 0, 7)
    run.only(f"r/{follower.path}", "follows a segment", run.chain.read(follower).header.parent)


def test_another_intact_segment_at_the_end(run: Finished) -> None:
    tail = run.chain.tails()[0][1]
    run.only(f"r/{run.slower(7).path}", "shard 0", "the run ended with", tail)


def test_a_missing_segment_that_a_base_bridges(run: Finished) -> None:
    run.store.delete(f"r/{run.key(SegmentKey, 2, 4).path}")
    run.only("r/shard 2", "4 to 6", "got none")
    assert run.verify()["digest"] == run.digests[STEPS]


def test_a_missing_tail(run: Finished) -> None:
    run.store.delete(f"r/{run.key(SegmentKey, 1, 7).path}")
    run.only("r/shard 1", "7 to 9")
    found = run.verify()
    assert (found["step"], found["equal"], found["digest"]) == (6, None, run.digests[6])


def test_no_base_at_all(run: Finished) -> None:
    for key in run.chain.listing().bases(1):
        run.store.delete(f"r/{key.path}")
    found = run.problems()
    assert ("r/shard 1", "no base at lsn 0 to 9, a range that the run keeps") in found and len(found) == 1 + 3


def test_a_gap_that_the_run_declared_is_none(run: Finished) -> None:
    run.store.delete(f"r/{run.key(SegmentKey, 2, 4).path}")
    run.chain.add_event("gap-000000000006", {"first": 4, "last": 6, "reason": "the store refused for too long"})
    found = run.verify()
    assert found["problems"] == [] and found["equal"] is True and [gap["last"] for gap in found["gaps"]] == [6]


def test_gaps_that_follow_each_other_are_one_and_others_do_not_count(run: Finished) -> None:
    run.store.delete(f"r/{run.key(SegmentKey, 2, 4).path}")
    run.chain.add_event("gap-000000000004", {"first": 2, "last": 4, "reason": "the store refused for too long"})
    run.only("r/shard 2", "4 to 6")
    run.chain.add_event("gap-000000000009", {"first": 7, "last": 9, "reason": "the store refused for too long"})
    run.only("r/shard 2", "4 to 6")
    run.chain.add_event("gap-000000000006", {"first": 5, "last": 6, "reason": "the store refused for too long"})
    assert run.problems() == []


def test_a_base_that_is_not_what_the_log_replays_to(run: Finished) -> None:
    key = run.key(BaseKey, 2, 3)
    tensors = from_batches(run.chain.read(key).batches)
    name = next(name for name in tensors if name.startswith("optimizer/"))
    tensors[name] = tensors[name] + 1
    run.swap(key, to_batches(tensors))
    run.name_as_it_is(key)
    run.only(f"r/{key.path}", "not the state that step 3 replays to", name)


def test_a_replay_that_does_not_lead_to_the_logged_digest(run: Finished) -> None:
    key = run.key(BaseKey, 1, 0)
    tensors = from_batches(run.chain.read(key).batches)
    run.swap(key, to_batches({name: t + 1 for name, t in tensors.items()}))
    run.name_as_it_is(key)
    run.only(f"r/{run.key(SegmentKey, 1, 1).path}", "step 2 replays to")
    assert run.verify()["equal"] is True  # from the next base on


def test_another_end_than_the_live_one(run: Finished) -> None:
    run.chain.update(closing={**(run.chain.manifest.closing or {}), "digest": run.digests[STEPS - 1]})
    run.only(f"r/step {STEPS}", run.digests[STEPS][:12], run.digests[STEPS - 1][:12])
    assert run.verify()["equal"] is False


# --- everything is


def test_all_problems_are_found_at_once_and_told_in_one_error(run: Finished) -> None:
    broken = [run.damage(SegmentKey, 1, 4), run.damage(BaseKey, 2, 3), run.damage(SegmentKey, 0, 1)]
    run.store.delete(f"r/{run.key(SegmentKey, 2, 4).path}")
    run.store.delete(f"r/{ManifestKey(2).path}")
    run.flip("r/events/eval-000000000003-g000001.json")
    run.store.delete(f"r/{CompressorKey(1, 4, 0).path}")
    found = run.verify()
    names = [f"r/{key.path}" for key in broken] + ["r/shard 2", f"r/{ManifestKey(2).path}"]
    names += ["r/events/eval-000000000003-g000001.json", f"r/{CompressorKey(1, 4, 0).path}"]
    assert sorted(row["object"] for row in found["problems"]) == sorted(names)
    assert (found["step"], found["digest"]) == (STEPS, run.digests[STEPS])  # the newest bases are whole
    error = as_error("r", found)
    assert isinstance(error, ChainError) and error.facts["problems"] == found["problems"]
    assert "7 problems" in error.message and error.hint
    assert all(error.message.count(name) == 1 for name in names if name != "r/shard 2")


def test_a_run_none_of_whose_manifests_can_be_read(run: Finished) -> None:
    for version in run.chain.listing().versions():
        run.flip(f"r/{ManifestKey(version).path}")
    found = run.verify()
    assert len(found["problems"]) == len(run.chain.listing().versions()) and found["digest"] is None
    assert as_error("r", found) is not None


# --- other runs


def test_an_unfinished_run_is_proved_up_to_where_all_shards_are() -> None:
    stored = Stored(toy_recipe(norm=True, shards=2))
    gone = next(key for key in stored.chain.listing().segments(1) if key.first == 7)
    stored.store.delete(f"r/{gone.path}")
    found = verify(stored.store, "r", lambda _: stored.recipe)
    assert (found["problems"], found["step"], found["digest"]) == ([], 6, stored.digests[6])
    assert (found["live_digest"], found["equal"], found["highest_seen"]) == (None, None, STEPS)


def test_a_run_that_was_collected(run: Finished) -> None:
    done = collect(run.chain, Retention(rounds=1, young_s=0.0, min_age_s=0.0))
    assert done.deleted
    found = run.verify()
    assert found["problems"] == [] and found["digest"] == run.digests[STEPS]
    assert found["replayed"][0]["first"] > 1


def test_a_fork_is_proved_with_what_it_uses_of_its_parent(run: Finished) -> None:
    fork(run.chain, 5, "f", settings={}, exactness="bitwise")
    found = run.verify("f")
    assert (found["problems"], found["step"], found["digest"]) == ([], 5, run.digests[5])
    run.damage(SegmentKey, 1, 7)  # behind the fork
    assert run.verify("f")["problems"] == []
    key = run.damage(SegmentKey, 1, 4)
    assert [row["object"] for row in run.verify("f")["problems"]] == [f"r/{key.path}"]


def test_a_run_without_a_log() -> None:
    store = MemoryStore()
    Chain.create(store, "r", settings={}, shards=0, exactness="bitwise")
    found = verify(store, "r", lambda _: toy_recipe())
    assert (found["problems"], found["step"], found["digest"]) == ([], None, None)


# --- the drill


def test_the_drill_restores_the_newest_state_as_a_recovery_would(run: Finished) -> None:
    drill = run.verify(drill=True)["drill"]
    assert (drill["step"], drill["digest"], drill["equal"]) == (STEPS, run.digests[STEPS], True)
    assert drill["replayed_steps"] == 3 and drill["last_logged_digest"] == 8
    assert drill["load_seconds"] > 0 and drill["replay_seconds"] >= 0
    assert drill["load_seconds"] + drill["replay_seconds"] == pytest.approx(drill["seconds"], abs=1e-3)


def test_the_drill_works_around_damage_and_says_so(run: Finished) -> None:
    key = run.damage(BaseKey, 1, 6)
    found = run.verify(drill=True)
    assert found["drill"]["damaged_objects_left_out"] == [f"r/{key.path}"] and found["drill"]["equal"] is True


def test_the_drill_fails_where_a_recovery_would(run: Finished) -> None:
    run.store.delete(f"r/{run.key(SegmentKey, 1, 7).path}")
    found = run.verify(drill=True)
    assert found["drill"]["equal"] is False
    assert any("cannot be restored" in row["what"] and "missing tail" in row["what"] for row in found["problems"])


def test_the_drill_of_an_unfinished_run_is_compared_with_the_replay() -> None:
    stored = Stored(toy_recipe(norm=True, shards=2))
    drill = verify(stored.store, "r", lambda _: stored.recipe, drill=True)["drill"]
    assert (drill["compared_with"], drill["equal"]) == ("the replay of everything", True)
