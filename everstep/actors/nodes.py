"""What Ray says of its nodes: which are about to be taken away, and what there is room for."""

from __future__ import annotations

import math
import threading
from typing import Any

from everstep.actors.environment import NodeAffinity, ray
from everstep.core import clock

LOOK_S = 1.0
KINDS = ("CPU", "GPU")

_seen: tuple[float, dict[str, float]] = (-math.inf, {})
_lock = threading.Lock()


def draining() -> dict[str, float]:
    """Return the nodes that Ray marks as draining or preempted: seconds until each is taken away, 0 if not known.

    None of them counts while there is no other node to go to. Asked at most once a second.
    """
    global _seen
    with _lock:
        now = clock.monotonic()
        if now - _seen[0] > LOOK_S:
            _seen = (now, _left())
        return _seen[1]


def _left() -> dict[str, float]:
    found = _asked()
    if found and all(node["NodeID"] in found for node in ray.nodes() if node["Alive"]):
        return {}
    return {node: _seconds(deadline) for node, deadline in found.items()}


def away_from(suspects: frozenset[str], number: int) -> Any:
    """Return how to place the `number`th of a few actors: spread over the nodes, but for those that look lost.

    Ray goes on placing actors on a dead node until it has declared it dead, and they wait there so long.
    """
    others = sorted(n["NodeID"] for n in ray.nodes() if n["Alive"] and n["NodeID"] not in suspects) if suspects else []
    if not others:
        return "SPREAD"
    return NodeAffinity(others[number % len(others)], soft=True)


def processes() -> dict[str, tuple[str, int]]:
    """Return (node, process id) of every actor that is built, by Ray name; empty if Ray does not say."""
    ask = getattr(_state(), "actors", None)
    table = ask() if ask is not None else {}
    return {
        actor["Name"]: (actor["Address"]["NodeID"], actor["Pid"])
        for actor in table.values()
        if actor.get("State") == "ALIVE" and actor.get("Pid")
    }


def _asked() -> dict[str, int]:
    ask = getattr(getattr(_state(), "state", None), "get_draining_nodes", None)
    return dict(ask() or {}) if ask is not None else {}


def _state() -> Any:
    """Ray has no public calls for these; its own trainer uses them. Without them nodes are left when they die."""
    return getattr(getattr(ray, "_private", None), "state", None)


def _seconds(deadline_ms: int) -> float:
    return max(deadline_ms / 1000 - clock.wall(), 0.0) if deadline_ms else 0.0


def room() -> str:
    """Return what the cluster has and what of it is free, in words."""
    have, free = ray.cluster_resources(), ray.available_resources()
    parts = [f"{have[kind]:g} {kind} ({free.get(kind, 0):g} free)" for kind in KINDS if have.get(kind)]
    nodes = sum(bool(node["Alive"]) for node in ray.nodes())
    return f"{', '.join(parts) or 'no CPU'} on {nodes} node{'s' * (nodes != 1)}"
