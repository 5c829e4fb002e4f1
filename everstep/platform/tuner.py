"""Intervals that are derived, not guessed: the first from sizes, later ones from what was measured. Pure.

`tune` minimises the share of time a run wastes, a model in which segments and bases do not touch each other:

    waste = σ/τ + β/(b·τ) + Φ/(K·τ) + (1/M)·[ D + (1-q)·τ/2 + q·(L + b·τ/2 + ℓ + r·K/2) ]
    b* = sqrt(2·β·M/q)/τ          K* = sqrt(2·Φ·M/(q·τ·r))

b steps a segment, K steps between bases, L load_s; the other symbols are in `costs`. Loading from memory is part of D
here, and the stall of compressor snapshots is added to `waste`. `tune_lowdiff` is LowDiff's model instead.

Then bounds. Where they clash: what a user was promised or has not got (lag, memory) wins over the overhead budget, and
the overhead budget wins over the recovery objective, for it is paid every step while replay is paid once a total loss;
and bases that ask for more processor time than there is would never be finished at all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from everstep.platform.costs import Costs, History, Limits, lowdiff
from everstep.platform.sections import CompressionSettings
from everstep.platform.settings import JobSettings

VALUE_BYTES = {"topk": 4.0, "auto": 4.0, "topk+int8": 1.02, "randk": 4.0}  # of a value that a sparse compressor keeps
CODE_BYTES = {"int8": 1.02, "int4": 0.57}  # of an element that a quantiser codes
BYTES_SHARE = 1 / 100  # of a full checkpoint: what one step may cost in the log, compressor snapshots included
STATE_FLOATS = 3  # fp32 numbers of a full Adam-like checkpoint per parameter: the parameter and two moments
RECORD_BYTES = 800  # of a shard's record besides its values (measured: 720 to 820)
SEGMENT_STEPS = 16
BASE_STEPS = 100
SHORTEST_INTERVAL = 10
LONGEST_SEGMENT = 1024
RAREST_SNAPSHOT = 1000  # steps, where bases are not rarer still
LONGEST = 10**9  # steps; keeps what a zero divides finite
HYSTERESIS = 1 / 4  # an interval that would move by no more stays, unless it is out of bounds
ROUNDING = 1e-9  # (5 - 0.2)/0.05 is 96 steps
INSTANT_S = 1e-9  # stands for a measured zero where something is divided by it

SEGMENT_NEEDS = ("step_s", "segment_s", "lag_s", "bytes_per_step")
BASE_NEEDS = ("step_s", "base_s", "replay_s")
COMPRESSOR_NEEDS = ("step_s", "snapshot_s", "snapshot_bytes", "bytes_per_step", "round_bytes")
LOWDIFF_SEGMENT_NEEDS = BASE_NEEDS + ("lag_s", "bytes_per_step")
WASTE_NEEDS = ("step_s", "stall_s", "segment_s", "base_s", "replay_s", "lag_s", "load_s", "restart_s")


@dataclass(frozen=True)
class Intervals:
    """Steps between cuts of a segment, bases, and compressor snapshots (0: none), and the oldest a record may get."""

    segment_steps: int
    base_interval: int
    compressor_interval: int
    max_lag_s: float


@dataclass(frozen=True)
class Tuned:
    """Intervals for now; one reason for each, fit for the log; the `waste` they lead to (None: not all is measured)."""

    intervals: Intervals
    reasons: tuple[str, ...]
    waste: float | None


def derive_intervals(settings: JobSettings, parameters: int, shards: int) -> Intervals:
    """Return the intervals of a run, from its settings or, where they say "auto", from its sizes.

    A compressor snapshot writes the residual, 4 bytes a parameter (and worker, when each has its own), and outweighs
    the log when taken often. It is taken as often as the log plus snapshots stay within `BYTES_SHARE` of a full
    checkpoint a step; when the log leaves them too little of that, as often as a base.

    Args:
        settings: the job file.
        parameters: trainable elements.
        shards: shards, the step's own included.
    """
    check = settings.checkpoint
    base = BASE_STEPS if check.base_interval == "auto" else check.base_interval
    segment = SEGMENT_STEPS if check.segment_steps == "auto" else check.segment_steps
    return Intervals(segment, base, _compressor_interval(settings, parameters, shards, base), check.max_lag_s)


def logged_bytes(compression: CompressionSettings, workers: int) -> float:
    """Return how many bytes of a record an element of the gradient takes, at most, with so many workers.

    What the workers chose each for itself is logged as its sum: more places, and values in fp32 again.
    """
    own = compression.residual != "replicated" and workers > 1
    method, share = compression.method, compression.density
    if method in VALUE_BYTES:
        chosen = min(share * workers, 1.0) if own and method != "randk" else share
        place = (math.log2(1 / chosen) + 2) / 8  # Elias-Fano
        return chosen * (place + (4.0 if own else VALUE_BYTES[method]))
    return 4.0 if own else CODE_BYTES.get(method, 4.0)


def _compressor_interval(settings: JobSettings, parameters: int, shards: int, base: int) -> int:
    compression, check = settings.compression, settings.checkpoint
    if compression.method == "none" or compression.residual == "none":
        return 0
    if check.compressor_interval != "auto":
        return check.compressor_interval
    copies = settings.workers.max if compression.residual == "survivor" else 1
    log = logged_bytes(compression, settings.workers.max) * parameters + RECORD_BYTES * shards
    left = BYTES_SHARE * 4 * STATE_FLOATS * parameters - log
    needed = _at_least(4 * parameters * copies, left)
    return base if needed > max(base, RAREST_SNAPSHOT) else max(needed, SHORTEST_INTERVAL)


def tune(costs: Costs, history: History, limits: Limits, now: Intervals) -> Tuned:
    """Return the intervals that waste least within the limits; one whose costs are not measured stays as it is."""
    segment = partial(_segment, history=history, limits=limits)
    base = partial(_base, history=history, limits=limits)
    return _tuned(costs, history, limits, now, (SEGMENT_NEEDS, segment), (BASE_NEEDS, base))


def tune_lowdiff(costs: Costs, history: History, limits: Limits, now: Intervals) -> Tuned:
    """Return LowDiff's intervals in steps, within the lag and the memory that the run promises but with no budget.

    LowDiff's S/W, the time a full checkpoint takes, is that of a round of bases; its time to merge one batch is that
    of replaying a segment as long as it is now. Full checkpoints come at f* even where b* is cut. `Tuned.waste` is by
    this platform's model, so that the two tuners can be compared.
    """
    segment = partial(_lowdiff_segment, history=history, limits=limits, now=now)
    base = partial(_lowdiff_base, history=history, now=now)
    return _tuned(costs, history, limits, now, (LOWDIFF_SEGMENT_NEEDS, segment), (BASE_NEEDS, base))


TUNERS: dict[str, Callable[[Costs, History, Limits, Intervals], Tuned]] = {"waste": tune, "lowdiff": tune_lowdiff}


def waste(costs: Costs, history: History, intervals: Intervals) -> float:
    """Return the share of its time that a run is expected to waste: the model at the head of this file.

    Raises:
        ValueError: a cost of `WASTE_NEEDS`, or `snapshot_s` where snapshots are taken, is not measured.
    """
    step, stall, write, base, replay, lag, load, restart = costs.known(WASTE_NEEDS)
    share = history.loss_share()
    segment_s, bases = intervals.segment_steps * step, intervals.base_interval
    paid = stall / step + write / segment_s + base / (bases * step)
    if intervals.compressor_interval:
        paid += costs.known(("snapshot_s",))[0] / (intervals.compressor_interval * step)
    lost = restart + (1 - share) * step / 2 + share * (load + segment_s / 2 + lag + replay * bases / 2)
    return paid + lost / history.mtbf()


@dataclass(frozen=True)
class _Bound:
    """So many steps, and why no fewer or no more."""

    steps: int
    why: str


@dataclass(frozen=True)
class _Choice:
    """What a formula and its bounds lead to; an interval within `low` and `high` is fit to stay."""

    steps: int
    low: int
    high: int
    why: str


_Known = tuple[float, ...]
_Rule = tuple[tuple[str, ...], Callable[[_Known], _Choice]]  # the costs it needs, and what it makes of them


def _tuned(costs: Costs, history: History, limits: Limits, now: Intervals, segment: _Rule, base: _Rule) -> Tuned:
    steps, why_segment = _settle("segment_steps", now.segment_steps, limits.segment_steps, costs, segment)
    bases, why_base = _settle("base_interval", now.base_interval, limits.base_interval, costs, base)
    every, why_snapshot = 0, "compressor_interval stays 0: no residual is kept"
    if now.compressor_interval:
        rule = (COMPRESSOR_NEEDS, partial(_compressor, limits=limits, base=bases))
        every, why_snapshot = _settle(
            "compressor_interval", now.compressor_interval, limits.compressor_interval, costs, rule
        )
    found = replace(now, segment_steps=steps, base_interval=bases, compressor_interval=every)
    needs = WASTE_NEEDS + (("snapshot_s",) if every else ())
    expected = None if costs.missing(needs) else waste(costs, history, found)
    return Tuned(found, (why_segment, why_base, why_snapshot), expected)


def _settle(name: str, now: int, fixed: int | Literal["auto"], costs: Costs, rule: _Rule) -> tuple[int, str]:
    """Return the interval to use, and the sentence that says why."""
    needs, choose = rule
    if fixed != "auto":
        return now, f"{name} stays {now}: fixed by the job file"
    if missing := costs.missing(needs):
        return now, f"{name} stays {now}: not measured yet: {', '.join(missing)}"
    choice = choose(costs.known(needs))
    if choice.steps == now:
        return now, f"{name} stays {now}: {choice.why}"
    if choice.low <= now <= choice.high and abs(choice.steps - now) <= HYSTERESIS * now:
        return now, f"{name} stays {now}: {choice.why}; {choice.steps} is within {HYSTERESIS:.0%} of it"
    return choice.steps, f"{name} {now} -> {choice.steps}: {choice.why}"


def _segment(known: _Known, history: History, limits: Limits) -> _Choice:
    step, write, lag, size = known
    mtbf, share = history.mtbf(), history.loss_share()
    ideal = math.sqrt(2 * write * mtbf / share) / step  # b*
    why = f"sqrt(2·{_s(write)}·{_s(mtbf)}/{share:.3g})/{_s(step)} = {ideal:.4g}"
    budget = _Bound(_at_least(write, limits.overhead_budget * step), _budget(write, step, limits))
    low = max(_Bound(1, "the shortest segment"), budget, key=lambda bound: bound.steps)
    return _clip(why, ideal, low, _ceiling(step, lag, size, limits), low_wins=False)


def _ceiling(step: float, lag: float, size: float, limits: Limits) -> _Bound:
    """Return how long a segment may be: for the lag that was promised, in the memory there is, at all."""
    late = f"max_lag_s {_s(limits.max_lag_s)} with {_s(lag)} of upload lag and {_s(step)} a step"
    in_time = _at_most(limits.max_lag_s - lag, step)
    held = _at_most(limits.queue_bytes / 2, size)
    bounds = (
        _Bound(max(in_time, 1), late if in_time >= 1 else f"{late}, which even 1 step does not keep,"),
        _Bound(max(held, 1), f"half of queue_bytes {limits.queue_bytes} with {size:.4g} bytes a step"),
        _Bound(LONGEST_SEGMENT, "the longest segment"),
    )
    return min(bounds, key=lambda bound: bound.steps)


def _base(known: _Known, history: History, limits: Limits) -> _Choice:
    step, write, replay = known
    mtbf, share = history.mtbf(), history.loss_share()
    ideal = math.sqrt(2 * write * mtbf / (share * step * max(replay, INSTANT_S)))  # K*
    why = f"sqrt(2·{_s(write)}·{_s(mtbf)}/({share:.3g}·{_s(step)}·{_s(replay)})) = {ideal:.4g}"
    budget = _Bound(_at_least(write, limits.overhead_budget * step), _budget(write, step, limits))
    low = max(_Bound(SHORTEST_INTERVAL, "the shortest interval"), budget, key=lambda bound: bound.steps)
    soon = f"recovery_s {_s(limits.recovery_s)} with {_s(replay)} to replay a step"
    choice = _clip(why, ideal, low, _Bound(_at_most(limits.recovery_s, replay), soon), low_wins=True)
    if replay < step:
        return choice
    slow = f"; replay is no faster than recomputing ({_s(replay)} against {_s(step)} a step)"
    return replace(choice, why=choice.why + slow)


def _compressor(known: _Known, limits: Limits, base: int) -> _Choice:
    """Return the shortest interval at which snapshots keep the budget and, with the log, `BYTES_SHARE`.

    A log that leaves them next to nothing of that share would put them off for ever; then they come with bases.
    """
    step, stall, size, log, full = known
    share = f"{size:.4g} bytes a snapshot and {log:.4g} a step within {BYTES_SHARE:.0%} of a round of {full:.4g}"
    sparse = _Bound(_at_least(size, BYTES_SHARE * full - log), share)
    if sparse.steps > max(base, RAREST_SNAPSHOT):
        sparse = _Bound(base, f"base_interval, for {share} would come only every {sparse.steps} steps")
    budget = _Bound(_at_least(stall, limits.overhead_budget * step), _budget(stall, step, limits))
    shortest = _Bound(SHORTEST_INTERVAL, "the shortest interval")
    low = max(shortest, budget, sparse, key=lambda bound: bound.steps)
    return _Choice(low.steps, low.steps, LONGEST, f"at least {low.steps} by {low.why}")


def _lowdiff_segment(known: _Known, history: History, limits: Limits, now: Intervals) -> _Choice:
    step, write, replay, lag, log = known
    mtbf, merge = history.mtbf(), _merge(replay, now)
    ideal = lowdiff(max(write, INSTANT_S), 1.0, mtbf, merge, 0.0).batch_s / step  # b*; of S and W only S/W enters
    why = f"LowDiff (2·{_s(write)}·{_s(merge)}·{_s(mtbf)})^(1/3)/{_s(step)} = {ideal:.4g}"
    return _clip(why, ideal, _Bound(1, "the shortest segment"), _ceiling(step, lag, log, limits), low_wins=False)


def _lowdiff_base(known: _Known, history: History, now: Intervals) -> _Choice:
    step, write, replay = known
    mtbf, merge = history.mtbf(), _merge(replay, now)
    ideal = lowdiff(max(write, INSTANT_S), 1.0, mtbf, merge, 0.0).full_interval_s / step  # 1/f*
    why = f"LowDiff (4·({_s(write)})²·({_s(mtbf)})²/{_s(merge)})^(1/3)/{_s(step)} = {ideal:.4g}"
    low, high = _Bound(SHORTEST_INTERVAL, "the shortest interval"), _Bound(LONGEST, "the longest interval")
    return _clip(why, ideal, low, high, low_wins=True)


def _merge(replay: float, now: Intervals) -> float:
    """Return R_D, seconds to merge a batch: one as long as a segment is now."""
    return max(replay * now.segment_steps, INSTANT_S)


def _clip(formula: str, ideal: float, low: _Bound, high: _Bound, low_wins: bool) -> _Choice:
    """Return `ideal` in whole steps between the bounds; where they clash the winner alone counts."""
    if low.steps > high.steps:
        winner, loser = (low, high) if low_wins else (high, low)
        said = ("at least", "at most") if low_wins else ("at most", "at least")
        why = f"{formula}, but {said[0]} {winner.steps} by {winner.why}"
        why += f" (it wins over {said[1]} {loser.steps} by {loser.why})"
        if low_wins:
            return _Choice(winner.steps, winner.steps, LONGEST, why)
        return _Choice(winner.steps, 1, winner.steps, why)
    if ideal < low.steps:
        return _Choice(low.steps, low.steps, high.steps, f"{formula}, but at least {low.steps} by {low.why}")
    if ideal > high.steps:
        return _Choice(high.steps, low.steps, high.steps, f"{formula}, but at most {high.steps} by {high.why}")
    return _Choice(round(ideal), low.steps, high.steps, formula)


def _budget(cost: float, step: float, limits: Limits) -> str:
    return f"overhead_budget {limits.overhead_budget:.3g} with {_s(cost)} each and {_s(step)} a step"


def _at_least(amount: float, part: float) -> int:
    """Return the fewest parts that make up `amount`."""
    return math.ceil(amount / part * (1 - ROUNDING)) if 0 < part and amount / part < LONGEST else LONGEST


def _at_most(amount: float, part: float) -> int:
    """Return the most parts that fit in `amount`; below 0 where it is."""
    return math.floor(amount / part * (1 + ROUNDING)) if 0 < part and amount / part < LONGEST else LONGEST


def _s(seconds: float) -> str:
    return f"{seconds / 3600:.3g} h" if seconds >= 3600 else f"{seconds:.3g} s"
