"""The workers of a run as the fault handler sees them: who is in the group, who waits as a spare, who is lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from everstep.actors.environment import ray, start
from everstep.actors.spec import Formation, Formed, RunResult, WorkerSpec, actor_name
from everstep.actors.train_worker import TrainWorker
from everstep.core import clock
from everstep.core.errors import EverstepError, GroupBroken, RunFailed
from everstep.core.ids import new_id
from everstep.platform.settings import JobSettings
from everstep.platform.states import WorkerFacts

PROBE_S = 1.0  # how long a process may take to answer its control thread before it is taken for lost
FORM_S = 60.0
ANSWER_S = 120.0  # a state may have to be moved first
READY_S = 300.0
TRIES = 3


@dataclass
class Member:
    """One worker actor."""

    identity: str
    actor: Any
    pid: int = 0
    node: str = ""
    run: Any = None  # the reference of its current `form` or `run` call
    formed: Formed | None = None  # what it said when the present group was formed
    result: RunResult | None = None
    lsn: int = 0
    entered: int = 0
    beats: int = 0
    heard: float = 0.0  # when its control thread last answered


class Crew:
    """Makes, forms, watches and replaces workers.

    Args:
        settings: the job.
        spec: what each worker is built from; its identity is filled in here.
    """

    def __init__(self, settings: JobSettings, spec: WorkerSpec) -> None:
        self.settings, self.spec = settings, spec
        self.members: list[Member] = []  # by world rank
        self.spares: list[Member] = []
        self.latest: Mapping[str, Any] = {}  # what the member that answered last said of itself
        self.last_progress = clock.monotonic()
        self._probes: dict[str, Any] = {}
        self._probed = 0.0

    # ---- making ----

    def make(self) -> Member:
        """Start a worker actor; it is not ready yet."""
        identity = new_id()
        workers, run = self.settings.workers, self.settings.run.name or ""
        spec = WorkerSpec(**{**vars(self.spec), "identity": identity})
        name = actor_name(run, "worker/", identity)
        actor = start(TrainWorker, spec, name=name, num_cpus=workers.cpus, num_gpus=workers.gpus or None)
        return Member(identity, actor)

    def fill_spares(self) -> None:
        """Start as many spares as the settings ask for; they get ready in the background."""
        while len(self.spares) < self.settings.workers.spares:
            self.spares.append(self.make())

    def replacement(self) -> Member:
        """Return a worker to put in a lost one's place: a spare that is ready, else the first to become so."""
        for _ in range(TRIES):
            if not self.spares:
                self.spares.append(self.make())
            refs = {spare.actor.ready.remote(): spare for spare in self.spares}
            done, _ = ray.wait(list(refs), num_returns=1, timeout=READY_S)
            member = refs[done[0]] if done else self.spares[0]
            self.spares.remove(member)
            try:
                self.greet(member)
                return member
            except RunFailed as error:
                last = error
        raise last

    def greet(self, member: Member) -> None:
        """Wait until a worker is built and learn where it runs.

        Raises:
            RunFailed: it cannot be built, or Ray finds no place for it.
        """
        try:
            status = ray.get(member.actor.status.remote(), timeout=READY_S)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error
        except ray.exceptions.RayActorError as error:
            said = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
            raise RunFailed(f"a worker could not be built: {said}", hint="see the cause above") from error
        except ray.exceptions.GetTimeoutError as error:
            workers = self.settings.workers
            raise RunFailed(
                f"no worker became ready within {READY_S:.0f} s: Ray has no room for workers.cpus = {workers.cpus:g}, "
                f"workers.gpus = {workers.gpus:g}",
                hint="look at `ray status`; add nodes, or lower workers.max or what a worker asks for",
            ) from error
        member.pid, member.node, member.heard = status["pid"], status["node"], clock.monotonic()

    # ---- running ----

    def retune(self, compressor_interval: int) -> None:
        """Have all workers, and those that come later, take compressor snapshots at this interval."""
        self.spec = replace(self.spec, compressor_interval=compressor_interval)
        for member in [*self.members, *self.spares]:
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
        while pending and not any(member.result for member in self.members):
            done, _ = ray.wait(list(pending), num_returns=1, timeout=max(deadline - clock.monotonic(), 0.0))
            if not done:
                break
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
        now, out = clock.monotonic(), []
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
                    message=result.message if result else "",
                    error=result.error if result else None,
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
        except ray.exceptions.RayTaskError as error:
            raise error.cause from error

    def end_epoch(self, group_epoch: int, kill: Sequence[str]) -> None:
        """End a group epoch: members in `kill` are killed, the others come out of their runs, or are killed."""
        for member in self.members:
            if member.identity in kill:
                self.kill(member)
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
            self.kill(member)

    def _answers(self, member: Member) -> bool:
        try:
            ray.get(member.actor.status.remote(), timeout=PROBE_S)
        except ray.exceptions.RayError:
            return False
        return True

    def kill(self, member: Member) -> None:
        """Make sure that a worker is gone, also a stopped process, which Ray's own kill does not reach."""
        if member.actor is not None:
            ray.kill(member.actor, no_restart=True)
        if member.pid:
            kill_process(member.node, member.pid)
        member.result = RunResult("dead", member.lsn)

    def _collect(self, member: Member) -> RunResult | Formed:
        """Take what a member's call returned, or that the process is gone."""
        try:
            answer: RunResult | Formed = ray.get(member.run)
        except ray.exceptions.RayActorError:
            answer = RunResult("dead", member.lsn)
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(error.cause, EverstepError) else RunFailed(str(error))
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
        member.entered = status["entered"]
        self.latest = dict(status)

    def close(self) -> None:
        """Kill every worker."""
        for member in [*self.members, *self.spares]:
            self.kill(member)
        self.members, self.spares = [], []


def kill_process(node: str, pid: int) -> None:
    """SIGKILL one of Ray's worker processes by its id, on whatever node it is."""
    if node == ray.get_runtime_context().get_node_id():
        _kill_here(pid)
        return
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    ray.remote(num_cpus=0, max_retries=0)(_kill_here).options(scheduling_strategy=strategy).remote(pid)


def _kill_here(pid: int) -> None:
    try:
        if "ray::" in " ".join(psutil.Process(pid).cmdline()):  # never a process that took over the number
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
