"""The group of a run as the fault handler sees it: who is in it, how far each is, who is lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from everstep.actors.environment import ray
from everstep.actors.member import Member, plain
from everstep.actors.newcomers import Newcomers
from everstep.actors.nodes import draining
from everstep.actors.spec import Formation, Formed, RunResult, WorkerSpec
from everstep.core import clock
from everstep.core.errors import EverstepError, GroupBroken, RunFailed
from everstep.platform.settings import JobSettings
from everstep.platform.states import WorkerFacts

PROBE_S = 1.0  # how long a process may take to answer its control thread before it is taken for lost
FORM_S = 60.0
ANSWER_S = 120.0  # a state may have to be moved first


class Crew:
    """Forms, watches and ends the group.

    Args:
        settings: the job.
        spec: what each worker is built from.
        tell: called with what a person should know.
    """

    def __init__(self, settings: JobSettings, spec: WorkerSpec, tell: Callable[[str], None]) -> None:
        self.settings = settings
        self.members: list[Member] = []  # by world rank
        self.newcomers = Newcomers(settings, spec, tell)
        self.latest: Mapping[str, Any] = {}  # what the member that answered last said of itself
        self.last_progress = clock.monotonic()
        self._probes: dict[str, Any] = {}
        self._probed = 0.0

    # ---- running ----

    def retune(self, compressor_interval: int) -> None:
        """Have all workers, and those that come later, take compressor snapshots at this interval."""
        self.newcomers.retune(replace(self.newcomers.spec, compressor_interval=compressor_interval))
        for member in self.members:
            member.actor.retune.remote(compressor_interval)

    def form(self, group_epoch: int, rendezvous: tuple[str, int], checkpointers: Sequence[Any]) -> list[Formed]:
        """Form the group of all members; return what each says.

        Raises:
            GroupBroken: somebody was lost meanwhile; `result` of those members says so.
        """
        size = len(self.members)
        refs = [
            member.actor.form.remote(Formation(group_epoch, place, size, rendezvous), checkpointers)
            for place, member in enumerate(self.members)
        ]
        for ref, member in zip(refs, self.members, strict=True):
            member.run, member.result = ref, None
        pending, deadline = dict(zip(refs, self.members, strict=True)), clock.monotonic() + FORM_S
        patience = self.settings.workers.hang_timeout_s
        while pending and not any(member.result for member in self.members) and clock.monotonic() < deadline:
            done, _ = ray.wait(list(pending), num_returns=1, timeout=min(patience, FORM_S))
            if not done:
                for member in [member for member in pending.values() if not self._answers(member, patience)]:
                    member.kill()  # stopped since it was last asked; the others wait for it
                continue
            member = pending.pop(done[0])
            answer = self._collect(member)
            if isinstance(answer, Formed):
                member.lsn, member.run, member.formed = answer.lsn, None, answer
        if pending or any(member.result for member in self.members):
            for member in self.members:
                if member.run is None and member.result is None:
                    member.result = RunResult("broken", member.lsn)
            raise GroupBroken("the group broke while it formed")
        return [member.formed for member in self.members if member.formed]

    def pause(self, group_epoch: int) -> None:
        """Ask the group to stop after the same step."""
        for member in self.members:
            if member.actor is not None:
                member.actor.request_stop.remote(group_epoch)

    def run(self, until: int, evaluate_first: bool) -> None:
        """Set every member running."""
        for member in self.members:
            member.result = None
            member.run = member.actor.run.remote(until, evaluate_first)
        self.last_progress = clock.monotonic()

    def look(self, wait_s: float) -> None:
        """Learn which runs have ended and how far the others are; returns as soon as one ends."""
        running = {member.run: member for member in self.members if member.run is not None and member.result is None}
        if running:
            done, _ = ray.wait(list(running), num_returns=1, timeout=wait_s)
            done, _ = ray.wait(list(running), num_returns=len(running), timeout=0) if done else (done, [])
            for ref in done:
                self._collect(running[ref])
        self._probe()

    def facts(self) -> tuple[WorkerFacts, ...]:
        """Return what is known of every member."""
        now, out, going = clock.monotonic(), [], draining()
        for place, member in enumerate(self.members):
            result = member.result
            out.append(
                WorkerFacts(
                    member.identity,
                    place,
                    result.outcome if result else None,
                    member.lsn,
                    member.entered,
                    answers=now - member.heard < 4 * PROBE_S,
                    computing=member.computing and now - member.heard < PROBE_S,
                    message=result.message if result else "",
                    error=result.error if result else None,
                    leaves_s=going.get(member.node),
                )  # fmt: skip
            )
        return tuple(out)

    def ask(self, member: Member, method: str, *arguments: Any) -> Any:
        """Call a method of a worker and return its answer.

        Raises:
            GroupBroken: the worker is gone.
        """
        try:
            return ray.get(getattr(member.actor, method).remote(*arguments), timeout=ANSWER_S)
        except ray.exceptions.RayActorError as error:
            member.result = RunResult("dead", member.lsn)
            raise GroupBroken(f"a worker is gone (asked to {method})") from error
        except ray.exceptions.GetTimeoutError as error:
            member.kill()
            raise GroupBroken(f"a worker did not answer for {ANSWER_S:g} s (asked to {method})") from error
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def end_epoch(self, group_epoch: int, kill: Sequence[str]) -> None:
        """End a group epoch: members in `kill` are killed, the others come out of their runs, or are killed."""
        for member in self.members:
            if member.identity in kill:
                member.kill()
            elif member.result is None or member.result.outcome != "dead":
                member.actor.end_epoch.remote(group_epoch)
        limit = clock.monotonic() + self.settings.workers.hang_timeout_s
        for member in self.members:
            while member.run is not None and member.result is None:
                self._come_out(member, limit)

    def _come_out(self, member: Member, limit: float) -> None:
        """Wait for one run to end; a process that does not even answer is killed at once, a busy one at the limit."""
        done, _ = ray.wait([member.run], timeout=PROBE_S)
        if done:
            answer = self._collect(member)
            if isinstance(answer, Formed):
                member.result = RunResult("broken", answer.lsn)
        elif clock.monotonic() > limit or not self._answers(member):
            member.kill()

    def _answers(self, member: Member, patience_s: float = PROBE_S) -> bool:
        try:
            ray.get(member.actor.status.remote(), timeout=patience_s)
        except ray.exceptions.RayError:
            return False
        return True

    def _collect(self, member: Member) -> RunResult | Formed:
        """Take what a member's call returned, or that the process is gone."""
        try:
            answer: RunResult | Formed = ray.get(member.run)
        except ray.exceptions.RayActorError:
            answer = RunResult("dead", member.lsn)
        except ray.exceptions.RayTaskError as error:
            cause = (
                error.cause
                if isinstance(error.cause, EverstepError)
                else RunFailed(plain(error), hint="this is a defect of everstep, or of the library it names")
            )
            answer = RunResult("failed", member.lsn, str(cause), cause)
        if isinstance(answer, RunResult):
            member.result, member.lsn = answer, max(answer.lsn, 0)
        self.last_progress = clock.monotonic()
        return answer

    def _probe(self) -> None:
        """Ask every member's control thread where it stands, a few times a second, and collect what came back."""
        now = clock.monotonic()
        if now - self._probed > PROBE_S / 4:
            self._probed = now
            for member in self.members:
                if member.identity not in self._probes:
                    self._probes[member.identity] = member.actor.status.remote()
        for member in self.members:
            ref = self._probes.get(member.identity)
            if ref is None or not ray.wait([ref], timeout=0)[0]:
                continue
            del self._probes[member.identity]
            try:
                self._heard(member, ray.get(ref))
            except ray.exceptions.RayError:
                continue  # its run says so too

    def _heard(self, member: Member, status: Mapping[str, Any]) -> None:
        member.heard = clock.monotonic()
        if status["lsn"] > member.lsn or status["beats"] > member.beats:
            self.last_progress = member.heard
        member.lsn, member.beats = max(member.lsn, status["lsn"]), status["beats"]
        member.entered, member.computing = status["entered"], status["computing"]
        self.latest = dict(status)

    def close(self) -> None:
        """Kill every worker."""
        for member in self.members:
            member.kill()
        self.members = []
        self.newcomers.close()
