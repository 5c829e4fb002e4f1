"""Plain values that cross process borders, and the names under which actors find each other."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from everstep.core.errors import EverstepError, SettingsError, StoreRefused, UnknownName
from everstep.platform.settings import JobSettings
from everstep.platform.tuner import Intervals
from everstep.storage.store import Store, open_store
from everstep.training.recipe import Recipe


def actor_name(run: str, role: str, identity: str | int = "") -> str:
    """Return the Ray name of one actor of a run."""
    return f"{run}/{role}{identity}"


def recipe_of(settings: JobSettings) -> Recipe:
    """Return the part of the settings that decides the bits."""
    scheduler = settings.scheduler
    return Recipe(
        task=settings.task.name,
        task_options=settings.task.options,
        init_from=settings.task.init_from,
        seed=settings.run.seed,
        global_size=settings.batch.global_size,
        micro_shards=settings.batch.micro_shards,
        loader_workers=settings.batch.loader_workers,
        skips=settings.batch.skips,
        determinism=settings.run.determinism,
        optimizer=settings.optimizer.name,
        optimizer_options=settings.optimizer.options,
        scheduler=scheduler.name if scheduler else None,
        scheduler_options=scheduler.options if scheduler else {},
        clip_norm=settings.optimizer.clip_norm,
        autocast=settings.optimizer.autocast,
        compressor=settings.compression.method,
        density=settings.compression.density,
        rank=settings.compression.rank,
        residual=settings.compression.residual,
        overlap=settings.compression.overlap,
        shards=settings.checkpoint.shards,
        on_nonfinite=settings.run.on_nonfinite,
        digest_every=settings.run.digest_every if settings.checkpoint.actors else 0,
    )


def store_of(settings: JobSettings) -> Store:
    """Open the store of a job."""
    return open_store(settings.run.store, endpoint=settings.store.endpoint, region=settings.store.region)


def how_of(settings: JobSettings) -> str:
    """Return how a run goes on by itself after a loss of all workers; see `recovery.load_state`."""
    return "exact if possible" if settings.checkpoint.on_total_loss == "exact" else "resume"


@contextmanager
def begun_here(settings: JobSettings) -> Iterator[None]:
    """Open a run that has begun: if it is not there, this node's folder is not the one that it began in.

    Raises:
        StoreRefused: says so.
    """
    try:
        yield
    except UnknownName as error:
        raise StoreRefused(
            f"{error.message}, although it has begun: {settings.run.store} on node {platform.node()} is not the folder "
            "that the run began in",
            hint="use a folder that every node mounts at the same path, or an s3:// store",
        ) from error


def key_id_of(settings: JobSettings) -> str:
    """Return the id of the key that a job's objects are encrypted with; "" for none.

    Raises:
        SettingsError: the job asks for encryption and the environment holds no key, or one that cannot be used.
    """
    if settings.store.encryption == "none":
        return ""
    from everstep.storage.encrypted import FILE_VARIABLE, VARIABLE, load_key  # cryptography, for those who use it

    key = load_key()
    if key is None:
        raise SettingsError(
            f"store.encryption = {settings.store.encryption!r}, but there is no key in the environment",
            hint=f"set {VARIABLE} (32 bytes in base64) or {FILE_VARIABLE} here and on every node",
        )
    return key.id


@dataclass(frozen=True)
class WorkerSpec:
    """What a train worker is built from.

    Attributes:
        settings: the job file as a dictionary.
        identity: the worker's name among all that ever were.
        shards: shard numbers by checkpoint actor; empty without a log.
        compressor_interval: steps between compressor snapshots; 0 for none.
        killable: the driver's process id, where `kill_everything` may kill it and its own cluster.
    """

    settings: Mapping[str, Any]
    identity: str
    shards: tuple[tuple[int, ...], ...]
    compressor_interval: int
    killable: int | None = None


@dataclass(frozen=True)
class CheckpointerSpec:
    """What a checkpoint actor is built from.

    Attributes:
        settings: the job file as a dictionary.
        index: its number among the run's checkpoint actors.
        shards: the shards it owns.
        generation: the tenure it writes in.
        group_epoch: the lowest group epoch it accepts.
        intervals: when it cuts segments and writes bases.
        killable: the driver's process id, where `kill_everything` may kill it.
    """

    settings: Mapping[str, Any]
    index: int
    shards: tuple[int, ...]
    generation: int
    group_epoch: int
    intervals: Intervals
    killable: int | None = None


@dataclass(frozen=True)
class Formation:
    """One forming of the process group, as told to one of its workers."""

    group_epoch: int
    world_rank: int
    world_size: int
    rendezvous: tuple[str, int]


@dataclass(frozen=True)
class Ack:
    """What a checkpoint actor says back: per owned shard the last lsn received and the last one durable.

    Attributes:
        index: the actor's number.
        received: by shard.
        durable: by shard.
        released: by shard, what the sender need not keep any more: durable, or given up.
        refused: the message came from an ended group epoch.
    """

    index: int
    received: Mapping[int, int]
    durable: Mapping[int, int]
    released: Mapping[int, int]
    refused: bool = False


@dataclass(frozen=True)
class RunResult:
    """How a worker's run ended; see `platform.states.WorkerFacts`."""

    outcome: str
    lsn: int
    message: str = ""
    error: EverstepError | None = None


@dataclass(frozen=True)
class Formed:
    """A worker stands in a new group, at step `lsn`.

    Attributes:
        received: the state came from a peer.
        drifted: it had to, although both had taken the same step.
        note: what a person should know of it; "": nothing.
    """

    lsn: int
    received: bool
    drifted: bool
    note: str = ""


def spread(shards: int, actors: int) -> tuple[tuple[int, ...], ...]:
    """Return which shards (0 to `shards` inclusive) each of `actors` checkpoint actors owns, round robin."""
    return tuple(tuple(range(shards + 1))[index::actors] for index in range(actors))
