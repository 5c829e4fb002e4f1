"""Writing things down while the store may be away: in order, from a thread of its own, for as long as it takes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from everstep.core import clock
from everstep.core.errors import EverstepError, StoreError
from everstep.storage.chain import Chain

RETRY_S = 0.5


class Notebook:
    """Keeps what is to be stored until the store has taken it, so that nobody else waits for a store.

    Args:
        chain: returns the run's log as it is now.
    """

    def __init__(self, chain: Callable[[], Chain]) -> None:
        self.chain = chain
        self.failure: EverstepError | None = None  # what no waiting mends, such as being fenced
        self._jobs: deque[Callable[[Chain], Any]] = deque()
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="notebook", daemon=True).start()

    def event(self, name: str, body: Mapping[str, Any]) -> None:
        """Store that something happened; the body is taken as it is now."""
        copy = dict(body)
        self.do(lambda chain: chain.add_event(name, copy))

    def do(self, job: Callable[[Chain], Any]) -> None:
        """Have something done with the log that may be done twice without harm."""
        with self._changed:
            self._jobs.append(job)
            self._changed.notify_all()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all is written; return whether it is.

        Raises:
            EverstepError: what kept it from being written and will not pass.
        """
        with self._changed:
            done = self._changed.wait_for(lambda: not self._jobs or self.failure is not None, timeout_s)
        if self.failure is not None:
            raise self.failure
        return done

    def _run(self) -> None:
        while self.failure is None:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._jobs))
                job = self._jobs[0]
            try:
                job(self.chain())
            except StoreError:
                clock.sleep(RETRY_S)
                continue
            except EverstepError as error:
                self.failure = error
            with self._changed:
                self._jobs.popleft()
                self._changed.notify_all()
