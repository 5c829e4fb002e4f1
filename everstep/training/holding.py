"""Holding what a restore reads, so that a run that is alive does not collect it meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from everstep.core.errors import ChainError, StepNotKept, StoreError
from everstep.storage.chain import Chain
from everstep.storage.collect import held
from everstep.storage.keys import DataKey
from everstep.storage.plan import RestorePlan


@contextmanager
def holding(chain: Chain, keys: Iterable[DataKey]) -> Iterator[None]:
    """Hold objects of a run for as long as they are read.

    A store that takes no object now, or a run whose manifests are damaged, is read all the same: nothing can be
    collected from it either.

    Raises:
        StepNotKept: some of them were dropped meanwhile.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(held(chain, keys))
        except StepNotKept:
            raise
        except (StoreError, ChainError):
            pass
        yield


def planned(*plans: RestorePlan) -> set[DataKey]:
    """Return the objects that restore plans read."""
    bases: set[DataKey] = {part.base for plan in plans for part in plan.shards}
    return bases | {use.key for plan in plans for part in plan.shards for use in part.segments}
