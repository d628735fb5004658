# SPDX-License-Identifier: LGPL-3.0-or-later
"""A pipe among files, of which nobody should wait for the end."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def pipe(path: Path, text: str) -> None:
    """Make a pipe with this text in it, to which somebody may write for a second more."""
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    os.write(writer, text.encode())
    threading.Timer(1.0, os.close, [writer]).start()
