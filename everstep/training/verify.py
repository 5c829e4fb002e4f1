"""Verifying a stored run: every checksum, every link, then a replay of all that is kept, compared on the way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.core.errors import ChainError, StepNotKept
from everstep.storage import check, manifests
from everstep.storage.chain import Chain
from everstep.storage.check import Problem, Proved
from everstep.storage.events import decode
from everstep.storage.keys import DataKey, EventKey
from everstep.storage.listing import Listing
from everstep.storage.manifest import Manifest
from everstep.storage.store import Store
from everstep.training.blueprint import Blueprint
from everstep.training.drill import drill_restore
from everstep.training.holding import holding
from everstep.training.recipe import Recipe
from everstep.training.replay_check import Replayed, replay_all

TRIES = 5  # a run that is alive may name and drop objects while it is being looked at


@dataclass
class _Look:
    """A consistent look at a run."""

    chain: Chain
    listing: Listing
    used: set[DataKey]
    problems: list[Problem]
    proved: dict[DataKey, Proved] = field(default_factory=dict)

    @property
    def keys(self) -> set[DataKey]:
        """The objects to prove: all of the run's own, and those of other runs that it uses."""
        data = {key for key, _ in self.listing.objects if isinstance(key, DataKey)}
        return {key for key in data if not key.run or key in self.used}

    @property
    def checked(self) -> int:
        """How many objects that is, manifests and notes included."""
        return len(self.keys) + sum(not isinstance(key, DataKey) for key, _ in self.listing.objects)


def verify(
    store: Store, run: str, recipe: Callable[[Mapping[str, Any]], Recipe], *, drill: bool = False
) -> dict[str, Any]:
    """Prove a run as it is stored, and return what was found; `problems` is empty if all of it is whole.

    Args:
        store: where the run lives.
        run: its name.
        recipe: makes the recipe from the settings in the manifest.
        drill: restore the newest state as well, as a recovery would.

    Raises:
        UserError: there is no such run, or its model cannot be built here.
        StoreError: the store cannot be read.
    """
    for _ in range(TRIES):
        look = _look(store, run)
        if isinstance(look, dict):
            return look
        try:
            with holding(look.chain, look.used & look.keys):
                return _verify(look, recipe, drill)
        except StepNotKept as error:
            last = error
    raise last


def _look(store: Store, run: str) -> _Look | dict[str, Any]:
    """Return a look at a run, or, where no manifest can be read, what was found instead."""
    for _ in range(TRIES):
        top, problems = check.newest(store, run)
        if top is None and not store.list(f"{run}/") or top is not None and top.state == "deleted":
            Chain.open(store, run)  # says so
        if top is None:
            return {"run": run, "step": None, "digest": None, "equal": None, "problems": _rows(problems)}
        chain = Chain(store, run, top)
        look = _Look(chain, chain.listing(), set(), problems)
        if problems or manifests.is_highest(store, run, top.version):
            break
    look.used = check.used(look.chain.manifest, look.listing)
    return look


def _verify(look: _Look, recipe: Callable[[Mapping[str, Any]], Recipe], drill: bool) -> dict[str, Any]:
    chain, listing, manifest = look.chain, look.listing, look.chain.manifest
    look.proved, damaged = check.prove(chain, look.keys, look.used)
    problems = look.problems + damaged + check.notes(chain, listing)
    problems += check.named(manifest, listing, look.proved) + check.parents(chain.run, look.proved)
    problems += check.tails(manifest, listing, look.proved)
    gaps = _gaps(chain, listing)
    problems += check.holes(manifest, listing, gaps)
    broken = look.keys - set(look.proved)
    out: dict[str, Any] = {"run": chain.run, "state": manifest.state, "exactness": manifest.exactness}
    replayed, blueprint = Replayed(), None
    if manifest.shards:
        blueprint = Blueprint(recipe(manifest.settings))
        replayed = replay_all(chain, blueprint, listing, broken)
        problems += replayed.problems
    live, equal, problem = _closing(manifest, replayed, blueprint)
    problems += problem
    out |= {
        "step": replayed.step,
        "digest": replayed.digest,
        "live_digest": live,
        "equal": equal,
        "replayed_steps": replayed.steps,
        "replayed": replayed.ranges,
        "digests_compared": replayed.compared,
        "bases_compared": replayed.bases,
        "objects_checked": look.checked,
        "bytes_checked": sum(proved.size for proved in look.proved.values()),
        "manifests": len(listing.versions()),
        "highest_seen": replayed.highest,
        "gaps": gaps,
    }
    if drill and blueprint is not None:
        facts, found = drill_restore(chain, Blueprint(blueprint.recipe), replayed, live)
        out["drill"], problems = facts, problems + found
    return out | {"problems": _rows(problems)}


def _closing(
    manifest: Manifest, replayed: Replayed, blueprint: Blueprint | None
) -> tuple[str | None, bool | None, list[Problem]]:
    """Return the digest that a finished run ended with, whether the replay leads to it, and what speaks against it.

    None for what is not known: the run has not ended, or something is missing before its end (and was named).
    """
    if manifest.closing is None or blueprint is None:
        return None, None, []
    live, last = str(manifest.closing["digest"]), int(manifest.closing["last_lsn"])
    if replayed.step != last or replayed.digest is None:
        return live, None, []
    if replayed.digest == live or blueprint.exactness == "close":
        return live, replayed.digest == live, []
    what = f"replays to the state {replayed.digest[:12]}, the live one was {live[:12]}"
    hint = "if this is another processor or torch than the run's, verify it there"
    return live, False, [Problem(f"{manifest.run}/step {last}", what, hint)]


def _gaps(chain: Chain, listing: Listing) -> list[dict[str, Any]]:
    """Return the gaps that the run has declared, as far as they can be read."""
    found = []
    for key, _ in listing.objects:
        if isinstance(key, EventKey) and key.name.startswith("gap-"):
            where = f"{chain.run}/{key.path}"
            try:
                found.append(decode(bytes(chain.store.get(where)), name=key.name, where=where))
            except ChainError:
                continue  # named already
    return found


def _rows(problems: list[Problem]) -> list[dict[str, str]]:
    unique = dict.fromkeys(problems)
    return [{"object": p.object, "what": p.what, "hint": p.hint} for p in unique]


def as_error(run: str, found: Mapping[str, Any]) -> ChainError | None:
    """Return all that is wrong with a verified run as one error; None if nothing is."""
    problems = [Problem(**row) for row in found["problems"]]
    if not problems:
        return None
    hints = [p.hint for p in problems if p.hint and "chain verify" not in p.hint]
    hints.append(f"steps that can still be restored: everstep chain ls {run}")
    many = f"{len(problems)} problems" if len(problems) > 1 else "1 problem"
    lines = [f"run {run}: {many}", *(problem.line for problem in problems)]
    error = ChainError("\n  ".join(lines), hint="; ".join(dict.fromkeys(hints)))
    error.facts = dict(found)
    return error
