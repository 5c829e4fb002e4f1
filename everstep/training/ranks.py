"""The processes of a loop of one's own: alone, or the ranks of the default process group."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from everstep.core.errors import EverstepError, Failure, SettingsError

T = TypeVar("T")


@dataclass(frozen=True)
class Ranks:
    """This process among those of its program."""

    world_rank: int
    world_size: int

    @classmethod
    def now(cls) -> Ranks:
        """Return what the default process group says.

        Raises:
            SettingsError: there are several processes, and no group yet.
        """
        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        started = int(os.environ.get("WORLD_SIZE") or 1)
        if started > 1:
            raise SettingsError(
                f"this is one of {started} processes (WORLD_SIZE), but there is no default process group",
                hint="call torch.distributed.init_process_group() before everstep.attach()",
            )
        return cls(0, 1)

    def decide(self, job: Callable[[], T]) -> T:
        """Have world rank 0 do a job; return its answer on every rank, or raise there what it raised."""
        if self.world_size == 1:
            return job()
        answer: list[Any] = [None, None]
        if self.world_rank == 0:
            try:
                answer = [job(), None]
            except EverstepError as error:
                answer = [None, error]
            except Exception as error:  # the others would wait for ever
                answer = [None, Failure(f"{type(error).__name__}: {error}", hint="see world rank 0's output")]
                dist.broadcast_object_list(answer, 0)
                raise
        dist.broadcast_object_list(answer, 0)
        if answer[1] is not None:
            raise answer[1]
        return answer[0]  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Return every rank's value, by rank, on world rank 0; elsewhere only the own."""
        if self.world_size == 1:
            return [value]
        values: list[Any] | None = [None] * self.world_size if self.world_rank == 0 else None
        dist.gather_object(value, values, 0)
        return [value] if values is None else values

    def wait(self) -> None:
        """Return when all ranks have come here."""
        if self.world_size > 1 and dist.is_initialized():
            dist.barrier()
