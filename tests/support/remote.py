# SPDX-License-Identifier: LGPL-3.0-or-later
"""What tests ask of a computer that is not the one they run on: a machine, or a host.

Input: a subclass's way to have a shell there. Output: what scripts print; files made there.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

Done = subprocess.CompletedProcess[str]


class Remote:
    """One computer. `limit` is how long anything may take there, seconds."""

    name = ""
    address = ""
    limit = 120.0

    def line(self, script: str, user: str) -> list[str]:
        """The words that run a shell script there, as a user."""
        raise NotImplementedError

    def run(
        self, script: str, user: str = "alice", code: int | None = 0, limit: float = 0.0,
        text: str = "",
    ) -> Done:  # fmt: skip
        """What became of a shell script there that reads `text`; it must end with `code`."""
        line = self.line(script, user)
        done = subprocess.run(
            line, capture_output=True, text=True, timeout=limit or self.limit, input=text
        )
        assert code in (done.returncode, None), (script, done.returncode, done.stdout, done.stderr)
        return done

    def out(self, script: str, user: str = "alice", limit: float = 0.0) -> str:
        """What a script prints that succeeds."""
        return self.run(script, user, limit=limit).stdout.strip()

    def until(
        self, script: str, wanted: Callable[[str], object], limit: float = 0.0, user: str = "alice"
    ) -> str:
        """What a script prints, once that is as wanted."""
        deadline = time.monotonic() + (limit or self.limit)
        while True:
            asked = time.monotonic()
            text = self.run(script, user, code=None).stdout.strip()
            if wanted(text):
                return text
            assert time.monotonic() < deadline, (self.name, script, text)
            # Asking takes CPU time from what is waited for.
            time.sleep(max(0.1, 4 * (time.monotonic() - asked)))

    def write(self, path: str, text: str, user: str = "alice") -> None:
        """Make a file there."""
        self.run(f"mkdir -p $(dirname {path}) && cat >{path}", user, text=text)
