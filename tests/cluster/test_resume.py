"""Going on with a run, and jobs that differ in what must not matter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from everstep import cli
from everstep.core.errors import SettingsError
from everstep.platform.settings import load, to_dict
from tests.cluster.helpers import ROOT, Done, References, job, run

OWN = ROOT / "examples" / "own_task.toml"


def own(store: Path, name: str, **batch: Any) -> Done:
    data = to_dict(load(OWN))
    data["run"].pop("name")
    return run(job(store, name, {k: data[k] for k in ("task", "optimizer", "eval")},
                   run={"steps": 50}, batch={**data["batch"], **batch}))  # fmt: skip


def test_a_task_of_ones_own_whatever_loads_its_data(cluster: None, tmp_path: Path) -> None:
    alone, loaders = own(tmp_path, "alone"), own(tmp_path, "loaders", loader_workers=2)

    assert alone.summary["loss_last"] < alone.summary["loss_first"] / 2
    assert alone.summary["best"]["accuracy"] > 0.8
    assert loaders.digest == alone.digest
    assert loaders.summary["evaluations"] == alone.summary["evaluations"]


def test_resume_refuses_what_needs_a_fork(references: References) -> None:
    done = references.run("char_lm")
    words = ("resume", done.settings.run.name or "", "--store", done.settings.run.store)
    with pytest.raises(SettingsError, match=r"optimizer\.lr cannot change on resume; that needs a fork"):
        cli.ask(*words, "--set", "optimizer.lr=0.1")
    with pytest.raises(SettingsError, match=r"checkpoint\.shards cannot change"):
        cli.ask(*words, "--set", "checkpoint.shards=3")
    assert done.chain.manifest.generation == 1


def test_init_from_the_export_of_another_run(references: References, tmp_path: Path) -> None:
    source = references.run("char_lm")
    found = cli.ask("chain", "export", source.settings.run.name or "", "--store", source.settings.run.store,
                    "--out", str(tmp_path))  # fmt: skip
    done = run(job(tmp_path, "second", "char_lm", task={"init_from": found["safetensors"]}, run={"steps": 3}))

    assert done.summary["loss_first"] < source.summary["loss_first"] - 0.8
    assert abs(done.summary["loss_first"] - source.summary["loss_last"]) < 0.8
