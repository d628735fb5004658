# SPDX-License-Identifier: LGPL-3.0-or-later
"""Processes with odd names or without a main thread; handlers that an LD_PRELOAD may bring."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dovetail.host import processes
from support import known_programs, local_runs
from support.local_runs import wait_for

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


def test_a_process_whose_main_thread_has_ended_lives_until_the_last_one_has():
    environment = known_programs.environment(WHOSE="a test's own")
    words = [sys.executable, "-c", local_runs.WITHOUT_MAIN_THREAD]
    with subprocess.Popen(words, env=environment) as process:
        try:
            wait_for(lambda: b") Z " in Path(f"/proc/{process.pid}/stat").read_bytes())
            ticks = processes.start_ticks(process.pid)
            assert processes.alive(process.pid, ticks)
            assert processes.members("WHOSE=a test's own") == {process.pid: ticks}
            assert not processes.end_all(lambda: processes.members("WHOSE=a test's own"))
            # Nobody has collected it yet.
            assert Path(f"/proc/{process.pid}/stat").exists()
            assert not processes.start_ticks(process.pid)
        finally:
            process.kill()
