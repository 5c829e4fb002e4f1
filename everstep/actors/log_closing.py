"""The end of a run whose steps a loop of its own took: everything durable, states compared, the log closed."""

from __future__ import annotations

from everstep.actors.checkpointers import lowest_durable
from everstep.actors.closing import write_down
from everstep.actors.context import RunContext
from everstep.core import clock
from everstep.core.errors import Failure, StateMismatch, StoreError
from everstep.training.state import combine_digests

LOOK_S = 0.1
SETTLE_S = 30.0  # for the base under way


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
    check = run.settings.checkpoint
    while (have := min(run.checkpointers.begin_epoch(run.group_epoch, None).values())) < lsn:
        if clock.monotonic() > deadline:
            raise Failure(
                f"the log has steps up to {have}, expected {lsn}",
                hint="close the log on every rank, after the last step",
            )
        clock.sleep(LOOK_S)
    run.become(exactness)
    run.checkpointers.ask("advance", lsn)
    durable = lowest_durable(run.checkpointers.ask("flush", check.storage_timeout_s))
    if durable < lsn:
        said = {status["store_error"] for status in run.checkpointers.ask("status")} - {""}
        raise StoreError(
            f"the store did not take the last records within {check.storage_timeout_s:g} s: durable {durable}, "
            f"expected {lsn}; {'; '.join(said)}",
            hint="mend the store and start the program again: it goes on from there",
        )
    merged: dict[str, str] = {}
    for _, part in run.checkpointers.ask("digests"):
        merged |= part
    if run.spec.exactness == "bitwise" and combine_digests(merged) != digest:
        raise StateMismatch(
            f"step {lsn}: the merged state is {combine_digests(merged)[:12]}, the live one {digest[:12]}",
            hint="change parameters only by optimizer.step() between two calls of log.step()",
        )
    run.checkpointers.ask("settle", SETTLE_S)
    status = run.checkpointers.status = run.checkpointers.ask("status")
    run.bookkeeper.name_all()
    tails = {shard: tail for part in status for shard, tail in part["tails"].items()}
    named = {str(s): tails[s][1] if s in tails and tails[s][0] == lsn else "" for s in run.chain.manifest.shards}
    run.healings.close_all()
    write_down(run)
    run.patiently(lambda: run.chain.update(state="closed", closing={"last_lsn": lsn, "digest": digest, "tails": named}))
    return durable
