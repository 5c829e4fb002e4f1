"""Every fault, alone and in company, heals to the bits of the run that nobody disturbed."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from everstep.training import inspect
from tests.cluster.helpers import POINTS, STEPS, References, job, run

ALONE: list[tuple[str, dict[str, Any], set[str]]] = [
    ("char_lm", {"kind": "kill_worker", "step": 30, "rank": 1}, {"survivor"}),
    ("char_lm-topk", {"kind": "stop_worker", "step": 30, "rank": 1}, {"survivor"}),
    ("char_lm-topk", {"kind": "kill_checkpointer", "step": 30}, {"store"}),
    ("char_lm-topk", {"kind": "kill_workers", "step": 30}, {"replica", "store"}),
    ("char_lm", {"kind": "kill_fault_handler", "step": 30}, {"survivor"}),
]  # configuration, fault, tiers it may be healed from


@pytest.mark.parametrize(("config", "fault", "tiers"), ALONE, ids=[fault["kind"] for _, fault, _ in ALONE])
def test_one_fault(config: str, fault: dict[str, Any], tiers: set[str], references: References, tmp_path: Path) -> None:
    special = {"kill_worker": {"spares": 1}, "stop_worker": {"hang_timeout_s": 3.0}}
    done = run(job(tmp_path, "alone", config, [fault], workers=special.get(fault["kind"], {})))

    assert done.digest == references.digest(config)
    assert done.summary["exactness"] == "bitwise"
    assert done.summary["durable_lsn"] == done.summary["complete_lsn"] == STEPS
    (row,) = done.faults()
    assert (row["kind"], row["step"], row["exactness"]) == (fault["kind"], 30, "bitwise")
    assert row["tier"] in tiers
    window = done.settings.checkpoint.window
    assert 0 <= row["steps_lost"] <= (window if fault["kind"] == "kill_workers" else 0)
    if fault["kind"] == "kill_fault_handler":  # workers go on meanwhile, perhaps to the end
        assert row["seconds_to_next_step"] is None or row["seconds_to_next_step"] > 0
    else:
        assert row["seconds_to_next_step"] > 0
    assert [fault["kind"]] == [stored["kind"] for stored in inspect.describe(done.chain)["faults"]]
    assert done.verify()["digest"] == done.digest


def test_workers_are_killed_at_each_point(references: References, tmp_path: Path) -> None:
    """Each point, and both ranks; `test_abort` raises at every point in every rank."""
    faults = [
        {"kind": "kill_worker", "step": 10 * number, "at": point, "rank": number % 2}
        for number, point in enumerate(POINTS, start=1)
    ]
    done = run(job(tmp_path, "points", "char_lm-topk", faults))

    assert done.digest == references.digest("char_lm-topk")
    assert done.summary["exactness"] == "bitwise"
    assert {(body["at"], body["rank"]) for body in done.firings()} == {(f["at"], f["rank"]) for f in faults}
    assert {row["kind"] for row in done.faults()} == {"kill_worker"}
    assert {row["tier"] for row in done.faults()} == {"survivor"}
    assert {row["steps_lost"] for row in done.faults()} == {0}
    assert done.verify()["equal"]


@pytest.mark.parametrize("config", [pytest.param("digits", marks=pytest.mark.soak), "digits-topk"])
def test_digits_with_everything_in_one_run(config: str, references: References, tmp_path: Path) -> None:
    """BatchNorm has buffers, which take a second collective, and dropout draws random numbers in every step."""
    kills = [  # where the second collective is; `test_abort` raises everywhere
        {"kind": "kill_worker", "step": 10, "at": "after_exchange", "rank": 0},
        {"kind": "kill_worker", "step": 20, "at": "before_commit", "rank": 1},
    ]
    # The checkpoint actor comes late: lost together with all workers it would be a loss of everything.
    others: list[dict[str, Any]] = [
        {"kind": "raise_in_worker", "step": 30, "at": "after_exchange", "rank": 1},
        {"kind": "kill_workers", "step": 35, "at": "after_commit"},
        {"kind": "stop_worker", "step": 40, "at": "after_exchange", "rank": 0},
        {"kind": "kill_checkpointer", "step": 45},
        {"kind": "kill_fault_handler", "step": 52},
    ]
    done = run(job(tmp_path, "all", config, [*kills, *others], workers={"hang_timeout_s": 4.0}))

    assert done.digest == references.digest(config)
    assert done.summary["exactness"] == "bitwise"
    fired = {(body["kind"], body["step"]) for body in done.firings()}
    assert fired == {(fault["kind"], fault["step"]) for fault in [*kills, *others]}
    assert all(row["steps_lost"] == 0 for row in done.faults() if row["kind"] != "kill_workers")
    assert done.verify()["equal"]
    assert [body["lsn"] for body in done.summary["evaluations"]] == [20, 40, 60]
    assert done.summary["evaluations"] == references.run(config).summary["evaluations"]


def test_loss_falls(references: References) -> None:
    for config in ("char_lm", "char_lm-topk"):
        summary = references.run(config).summary
        assert summary["loss_last"] < summary["loss_first"] - 0.8, config


@pytest.mark.soak
def test_survivor_residuals_keep_their_bits_while_no_worker_dies(references: References, tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"kind": "raise_in_worker", "step": 20, "at": "before_commit", "rank": 1},
        {"kind": "kill_checkpointer", "step": 40},
    ]
    done = run(job(tmp_path, "survivor", "char_lm-survivor", faults))

    assert done.digest == references.digest("char_lm-survivor")
    assert done.summary["exactness"] == "bitwise"
    assert len(done.firings()) == 2


def test_a_dead_worker_takes_its_survivor_residual_along(tmp_path: Path) -> None:
    fault = {"kind": "kill_worker", "step": 30, "rank": 1}
    done = run(job(tmp_path, "survivor", "char_lm-survivor", [fault]))

    assert done.summary["steps"] == STEPS
    assert math.isfinite(done.summary["loss_last"])
    assert done.summary["loss_last"] < done.summary["loss_first"]
    (row,) = done.faults()
    assert (row["kind"], row["tier"], row["exactness"]) == ("kill_worker", "survivor", "warm")
    assert done.summary["exactness"] == "warm"
    assert done.verify()["equal"]  # the log is of this history, whatever the undisturbed one would have been


def test_two_checkpoint_actors(references: References, tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"kind": "kill_checkpointer", "step": 20, "rank": 1},
        {"kind": "kill_worker", "step": 40, "rank": 0, "at": "after_send"},
    ]
    done = run(job(tmp_path, "two", "char_lm-topk", faults, checkpoint={"actors": 2}))

    assert done.digest == references.digest("char_lm-topk")
    assert [(row["kind"], row["steps_lost"]) for row in done.faults()] == [
        ("kill_checkpointer", 0),
        ("kill_worker", 0),
    ]
    assert done.verify()["equal"]


def test_without_a_log_a_worker_can_still_be_replaced(references: References, tmp_path: Path) -> None:
    fault = {"kind": "kill_worker", "step": 30, "rank": 0}
    done = run(job(tmp_path, "unlogged", "char_lm", [fault], checkpoint={"actors": 0}))

    assert done.digest == references.digest("char_lm")
    assert (done.summary["bytes_logged"], done.summary["durable_lsn"]) == (0, 0)
    (row,) = done.faults()
    assert (row["kind"], row["tier"], row["steps_lost"]) == ("kill_worker", "survivor", 0)
