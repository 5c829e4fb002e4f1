"""What a run's events say about its history: a run may have gone back to an earlier step and on another way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Events = Mapping[str, Mapping[str, Any]]


def evaluation_name(lsn: int, generation: int | None = None) -> str:
    """Return the event name of an evaluation at `lsn`; without a generation, what those of all begin with."""
    return f"eval-{lsn:012d}" + ("" if generation is None else f"-g{generation:06d}")


def rewind_name(generation: int) -> str:
    """Return the event name of the going back with which a generation began."""
    return f"rewound-g{generation:06d}"


def size_name(lsn: int, generation: int, group_epoch: int) -> str:
    """Return the event name of a world size that holds from the step after `lsn` on, or until the next group forms."""
    return f"size-g{generation:06d}-{lsn:012d}-{group_epoch:06d}"


def sizes(events: Events) -> list[tuple[int, int]]:
    """Return the world sizes on the run's history as (step, world size after it), oldest first."""
    rewinds = bodies(events, "rewound-")
    out: list[tuple[int, int]] = []
    for body in bodies(events, "size-"):
        if not any(r["generation"] > body["generation"] and body["lsn"] > r["step"] for r in rewinds):
            out = [*(pair for pair in out if pair[0] < body["lsn"]), (body["lsn"], body["size"])]
    return [pair for at, pair in enumerate(out) if not at or out[at - 1][1] != pair[1]]


def sizes_between(pairs: Sequence[tuple[int, int]], after: int, last: int) -> set[int]:
    """Return the world sizes that steps `after` + 1 to `last` were taken with, as `sizes` gives them; {}: not known."""
    ends = [*(step for step, _ in pairs[1:]), last]
    return {size for (step, size), end in zip(pairs, ends, strict=False) if end > after and step < last}


def bodies(events: Events, prefix: str) -> list[dict[str, Any]]:
    """Return the bodies of the events whose name starts with `prefix`, by name."""
    return [dict(body) for name, body in sorted(events.items()) if name.startswith(prefix)]


def gaps(events: Events) -> list[dict[str, Any]]:
    """Return the steps that cannot be restored, in ranges that do not touch; each writer declares its own."""
    out: list[dict[str, Any]] = []
    for body in sorted(bodies(events, "gap-"), key=lambda body: int(body["first"])):
        if out and body["first"] <= out[-1]["last"] + 1:
            out[-1]["last"] = max(out[-1]["last"], body["last"])
        else:
            out.append(body)
    return out


def evaluations(events: Events) -> list[dict[str, Any]]:
    """Return the evaluations that lie on the run's history, one a step, oldest first."""
    rewinds = bodies(events, "rewound-")
    found = {}
    for body in sorted(bodies(events, "eval-"), key=lambda body: (body["lsn"], body.get("generation", 1))):
        generation = body.get("generation", 1)
        if not any(r["generation"] > generation and body["lsn"] > r["step"] for r in rewinds):
            found[body["lsn"]] = body
    return list(found.values())


def best(events: Events) -> dict[str, Any] | None:
    """Return the evaluation of the history with the lowest loss, the earliest of equals; None if there is none."""
    return min(evaluations(events), key=lambda body: float(body["loss"]), default=None)
