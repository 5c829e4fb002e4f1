"""The failure policy: a table from facts to decisions, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest

from everstep.core.errors import EverstepError, Fenced, RunFailed, StoreError, UserCodeFailed
from everstep.platform.policies import FailurePolicy, suspects_of
from everstep.platform.states import (
    Budget,
    CheckpointerFacts,
    Decision,
    Ended,
    Facts,
    Fail,
    Finish,
    Finishing,
    Recovering,
    Regroup,
    ReplaceCheckpointers,
    Running,
    Starting,
    Wait,
    WorkerFacts,
    name_of,
)

POLICY = FailurePolicy(hang_timeout_s=10, storage_timeout_s=60)
TRACEBACK = 'Traceback (most recent call last):\n  File "task.py", line 3, in loss\nValueError: bad sample'


def worker(rank: int, outcome: str | None = None, lsn: int = 5, **more: Any) -> WorkerFacts:
    return WorkerFacts(f"w{rank}", rank, outcome, lsn, **more)


def facts(*workers: WorkerFacts, still_s: float = 0.0, checkpointers: tuple[CheckpointerFacts, ...] = ()) -> Facts:
    return Facts(workers, checkpointers, still_s)


def asked(*workers: WorkerFacts) -> Facts:
    return Facts(workers, stop_asked=True)


def decide(seen: Facts, policy: FailurePolicy = POLICY, budget: Budget | None = None) -> Decision:
    return policy.decide(seen, budget or Budget())


RUNS = (worker(0), worker(1))
FATAL = RunFailed("step 3: the loss is not finite")

TABLE: dict[str, tuple[Facts, type, str]] = {
    "all is well": (facts(*RUNS), Wait, "all is well"),
    "fatal": (facts(worker(0), worker(1, "failed", error=FATAL)), Fail, "worker 1"),
    "fatal beats death": (facts(worker(0, "dead"), worker(1, "failed", error=FATAL)), Fail, "worker 1"),
    "checkpointer fatal": (
        facts(*RUNS, checkpointers=(CheckpointerFacts(0), CheckpointerFacts(1, fatal=Fenced("a newer one")))),
        Fail,
        "checkpoint actor 1",
    ),
    "raised once": (facts(worker(0), worker(1, "error", message=TRACEBACK)), Regroup, "step 6: ValueError: bad sample"),
    "raised without a word": (facts(worker(0), worker(1, "error")), Regroup, "no message"),
    "dead": (facts(worker(0), worker(1, "dead")), Regroup, "world rank 1 is gone"),
    "all dead": (facts(worker(0, "dead"), worker(1, "dead")), Regroup, "world rank 0, 1 is gone"),
    "dead after the others finished": (facts(worker(0, "finished"), worker(1, "dead")), Regroup, "rank 1 is gone"),
    "broken": (facts(worker(0, "broken"), worker(1)), Regroup, "a collective broke"),
    "dead beats broken": (facts(worker(0, "broken"), worker(1, "dead")), Regroup, "world rank 1 is gone"),
    "checkpointer dead": (
        facts(*RUNS, checkpointers=(CheckpointerFacts(0, alive=False), CheckpointerFacts(1))),
        ReplaceCheckpointers,
        "checkpoint actor 0 is gone",
    ),
    "checkpointers dead at the end": (
        facts(worker(0, "finished"), worker(1, "finished"), checkpointers=(CheckpointerFacts(0, alive=False),)),
        ReplaceCheckpointers,
        "checkpoint actor 0 is gone",
    ),
    "worker before checkpointer": (
        facts(worker(0), worker(1, "dead"), checkpointers=(CheckpointerFacts(0, alive=False),)),
        Regroup,
        "rank 1 is gone",
    ),
    "finished": (facts(worker(0, "finished"), worker(1, "finished")), Finish, "last step"),
    "stopped": (asked(worker(0, "stopped"), worker(1, "stopped")), Finish, "as asked"),
    "stopped at the last step": (asked(worker(0, "stopped"), worker(1, "finished")), Finish, "as asked"),
    "paused": (facts(worker(0, "stopped"), worker(1, "stopped")), Regroup, "all workers paused after step 5"),
    "busy": (facts(worker(0, computing=True), worker(1, computing=True), still_s=99), Wait, ""),
    "busy for too long": (facts(worker(0, computing=True), worker(1), still_s=101), Regroup, "10 x workers.hang_time"),
    "busy while others wait": (facts(worker(0, entered=3), worker(1, entered=2, computing=True), still_s=99), Wait, ""),
    "silent while others are busy": (
        facts(worker(0, computing=True), worker(1, answers=False), still_s=11),
        Regroup,
        "suspect 1",
    ),
    "checkpointer leaves": (
        facts(*RUNS, checkpointers=(CheckpointerFacts(0, leaves=True),)),
        ReplaceCheckpointers,
        "leave",
    ),
    "one still runs": (facts(worker(0, "finished"), worker(1)), Wait, ""),
    "one still stops": (facts(worker(0, "stopped"), worker(1)), Wait, ""),
    "slow": (facts(*RUNS, still_s=10.0), Wait, ""),
    "hang": (facts(*RUNS, still_s=10.1), Regroup, "no progress for 10.1 s (workers.hang_timeout_s = 10)"),
    "store slow": (facts(*RUNS, checkpointers=(CheckpointerFacts(0, store_error_s=60.0),)), Wait, ""),
    "store lost": (
        facts(*RUNS, checkpointers=(CheckpointerFacts(0, store_error_s=61.0, store_error="disk full"),)),
        Fail,
        "the store is lost",
    ),
    "finished is no hang": (facts(worker(0, "finished"), worker(1, "finished"), still_s=99), Finish, "last step"),
}


@pytest.mark.parametrize("case", list(TABLE))
def test_facts_lead_to_decisions_with_reasons(case: str) -> None:
    seen, kind, reason = TABLE[case]
    decision = decide(seen)
    assert type(decision) is kind
    assert reason in decision.reason and decision.reason


def test_deciding_is_repeatable_without_a_memory() -> None:
    for seen, _, _ in TABLE.values():
        assert repr(decide(seen)) == repr(decide(seen))


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        ("dead", "worker_lost"),
        ("all dead", "workers_lost"),
        ("broken", "worker_lost"),
        ("raised once", "user_error"),
        ("hang", "hang"),
    ],
)
def test_a_recovery_says_what_was_lost(case: str, kind: str) -> None:
    decision = decide(TABLE[case][0])
    assert isinstance(decision, Regroup) and decision.kind == kind and decision.kill == ()


def test_finishing_says_whether_it_was_asked_for() -> None:
    for case, stopped in (("finished", False), ("stopped", True), ("stopped at the last step", True)):
        decision = decide(TABLE[case][0])
        assert isinstance(decision, Finish) and decision.stopped is stopped


def test_nobody_to_look_at_is_nothing_to_finish() -> None:
    assert isinstance(decide(facts()), Wait)


# --- fatal


def test_the_error_of_whoever_gave_up_ends_the_run() -> None:
    decision = decide(TABLE["fatal"][0])
    assert isinstance(decision, Fail) and decision.error is FATAL
    decision = decide(TABLE["checkpointer fatal"][0])
    assert isinstance(decision, Fail) and isinstance(decision.error, Fenced)


def test_a_lost_store_is_explained() -> None:
    decision = decide(TABLE["store lost"][0])
    assert isinstance(decision, Fail) and isinstance(decision.error, StoreError)
    assert all(part in decision.error.message for part in ("61 s", "checkpoint.storage_timeout_s = 60", "disk full"))
    assert "resume" in decision.error.hint


def test_a_lost_store_may_be_tolerated() -> None:
    policy = FailurePolicy(hang_timeout_s=10, storage_timeout_s=60, stop_on_storage_loss=False)
    assert isinstance(decide(TABLE["store lost"][0], policy), Wait)


# --- the user's own code


def test_the_users_error_is_believed_the_second_time_at_one_step() -> None:
    budget = Budget()
    seen = facts(worker(0, "broken"), worker(1, "error", message=TRACEBACK))
    assert isinstance(decide(seen, budget=budget), Regroup)
    decision = decide(seen, budget=budget)
    assert isinstance(decision, Fail) and isinstance(decision.error, UserCodeFailed)
    assert decision.error.message.startswith(TRACEBACK)
    assert "worker 1 at step 6, 2 times" in decision.error.message and "resume" in decision.error.hint


def test_errors_at_different_steps_are_different_errors() -> None:
    budget = Budget()
    for lsn in range(5, 9):
        seen = facts(worker(0), worker(1, "error", lsn=lsn, message=TRACEBACK))
        assert isinstance(decide(seen, budget=budget), Regroup)


def test_an_error_on_another_worker_at_the_same_step_counts_too() -> None:
    budget = Budget()
    assert isinstance(decide(facts(worker(0, "error", message="a"), worker(1)), budget=budget), Regroup)
    decision = decide(facts(worker(0), worker(1, "error", message="b")), budget=budget)
    assert isinstance(decision, Fail) and decision.error.message.startswith("b")


def test_how_often_an_error_may_come_is_a_setting() -> None:
    policy, budget = FailurePolicy(hang_timeout_s=10, storage_timeout_s=60, same_error=1), Budget()
    assert isinstance(decide(TABLE["raised once"][0], policy, budget), Fail)


# --- hangs

HANGS: dict[str, tuple[tuple[WorkerFacts, ...], tuple[str, ...]]] = {
    "silent": ((worker(0), worker(1, answers=False), worker(2, answers=False)), ("w1", "w2")),
    "silent beats lagging": ((worker(0, lsn=4), worker(1, answers=False)), ("w1",)),
    "lagging in steps": ((worker(0), worker(1, lsn=4, entered=99)), ("w1",)),
    "lagging in collectives": ((worker(0, entered=7), worker(1, entered=6), worker(2, entered=7)), ("w1",)),
    "several lag": ((worker(0, entered=6), worker(1, entered=6), worker(2, entered=7)), ("w0", "w1")),
    "no suspect": ((worker(0, entered=7), worker(1, entered=7)), ()),
    "alone": ((worker(0),), ()),
}


@pytest.mark.parametrize("case", list(HANGS))
def test_who_hangs(case: str) -> None:
    workers, suspects = HANGS[case]
    assert tuple(each.identity for each in suspects_of(workers)) == suspects
    decision = decide(facts(*workers, still_s=11))
    assert isinstance(decision, Regroup) and decision.kill == suspects
    names = ", ".join(name.removeprefix("w") for name in suspects) or "nobody in particular"
    assert decision.reason.endswith(f"suspect {names}")


# --- what was broken off


def test_whatever_was_broken_off_is_recovered_and_says_why() -> None:
    decision = POLICY.interrupted("a collective failed", TABLE["all is well"][0], Budget())
    assert decision == Regroup("a collective failed", "worker_lost")
    decision = POLICY.interrupted("a collective failed", TABLE["fatal"][0], Budget())
    assert isinstance(decision, Fail) and decision.error is FATAL


def test_breaking_off_has_the_same_budget() -> None:
    policy, budget = FailurePolicy(hang_timeout_s=10, storage_timeout_s=60, fruitless=3), Budget()
    decide(TABLE["dead"][0], policy, budget)
    for _ in range(2):
        assert isinstance(policy.interrupted("again", TABLE["all is well"][0], budget), Regroup)
    decision = policy.interrupted("again", TABLE["all is well"][0], budget)
    assert isinstance(decision, Fail) and isinstance(decision.error, RunFailed)


# --- the budget


def test_recoveries_without_a_step_between_them_end_the_run() -> None:
    policy, budget = FailurePolicy(hang_timeout_s=10, storage_timeout_s=60, fruitless=3), Budget()
    seen = facts(worker(0), worker(1, "dead"))
    for _ in range(3):
        assert isinstance(decide(seen, policy, budget), Regroup)
    decision = decide(seen, policy, budget)
    assert isinstance(decision, Fail) and isinstance(decision.error, RunFailed)
    assert "4 recoveries" in decision.error.message and "world rank 1 is gone" in decision.error.message


def test_a_finished_step_renews_the_budget() -> None:
    policy, budget = FailurePolicy(hang_timeout_s=10, storage_timeout_s=60, fruitless=2), Budget()
    for lsn in (5, 5, 6, 6, 7, 7):
        decision = decide(facts(worker(0, lsn=lsn), worker(1, "dead", lsn=5)), policy, budget)
        assert isinstance(decision, Regroup)
    assert isinstance(decide(facts(worker(0, lsn=7), worker(1, "dead")), policy, budget), Fail)


def test_waiting_and_replacing_checkpointers_cost_nothing() -> None:
    budget = Budget()
    for _ in range(20):
        decide(TABLE["all is well"][0], budget=budget)
        decide(TABLE["checkpointer dead"][0], budget=budget)
    assert budget == Budget()


def test_the_budget_counts_by_step() -> None:
    budget = Budget()
    assert [budget.spend(lsn) for lsn in (0, 0, 1, 1, 1, 2, 1)] == [1, 2, 1, 2, 3, 1, 1]


# --- words


@pytest.mark.parametrize(
    ("state", "word"),
    [
        (Starting(), "starting"),
        (Running(), "running"),
        (Recovering(Regroup("r", "k")), "recovering"),
        (Finishing(False), "finishing"),
        (Ended(), "done"),
        (Ended(stopped=True), "stopped"),
        (Ended(EverstepError("no")), "failed"),
    ],
)
def test_every_state_has_a_word(state: Any, word: str) -> None:
    assert name_of(state) == word
