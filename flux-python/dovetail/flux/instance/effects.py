# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the state of an instance wants done: values, carried out by the module.

A `Key` stands for one request that waits for its answer; the module knows which.
"""

from __future__ import annotations

import errno
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, Union

Key = Hashable
NOENT, FAILED, INVALID, TIMEOUT = errno.ENOENT, errno.EIO, errno.EINVAL, errno.ETIMEDOUT


@dataclass(frozen=True)
class Submit:
    """Submit the job of a slice."""

    number: int


@dataclass(frozen=True)
class Watch:
    """Follow the job of a slice, from its beginning."""

    number: int
    job: int


@dataclass(frozen=True)
class Sweep:
    """Remove what a slice left on its broker's machine, since its agent could not."""

    number: int
    rank: int


@dataclass(frozen=True)
class Cancel:
    """Cancel the job of a slice."""

    job: int
    why: str


@dataclass(frozen=True)
class Answer:
    """Answer a request; one that streams gets more."""

    key: Key
    value: Mapping[str, Any]


@dataclass(frozen=True)
class Refuse:
    """Answer a request with an error."""

    key: Key
    code: int
    why: str


@dataclass(frozen=True)
class Log:
    """Tell the instance's log."""

    line: str


Effect = Union[Submit, Watch, Sweep, Cancel, Answer, Refuse, Log]
