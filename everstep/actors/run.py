"""Launching a run and following it: all that the command line knows of actors."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from everstep.actors import session
from everstep.actors.context import RunSpec
from everstep.actors.environment import NAMESPACE, ray, start
from everstep.actors.fault_handler import FaultHandler
from everstep.actors.spec import actor_name, how_of, key_id_of, recipe_of, store_of
from everstep.core import clock
from everstep.core.errors import EverstepError, RunDone, RunExists, RunFailed, SettingsError, UserError
from everstep.platform.settings import JobSettings, differences, from_dict, to_dict
from everstep.platform.tuner import derive_intervals
from everstep.storage.chain import Chain
from everstep.storage.store import Store, absolute, probe
from everstep.tasks import build_dataset
from everstep.training.blueprint import Blueprint

SCHEDULE_STEPS = 10_000  # as far as a schedule is tried out before the run starts
ENDED = ("done", "failed", "stopped")
PATIENCE_S = 60.0  # how long the fault handler may be away before the driver gives up on it
FAREWELL_S = 3.0
PARTING_S = 0.5
LOOK_S = 0.1
HEAD = {"node:__internal_head__": 0.001}
"""A place on the head: that is no spot instance, and without it all is lost anyway."""


class Handle:
    """A run that was launched, or found. The driver only submits and follows: the run does not need it.

    Args:
        handler: the fault handler actor.
        own: whether the Ray cluster was started by this process.
        settings: of the run.
        joined: somebody else launched it.
    """

    def __init__(self, handler: Any, own: bool, settings: JobSettings, *, joined: bool = False) -> None:
        self.settings = settings
        self._handler, self._own, self._joined = handler, own, joined
        self._heard = clock.monotonic()
        self._last: dict[str, Any] = dict.fromkeys(("loss", "steps_per_s"))
        self._last |= dict.fromkeys(("lsn", "world_size", "complete_lsn", "durable_lsn"), 0)
        self._last |= {"state": "starting", "steps": settings.run.steps, "events": [], "message": ""}

    def progress(self) -> dict[str, Any]:
        """Return where the run stands; while the fault handler restarts, where it stood last.

        Raises:
            RunFailed: it has been away for too long; perhaps it could not even be built.
        """
        try:
            self._last, self._heard = self._call("progress", 5.0), clock.monotonic()
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            if found := self._stored():
                self._last = self._last | {"state": found["state"], "lsn": found["steps"]}
            elif clock.monotonic() - self._heard > PATIENCE_S:
                raise RunFailed(f"the fault handler is gone: {error}", hint="`everstep resume` the run") from error
        return self._last

    def stop(self) -> None:
        """Ask the run to stop after the step that is under way."""
        self._patiently("stop")

    def scale(self, least: int, most: int) -> None:
        """Have the run train with `least` to `most` workers from the next border on."""
        self._patiently("scale", least, most)

    def summary(self) -> dict[str, Any]:
        """Return the summary of the ended run.

        Raises:
            EverstepError: what ended it.
        """
        return dict(self._patiently("summary"))

    def close(self) -> None:
        """End the run's actors, if it has ended, and leave the cluster."""
        if self._own or self._last["state"] in ENDED:
            if self._joined:
                self.left(FAREWELL_S)  # whoever launched the run wants its summary first, and then closes it
            elif not self._own and self._last["state"] == "failed":
                clock.sleep(PARTING_S)  # only the fault handler knows the error; let all who follow hear of it
            with contextlib.suppress(ray.exceptions.RayError):
                ray.get(self._handler.close.remote(), timeout=30)
        session.disconnect(self._own)

    def left(self, patience_s: float = 30.0) -> list[str]:
        """Wait for the run's actors to be gone; return the names of those that are not."""
        deadline = clock.monotonic() + patience_s
        while (found := _actors(self.settings.run.name or "")) and clock.monotonic() < deadline:
            clock.sleep(LOOK_S)
        return found

    def _stored(self) -> dict[str, Any] | None:
        """Return the summary from the store, if the run has ended and somebody else closed it; else None."""
        name = self.settings.run.name or ""
        if actor_name(name, "handler") in _actors(name):
            return None  # it is only being restarted
        with contextlib.suppress(EverstepError):
            chain = Chain.open(store_of(self.settings), name)
            told = chain.events("summary-")
            if told and (newest := told[max(told)])["generation"] == chain.manifest.generation:
                return dict(newest)
        return None

    def _call(self, method: str, timeout_s: float, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._handler, method).remote(*arguments), timeout=timeout_s)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def _patiently(self, method: str, *arguments: Any) -> Any:
        deadline = clock.monotonic() + PATIENCE_S
        while True:
            try:
                return self._call(method, PATIENCE_S, *arguments)
            except ray.exceptions.RayActorError as error:
                if found := self._stored():
                    return found
                if clock.monotonic() > deadline:
                    raise RunFailed("the fault handler is gone", hint="`everstep resume` the run") from error
                clock.sleep(0.5)


def join(name: str) -> Handle:
    """Return the handle of a run that somebody launched in the cluster in `RAY_ADDRESS`, or on this machine.

    Raises:
        ClusterGone: there is no such cluster.
        UserError: nobody runs a run of this name there.
    """
    session.join()
    deadline = clock.monotonic() + PATIENCE_S
    while True:
        try:
            handler = ray.get_actor(actor_name(name, "handler"), namespace=NAMESPACE)
            stored = ray.get(handler.settings.remote(), timeout=PATIENCE_S)
            break
        except (ValueError, ray.exceptions.RayActorError) as error:
            running = sorted({known.removesuffix("/handler") for known in _actors("") if known.endswith("/handler")})
            if name not in running or clock.monotonic() > deadline:  # else it is only being restarted
                raise UserError(
                    f"nobody runs {name!r} in the Ray cluster at {ray.get_runtime_context().gcs_address}; "
                    f"running there: {', '.join(running) or 'nothing'}",
                    hint=f"go on with it: everstep resume {name} --store STORE; "
                    "or name the cluster that runs it: RAY_ADDRESS=host:port, or --address URL",
                ) from error
            clock.sleep(LOOK_S)
    return Handle(handler, False, from_dict(stored, where=f"run {name}"), joined=True)


def _actors(run: str) -> list[str]:
    """Return the names of the living actors of a run; "": of all runs."""
    known = ray.util.list_named_actors(all_namespaces=True)
    prefix = actor_name(run, "") if run else ""
    return [item["name"] for item in known if item["namespace"] == NAMESPACE and item["name"].startswith(prefix)]


def launch(settings: JobSettings, *, resume: str | None, at: int | None = None) -> Handle:
    """Start a run, or go on with one, and return its handle.

    Everything that can be refused is refused here, before a process is started.

    Args:
        settings: the whole job, named.
        resume: None to start; "resume", "exact" or "exact if possible" to go on from the log.
        at: with `resume`, go back to this step and on another way from there.

    Raises:
        UserError: the job cannot be run as it is.
    """
    if settings.run.name is None:
        raise SettingsError("run.name is missing", hint="give the run a name; the command makes one from the file's")
    settings = _with(settings, store=absolute(settings.run.store))
    if settings.run.store.startswith("memory:"):
        raise SettingsError(
            'run.store "memory:" lives in one process, a run has several', hint='use "file:./everstep-runs"'
        )
    store = store_of(settings)
    probe(store)
    key_id_of(settings)
    resume = _going_on(settings, store, resume, at)
    blueprint = Blueprint(recipe_of(settings))
    build_dataset(blueprint.task, "train")
    if settings.eval.every:
        build_dataset(blueprint.task, settings.eval.split)
    optimizer = blueprint.live_state().optimizer
    assert optimizer is not None
    blueprint.schedule(optimizer, min(settings.run.steps, SCHEDULE_STEPS))
    layout = blueprint.layout
    intervals = derive_intervals(settings, layout.size, len(layout.shards))
    own = session.connect(settings)
    copies = settings.workers.max if settings.compression.residual == "survivor" else 1
    spec = RunSpec(
        to_dict(settings), resume, len(layout.ranges), blueprint.exactness, intervals, 4 * layout.size * copies,
        os.getpid() if own else None, at,
    )  # fmt: skip
    name = actor_name(settings.run.name or "", "handler")
    _clear(name)
    handler = start(FaultHandler, spec, name=name, get_if_exists=True, resources=HEAD)
    return Handle(handler, own, settings)


def _clear(name: str) -> None:
    """End the fault handler of a run that has ended and whose driver never came for the summary."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        handler = ray.get_actor(name, namespace=NAMESPACE)
        if ray.get(handler.progress.remote(), timeout=PATIENCE_S)["state"] in ENDED:
            ray.get(handler.close.remote(), timeout=PATIENCE_S)


def _going_on(settings: JobSettings, store: Store, resume: str | None, at: int | None) -> str | None:
    """Return how to go on with the run of this name; None: there is none, and none was asked for."""
    name = settings.run.name or ""
    if resume is None and not Chain.exists(store, name):
        return None
    found = Chain.open(store, name)
    how = resume or _existing(settings, found)
    if at is None:
        _refuse_done(settings, found)
    return how


def _refuse_done(settings: JobSettings, found: Chain) -> None:
    name, steps, closing = found.run, settings.run.steps, found.manifest.closing
    if closing is not None and steps <= int(closing["last_lsn"]):
        where = f"--store {settings.run.store}"
        raise RunDone(
            f"run {name!r} is done: it took its last step, {closing['last_lsn']}, and run.steps is {steps}",
            hint=f"longer: everstep resume {name} --set run.steps=N {where}; "
            f"another way from an earlier step: everstep resume {name}@STEP {where}",
        )


def _with(settings: JobSettings, *, store: str) -> JobSettings:
    return settings.model_copy(update={"run": settings.run.model_copy(update={"store": store})})


def _existing(settings: JobSettings, found: Chain) -> str:
    """Return how to go on with a run that is there already; one with other settings is refused."""
    differing = [key for key in differences(from_dict(found.manifest.settings), settings) if key != "run.store"]
    if differing:
        raise RunExists(
            f"run {found.run!r} exists in {settings.run.store} with other settings: {', '.join(differing)}",
            hint=f"choose another run.name, or go on with it: everstep resume {found.run} --store {settings.run.store}",
        )
    return how_of(settings)
