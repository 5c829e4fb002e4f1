"""A store that misbehaves by a script, over any other: fault models of storage as data."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

from everstep.core import clock
from everstep.core.errors import StoreError
from everstep.storage.store import Buffer, ObjectInfo, Pace, Store

Verb = Literal["put", "get", "list", "delete"]
Kind = Literal["fail_before", "lose_answer", "burst", "delay", "truncate", "flip", "hide"]
T = TypeVar("T")


@dataclass(frozen=True)
class Fault:
    """One line of a script: what goes wrong with which calls.

    Attributes:
        verb: the verb it applies to; of `list` the key is the prefix.
        kind: fail_before = StoreError, and nothing was done; lose_answer = it was done, then StoreError; burst =
            fail_before by an overloaded service; delay = late by `arg` seconds; truncate = a read without its last
            `arg` bytes; flip = a read with bit number `arg` wrong; hide = a listing without the keys that match.
        match: part of the key (of `hide`: of a key in the listing); empty = every key.
        at: the first matching call it applies to, counted from 1.
        count: to how many matching calls from there on.
        arg: see `kind`.
    """

    verb: Verb
    kind: Kind
    match: str = ""
    at: int = 1
    count: int = 1
    arg: float = 1


class FaultyStore:
    """Does what the inner store does, except for the faults of the script.

    Attributes:
        fired: every fault that was done, with the key, in order.
    """

    def __init__(self, inner: Store, script: Sequence[Fault] = ()) -> None:
        self.inner = inner
        self.url = inner.url
        self.script = tuple(script)
        self.fired: list[tuple[Fault, str]] = []
        self._calls = [0] * len(self.script)
        self._lock = threading.Lock()

    def put(self, key: str, data: Buffer, *, pace: Pace | None = None) -> None:
        self._around("put", key, lambda: self.inner.put(key, data, pace=pace))

    def get(self, key: str, start: int = 0, length: int | None = None) -> bytes | bytearray:
        data, due = self._around("get", key, lambda: self.inner.get(key, start, length))
        for fault in due:
            if fault.kind == "truncate":
                data = data[: max(0, len(data) - int(fault.arg))]
            elif fault.kind == "flip" and data:
                byte, bit = divmod(int(fault.arg), 8)
                data = bytearray(data)
                data[byte % len(data)] ^= 1 << bit
        return data

    def list(self, prefix: str, after: str = "") -> list[ObjectInfo]:
        found, _ = self._around("list", prefix, lambda: self.inner.list(prefix, after))
        hidden = self._due("list", lambda fault: [info.key for info in found if fault.match in info.key], hide=True)
        return [info for info in found if not any(fault.match in info.key for fault in hidden)]

    def tops(self) -> tuple[str, ...]:
        return self.inner.tops()

    def delete(self, key: str) -> None:
        self._around("delete", key, lambda: self.inner.delete(key))

    def sweep(self, older_than_s: float) -> int:
        return self.inner.sweep(older_than_s)

    def _around(self, verb: Verb, key: str, act: Callable[[], T]) -> tuple[T, Sequence[Fault]]:
        due = self._due(verb, lambda fault: [key] if fault.match in key else [])
        kinds = {fault.kind for fault in due}
        clock.sleep(sum(fault.arg for fault in due if fault.kind == "delay"))
        for kind, why in (("fail_before", "the connection broke"), ("burst", "SlowDown (HTTP 503)")):
            if kind in kinds:
                raise StoreError(f"{self.url}: cannot {verb} {key}: {why}", hint="a fault of the test")
        if "lose_answer" in kinds:
            with contextlib.suppress(StoreError):  # it is lost, whatever it was
                act()
            raise StoreError(f"{self.url}: cannot {verb} {key}: the answer was lost", hint="a fault of the test")
        return act(), due

    def _due(self, verb: Verb, keys: Callable[[Fault], Sequence[str]], *, hide: bool = False) -> Sequence[Fault]:
        """Count this call for every fault it matches; return those that happen now."""
        due = []
        with self._lock:
            for place, fault in enumerate(self.script):
                if fault.verb != verb or (fault.kind == "hide") != hide or not (matching := keys(fault)):
                    continue
                self._calls[place] += 1
                if fault.at <= self._calls[place] < fault.at + fault.count:
                    due.append(fault)
                    self.fired.append((fault, matching[0]))
        return due
