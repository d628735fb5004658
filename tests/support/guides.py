# SPDX-License-Identifier: LGPL-3.0-or-later
"""The commands of a guide, as a reader would type them, and the files that it shows."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Command:
    """One line to type: where it stands, whose prompt it has (`$`, `#`, `n1$`), and the line."""

    section: str
    prompt: str
    line: str


def commands(page: str) -> list[Command]:
    """Every command of a manual page, in order."""
    section, found = "", []
    for line in (TOP / "doc" / page).read_text().splitlines():
        if heading := re.match(r"\.S[hs] (.*)", line):
            section = heading[1]
        elif typed := re.match(r"(?:\.Dl )?([a-z0-9]*[$#]) (.+)", line):
            found.append(Command(section, typed[1], typed[2].replace(r"\-", "-")))
    return found


def blocks(page: str, wanted: str) -> list[str]:
    """The files that a section of a manual page shows as they are."""
    text = (TOP / "doc" / page).read_text()
    section = re.split(rf"^\.S[hs] {wanted}\n", text, flags=re.MULTILINE)[1]
    section = re.split(r"^\.S[hs] ", section, flags=re.MULTILINE)[0]
    return re.findall(r"^\.Bd -literal.*?\n(.*?)^\.Ed", section, re.MULTILINE | re.DOTALL)
