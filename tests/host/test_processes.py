# SPDX-License-Identifier: LGPL-3.0-or-later
"""Processes with names that are no text, and handlers that the user's LD_PRELOAD may bring."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from dovetail.host import processes
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


def test_a_process_may_have_a_name_that_the_kernel_cuts_within_a_letter(tmp_path):
    program = shutil.copy("/bin/cat", tmp_path / "simulation-grXöße")  # of 15 bytes, half an ö
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()  # it runs
        assert os.fsencode(processes.name(process.pid)) == b"simulation-grX\xc3"
        assert processes.peak_memory([process.pid]) > 0
        process.stdin.close()
