"""A step that is aborted anywhere leaves no trace: raise at every point in every rank, one abort a step."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tests.cluster.helpers import POINTS, References, job, run


@pytest.mark.parametrize("config", ["char_lm-topk", "digits"])
def test_a_step_aborted_anywhere_leaves_no_trace(config: str, references: References, tmp_path: Path) -> None:
    """While one rank raises, the other is where it happens to be: a step ahead, behind, or inside a collective.

    `digits` has a second collective, for its buffers, and passes `after_exchange` twice; its faults fire at the first.
    """
    places = list(itertools.product(POINTS, (0, 1)))
    faults = [
        {"kind": "raise_in_worker", "step": 4 * number, "at": point, "rank": rank}
        for number, (point, rank) in enumerate(places, start=1)
    ]
    done = run(job(tmp_path, "aborts", config, faults))

    assert done.digest == references.digest(config)
    assert done.summary["exactness"] == "bitwise"
    assert {(body["at"], body["rank"]) for body in done.firings()} == set(places)
    assert {row["kind"] for row in done.faults()} == {"raise_in_worker"}
    assert {row["steps_lost"] for row in done.faults()} == {0}
    assert done.verify()["equal"]
