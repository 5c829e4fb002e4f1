"""The end of a run whose steps a loop of its own took: everything durable, states compared, the log closed."""

from __future__ import annotations

from everstep.actors.closing import SETTLE_S, compare_replica, flush, tails, write_down
from everstep.actors.context import RunContext
from everstep.core import clock
from everstep.core.errors import Failure

LOOK_S = 0.1


def close_attached(run: RunContext, lsn: int, digest: str, exactness: str, deadline: float) -> int:
    """Make everything up to `lsn` durable, compare the merged state with the live one, close the log.

    Args:
        run: the run.
        lsn: its last step.
        digest: of the live state.
        exactness: what the loop says of itself.
        deadline: until when its records may be on their way (`clock.monotonic`).

    Returns:
        The durable lsn.

    Raises:
        StateMismatch: the merged state is not the live one.
        StoreError: the store did not take the last records in time.
        GroupBroken: a checkpoint actor was lost meanwhile.
    """
    while (have := min(run.checkpointers.begin_epoch(run.group_epoch, None).values())) < lsn:
        if clock.monotonic() > deadline:
            raise Failure(
                f"the log has steps up to {have}, expected {lsn}",
                hint="close the log on every rank, after the last step",
            )
        clock.sleep(LOOK_S)
    run.become(exactness)
    durable = flush(run, lsn, "mend the store and start the program again: it goes on from there")
    compare_replica(run, lsn, digest, "change parameters only by optimizer.step() between two calls of log.step()")
    run.checkpointers.ask("settle", SETTLE_S)
    run.checkpointers.status = run.checkpointers.ask("status")
    run.bookkeeper.name_all()
    run.healings.close_all()
    write_down(run)
    closing = {"last_lsn": lsn, "digest": digest, "tails": tails(run, lsn)}
    run.patiently(lambda: run.chain.update(state="closed", closing=closing))
    return durable
