"""Who is in the next group: survivors, less those that leave, and newcomers as far as there is room."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from everstep.actors.context import RunContext
from everstep.actors.member import Member
from everstep.core.errors import RunFailed
from everstep.platform.states import Regroup

LINGER_S = 5.0  # workers that have a place already are worth waiting for at the start, rather than one border each


def first(run: RunContext, target: int, stop: Callable[[], bool]) -> list[Member]:
    """Return the members of a run's first group: as many as it starts with, and whoever is there soon after."""
    workers, newcomers = run.settings.workers, run.crew.newcomers
    wanted = workers.start or workers.min
    members = newcomers.wait(wanted, 0, wanted, stop)
    _refuse_stopped(members, wanted)
    return members + newcomers.linger(LINGER_S, target - len(members))


def fill(run: RunContext, decision: Regroup, survivors: Sequence[Member], stop: Callable[[], bool]) -> None:
    """Make the group of those that stay and those that join; below the least, wait for more.

    Args:
        run: the run.
        decision: who leaves, and how many there may be.
        survivors: the members that live, by world rank.
        stop: whether the run was asked to stop; then nobody is waited for.

    Raises:
        EverstepError: there are too few, and no more come.
    """
    crew, least = run.crew, run.scaling.least
    stay = [member for member in survivors if member.identity not in decision.leave]
    leave = [member for member in survivors if member.identity in decision.leave]
    stay += crew.newcomers.take(max(decision.size - len(stay), 0))
    while leave and len(stay) < least:  # better on a node that is going than not at all
        if decision.kind == "resize":
            break
        stay.append(leave.pop(0))
    if len(stay) < least:
        run.tell(f"{len(stay)} workers are left, {least} are needed: the run waits for more")
        stay += crew.newcomers.wait(least - len(stay), len(stay), least, stop)
    if not stay:
        stay, leave = leave, []
    _refuse_stopped(stay, least)
    _bequeath(run, leave, stay)
    for member in leave:
        member.kill()
    crew.members = stay


def _refuse_stopped(members: Sequence[Member], wanted: int) -> None:
    if not members:
        raise RunFailed(
            f"the run was stopped while it waited for {wanted} workers",
            hint="nothing that was finished is lost; `everstep resume` the run when there is room",
        )


def _bequeath(run: RunContext, leave: Sequence[Member], stay: Sequence[Member]) -> None:
    """Add the residuals of workers that leave to that of one that stays: what they hold is still to be sent."""
    if not (run.recipe.keeps_residual and run.recipe.residual == "survivor"):
        return
    heir = next((member for member in stay if member.result is not None and member.result.lsn >= 0), None)
    if heir is None:
        return
    for member in leave:
        residual = run.crew.ask(member, "residual")
        if residual is not None:
            run.crew.ask(heir, "inherit", residual)
