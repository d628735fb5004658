# SPDX-License-Identifier: LGPL-3.0-or-later
"""Signal handlers that Python did not install, as the user's LD_PRELOAD may bring them."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support import known_programs

pytestmark = pytest.mark.unit

HANDLED = {
    "profile": "from dovetail.mpi.profiled_run import _execute\n"
    "assert _execute(['true'], os.environ, quiet=True) == (0, False)",
    "run": "from dovetail.run.loop import Signals\nwith Signals():\n    pass",
}


@pytest.mark.parametrize("command", HANDLED)
def test_a_command_outlives_handlers_that_python_cannot_put_back(command):
    script = (
        "import os, signal\n"
        "assert signal.getsignal(signal.SIGTERM) is None, 'no handler of C'\n"
        f"{HANDLED[command]}\n"
        "print(signal.getsignal(signal.SIGTERM).name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
        "signal.pause()"
    )
    environment = known_programs.environment(LD_PRELOAD=known_programs.preload_with_handlers())
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (-15, "SIG_DFL\n"), done.stderr
