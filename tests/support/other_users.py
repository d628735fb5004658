# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whether tests can be another user here: root is needed, and a checkout that others can read."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TOP = Path(__file__).resolve().parents[2]


def _why_not() -> str:
    if os.getuid() != 0:
        return "needs root to become somebody else"
    words = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-c"]
    words.append(f"import dovetail, os; os.listdir({str(TOP / 'tests')!r})")
    if subprocess.run(words, capture_output=True, check=False).returncode:
        return "other users cannot read this checkout or its Python"
    return ""


WHY_NOT = _why_not()
needs_nobody = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "-")


def let_in(folder: Path) -> None:
    """Have other users find the way to a folder of a test's."""
    for path in [folder, *folder.parents]:
        if path.owner() == "root" and path != Path("/") and path != Path("/tmp"):
            path.chmod(0o755)
