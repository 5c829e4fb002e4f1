"""Train while workers die, then replay the log from the store and compare: `make demo`."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from everstep.cli import ask
from everstep.core.clock import stamp
from everstep.core.errors import EverstepError
from everstep.core.ids import new_id

STORE = "file:./everstep-runs"


def show(*words: str) -> dict[str, Any]:
    """Print a command line, run it, and return its answer."""
    print(f"$ everstep {shlex.join(words)}", flush=True)
    return ask(*words)


def main() -> None:
    """Exit with 0 if the live and the replayed state have the same digest."""
    name = f"demo-{stamp()}-{new_id()[:4]}"
    try:
        live = show("train", "runs/demo.toml", "--set", f"run.name={name}")
        replayed = show("chain", "verify", name, "--store", STORE)
    except EverstepError as error:
        sys.exit(f"error: {error}")
    equal = live["digest"] == replayed["digest"]
    print(f"live state      {live['digest']}\nreplayed state  {replayed['digest']}")
    print("the digests are equal: every step is in the log, bit for bit" if equal else "the digests DIFFER")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
