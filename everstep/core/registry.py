"""Names to things: one table a kind, filled by decorators, open to a user's own `my_pkg.mod:Thing`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from everstep.core.errors import UnknownName

T = TypeVar("T")


class Registry(Generic[T]):
    """A table of one kind of thing, looked up by short name or by import path.

    Args:
        kind: what the entries are, in the words of the job file ("task", "compressor").
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that enters its target under `name`."""

        def enter(thing: T) -> T:
            if name in self._entries:
                raise ValueError(f"{self.kind} {name!r} is registered twice")
            self._entries[name] = thing
            return thing

        return enter

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._entries))

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def get(self, name: str) -> T:
        """Return the entry called `name`, or import `package.module:Attribute`.

        Raises:
            UnknownName: neither is there; the message names the nearest entry.
        """
        if name in self._entries:
            return self._entries[name]
        if ":" in name:
            return import_path(name, self.kind)  # type: ignore[return-value]  # a path names any object
        raise UnknownName(
            f"unknown {self.kind} {name!r}; known: {', '.join(self)}",
            hint=_nearest(name, list(self)) or f"use one of these, or your own as package.module:Name ({self.kind})",
        )


def import_path(path: str, kind: str) -> object:
    """Import `package.module:Attribute`.

    Raises:
        UnknownName: the module cannot be imported or has no such attribute.
    """
    module_name, _, attribute = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise UnknownName(
            f"{kind} {path!r}: cannot import module {module_name!r} ({error})",
            hint="run from the folder that holds the module, or install it; the form is package.module:Name",
        ) from error
    if not hasattr(module, attribute):
        raise UnknownName(
            f"{kind} {path!r}: module {module_name!r} has no {attribute!r}",
            hint=_nearest(attribute, dir(module)) or "the form is package.module:Name",
        )
    return getattr(module, attribute)


def nearest(name: str, known: list[str]) -> str | None:
    """Return the entry of `known` most like `name`, or None."""
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return close[0] if close else None


def _nearest(name: str, known: list[str]) -> str:
    close = nearest(name, known)
    return f"did you mean {close!r}?" if close else ""
