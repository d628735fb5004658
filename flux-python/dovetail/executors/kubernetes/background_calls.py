# SPDX-License-Identifier: LGPL-3.0-or-later
"""Work that waits for the network, done by threads, its results taken in by one.

Inputs: a piece of work and what to do with its outcome. Invariant: the second part runs in the
thread that calls `take`, one after the other, so that it needs no locks.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
from typing import Callable, TypeVar, Union

T = TypeVar("T")
Outcome = Union[T, Exception]


class Calls:
    """Threads, and a queue back from them that can be polled.

    No exit of the program waits for what they do: a server may take long to say nothing.
    """

    def __init__(self, workers: int) -> None:
        self._asked: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._workers = workers
        for _ in range(workers):
            threading.Thread(target=self._work, name="api", daemon=True).start()
        self._done: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._bell, self._ring = os.pipe()
        os.set_blocking(self._bell, False)
        os.set_blocking(self._ring, False)

    def fileno(self) -> int:
        """Readable when there is something to take."""
        return self._bell

    def submit(self, work: Callable[[], T], then: Callable[[Outcome[T]], None]) -> None:
        """Have `work` done by a thread, and `then` called with what it returned or raised."""

        def both() -> None:
            found: Outcome[T]
            try:
                found = work()
            except Exception as error:
                found = error
            self.put(lambda: then(found))

        self._asked.put(both)

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            asked()

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
        for _ in range(self._workers):
            self._asked.put(None)


def within(work: Callable[[], object], enough: Callable[[], bool]) -> bool:
    """Do what waits for the network in a thread, until it is over or there was `enough` of it.

    Returns whether it is over; what it raised is raised here.
    """
    raised: list[BaseException] = []

    def watched() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=watched, name="end", daemon=True)
    thread.start()
    while thread.is_alive() and not enough():
        thread.join(0.1)
    if raised:
        raise raised[0]
    return not thread.is_alive()
