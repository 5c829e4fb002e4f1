"""The controller: from state to state by what it sees, whatever is interrupted on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from everstep.core.errors import ChainError, EpochOver, EverstepError, GroupBroken, RunFailed, UserCodeFailed
from everstep.platform.controller import Controller
from everstep.platform.policies import FailurePolicy
from everstep.platform.scaling import ScalingPolicy
from everstep.platform.states import (
    CheckpointerFacts,
    Facts,
    Finishing,
    NewcomerFacts,
    Recovering,
    Regroup,
    ReplaceCheckpointers,
    Running,
    Scaling,
    Starting,
    WorkerFacts,
    name_of,
)

POLICY = FailurePolicy(hang_timeout_s=10, storage_timeout_s=60, fruitless=3)
SCALING = ScalingPolicy(least=1, most=2, spares=0, micro_shards=4)


def both(*outcomes: str | None, lsn: int = 5, **more: Any) -> Facts:
    workers = (WorkerFacts(f"w{rank}", rank, outcome, lsn, **more) for rank, outcome in enumerate(outcomes))
    return Facts(tuple(workers))


WELL, DEAD = both(None, None), both(None, "dead")
DONE, STOPPED = both("finished", "finished"), replace(both("stopped", "stopped"), stop_asked=True)
ALONE = both(None)
NO_LOG = Facts(WELL.workers, (CheckpointerFacts(0, alive=False),))


class Mechanism:
    """Shows facts one after the other, the last one for ever, and does what verbs ask for as scripted.

    Args:
        facts: what `observe` returns, or raises.
        script: by verb, what its calls raise in turn; None: nothing.
        limit: verbs before the test gives up.
    """

    def __init__(self, facts: list[Any], limit: int = 60, **script: list[Exception | None]) -> None:
        self.facts, self.script, self.limit = list(facts), script, limit
        self.calls: list[Any] = []
        self.controller: Controller
        self.words: list[str] = []

    def _do(self, verb: str, *detail: Any) -> None:
        self.calls.append((verb, *detail))
        self.words.append(name_of(self.controller.state))
        assert len(self.calls) < self.limit, f"no end: {self.calls[-3:]}"
        pending = self.script.get(verb, [])
        error = pending.pop(0) if pending else None
        if error is not None:
            raise error

    def start(self) -> None:
        self._do("start")

    def observe(self) -> Facts:
        self._do("observe")
        seen = self.facts.pop(0) if len(self.facts) > 1 else self.facts[0]
        if isinstance(seen, Exception):
            raise seen
        assert isinstance(seen, Facts)
        return seen

    def regroup(self, decision: Regroup) -> None:
        self._do("regroup", decision.kind)

    def replace_checkpointers(self, decision: ReplaceCheckpointers) -> None:
        self._do("replace", decision.indices)

    def resize(self, decision: Scaling) -> None:
        self._do("resize", type(decision).__name__)

    def finish(self, *, stopped: bool) -> None:
        self._do("finish", stopped)


def drive(mechanism: Mechanism, tell: Callable[[str], None] = lambda line: None) -> Controller:
    controller = mechanism.controller = Controller(mechanism, POLICY, SCALING, tell)
    controller.run()
    return controller


def verbs(mechanism: Mechanism) -> list[Any]:
    return [call if len(call) > 1 else call[0] for call in mechanism.calls if call[0] != "observe"]


def test_a_run_without_trouble() -> None:
    mechanism = Mechanism([WELL, WELL, DONE])
    ended = drive(mechanism).run()
    assert verbs(mechanism) == ["start", ("finish", False)]
    assert ended.error is None and not ended.stopped
    assert mechanism.words == ["starting", "running", "running", "running", "finishing"]


def test_a_lost_worker_and_the_way_back() -> None:
    lines: list[str] = []
    mechanism = Mechanism([WELL, DEAD, WELL, DONE])
    controller = drive(mechanism, lines.append)
    assert verbs(mechanism) == ["start", ("regroup", "worker_lost"), ("finish", False)]
    assert mechanism.words == ["starting", "running", "running", "recovering", "running", "running", "finishing"]
    assert lines[0] == "the process of world rank 1 is gone"
    assert name_of(controller.state) == "done"


def test_a_lost_checkpointer_is_replaced_while_training_goes_on() -> None:
    mechanism = Mechanism([NO_LOG, WELL, DONE])
    drive(mechanism)
    assert verbs(mechanism) == ["start", ("replace", (0,)), ("finish", False)]


def test_a_run_that_was_asked_to_stop() -> None:
    mechanism = Mechanism([WELL, STOPPED])
    ended = drive(mechanism).run()
    assert verbs(mechanism) == ["start", ("finish", True)] and ended.stopped and ended.error is None


def test_a_group_that_can_grow_does_so_while_it_trains() -> None:
    lines: list[str] = []
    steps = [NewcomerFacts(), NewcomerFacts(1), NewcomerFacts(1, built=1), NewcomerFacts(1, 1, ready=1)]
    facts = [replace(ALONE, newcomers=there) for there in steps]
    facts += [replace(ALONE, newcomers=steps[-1], pausing=True), both("stopped"), WELL, DONE]
    mechanism = Mechanism(facts)
    drive(mechanism, lines.append)
    wanted = ["start", ("resize", "Ask"), ("resize", "Prepare"), ("resize", "Pause"), ("regroup", "resize")]
    assert verbs(mechanism) == [*wanted, ("finish", False)]
    assert set(mechanism.words[:6]) == {"starting", "running"}
    assert "1 -> 2" in lines[2] and all(lines)


def test_a_regroup_that_is_interrupted_is_begun_again() -> None:
    lines: list[str] = []
    facts = [DEAD, both("dead", "dead"), WELL, DONE]
    mechanism = Mechanism(facts, regroup=[GroupBroken("a collective failed"), None])
    ended = drive(mechanism, lines.append).run()
    assert [verb[0] for verb in verbs(mechanism)[1:]] == ["regroup", "regroup", "finish"]
    assert ended.error is None and lines[0] == "the process of world rank 1 is gone" and len(lines) >= 2


def test_an_interruption_of_which_nothing_is_seen_is_a_recovery_too() -> None:
    mechanism = Mechanism([DEAD, WELL, WELL, DONE], regroup=[EpochOver("ended"), None])
    drive(mechanism)
    assert verbs(mechanism) == ["start", ("regroup", "worker_lost"), ("regroup", "worker_lost"), ("finish", False)]


def test_a_finish_that_is_interrupted_recovers_and_finishes_again() -> None:
    mechanism = Mechanism([DONE, both("finished", "dead"), WELL, DONE], finish=[GroupBroken("a worker is gone"), None])
    ended = drive(mechanism).run()
    assert verbs(mechanism) == ["start", ("finish", False), ("regroup", "worker_lost"), ("finish", False)]
    assert ended.error is None


def test_a_finish_may_meet_a_lost_checkpointer() -> None:
    gone = Facts(DONE.workers, (CheckpointerFacts(0, alive=False),))
    mechanism = Mechanism([DONE, gone, gone, DONE], finish=[GroupBroken("a checkpoint actor is gone"), None])
    assert drive(mechanism).run().error is None
    assert verbs(mechanism)[1] == verbs(mechanism)[-1] == ("finish", False) and ("replace", (0,)) in verbs(mechanism)


def test_a_start_and_a_replacement_may_be_interrupted() -> None:
    mechanism = Mechanism([DEAD, WELL, DONE], start=[GroupBroken("a worker is gone")])
    drive(mechanism)
    assert verbs(mechanism) == ["start", ("regroup", "worker_lost"), ("finish", False)]
    mechanism = Mechanism([NO_LOG, DEAD, WELL, DONE], replace=[GroupBroken("a worker is gone")])
    drive(mechanism)
    assert verbs(mechanism) == ["start", ("replace", (0,)), ("regroup", "worker_lost"), ("finish", False)]


@pytest.mark.parametrize("verb", ["start", "observe", "regroup", "replace", "finish"])
def test_an_error_in_any_verb_ends_the_run_with_it(verb: str) -> None:
    error = ChainError("the log cannot be restored", hint="look")
    mechanism = Mechanism([DEAD, NO_LOG, DONE], **{verb: [error]})
    controller = drive(mechanism)
    ended = controller.run()
    assert ended.error is error and name_of(controller.state) == "failed"
    assert mechanism.calls[-1][0] == verb


def test_an_error_met_while_looking_after_an_interruption_ends_the_run_with_it() -> None:
    error = ChainError("the manifests were removed")
    mechanism = Mechanism([DEAD, error], regroup=[GroupBroken("a collective failed")])
    assert drive(mechanism).run().error is error


def test_an_interruption_met_while_looking_after_an_interruption_is_one_more() -> None:
    mechanism = Mechanism([DEAD, GroupBroken("again"), WELL, DONE], regroup=[GroupBroken("a collective failed"), None])
    assert drive(mechanism).run().error is None


def test_user_code_that_raises_again_ends_the_run_with_its_traceback() -> None:
    lines: list[str] = []
    raised = both(None, "error", message="Traceback\nValueError: bad sample")
    mechanism = Mechanism([raised, raised])
    ended = drive(mechanism, lines.append).run()
    assert verbs(mechanism) == ["start", ("regroup", "user_error")]
    assert isinstance(ended.error, UserCodeFailed) and ended.error.message.startswith("Traceback\nValueError")
    assert lines == ["worker 1 raised at step 6: ValueError: bad sample", "user code raised again at the same step"]


def test_an_error_that_was_raised_once_is_counted_once_although_it_is_seen_twice() -> None:
    """The group broke again before the workers ran again, so the same outcome is still there to see."""
    raised = both(None, "error", message="Traceback\nValueError: bad sample")
    mechanism = Mechanism([raised, raised, WELL, DONE], regroup=[GroupBroken("a collective failed"), None])
    assert drive(mechanism).run().error is None


def test_recoveries_that_lead_nowhere_end_the_run() -> None:
    ended = drive(Mechanism([DEAD])).run()
    assert isinstance(ended.error, RunFailed) and "4 recoveries" in ended.error.message


@pytest.mark.parametrize("verb", ["regroup", "finish", "start"])
def test_interruptions_without_end_end_the_run(verb: str) -> None:
    """Nothing wrong is seen, and still every try is interrupted."""
    facts = {"regroup": [DEAD, WELL], "finish": [DONE], "start": [WELL]}[verb]
    script: dict[str, list[Exception | None]] = {"regroup": [GroupBroken("again")] * 100}
    if verb != "regroup":
        script[verb] = [GroupBroken("again")] * 100
    ended = drive(Mechanism(list(facts), limit=40, **script)).run()
    assert isinstance(ended.error, EverstepError)


def test_what_is_no_error_of_ours_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        drive(Mechanism([WELL], start=[ZeroDivisionError()]))


def test_every_change_of_decision_is_told() -> None:
    lines: list[str] = []
    drive(Mechanism([DEAD, NO_LOG, DONE]), lines.append)
    assert lines[:2] == ["the process of world rank 1 is gone", "checkpoint actor 0 is gone"]
    assert lines[2:] == ["all workers took the last step"]


def test_one_step_at_a_time() -> None:
    mechanism = Mechanism([WELL, DEAD, NO_LOG, DONE])
    controller = mechanism.controller = Controller(mechanism, POLICY, SCALING, lambda line: None)
    state: Any = controller.step(Starting())
    assert state == Running()
    state = controller.step(state)
    assert state == Running()
    state = controller.step(state)
    assert isinstance(state, Recovering) and isinstance(state.decision, Regroup)
    state = controller.step(controller.step(state))
    assert state == Recovering(ReplaceCheckpointers("checkpoint actor 0 is gone", (0,)))
    assert controller.step(controller.step(state)) == Finishing(False)
