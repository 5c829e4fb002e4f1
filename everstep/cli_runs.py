"""The commands `everstep runs ...`: the runs of a store."""

from __future__ import annotations

from typing import Any

import click

from everstep import console
from everstep.cli_shared import json_option, located, run_argument, store_at, store_option, store_url
from everstep.core import clock
from everstep.core.errors import UserError

FENCED_S = 60.0  # after which a writer that was fenced has found out


@click.group()
def runs() -> None:
    """List the runs of a store, or delete one."""


@runs.command()
@click.argument("where", metavar="[STORE]", required=False)
@store_option
@json_option
def ls(where: str | None, store: str, as_json: bool) -> dict[str, Any]:
    """List the runs in STORE, damaged ones too."""
    from everstep.storage.runs import list_runs

    url = store_url(where or store)
    found = list_runs(store_at(url))
    if not as_json:
        console.runs(found, url)
    return {"store": url, "runs": found}


@runs.command()
@run_argument
@click.option(
    "--force", is_flag=True, help="Delete a run that has not ended, too; whatever still writes it is stopped."
)
@json_option
def rm(run: str, store: str, force: bool, as_json: bool) -> dict[str, Any]:
    """Delete RUN, all but what forks of it use."""
    from everstep.storage.chain import Chain
    from everstep.storage.collect import delete_run
    from everstep.storage.runs import forks_of

    url, name = located(run, store)
    log = Chain.open(store_at(url), name, deleted_too=True)
    state, told = log.manifest.state, clock.wall() - log.manifest.created > FENCED_S
    ended = state in ("closed", "stopped") or (state == "deleted" and told) or log.manifest.never_begun
    if not ended and state != "deleted" and not force:
        raise UserError(
            f"run {name} has neither ended nor been stopped (state {state!r}, generation {log.manifest.generation}): "
            "it is running, or everything that ran it is gone",
            hint=f"stop it, or if it runs no more: everstep runs rm {name} --store {url} --force",
        )
    done = delete_run(log, ended=ended)
    forks = forks_of(log)
    facts = {
        "run": name,
        "store": url,
        "deleted_objects": done.deleted,
        "bytes": done.bytes,
        "gone": not Chain.exists(log.store, name),
        "stays_for_forks": forks,
    }
    if not as_json:
        console.table(facts, f"deleted {name}")
        if forks:
            names = ", ".join(str(fork["run"]) for fork in forks)
            console.note(
                f"what is used by {names} stays; to remove it, delete the forks, and after a minute: "
                f"everstep runs rm {name} --store {url}"
            )
        elif not ended:
            console.note(
                f"whatever still writes it is stopped; a minute from now: everstep runs rm {name} --store {url}"
            )
    return facts
