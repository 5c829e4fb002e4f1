"""What a loop of one's own and the keeper of its log say to each other: plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from everstep.core.errors import EverstepError


@dataclass(frozen=True)
class Holder:
    """The program that takes a run's steps.

    Attributes:
        token: one attach of it.
        pid: of its world rank 0.
        node: Ray's id of the node that it runs on.
        what: the program and where it runs, for people.
        store: where the run lives.
        world_size: how many processes it is.
    """

    token: str
    pid: int
    node: str
    what: str
    store: str
    world_size: int


@dataclass(frozen=True)
class Held:
    """A run belongs to somebody else: to `holder`, who has been heard `beats` times."""

    holder: Holder
    beats: int


@dataclass(frozen=True)
class Opened:
    """The log is open: the state of step `lsn` can be had, and steps from the next one on are taken.

    `fresh`: it was begun with the state that was handed over, so that there is nothing to restore.
    """

    group_epoch: int
    lsn: int
    fresh: bool
    exactness: str


@dataclass(frozen=True)
class Progress:
    """What the holder says of itself: its last step, seconds a step and of that waited for the log, its exactness."""

    lsn: int = 0
    step_s: float | None = None
    stall_s: float | None = None
    exactness: str = "bitwise"


@dataclass(frozen=True)
class Told:
    """What the keeper says back.

    Attributes:
        generation: of the checkpoint actors.
        actors: these; empty while the log is not open.
        durable: the last lsn that is in the store, as last heard.
        failure: what ended the log.
    """

    generation: int = 0
    actors: tuple[Any, ...] = ()
    durable: int = 0
    failure: EverstepError | None = None
