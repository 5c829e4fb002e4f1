"""Whole runs on a real S3 server, which is stopped, killed and brought back while they go on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from everstep.actors.run import Handle
from everstep.core import clock
from everstep.core.errors import StepNotKept, StoreError
from everstep.platform.settings import JobSettings
from everstep.training import inspect
from everstep.training.history import bodies
from tests.cluster import helpers
from tests.cluster.helpers import Done, References
from tests.seaweed import Seaweed

AWAY_S = 30.0
LONG = 100_000  # steps: these runs are asked to stop


def job(seaweed: Seaweed, name: str, config: str, **changes: Any) -> JobSettings:
    place = {"endpoint": seaweed.environment["AWS_ENDPOINT_URL"], "region": seaweed.environment["AWS_REGION"]}
    run = {"store": seaweed.url, **changes.pop("run", {})}
    return helpers.job("/nowhere", name, config, run=run, store=place, **changes)


def test_everything_dies_and_a_fresh_process_goes_on_from_s3(
    seaweed: Seaweed, references: References, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    settings = job(seaweed, "all", "char_lm")
    file = helpers.write_job(tmp_path / "job.toml", settings)
    killed = helpers.command("train", file, "--fault", "kill_everything@40", cwd=tmp_path)
    assert killed.code == -9
    answer = helpers.command("resume", f"{seaweed.url}/all", "--json", cwd=tmp_path)
    assert answer.code == 0, answer.err
    assert answer.json["digest"] == references.digest("char_lm")
    assert answer.json["durable_lsn"] == helpers.STEPS and answer.json["generation"] == 2
    (fault,) = answer.json["faults"]
    assert (fault["kind"], fault["tier"], fault["exactness"]) == ("kill_everything", "store", "bitwise")


@pytest.mark.parametrize("how", ["stopped", pytest.param("killed", marks=pytest.mark.soak)])
def test_training_goes_on_while_the_store_is_away_and_nothing_is_lost(
    seaweed: Seaweed, cluster: None, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = job(seaweed, f"away-{how}", "char_lm-topk", run={"steps": LONG})
    with helpers.launched(settings) as handle:
        helpers.wait(handle, until=20)
        before, during = _away(seaweed, handle, how)
        assert during["lsn"] > before["lsn"] + 100, (before, during)
        assert during["durable_lsn"] <= before["lsn"] and during["state"] == "running"
        _until(handle, lambda now: now["durable_lsn"] > during["lsn"])
        done = _stopped(handle, settings)
    with capsys.disabled():
        lag = during["lsn"] - during["durable_lsn"]
        print(f"\nstore {how} for {AWAY_S:g} s: steps {before['lsn']} -> {during['lsn']}, durable {lag} behind, then 0")
    assert any(line.startswith("the store refuses, training goes on") for line in done.lines), done.lines
    assert any(line.startswith("the store answers again after") for line in done.lines), done.lines
    assert done.summary["durable_lsn"] == done.summary["steps"] and not bodies(done.chain.events(), "gap-")
    checked = done.verify()
    assert checked["step"] == done.summary["steps"] and checked["digest"] == done.digest


def test_a_store_that_stays_away_stops_the_run_which_can_be_resumed(
    seaweed: Seaweed, cluster: None, references: References
) -> None:
    settings = job(seaweed, "lost", "char_lm", run={"steps": LONG}, checkpoint={"storage_timeout_s": 5.0})
    with helpers.launched(settings) as handle:
        now = helpers.wait(handle, until=20)
        seaweed.stop()
        try:
            ended = _until(handle, lambda now: now["state"] in helpers.ENDED)
            assert ended["state"] == "failed" and ended["lsn"] > now["lsn"]
            with pytest.raises(StoreError, match=r"store has refused to take records for .* s"):
                handle.summary()
        finally:
            seaweed.cont()
    again = job(seaweed, "lost", "char_lm", checkpoint={"storage_timeout_s": 5.0}, run={"steps": helpers.STEPS})
    assert helpers.run(again, resume="resume").digest == references.digest("char_lm")


def test_a_store_that_stays_away_leaves_a_gap_that_is_told(seaweed: Seaweed, cluster: None) -> None:
    check = {"storage_timeout_s": 5.0, "on_storage_loss": "continue"}
    settings = job(seaweed, "gap", "char_lm-topk", run={"steps": LONG}, checkpoint=check)
    with helpers.launched(settings) as handle:
        helpers.wait(handle, until=20)
        _, during = _away(seaweed, handle, "stopped", for_s=40.0)
        _until(handle, lambda now: now["durable_lsn"] > during["lsn"])
        done = _stopped(handle, settings)
    (gap,) = inspect.describe(done.chain)["gaps"]
    assert gap["first"] < gap["last"] <= done.summary["steps"]
    assert done.verify()["digest"] == done.digest
    with pytest.raises(StepNotKept, match=f"step {gap['last'] - 1} cannot be restored"):
        inspect.export(done.chain, done.recipe, gap["last"] - 1, "/nowhere")


def _away(seaweed: Seaweed, handle: Handle, how: str, for_s: float = AWAY_S) -> tuple[dict[str, Any], dict[str, Any]]:
    """Take the server away for a while; return the progress before, and at the end of it."""
    before = handle.progress()
    with _gone(seaweed, how):
        clock.sleep(for_s)
        return before, handle.progress()


@contextlib.contextmanager
def _gone(seaweed: Seaweed, how: str) -> Iterator[None]:
    (seaweed.stop if how == "stopped" else seaweed.kill)()
    try:
        yield
    finally:
        (seaweed.cont if how == "stopped" else seaweed.restart)()


def _until(handle: Handle, what: Any) -> dict[str, Any]:
    deadline = clock.monotonic() + helpers.RUN_S
    while not what(now := handle.progress()):
        assert clock.monotonic() < deadline, now
        assert now["state"] in ("running", "finishing", *helpers.ENDED), now
        clock.sleep(0.1)
    return now


def _stopped(handle: Handle, settings: JobSettings) -> Done:
    handle.stop()
    state = helpers.wait(handle)
    assert state["state"] == "stopped", state
    return Done(settings, handle.summary(), list(state["events"]))
