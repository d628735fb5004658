# SPDX-License-Identifier: LGPL-3.0-or-later
"""The wait policy of the preloaded library, under each MPI, in each mode.

In: pmpi/.libs, wait_program.c here and pmpi/known/busy.c. No wall time is asserted; CPU times are
compared with each other, and far apart.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from dovetail.core.protocol import WaitPolicy
from dovetail.mpi import page
from dovetail.mpi.control_page import Control
from support import known_programs

pytestmark = pytest.mark.mpi

MODES = ("off", "yield", "doorbell")
PROGRAM = "../tests/pmpi/wait_program.c"
ENDLESS = 10_000_000  # iterations of a program that the test ends itself


def end(process: subprocess.Popen[str]) -> None:
    """End a program that goes on for ever, and everything that mpirun started."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=known_programs.LIMIT)
    finally:
        process.kill()


class Rates:
    """CPU milliseconds per iteration of each rank, looked at until something holds."""

    def __init__(self, directory: Path, ranks: int) -> None:
        self.directory, self.ranks = directory, ranks

    def marks(self) -> list[tuple[int, float]]:
        pages = page.read_pages(self.directory)
        return [(one.iterations, one.iter_cpu_s) for one in pages]

    def await_light(self, process: subprocess.Popen[str], low: float, high: float) -> None:
        """Return once rank 0 took between `low` and `high` ms per iteration over 20 of them."""
        before = self.marks()
        seen = []
        for _ in range(known_programs.LIMIT * 10):
            assert process.poll() is None, process.communicate()
            select.select([], [], [], 0.1)
            now = self.marks()
            if len(before) < self.ranks or len(now) < self.ranks:
                before = now
                continue
            iterations = now[0][0] - before[0][0]
            if iterations < 20:
                continue
            seen.append(1000 * (now[0][1] - before[0][1]) / iterations)
            if low <= seen[-1] <= high:
                return
            before = now
        pytest.fail(f"never between {low} and {high} ms per iteration: {seen[-20:]}")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mpi", known_programs.MPIS)
@pytest.mark.parametrize(
    ("what", "ranks"), [("mix", 2), ("mix", 1), ("mix", 4), ("threads", 2), ("fork", 2)]
)
def test_the_result_is_the_same_in_each_mode(
    mpi: str, mode: str, what: str, ranks: int, tmp_path: Path
) -> None:
    words = [known_programs.build(mpi, PROGRAM), what, "16"]
    Control.create(tmp_path, WaitPolicy(mode)).close()
    run = known_programs.run(mpi, ranks, words, tmp_path)
    assert (run.code, run.output) == (0, known_programs.plain(mpi, ranks, words)), run.errors
    assert (tmp_path / "bells").stat().st_mode & 0o777 == 0o600


@pytest.mark.alone
@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_a_light_rank_takes_less_cpu_on_the_doorbell(mpi: str, tmp_path: Path) -> None:
    words = [known_programs.build(mpi, "known/busy.c"), "burn", "150", "1", "12"]
    cpu = {}
    for mode in ("off", "doorbell"):
        directory = tmp_path / mode
        directory.mkdir()
        Control.create(directory, WaitPolicy(mode)).close()
        run = known_programs.run(mpi, 2, words, directory)
        assert run.code == 0, run.errors
        cpu[mode] = run.pages[0].cpu_s
    assert cpu["doorbell"] < 0.6 * cpu["off"], cpu


@pytest.mark.alone
@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_a_change_of_mode_is_seen_while_the_ranks_run(mpi: str, tmp_path: Path) -> None:
    # The light rank needs 1 ms of CPU and waits for at least 11 ms, in every iteration.
    control = Control.create(tmp_path, WaitPolicy("off"))
    words = [known_programs.build(mpi, "known/busy.c"), "burn", str(ENDLESS), "1", "12"]
    process = known_programs.start(mpi, 2, words, tmp_path)
    rates = Rates(tmp_path, 2)
    try:
        rates.await_light(process, 5, 1000)
        control.set(WaitPolicy("doorbell"))
        rates.await_light(process, 0, 4)
        control.set(WaitPolicy("off"))
        rates.await_light(process, 5, 1000)
    finally:
        end(process)


@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_a_job_ends_when_a_rank_is_killed_while_its_peer_sleeps(mpi: str, tmp_path: Path) -> None:
    Control.create(tmp_path, WaitPolicy("doorbell", 0)).close()
    words = [known_programs.build(mpi, "known/busy.c"), "sleep", "2", "1", "1000000"]
    process = known_programs.start(mpi, 2, words, tmp_path)
    try:
        for _ in range(known_programs.LIMIT * 10):
            pages = page.read_pages(tmp_path) if process.poll() is None else []
            if len(pages) == 2 and pages[0].state == "in_mpi":
                break
            select.select([], [], [], 0.1)
        os.kill(pages[1].pid, signal.SIGKILL)
        process.communicate(timeout=known_programs.LIMIT)
        assert process.returncode != 0
    finally:
        process.kill()


def counted(mpi: str, what: str, policy: WaitPolicy, directory: Path) -> int:
    """What rank 0 of pmpi/known/waits.c counted: for most, how often it slept."""
    Control.create(directory, policy).close()
    words = [known_programs.build(mpi, "known/waits.c"), what]
    run = known_programs.run(mpi, 2, words, directory)
    assert run.code == 0, run.errors
    if run.output.strip() == "unsupported":
        pytest.skip(f"{mpi} has no MPI_THREAD_MULTIPLE here")
    return int(run.output)


@pytest.mark.alone
@pytest.mark.parametrize(("mpi", "sleeps"), [("openmpi", True), ("mpich", False)])
def test_a_thread_sleeps_only_where_the_mpi_holds_no_lock(
    mpi: str, sleeps: bool, tmp_path: Path
) -> None:
    # It waits for 300 ms, and each sleep is of 10 ms at most. MPICH holds its lock meanwhile.
    found = counted(mpi, "beside", WaitPolicy("doorbell"), tmp_path)
    assert found >= 20 if sleeps else found == 0


@pytest.mark.parametrize("mode", ["yield", "doorbell"])
@pytest.mark.parametrize(("mpi", "gives"), [("openmpi", True), ("mpich", False)])
def test_a_thread_with_the_lock_gives_way_in_long_waits_only(
    mpi: str, gives: bool, mode: str, tmp_path: Path
) -> None:
    # No wait is as long as these turns. MPICH holds its lock in each of them.
    found = counted(mpi, "turns", WaitPolicy(mode, 2**31 - 1), tmp_path)
    assert (found > 0) == gives


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_calls_that_do_not_wait_do_not_give_way(mpi: str, mode: str, tmp_path: Path) -> None:
    assert counted(mpi, "polls", WaitPolicy(mode), tmp_path) == 0


def test_a_start_that_finds_no_room_for_long_sleeps(tmp_path: Path) -> None:
    # Open MPI carries out MPI_Fetch_and_op in the other rank, which comes back to MPI late.
    assert counted("openmpi", "starts", WaitPolicy("doorbell"), tmp_path) > 0


@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_a_wait_begins_anew_whenever_something_moved(mpi: str, tmp_path: Path) -> None:
    # It sleeps before the first of 1000 messages. Between two of them it cannot look in vain as
    # often as it does before a sleep.
    assert 0 < counted(mpi, "trickle", WaitPolicy("doorbell", 5000), tmp_path) < 200


@pytest.mark.parametrize("what", ["accepts", "tests"])
@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_a_call_that_answers_a_sender_wakes_it(mpi: str, what: str, tmp_path: Path) -> None:
    # The sender of a long message sleeps until its receiver has taken it, or says where to. Of five
    # senders one may have been awake by its timeout, in sleeps of 50 ms.
    control = Control.create(tmp_path, WaitPolicy("doorbell"))
    control.set_timeouts(50_000, 50_000)
    control.close()
    run = known_programs.run(mpi, 2, [known_programs.build(mpi, "known/waits.c"), what], tmp_path)
    assert run.code == 0, run.errors
    assert int(run.output) >= 1


# Each rank as if it were alone on its node: its own files, and messages by TCP.
APART = (
    "d=$DOVETAIL_DIR/${OMPI_COMM_WORLD_RANK:-$PMI_RANK}; "
    'DOVETAIL_DIR=$d OMPI_COMM_WORLD_LOCAL_SIZE=1 MPI_LOCALNRANKS=1 exec "$0" "$@"'
)
BY_TCP = {"OMPI_MCA_btl": "tcp,self", "UCX_TLS": "tcp,self", "MPIR_CVAR_NOLOCAL": "1"}


@pytest.mark.parametrize("before", [False, True], ids=["the first", "one after another"])
@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_a_message_from_another_node_ends_a_sleep(mpi: str, before: bool, tmp_path: Path) -> None:
    # 100 messages come in half a second, in which there is no time for more than 10 sleeps of
    # 50 ms to their end. A program leaves its bells behind.
    for rank in range(2):
        (folder := tmp_path / str(rank)).mkdir()
        control = Control.create(folder, WaitPolicy("doorbell"))
        control.set_timeouts(50_000, 50_000)
        control.close()
        if before:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as bell:
                bell.bind(str(folder / f"bell.{rank}"))
    words = ["sh", "-c", APART, known_programs.build(mpi, "known/waits.c"), "news"]
    run = known_programs.run(mpi, 2, words, tmp_path, **BY_TCP)
    assert run.code == 0, run.errors
    assert int(run.output) >= 50


INTERRUPTED = """
#include <errno.h>
#include <mpi.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static int calls;

int poll(struct pollfd *at, nfds_t count, int timeout)
{
    const char *starter = getenv("PMI_FD");
    if (starter && count == 1 && at->fd == atoi(starter) && ++calls <= 100) {
        errno = EINTR;
        return -1;
    }
    return (int)syscall(SYS_poll, at, count, timeout);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Barrier(MPI_COMM_WORLD);
    MPI_Finalize();
    puts(calls > 100 ? "good" : "bad");
    return 0;
}
"""
"""A program with a timer, whose signals come while its ranks wait for each other at the end."""


def test_the_end_of_mpich_goes_on_after_a_signal(tmp_path: Path) -> None:
    (tmp_path / "ends.c").write_text(INTERRUPTED)
    program = known_programs.build("mpich", str(tmp_path / "ends.c"), "-rdynamic")
    Control.create(tmp_path, WaitPolicy("off")).close()
    run = known_programs.run("mpich", 2, [program], tmp_path)
    assert (run.code, run.output.replace("\n", "")) == (0, "goodgood"), run.errors


BAD_CONTROLS = {
    "none": None,
    "an empty one": b"",
    "a short one": b"DVTCTRL\0\1\0\0\0",
    "one of another version": b"DVTCTRL\0\xff" + bytes(55),
    "one full of ones": b"\xff" * 64,
}


@pytest.mark.parametrize("control", BAD_CONTROLS)
@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_a_bad_control_page_leaves_the_program_alone(
    mpi: str, control: str, tmp_path: Path
) -> None:
    data = BAD_CONTROLS[control]
    if data is not None:
        (tmp_path / "control").write_bytes(data)
    words = [known_programs.build(mpi, PROGRAM), "mix", "16"]
    run = known_programs.run(mpi, 2, words, tmp_path)
    assert (run.code, run.output) == (0, known_programs.plain(mpi, 2, words)), run.errors
    assert not (tmp_path / "bells").exists()
    assert len(run.pages) == 2  # the profile does not depend on it


@pytest.mark.parametrize("mpi", known_programs.MPIS)
def test_a_bells_file_full_of_garbage_does_no_harm(mpi: str, tmp_path: Path) -> None:
    Control.create(tmp_path, WaitPolicy("doorbell", 1)).close()
    (tmp_path / "bells").write_bytes(b"\xff" * 4096)
    words = [known_programs.build(mpi, PROGRAM), "mix", "16"]
    run = known_programs.run(mpi, 2, words, tmp_path)
    assert (run.code, run.output) == (0, known_programs.plain(mpi, 2, words)), run.errors


def test_a_program_without_mpi_gives_way_as_ever(tmp_path: Path) -> None:
    Control.create(tmp_path, WaitPolicy("off")).close()
    code = "import os; [os.sched_yield() for _ in range(1000)]"
    variables = {
        "LD_PRELOAD": str(known_programs.library("openmpi")),
        "DOVETAIL_DIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **variables}, timeout=known_programs.LIMIT
    )
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["control"]
