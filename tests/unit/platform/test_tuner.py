"""The tuner: explicit intervals are taken, and what it derives keeps the log within its share of a checkpoint."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.platform.settings import JobSettings, from_dict
from everstep.platform.tuner import BYTES_SHARE, RECORD_BYTES, Intervals, derive_intervals

FULL = 12  # bytes a parameter of a full Adam checkpoint


def job(**sections: dict[str, Any]) -> JobSettings:
    return from_dict({"task": {"name": "digits"}, **sections})


def compressed(residual: str = "replicated", density: float = 0.01, **checkpoint: Any) -> JobSettings:
    compression = {"method": "topk", "density": density, "residual": residual}
    return job(compression=compression, checkpoint=checkpoint)


def share(settings: JobSettings, parameters: int, shards: int, interval: int) -> float:
    """Bytes of log and snapshots a step, as a share of a full checkpoint."""
    copies = settings.workers.size if settings.compression.residual == "survivor" else 1
    named = min(1.0, settings.compression.density * copies)
    log = 8 * parameters * named + RECORD_BYTES * shards
    return (log + 4 * parameters * copies / interval) / (FULL * parameters)


def test_automatic_intervals() -> None:
    found = derive_intervals(job(), 100_000, 3)
    assert found == Intervals(16, 100, 0, 5.0)


def test_explicit_intervals_are_taken() -> None:
    settings = compressed(segment_steps=7, base_interval=11, compressor_interval=13, max_lag_s=2.5)
    assert derive_intervals(settings, 100_000, 3) == Intervals(7, 11, 13, 2.5)


def test_nothing_to_keep_needs_no_snapshots() -> None:
    assert derive_intervals(compressed("none"), 100_000, 3).compressor_interval == 0
    assert derive_intervals(job(checkpoint={"compressor_interval": 5}), 100_000, 3).compressor_interval == 0
    assert derive_intervals(compressed("none", compressor_interval=5), 100_000, 3).compressor_interval == 0


@pytest.mark.parametrize("parameters", [100_000, 1_000_000, 100_000_000])
@pytest.mark.parametrize("shards", [2, 3])
def test_log_and_snapshots_stay_within_a_hundredth_of_a_checkpoint(parameters: int, shards: int) -> None:
    settings = compressed()
    interval = derive_intervals(settings, parameters, shards).compressor_interval
    assert share(settings, parameters, shards, interval) <= BYTES_SHARE == 1 / 100
    assert interval <= 1000


@pytest.mark.parametrize("parameters", [100_000, 1_000_000, 100_000_000])
def test_snapshots_are_no_rarer_than_they_must_be(parameters: int) -> None:
    settings = compressed()
    interval = derive_intervals(settings, parameters, 3).compressor_interval
    assert interval == 10 or share(settings, parameters, 3, interval - 1) > BYTES_SHARE


@pytest.mark.parametrize("residual", ["replicated", "survivor"])
def test_a_sparser_log_leaves_room_for_more_snapshots(residual: str) -> None:
    settings = [compressed(residual, density) for density in (0.004, 0.002, 0.001)]
    found = [derive_intervals(each, 1_000_000, 3).compressor_interval for each in settings]
    assert found == sorted(found, reverse=True) and found[0] > found[-1]
    for each, interval in zip(settings, found, strict=True):
        assert share(each, 1_000_000, 3, interval) <= BYTES_SHARE


@pytest.mark.parametrize(
    ("settings", "parameters"),
    [
        (compressed(density=0.1), 1_000_000),  # the log alone is over the share
        (compressed("survivor"), 1_000_000),  # two workers' choices
        (compressed(), 10_000),  # what a record costs besides its values
    ],
)
def test_when_the_log_alone_is_over_its_share_snapshots_come_with_bases(settings: JobSettings, parameters: int) -> None:
    assert derive_intervals(settings, parameters, 3).compressor_interval == 100


@given(
    st.integers(1, 10**9),
    st.integers(1, 64),
    st.floats(1e-4, 1.0),
    st.sampled_from(["replicated", "survivor"]),
)
def test_the_derived_interval_is_always_sensible(parameters: int, shards: int, density: float, residual: str) -> None:
    settings = compressed(residual, density)
    found = derive_intervals(settings, parameters, shards)
    assert 10 <= found.compressor_interval <= 1000
    assert found.segment_steps >= 1 and found.base_interval >= 1
