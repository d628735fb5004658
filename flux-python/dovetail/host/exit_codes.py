# SPDX-License-Identifier: LGPL-3.0-or-later
"""How every command of ours ends: errors become one line on standard error, and an exit code.

Input: the work, which returns 0 (done) or 1 (it failed). Output: that code, or 2 for bad input,
1 for work that failed on the way, 130 for an interrupt. Invariant: no traceback for what a user
did, and none because whoever read the output has gone.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Callable

from dovetail.core.errors import BadInput, WorkFailed


def open_streams() -> None:
    """Put /dev/null where a standard stream is closed, before another file gets its number.

    What the user's locale has no letters for, as for `…`, or for a name that is no text, is printed
    in escapes, on standard output as Python does it on standard error. Where all text is UTF-8,
    though, Python may be set to print such a name as it is, as in the locale POSIX.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (until the end)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        anything = codecs.lookup(sys.stdout.encoding).name == "utf-8"
        if sys.stdout.errors == "strict" or (
            sys.stdout.errors == "surrogateescape" and not anything
        ):
            sys.stdout.reconfigure(errors="backslashreplace")


def guarded(name: str, work: Callable[[], int]) -> int:
    """Do the work; errors become one line that begins with the name, and an exit code."""
    open_streams()
    try:
        code = work()
        sys.stdout.flush()
        return code
    except BadInput as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 2
    except WorkFailed as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1
    except ImportError as error:
        if (error.name or "dovetail").partition(".")[0] in ("dovetail", "usernetes_setup"):
            raise
        why = f"{sys.executable} needs the packages of flux-python/requirements.txt"
        print(f"{name}: {str(error).splitlines()[0]}: {why}", file=sys.stderr)
        return 2
    except OSError as error:
        # Mostly of standard output: its disk is full, or its reader has left, as in
        # `dovetail … | head`. Python would try again at exit, and complain.
        if not isinstance(error, BrokenPipeError):
            print(f"{name}: {error}", file=sys.stderr)
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
