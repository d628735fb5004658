# SPDX-License-Identifier: LGPL-3.0-or-later
"""Tells how far something is that takes more than a few seconds.

Inputs: what is done, and how many of how many bytes of it. Outputs: a line after `FIRST` seconds,
and then every `EVERY`. Invariants: what is quicker says nothing; nothing is said once it is over.
"""

from __future__ import annotations

import threading
import time
from typing import IO, Callable

FIRST = 3.0
"""Seconds after which the first line is said."""
EVERY = 5.0
"""Seconds between two lines."""


class Progress:
    """Use as a context manager around the work; `say` is called in another thread.

    `what` is done now, since `began`; `done` bytes are of `total`, 0 if that is not known.
    """

    def __init__(self, say: Callable[[str], None], what: str, total: int = 0) -> None:
        self.say = say
        self.turn(what, total)
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell, name="progress", daemon=True)

    def turn(self, what: str, total: int = 0) -> None:
        """Something else is done from now on."""
        self.what, self.total, self.done, self.began = what, total, 0, time.monotonic()

    def reading(self, file: IO[bytes]) -> Counted:
        """The file, of which every byte that is read counts as done."""
        return Counted(file, self)

    @property
    def line(self) -> str:
        """How far it is."""
        took, done, total = time.monotonic() - self.began, self.done, self.total
        if not 0 < done < total:
            return f"{self.what}, {took:.0f} s so far"
        far = f"{done / 1e6:,.0f} of {total / 1e6:,.0f} MB"
        return f"{self.what}: {far}, about {took * (total - done) / done:.0f} s more"

    def _tell(self) -> None:
        wait = FIRST
        while not self._over.wait(wait):
            self.say(self.line)
            wait = EVERY

    def __enter__(self) -> Progress:
        self._teller.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._teller.join()


class Counted:
    """A file that is read, and counts that."""

    def __init__(self, file: IO[bytes], progress: Progress) -> None:
        self.file, self.progress = file, progress

    def read(self, size: int = -1) -> bytes:
        """As of any file."""
        data = self.file.read(size)
        self.progress.done += len(data)
        return data
