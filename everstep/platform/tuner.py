"""Intervals that are derived, not guessed. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass

from everstep.platform.settings import JobSettings

BYTES_SHARE = 1 / 100  # of a full checkpoint: what one step may cost in the log, compressor snapshots included
STATE_FLOATS = 3  # fp32 numbers of a full Adam-like checkpoint per parameter: the parameter and two moments
RECORD_BYTES = 800  # of a shard's record besides its values (measured: 720 to 820)
SEGMENT_STEPS = 16
BASE_STEPS = 100
SHORTEST_INTERVAL = 10


@dataclass(frozen=True)
class Intervals:
    """Steps between cuts of a segment, bases, and compressor snapshots (0: none), and the oldest a record may get."""

    segment_steps: int
    base_interval: int
    compressor_interval: int
    max_lag_s: float


def derive_intervals(settings: JobSettings, parameters: int, shards: int) -> Intervals:
    """Return the intervals of a run, from its settings or, where they say "auto", from its sizes.

    A compressor snapshot writes the residual, 4 bytes a parameter (and worker, when each has its own), and outweighs
    the log when taken often. It is taken as often as the log plus snapshots stay within `BYTES_SHARE` of a full
    checkpoint a step; when the log alone is above that, as often as a base.

    Args:
        settings: the job file.
        parameters: trainable elements.
        shards: shards, the step's own included.
    """
    check = settings.checkpoint
    base = BASE_STEPS if check.base_interval == "auto" else check.base_interval
    segment = SEGMENT_STEPS if check.segment_steps == "auto" else check.segment_steps
    return Intervals(segment, base, _compressor_interval(settings, parameters, shards, base), check.max_lag_s)


def _compressor_interval(settings: JobSettings, parameters: int, shards: int, base: int) -> int:
    compression, check = settings.compression, settings.checkpoint
    if compression.method == "none" or compression.residual == "none":
        return 0
    if check.compressor_interval != "auto":
        return check.compressor_interval
    copies = settings.workers.size if compression.residual == "survivor" else 1
    sent = copies * compression.density if compression.residual == "survivor" else compression.density
    log = 8 * parameters * min(sent, 1.0) + RECORD_BYTES * shards
    left = BYTES_SHARE * 4 * STATE_FLOATS * parameters - log
    if left <= 0:
        return base
    return max(math.ceil(4 * parameters * copies / left), SHORTEST_INTERVAL)
