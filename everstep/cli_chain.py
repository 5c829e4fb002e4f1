"""The commands `everstep chain ...`: look at the log of a run, prove it, clear it up, take a state out of it."""

from __future__ import annotations

from typing import Any

import click

from everstep import console
from everstep.cli_shared import (
    json_option,
    located,
    open_run,
    recipe_from,
    recipe_of,
    run_argument,
    settings_of,
    shown,
    store_at,
)
from everstep.core.errors import UserError


@click.group()
def chain() -> None:
    """Look at a run's log, prove it, clear it up."""


@chain.command()
@run_argument
@json_option
def ls(run: str, store: str, as_json: bool) -> dict[str, Any]:
    """Show what the log of RUN holds."""
    from everstep.training import inspect

    facts = inspect.describe(open_run(*located(run, store)))
    if not as_json:
        console.log(facts)
    return facts


@chain.command()
@run_argument
@click.option("--drill", is_flag=True, help="Restore the newest state as well, as a recovery would, and time it.")
@json_option
def verify(run: str, store: str, drill: bool, as_json: bool) -> dict[str, Any]:
    """Prove every checksum, then replay all of it.

    Lists everything that is wrong, and ends with exit code 1 if anything is.
    """
    from everstep.training import verify as verifying

    url, name = located(run, store)
    found = verifying.verify(store_at(url), name, recipe_from, drill=drill)
    if not as_json:
        console.verified(found)
    if error := verifying.as_error(name, found):
        raise error
    return found


@chain.command()
@run_argument
@click.option("--dry-run", is_flag=True, help="Only say what would go.")
@json_option
def gc(run: str, store: str, dry_run: bool, as_json: bool) -> dict[str, Any]:
    """Delete what need not be kept any more.

    That is said by the run's [checkpoint] keep_rounds, keep_every, keep_hours and gc_age_s.
    """
    from everstep.actors.bookkeeping import retention_of
    from everstep.storage.collect import collect, collect_all

    url, name = located(run, store)
    log = open_run(url, name)
    keep = retention_of(settings_of(log, url))
    done = collect(log, keep, dry_run=True) if dry_run else collect_all(log, keep)
    groups: dict[str, dict[str, Any]] = {}
    for item in done.plan.drop:
        group = groups.setdefault(item.reason, {"reason": item.reason, "objects": 0, "bytes": 0})
        group["objects"] += 1
        group["bytes"] += item.size
    facts = {
        "run": name,
        "dry_run": dry_run,
        "would_delete" if dry_run else "deleted": done.deleted,
        "bytes": done.bytes,
        "temporary_files_swept": done.swept,
        "more_waiting": done.plan.more,
        "why": list(done.plan.reasons),
        "goes": sorted(groups.values(), key=lambda group: -group["bytes"]),
        "spared": [{"because": why, "objects": count} for why, count in done.plan.spared.items()],
    }
    return shown(facts, f"{'what would be collected' if dry_run else 'collected'} of {name}", as_json)


@chain.command()
@run_argument
@click.option("--step", "steps", type=click.IntRange(0), multiple=True, help="A step to compare; give it twice.")
@json_option
def diff(run: str, store: str, steps: tuple[int, ...], as_json: bool) -> dict[str, Any]:
    """Show what changed between two steps."""
    if len(steps) != 2:
        raise UserError(f"--step: expected two steps, got {len(steps)}", hint="as in --step 100 --step 200")
    from everstep.training.diff import diff as compare

    log = open_run(*located(run, store))
    facts = compare(log, recipe_of(log), *steps)
    return shown(facts, f"{log.run}: step {steps[1]} against step {steps[0]}", as_json)


@chain.command()
@run_argument
@click.option("--step", default=None, metavar="N|best", help="The step to restore; without it the last durable one.")
@click.option("--out", default=".", show_default=True, type=click.Path(file_okay=False), help="Folder for the files.")
@json_option
def export(run: str, store: str, step: str | None, out: str, as_json: bool) -> dict[str, Any]:
    """Write the state at one step to files.

    Two of them: the weights as safetensors, and model and optimizer as a torch state_dict.
    """
    if step not in (None, "best") and not (step.isdecimal() and int(step) > 0):
        raise UserError(f"--step: expected a number from 1 on or 'best', got {step!r}", hint="as in --step 77")
    wanted = int(step) if step and step != "best" else step
    from everstep.training import inspect

    log = open_run(*located(run, store))
    return shown(inspect.export(log, recipe_of(log), wanted, out), f"export of {run}", as_json)
