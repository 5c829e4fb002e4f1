"""The log keeper: a detached actor that owns the log of a run whose steps are taken by a loop of its user's own.

It does for such a loop what the fault handler does for a job, less the workers: opens the log or takes it over, starts
the checkpoint actors and replaces lost ones, advances the complete lsn, names bases, collects. One program at a time
holds the run; it is told from another by a token, and its messages by the group epoch that it was given.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import psutil

from everstep.actors.checkpointers import lowest_durable
from everstep.actors.closing import write_down
from everstep.actors.context import RunContext, RunSpec
from everstep.actors.environment import NAMESPACE, actor, control, ray
from everstep.actors.log_closing import close_attached
from everstep.actors.log_words import Held, Holder, Opened, Progress, Told
from everstep.actors.moving import from_arrays
from everstep.actors.spec import actor_name, key_id_of, store_of
from everstep.core import clock
from everstep.core.errors import EverstepError, Failure, Fenced, GroupBroken, RunExists, StateMismatch, StoreError
from everstep.storage.chain import Chain
from everstep.training.blueprint import Blueprint
from everstep.training.shard_state import to_batches

LOOK_S = 0.1
LEASE_S = 10.0  # a holder that is silent for so long has lost the run to whoever asks for it;
GONE_S = 1.5  # one whose process is gone, on the keeper's own node, after so long
LINGER_S = 600.0  # how long the actors wait for the next program; what they hold is in the store by then
ANSWER_S = 10.0


class _Run(RunContext):
    """A run without workers of ours."""

    finished = 0

    def lsn(self) -> int:
        return self.finished


@actor(num_cpus=0, max_restarts=-1, max_task_retries=0)
class LogKeeper:
    """Keeps one run.

    Args:
        spec: the run; one that attaches later may bring another.
    """

    def __init__(self, spec: RunSpec) -> None:
        self.run: Any = _Run.of(spec)
        self.holder: Holder | None = None
        self.failure: EverstepError | None = None
        self._told = Told()
        self._progress = Progress()
        self._beats, self._heard = 0, clock.monotonic()
        self._opened = False
        self._found: int | None = None  # the group epoch of a holder that lived on while this actor was restarted
        self._lock = threading.RLock()  # one opens, looks or closes
        self._claims = threading.Lock()
        threading.Thread(target=self._live, name="keeper", daemon=True).start()

    # ---- for whoever attaches ----

    @control
    def claim(self, holder: Holder) -> Held | None:
        """Let a program have the run; or return who has it.

        Raises:
            RunExists: it is the name of another run.
        """
        kept = self.run.settings.run.store
        if self._opened and holder.store != kept:
            raise RunExists(
                f"this cluster keeps a run {self.run.name!r} of another store, {kept}", hint="choose another run name"
            )
        with self._claims:
            if self.holder is not None and self.holder.token != holder.token and self._alive():
                return Held(self.holder, self._beats)
            self.holder, self._beats, self._heard = holder, 0, clock.monotonic()
            self.failure = None
            return None

    def open(self, token: str, spec: RunSpec, first: Mapping[str, Any]) -> Opened:
        """Open the log for the holder: everything that older programs still send is refused from now on.

        Args:
            token: the holder's.
            spec: the run as the holder describes it.
            first: its state (`moving.to_arrays`), which a new run begins with.

        Raises:
            EverstepError: what is in the way; the run is free again.
        """
        with self._lock:
            self._hold(token)
            try:
                return self._open(spec, first)
            except EverstepError:
                self.holder = None
                raise

    @control
    def watch(self, holder: Holder, group_epoch: int, progress: Progress | None) -> Told:
        """Hear from one of the holder's processes (its world rank 0 brings `progress`), and say how things stand.

        Raises:
            Fenced: another program has the run.
        """
        with self._claims:
            if self.holder is None and not self._opened and group_epoch:  # this actor was restarted
                self.holder, self._found = holder, group_epoch
            self._hold(holder.token)
            if progress is not None:
                self._progress, self._heard, self._beats = progress, clock.monotonic(), self._beats + 1
        return replace(self._told, failure=self.failure)

    def close(self, token: str, lsn: int, digest: str) -> int:
        """Make everything up to `lsn` durable and close the log; return the durable lsn.

        Raises:
            StateMismatch: the merged state is not the live one.
            StoreError: the store did not take the last records in time.
        """
        deadline = clock.monotonic() + self.run.settings.checkpoint.storage_timeout_s
        while True:
            try:
                with self._lock:
                    self._hold(token)
                    if not self._opened:
                        raise GroupBroken("the log is being found again")
                    return close_attached(self.run, lsn, digest, self._progress.exactness, deadline)
            except GroupBroken:  # a checkpoint actor is gone: the next look replaces it, and the holder sends again
                if clock.monotonic() > deadline:
                    raise
                clock.sleep(2 * LOOK_S)

    def release(self, token: str, *, end: bool) -> int:
        """Write what there is and let the run go as it stands, for whoever goes on with it; return the durable lsn.

        `end`: its actors are about to end.
        """
        with self._lock:
            self._hold(token)
            durable = 0
            if self._opened:
                self._advance(min(self._received().values()))
                durable = lowest_durable(self.run.checkpointers.ask("flush", ANSWER_S))
                if end:
                    self.run.patiently(lambda: self.run.chain.update(state="stopped"))
                write_down(self.run)
            self.holder = None
            return durable

    @control
    def leave(self) -> None:
        """End all actors of the run, this one last."""
        self.run.checkpointers.close()
        ray.kill(ray.get_actor(actor_name(self.run.name, "keeper"), namespace=NAMESPACE), no_restart=True)

    def _hold(self, token: str) -> None:
        if self.holder is None and not self._opened:
            raise GroupBroken("the log keeper was restarted and has not heard from the program yet")
        if self.holder is None or self.holder.token != token:
            who = "nobody" if self.holder is None else self.holder.what
            raise Fenced(
                f"run {self.run.name!r} does not belong to this program any more, but to {who}",
                hint="stop this program; what it did after that is not in the log",
            )

    def _alive(self) -> bool:
        assert self.holder is not None
        silent = clock.monotonic() - self._heard
        here = self.holder.node == str(ray.get_runtime_context().get_node_id())
        gone = here and silent > GONE_S and not psutil.pid_exists(self.holder.pid)
        return silent < LEASE_S and not gone

    # ---- opening ----

    def _open(self, spec: RunSpec, first: Mapping[str, Any]) -> Opened:
        fresh = False
        if self._opened:
            if not self._all_there():
                self._take_over(spec)
        else:
            fresh = self._open_log(spec, first)
        run = self.run
        run.checkpointers.ask("ready")
        run.group_epoch += 1
        while any(ack.refused for ack in run.checkpointers.ask("begin_epoch", run.group_epoch)):
            run.group_epoch += 1
        run.group_epoch += 1  # one that nobody can have been given
        complete = min(self._received().values())
        run.checkpointers.ask("advance", complete)
        run.checkpointers.ask("begin_epoch", run.group_epoch, complete)  # drops what other shards have beyond
        self._opened, run.finished = True, complete
        self._progress = Progress(complete)
        assert self.holder is not None
        run.formed(complete, self.holder.world_size)
        run.become(spec.exactness)
        self._publish()
        return Opened(run.group_epoch, complete, fresh, run.exactness)

    def _open_log(self, spec: RunSpec, first: Mapping[str, Any]) -> bool:
        """Begin the log, go on with living checkpoint actors, or take it over; return whether it was begun."""
        run = self.run = _Run.of(spec)
        store = store_of(run.settings)
        if not Chain.exists(store, run.name):
            shards = spec.shards + 1
            chain = Chain.create(
                store, run.name, settings=spec.settings, shards=shards, exactness=spec.exactness,
                key_id=key_id_of(run.settings),
            )  # fmt: skip
            self._begin(chain, first)
            return True
        chain = Chain.open(store, run.name)
        if not chain.manifest.bases and not chain.listing().segments():  # it died before its first state was stored
            self._begin(Chain.take_over(store, run.name, cut="common", settings=spec.settings), first)
            return True
        run.open_log(chain)
        if not self._adopt():
            self._take_over(spec)
        return False

    def _begin(self, chain: Chain, first: Mapping[str, Any]) -> None:
        """Store the first state, and start checkpoint actors from it."""
        run, given = self.run, from_arrays(first)
        run.open_log(chain)
        blueprint, proved = Blueprint(run.recipe), []
        for shard in chain.manifest.shards:
            state = blueprint.shard_state(shard, blank=True).state
            state.load({name: tensor for name, tensor in given.items() if state.owns(name)}, 0, adopt=True)
            proved.append(chain.proved(chain.put_base(shard, 0, to_batches(state.tensors()))))
        chain.name_bases(proved)
        run.checkpointers.start(chain, run.group_epoch)

    def _adopt(self) -> bool:
        """Take the living checkpoint actors of the log's generation; False unless all of them live."""
        run = self.run
        found = []
        for index in range(len(run.checkpointers.shards)):
            name = actor_name(run.name, "checkpointer/", f"{index}-g{run.chain.manifest.generation}")
            try:
                found.append(ray.get_actor(name, namespace=NAMESPACE))
            except ValueError:
                break
        run.checkpointers.actors = found
        return len(found) == len(run.checkpointers.shards) and self._all_there()

    def _all_there(self) -> bool:
        try:
            status = self.run.checkpointers.ask("status", timeout_s=ANSWER_S)
        except (GroupBroken, ray.exceptions.RayError):
            return False
        return all(part.get("fatal") is None for part in status)

    def _take_over(self, spec: RunSpec) -> None:
        """Go on from what the store has, with new checkpoint actors; what living ones hold goes there first."""
        before = self.run
        for handle in before.checkpointers.actors:
            try:
                ray.get(handle.flush.remote(ANSWER_S), timeout=2 * ANSWER_S)
            except ray.exceptions.RayError:
                continue
        before.checkpointers.close()
        run = self.run = _Run.of(spec)
        run.group_epoch = before.group_epoch
        run.open_log(Chain.take_over(store_of(run.settings), run.name, cut="common", settings=spec.settings))
        run.checkpointers.start(run.chain, run.group_epoch)

    def _reopen(self, group_epoch: int) -> None:
        """Find the log again, after a restart of this actor, for a holder that goes on taking steps."""
        run = self.run
        run.open_log(Chain.open(store_of(run.settings), run.name))
        run.group_epoch = group_epoch
        if self._adopt():
            run.checkpointers.ask("begin_epoch", group_epoch)
        else:
            run.renew_checkpointers()
        self._opened = True
        self._publish()
        run.tell("the log keeper was restarted; its program lives on")

    # ---- keeping ----

    def _live(self) -> None:
        while True:
            clock.sleep(LOOK_S)
            with self._lock:
                try:
                    if self._found is not None:
                        found, self._found = self._found, None
                        self._reopen(found)
                    elif self._opened and self.failure is None:
                        self._look()
                    if clock.monotonic() - self._heard > LINGER_S:
                        self.leave()
                except GroupBroken:
                    continue  # seen by the next look
                except EverstepError as error:
                    self.failure = error
                except Exception as error:  # shown to the holder: nobody else would hear of it
                    self.failure = Failure(f"{type(error).__name__}: {error}", hint="this is a defect of everstep")

    def _look(self) -> None:
        run, now = self.run, self._progress
        run.finished = max(run.finished, now.lsn)
        run.crew.latest = {"step_s": now.step_s, "stall_s": now.stall_s}
        run.become(now.exactness)
        run.checkpointers.look()
        facts = run.checkpointers.facts()
        if any(not each.alive for each in facts):
            self._forget()
            run.replace_checkpointers()
            self._publish()
            return
        self._check(facts)
        status = run.checkpointers.status
        if all("received" in part for part in status):
            self._advance(run.checkpointers.lowest("received"))
            self._told = replace(self._told, durable=run.checkpointers.lowest("durable"))
        run.bookkeeper.look()
        run.healings.close(lambda wall: clock.wall() if self._progress.lsn >= run.finished else None)

    def _check(self, facts: Any) -> None:
        """Raise what ended the log."""
        check = self.run.settings.checkpoint
        for each in facts:
            if isinstance(each.fatal, StateMismatch):
                raise StateMismatch(
                    f"the log does not lead to the state that the loop has: {each.fatal.message}",
                    hint="change parameters only by optimizer.step() between two calls of log.step(), and register no "
                    "hook that changes gradients in it after attach; to go on from before that step: "
                    f"everstep fork {self.run.name}@STEP NEW, and attach to NEW",
                )
            if each.fatal is not None:
                raise each.fatal
            if check.on_storage_loss == "stop" and (each.store_error_s or 0.0) > check.storage_timeout_s:
                raise StoreError(
                    f"the store has refused for {each.store_error_s:.0f} s: {each.store_error}",
                    hint="mend the store and start again; steps that are not durable are lost with the program",
                )

    def _forget(self) -> None:
        """What the old checkpoint actors said does not hold for the new ones."""
        self.run.checkpointers.status = [{} for _ in self.run.checkpointers.shards]

    def _publish(self) -> None:
        run = self.run
        self._told = Told(run.chain.manifest.generation, tuple(run.checkpointers.actors), self._told.durable)

    def _received(self) -> dict[int, int]:
        found: dict[int, int] = self.run.checkpointers.begin_epoch(self.run.group_epoch, None)
        return found

    def _advance(self, complete: int) -> None:
        for handle in self.run.checkpointers.actors:
            handle.advance.remote(complete)
