# SPDX-License-Identifier: LGPL-3.0-or-later
"""Work that waits for the network, done by threads, its results taken in by one.

Inputs: a piece of work and what to do with its outcome. Invariant: the second part runs in the
thread that calls `take`, one after the other, so that it needs no locks.
"""

from __future__ import annotations

import contextlib
import os
import queue
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Callable, TypeVar, Union

T = TypeVar("T")
Outcome = Union[T, Exception]


class Calls:
    """A pool of threads, and a queue back from them that can be polled."""

    def __init__(self, workers: int) -> None:
        self._pool = ThreadPoolExecutor(workers, "api")
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._bell

    def submit(self, work: Callable[[], T], then: Callable[[Outcome[T]], None]) -> None:
        """Have `work` done by a thread, and `then` called with what it returned or raised."""

        def ended(future: Future[T]) -> None:
            error = future.exception()
            if error is not None and not isinstance(error, Exception):
                raise error
            self.put(lambda: then(future.result() if error is None else error))

        with contextlib.suppress(RuntimeError):  # closed: nobody waits for it any more
            self._pool.submit(work).add_done_callback(ended)

    def put(self, news: Callable[[], None]) -> None:
        """Have `news` called by `take`; from any thread."""
        self._done.put(news)
        with contextlib.suppress(BlockingIOError, OSError):
            os.write(self._ring, b"!")

    def take(self) -> None:
        """Call everything that is due."""
        with contextlib.suppress(BlockingIOError):
            os.read(self._bell, 1 << 16)
        for _ in range(self._done.qsize()):
            self._done.get()()

    def close(self) -> None:
        """Take no more work; what is under way ends by itself."""
        self._pool.shutdown(wait=False)
