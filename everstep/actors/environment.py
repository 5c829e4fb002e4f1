"""What Ray, gloo and OpenMP read from the environment; imported before `ray` by everything that imports it.

Only unset variables are set, so a user's own choice holds. A process that joins an existing cluster
(`RAY_ADDRESS` set) keeps the cluster's network settings.
"""

from __future__ import annotations

import os

ALWAYS = {
    "RAY_AUTH_MODE": "token",  # what a new local cluster does anyway; set for every process or they cannot talk
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",  # more threads are slower beside other workers, and change the bits of sums
    "RAY_DEDUP_LOGS": "0",
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
