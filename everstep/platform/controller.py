"""The controller: observe, decide, execute, until the run has ended. No Ray, no torch.

Starting ──> Running ──> Finishing ──> Ended
             │    ↑          │
             ↓    │          │ something was lost meanwhile
          Recovering <───────┘
          Resizing            (steps are taken all the while)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from everstep.core.errors import EverstepError, Interruption
from everstep.platform.policies import FailurePolicy
from everstep.platform.scaling import ScalingPolicy
from everstep.platform.states import (
    Ask,
    Budget,
    Decision,
    Ended,
    Facts,
    Fail,
    Finish,
    Finishing,
    Interrupted,
    Pause,
    Prepare,
    Recovering,
    Regroup,
    ReplaceCheckpointers,
    Resizing,
    Running,
    Starting,
    State,
    Wait,
)


class Mechanism(Protocol):
    """What a controller can have done; every verb returns when it is done."""

    def start(self) -> None:
        """Make the actors, or find those that live, and set the workers running."""

    def observe(self) -> Facts:
        """Look at the run; may wait a moment for something to happen."""
        ...

    def regroup(self, decision: Regroup) -> None:
        """Replace who is lost, form the group anew and set it running. `Interruption`: it broke again meanwhile."""

    def replace_checkpointers(self, decision: ReplaceCheckpointers) -> None:
        """Put new checkpoint actors in the place of lost ones while training goes on."""

    def resize(self, decision: Pause | Prepare | Ask) -> None:
        """Begin what a scaling decision asks for; returns at once."""

    def finish(self, *, stopped: bool) -> None:
        """Make everything durable and close the log. `Interruption`: something was lost meanwhile."""


class Controller:
    """Runs one run.

    Args:
        mechanism: carries decisions out.
        policy: what to do about what was lost.
        scaling: how many should train, and who.
        tell: called with one line whenever the decision changes.
    """

    def __init__(
        self, mechanism: Mechanism, policy: FailurePolicy, scaling: ScalingPolicy, tell: Callable[[str], None]
    ) -> None:
        self.mechanism, self.policy, self.scaling, self.tell = mechanism, policy, scaling, tell
        self.state: State = Starting()
        self.budget = Budget()

    def run(self) -> Ended:
        """Go on until the run has ended, and return how."""
        while not isinstance(self.state, Ended):
            try:
                self.state = self.step(self.state)
            except Interruption as interruption:  # a verb did not come to its end
                self.state = Interrupted(interruption.message)
            except EverstepError as error:
                self.state = Ended(error)
        return self.state

    def step(self, state: State) -> State:
        """Do what a state asks for and return the next one."""
        if isinstance(state, Starting):
            self.mechanism.start()
            return Running()
        if isinstance(state, Running):
            facts = self.mechanism.observe()
            return self._after(self.policy.decide(facts, self.budget), facts)
        if isinstance(state, Resizing):
            self.mechanism.resize(state.decision)
            return Running()
        if isinstance(state, Interrupted):
            facts = self.mechanism.observe()
            return self._after(self.policy.interrupted(state.reason, facts, self.budget), facts)
        if isinstance(state, Recovering):
            if isinstance(state.decision, Regroup):
                self.mechanism.regroup(state.decision)
            else:
                self.mechanism.replace_checkpointers(state.decision)
            return Running()
        assert isinstance(state, Finishing)
        self.mechanism.finish(stopped=state.stopped)
        return Ended(stopped=state.stopped)

    def _after(self, decision: Decision, facts: Facts) -> State:
        """Return the state that a decision leads to."""
        if isinstance(decision, Wait):
            decision = self.scaling.decide(facts)
        if isinstance(decision, Wait):
            return Running()
        self.tell(decision.reason)
        if isinstance(decision, Regroup):
            return Recovering(self.scaling.placed(decision, facts))
        if isinstance(decision, ReplaceCheckpointers):
            return Recovering(decision)
        if isinstance(decision, Finish):
            return Finishing(decision.stopped)
        if isinstance(decision, Fail):
            return Ended(decision.error)
        return Resizing(decision)
