"""Today's code reads what every older version wrote."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.core.errors import StateMismatch, StoreRefused
from everstep.storage.chain import Chain
from everstep.storage.encrypted import VARIABLE
from everstep.storage.folder import FolderStore
from everstep.storage.manifest import FORMAT, Manifest
from everstep.storage.objects import FORMAT_VERSION
from everstep.storage.plan import plan_restore
from everstep.training.blueprint import Blueprint
from everstep.training.inspect import describe
from everstep.training.restore import best_snapshot, plan_records, read_residual, restore
from everstep.training.verify import verify
from tests.faults.history import SLICES, recipe
from tests.golden.make_golden import CUT, PLAIN, SEALED, STEPS, key_loaded, machine
from tests.unit.training.worlds import whole_digest

HERE = Path(__file__).parent
FOLDERS = sorted(path.name for path in HERE.iterdir() if (path / "expected.json").exists())
RUNS = [(folder, run) for folder in FOLDERS for run in (PLAIN, SEALED) if (HERE / folder / "store" / run).exists()]
ROUNDS = (0, 8)
FORMATS = {"v1": (1, 1), "v2": (2, 1), "v3": (2, 2)}  # of manifests and of objects


class Golden:
    """A copy of one golden run, and what is expected of it."""

    def __init__(self, folder: str, run: str, copy: Path) -> None:
        shutil.copytree(HERE / folder / "store" / run, copy / run)
        self.format, self.object_format = FORMATS[folder]
        self.expected: dict[str, Any] = json.loads((HERE / folder / "expected.json").read_text(encoding="utf-8"))
        self.store = FolderStore(str(copy))
        self.chain = Chain.open(self.store, run)
        self.blueprint = Blueprint(recipe())

    def digest(self, lsn: int) -> str:
        return str(self.expected["digests"][str(lsn)])

    def replayed(self, **more: Any) -> tuple[str, int]:
        """Restore; skip where this machine may round differently and does."""
        try:
            states, plan, damage = restore(self.chain, self.blueprint, **more)
        except StateMismatch as error:
            if machine() == self.expected["machine"]:
                raise
            pytest.skip(f"made on {self.expected['machine']}, this is {machine()}: {error.message}")
        assert not damage
        return whole_digest(list(states.values())), plan.target


@pytest.fixture(params=RUNS, ids=["-".join(pair) for pair in RUNS])
def golden(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Golden]:
    with key_loaded():
        yield Golden(*request.param, tmp_path)


def test_there_is_a_run_of_every_format_up_to_todays() -> None:
    assert FOLDERS == sorted(FORMATS) and FORMATS[FOLDERS[-1]] == (FORMAT, FORMAT_VERSION)


def test_the_structure_is_read(golden: Golden) -> None:
    manifest, listing = golden.chain.manifest, golden.chain.listing()
    assert (manifest.generation, manifest.state, manifest.shards, manifest.exactness) == (
        2,
        "closed",
        (0, 1, 2),
        "bitwise",
    )
    assert [(s.generation, s.first, s.last) for s in manifest.lineage if s.shard == 1] == [
        (1, 1, CUT),
        (2, CUT + 1, None),
    ]
    assert manifest.settings == {"seed": 3} and manifest.format == FORMAT
    assert manifest.closing is not None and manifest.closing["last_lsn"] == STEPS
    assert manifest.closing["digest"] == golden.digest(STEPS)
    assert len(listing.segments()) == 3 * 6 + 1 and len(listing.bases()) == 6 and not listing.strays
    named = [(base.round, base.shard, base.lsn) for base in manifest.bases]
    assert sorted(named) == ([(r, s, ROUNDS[r]) for r in (0, 1) for s in (0, 1, 2)] if golden.format > 1 else [])
    for base in manifest.bases:
        assert golden.chain.read(base.key).crc == base.crc32c
    found = describe(golden.chain)
    assert (found["last_restorable"], found["damage"], found["compressor_snapshots"]) == (STEPS, None, [4])
    assert found["best"]["loss"] == golden.expected["losses"][str(found["best"]["lsn"])]


def test_every_manifest_is_read(golden: Golden) -> None:
    listing = golden.chain.listing()
    states = []
    for version in listing.versions():
        name = f"{golden.chain.run}/manifest/{version:020d}.json"
        raw = golden.store.get(name)
        assert json.loads(raw)["format"] == golden.format
        manifest = Manifest.from_json(raw, where=name)
        assert manifest.version == version and manifest.oldest == 1 and manifest.kept[0].first == 1
        assert Manifest.from_json(manifest.to_json()) == manifest  # what today's code makes of it is whole
        states.append(manifest.state)
    assert states.count("claim") == 1 and states[-1] == "closed"


def test_every_record_is_read(golden: Golden) -> None:
    plan = plan_restore(golden.chain.manifest, golden.chain.listing(), exclude=_later(golden))
    losses, digests = {}, {shard.shard: 0 for shard in plan.shards}
    for shard in plan.shards:
        for batch in plan_records(golden.chain, shard):
            row = batch.to_pylist()[0]
            digests[shard.shard] += row["digest"] is not None
            if shard.shard == 0:
                losses[str(row["lsn"])] = row["loss"]
    assert losses == golden.expected["losses"] and set(digests.values()) == {STEPS}


def test_bases_hold_the_digests_that_were_live(golden: Golden) -> None:
    for lsn in ROUNDS:  # nothing to replay, so the same bits on every machine
        states, plan, _ = restore(golden.chain, golden.blueprint, target=lsn)
        assert {part.base.lsn for part in plan.shards} == {lsn} and not any(part.segments for part in plan.shards)
        assert whole_digest(list(states.values())) == golden.digest(lsn)


def test_every_step_replays_to_the_digest_that_was_live(golden: Golden) -> None:
    for lsn in range(STEPS + 1):
        assert golden.replayed(target=lsn) == (golden.digest(lsn), lsn)
    assert golden.replayed() == (golden.digest(STEPS), STEPS)
    assert golden.replayed(exclude=_later(golden)) == (golden.digest(STEPS), STEPS)


def test_verify_passes(golden: Golden) -> None:
    golden.replayed(exclude=_later(golden))
    found = verify(golden.store, golden.chain.run, lambda settings: recipe(), drill=True)
    assert not found["problems"]
    assert (found["step"], found["equal"], found["digest"]) == (STEPS, True, golden.digest(STEPS))


def test_the_residual_is_read(golden: Golden) -> None:
    snapshot = best_snapshot(golden.chain, STEPS)
    assert snapshot is not None and (snapshot.generation, snapshot.lsn, snapshot.slices) == (1, 4, SLICES)
    parts = read_residual(golden.chain, snapshot)
    assert sum(part.numel() for part in parts.values()) == golden.blueprint.layout.size
    assert all(bool(part.abs().sum() > 0) for part in parts.values())


def test_an_old_run_can_be_continued(golden: Golden) -> None:
    chain = Chain.take_over(golden.store, golden.chain.run, cut="common")
    manifest = json.loads(golden.store.get(f"{chain.run}/manifest/{chain.manifest.version:020d}.json"))
    assert manifest["format"] == FORMAT and chain.manifest.generation == 3
    golden.chain = chain
    assert golden.replayed() == (golden.digest(STEPS), STEPS)


def test_without_its_key_the_twin_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(StoreRefused, match="this run is encrypted"):
        Golden("v2", SEALED, tmp_path)


def _later(golden: Golden) -> frozenset[Any]:
    return frozenset(base for base in golden.chain.listing().bases() if base.lsn > 0)
