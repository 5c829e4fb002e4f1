"""Every error everstep raises on purpose; the class says who must act.

EverstepError
├── UserError                 exit 2: the job file, the command or the user's own files must change
│   ├── SettingsError         a key, a value or their combination
│   │   └── RunDone           the run took its last step already
│   ├── UnknownName           a name that no registry knows
│   ├── TaskError             the task cannot be used as it is
│   ├── StoreRefused          the store cannot hold a run (no permission, no conditional create)
│   └── RunExists             the run is there already, with other settings
├── Failure                   exit 1: something broke while the request itself was right
│   ├── StoreError            the store did not do what it was asked
│   │   ├── ObjectMissing     no object of that name
│   │   ├── ObjectExists      create-if-absent found one
│   │   └── StoreFull         no space left
│   ├── ChainError            the log cannot give what was asked of it
│   │   ├── CorruptObject     checksum, truncation or a header that does not fit its name
│   │   ├── FormatTooNew      written by a later everstep
│   │   ├── ChainGap          segments in the middle are missing
│   │   └── StepNotKept       no round reaches that step any more (or yet)
│   ├── Fenced                a newer generation owns the log; this writer must stop
│   ├── StateMismatch         two copies that must have the same bits have not
│   ├── ClusterGone           no Ray cluster answers where there was one, or should be
│   └── RunFailed             the run stopped; the cause is in the message
│       └── UserCodeFailed    the user's own code raised; their traceback comes first
└── Interruption              not an error to show: a step was aborted and will be tried again
    ├── GroupBroken           a collective failed: some peer is gone
    └── EpochOver             the fault handler ended this group epoch
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


class EverstepError(Exception):
    """Base of all errors: a message that says what happened and `hint`, what to do next.

    `facts` is what `--json` shows besides; it stays in the process that raised the error.
    """

    exit_code = 1
    facts: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.hint}" if self.hint else self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.hint)


def _rebuild(kind: type[EverstepError], message: str, hint: str) -> EverstepError:
    return kind(message, hint=hint)


class UserError(EverstepError):
    """The request must change before it can work."""

    exit_code = 2


class SettingsError(UserError):
    """A key or value of the job file, or a combination of them, is wrong."""


class RunDone(SettingsError):
    """The run took its last step already."""


class UnknownName(UserError):
    """A name that no registry knows."""


class TaskError(UserError):
    """The task cannot be used as it is."""


class StoreRefused(UserError):
    """The store cannot hold a run."""


class RunExists(UserError):
    """The run is there already, with other settings."""


class Failure(EverstepError):
    """Something broke while the request itself was right."""


class StoreError(Failure):
    """The store did not do what it was asked."""


class ObjectMissing(StoreError):
    """No object of that name."""


class ObjectExists(StoreError):
    """Create-if-absent found an object of that name."""


class StoreFull(StoreError):
    """No space is left in the store."""


class ChainError(Failure):
    """The log cannot give what was asked of it."""


class CorruptObject(ChainError):
    """A stored object fails its checksum, is cut short, or does not fit its name."""


class FormatTooNew(ChainError):
    """A stored object was written by a later everstep."""


class ChainGap(ChainError):
    """Segments in the middle of the log are missing."""


class StepNotKept(ChainError):
    """No round reaches that step any more, or not yet."""


class Fenced(Failure):
    """A newer generation owns the log; this writer must stop."""


class StateMismatch(Failure):
    """Two copies that must have the same bits have not."""


class ClusterGone(Failure):
    """No Ray cluster answers where there was one, or should be one."""


class RunFailed(Failure):
    """The run stopped before its last step."""


class UserCodeFailed(RunFailed):
    """The user's own code raised; their traceback comes first."""


class Interruption(EverstepError):
    """A step was aborted and will be tried again."""


class GroupBroken(Interruption):
    """A collective failed: some peer is gone."""


class EpochOver(Interruption):
    """The fault handler ended this group epoch."""
