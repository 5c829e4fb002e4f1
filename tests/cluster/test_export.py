"""Any step of a run can be taken out of its log, and is the very state that a run of so many steps ends with."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from everstep import cli
from everstep.core.errors import StepNotKept
from everstep.platform.settings import changed_for_resume
from tests.cluster.helpers import STEPS, Done, References, job, run

LONG, WANTED = 100, 77


@pytest.fixture(scope="module")
def longer(references: References, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """The reference run, finished, then gone on with up to step 100; in a copy of its store."""
    first = references.run("char_lm")
    store = tmp_path_factory.mktemp("longer") / "runs"
    shutil.copytree(references.store, store)
    moved = job(store, first.settings.run.name or "", "char_lm")
    return run(changed_for_resume(moved, [f"run.steps={LONG}"]), "resume")


@pytest.fixture(scope="module")
def shorter(cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Done:
    """A run of 77 steps, made in one go."""
    return run(job(tmp_path_factory.mktemp("shorter"), "shorter", "char_lm", run={"steps": WANTED}))


def exported(done: Done, out: Path, *more: str) -> dict[str, Any]:
    return cli.ask("chain", "export", done.settings.run.name or "", "--store", done.settings.run.store, "--out",
                   str(out), "--json", *more)  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Whether two nested states are the same bit for bit."""
    if isinstance(a, torch.Tensor):
        bits = (torch.int32, torch.int64)[a.element_size() == 8]
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(bits), b.view(bits))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def test_export_of_a_step_is_the_end_of_a_run_of_so_many(longer: Done, shorter: Done, tmp_path: Path) -> None:
    middle, end = exported(longer, tmp_path / "a", "--step", str(WANTED)), exported(shorter, tmp_path / "b")

    assert middle["step"] == end["step"] == WANTED
    assert middle["digest"] == end["digest"] == shorter.digest
    assert same(load_file(middle["safetensors"]), load_file(end["safetensors"]))
    states = [torch.load(found["state_dict"], weights_only=True) for found in (middle, end)]
    assert states[0]["lsn"] == WANTED
    assert states[0]["optimizer"]["state"]
    assert same(*states)


def test_a_finished_run_goes_on_as_if_it_had_been_longer(longer: Done, shorter: Done) -> None:
    """Its step 77, seventeen steps after it was resumed, is that of a run which never stopped."""
    assert longer.summary["steps"] == longer.summary["durable_lsn"] == LONG
    assert longer.summary["generation"] == 2
    assert longer.summary["exactness"] == "bitwise"
    assert longer.verify()["digest"] == longer.digest


def test_export_of_steps_that_are_not_there(shorter: Done, tmp_path: Path) -> None:
    with pytest.raises(StepNotKept, match="78"):
        exported(shorter, tmp_path, "--step", "78")
    with pytest.raises(StepNotKept, match="no evaluation"):
        exported(shorter, tmp_path, "--step", "best")
    assert list(tmp_path.iterdir()) == []


def test_export_of_the_best_step(references: References, tmp_path: Path) -> None:
    done = references.run("digits")
    found = exported(done, tmp_path, "--step", "best")

    evaluations = done.summary["evaluations"]
    assert [body["lsn"] for body in evaluations] == [20, 40, 60]
    assert found["step"] == min(evaluations, key=lambda body: body["loss"])["lsn"] == done.summary["best"]["lsn"]


def test_chain_ls_and_verify(references: References) -> None:
    done = references.run("char_lm-topk")
    where = (done.settings.run.name or "", "--store", done.settings.run.store, "--json")
    held, replay = cli.ask("chain", "ls", *where), cli.ask("chain", "verify", *where)

    assert (held["state"], held["generation"], held["exactness"]) == ("closed", 1, "bitwise")
    assert (held["last_restorable"], held["highest_seen"], held["damage"]) == (STEPS, STEPS, None)
    assert held["bytes_logged"] == done.summary["bytes_logged"] > 0
    assert held["bytes_bases"] == done.summary["bytes_bases"] > 0
    assert held["compressor_snapshots"] == [15, 30, 45, 60]
    assert {0, 25} <= set(held["bases"]) and len(held["rounds"]) >= 2  # each shard has its own turn
    assert held["strays"] == []
    assert replay["digest"] == replay["live_digest"] == done.digest
    assert (replay["step"], replay["replayed_steps"], replay["equal"]) == (STEPS, STEPS, True)
