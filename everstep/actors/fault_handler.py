"""The fault handler: a detached actor that owns a run and does what its controller decides.

It hosts the rendezvous store, so that no worker's death takes it away, and it alone writes manifests. Killed, it is
started again by Ray, finds the living actors by their names and takes them into a new group epoch.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import replace
from typing import Any

from everstep.actors.context import RunContext, RunSpec
from everstep.actors.environment import NAMESPACE, actor, control, ray
from everstep.actors.mechanism import Mechanism
from everstep.actors.spec import actor_name
from everstep.core import clock
from everstep.core.errors import RunFailed
from everstep.platform.controller import Controller
from everstep.platform.policies import FailurePolicy
from everstep.platform.states import Ended, name_of

LINGER_S = 600.0


@actor(num_cpus=0, max_restarts=-1, max_task_retries=0)
class FaultHandler:
    """Owns one run.

    Args:
        spec: what to run. After a restart the store and the living actors say how far it has come.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.run = RunContext.of(spec)
        check, workers = self.run.settings.checkpoint, self.run.settings.workers
        self.mechanism = Mechanism(self.run)
        policy = FailurePolicy(
            hang_timeout_s=workers.hang_timeout_s,
            storage_timeout_s=check.storage_timeout_s,
            stop_on_storage_loss=check.on_storage_loss == "stop",
        )
        self.controller = Controller(self.mechanism, policy, self.run.scaling, self.run.tell)
        self.ended: Ended | None = None
        self._ending: dict[str, Any] = {}  # the progress at the end, when the actors are gone
        threading.Thread(target=self._live, name="controller", daemon=True).start()

    @control
    def progress(self) -> dict[str, Any]:
        """Return where the run stands, or where it ended."""
        if self.ended is not None:
            return self._ending | {"state": name_of(self.ended)}
        run, latest = self.run, self.run.crew.latest
        step_s = latest.get("step_s")
        return {
            "state": "finishing" if isinstance(self.controller.state, Ended) else name_of(self.controller.state),
            "lsn": run.lsn(),
            "steps": run.settings.run.steps,
            "loss": latest.get("loss"),
            "steps_per_s": 1 / step_s if step_s else None,
            "world_size": len(run.crew.members),
            "complete_lsn": run.checkpointers.lowest("received"),
            "durable_lsn": run.checkpointers.lowest("durable"),
            "message": run.lines[-1] if run.lines else "",
            "events": list(run.lines),
        }

    @control
    def stop(self) -> None:
        """Stop after the step that is under way, with everything durable."""
        self.mechanism.stop()

    @control
    def scale(self, least: int, most: int) -> None:
        """Train with other bounds from the next border on: workers join, or leave, until they hold."""
        self.run.scaling = self.controller.scaling = replace(self.run.scaling, least=least, most=most)
        self.run.tell(f"the run was asked to train with {least} to {most} workers")

    @control
    def settings(self) -> dict[str, Any]:
        """Return the job that this run was started from."""
        return dict(self.run.spec.settings)

    @control
    def summary(self) -> dict[str, Any]:
        """Return the summary of an ended run. Raises the error that ended it."""
        if self.ended is not None and self.ended.error is not None:
            raise self.ended.error
        assert self.mechanism.summary is not None, "asked for the summary of a run that has not ended"
        return self.mechanism.summary

    @control
    def close(self) -> None:
        """End all actors of the run, this one last."""
        self.mechanism.close()
        name = actor_name(self.run.name, "handler")
        ray.kill(ray.get_actor(name, namespace=NAMESPACE), no_restart=True)

    @control
    def die(self) -> None:
        """Be killed: the fault `kill_fault_handler`."""
        os.kill(os.getpid(), signal.SIGKILL)

    def _live(self) -> None:
        """Run to the end; a defect of ours is shown to whoever asks for the summary, whole."""
        try:
            ended = self.controller.run()
        except BaseException as error:
            ended = Ended(RunFailed(f"{type(error).__name__}: {error}", hint="this is a defect of everstep"))
            raise
        finally:
            try:
                if ended.error is not None:
                    self.mechanism.save_what_is_left()
                self._ending = self.progress()
            finally:  # whatever happens here, whoever waits for the end is told of it
                self.ended = ended
            self.mechanism.close()
            clock.sleep(LINGER_S)  # for whoever still wants the summary; it is in the store as well
            self.close()
