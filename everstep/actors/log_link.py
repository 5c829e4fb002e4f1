"""A process's end of a log that a keeper keeps: takes the run, hands steps over, hears what becomes of them."""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Mapping
from typing import Any

from everstep.actors import session
from everstep.actors.context import RunSpec
from everstep.actors.environment import NAMESPACE, ray, start
from everstep.actors.log_keeper import LogKeeper
from everstep.actors.log_words import Held, Holder, Opened, Progress, Told
from everstep.actors.sender import Sender
from everstep.actors.spec import actor_name
from everstep.core import clock
from everstep.core.errors import EverstepError, Failure, RunExists
from everstep.core.ids import new_id
from everstep.platform.settings import JobSettings
from everstep.training.record import StepResult

WATCH_S = 0.5
AGAIN_S = 0.25
CALL_S = 30.0
START_S = 180.0  # an actor may have to be placed and its process started first
OPEN_S = 600.0  # the log may have to be replayed first
PATIENCE_S = 60.0  # how long the keeper may be away
TRIES = 5


class LogLink:
    """One process's end.

    Args:
        keeper: the run's keeper.
        holder: this program.
        sender: hands steps to the checkpoint actors.
        owned: the shards that this process sends.
        reports: whether it is the one that speaks for the program: world rank 0.
    """

    def __init__(self, keeper: Any, holder: Holder, sender: Sender, owned: tuple[int, ...], *, reports: bool) -> None:
        self.keeper, self.holder, self.sender, self.owned, self.reports = keeper, holder, sender, owned, reports
        self.progress = Progress()
        self.failure: EverstepError | None = None
        self.durable = 0
        self.actors: tuple[Any, ...] = ()
        self._generation, self._epoch = 0, 0
        self._done = threading.Event()
        self._heard = clock.monotonic()
        self._watcher = threading.Thread(target=self._watch, name="log link", daemon=True)

    def open(self, spec: RunSpec, first: Mapping[str, Any]) -> Opened:
        """Have the log opened; see `LogKeeper.open`. Raises as that does."""
        self._watcher.start()  # the keeper has to hear from us also while it restores
        opened: Opened = answered(self.keeper.open.remote(self.holder.token, spec, first), OPEN_S)
        return opened

    def begin(self, group_epoch: int) -> None:
        """Send steps from now on, stamped with this epoch."""
        deadline = clock.monotonic() + CALL_S
        while not (told := answered(self._watched(group_epoch), CALL_S)).actors:
            if clock.monotonic() > deadline:
                raise Failure("the log was opened and has no checkpoint actors", hint="this is a defect of everstep")
            clock.sleep(AGAIN_S)
        self._epoch = group_epoch
        self._connect(told)
        if not self._watcher.is_alive():
            self._watcher.start()

    def state(self) -> tuple[int, dict[str, Any]]:
        """Return (lsn, tensors as `moving.to_arrays` has them) of the whole state at the complete lsn."""
        answers = answered([handle.state.remote() for handle in self.actors], OPEN_S)
        return answers[0][0], {name: value for _, part in answers for name, value in part.items()}

    def check(self) -> None:
        """Raise what ended the log, if anything did."""
        if self.failure is not None:
            raise self.failure

    def offer(self, result: StepResult) -> None:
        """Hand a finished step over; waits only for room."""
        self.sender.offer(result, 0)

    def arrived(self, lsn: int, timeout_s: float) -> bool:
        """Wait until the checkpoint actors have the owned shards' records up to `lsn`; return whether they have."""
        deadline = clock.monotonic() + timeout_s
        while any(self.sender.received[shard] < lsn for shard in self.owned):
            if self.failure is not None or clock.monotonic() > deadline:
                return False
            clock.sleep(0.005)
        return True

    def close(self, lsn: int, digest: str) -> int:
        """Have the log closed, and its actors ended; return the durable lsn. Raises as `LogKeeper.close`."""
        deadline = clock.monotonic() + PATIENCE_S
        while True:
            try:
                durable: int = asked(self.keeper.close.remote(self.holder.token, lsn, digest), OPEN_S)
                break
            except ray.exceptions.RayActorError as error:
                if clock.monotonic() > deadline:
                    raise _gone(error) from error
                clock.sleep(AGAIN_S)  # it is being restarted
        self.end()
        return durable

    def release(self, *, end: bool) -> int:
        """Let the run go as it stands; see `LogKeeper.release`."""
        durable: int = answered(self.keeper.release.remote(self.holder.token, end=end), CALL_S)
        if end:
            self.end()
        return durable

    def end(self) -> None:
        """End the keeper and the checkpoint actors."""
        self.stop()
        try:
            ray.get(self.keeper.leave.remote(), timeout=CALL_S)
        except ray.exceptions.RayError:  # it dies of it
            pass

    def stop(self) -> None:
        """Hear no more."""
        self._done.set()

    def _watched(self, group_epoch: int) -> Any:
        return self.keeper.watch.remote(self.holder, group_epoch, self.progress if self.reports else None)

    def _connect(self, told: Told) -> None:
        self._generation, self.actors = told.generation, told.actors
        self.sender.begin_epoch(self._epoch, self.owned, told.actors)

    def _watch(self) -> None:
        while self.failure is None and not self._done.wait(WATCH_S):
            try:
                told: Told = asked(self._watched(self._epoch), CALL_S)
            except EverstepError as error:
                self.failure = error
                break
            except Exception as error:  # the keeper is being restarted, or Ray ends
                if clock.monotonic() - self._heard > PATIENCE_S:
                    self.failure = _gone(error)
                continue
            self._heard, self.durable = clock.monotonic(), told.durable
            self.failure = told.failure
            if self._epoch and told.actors and told.generation != self._generation:
                self._connect(told)


def join(settings: JobSettings, address: str) -> bool:
    """Join the cluster that world rank 0 is on; return whether the connection is ours to end."""
    if ray.is_initialized() or os.environ.get(session.ADDRESS):
        return session.connect(settings)
    os.environ[session.ADDRESS] = address
    try:
        session.join()
    finally:
        del os.environ[session.ADDRESS]
    return True


def keeper_of(run: str) -> Any:
    """Return the handle of a run's keeper, on the cluster that this process has joined."""
    return ray.get_actor(actor_name(run, "keeper"), namespace=NAMESPACE)


def take(spec: RunSpec, run: str, holder: Holder) -> Any:
    """Return the run's keeper, started if there is none, once the run is this program's.

    Raises:
        RunExists: another program has it, and lives.
    """
    for _ in range(TRIES):
        # Not where whoever attaches was placed: a placement group of Ray Train's goes with its worker group.
        name = actor_name(run, "keeper")
        keeper = start(LogKeeper, spec, name=name, get_if_exists=True, scheduling_strategy="DEFAULT")
        try:
            _claim(keeper, run, holder)
            return keeper
        except ray.exceptions.RayActorError as error:  # one that was about to end
            last = error
            clock.sleep(AGAIN_S)
        except ray.exceptions.GetTimeoutError as error:
            raise Failure(
                f"the log keeper did not start within {START_S:.0f} s",
                hint="see whether the cluster has room and the machine is overloaded (`ray status`)",
            ) from error
    raise Failure(f"the log keeper does not start: {last}", hint="look into Ray's logs of the actor")


def _claim(keeper: Any, run: str, holder: Holder) -> None:
    beats = None
    while (held := asked(keeper.claim.remote(holder), START_S)) is not None:
        assert isinstance(held, Held)
        if beats is not None and held.beats != beats:
            raise RunExists(
                f"run {run!r} is being written by {held.holder.what}",
                hint="let it end, stop it, or choose another run name",
            )
        beats = held.beats
        clock.sleep(AGAIN_S)


def this_program(store: str, world_size: int) -> Holder:
    """Return who we are."""
    what = f"{os.path.basename(sys.argv[0]) or 'python'} (process {os.getpid()} on {platform.node()})"
    node = str(ray.get_runtime_context().get_node_id())
    return Holder(new_id(), os.getpid(), node, what, store, world_size)


def _gone(error: BaseException) -> Failure:
    return Failure(f"the log keeper is gone: {error}", hint="start the program again: it goes on from the log")


def asked(refs: Any, timeout_s: float) -> Any:
    """Return what actors answer; raise what they raised."""
    try:
        return ray.get(refs, timeout=timeout_s)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def answered(refs: Any, timeout_s: float) -> Any:
    """Return what actors answer, as `asked`; a failure of theirs to answer ends the log."""
    try:
        return asked(refs, timeout_s)
    except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
        raise _gone(error) from error
