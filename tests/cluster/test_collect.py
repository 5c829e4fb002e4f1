"""A run collects its own garbage as it goes, and loses nothing by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.core.errors import StepNotKept
from everstep.storage.plan import plan_restore
from tests.cluster import helpers


def test_old_rounds_and_their_segments_go_while_training_goes_on(cluster: None, tmp_path: Path) -> None:
    keep = {"keep_rounds": 2, "keep_hours": 0.0, "gc_age_s": 0.0, "base_interval": 20, "max_lag_s": 0.5, "tuner": "off"}
    fault = {"kind": "kill_worker", "step": 300, "rank": 1}
    settings = helpers.job(tmp_path, "tidy", "char_lm-topk", [fault], run={"steps": 600}, checkpoint=keep)
    done = helpers.run(settings)
    chain = done.chain
    manifest, listing = chain.manifest, chain.listing()
    assert any(line.startswith("collected ") for line in done.lines), done.lines
    first = manifest.kept[-1].first
    assert 100 < first < 600
    assert min(base.lsn for base in listing.bases()) == first - 1
    assert {base.key for base in manifest.bases} <= set(listing.bases())
    with pytest.raises(StepNotKept):
        plan_restore(manifest, listing, target=50)
    checked = done.verify()
    assert (checked["step"], checked["digest"]) == (600, done.digest)
