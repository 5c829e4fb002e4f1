"""A run that cannot be gone on with says so, and ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from everstep.core.errors import ChainError, SettingsError
from tests.cluster import helpers


def test_a_log_whose_bases_are_all_damaged_ends_the_resume_with_the_reason(cluster: None, tmp_path: Path) -> None:
    done = helpers.run(helpers.job(tmp_path, "hurt", "char_lm", run={"steps": 20}))
    for base in tmp_path.glob("hurt/g*/base/*/*.arrow"):
        data = bytearray(base.read_bytes())
        data[len(data) // 2] ^= 255
        base.write_bytes(data)
    again = helpers.job(tmp_path, "hurt", "char_lm", run={"steps": 40})
    with pytest.raises(ChainError, match="damaged|base"):
        helpers.run(again, resume="resume")
    assert done.summary["state"] == "done"


def test_a_run_that_is_done_is_not_started_again(cluster: None, tmp_path: Path) -> None:
    settings = helpers.job(tmp_path, "whole", "char_lm", run={"steps": 10})
    helpers.run(settings)
    with pytest.raises(SettingsError, match="run 'whole' is done: it took its last step, 10"):
        helpers.run(settings, resume="resume")
    longer = helpers.run(helpers.job(tmp_path, "whole", "char_lm", run={"steps": 15}), resume="resume")
    assert longer.summary["steps"] == 15
    assert longer.faults() == []  # it had ended; nothing was lost
