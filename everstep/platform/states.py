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
        computing: whether it was in the task's code when it last answered, not in a collective.
        message: for "error" the traceback, else a word.
        error: for "failed", what to raise.
        leaves_s: seconds until its node is taken away; None if nobody wants it back.
    """

    identity: str
    world_rank: int
    outcome: str | None = None
    lsn: int = 0
    entered: int = 0
    answers: bool = True
    computing: bool = False
    message: str = ""
    error: EverstepError | None = None
    leaves_s: float | None = None


@dataclass(frozen=True)
class NewcomerFacts:
    """The workers outside the group, spares among them.

    Attributes:
        asked: how many there are in all, also those that Ray has no place for yet.
        built: how many have everything built and could replace a lost one at once.
        preparing: how many of the built ones are catching up with the group.
        ready: how many of the built ones have caught up: they join at the next border.
    """

    asked: int = 0
    built: int = 0
    preparing: int = 0
    ready: int = 0


@dataclass(frozen=True)
class CheckpointerFacts:
    """One checkpoint actor: is it there, for how long has the store refused, did it meet something fatal.

    `leaves`: its node is about to be taken away.
    """

    index: int
    alive: bool = True
    store_error_s: float | None = None
    store_error: str = ""
    fatal: EverstepError | None = None
    leaves: bool = False


@dataclass(frozen=True)
class Facts:
    """One look at a run.

    Attributes:
        workers: the group, by world rank.
        checkpointers: the checkpoint actors.
        still_s: seconds since any worker showed progress, or the group was formed.
        newcomers: who is not in the group.
        pausing: whether the group was asked to stop at the next border, for whatever reason.
        stop_asked: whether the run was asked to stop.
        left_s: what the steps that are left take at the present speed; None: not known yet.
    """

    workers: tuple[WorkerFacts, ...]
    checkpointers: tuple[CheckpointerFacts, ...] = ()
    still_s: float = 0.0
    newcomers: NewcomerFacts = NewcomerFacts()
    pausing: bool = False
    stop_asked: bool = False
    left_s: float | None = None


@dataclass(frozen=True)
class Wait:
    """Nothing to do."""

    reason: str = "all is well"


@dataclass(frozen=True)
class Regroup:
    """Form the group anew.

    Attributes:
        reason: why.
        kind: what was lost, as in a healing; "resize": nothing was.
        kill: members that are beyond help.
        leave: members that go although they are well.
        size: how many there may be then, newcomers included.
    """

    reason: str
    kind: str
    kill: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    size: int = 0


@dataclass(frozen=True)
class ReplaceCheckpointers:
    """Put new checkpoint actors in the place of these."""

    reason: str
    indices: tuple[int, ...]


@dataclass(frozen=True)
class Pause:
    """Have all workers stop after the same step: the border at which some join or leave."""

    reason: str


@dataclass(frozen=True)
class Prepare:
    """Have so many of the built newcomers catch up with the group."""

    reason: str
    count: int


@dataclass(frozen=True)
class Ask:
    """Have so many workers outside the group, spares included: ask Ray for more, or give some back."""

    reason: str
    count: int


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


Scaling = Pause | Prepare | Ask
Decision = Wait | Regroup | ReplaceCheckpointers | Scaling | Finish | Fail


@dataclass(frozen=True)
class Starting:
    """Actors are being made, or found again."""


@dataclass(frozen=True)
class Running:
    """Workers take steps."""


@dataclass(frozen=True)
class Resizing:
    """Workers take steps while the group is made ready to change."""

    decision: Scaling


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


State = Starting | Running | Resizing | Recovering | Interrupted | Finishing | Ended

NAMES: dict[type, str] = {
    Starting: "starting",
    Running: "running",
    Resizing: "running",
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
