"""Groups that grow and shrink while they train: no step lost, every sample once, and the same bits where promised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from everstep.actors.environment import ray
from everstep.actors.run import Handle
from everstep.core import clock
from everstep.core.errors import RunFailed
from everstep.platform.settings import JobSettings
from everstep.training.blueprint import Blueprint
from everstep.training.restore import best_snapshot, read_residual, restore
from tests.cluster import helpers
from tests.cluster.helpers import RUN_S, Done, job, launched, run, wait

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]

GLOBAL, MICRO, SAMPLES = 24, 6, 600
LEDGER: dict[str, Any] = {
    "task": {"name": "tests.cluster.own_tasks:Ledger", "samples": SAMPLES, "seconds": 0.02},
    "batch": {"global_size": GLOBAL, "micro_shards": MICRO},
    "optimizer": {"name": "sgd", "lr": float(MICRO), "clip_norm": "none"},
}
NORMED: dict[str, Any] = {
    "run": {"determinism": "bitwise", "steps": 400},
    "task": {"name": "tests.cluster.own_tasks:Normed"},
    "batch": {"global_size": 32, "micro_shards": 8},
    "optimizer": {"name": "adamw", "lr": 3e-3},
}


def scale(handle: Handle, size: int) -> None:
    """Have the run train with so many workers, and wait until it does."""
    ray.get(handle._handler.scale.remote(size, size), timeout=30)
    deadline = clock.monotonic() + RUN_S
    while (state := handle.progress())["world_size"] != size or state["state"] != "running":
        assert state["state"] not in helpers.ENDED and clock.monotonic() < deadline, state
        clock.sleep(0.05)


def counts(done: Done, lsn: int | None = None) -> torch.Tensor:
    """Return how often each sample was consumed, in the history that the log holds, up to `lsn` or its end."""
    states, _, _ = restore(done.chain, Blueprint(done.recipe), target=lsn or done.summary["steps"])
    tensors = {name: tensor for state in states.values() for name, tensor in state.state.tensors().items()}
    return tensors["param/counts"]


def done_of(settings: JobSettings, summary: dict[str, Any]) -> Done:
    """Return a run that another process followed to its end."""
    return Done(settings, summary, [])


def assert_every_sample_once(done: Done) -> None:
    """Whole data epochs, each sample as often as there were epochs, and once more for those of the one under way."""
    found, consumed = counts(done), done.summary["steps"] * GLOBAL
    assert torch.equal(found, found.round())
    assert int(found.sum()) == consumed
    assert set(found.tolist()) <= {float(consumed // SAMPLES), float(-(-consumed // SAMPLES))}


@pytest.mark.parametrize("compression", ["none", pytest.param("topk", marks=pytest.mark.soak)])
def test_the_same_bits_at_any_world_size(tmp_path: Path, compression: str) -> None:
    """2 -> 3 -> 1 -> 4 workers, against one worker all the time."""
    chosen = {"compression": {"method": compression, "density": 0.2}}
    one = {"min": 1, "max": 1, "spares": 0}
    alone = run(job(tmp_path, "alone", NORMED | chosen, workers=one))
    slow = NORMED | chosen | {"task": NORMED["task"] | {"seconds": 0.02}}
    with launched(job(tmp_path, "many", slow, workers={"spares": 1})) as handle:
        wait(handle, until=5)
        for size in (3, 1, 4):
            scale(handle, size)
            wait(handle, until=handle.progress()["lsn"] + 5)
        state = wait(handle)
        many = Done(handle.settings, handle.summary(), list(state["events"]))
    assert many.summary["world_sizes"] == [2, 3, 1, 4]
    assert many.summary["exactness"] == "bitwise" and many.faults() == []
    assert not any("differed" in line for line in many.lines), "a newcomer did not come to the same state by itself"
    assert many.digest == alone.digest
    many.verify()


def test_a_lost_worker_is_gone_on_without_and_comes_back(tmp_path: Path) -> None:
    workers = {"min": 1, "max": 3, "start": 3, "spares": 0}
    kill = {"kind": "kill_worker", "step": 20, "rank": 1}
    slow = {"task": LEDGER["task"] | {"seconds": 0.05}}  # so that a newcomer is worth asking for
    done = run(job(tmp_path, "back", LEDGER | slow, [kill], run={"steps": 500}, workers=workers))
    assert done.summary["world_sizes"] == [3, 2, 3]
    assert done.summary["exactness"] == "close"  # determinism = "step": sums of other parts
    (fault,) = done.faults()
    assert fault["tier"] == "survivor" and fault["steps_lost"] == 0
    assert not any("differed" in line for line in done.lines)
    assert_every_sample_once(done)
    done.verify()


def test_what_a_leaving_worker_had_not_sent_is_sent_by_another(tmp_path: Path) -> None:
    """With residuals of their own, 3 -> 1 workers: every sample is in the counts or in the one residual."""
    compression = {"method": "topk", "density": 0.05, "residual": "survivor"}
    workers = {"min": 1, "max": 3, "start": 3, "spares": 0}
    settings = job(tmp_path, "heir", LEDGER, run={"steps": 100}, workers=workers, compression=compression)
    with launched(settings) as handle:
        wait(handle, until=20)
        scale(handle, 1)
        state = wait(handle)
        done = Done(settings, handle.summary(), list(state["events"]))
    assert done.summary["world_sizes"] == [3, 1] and done.summary["exactness"] == "close"
    snapshot = best_snapshot(done.chain, 100)
    assert snapshot is not None and snapshot.slices == 1 and snapshot.lsn > 60
    unsent = read_residual(done.chain, snapshot)[0].view(-1)
    seen = counts(done, snapshot.lsn) - MICRO * unsent  # what is to be added, less the gradient that is not yet
    assert seen.sum().item() == pytest.approx(snapshot.lsn * GLOBAL)
    every = snapshot.lsn * GLOBAL // SAMPLES
    assert float(seen.min()) == pytest.approx(every, abs=1e-3) and float(seen.max()) <= every + 1 + 1e-3
    done.verify()


def test_more_than_the_cluster_can_give_is_waited_for_and_then_told(tmp_path: Path) -> None:
    workers = {"cpus": 1000.0, "wait_timeout_s": 11.0, "spares": 0}
    with launched(job(tmp_path, "much", LEDGER, workers=workers)) as handle:
        state = wait(handle)
        with pytest.raises(
            RunFailed, match=r"waiting for 2 workers .* each asks for 1000 CPU; the cluster has"
        ) as found:
            handle.summary()
    assert "workers.wait_timeout_s = 11" in str(found.value) and "ray status" in found.value.hint
    assert any("waiting for 2 workers" in line for line in state["events"])  # told while it waited


def test_eight_workers(tmp_path: Path) -> None:
    eight = LEDGER | {
        "batch": {"global_size": GLOBAL, "micro_shards": 8},
        "optimizer": {**LEDGER["optimizer"], "lr": 8.0},
    }
    workers = {"min": 8, "max": 8, "spares": 0, "cpus": 0.5}
    done = run(job(tmp_path, "eight", eight, run={"steps": 40}, workers=workers))
    assert done.summary["world_sizes"] == [8]
    assert_every_sample_once(done)
