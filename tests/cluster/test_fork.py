"""Forking a run and going back in one: the same bits where nothing was changed, another way where something was."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from everstep import cli
from everstep.actors.spec import store_of
from everstep.core.errors import SettingsError, UserError
from everstep.platform.settings import from_dict
from everstep.storage.chain import Chain
from everstep.storage.plan import counting
from everstep.training.record import lsn_of, rows
from tests.cluster.helpers import STEPS, Done, References, job, run

MIDDLE = 33


@pytest.fixture(scope="module")
def store(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("forks")


@pytest.fixture(scope="module")
def parent(store: Path) -> Done:
    return run(job(store, "parent", "char_lm"))


def asked(*words: str) -> dict[str, Any]:
    return cli.ask(*words, "--json")


def resumed(done: Done, name: str, how: str = "resume") -> Done:
    """Go on with a run of the same store as its manifest says."""
    stored = from_dict(Chain.open(store_of(done.settings), name).manifest.settings)
    return run(stored, how)


def columns(done: Done, name: str) -> dict[int, Any]:
    """A column of the step's own records by lsn, along the run's history."""
    found = {}
    for use in counting(done.chain.manifest, done.chain.listing(), 0)[1]:
        for record in (record for batch in done.chain.read(use.key).batches for record in rows(batch)):
            if use.first <= lsn_of(record) <= use.last:
                found[lsn_of(record)] = record.column(name)[0].as_py()
    return found


def test_an_unchanged_fork_ends_as_its_parent_and_outlives_it(parent: Done, store: Path) -> None:
    where = ("--store", parent.settings.run.store)
    told = asked("fork", f"parent@{MIDDLE}", "child", *where)
    assert (told["step"], told["origin"], told["residual"]) == (MIDDLE, f"parent@{MIDDLE}", "none")
    faster = asked("fork", f"parent@{MIDDLE}", "faster", *where, "--set", "optimizer.lr=1e-2")
    assert faster["step"] == MIDDLE
    with pytest.raises(SettingsError, match="parameters and buffers"):
        asked("fork", f"parent@{MIDDLE}", "wider", *where, "--set", "task.size=1m")

    child = resumed(parent, "child")
    assert child.digest == parent.digest and child.summary["exactness"] == "bitwise"
    assert child.verify()["equal"]
    assert asked("chain", "ls", "child", *where)["origin"] == f"parent@{MIDDLE}"

    removed = asked("runs", "rm", "parent", *where)
    assert {fork["run"] for fork in removed["stays_for_forks"]} >= {"faster"}
    other = resumed(parent, "faster")
    assert other.digest != parent.digest and other.verify()["equal"]
    assert {lr for lsn, lr in columns(other, "lr").items() if lsn > MIDDLE} == {1e-2}
    rows = {row["run"]: row["state"] for row in asked("runs", "ls", *where)["runs"]}
    assert (rows["child"], rows["faster"]) == ("closed", "closed")


def copied(references: References, config: str, store: Path) -> Done:
    """A finished run in a store of its own."""
    done = references.run(config)
    name = done.settings.run.name or ""
    shutil.copytree(references.store / name, store / name)
    return Done(job(store, name, config), done.summary, [])


def test_a_fork_at_a_snapshot_of_the_residual_is_exact(references: References, tmp_path: Path) -> None:
    parent = copied(references, "char_lm-topk", tmp_path)
    told = asked("fork", f"{parent.settings.run.name}@30", "child", "--store", str(tmp_path))
    assert told["residual"] == "snapshot" and told["next"].endswith("--exact")
    child = resumed(parent, "child", "exact")
    assert child.digest == parent.digest
    assert child.summary["exactness"] == "bitwise" and child.verify()["equal"]


def test_going_back_and_the_same_way_again_ends_the_same(references: References, tmp_path: Path) -> None:
    first = copied(references, "digits", tmp_path)
    name = first.settings.run.name or ""
    again = asked("resume", f"{name}@30", "--store", str(tmp_path))

    assert (again["digest"], again["generation"], again["steps"]) == (first.digest, 2, STEPS)
    seen = [[(body["lsn"], body["loss"]) for body in of["evaluations"]] for of in (first.summary, again)]
    assert seen[0] == seen[1]
    assert [body["generation"] for body in again["evaluations"]] == [1, 2, 2]
    assert first.verify()["equal"]


def test_going_back_past_a_spike_leaves_batches_out(references: References, tmp_path: Path) -> None:
    first = copied(references, "digits", tmp_path)
    name = first.settings.run.name or ""
    where = (name, "--store", str(tmp_path))
    with pytest.raises(UserError, match="after which step"):
        asked("resume", *where, "--skip-batches", "3")
    other = asked("resume", f"{name}@25", *where[1:], "--skip-batches", "3")

    assert other["digest"] != first.digest
    size = first.settings.batch.global_size
    assert columns(first, "samples") == {lsn: size * (lsn if lsn <= 25 else lsn + 3) for lsn in range(1, STEPS + 1)}
    assert {body["lsn"]: body["generation"] for body in other["evaluations"]} == {20: 1, 40: 2, 60: 2}
    abandoned = {body["loss"] for body in first.summary["evaluations"] if body["lsn"] > 25}
    assert not abandoned & {body["loss"] for body in other["evaluations"]}

    held = asked("chain", "ls", *where)
    assert [(r["generation"], r["step"], r["skipped_batches"]) for r in held["rewinds"]] == [(2, 25, 3)]
    assert held["best"] == min(other["evaluations"], key=lambda body: body["loss"])
    best = asked("chain", "export", *where, "--step", "best", "--out", str(tmp_path / "out"))
    assert best["step"] == held["best"]["lsn"]
    assert asked("chain", "verify", *where, "--drill")["drill"]["digest"] == other["digest"]
