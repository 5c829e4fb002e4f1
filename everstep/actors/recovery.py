"""Where the state comes from after a fault: survivors, then the replica, then the store. One order, kept here."""

from __future__ import annotations

from typing import Any

import numpy as np

from everstep.actors.checkpointers import merged
from everstep.actors.context import RunContext
from everstep.actors.healing import Healing
from everstep.actors.member import Member
from everstep.core.errors import ChainError, ChainGap, RunFailed
from everstep.storage.manifest import CompressorSnapshot
from everstep.storage.plan import plan_restore, reachable
from everstep.training.history import sizes_between
from everstep.training.restore import best_snapshot


def complete_log(run: RunContext, whole: list[Member], top: int, *, flush: bool) -> None:
    """Have the log hold every finished step: only then may anybody read a replica.

    Survivors resend what is missing, of any shard. What nobody holds any more is replaced by a base from a survivor.

    Args:
        run: the run.
        whole: the workers that have its state.
        top: the last finished step.
        flush: have it written, too: somebody who held undurable records is gone, or goes.
    """
    if not run.checkpointers:
        return
    have = run.checkpointers.begin_epoch(run.group_epoch, top)
    for member in sorted(whole, key=lambda m: -m.lsn):
        if min(have.values()) >= top:
            break
        run.crew.ask(member, "connect_checkpointers", run.checkpointers.actors)
        have = run.crew.ask(member, "resend", run.group_epoch, have)
    if min(have.values()) < top:
        rebase(run, next(member for member in whole if member.lsn == top))
    run.checkpointers.ask("advance", top)
    if flush:
        run.checkpointers.ask("flush", 10.0)  # a dead worker's undurable records are now in one place only


def rebase(run: RunContext, source: Member) -> None:
    """Start the log again from a worker's state, and say so: no finished step is lost, but some cannot be restored."""
    lsn, tensors = run.crew.ask(source, "tensors")
    run.checkpointers.ask("rebase", lsn, tensors)
    run.tell(f"records of some steps up to {lsn} died with their holders; the log goes on from a base at {lsn}")


def load_state(run: RunContext, healing: Healing | None, finished: int, how: str) -> None:
    """Give world rank 0 the state to go on from, when no worker has it; the others get it when the group forms.

    Args:
        run: the run.
        healing: the account of this fault; where it was healed from is written there. None: the run begins.
        finished: the last step that is known to have been finished.
        how: "exact" goes back to the last compressor snapshot if there is a residual; "resume" lets that start at zero;
            "exact if possible" is the one if the log has all that it takes, else the other.

    Raises:
        ChainGap: "exact" is asked for and the log has a gap behind the last snapshot.
    """
    if not run.checkpointers:
        if run.sizes:
            raise RunFailed(
                "all workers are lost and there is no log (checkpoint.actors = 0)", hint="set checkpoint.actors = 1"
            )
        run.crew.ask(run.crew.members[0], "begin")
        return
    run.checkpointers.ask("ready")
    complete = _common(run)
    run.checkpointers.ask("advance", complete)
    run.checkpointers.ask("begin_epoch", run.group_epoch, complete)  # drops what other shards have beyond
    start = complete
    if run.recipe.keeps_residual and how != "resume" and (found := _recomputable(run, complete, how)) is not None:
        start = _load_exact(run, *found)
    else:
        _send_state(run, None, None)
        if run.recipe.keeps_residual and complete > 0:
            run.become("warm")
    if healing is not None:
        healing.steps_lost, healing.steps_recomputed = max(finished - complete, 0), complete - start
        healing.exactness = run.exactness
        healing.tier = "store" if start < complete else healing.tier
        run.tell(f"going on from step {start} ({run.exactness}); the log reaches step {complete}")


def _common(run: RunContext) -> int:
    """Return the last step that all shards have, with no shard's log going on beyond it.

    Nobody is left to send the others what one shard has in the store beyond it: that is cut off, by a takeover.
    """
    for _ in range(2):
        acks = run.checkpointers.ask("begin_epoch", run.group_epoch, None)
        complete = min(merged(acks).values())
        if max(lsn for ack in acks for lsn in ack.durable.values()) <= complete:
            break
        run.renew_checkpointers("common")
    return complete


def _recomputable(run: RunContext, complete: int, how: str) -> tuple[CompressorSnapshot | None, int] | None:
    """Return the last compressor snapshot and its lsn, from where every step up to `complete` has its record.

    None: there is a gap behind it. Without a snapshot it is the start, a fork's too, where every residual is zero.
    """
    snapshot, origin = best_snapshot(run.chain, complete), run.chain.manifest.origin
    lsn = snapshot.lsn if snapshot else origin.step if origin else 0
    run.checkpointers.ask("flush", run.settings.checkpoint.storage_timeout_s)
    manifest, listing = run.chain.manifest, run.chain.listing()
    later = frozenset(base for base in listing.bases() if base.lsn > lsn)
    try:
        plan_restore(manifest, listing, target=lsn)
        reached = min(reachable(manifest, listing, shard, later) for shard in manifest.shards)
    except ChainError:
        reached = -1
    why = "the log has a gap there" if reached < complete else _other_sizes(run, snapshot, lsn, complete)
    if not why:
        return snapshot, lsn
    what = f"steps {lsn + 1} to {complete} cannot be recomputed from the last compressor snapshot: {why}"
    if how == "exact":
        raise ChainGap(f"run {run.name!r}: {what}", hint=f"everstep resume {run.name} without --exact (warm)")
    run.tell(what)
    return None


def _other_sizes(run: RunContext, snapshot: CompressorSnapshot | None, lsn: int, complete: int) -> str:
    """Return why the present world size would not lead to the logged bits; "" if it does."""
    present = len(run.crew.members)
    if run.recipe.residual == "survivor" and snapshot is not None and snapshot.slices != present:
        return f"the snapshot has a residual for each of {snapshot.slices} workers, there are {present}"
    used = sizes_between(run.sizes, lsn, complete)
    if run.settings.run.determinism == "step" and used - {present}:
        return (
            f'they were taken by {", ".join(map(str, sorted(used)))} workers, there are {present} (determinism "step")'
        )
    return ""


def _load_exact(run: RunContext, snapshot: CompressorSnapshot | None, lsn: int) -> int:
    """Load the state at a compressor snapshot; recomputed records will be compared with the logged ones."""
    run.checkpointers.ask("expect_recomputed", lsn)
    if snapshot is None:
        _send_state(run, lsn, None)
        return lsn
    parts = run.checkpointers.ask_one(0, "residual", snapshot)
    members = run.crew.members
    if run.recipe.residual == "replicated":
        _send_state(run, lsn, np.concatenate([parts[number] for number in range(snapshot.slices)]))
        return lsn
    for place, member in enumerate(members):
        run.crew.ask(member, "load_residual", lsn, parts[place])
    _send_state(run, lsn, None)
    return lsn


def _send_state(run: RunContext, lsn: int | None, residual: Any) -> None:
    answers = run.checkpointers.ask("state", lsn)
    tensors = [part for _, part in answers]
    run.crew.ask(run.crew.members[0], "load", answers[0][0], tensors, residual)
