"""What the controller sees, decides and is in: frozen values, no Ray, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from everstep.core.errors import EverstepError


@dataclass(frozen=True)
class WorkerFacts:
    """One member of the group.

    Attributes:
        identity: its name among all workers that ever were.
        world_rank: its place in the group.
        outcome: None while it runs; else how its run ended: "finished", "stopped" (asked to), "broken" (a peer is
            gone), "error" (its own code raised), "failed" (the run may not go on), "dead" (the process is gone).
        lsn: its last finished step, as far as known.
        entered: collectives it has begun in this group epoch.
        answers: whether its control thread answered lately.
        message: for "error" the traceback, else a word.
        error: for "failed", what to raise.
    """

    identity: str
    world_rank: int
    outcome: str | None = None
    lsn: int = 0
    entered: int = 0
    answers: bool = True
    message: str = ""
    error: EverstepError | None = None


@dataclass(frozen=True)
class CheckpointerFacts:
    """One checkpoint actor: is it there, for how long has the store refused, did it meet something fatal."""

    index: int
    alive: bool = True
    store_error_s: float | None = None
    store_error: str = ""
    fatal: EverstepError | None = None


@dataclass(frozen=True)
class Facts:
    """One look at a run. `still_s`: seconds since any worker showed progress, or the group was formed."""

    workers: tuple[WorkerFacts, ...]
    checkpointers: tuple[CheckpointerFacts, ...] = ()
    still_s: float = 0.0


@dataclass(frozen=True)
class Wait:
    """Nothing to do."""

    reason: str = "all is well"


@dataclass(frozen=True)
class Regroup:
    """Form the group anew; `kill` names members that are beyond help."""

    reason: str
    kind: str
    kill: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReplaceCheckpointers:
    """Put new checkpoint actors in the place of these."""

    reason: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Finish:
    """All workers have come to the end: of the run, or where they were asked to stop."""

    reason: str
    stopped: bool


@dataclass(frozen=True)
class Fail:
    """The run cannot go on."""

    reason: str
    error: EverstepError


Decision = Wait | Regroup | ReplaceCheckpointers | Finish | Fail


@dataclass(frozen=True)
class Starting:
    """Actors are being made, or found again."""


@dataclass(frozen=True)
class Running:
    """Workers take steps."""


@dataclass(frozen=True)
class Recovering:
    """Something was lost; `decision` says what to do about it."""

    decision: Regroup | ReplaceCheckpointers


@dataclass(frozen=True)
class Interrupted:
    """A recovery, or the end, was broken off because something else was lost meanwhile."""

    reason: str


@dataclass(frozen=True)
class Finishing:
    """Everything is being made durable."""

    stopped: bool


@dataclass(frozen=True)
class Ended:
    """Nothing more will happen. `error` None: it went well; `stopped`: it was asked to stop before the last step."""

    error: EverstepError | None = None
    stopped: bool = False


State = Starting | Running | Recovering | Interrupted | Finishing | Ended

NAMES: dict[type, str] = {
    Starting: "starting",
    Running: "running",
    Recovering: "recovering",
    Interrupted: "recovering",
    Finishing: "finishing",
}


def name_of(state: State) -> str:
    """Return a state's word for people."""
    if isinstance(state, Ended):
        return "failed" if state.error else "stopped" if state.stopped else "done"
    return NAMES[type(state)]


@dataclass
class Budget:
    """What failures have used up so far; the only memory of the failure policy."""

    lsn: int = -1
    regroups_here: int = 0
    user_errors: dict[int, int] = field(default_factory=dict)

    def spend(self, lsn: int) -> int:
        """Count one more recovery at `lsn`; return how many there were without a finished step between."""
        self.regroups_here = self.regroups_here + 1 if lsn == self.lsn else 1
        self.lsn = lsn
        return self.regroups_here
