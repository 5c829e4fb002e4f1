"""Ray, imported once, after what Ray, gloo and OpenMP read from the environment has been set.

Everything that needs Ray takes it from here, so that nobody can import it too early. Only unset variables are set: a
user's own choice holds. A process that joins an existing cluster (`RAY_ADDRESS` set) keeps the cluster's network.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

ALWAYS = {
    "RAY_AUTH_MODE": "token",  # what a new local cluster does anyway; set for every process or they cannot talk
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",  # more threads are slower beside other workers, and change the bits of sums
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # actors without a GPU must not hide it from those that have one
}
LOCAL = {
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # binds every Ray process to 127.0.0.1
    "GLOO_SOCKET_IFNAME": "lo",
}


def prepare() -> None:
    """Set what is not set yet."""
    wanted = ALWAYS if os.environ.get("RAY_ADDRESS") else ALWAYS | LOCAL
    for name, value in wanted.items():
        os.environ.setdefault(name, value)


prepare()

import ray as _ray  # noqa: E402  # only now
from ray.util.metrics import Counter as Counter  # noqa: E402
from ray.util.metrics import Gauge as Gauge  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

ray: Any = _ray  # its own annotations refuse the concurrency groups that it documents
NodeAffinity: Any = NodeAffinitySchedulingStrategy
NAMESPACE = "everstep"
F = TypeVar("F", bound=Callable[..., Any])


def actor(**options: Any) -> Callable[[type], Any]:
    """Return a decorator that makes a class a Ray actor whose `control` methods run beside its work."""

    def decorate(cls: type) -> Any:
        return ray.remote(concurrency_groups={"control": 4}, **options)(cls)

    return decorate


def start(cls: Any, *arguments: Any, **options: Any) -> Any:
    """Start a detached actor of everstep's and return its handle: it outlives whoever started it."""
    return cls.options(namespace=NAMESPACE, lifetime="detached", **options).remote(*arguments)


def control(method: F) -> F:
    """Mark a method that is answered at any time, also while the actor's own thread is busy or stuck."""
    marked: F = ray.method(concurrency_group="control")(method)
    return marked
