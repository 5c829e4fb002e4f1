"""What the tuner knows: measured costs, the run's failures, the user's limits; and LowDiff's closed form. Pure.

LowDiff: Yao, Hu, et al., "Optimizing Frequent Checkpointing via Low-Cost Differential for Distributed Training
Systems", arXiv 2509.04084; formula re-derived (its full-checkpoint frequency f and batching size b).

Symbols: τ step_s, σ stall_s, β segment_s, Φ base_s, r replay_s, ℓ lag_s, D restart_s, M `History.mtbf`, q
`History.loss_share`; in LowDiff S size_bytes, W bandwidth, R_D merge_s, R_F load_s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from everstep.platform.sections import CheckpointSettings

PRIOR_FAILURES = 1.0  # the prior is worth one failure ...
PRIOR_RUNNING_S = 4 * 3600.0  # ... in four hours
PRIOR_TOTAL_LOSSES = 1.0  # Beta(1, 3), mean 0.25: about 75 % of failures at scale are cured by a process restart
PRIOR_KEPT = 3.0


@dataclass(frozen=True)
class Costs:
    """What was measured. None: not measured yet; so is a value that is not finite, negative, or a step of no time.

    Processor seconds count as if the train loop lost them, which holds where checkpoint actors share its cores and is
    an upper bound elsewhere.

    Attributes:
        step_s: τ, median time of a step, in seconds.
        stall_s: σ, by how many seconds capture delays the train loop in a step.
        segment_s: β, processor seconds one segment costs whatever its length.
        base_s: Φ, processor seconds one whole round of bases costs.
        snapshot_s: by how many seconds one compressor snapshot delays the train loop; 0 where there are none.
        replay_s: r, seconds to replay one step.
        lag_s: ℓ, seconds from handing a segment to the store until it is durable.
        load_s: seconds to load a round from the store.
        restart_s: D, seconds to notice a failure and go on, handing over state that is in memory included.
        bytes_per_step: of the log, all shards.
        round_bytes: of one round of bases.
        snapshot_bytes: of one compressor snapshot, all slices.
    """

    step_s: float | None = None
    stall_s: float | None = None
    segment_s: float | None = None
    base_s: float | None = None
    snapshot_s: float | None = None
    replay_s: float | None = None
    lag_s: float | None = None
    load_s: float | None = None
    restart_s: float | None = None
    bytes_per_step: float | None = None
    round_bytes: float | None = None
    snapshot_bytes: float | None = None

    def missing(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return those of `names` that are not measured."""
        return tuple(name for name in names if not self._measured(name))

    def known(self, names: Iterable[str]) -> tuple[float, ...]:
        """Return the values of `names`, in order.

        Raises:
            ValueError: one of them is not measured.
        """
        names = tuple(names)
        if missing := self.missing(names):
            raise ValueError(f"expected measured costs, got none for {', '.join(missing)}: ask Costs.missing first")
        return tuple(float(getattr(self, name)) for name in names)

    def _measured(self, name: str) -> bool:
        value = getattr(self, name)
        return value is not None and math.isfinite(value) and (value > 0 if name == "step_s" else value >= 0)


@dataclass(frozen=True)
class History:
    """The run's own failures so far.

    Attributes:
        running_s: seconds the run has been observed, all its tenures together.
        failures: whatever made the group form anew or the run resume.
        total_losses: those of them that lost all memory, so that the store had to answer.
    """

    running_s: float = 0.0
    failures: int = 0
    total_losses: int = 0

    def mtbf(self) -> float:
        """Return M, seconds between failures: the reciprocal of the failure rate's posterior mean.

        The rate, because it is what enters the waste; its prior is Gamma(1 failure, 4 h). (The posterior mean of M
        itself does not exist before the first failure.)
        """
        return (PRIOR_RUNNING_S + self.running_s) / (PRIOR_FAILURES + self.failures)

    def loss_share(self) -> float:
        """Return q, the posterior mean share of failures that lose all memory; its prior is Beta(1, 3)."""
        return (PRIOR_TOTAL_LOSSES + self.total_losses) / (PRIOR_TOTAL_LOSSES + PRIOR_KEPT + self.failures)


@dataclass(frozen=True)
class Limits:
    """What the user allows.

    Attributes:
        overhead_budget: share of the step time, > 0, that segments may cost; bases, and compressor snapshots, likewise.
        max_lag_s: oldest a finished step may get before it is durable, in seconds.
        recovery_s: longest replay after a total loss, in seconds.
        queue_bytes: of records a checkpoint actor may hold.
        segment_steps: "auto", or the job file's number, which is never changed.
        base_interval: likewise.
        compressor_interval: likewise.
    """

    overhead_budget: float = 0.01
    max_lag_s: float = 5.0
    recovery_s: float = 60.0
    queue_bytes: int = 256 * 2**20
    segment_steps: int | Literal["auto"] = "auto"
    base_interval: int | Literal["auto"] = "auto"
    compressor_interval: int | Literal["auto"] = "auto"


def limits_of(check: CheckpointSettings) -> Limits:
    """Return the limits that `[checkpoint]` states; its budget is for segments, bases and snapshots together."""
    return Limits(
        overhead_budget=check.overhead_budget / 3,
        max_lag_s=check.max_lag_s,
        recovery_s=check.recovery_s,
        queue_bytes=check.queue_bytes,
        segment_steps=check.segment_steps,
        base_interval=check.base_interval,
        compressor_interval=check.compressor_interval,
    )


@dataclass(frozen=True)
class LowDiff:
    """LowDiff's optimum.

    Attributes:
        full_interval_s: 1/f*, seconds between full checkpoints.
        batch_s: b*, seconds of work one batched write covers.
        batches: batched writes a full interval, not rounded.
        waste: share of the time that is wasted at this optimum, by LowDiff's own model.
    """

    full_interval_s: float
    batch_s: float
    batches: float
    waste: float


def lowdiff(size_bytes: float, bandwidth: float, mtbf_s: float, merge_s: float, load_s: float) -> LowDiff:
    """Return LowDiff's optimal full-checkpoint interval and batch.

    Wasted share = (b/2 + R_F + (R_D/2)(1/(f·b) - 1))/M + f·S/W; N and T of the paper cancel.

    Args:
        size_bytes: S, bytes of a full checkpoint.
        bandwidth: W, bytes written a second.
        mtbf_s: M, seconds between failures.
        merge_s: R_D, seconds to merge one batch, > 0.
        load_s: R_F, seconds to load a full checkpoint.
    """
    write_s = size_bytes / bandwidth
    full = (4 * write_s**2 * mtbf_s**2 / merge_s) ** (1 / 3)  # 1/f*
    batch = (2 * write_s * merge_s * mtbf_s) ** (1 / 3)  # b*
    lost = batch / 2 + load_s + merge_s / 2 * (full / batch - 1)
    return LowDiff(full, batch, full / batch, lost / mtbf_s + write_s / full)
