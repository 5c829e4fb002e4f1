"""The workers outside the group: asked for, being built, waiting as spares, catching up.

An actor that Ray has no place for stays pending, and that is what its autoscaler adds nodes for; so asking for a worker
is making it, and giving it back is killing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.actors.environment import ray
from everstep.actors.member import Member, built_or_why, make
from everstep.actors.nodes import draining, room
from everstep.actors.spec import WorkerSpec
from everstep.core import clock
from everstep.core.errors import EverstepError, GroupBroken, RunFailed
from everstep.platform.settings import JobSettings
from everstep.platform.states import NewcomerFacts

AGAIN_S = 5.0  # after a worker could not be built, twice as long after each further one
SOON_S = 0.5  # the same after one was lost
LOST_OFTEN = 8  # in a row: then there is more to it than a node that died
WORD_S = 10.0  # a wait is told about after so long
LOOK_S = 0.2
PROBE_S = 1.0  # between two questions to a spare whether it is alive


@dataclass
class Newcomer:
    """A worker outside the group.

    Attributes:
        member: the worker; None: it could not be built and is made again later.
        asked: the reference of its first `status`; None once it is built.
        catching: the reference of its `prepare`; None while it does not catch up.
        ready: whether it has caught up.
        again: when it is made again.
        probe: the reference of a `status` that asks whether it is alive; None: it is not asked now.
    """

    member: Member | None
    asked: Any = None
    catching: Any = None
    ready: bool = False
    again: float = 0.0
    probe: Any = None

    @property
    def built(self) -> bool:
        """Whether everything a step needs is built."""
        return self.member is not None and self.asked is None


class Newcomers:
    """Makes, watches, prepares and gives back workers that are not in the group.

    Args:
        settings: the job.
        spec: what each is built from; its identity is filled in when it is made.
        tell: called with what a person should know.
    """

    def __init__(self, settings: JobSettings, spec: WorkerSpec, tell: Callable[[str], None]) -> None:
        self.settings, self.spec, self.tell = settings, spec, tell
        self.all: list[Newcomer] = []
        self._failures = 0
        self._error: EverstepError | None = None
        self._looked = 0.0

    def facts(self) -> NewcomerFacts:
        """Return how many there are, and how far they are."""
        built = [one for one in self.all if one.built]
        ready = sum(one.ready for one in built)
        return NewcomerFacts(len(self.all), len(built), sum(one.catching is not None for one in built), ready)

    def ask(self, count: int) -> None:
        """Have `count` of them: make more, or give back those that are least far."""
        while len(self.all) < count:
            self.all.append(self._made())
        for one in sorted(self.all, key=_progress)[: len(self.all) - count]:
            self._drop(one)

    def adopt(self, built: Sequence[Member], coming: Sequence[Member]) -> None:
        """Take over workers that are there already, and such as are being made."""
        self.all += [Newcomer(member) for member in built]
        self.all += [Newcomer(member, asked=member.actor.status.remote()) for member in coming]

    def prepare(self, count: int, checkpointers: Sequence[Any]) -> None:
        """Have `count` built ones catch up with what the checkpoint actors have; without any they need not."""
        idle = [one for one in self.all if one.built and one.catching is None and not one.ready]
        for one in idle[:count]:
            assert one.member is not None
            if checkpointers:
                one.catching = one.member.actor.prepare.remote(checkpointers)
            else:
                one.ready = True

    def look(self) -> None:
        """Learn how far they are; those on nodes that are being taken away are given up."""
        now = clock.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        going = draining()
        for one in list(self.all):
            if one.member is None and now > one.again:
                self.all[self.all.index(one)] = self._made()
            elif one.asked is not None and ray.wait([one.asked], timeout=0)[0]:
                self._meet(one)
            elif one.catching is not None and ray.wait([one.catching], timeout=0)[0]:
                self._caught_up(one)
            if one.member is not None and (one.member.node in going or one.built and self._gone(one, one.member, now)):
                self._drop(one)

    def take(self, count: int) -> list[Member]:
        """Return at most `count` built ones, those that have caught up first; they are in the group from now on."""
        built = sorted((one for one in self.all if one.built), key=_progress, reverse=True)[:count]
        self.all = [one for one in self.all if one not in built]
        return [one.member for one in built if one.member is not None]

    def wait(self, count: int, have: int, least: int, stop: Callable[[], bool]) -> list[Member]:
        """Return `count` built ones, waiting for them, as long as a run waits; fewer if `stop` says so.

        Args:
            count: how many are wanted.
            have: how many the group has without them; for what is told.
            least: how many it needs; for what is told.
            stop: looked at while waiting.

        Raises:
            EverstepError: they cannot be built, or Ray found no place for them in time.
        """
        self.ask(max(count, len(self.all)))
        began, told = clock.monotonic(), clock.monotonic() + WORD_S
        limit = self.settings.workers.wait_timeout_s
        while self.facts().built < count and not stop():
            self.look()
            now, lacking = clock.monotonic(), count - self.facts().built
            if self._error is not None and not any(one.asked is not None for one in self.all):
                raise self._error
            if now - began > limit and lacking > 0:
                raise RunFailed(
                    f"{self._lacking(lacking, have, least)} after {limit:.0f} s (workers.wait_timeout_s = {limit:g})",
                    hint="look at `ray status`; add nodes, or lower workers.min or what a worker asks for; "
                    "then `everstep resume` the run",
                )
            if now > told and lacking > 0:
                told = now + 6 * WORD_S
                self.tell(self._lacking(lacking, have, least))
            clock.sleep(LOOK_S / 4)
        return self.take(count)

    def linger(self, seconds: float, count: int) -> list[Member]:
        """Return at most `count` built ones; those that have a place already are waited for a little."""
        deadline = clock.monotonic() + seconds
        while self.facts().built < min(count, len(self.all)) and clock.monotonic() < deadline:
            self.look()
            clock.sleep(LOOK_S / 4)
        return self.take(count)

    def retune(self, spec: WorkerSpec) -> None:
        """Make those that come later from another spec, and tell those that are there."""
        self.spec = spec
        for one in self.all:
            if one.member is not None:
                one.member.actor.retune.remote(spec.compressor_interval)

    def close(self) -> None:
        """Kill them all."""
        for one in list(self.all):
            self._drop(one)

    def _made(self) -> Newcomer:
        member = make(self.settings, self.spec)
        return Newcomer(member, asked=member.actor.status.remote())

    def _drop(self, one: Newcomer) -> None:
        if one.member is not None:
            one.member.kill()
        if one in self.all:
            self.all.remove(one)

    def _meet(self, one: Newcomer) -> None:
        assert one.member is not None
        try:
            one.member.met(built_or_why(one.asked))
        except EverstepError as error:
            self._failed(one, error)
            return
        one.asked, self._error, self._failures = None, None, 0

    def _failed(self, one: Newcomer, error: EverstepError) -> None:
        """Make it again later. What the worker itself says is believed at once, a process that was lost only if often.

        A process may be lost with its node, by chance, or because building it takes more memory than there is.
        """
        assert one.member is not None
        self._failures += 1
        lost = isinstance(error, GroupBroken)
        if not lost or self._failures >= LOST_OFTEN:
            self._error = RunFailed(error.message, hint="see the cause above") if lost else error
        one.member.kill()
        one.member, one.asked = None, None
        pause = SOON_S if lost else AGAIN_S
        one.again = clock.monotonic() + pause * 2 ** min(self._failures - 1, 6)
        self.tell(f"a worker could not be built: {error.message.strip().splitlines()[0]}")

    def _gone(self, one: Newcomer, member: Member, now: float) -> bool:
        """Ask a built one now and then whether it is alive: it would be found out only when it is needed, else."""
        if one.probe is None:
            if now - member.heard > PROBE_S:
                one.probe = member.actor.status.remote()
            return False
        if not ray.wait([one.probe], timeout=0)[0]:
            silent = now - member.heard > max(self.settings.workers.hang_timeout_s, 2 * PROBE_S)
            if silent:
                self.tell(f"a worker that waits has not answered for {now - member.heard:.0f} s, and is given up")
            return silent
        try:
            ray.get(one.probe)
        except ray.exceptions.RayError:
            return True
        one.probe, member.heard = None, now
        return False

    def _caught_up(self, one: Newcomer) -> None:
        try:
            ray.get(one.catching)
            one.ready = True
        except ray.exceptions.RayActorError:
            self._drop(one)
        except ray.exceptions.RayTaskError as error:  # it gets the state at the border then, from a survivor
            self.tell(f"a newcomer could not catch up from the replica: {str(error.cause).splitlines()[0]}")
            one.ready = True
        one.catching = None

    def _lacking(self, count: int, have: int, least: int) -> str:
        workers = self.settings.workers
        what = f"{workers.cpus:g} CPU" + (f", {workers.gpus:g} GPU" if workers.gpus else "")
        return (
            f"waiting for {count} worker{'s' * (count != 1)} to be placed and built: {have} of {least} are there; "
            f"each asks for {what}; the cluster has {room()}"
        )


def _progress(one: Newcomer) -> int:
    return one.ready * 8 + (one.catching is not None) * 4 + one.built * 2 + (one.member is not None)
