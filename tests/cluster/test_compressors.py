"""Every compressor in a whole run: it learns, its log replays, and the faults that its promise covers change no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.cluster.helpers import CHAR_LM, job, run

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]
WIDE: dict[str, Any] = {
    "task": {"name": "tests.cluster.own_tasks:Wide"},
    "batch": {"global_size": 8, "micro_shards": 4},
    "optimizer": {"name": "adamw", "lr": 1e-3, "clip_norm": 1.0},
}


@pytest.mark.parametrize(
    ("method", "residual"),
    [
        ("int8", "replicated"),
        pytest.param("int4", "survivor", marks=pytest.mark.soak),
        ("topk+int8", "survivor"),
        pytest.param("randk", "none", marks=pytest.mark.soak),
        ("powersgd", "survivor"),
    ],
)
def test_a_run_with_each(method: str, residual: str, tmp_path: Path) -> None:
    compression = {"method": method, "residual": residual, "density": 0.05}
    kills = [{"kind": "kill_checkpointer", "step": 15}, {"kind": "kill_worker", "step": 20, "rank": 1}]
    settings = job(tmp_path, "each", CHAR_LM, kills, run={"steps": 30}, compression=compression)
    done = run(settings)

    assert done.summary["loss_last"] < done.summary["loss_first"]
    assert done.summary["exactness"] == ("warm" if residual == "survivor" else "bitwise")
    assert done.verify()["equal"]
    if residual != "survivor":
        calm = run(job(tmp_path, "calm", CHAR_LM, run={"steps": 30}, compression=compression))
        assert done.digest == calm.digest


def test_auto_measures_once_and_keeps_to_it(tmp_path: Path) -> None:
    compression = {"method": "auto", "residual": "survivor", "density": 0.05}
    kill = [{"kind": "kill_worker", "step": 10, "rank": 0}]
    done = run(job(tmp_path, "auto", CHAR_LM, kill, run={"steps": 20}, compression=compression))

    (measured,) = done.chain.events("compression-auto").values()
    assert measured["pays"] == (measured["compressed_s"] < 0.9 * measured["dense_s"])
    said = [line for line in done.lines if line.startswith("compression is ")]
    assert said == [said[0]] and ("is on" in said[0]) == measured["pays"]
    assert done.verify()["equal"]


def test_a_dense_gradient_in_stretches_is_logged_while_backward_runs(tmp_path: Path) -> None:
    faults: list[dict[str, Any]] = [
        {"kind": "kill_worker", "step": 6, "at": "before_exchange", "rank": 1},
        {"kind": "raise_in_worker", "step": 9, "at": "after_exchange", "rank": 0},
        {"kind": "kill_checkpointer", "step": 12},
        {"kind": "kill_worker", "step": 15, "at": "before_commit", "rank": 0},
        {"kind": "kill_workers", "step": 18, "at": "after_commit"},
    ]
    more: dict[str, Any] = {"run": {"steps": 24, "digest_every": 4}, "checkpoint": {"shards": 3}}
    calm = run(job(tmp_path, "calm", WIDE, **more))
    whole = run(job(tmp_path, "whole", WIDE, **more, compression={"overlap": False}))
    done = run(job(tmp_path, "struck", WIDE, faults, **more))

    assert calm.digest == whole.digest == done.digest  # of two workers' sums, the order is the same
    assert len(done.firings()) == 6 and done.verify()["equal"] and calm.verify()["equal"]
