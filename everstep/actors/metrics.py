"""A run's numbers as Ray metrics: in its dashboard, and for Prometheus where it scrapes the nodes.

Each is tagged with the run. Ray adds its own prefix (`ray_`) and the node.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.actors.environment import Counter, Gauge
from everstep.core import clock

if TYPE_CHECKING:
    from everstep.actors.context import RunContext

EVERY_S = 1.0
GAUGES = {
    "everstep_lsn": "The last finished step.",
    "everstep_step_seconds": "Seconds a step takes, of late.",
    "everstep_stall_seconds": "Seconds of a step that training waits for the log, of late.",
    "everstep_durable_lag_steps": "Finished steps that are not durable yet.",
    "everstep_world_size": "Workers that train.",
    "everstep_newcomers": "Workers outside the group: asked for, being built, spare.",
    "everstep_queue_bytes": "Bytes of records that one worker keeps until they are durable.",
    "everstep_held_bytes": "Bytes of records that checkpoint actors hold unmerged.",
    "everstep_written_bytes": "Bytes of records in segments, by the present checkpoint actors.",
}


class Metrics:
    """Tells Ray how one run is, once a second.

    Args:
        run: the run.
    """

    def __init__(self, run: RunContext) -> None:
        self.run = run
        tags = {"run": run.name}
        self._gauges = {name: Gauge(name, text, tag_keys=("run",)) for name, text in GAUGES.items()}
        self._recoveries = Counter("everstep_recoveries", "Formations of the group after a loss.", tag_keys=("run",))
        for metric in (*self._gauges.values(), self._recoveries):
            metric.set_default_tags(tags)
        self._told = 0.0

    def recovered(self) -> None:
        """Count a recovery."""
        self._recoveries.inc()

    def look(self) -> None:
        """Tell the present values."""
        if clock.monotonic() - self._told < EVERY_S:
            return
        self._told = clock.monotonic()
        for name, value in self.values().items():
            if value is not None:
                self._gauges[name].set(float(value))

    def values(self) -> dict[str, float | None]:
        """Return every gauge's value; None: not known yet."""
        run, latest = self.run, self.run.crew.latest
        lsn, durable = run.lsn(), run.checkpointers.lowest("durable")
        status = run.checkpointers.status
        return {
            "everstep_lsn": lsn,
            "everstep_step_seconds": latest.get("step_s"),
            "everstep_stall_seconds": latest.get("stall_s"),
            "everstep_durable_lag_steps": None if durable is None else max(lsn - durable, 0),
            "everstep_world_size": len(run.crew.members),
            "everstep_newcomers": len(run.crew.newcomers.all),
            "everstep_queue_bytes": latest.get("queue_bytes"),
            "everstep_held_bytes": sum(part.get("held_bytes", 0) for part in status),
            "everstep_written_bytes": sum(part.get("bytes_written", 0) for part in status),
        }
