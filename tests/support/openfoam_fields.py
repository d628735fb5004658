# SPDX-License-Identifier: LGPL-3.0-or-later
"""What OpenFOAM has written, as numbers, so that results on unlike ranks can be compared."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np


def last_field(case: Path, name: str) -> np.ndarray:
    """The values of a field in the last time that was written; its components one by one."""
    times = [path for path in case.iterdir() if path.name.isdecimal()]
    text = (max(times, key=lambda path: int(path.name)) / name).read_text()
    body = re.search(r"internalField\s+nonuniform[^(]*\((.*?)\n\)\s*;", text, re.DOTALL)[1]
    return np.array(re.sub("[()]", " ", body).split(), float)


def off(found: np.ndarray, wanted: np.ndarray) -> float:
    """How far apart they are, as a part of what is wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
