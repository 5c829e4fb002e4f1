"""Ray, the actors and the driver die together; `everstep resume` goes on from what the store holds."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.cluster.helpers import STEPS, Answer, Command, References, job, write_job

LAST = 41  # the step under way when everything dies


def killed_at(config: str, folder: Path) -> None:
    """Train in a process of its own until the fault kills it and all that it started."""
    name = write_job(folder / "job.toml", job(folder / "runs", "dead", config))
    words = ("train", name, "--fault", f"kill_everything@{LAST}:at=after_exchange", "--json")
    with Command(*words, cwd=folder) as train:
        assert train.answer().code == -9
        assert train.left() == []


def resumed(store: Path, *more: str) -> Answer:
    words = ("resume", "dead", "--store", f"file:{store}", *more, "--json")
    with Command(*words, cwd=store.parent) as resume:
        answer = resume.answer()
        assert answer.code == 0, answer.err
        assert resume.left() == []
    assert (answer.json["steps"], answer.json["durable_lsn"]) == (STEPS, STEPS)
    return answer


def lost(answer: Answer) -> tuple[int, int]:
    """Return (steps lost, the step that the log reached), as reported in the account and in words."""
    (row,) = answer.json["faults"]
    assert (row["kind"], row["tier"]) == ("kill_everything", "store")
    said = next(line for line in answer.err.splitlines() if "the log reaches step" in line)
    return row["steps_lost"], int(said.rsplit(" ", 1)[1])


@pytest.mark.soak
def test_without_compression_a_resume_is_bitwise(references: References, tmp_path: Path) -> None:
    killed_at("char_lm", tmp_path)
    answer = resumed(tmp_path / "runs")

    assert answer.json["digest"] == references.digest("char_lm")
    assert answer.json["exactness"] == "bitwise"
    steps_lost, reached = lost(answer)
    assert reached > 0
    assert steps_lost == LAST - 1 - reached


def test_with_a_residual_exact_is_bitwise_and_plain_is_warm(references: References, tmp_path: Path) -> None:
    killed_at("char_lm-topk", tmp_path)
    shutil.copytree(tmp_path / "runs", tmp_path / "copy")

    exact = resumed(tmp_path / "runs", "--exact")
    assert exact.json["digest"] == references.digest("char_lm-topk")
    assert exact.json["exactness"] == "bitwise"
    steps_lost, reached = lost(exact)
    assert steps_lost == LAST - 1 - reached

    plain = resumed(tmp_path / "copy")
    assert plain.json["exactness"] == "warm"
    assert plain.json["faults"][0]["exactness"] == "warm"
    assert "(warm)" in plain.err
    assert plain.json["loss_last"] < plain.json["loss_first"]
    assert lost(plain) == (steps_lost, reached)


@pytest.fixture(autouse=True)
def _nobody_lends_us_a_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kill_everything` kills only a cluster that the command started itself."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
