"""Policies: from facts to a decision that carries its reason. Pure; time is among the facts."""

from __future__ import annotations

from dataclasses import dataclass

from everstep.core.errors import RunFailed, StoreError, UserCodeFailed
from everstep.platform.states import (
    Budget,
    Decision,
    Facts,
    Fail,
    Finish,
    Regroup,
    ReplaceCheckpointers,
    Wait,
    WorkerFacts,
)

SLOW = 10  # times as long as a worker that hangs has one that answers and is busy with the task's own code


@dataclass(frozen=True)
class FailurePolicy:
    """Who must act decides what happens: user code stops the run, lost processes are replaced, a store is waited for.

    Args:
        hang_timeout_s: no sign of progress for so long is a hang; `SLOW` times that where the task's code is busy.
        storage_timeout_s: a store that refuses for so long is lost.
        same_error: how often the user's code may raise at one step before it is believed.
        fruitless: recoveries without a finished step between them before the run gives up.
        stop_on_storage_loss: whether a lost store ends the run.
    """

    hang_timeout_s: float
    storage_timeout_s: float
    same_error: int = 2
    fruitless: int = 8
    stop_on_storage_loss: bool = True

    def decide(self, facts: Facts, budget: Budget) -> Decision:
        """Return what to do now."""
        return (
            self._fatal(facts)
            or self._user_error(facts, budget)
            or self._lost(facts, budget)
            or self._checkpointers(facts)
            or self._ended(facts)
            or self._hang(facts, budget)
            or Wait()
        )

    def interrupted(self, reason: str, facts: Facts, budget: Budget) -> Decision:
        """Return what to do after a recovery, or the end, was broken off because something else was lost meanwhile."""
        return self._fatal(facts) or self._regroup(reason, "worker_lost", facts, budget)

    def _fatal(self, facts: Facts) -> Decision | None:
        for worker in facts.workers:
            if worker.outcome == "failed" and worker.error is not None:
                return Fail(f"worker {worker.world_rank} says the run cannot go on", worker.error)
        for checkpointer in facts.checkpointers:
            if checkpointer.fatal is not None:
                return Fail(f"checkpoint actor {checkpointer.index} says the run cannot go on", checkpointer.fatal)
            if self.stop_on_storage_loss and (checkpointer.store_error_s or 0) > self.storage_timeout_s:
                return Fail(
                    "the store is lost",
                    StoreError(
                        f"the store has refused to take records for {checkpointer.store_error_s:.0f} s "
                        f"(checkpoint.storage_timeout_s = {self.storage_timeout_s:g}): {checkpointer.store_error}",
                        hint="what was stored is whole; make room or mend the store, then `everstep resume` the run",
                    ),
                )
        return None

    def _user_error(self, facts: Facts, budget: Budget) -> Decision | None:
        raised = [worker for worker in facts.workers if worker.outcome == "error"]
        if not raised:
            return None
        worker = raised[0]
        step = worker.lsn + 1
        budget.user_errors[step] = budget.user_errors.get(step, 0) + 1
        if budget.user_errors[step] >= self.same_error:
            error = UserCodeFailed(
                f"{worker.message.rstrip()}\n\nthe above was raised in worker {worker.world_rank} at step {step}, "
                f"{budget.user_errors[step]} times",
                hint="mend it, then `everstep resume` the run: it goes on from its last finished step",
            )
            return Fail("user code raised again at the same step", error)
        last = worker.message.strip().splitlines()[-1] if worker.message.strip() else "no message"
        return self._regroup(f"worker {worker.world_rank} raised at step {step}: {last}", "user_error", facts, budget)

    def _ended(self, facts: Facts) -> Decision | None:
        outcomes = {worker.outcome for worker in facts.workers}
        if not outcomes:
            return None
        if outcomes == {"finished"}:
            return Finish("all workers took the last step", stopped=False)
        if outcomes <= {"finished", "stopped"}:
            if facts.stop_asked:
                return Finish("all workers stopped after the same step, as asked", stopped=True)
            return Regroup(f"all workers paused after step {max(w.lsn for w in facts.workers)}", "resize")
        return None

    def _lost(self, facts: Facts, budget: Budget) -> Decision | None:
        dead = [worker for worker in facts.workers if worker.outcome == "dead"]
        if dead:
            names = ", ".join(str(worker.world_rank) for worker in dead)
            kind = "worker_lost" if len(dead) < len(facts.workers) else "workers_lost"
            return self._regroup(f"the process of world rank {names} is gone", kind, facts, budget)
        if any(worker.outcome == "broken" for worker in facts.workers):
            return self._regroup("a collective broke", "worker_lost", facts, budget)
        return None

    def _checkpointers(self, facts: Facts) -> Decision | None:
        dead = tuple(checkpointer.index for checkpointer in facts.checkpointers if not checkpointer.alive)
        if dead:
            return ReplaceCheckpointers(f"checkpoint actor {', '.join(map(str, dead))} is gone", dead)
        leaving = tuple(checkpointer.index for checkpointer in facts.checkpointers if checkpointer.leaves)
        if leaving:
            return ReplaceCheckpointers(
                f"checkpoint actor {', '.join(map(str, leaving))} has to leave its node", leaving
            )
        return None

    def _hang(self, facts: Facts, budget: Budget) -> Decision | None:
        suspects = suspects_of(facts.workers)
        slow = any(worker.computing for worker in suspects or facts.workers)
        limit = self.hang_timeout_s * (SLOW if slow else 1)
        if facts.still_s <= limit:
            return None
        names = ", ".join(str(worker.world_rank) for worker in suspects) or "nobody in particular"
        times = f"{SLOW} x " if slow else ""
        reason = (
            f"no progress for {facts.still_s:.1f} s ({times}workers.hang_timeout_s = {self.hang_timeout_s:g}); "
            f"suspect {names}"
        )
        return self._regroup(reason, "hang", facts, budget, tuple(worker.identity for worker in suspects))

    def _regroup(self, reason: str, kind: str, facts: Facts, budget: Budget, kill: tuple[str, ...] = ()) -> Decision:
        lsn = max((worker.lsn for worker in facts.workers), default=0)
        if budget.spend(lsn) > self.fruitless:
            return Fail(
                reason,
                RunFailed(
                    f"{budget.regroups_here} recoveries without a finished step after step {lsn}; the last: {reason}",
                    hint="look at the workers' logs; a step that needs more memory than there is looks like this",
                ),
            )
        return Regroup(reason, kind, kill)


def suspects_of(workers: tuple[WorkerFacts, ...]) -> tuple[WorkerFacts, ...]:
    """Return who hangs: those that do not answer; else those behind the others in steps or collectives; else none."""
    silent = tuple(worker for worker in workers if not worker.answers)
    if silent:
        return silent
    places = {(worker.lsn, worker.entered) for worker in workers}
    if len(places) < 2:
        return ()
    return tuple(worker for worker in workers if (worker.lsn, worker.entered) == min(places))
