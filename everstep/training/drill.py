"""The drill: the newest state restored into memory as a recovery would, timed and compared."""

from __future__ import annotations

import threading
from typing import Any

from everstep.core import clock
from everstep.core.errors import ChainError, StateMismatch
from everstep.storage.chain import Chain
from everstep.storage.check import Problem
from everstep.storage.keys import DataKey, inside
from everstep.storage.objects import StoredObject
from everstep.training.blueprint import Blueprint
from everstep.training.replay_check import Replayed
from everstep.training.restore import restore
from everstep.training.shard_state import digest_of


class _Timed(Chain):
    """A chain that measures for how long at least one object was being read; `seconds`."""

    def __init__(self, chain: Chain) -> None:
        super().__init__(chain.store, chain.run, chain.manifest)
        self.seconds = 0.0
        self._reading, self._began, self._counter = 0, 0.0, threading.Lock()

    def read(self, key: DataKey) -> StoredObject:
        """Fetch and verify an object; see `Chain.read`."""
        with self._counter:
            self._began = self._began if self._reading else clock.monotonic()
            self._reading += 1
        try:
            return super().read(key)
        finally:
            with self._counter:
                self._reading -= 1
                if not self._reading:
                    self.seconds += clock.monotonic() - self._began


def drill_restore(
    chain: Chain, blueprint: Blueprint, replayed: Replayed, live: str | None
) -> tuple[dict[str, Any], list[Problem]]:
    """Restore the newest state and return how that went, and what is wrong.

    `load_seconds` is the time during which something was being read, `replay_seconds` the rest.

    Args:
        chain: the run.
        blueprint: what to build its state with.
        replayed: what the replay of everything came to.
        live: the digest that a finished run ended with.
    """
    timed, began = _Timed(chain), clock.monotonic()
    try:
        states, plan, damage = restore(timed, blueprint)
    except (ChainError, StateMismatch) as error:
        failed = Problem(f"{chain.run}/newest state", f"cannot be restored: {error.message}", error.hint)
        return {"step": None, "digest": None, "equal": False}, [failed]
    seconds = clock.monotonic() - began
    digest = digest_of(states.values())
    other = live if chain.manifest.closing and plan.target == int(chain.manifest.closing["last_lsn"]) else None
    expected = other or (replayed.digest if replayed.step == plan.target else None)
    exact = blueprint.exactness != "close"
    facts = {
        "step": plan.target,
        "digest": digest,
        "compared_with": "the digest the run ended with" if other else "the replay of everything" if expected else None,
        "equal": None if expected is None else digest == expected,
        "last_logged_digest": replayed.logged or None,
        "seconds": seconds,
        "load_seconds": timed.seconds,
        "replay_seconds": max(0.0, seconds - timed.seconds),
        "replayed_steps": max((plan.target - part.base.lsn for part in plan.shards), default=0),
        "damaged_objects_left_out": sorted(inside(chain.run, key) for key in damage),
    }
    if expected is not None and digest != expected and exact:
        what = f"restores to {digest[:12]}, expected {expected[:12]}"
        return facts, [Problem(f"{chain.run}/step {plan.target}", what, "verify it on the machine that trained")]
    return facts, []
