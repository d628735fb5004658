# SPDX-License-Identifier: LGPL-3.0-or-later
"""Lines out of a stream of bytes that comes in pieces.

Inputs: blocks, as a pipe, a socket or a growing file gives them. Outputs: the lines that are
complete, without their ends. Invariant: whatever the blocks are, the lines are the same; what
has no end yet stays in `rest`.
"""

from __future__ import annotations


class LineSplitter:
    """Splits one stream."""

    def __init__(self) -> None:
        self.rest = b""

    def take(self, block: bytes) -> list[bytes]:
        """The lines that this block completes, oldest first."""
        *lines, self.rest = (self.rest + block).split(b"\n")
        return lines
