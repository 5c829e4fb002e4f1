"""The tuner: first intervals keep the log within its share, later ones waste least within the limits."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from everstep.platform.costs import Costs, History, Limits, limits_of, lowdiff
from everstep.platform.settings import JobSettings, from_dict
from everstep.platform.tuner import (
    BYTES_SHARE,
    RECORD_BYTES,
    Intervals,
    Tuned,
    derive_intervals,
    logged_bytes,
    tune,
    tune_lowdiff,
    waste,
)

FULL = 12  # bytes a parameter of a full Adam checkpoint


def job(**sections: dict[str, Any]) -> JobSettings:
    return from_dict({"task": {"name": "digits"}, **sections})


def compressed(residual: str = "replicated", density: float = 0.01, **checkpoint: Any) -> JobSettings:
    compression = {"method": "topk", "density": density, "residual": residual}
    return job(compression=compression, checkpoint=checkpoint)


def share(settings: JobSettings, parameters: int, shards: int, interval: int) -> float:
    """Bytes of log and snapshots a step, as a share of a full checkpoint."""
    copies = settings.workers.max if settings.compression.residual == "survivor" else 1
    named = min(1.0, settings.compression.density * copies)
    place = (math.log2(1 / named) + 2) / 8
    log = (4 + place) * parameters * named + RECORD_BYTES * shards
    return (log + 4 * parameters * copies / interval) / (FULL * parameters)


def test_automatic_intervals() -> None:
    found = derive_intervals(job(), 100_000, 3)
    assert found == Intervals(16, 100, 0, 5.0)


def test_explicit_intervals_are_taken() -> None:
    settings = compressed(segment_steps=7, base_interval=11, compressor_interval=13, max_lag_s=2.5)
    assert derive_intervals(settings, 100_000, 3) == Intervals(7, 11, 13, 2.5)


@pytest.mark.parametrize(
    ("method", "residual", "workers", "each"),
    [
        ("none", "none", 2, 4.0),
        ("topk", "replicated", 8, 0.0508),
        ("topk+int8", "replicated", 8, 0.021),
        ("int8", "replicated", 8, 1.02),
        ("int4", "replicated", 8, 0.57),
        ("topk", "survivor", 8, 0.08 * (4 + 0.7055)),  # the union of what eight chose
        ("topk+int8", "survivor", 1, 0.021),  # nobody to add to
        ("randk", "survivor", 8, 0.0508),  # all chose the same places
        ("int8", "survivor", 8, 4.0),  # a sum of codes is no code
        ("powersgd", "survivor", 2, 4.0),
    ],
)
def test_what_an_element_takes_in_the_log(method: str, residual: str, workers: int, each: float) -> None:
    settings = job(compression={"method": method, "residual": residual, "density": 0.01})
    assert logged_bytes(settings.compression, workers) == pytest.approx(each, rel=0.01)


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
    assert interval == derive_intervals(compressed(base_interval=2), parameters, 3).compressor_interval


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
        (compressed("survivor", 0.02), 1_000_000),  # two workers' choices
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


# What is measured.
NOW = Intervals(16, 100, 0, 5.0)
COSTS = Costs(
    step_s=0.05,
    stall_s=0.0001,
    segment_s=0.002,
    base_s=0.8,
    snapshot_s=0.0,
    replay_s=0.01,
    lag_s=0.2,
    load_s=1.0,
    restart_s=3.0,
    bytes_per_step=1e5,
    round_bytes=1.2e7,
    snapshot_bytes=4e6,
)
FREE = Limits(overhead_budget=1.0, max_lag_s=1e6, recovery_s=1e6, queue_bytes=10**15)  # nothing binds
OFTEN = History(running_s=86_400.0, failures=200, total_losses=60)


def test_mtbf_and_loss_share_start_at_their_priors_and_learn() -> None:
    assert (History().mtbf(), History().loss_share()) == (4 * 3600, 0.25)
    assert History(4 * 3600).mtbf() == 8 * 3600
    assert History(4 * 3600, 1, 1).mtbf() == 4 * 3600
    assert History(4 * 3600, 1, 1).loss_share() == 0.4
    assert History(100 * 600.0, 100, 100).mtbf() == pytest.approx(600, rel=0.25)
    assert History(1e6, 1000, 100).loss_share() == pytest.approx(0.1, rel=0.01)


def test_limits_come_from_the_job_file() -> None:
    check = {"segment_steps": 7, "compressor_interval": 9, "max_lag_s": 2.5, "queue_bytes": 4096}
    settings = job(checkpoint={**check, "overhead_budget": 0.03, "recovery_s": 30.0})
    assert limits_of(settings.checkpoint) == Limits(0.01, 2.5, 30.0, 4096, 7, "auto", 9)
    assert limits_of(job().checkpoint) == Limits(overhead_budget=0.01 / 3)


def twin_waste(costs: Costs, history: History, segment: float, base: float) -> float:
    """The replacement model, transcribed from the reference; what is in memory loads within D."""
    t, sigma, beta, phi, r = costs.step_s, costs.stall_s, costs.segment_s, costs.base_s, costs.replay_s
    lag, load, restart = costs.lag_s, costs.load_s, costs.restart_s
    assert None not in (t, sigma, beta, phi, r, lag, load, restart)
    q, m = history.loss_share(), history.mtbf()
    steady = sigma / t + beta / (segment * t) + phi / (base * t)
    return steady + (restart + (1 - q) * (t / 2) + q * (load + segment * t / 2 + lag + r * base / 2)) / m


def test_waste_is_the_replacement_model_and_the_stall_of_snapshots() -> None:
    model = twin_waste(COSTS, OFTEN, 16, 100)
    assert waste(COSTS, OFTEN, NOW) == pytest.approx(model, rel=1e-12)
    snapshots = replace(NOW, compressor_interval=20)
    assert waste(replace(COSTS, snapshot_s=0.03), OFTEN, snapshots) == pytest.approx(model + 0.03)


def test_waste_says_what_it_lacks() -> None:
    with pytest.raises(ValueError, match="none for replay_s, load_s"):
        waste(replace(COSTS, replay_s=None, load_s=math.nan), OFTEN, NOW)


@pytest.mark.parametrize("history", [History(), OFTEN, History(3600.0, 6, 6)])
def test_the_closed_forms_waste_least(history: History) -> None:
    found = tune(COSTS, history, FREE, Intervals(1, 10, 0, 1e6))
    segment, base = found.intervals.segment_steps, found.intervals.base_interval
    assert 1 < segment < 1024 and base > 10 and found.waste == waste(COSTS, history, found.intervals)
    least = twin_waste(COSTS, history, segment, base)
    around = [0.25, 0.5, 0.8, 0.9, 1.1, 1.25, 2, 4]
    assert all(twin_waste(COSTS, history, segment * up, base * along) > least for up in around for along in around)
    assert all(twin_waste(COSTS, history, segment + by, base) >= least for by in (-1, 1))
    assert all(twin_waste(COSTS, history, segment, base + by) >= least for by in (-1, 1))


def test_a_reason_carries_the_numbers() -> None:
    found = tune(COSTS, History(), replace(FREE, max_lag_s=5.0, recovery_s=60.0), NOW)
    assert found.intervals == Intervals(96, 6000, 0, 5.0)
    assert found.reasons == (
        "segment_steps 16 -> 96: sqrt(2·0.002 s·4 h/0.25)/0.05 s = 303.6, "
        "but at most 96 by max_lag_s 5 s with 0.2 s of upload lag and 0.05 s a step",
        "base_interval 100 -> 6000: sqrt(2·0.8 s·4 h/(0.25·0.05 s·0.01 s)) = 1.358e+04, "
        "but at most 6000 by recovery_s 60 s with 0.01 s to replay a step",
        "compressor_interval stays 0: no residual is kept",
    )


@pytest.mark.parametrize(
    ("number", "limits", "costs", "steps", "why"),
    [
        (0, FREE, {}, 52, "/0.05 s = 51.8"),
        (0, replace(FREE, max_lag_s=1.0), {}, 16, "at most 16 by max_lag_s 1 s with 0.2 s of upload lag"),
        (0, replace(FREE, max_lag_s=1.0), {"lag_s": 1.5}, 1, "which even 1 step does not keep"),
        (0, replace(FREE, overhead_budget=0.0005), {}, 80, "at least 80 by overhead_budget 0.0005 with 0.002 s each"),
        (0, replace(FREE, queue_bytes=2_000_000), {}, 10, "at most 10 by half of queue_bytes 2000000 with 1e+05 bytes"),
        (0, FREE, {"segment_s": 1e-9}, 1, "at least 1 by the shortest segment"),
        (0, FREE, {"segment_s": 9.0}, 1024, "at most 1024 by the longest segment"),
        (1, FREE, {}, 2317, "·0.01 s)) = 2317"),
        (1, replace(FREE, recovery_s=5.0), {}, 500, "at most 500 by recovery_s 5 s with 0.01 s to replay a step"),
        (1, replace(FREE, overhead_budget=0.005), {}, 3200, "at least 3200 by overhead_budget 0.005 with 0.8 s each"),
        (1, FREE, {"base_s": 1e-6}, 10, "at least 10 by the shortest interval"),
        # Where two clash: the lag wins over the budget, the budget over the recovery objective.
        (0, replace(FREE, max_lag_s=1.0, overhead_budget=0.001), {}, 16, "a step (it wins over at least 40 by"),
        (1, replace(FREE, recovery_s=5.0, overhead_budget=0.01), {}, 1600, "a step (it wins over at most 500 by"),
    ],
)
def test_each_bound_binds_and_says_so(
    number: int, limits: Limits, costs: dict[str, float], steps: int, why: str
) -> None:
    found = tune(replace(COSTS, **costs), OFTEN, limits, Intervals(5000, 1_000_000, 0, 5.0))
    reason = found.reasons[number]
    assert (found.intervals.segment_steps, found.intervals.base_interval)[number] == steps and why in reason
    assert (" but " in reason) is bool(costs or limits != FREE)


def test_replay_that_is_no_faster_than_training_is_reported() -> None:
    said = [tune(replace(COSTS, replay_s=replay_s), OFTEN, FREE, NOW).reasons[1] for replay_s in (0.04, 0.05)]
    assert "recomputing" not in said[0]
    assert "replay is no faster than recomputing (0.05 s against 0.05 s a step)" in said[1]


@pytest.mark.parametrize(
    ("costs", "expected", "why"),
    [
        ({}, 40, "at least 40 by 4e+06 bytes a snapshot and 2e+04 a step within 1% of a round of 1.2e+07"),
        ({"snapshot_s": 0.04}, 80, "at least 80 by overhead_budget 0.01 with 0.04 s each"),
        ({"snapshot_bytes": 100.0}, 10, "the shortest interval"),
        ({"round_bytes": 1e6}, 100, "base_interval"),  # the log alone is over its share
        ({"round_bytes": 2e6}, 100, "base_interval"),
        ({"round_bytes": 2.001e6}, 100, "base_interval"),  # it leaves 10 bytes a step
    ],
)
def test_snapshots_come_as_often_as_they_may(costs: dict[str, float], expected: int, why: str) -> None:
    now, limits = replace(NOW, compressor_interval=500), Limits(base_interval=100)
    found = tune(replace(COSTS, **{"bytes_per_step": 2e4, **costs}), OFTEN, limits, now)
    assert found.intervals.compressor_interval == expected and why in found.reasons[2]


def test_an_interval_that_would_hardly_move_stays() -> None:
    for now, stays in ((52, True), (42, True), (41, False), (69, True), (70, False)):  # 52 is best
        found = tune(COSTS, OFTEN, FREE, replace(NOW, segment_steps=now))
        assert (found.intervals.segment_steps == now) is stays, now
        assert found.reasons[0].startswith(f"segment_steps stays {now}: " if stays else f"segment_steps {now} -> 52: ")
    assert "52 is within 25% of it" in tune(COSTS, OFTEN, FREE, replace(NOW, segment_steps=42)).reasons[0]


def test_an_interval_out_of_bounds_moves_however_little() -> None:
    found = tune(COSTS, OFTEN, replace(FREE, max_lag_s=1.0, recovery_s=5.0), Intervals(17, 501, 0, 1.0))
    assert (found.intervals.segment_steps, found.intervals.base_interval) == (16, 500)


def test_inside_a_clash_an_interval_still_rests() -> None:
    clash = replace(FREE, max_lag_s=1.0, overhead_budget=0.001, recovery_s=5.0)
    found = tune(COSTS, OFTEN, clash, Intervals(15, 17_000, 0, 1.0))  # at most 16, at least 16 000
    assert (found.intervals.segment_steps, found.intervals.base_interval) == (15, 17_000)


@pytest.mark.parametrize("tuner", [tune, tune_lowdiff])
def test_nothing_measured_leaves_everything(tuner: Any) -> None:
    now = replace(NOW, compressor_interval=50)
    for costs in (Costs(), replace(COSTS, step_s=0.0)):
        found = tuner(costs, OFTEN, Limits(), now)
        assert found.intervals == now and found.waste is None
        assert all("stays" in reason and "not measured yet: step_s" in reason for reason in found.reasons)


@pytest.mark.parametrize("field", [each.name for each in fields(Costs)])
@pytest.mark.parametrize("bad", [None, math.nan, math.inf, -1.0])
def test_what_is_not_measured_leaves_only_what_needs_it(field: str, bad: float | None) -> None:
    now = replace(NOW, segment_steps=1000, base_interval=1_000_000, compressor_interval=500)
    found, whole = tune(replace(COSTS, **{field: bad}), OFTEN, FREE, now), tune(COSTS, OFTEN, FREE, now)
    names = ("segment_steps", "base_interval", "compressor_interval")
    for name, reason, before in zip(names, found.reasons, whole.reasons, strict=True):
        if f"not measured yet: {field}" in reason:
            assert getattr(found.intervals, name) == getattr(now, name)
        else:
            assert reason == before
    assert found.waste is None or any("not measured" in reason for reason in found.reasons)


@pytest.mark.parametrize("tuner", [tune, tune_lowdiff])
def test_what_the_user_fixed_never_changes(tuner: Any) -> None:
    limits = replace(FREE, max_lag_s=0.1, segment_steps=16, base_interval=100, compressor_interval=13)
    now = replace(NOW, compressor_interval=13)
    found = tuner(COSTS, OFTEN, limits, now)
    assert found.intervals == now
    assert all(reason.endswith("fixed by the job file") for reason in found.reasons)


# LowDiff's own model.
def twin_lowdiff(interval: float, batch: float, write: float, mtbf: float, merge: float, load: float) -> float:
    """T_wasted / (N·T) of the reference, with f = 1/interval and S/W = write."""
    frequency = 1 / interval
    return (batch / 2 + load + merge / 2 * (1 / (frequency * batch) - 1)) / mtbf + frequency * write


def test_lowdiff_worked_example() -> None:
    found = lowdiff(size_bytes=9.1e9, bandwidth=2e9, mtbf_s=3600.0, merge_s=0.5, load_s=5.0)
    assert found.full_interval_s == pytest.approx(1290, abs=0.5)
    assert found.batch_s == pytest.approx(25.4, abs=0.05)
    assert round(found.batches) == 51
    assert found.waste == pytest.approx(0.0119, abs=5e-5)
    assert found.batches == pytest.approx(found.batch_s / 0.5)


@given(st.floats(0.01, 100), st.floats(60, 1e6), st.floats(1e-3, 10))
def test_lowdiff_optimum_wastes_least(write: float, mtbf: float, merge: float) -> None:
    found = lowdiff(write * 1e9, 1e9, mtbf, merge, 5.0)
    assert found.waste == pytest.approx(twin_lowdiff(found.full_interval_s, found.batch_s, write, mtbf, merge, 5.0))
    for along in (0.5, 0.9, 0.99, 1.01, 1.1, 2):
        for up in (0.5, 0.9, 0.99, 1.01, 1.1, 2):
            around = twin_lowdiff(found.full_interval_s * along, found.batch_s * up, write, mtbf, merge, 5.0)
            assert around > found.waste


def test_lowdiff_in_steps() -> None:
    found = tune_lowdiff(COSTS, OFTEN, FREE, NOW)
    best = lowdiff(1.2e7, 1.2e7 / 0.8, OFTEN.mtbf(), 16 * 0.01, 1.0)
    assert found.intervals.segment_steps == round(best.batch_s / 0.05)
    assert found.intervals.base_interval == round(best.full_interval_s / 0.05)
    assert found.waste == waste(COSTS, OFTEN, found.intervals)
    assert "LowDiff (2·0.8 s·0.16 s·" in found.reasons[0] and "LowDiff (4·(0.8 s)²·" in found.reasons[1]


def test_lowdiff_keeps_the_lag_but_no_budget() -> None:
    found = tune_lowdiff(COSTS, OFTEN, Limits(overhead_budget=1e-9, recovery_s=1e-9), NOW)
    assert found.intervals.segment_steps == 96 and "max_lag_s" in found.reasons[0]
    assert found.intervals.base_interval == tune_lowdiff(COSTS, OFTEN, FREE, NOW).intervals.base_interval


def test_lowdiff_wastes_more_than_the_tuner() -> None:
    now = Intervals(1000, 1_000_000, 0, 5.0)
    ours, theirs = tune(COSTS, OFTEN, FREE, now).waste, tune_lowdiff(COSTS, OFTEN, FREE, now).waste
    assert ours is not None and theirs is not None and ours < theirs


# Whatever is measured.
seconds = st.one_of(st.just(0.0), st.floats(1e-6, 100))
steps_s = st.floats(1e-4, 100)
sizes = st.one_of(st.just(0.0), st.floats(1, 1e11))
any_costs = st.builds(
    Costs, steps_s, seconds, seconds, seconds, seconds, seconds, seconds, seconds, seconds, sizes, sizes, sizes
)
any_history = st.builds(
    lambda run, lost, more: History(run, lost + more, lost), st.floats(0, 1e8), *[st.integers(0, 1000)] * 2
)
any_limits = st.builds(Limits, st.floats(1e-3, 1), st.floats(0.01, 600), st.floats(0.1, 3600), st.integers(1, 2**40))
any_now = st.builds(Intervals, st.integers(1, 1024), st.integers(10, 10**6), st.integers(0, 10**6), st.just(5.0))


def whole(found: Tuned) -> bool:
    steps = found.intervals
    three = (steps.segment_steps, steps.base_interval, steps.compressor_interval)
    return all(type(value) is int and value >= least for value, least in zip(three, (1, 10, 0), strict=True))


def lag_is_kept(found: Tuned, costs: Costs, limits: Limits) -> bool:
    steps, step, lag = found.intervals.segment_steps, costs.step_s or 0, costs.lag_s or 0
    return steps == 1 or (
        steps * step + lag <= limits.max_lag_s * (1 + 1e-9)
        and steps * (costs.bytes_per_step or 0) <= limits.queue_bytes / 2 * (1 + 1e-9)
    )


@given(any_costs, any_history, any_limits, any_now)
@example(replace(COSTS, replay_s=0.0, base_s=0.0, segment_s=0.0), History(), Limits(), NOW)
def test_limits_hold_whatever_is_measured(costs: Costs, history: History, limits: Limits, now: Intervals) -> None:
    found = tune(costs, history, limits, now)
    steps, step = found.intervals, costs.step_s or 0
    segment, base, every = steps.segment_steps, steps.base_interval, steps.compressor_interval
    assert whole(found) and found.waste is not None and math.isfinite(found.waste)
    assert lag_is_kept(found, costs, limits)
    budget = limits.overhead_budget * (1 + 1e-9)
    assert (costs.segment_s or 0) <= budget * segment * step or "at most" in found.reasons[0]
    assert (costs.base_s or 0) <= budget * base * step
    assert (costs.replay_s or 0) * base <= limits.recovery_s * (1 + 1e-9) or "at least" in found.reasons[1]
    assert (every == 0) is (now.compressor_interval == 0)
    assert not every or (costs.snapshot_s or 0) <= budget * every * step
    assert len(found.reasons) == 3 and not any("\n" in reason for reason in found.reasons)


@given(any_costs, any_history, any_limits, any_now)
def test_a_second_look_changes_nothing(costs: Costs, history: History, limits: Limits, now: Intervals) -> None:
    found = tune(costs, history, limits, now)
    assert tune(costs, history, limits, found.intervals).intervals == found.intervals


@given(any_costs, any_history, any_limits, any_now)
def test_lowdiff_keeps_what_is_promised(costs: Costs, history: History, limits: Limits, now: Intervals) -> None:
    found = tune_lowdiff(costs, history, limits, now)
    assert whole(found) and lag_is_kept(found, costs, limits)
