"""The end of a run: everything durable, live and merged state compared, the log closed, the summary made."""

from __future__ import annotations

from typing import Any

from everstep.actors.checkpointers import lowest_durable, merged
from everstep.actors.context import RunContext
from everstep.actors.recovery import rebase
from everstep.core.errors import StateMismatch, StoreError
from everstep.storage.keys import BaseKey, CompressorKey, SegmentKey
from everstep.training.history import best, evaluations
from everstep.training.state import combine_digests

SETTLE_S = 30.0  # for the base under way


def close_log(run: RunContext, *, stopped: bool) -> tuple[str, int]:
    """Make everything durable and, unless it was stopped early, close the log; return (digest, durable lsn).

    Raises:
        StateMismatch: states that must have the same bits have not.
        StoreError: the store did not take the last records in time.
        GroupBroken: an actor was lost meanwhile.
    """
    last = run.lsn()
    digest = _live_digest(run)
    durable = 0
    if run.checkpointers:
        durable = _make_durable(run, last)
        compare_replica(
            run, last, digest,
            "workers and checkpoint actors need the same processors and torch; nothing that was stored is lost",
        )  # fmt: skip
        run.checkpointers.ask("settle", SETTLE_S)
        run.checkpointers.status = run.checkpointers.ask("status")
        run.bookkeeper.name_all()
    if stopped and last < run.settings.run.steps:
        run.patiently(lambda: run.chain.update(state="stopped"))
        run.tell(f"stopped after step {last}; durable up to step {durable}")
    elif run.checkpointers:
        closing = {"last_lsn": last, "digest": digest, "tails": tails(run, last)}
        run.patiently(lambda: run.chain.update(state="closed", closing=closing))
    return digest, durable


def write_down(run: RunContext) -> None:
    """Wait until all that was noted is in the store.

    Raises:
        StoreError: the store did not take it in time.
    """
    limit = run.settings.checkpoint.storage_timeout_s
    if not run.notebook.drain(limit):
        raise StoreError(f"the store did not take the run's last notes within {limit:g} s", hint="mend the store")


def tails(run: RunContext, last: int) -> dict[str, str]:
    """Return, by shard, the checksum of the segment that ends the log; "" where it ends in a base."""
    ends = {shard: end for status in run.checkpointers.status for shard, end in status["tails"].items()}
    return {str(s): ends[s][1] if s in ends and ends[s][0] == last else "" for s in run.chain.manifest.shards}


def _live_digest(run: RunContext) -> str:
    found = {run.crew.ask(member, "digest") for member in run.crew.members}
    if len(found) > 1:
        raise StateMismatch(
            f"the workers ended with different states: {sorted(found)}",
            hint="processors or libraries differ between the workers' nodes",
        )
    return str(min(found)[1])


def _make_durable(run: RunContext, last: int) -> int:
    for member in run.crew.members:
        run.crew.ask(member, "drain")
    have = merged(run.checkpointers.ask("begin_epoch", run.group_epoch))
    for member in run.crew.members:
        if min(have.values()) < last:
            have = run.crew.ask(member, "resend", run.group_epoch, have)
    if min(have.values()) < last:
        rebase(run, run.crew.members[0])
    return flush(run, last, f"mend the store, then: everstep resume {run.name}")


def flush(run: RunContext, last: int, hint: str) -> int:
    """Have everything up to `last` written; return the durable lsn.

    Raises:
        StoreError: the store did not take it in time; `hint` says what to do.
        GroupBroken: a checkpoint actor was lost meanwhile.
    """
    run.checkpointers.ask("advance", last)
    limit = run.settings.checkpoint.storage_timeout_s
    durable = lowest_durable(run.checkpointers.ask("flush", limit, timeout_s=limit + 30))
    if durable < last:
        said = {status["store_error"] for status in run.checkpointers.ask("status")} - {""}
        raise StoreError(
            f"the store did not take the last records within {limit:g} s: durable {durable}, expected {last}; "
            f"{'; '.join(said)}",
            hint=hint,
        )
    return durable


def compare_replica(run: RunContext, last: int, digest: str, hint: str) -> None:
    """Refuse a merged state that has not the live one's bits, where a replay promises them.

    Raises:
        StateMismatch: says so; `hint` says what to do.
    """
    digests: dict[str, str] = {}
    for lsn, part in run.checkpointers.ask("digests"):
        assert lsn == last, f"the replica is at {lsn}, the run at {last}"
        digests |= part
    replica = combine_digests(digests)
    if replica != digest and run.spec.exactness == "bitwise":
        raise StateMismatch(
            f"step {last}: the merged state is {replica[:12]}, the live one {digest[:12]}",
            hint=hint,
        )


def summarise(run: RunContext, digest: str, durable: int, wall_seconds: float) -> dict[str, Any]:
    """Return the summary that `--json` prints; sizes in bytes, times in seconds."""
    last = run.lsn()
    workers = [run.crew.ask(member, "measures") for member in run.crew.members]
    statuses = run.checkpointers.status = run.checkpointers.ask("status")
    listing = run.chain.listing()
    events = run.chain.events()
    return {
        "run": run.name,
        "steps": last,
        "generation": run.chain.manifest.generation,
        "world_sizes": [size for _, size in run.sizes],
        "loss_first": _first_loss(run) if run.checkpointers else workers[0]["loss_first"],
        "loss_last": workers[0]["loss_last"],
        "digest": digest,
        "exactness": run.exactness,
        "complete_lsn": min((lsn for status in statuses for lsn in status["received"].values()), default=0),
        "durable_lsn": durable,
        "bytes_logged": listing.bytes_of(SegmentKey),
        "bytes_bases": listing.bytes_of(BaseKey),
        "bytes_compressor_state": listing.bytes_of(CompressorKey),
        "bytes_network": workers[0]["network_bytes_per_step"] * last,
        "bytes_full_checkpoint": workers[0]["full_bytes"],
        "step_seconds_median": workers[0]["step_seconds_median"],
        "exchange_seconds_median": workers[0]["exchange_seconds_median"],
        "stall_fraction": max(worker["stall_fraction"] for worker in workers),
        "log_cpu_seconds": sum(worker["sender_cpu"] for worker in workers) + sum(status["cpu"] for status in statuses),
        "train_cpu_seconds": sum(worker["train_cpu"] for worker in workers),
        "wall_seconds": wall_seconds,
        "faults": run.healings.table(),
        "evaluations": evaluations(events),
        "best": best(events),
        "state": "done" if last >= run.settings.run.steps else "stopped",
    }


def _first_loss(run: RunContext) -> float | None:
    """Return the loss of step 1, from the log: whoever computed it may be long gone."""
    first = next((key for key in run.chain.listing().segments(0) if key.first == 1), None)
    return None if first is None else float(run.chain.read(first).batches[0].column("loss")[0].as_py())
