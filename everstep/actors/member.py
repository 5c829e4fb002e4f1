"""One worker actor as the fault handler holds it: made, greeted, killed."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import psutil

from everstep.actors.environment import NodeAffinity, ray, start
from everstep.actors.spec import Formed, RunResult, WorkerSpec, actor_name
from everstep.actors.train_worker import TrainWorker
from everstep.core import clock
from everstep.core.errors import GroupBroken
from everstep.core.ids import new_id
from everstep.platform.settings import JobSettings


@dataclass
class Member:
    """One worker actor.

    Attributes:
        identity: its name among all workers that ever were.
        actor: its handle; None: there is nothing any more.
        pid: of its process; 0 until it has answered once.
        node: where it runs.
        run: the reference of its current `form` or `run` call.
        formed: what it said when the present group was formed.
        result: how its run ended; None while it runs.
        lsn: its last finished step, as far as known.
        entered: collectives begun in this group epoch.
        beats: signs of life so far.
        computing: whether it was in the task's code, not in a collective, when it last answered.
        heard: when its control thread last answered.
    """

    identity: str
    actor: Any
    pid: int = 0
    node: str = ""
    run: Any = None
    formed: Formed | None = None
    result: RunResult | None = None
    lsn: int = 0
    entered: int = 0
    beats: int = 0
    computing: bool = False
    heard: float = 0.0

    def met(self, status: Mapping[str, Any]) -> None:
        """Note where it runs."""
        self.pid, self.node, self.heard = status["pid"], status["node"], clock.monotonic()

    def kill(self) -> None:
        """Make sure that it is gone, also a stopped process, which Ray's own kill does not reach."""
        if self.actor is not None:
            ray.kill(self.actor, no_restart=True)
        if self.pid:
            _kill_process(self.node, self.pid)
        self.result = RunResult("dead", self.lsn)


def make(settings: JobSettings, spec: WorkerSpec) -> Member:
    """Start a worker actor; it is not ready yet, and waits for as long as Ray has no place for it."""
    identity = new_id()
    workers, run = settings.workers, settings.run.name or ""
    whole = WorkerSpec(**{**vars(spec), "identity": identity})
    name = actor_name(run, "worker/", identity)
    actor = start(TrainWorker, whole, name=name, num_cpus=workers.cpus, num_gpus=workers.gpus or None)
    return Member(identity, actor)


def built_or_why(reference: Any) -> Mapping[str, Any]:
    """Return the answer to a worker's first `status`, which has come.

    Raises:
        GroupBroken: the process or its node was lost meanwhile.
        EverstepError: the worker cannot be built.
    """
    try:
        answer: Mapping[str, Any] = ray.get(reference)
        return answer
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise GroupBroken(f"a worker was lost while it was built: {plain(error)}") from error


def plain(error: BaseException) -> str:
    """Return what an error says, without the colours that Ray puts in."""
    return re.sub(r"\x1b\[[0-9;]*m", "", str(error))


def _kill_process(node: str, pid: int) -> None:
    """SIGKILL one of Ray's worker processes by its id, on whatever node it is."""
    if node == ray.get_runtime_context().get_node_id():
        _kill_here(pid)
        return
    strategy = NodeAffinity(node, soft=False)
    ray.remote(num_cpus=0, max_retries=0)(_kill_here).options(scheduling_strategy=strategy).remote(pid)


def _kill_here(pid: int) -> None:
    try:
        if "ray::" in " ".join(psutil.Process(pid).cmdline()):  # never a process that took over the number
            os.kill(pid, signal.SIGKILL)
    except (psutil.NoSuchProcess, ProcessLookupError):
        return
