# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the supervisor makes of a program's output, and how it starts programs."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

import pytest
from dovetail.host import borrowed_python
from dovetail.mpi import launcher, supervisor
from support.other_users import let_in, needs_nobody
from support.run_command import NOBODY

pytestmark = pytest.mark.unit

DASHES = "-" * 74
ASTERISKS = "*" * 58
REASONS = {
    "Open MPI: a rank killed by a signal": (
        137,
        f"{DASHES}\nmpirun noticed that process rank 3 with PID 0 on node vm exited on signal 9 "
        f"(Killed).\n{DASHES}\n",
        "rank 3 killed by signal 9"),
    "Open MPI: a rank that failed": (
        3,
        f"Error: bad mesh\n{DASHES}\nPrimary job  terminated normally, but 1 process returned\n"
        f"a non-zero exit code. Per user-direction, the job has been aborted.\n{DASHES}\n{DASHES}\n"
        "mpirun detected that one or more processes exited with non-zero status\n\n"
        f"  Process name: [[22630,1],2]\n  Exit code:    3\n{DASHES}\n",
        "rank 2: exit code 3: Error: bad mesh"),
    "Open MPI 5: a rank that failed": (
        3,
        f"Error: bad mesh\n{DASHES}\nprterun detected that one or more processes exited with "
        "non-zero status,\nthus causing the job to be terminated. The first process to do so was:"
        f"\n\n   Process name: [prterun-vm-30751@1,2]\n   Exit code:    3\n{DASHES}\n",
        "rank 2: exit code 3: Error: bad mesh"),
    "Open MPI 5: a rank that aborted": (
        1,
        f"{DASHES}\nMPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\n"
        f"  Proc: [prterun-vm-30751@1,1]\n  Errorcode: 7\n\nNOTE: invoking\n{DASHES}\n\0\n",
        "rank 1: exit code 7"),
    "Open MPI 5: a program that does not exist": (
        183,
        f"{DASHES}\nprterun was unable to launch the specified application as it could not\n"
        f"access an executable:\n\n   Executable: ./nosuch\n   Node: vm\n\n{DASHES}\n",
        "program ./nosuch not found"),
    "Open MPI: a call that failed": (
        6,
        "t = 3\n[vm:21134] *** An error occurred in MPI_Send\n"
        "[vm:21134] *** reported by process [1050607617,1]\n"
        "[vm:21134] *** on communicator MPI_COMM_WORLD\nt = 4\n"
        "[vm:21134] *** MPI_ERR_RANK: invalid rank\n"
        "[vm:21134] *** MPI_ERRORS_ARE_FATAL (processes in this communicator will now abort,\n"
        "[vm:21134] ***    and potentially your MPI job)\n"
        "[vm:21089] 1 more process has sent help message help-mpi-errors.txt\n"
        '[vm:21089] Set MCA parameter "orte_base_help_aggregate" to 0 to see all error messages\n',
        "exit code 6: MPI_Send: MPI_ERR_RANK: invalid rank"),
    "Open MPI: a rank that did not call MPI_Finalize": (
        1,
        f"mesh is bad\n{DASHES}\nmpirun has exited due to process rank 1 with PID 0 on\n"
        "node vm exiting improperly. There are three reasons this could occur:\n\n"
        '1. this process did not call "init" before exiting, but others in\nthe job did.\n'
        f"{DASHES}\n",
        "rank 1 ended without MPI_Finalize, or before MPI_Init: mesh is bad"),
    "MPICH: a rank killed by a signal": (
        9,
        "=====\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
        "=   PID 77 RUNNING AT vm\n=   EXIT CODE: 9\n=   CLEANING UP REMAINING PROCESSES\n"
        "=====\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Killed (signal 9)\n",
        "a rank killed by signal 9"),
    "MPICH: a rank that crashed": (
        11,
        "=====\n=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES\n"
        "=   PID 77 RUNNING AT vm\n=   EXIT CODE: 11\n=   CLEANING UP REMAINING PROCESSES\n"
        "=====\nYOUR APPLICATION TERMINATED WITH THE EXIT STRING: Segmentation fault (signal 11)\n",
        "rank 1 killed by signal 11"),
    "OpenFOAM: the error of a rank": (
        1,
        "Time = 3\n[1] \n[1] \n[1] --> FOAM FATAL ERROR: \n[1] cannot open file p\n[1] \n"
        "FOAM parallel run exiting\n",
        "exit code 1: FOAM FATAL ERROR: cannot open file p"),
    "Open MPI: why the program aborted, and a line of the starter's own": (
        7,
        "cannot go on: pressure is negative\n[vm:26472] [[2966,0],0] ORTE_ERROR_LOG: Data unpack "
        "would read past end of buffer in file ../../../orte/util/show_help.c at line 501\n",
        "exit code 7: cannot go on: pressure is negative"),
    "MPICH: why the program aborted, and the library's line": (
        7,
        "cannot go on: pressure is negative\nAbort(7) on node 1 (rank 1 in comm 0): application "
        "called MPI_Abort(MPI_COMM_WORLD, 7) - process 1\n",
        "exit code 7: cannot go on: pressure is negative"),
    "MPICH: a program that aborts without a word": (
        7,
        "Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(comm, 7)\n",
        "exit code 7: Abort(7) on node 1 (rank 1 in comm 0): application called MPI_Abort(comm, 7)",
    ),
    "MPICH: a call that failed": (
        15,
        "t = 3\nAbort(15) on node 0 (rank 0 in comm 0): Fatal error in internal_Send: Other MPI "
        "error\n",
        "exit code 15: Abort(15) on node 0 (rank 0 in comm 0): Fatal error in internal_Send: Other "
        "MPI error"),
    "Open MPI: a starter below another": (
        1,
        f"\n{ASTERISKS}\n\nmpirun does not support recursive calls\n\n{ASTERISKS}\n"
        f"{DASHES}\nThe first process to do so was:\n\n"
        f"  Process name: [[7,1],0]\n  Exit code:    1\n{DASHES}\n",
        "mpirun was started by a script below another mpirun; a script with a name such as "
        "mpirun.all is started without one"),
    "a last line that is a decoration": (
        4,
        f"the mesh is bad\n\n{ASTERISKS}\n",
        "exit code 4: the mesh is bad"),
    "a program that says nothing": (4, "", "exit code 4"),
    "a program that a signal ended": (139, "", "killed by signal 11"),
    "a program that ends with -1": (255, "no more blocks\n", "exit code 255: no more blocks"),
    "a program that does not exist": (
        134,
        f"{DASHES}\nmpirun was unable to find the specified executable file, and therefore\n"
        f"Node:       vm\nExecutable: nosuch\n{DASHES}\n",
        "program nosuch not found"),
}  # fmt: skip


@pytest.mark.parametrize("case", REASONS.values(), ids=REASONS.keys())
def test_a_failure_is_explained_in_one_line(case):
    code, output, reason = case
    assert launcher.explain(code, output, {76: 0, 77: 1}) == reason


def test_a_rank_that_the_kernel_killed_for_want_of_memory_is_told_from_others():
    limit = "the limit of its control group is 300 MiB"
    line = "mpirun noticed that process rank {} with PID 0 on node vm exited on signal {} (..).\n"
    told = {
        line.format(1, 9): f"out of memory: rank 1 was killed by the kernel; {limit}",
        line.format(1, 11): "rank 1 killed by signal 11",
        REASONS["MPICH: a rank killed by a signal"][1]:
            f"out of memory: a rank was killed by the kernel; {limit}",
        "": f"out of memory: it was killed by the kernel; {limit}",
    }  # fmt: skip
    for output, reason in told.items():
        assert launcher.explain(137, output, {76: 0, 77: 1}, (), limit) == reason


def test_a_rank_that_aborted_is_named_where_its_starter_lost_the_message():
    """Open MPI's starter sometimes prints an error of its own in the message's place."""
    lost = "[vm:05748] [[31370,0],0] ORTE_ERROR_LOG: Out of resource in file show_help.c\n"
    reason = "exit code 7: Open MPI lost its message that says why"
    assert launcher.explain(7, lost, {76: 0, 77: 1}, [1]) == f"rank 1: {reason}"
    assert launcher.explain(7, lost, {76: 0, 77: 1}) == reason


def test_an_output_as_large_as_the_limit_is_kept_whole(tmp_path):
    log = supervisor.Log(str(tmp_path / "log"), 2 << 20)
    text = b"0123456789abcdef" * (2 << 16)
    log.take(text)
    log.close()
    assert b"".join((tmp_path / "log").read_bytes().split(b"\n[dovetail: 0 ")[:1]) in text
    assert (tmp_path / "log").stat().st_size < (2 << 20) + 100


@pytest.mark.parametrize(
    "starter", ["mpirun", "/opt/mpi/bin/mpiexec", "mpirun.lsf", "mpiexec-hydra", "./mpirun.all"]
)
def test_a_command_with_its_own_starter_is_taken_as_it_is(starter):
    words = [starter, "-np", "3", "a.out"]
    assert launcher.command_line(words, 2, "/nonexistent", "") == words


def test_one_rank_is_started_where_there_is_no_starter():
    assert launcher.command_line(["a.out"], 1, "/nonexistent", "") == ["a.out"]
    assert launcher.command_line(["a.out"], 2, "/nonexistent", "")[0] == "mpirun"


SAY = {
    "mpirun (Open MPI) 5.0.11": "openmpi",
    "prterun (PRRTE) 3.0.14": "openmpi",
    "HYDRA build details:": "mpich",
    "Intel(R) MPI Library for Linux* OS, Version 2021.14": "mpich",
    "slurm 24.05": "",
}


def starter(folder: Path, name: str, said: str) -> str:
    """A starter of that name which says so when asked what it is; the folder, for a search path."""
    folder.mkdir()
    (folder / name).write_text(f"#!/bin/sh\n[ \"$*\" = --version ] && echo '{said}'\n")
    (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("said", SAY)
def test_a_starter_whose_name_does_not_tell_is_asked(said, tmp_path):
    path = starter(tmp_path / "bin", "mpirun", said)
    assert launcher.flavour("mpirun", path) == SAY[said]


def test_a_program_whose_libraries_load_slowly_has_its_mpi_all_the_same(tmp_path, monkeypatch):
    (tmp_path / "ldd").write_text("#!/bin/sh\nsleep 1; echo 'libmpi.so.40 => /lib/libmpi.so.40'\n")
    (tmp_path / "ldd").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(launcher, "_PATIENCE", 0.2)
    assert launcher.linked("/bin/true") == "openmpi"


def test_the_mpi_that_comes_first_starts_a_program_even_if_another_version_has_more_names(tmp_path):
    new = starter(tmp_path / "new", "mpirun", "mpirun (Open MPI) 5.0.11")
    old = starter(tmp_path / "old", "mpirun.openmpi", "")
    other = starter(tmp_path / "other", "mpirun", "HYDRA build details:")
    words = {path: launcher.command_line(["a.out"], 2, path, "openmpi")[0]
             for path in (f"{new}:{old}", f"{other}:{old}", other)}  # fmt: skip
    assert list(words.values()) == ["mpirun", "mpirun.openmpi", "mpirun"]


def test_a_preload_of_the_users_own_is_kept():
    assert (
        launcher.preload({"LD_PRELOAD": "theirs.so"}, "ours.so")["LD_PRELOAD"]
        == "ours.so:theirs.so"
    )


@pytest.mark.parametrize(
    ("theirs", "all_of_them"),
    [
        (None, "verify_asan_link_order=0"),
        ("log_path=x", "log_path=x:verify_asan_link_order=0"),
        ("verify_asan_link_order=1", "verify_asan_link_order=1"),
    ],
)
def test_the_sanitizers_library_need_not_be_first_unless_the_user_says_so(theirs, all_of_them):
    base = {} if theirs is None else {"ASAN_OPTIONS": theirs}
    environment = launcher.preload(base, "ours.so")
    assert environment.get("ASAN_OPTIONS") == all_of_them
    assert launcher.preload(base, "") == base


def as_in_an_image(monkeypatch):
    real = os.path.realpath(borrowed_python.PYTHON)
    loader = os.path.realpath(borrowed_python._loader(real))
    monkeypatch.setattr(borrowed_python, "own", lambda: borrowed_python._under(loader, real))


@pytest.mark.parametrize("in_an_image", [False, True])
def test_a_case_with_a_pipe_and_a_socket_is_copied(in_an_image, tmp_path, monkeypatch):
    if in_an_image:
        as_in_an_image(monkeypatch)
    case, copy = tmp_path / "case", tmp_path / "copy"
    (case / "system").mkdir(parents=True)
    (case / "system" / "controlDict").write_text("as delivered")
    (case / "link").symlink_to("nowhere")
    os.mkfifo(case / "system" / "pipe")
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(case / "socket"))
        words = [*supervisor._copy(False), str(case), str(copy)]
        subprocess.run(words, check=True, timeout=60)
    assert (copy / "system" / "controlDict").read_text() == "as delivered"
    assert os.readlink(copy / "link") == "nowhere"


@needs_nobody
@pytest.mark.parametrize("in_an_image", [False, True])
def test_a_case_is_copied_anew_where_its_folders_are_to_be_read_alone(
    in_an_image, tmp_path, monkeypatch
):
    let_in(tmp_path)
    if in_an_image:
        as_in_an_image(monkeypatch)
    case, out = tmp_path / "case", tmp_path / "out"
    (case / "surfaces").mkdir(parents=True)
    (case / "surfaces" / "wing").write_text("as delivered")
    (case / "surfaces").chmod(0o555)
    out.mkdir()
    os.chown(out, 65534, 65534)
    for _ in ("first", "anew"):
        words = [*NOBODY, *supervisor._copy((out / "case").exists()), str(case), str(out / "case")]
        subprocess.run(words, check=True)
        assert (out / "case" / "surfaces" / "wing").read_text() == "as delivered"
        (out / "case" / "written").touch()
    subprocess.run(words, check=True)
    assert not (out / "case" / "written").exists()
