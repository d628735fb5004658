# SPDX-License-Identifier: LGPL-3.0-or-later
"""The two ways a command ends badly, each with its exit code.

Raised anywhere, caught once, in `cli.main`. A message is one line: what is
wrong, where, and what would be right.
"""

from __future__ import annotations


class BadInput(Exception):
    """The user's input cannot be used; nothing was started. Exit code 2."""


class WorkFailed(Exception):
    """The input was fine and the work failed. Exit code 1."""
