# SPDX-License-Identifier: LGPL-3.0-or-later
"""One finding of the preflight, and where its checks look.

Levels: `ok`; `note`, good to know; `warning`, runs but worse; `error`, cannot run. A warning and
an error come with the command that fixes it and who must type it: `user` or `admin`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PROC, SYS, DEV, ETC = Path("/proc"), Path("/sys"), Path("/dev"), Path("/etc")
RUN, VAR = Path("/run"), Path("/var")


@dataclass(frozen=True)
class Check:
    """One finding."""

    name: str
    level: str
    found: str
    fix: str = ""
    who: str = ""


def read(path: Path, missing: str = "") -> str:
    """A file of the kernel's, without its line end."""
    try:
        return path.read_text(errors="replace").strip()  # a mount may have any name
    except OSError:
        return missing
