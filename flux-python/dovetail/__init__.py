# SPDX-License-Identifier: LGPL-3.0-or-later
"""Dovetail: packs MPI simulations into the CPU time that their ranks leave idle.

What the commands do is here as functions, see `dovetail.api` and dovetail-python(7). They are
imported when they are first asked for, since what runs on nodes has the standard library alone.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from dovetail.api import *  # noqa: F403

__version__ = "0.1.0"
_API = (
    "BadInput",
    "Model",
    "Profile",
    "RunOutcome",
    "WorkFailed",
    "predict",
    "profile_command",
    "requests",
    "run_plan",
)


def __getattr__(name: str) -> object:
    if name not in _API:
        raise AttributeError(f"module 'dovetail' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("dovetail.api"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
