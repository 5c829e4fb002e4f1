"""Library mode: the log of everstep under a training loop that is its user's own.

    log = everstep.attach(model, optimizer, run="mine")
    state = log.restore()                        # None: a new run; else model and optimizer are set
    for step in range(state.cursor if state else 0, STEPS):
        loss = ...
        loss.backward()
        optimizer.step()
        log.step(loss, cursor=step + 1, rng=True)
    log.close()

In a plain loop, under torchrun with DistributedDataParallel, and in a Ray Train worker. Each step's gradient, as the
optimizer consumed it, goes to checkpoint actors that outlive the program; a program that attaches to the same run goes
on from its last step.
"""

from __future__ import annotations

import sys
import types
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from everstep.actors import log_link, session
from everstep.actors.context import RunSpec
from everstep.actors.environment import ray
from everstep.actors.log import Log, Restored
from everstep.actors.log_link import LogLink
from everstep.actors.log_words import Holder, Opened
from everstep.actors.moving import to_arrays
from everstep.actors.sender import Sender
from everstep.actors.spec import key_id_of, recipe_of, spread, store_of
from everstep.core.errors import RunExists, SettingsError
from everstep.platform.settings import JobSettings, from_dict, to_dict
from everstep.platform.tuner import derive_intervals
from everstep.storage.chain import Chain
from everstep.storage.store import absolute, probe
from everstep.tasks.described import NAME, check_same
from everstep.training.blueprint import Blueprint
from everstep.training.generators import undisturbed
from everstep.training.live import LiveModel
from everstep.training.ranks import Ranks

__all__ = ["Log", "Restored", "attach"]

KEYS = ("endpoint", "region", "encryption")  # of [store]; the other options are of [checkpoint]


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    run: str,
    store: str = "file:./everstep-runs",
    *,
    scheduler: LRScheduler | None = None,
    shards: int = 2,
    max_lag_s: float = 5.0,
    digest_every: int = 50,
    **options: Any,
) -> Log:
    """Begin the run's log, or go on with it; on every rank of the default process group, if there is one.

    Without a Ray cluster (`RAY_ADDRESS`, or one that this process has joined) one is started here and ends with this
    program; the store then has every step that is `max_lag_s` old, and all of them after `Log.close`.

    Args:
        model: plain, compiled, or in DistributedDataParallel; on its device, with its first weights.
        optimizer: over all its trainable parameters.
        run: the run's name.
        store: `file:FOLDER` or `s3://bucket/prefix`.
        scheduler: set by `Log.restore`, by the number of steps it had taken; the loop steps it.
        shards: of the parameters, in the log; stays for the life of the run.
        max_lag_s: seconds until a finished step is durable.
        digest_every: steps between two digests of the state in the log, which its replay is compared with; 0: none.
        options: `actors`, `queue_bytes`, `keep_hours` and the others of the job file's `[checkpoint]`, and `endpoint`,
            `region`, `encryption` of its `[store]`.

    Raises:
        SettingsError: something cannot be logged as it is, or the run is of another model.
        RunExists: another program writes the run, or a job does.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        raise SettingsError(
            "scheduler ReduceLROnPlateau depends on measured losses, so the number of steps does not tell where it is",
            hint="leave it out here, and put scheduler.state_dict() into the cursor",
        )
    ranks = Ranks.now()
    given = {key: value for key, value in options.items() if key not in KEYS}
    wanted: dict[str, Any] = {
        "run": {"name": run, "store": store, "digest_every": digest_every},
        "task": {"name": NAME},
        "batch": {"global_size": 1, "micro_shards": 1},
        "workers": {"min": 1, "max": 1, "spares": 0, "cpus": 0.0},
        "checkpoint": {"shards": shards, "max_lag_s": max_lag_s, **given},
        "store": {key: options[key] for key in KEYS if key in options},
    }
    checked = from_dict(wanted, where="attach")
    if checked.checkpoint.actors == 0:
        raise SettingsError("checkpoint.actors is 0: then there is no log", hint="leave `actors` out, or set 1")
    with undisturbed():  # Ray draws from Python's generator when it starts, and a twin of the model is built
        live = LiveModel(model, optimizer, shards=shards, window=checked.checkpoint.window)
        name, arguments = live.optimizer_options()
        wanted["task"] |= live.description()
        wanted["optimizer"] = {**arguments, "name": name, "clip_norm": "none"}
        wanted["run"]["store"] = absolute(store)
        return _opened(from_dict(wanted, where="attach"), live, ranks, scheduler)


def _opened(settings: JobSettings, live: LiveModel, ranks: Ranks, scheduler: LRScheduler | None) -> Log:
    run = settings.run.name or ""
    link: LogLink | None = None
    own = False

    def take() -> tuple[Holder, Opened, str]:
        nonlocal own, link
        spec, first = _checked(settings, live)
        own = session.connect(settings)
        try:
            holder = log_link.this_program(settings.run.store, ranks.world_size)
            keeper = log_link.take(spec, run, holder)
            link = _link(keeper, holder, live, settings, ranks)
            return holder, link.open(spec, first), str(ray.get_runtime_context().gcs_address)
        except BaseException:
            if link is not None:
                link.end()
            session.disconnect(own)
            raise

    holder, opened, address = ranks.decide(take)
    if link is None:
        own = log_link.join(settings, address)
        link = _link(log_link.keeper_of(run), holder, live, settings, ranks)
    link.begin(opened.group_epoch)
    log = Log(live, link, opened, ranks, scheduler=scheduler, settings=settings, own=own)
    if ranks.world_rank == 0:
        log.say(f"{'begins' if opened.fresh else f'goes on from step {opened.lsn}'} in {settings.run.store}")
    return log


def _link(keeper: Any, holder: Holder, live: LiveModel, settings: JobSettings, ranks: Ranks) -> LogLink:
    check = settings.checkpoint
    live.owned = tuple(shard for shard in live.layout.shards if shard % ranks.world_size == ranks.world_rank)
    shards = spread(len(live.layout.ranges), check.actors)
    sender = Sender(live.layout, shards, check.window, check.queue_bytes, lambda point, lsn: None)
    return LogLink(keeper, holder, sender, live.owned, reports=ranks.world_rank == 0)


def _checked(settings: JobSettings, live: LiveModel) -> tuple[RunSpec, dict[str, Any]]:
    """Refuse what can be refused before anything is started; return the run, and the state that it begins with."""
    name, where = settings.run.name or "", settings.run.store
    if where.startswith("memory:"):
        raise SettingsError(
            'store "memory:" lives in one process, a log has several', hint='use "file:./everstep-runs"'
        )
    store = store_of(settings)
    probe(store)
    key_id_of(settings)
    begun = False
    if Chain.exists(store, name):
        chain = Chain.open(store, name)
        _check_existing(chain, settings)
        begun = bool(chain.manifest.bases)
    blueprint = Blueprint(recipe_of(settings))
    blueprint.live_state()  # refuses what the optimizer refuses
    if blueprint.layout != live.layout:
        raise SettingsError(
            "the model names its parameters otherwise than its modules do",
            hint="leave named_parameters() as torch.nn.Module has it",
        )
    layout = live.layout
    intervals = derive_intervals(settings, layout.size, len(layout.shards))
    spec = RunSpec(
        settings=to_dict(settings), resume=None, shards=len(layout.ranges), exactness=live.replay()[0],
        intervals=intervals, snapshot_bytes=0, killable=None,
    )  # fmt: skip
    return spec, {} if begun else to_arrays(live.state.tensors())


def _check_existing(chain: Chain, settings: JobSettings) -> None:
    """Refuse to go on with a run of another model, or of a job."""
    old = from_dict(chain.manifest.settings, where=f"run {chain.run}")
    if old.task.name != NAME:
        raise RunExists(
            f"run {chain.run!r} was written by a job (task {old.task.name!r}), not by a loop of its own",
            hint=f"choose another run name, or go on with the job: everstep resume {chain.run}",
        )
    check_same(chain.run, old.task.options, settings.task.options)
    stays = {
        "optimizer": (old.optimizer.name, settings.optimizer.name),
        "shards": (old.checkpoint.shards, settings.checkpoint.shards),
        "encryption": (old.store.encryption, settings.store.encryption),
    }
    for key, (before, now) in stays.items():
        if before != now:
            raise SettingsError(
                f"run {chain.run!r} has {key} {before!r}, now it is {now!r}; that stays for the life of a run",
                hint=f"hand over {before!r}, or choose another run name",
            )


class _Callable(types.ModuleType):
    """`everstep.attach` is this module and what it is there for, whichever way it was imported."""

    __call__ = staticmethod(attach)


sys.modules[__name__].__class__ = _Callable
