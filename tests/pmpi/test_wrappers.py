# SPDX-License-Identifier: LGPL-3.0-or-later
"""Every blocking MPI call is wrapped, counted once, and changed in nothing."""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import time
from pathlib import Path

import pytest
from dovetail.core.protocol import WaitPolicy
from dovetail.mpi import page
from dovetail.mpi.control_page import Control
from support import known_programs

pytestmark = pytest.mark.mpi

each_mpi = pytest.mark.parametrize("mpi", known_programs.MPIS)

# What MPI describes as local, or as done without waiting for another process or a disk: all of
# these groups, told by name. A call for large counts (_c) is as local as the one without.
LOCAL = re.compile(
    r"""T_.* | Type_.* | Group_.* | Info_.* | Op_.* | .*_c2f | .*_f2c | Attr_.* | Keyval_.*
    | .*_(create|free)_keyval | .*_(get|set|delete)_attr | .*errhandler | Errhandler_.*
    | Error_.* | Add_error_.* | .*_(get|set)_name | .*_get_info | .*_get_group | Comm_group
    | Comm_(rank|size|compare|remote_group|remote_size|test_inter|get_parent)
    | Address | Aint_.* | Alloc_mem | Free_mem | Buffer_attach | Cancel | Test_cancelled
    | Pack.* | Unpack.* | Reduce_local | Register_datarep | Request_free | Status_.*
    | Grequest_.* | Get_(address|count|elements|elements_x|processor_name|version
                        |library_version) | (Bsend|Rsend|Send|Ssend|Recv)_init
    | Cart_(coords|get|rank|shift) | Cartdim_get | Dims_create | Dist_graph_neighbors.*
    | Graph_(get|neighbors|neighbors_count) | Graphdims_get | Topo_test
    | File_get_.* | File_seek | Finalized | Initialized | Is_thread_main | Query_thread
    | Win_(attach|detach|shared_query) | Wtick | Wtime | Session_get_.*""",
    re.VERBOSE,
)


def exported(library: str) -> set[str]:
    words = ["nm", "-D", "--defined-only", library]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return {line.split()[2] for line in text.splitlines()}


def loaded(name: str) -> str:
    """The path of a library that the loader finds."""
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    found = re.search(rf"{re.escape(name)} .*=> (\S+)", cache)
    if not found:
        pytest.skip(f"no {name} here")
    return found[1]


def functions(mpi: str) -> set[str]:
    """The names of all functions that an MPI library has, without their MPI_."""
    symbols = exported(loaded({"openmpi": "libmpi.so.40", "mpich": "libmpich.so.12"}[mpi]))
    return {name[5:] for name in symbols if name.startswith("PMPI_")}


def waits(mpi: str) -> set[str]:
    """Those of them that may wait, or that a peer may wait for."""
    return {name for name in functions(mpi) if not LOCAL.fullmatch(re.sub("_c$", "", name))}


@each_mpi
def test_every_call_that_can_wait_is_wrapped(mpi):
    library = str(known_programs.library(mpi))
    wrapped = {name[4:] for name in exported(library) if name.startswith("MPI_")}
    assert len(waits(mpi)) > 150
    assert waits(mpi) - wrapped == set()
    assert wrapped - functions(mpi) == set()


@each_mpi
def test_every_fortran_wrapper_has_its_real_function(mpi):
    """A wrapper calls what the Fortran library has under the profiling name."""
    files = {
        "openmpi": ("libmpi_mpifh.so.40", "libmpi_usempif08.so.40"),
        "mpich": ("libmpichfort.so.12",),
    }
    there = set().union(*(exported(loaded(name)) for name in files[mpi]))
    ours = {name for name in exported(str(known_programs.library(mpi))) if name.startswith("mpi_")}
    used = {name for name in ours if name in there}
    assert len(used) > 80
    own = {name: "pmpir" if mpi == "mpich" and "_f08" in name else "pmpi" for name in used}
    assert {name for name in used if own[name] + name[3:] not in there} == set()
    if mpi == "mpich":  # mpi_x_f08_ calls PMPI_X, and of the others nobody else knows the place
        theirs = {n for n in there if re.fullmatch(r"mpi_\w+_f08(ts)?_", n)}
        missing = {re.sub(r"_f08\w*$", "", n)[4:] for n in theirs - ours}
        assert missing & {name.lower() for name in waits(mpi)} == set()


@each_mpi
def test_c_calls_are_counted_exactly_and_change_nothing(mpi, tmp_path):
    program = known_programs.build(mpi, "known/counts.c")
    done = known_programs.run(mpi, 2, [program, str(tmp_path)], tmp_path)
    assert done.code == 0, done.errors
    expected: dict[int, dict[str, int]] = {0: {}, 1: {}}
    for rank, name, count in map(str.split, done.output.splitlines()):
        if name != "result":
            expected[int(rank)][name] = int(count)
    assert {one.rank: known_programs.counts(one) for one in done.pages} == expected
    assert {one.mpi for one in done.pages} == {mpi}
    assert sorted(known_programs.plain(mpi, 2, [program, str(tmp_path)]).splitlines()) == sorted(
        done.output.splitlines()
    )


MPI_4 = {
    **dict.fromkeys(["Allreduce", "Irecv", "Send"], 3),
    **dict.fromkeys(
        ["Isendrecv", "Isendrecv_replace", "Waitall", "Allreduce_init", "Comm_free"], 1
    ),
    **dict.fromkeys(["Session_init", "Session_finalize"], 2),
    "Comm_create_from_group": 1,
    "Wait": 7,
    "Start": 4,
}


@each_mpi
def test_a_program_with_sessions_alone_is_counted_exactly(mpi, tmp_path):
    done = known_programs.run(mpi, 2, [known_programs.build(mpi, "known/sessions.c")], tmp_path)
    assert done.code == 0, done.errors
    if "unsupported" in done.output:
        pytest.skip("this MPI has no sessions")
    assert done.output.replace("\n", "") == "goodgood"
    assert [(one.rank, one.world_size, one.state) for one in done.pages] == [
        (0, 2, "finalized"),
        (1, 2, "finalized"),
    ]
    own = ({"Psend_init": 1, "Pready": 2}, {"Precv_init": 1})
    for one, parts in zip(done.pages, own):
        expected = {f"MPI_{name}": count for name, count in {**MPI_4, **parts}.items()}
        assert known_programs.counts(one) == expected
    (name, *_) = tmp_path.glob("rank.*")
    assert b"MPI_Intercomm_create_from_groups" in name.read_bytes()  # the longest there is


@each_mpi
def test_a_wait_with_large_counts_is_seen_as_one(mpi, tmp_path):
    words = [known_programs.build(mpi, "known/sessions.c"), "wait", "2"]
    done = known_programs.run(mpi, 2, words, tmp_path)
    assert done.code == 0, done.errors
    if "unsupported" in done.output:
        pytest.skip("this MPI has no calls for large counts")
    waiting, other = done.pages
    assert waiting.mpi_s > 9 * waiting.useful_s  # of 2 s, which the other one sleeps outside MPI
    assert other.useful_s > other.mpi_s


@pytest.mark.parametrize(("mpi", "what"), [("mpich", "late"), ("mpich5", "again")])
def test_sessions_that_threads_begin_and_end_are_seen_whole(mpi, what, tmp_path):
    """One ends the last session, long after the last call; one asks MPI something before all."""
    words = [known_programs.build(mpi, "known/sessions.c"), what, "1"]
    done = known_programs.run(mpi, 2, words, tmp_path)
    assert done.code == 0, done.errors
    waiting, other = done.pages
    assert waiting.mpi_s > 0.9  # s, in which the other one pauses before it sends
    assert waiting.useful_s > 0.9
    assert other.useful_s > 1.9


FIVE = """Send Recv Irecv Isend Waitall Wait Test Sendrecv Iprobe Barrier Bcast Pcontrol"""
ONCE = """Comm_split Comm_free Win_create Win_fence Win_free File_open File_set_view
    File_write_all File_close Init Finalize"""
FORTRAN = {
    **{f"MPI_{name}": 5 for name in FIVE.split()},
    **{f"MPI_{name}": 1 for name in ONCE.split()},
    "MPI_Allreduce": 6,
}


@each_mpi
@pytest.mark.parametrize("binding", ["MPIFH", "MPI", "F08"])
def test_fortran_calls_are_counted_exactly_and_change_nothing(mpi, binding, tmp_path):
    program = known_programs.build(mpi, "known/counts.F90", f"-D{binding}")
    done = known_programs.run(mpi, 2, [program, str(tmp_path)], tmp_path)
    assert done.code == 0, done.errors
    assert [known_programs.counts(one) for one in done.pages] == [FORTRAN, FORTRAN]
    assert [one.iterations for one in done.pages] == [5, 5]
    assert sorted(done.output.splitlines()) == ["0 result 10", "1 result 5"]


@each_mpi
def test_threads_that_call_at_once_are_all_counted(mpi, tmp_path):
    done = known_programs.run(mpi, 2, [known_programs.build(mpi, "known/threads.c")], tmp_path)
    assert done.code == 0, done.errors
    if "unsupported" in done.output:
        pytest.skip("this MPI has no MPI_THREAD_MULTIPLE")
    assert done.output.replace("\n", "") == "goodgood"  # the line ends of two ranks may come late
    for one in done.pages:
        assert known_programs.counts(one) == {
            "MPI_Init_thread": 1,
            "MPI_Finalize": 1,
            "MPI_Send": 4000,
            "MPI_Recv": 4000,
        }


@each_mpi
def test_spawned_processes_are_a_world_of_their_own(mpi, tmp_path):
    words = [known_programs.build(mpi, "known/life.c"), "spawn"]
    if known_programs.plain(mpi, 2, words) is None:
        pytest.skip("this MPI cannot spawn here, with or without the library")
    done = known_programs.run(mpi, 2, words, tmp_path)
    assert done.code == 0, done.errors
    parents = [one for one in done.pages if one.world == 0]
    children = [one for one in done.pages if one.world != 0]
    assert [one.rank for one in parents] == [one.rank for one in children] == [0, 1]
    assert len({one.world for one in children}) == 1
    assert all(known_programs.counts(one)["MPI_Comm_spawn"] == 1 for one in parents)
    assert all(known_programs.counts(one)["MPI_Barrier"] == 5 for one in children)


@each_mpi
def test_a_forked_child_leaves_its_parents_page_alone(mpi, tmp_path):
    done = known_programs.run(mpi, 2, [known_programs.build(mpi, "known/life.c"), "fork"], tmp_path)
    assert done.code == 0, done.errors
    assert [known_programs.counts(one)["MPI_Pcontrol"] for one in done.pages] == [3, 3]
    assert len(list(tmp_path.glob("rank.*"))) == 2


@each_mpi
def test_an_abort_is_published(mpi, tmp_path):
    done = known_programs.run(
        mpi, 2, [known_programs.build(mpi, "known/life.c"), "abort"], tmp_path
    )
    assert done.code != 0
    one = done.pages[1]
    assert one.state == "aborted"
    assert one.iterations == 4
    assert known_programs.counts(one)["MPI_Barrier"] == 4


def test_an_abort_that_the_plain_program_survives_does_not_hang(tmp_path):
    """In a signal's handler malloc may have its lock. Open MPI's own MPI_Abort wants that too.

    What MPICH prints its starter may lose on a busy machine, of the plain program as often.
    """
    program = known_programs.build("mpich", "known/life.c")
    done = known_programs.run("mpich", 2, [program, "wreck"], tmp_path)
    assert (done.code, done.pages[1].state) == (3, "aborted")
    said = done.output + done.errors
    assert not said or "MPI_Abort(MPI_COMM_WORLD, 3)" in said


@each_mpi
def test_pages_can_be_read_live_and_are_complete_after_kill_9(mpi, tmp_path):
    process = known_programs.start(
        mpi, 2, [known_programs.build(mpi, "known/life.c"), "hang"], tmp_path
    )
    try:
        live = wait_for(lambda: ready(tmp_path, 100))
        assert all(one.alive for one in live)
        assert {one.state for one in live} <= {"running", "in_mpi"}
        for one in live:
            with contextlib.suppress(ProcessLookupError):  # the starter may be as quick
                os.kill(one.pid, signal.SIGKILL)
        process.communicate(timeout=known_programs.LIMIT)
    finally:
        process.kill()
    dead = page.read_pages(tmp_path)
    assert [one.alive for one in dead] == [False, False]
    for before, after in zip(live, dead):
        assert after.iterations >= before.iterations
        # A boundary is published inside the call, which is counted when it is left.
        assert (
            after.iterations - 1 <= known_programs.counts(after)["MPI_Pcontrol"] <= after.iterations
        )
        assert after.elapsed_s >= before.iter_stamp - before.init_s - 0.1
        assert after.elapsed_s == pytest.approx(after.useful_s + after.mpi_s)


def ready(directory, iterations):
    """The pages of two ranks that are so far; None before."""
    pages = page.read_pages(directory)
    far = len(pages) == 2 and all(one.iterations >= iterations for one in pages)
    return pages if far else None


def wait_for(condition):
    end = time.monotonic() + known_programs.LIMIT
    while time.monotonic() < end:
        result = condition()
        if result is not None:
            return result
        select.select([], [], [], 0.02)
    raise AssertionError("the condition never held")


NOT_USABLE = ("", "relative", "/nonexistent/dir", "/dev/null", "/proc/self")


@pytest.mark.parametrize("directory", NOT_USABLE)
@each_mpi
def test_without_a_usable_directory_the_library_is_inert(mpi, directory):
    program = known_programs.build(mpi, "known/threads.c")
    words = [known_programs.LAUNCHERS[mpi], "-np", "2", program]
    more = {"LD_PRELOAD": str(known_programs.library(mpi)), "DOVETAIL_DIR": directory}
    done = subprocess.run(
        words,
        env=known_programs.environment(**more),
        capture_output=True,
        text=True,
        timeout=known_programs.LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert "dovetail" not in done.stderr


SHARES = """
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <unistd.h>

int main(void)
{
    char name[64];
    snprintf(name, sizeof(name), "/mpich_shm_%d", (int)getpid());
    int fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600), second = shm_open(name, O_RDWR, 0);
    int third = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600), taken = errno == EEXIST;
    printf("%d %d\\n", write(fd, "1", 1) == 1 && lseek(second, 0, SEEK_END) == 1,
           third < 0 && taken);
    int gone = shm_unlink(name);
    printf("%d %d\\n", gone, shm_open(name, O_RDWR, 0));
    return 0;
}
"""
"""Has a segment as MPICH 5 does, twice."""


@pytest.mark.parametrize("directory", ["/dev/shm", *NOT_USABLE])
@each_mpi
def test_ranks_of_mpich_share_memory_whatever_the_directory(mpi, directory, tmp_path):
    (tmp_path / "shares.c").write_text(SHARES)
    subprocess.run(["cc", "-o", "shares", "shares.c", "-lrt"], cwd=tmp_path, check=True)
    more = {"LD_PRELOAD": str(known_programs.library(mpi)), "DOVETAIL_DIR": directory}
    done = subprocess.run(
        ["./shares"],
        cwd=tmp_path,
        env=known_programs.environment(**more),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "1 1\n0 -1\n"), done.stderr


@each_mpi
def test_programs_without_mpi_run_as_ever(mpi):
    more = {"LD_PRELOAD": str(known_programs.library(mpi)), "DOVETAIL_DIR": "/dev/shm"}
    done = subprocess.run(
        ["bash", "-c", "echo $((6 * 7))"],
        env=known_programs.environment(**more),
        capture_output=True,
        text=True,
    )
    assert (done.stdout, done.stderr) == ("42\n", "")


CPLUSPLUS = ("-xc++", "-DOMPI_SKIP_MPICXX", "-DMPICH_SKIP_MPICXX", "-Wl,--no-as-needed,-lstdc++")


@pytest.mark.parametrize("flags", [(), CPLUSPLUS], ids=["longjmp", "exception"])
@each_mpi
def test_calls_that_never_return_leave_the_next_ones_counted(mpi, flags, tmp_path):
    done = known_programs.run(
        mpi, 1, [known_programs.build(mpi, "known/leaves.c", *flags)], tmp_path
    )
    assert (done.code, done.output) == (0, "2\n"), done.errors
    (one,) = done.pages
    assert known_programs.counts(one)["MPI_Barrier"] == 5
    # A call that was left by an exception is over then; of longjmp nothing is seen before the next.
    assert known_programs.counts(one).get("MPI_Send", 0) == (2 if flags else 0)


WEAK = """
#include <stdio.h>

__attribute__((weak)) int MPI_Init(int *argc, char ***argv);
__attribute__((weak)) int MPI_Send(const void *buf, int count, int type, int dest, int tag, int c);
__attribute__((weak)) int MPI_Finalize(void);
static int (*at_the_end)(void) = MPI_Finalize;

#ifdef LIBRARY
void asks(void)
#else
void asks(void);
int main(int argc, char **argv)
#endif
{
    printf("%d %d %d\\n", MPI_Init != NULL, MPI_Send != NULL, at_the_end != NULL);
    if (MPI_Send)
        MPI_Send(NULL, 0, 0, 0, 0, 0);
#ifndef LIBRARY
    if (MPI_Init)
        MPI_Init(&argc, &argv);
    asks();
    if (at_the_end)
        at_the_end();
    return 0;
#endif
}
"""
"""A program that has MPI if it finds it, and so has its library."""


@pytest.mark.parametrize("flag", ["-Wl,-z,lazy", "-Wl,-z,now,-z,relro", "-no-pie"])
@each_mpi
def test_a_program_that_finds_no_mpi_does_without(mpi, flag, tmp_path):
    (tmp_path / "weak.c").write_text(WEAK)
    library = ["cc", "-shared", "-fPIC", "-DLIBRARY", "-o", "libasks.so", "weak.c"]
    program = ["cc", "-fPIC", flag, "-o", "weak", "weak.c", "./libasks.so"]
    for words in (library, program):
        subprocess.run(words, cwd=tmp_path, check=True)
    done = subprocess.run(
        ["./weak"],
        cwd=tmp_path,
        env=known_programs.environment(
            LD_PRELOAD=str(known_programs.library(mpi)), DOVETAIL_DIR=str(tmp_path)
        ),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "0 0 0\n" * 2, "")


@each_mpi
def test_weak_references_that_an_mpi_answers_stay(mpi, tmp_path):
    source = tmp_path / "weak.c"
    source.write_text(
        "#include <mpi.h>\n"
        "#pragma weak MPI_Init\n#pragma weak MPI_Barrier\n#pragma weak MPI_Finalize\n"
        "int main(int argc, char **argv) { if (!MPI_Init || !MPI_Barrier || !MPI_Finalize)\n"
        "return 1; MPI_Init(&argc, &argv); MPI_Barrier(MPI_COMM_WORLD);\n"
        "return MPI_Finalize(); }\n"
    )
    program = known_programs.build(mpi, str(source), "-Wl,--no-as-needed")
    done = known_programs.run(mpi, 2, [program], tmp_path)
    assert done.code == 0, done.errors
    assert [known_programs.counts(one)["MPI_Barrier"] for one in done.pages] == [1, 1]


BARRIER = """
#include <mpi.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    MPI_Comm copy;
    MPI_Init(&argc, &argv);
    MPI_Comm_dup(MPI_COMM_WORLD, &copy);
    MPI_Barrier(copy);
    printf("good\\n");
    MPI_Comm_free(&copy);
    return MPI_Finalize();
}
"""

LOADER = """
#include <dlfcn.h>

int main(int argc, char **argv)
{
    int (*run)(int, char **);
    void *library = dlopen("./librun.so", RTLD_NOW | RTLD_LOCAL);
    *(void **)&run = library ? dlsym(library, "run") : 0;
    return run ? run(argc, argv) : 9;
}
"""
"""A program whose MPI, or whatever else it has, is loaded for itself alone, as in Python."""


def loader(directory, source, *flags):
    """Such a program, of what is a program's source; to be run in the directory."""
    (directory / "run.c").write_text(source.replace("int main(", "int run("))
    (directory / "loader.c").write_text(LOADER)
    library = ["cc", "-shared", "-fPIC", "-o", "librun.so", "run.c", *flags]
    for words in (library, ["cc", "-o", "loader", "loader.c"]):
        subprocess.run(words, cwd=directory, check=True)
    return str(directory / "loader")


@pytest.mark.parametrize("name", ["libmpi.so.12", "libmpi_x.so.12"])
def test_mpich_is_found_under_other_names(name, tmp_path, monkeypatch):
    """Debian alone calls it libmpich.so.12; its makers call it libmpi.so.12, and vendors as they
    like. This is that library itself, with another name in it."""
    known_programs.library("mpich")
    data = Path(loaded("libmpich.so.12")).read_bytes()
    debian = b"libmpich.so.12\0"
    assert data.count(debian) == 1
    (tmp_path / name).write_bytes(data.replace(debian, name.encode().ljust(len(debian), b"\0")))
    words = subprocess.run(["mpicc.mpich", "-show", "-c"], capture_output=True, text=True).stdout
    flags = [word for word in words.split() if word.startswith("-I")]
    program = loader(tmp_path, BARRIER, *flags, f"./{name}")
    monkeypatch.chdir(tmp_path)
    done = known_programs.run("mpich", 2, [program], tmp_path, LD_LIBRARY_PATH=str(tmp_path))
    # The starter may put one rank's line into the other's.
    assert (done.code, done.output.count("good")) == (0, 2), done.errors
    assert [(one.rank, known_programs.counts(one)["MPI_Barrier"]) for one in done.pages] == [
        (0, 1),
        (1, 1),
    ]


def preloaded(mpi, program, directory):
    """What came of a program of whatever kind, run by itself with the library of an MPI."""
    more = {"LD_PRELOAD": str(known_programs.library(mpi)), "DOVETAIL_DIR": str(directory)}
    return subprocess.run(
        [program],
        cwd=directory,
        env=known_programs.environment(**more),
        capture_output=True,
        text=True,
        timeout=known_programs.LIMIT,
    )


BECOMES = """
#include <mpi.h>
#include <unistd.h>

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    for (int i = 0; i < (argc > 1 ? 5 : 3); i++) {
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Pcontrol(1);
    }
    MPI_Finalize();
    return argc > 1 ? 0 : execl(argv[0], argv[0], "again", NULL);
}
"""

BACK = """
#define _GNU_SOURCE
#include <mpi.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static long ahead;
int clock_gettime(clockid_t clock, struct timespec *t)
{
    long code = syscall(SYS_clock_gettime, clock, t);
    t->tv_sec += clock == CLOCK_MONOTONIC ? ahead : 0;
    return (int)code;
}
static int inside(MPI_Comm c, int key, void *extra, void *value, void *copy, int *flag)
{
    ahead = 5;
    return *flag = 0;
}
int main(int argc, char *argv[])
{
    int key;
    MPI_Comm twin;
    MPI_Init(&argc, &argv);
    MPI_Comm_create_keyval(inside, MPI_COMM_NULL_DELETE_FN, &key, NULL);
    MPI_Comm_set_attr(MPI_COMM_WORLD, key, NULL);
    MPI_Comm_dup(MPI_COMM_WORLD, &twin);
    ahead = 0;
    MPI_Finalize();
    return 0;
}
"""


@each_mpi
def test_a_clock_that_goes_back_between_two_calls_spoils_no_page(mpi, tmp_path, monkeypatch):
    """As the counters of two cores may be apart; here it is 5 s ahead inside a call."""
    monkeypatch.setenv("DOVETAIL_CLOCK", "monotonic")
    (tmp_path / "back.c").write_text(BACK)
    program = known_programs.build(mpi, str(tmp_path / "back.c"), "-rdynamic")
    done = preloaded(mpi, program, tmp_path)
    assert done.returncode == 0, done.stderr
    (one,) = page.read_pages(tmp_path)
    assert (one.state, one.useful_s) == ("finalized", 0.0)


@each_mpi
def test_a_program_that_becomes_another_one_by_exec_is_seen_as_that(mpi, tmp_path):
    (tmp_path / "becomes.c").write_text(BECOMES)
    done = preloaded(mpi, known_programs.build(mpi, str(tmp_path / "becomes.c")), tmp_path)
    assert done.returncode == 0, done.stderr
    (one,) = page.read_pages(tmp_path)
    assert (one.iterations, known_programs.counts(one)["MPI_Barrier"]) == (5, 5)


@each_mpi
def test_programs_that_have_ended_leave_no_page_to_the_next(mpi, tmp_path):
    """A script may start thousands; but what was killed cannot be told from what runs elsewhere."""
    (tmp_path / "barrier.c").write_text(BARRIER)
    program = known_programs.build(mpi, str(tmp_path / "barrier.c"))
    for _ in range(3):
        done = known_programs.run(mpi, 2, [program], tmp_path)
        assert done.code == 0, done.errors
    assert len(list(tmp_path.glob("rank.*"))) == len(done.pages) == 2


@pytest.mark.parametrize("flags", ["-Wl,-z,lazy", "-Wl,-z,now,-z,relro"])
@each_mpi
def test_a_program_of_the_other_mpi_runs_as_ever(mpi, flags, tmp_path):
    """A script that is started with one may start it."""
    other = {"openmpi": "mpich", "mpich": "openmpi"}[mpi]
    (tmp_path / "barrier.c").write_text(BARRIER)
    program = known_programs.build(other, str(tmp_path / "barrier.c"), flags)
    done = preloaded(mpi, program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
    assert list(tmp_path.glob("rank.*")) == []


SEQUENTIAL = """
int MPI_Init(int *argc, char ***argv) { return 0; }
int MPI_Barrier(int comm) { return 0; }
int MPI_Finalize(void) { return 0; }
"""
"""What some programs bring to do without MPI: it has no profiling names."""

SEQUENTIAL_MAIN = """
#include <stdio.h>

int MPI_Init(int *argc, char ***argv), MPI_Barrier(int comm), MPI_Finalize(void);

int main(int argc, char **argv)
{
    int failed = MPI_Init(&argc, &argv) || MPI_Barrier(1) || MPI_Finalize();
    printf(failed ? "bad\\n" : "good\\n");
    return 0;
}
"""


@each_mpi
def test_a_program_with_an_mpi_for_one_rank_runs_as_ever(mpi, tmp_path):
    known_programs.library(mpi)
    (tmp_path / "sequential.c").write_text(SEQUENTIAL)
    (tmp_path / "main.c").write_text(SEQUENTIAL_MAIN)
    library = ["cc", "-shared", "-fPIC", "-o", "libseq.so", "sequential.c"]
    for words in (library, ["cc", "-o", "main", "main.c", "./libseq.so"]):
        subprocess.run(words, cwd=tmp_path, check=True)
    done = preloaded(mpi, str(tmp_path / "main"), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "good\n", "")


HOOKED = """
#include <stdio.h>

void *_ZN4Foam4TimeppEv(void *self);
void ucp_worker_destroy(void *worker);

int main(int argc, char **argv)
{
    ucp_worker_destroy(argv);
    printf("%s\\n", _ZN4Foam4TimeppEv(argv) == argv ? "good" : "bad");
    return 0;
}
"""

HOOKS = """
void *_ZN4Foam4TimeppEv(void *self) { return self; }
void ucp_worker_destroy(void *worker) { (void)worker; }
"""
"""Stands for OpenFOAM's library and for UCX's, of which a program needs these."""


@each_mpi
def test_openfoam_and_ucx_may_be_loaded_for_themselves_alone(mpi, tmp_path):
    known_programs.library(mpi)
    (tmp_path / "hooks.c").write_text(HOOKS)
    words = ["cc", "-shared", "-fPIC", "-o", "libhooks.so", "hooks.c"]
    subprocess.run(words, cwd=tmp_path, check=True)
    done = preloaded(mpi, loader(tmp_path, HOOKED, "./libhooks.so"), tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "good\n", "")


QUEUES = """
#define _GNU_SOURCE
#include <mpi.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static volatile int over;

static void *spin(void *nothing)
{
    while (!over)
        ;
    return nothing;
}

static double queued(void)
{
    double ran, waited = 0;
    FILE *file = fopen("/proc/self/schedstat", "r");
    if (file && fscanf(file, "%lf %lf", &ran, &waited) == 2)
        fclose(file);
    return waited * 1e-9;
}

static void calls(double seconds)
{
    for (double end = MPI_Wtime() + seconds; MPI_Wtime() < end;)
        MPI_Barrier(MPI_COMM_WORLD);
}

static double published(void)
{
    char name[4096];
    unsigned long long found = 0;
    snprintf(name, sizeof(name), "%s/rank.0.%d", getenv("DOVETAIL_DIR"), (int)getpid());
    FILE *file = fopen(name, "r");
    if (file && fseek(file, 208, SEEK_SET) == 0 && fread(&found, sizeof(found), 1, file) == 1)
        fclose(file);
    return found * 1e-9;
}

int main(int argc, char **argv)
{
    pthread_t threads[6];
    cpu_set_t one;
    MPI_Init(&argc, &argv);
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    sched_setaffinity(0, sizeof(one), &one);
    for (int i = 0; i < 6; i++)
        pthread_create(&threads[i], NULL, spin, NULL);
    calls(1.5);
    over = 1;
    for (int i = 0; i < 6; i++)
        pthread_join(threads[i], NULL);
    over = 0;
    calls(1.2);
    double before = published(), own = queued();
    pid_t child = fork();
    if (child == 0)
        spin(NULL);
    calls(2.0);
    kill(child, SIGKILL);
    printf("%f %f\\n", before, queued() - own);
    return MPI_Finalize();
}
"""
"""Has one core for its threads, and then for itself and a child; tells what its page has of the
first, and how long it waited in the second."""


@each_mpi
def test_waits_are_counted_after_threads_have_ended_that_waited_longer(mpi, tmp_path):
    (tmp_path / "queues.c").write_text(QUEUES)
    done = preloaded(mpi, known_programs.build(mpi, str(tmp_path / "queues.c")), tmp_path)
    assert done.returncode == 0, done.stderr
    before, waited = map(float, done.stdout.split())
    (one,) = page.read_pages(tmp_path)
    assert one.waits.queued_s - before > 0.5 * waited > 0.1


HANDLED = """
module handlers
  integer :: told = 0
contains
  subroutine handle(comm, code)
    integer :: comm, code
    told = told + 1
  end subroutine
end module

program handled
  use handlers
  implicit none
  include 'mpif.h'
  integer :: handler, code
  call MPI_Init(code)
  call MPI_Comm_create_errhandler(handle, handler, code)
  call MPI_Comm_set_errhandler(MPI_COMM_WORLD, handler, code)
  call MPI_Comm_set_errhandler(MPI_COMM_SELF, handler, code)
  call MPI_Barrier(MPI_COMM_NULL, code)
  print '(i0)', told
  call MPI_Finalize(code)
end program
"""
"""Makes one error."""


@each_mpi
def test_an_error_is_told_to_the_programs_handler_once(mpi, tmp_path):
    (tmp_path / "handled.F90").write_text(HANDLED)
    program = known_programs.build(mpi, str(tmp_path / "handled.F90"))
    done = preloaded(mpi, program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


INTERRUPTED = """
#include <errno.h>
#include <mpi.h>
#include <stdio.h>
#include <unistd.h>

int posix_fallocate(int fd, off_t begin, off_t size)
{
    static int again;
    again = !again;
    return again ? EINTR : ftruncate(fd, begin + size);
}

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    printf("good\\n");
    return MPI_Finalize();
}
"""
"""A program in which each reservation of memory is interrupted once, as by a timer of its own."""


@each_mpi
def test_a_signal_while_the_page_is_made_does_not_prevent_it(mpi, tmp_path):
    (tmp_path / "interrupted.c").write_text(INTERRUPTED)
    Control.create(tmp_path, WaitPolicy("doorbell")).close()
    program = known_programs.build(mpi, str(tmp_path / "interrupted.c"), "-rdynamic")
    done = preloaded(mpi, program, tmp_path)
    assert (done.returncode, done.stdout) == (0, "good\n"), done.stderr
    assert len(page.read_pages(tmp_path)) == 1
    assert (tmp_path / "bells").stat().st_size > 0


REGIONS = """
#include <mpi.h>
#include <stdarg.h>
#include <stdio.h>

int MPI_Pcontrol(const int level, ...)
{
    va_list list;
    va_start(list, level);
    printf("%d %s\\n", level, va_arg(list, const char *));
    va_end(list);
    return 0;
}
"""
"""A tool that has names for parts of the program, as IPM."""

NAMED = """
#include <mpi.h>

int main(int argc, char **argv)
{
    MPI_Init(&argc, &argv);
    MPI_Pcontrol(1, "solve");
    MPI_Pcontrol(-1, "solve");
    return MPI_Finalize();
}
"""


@each_mpi
def test_a_tool_gets_what_the_program_tells_it(mpi, tmp_path):
    (tmp_path / "regions.c").write_text(REGIONS)
    (tmp_path / "named.c").write_text(NAMED)
    words = [f"mpicc.{mpi}", "-shared", "-fPIC", "-o", "regions.so", "regions.c"]
    known_programs.library(mpi)
    subprocess.run(words, cwd=tmp_path, check=True)
    more = {"LD_PRELOAD": f"{known_programs.library(mpi)}:{tmp_path}/regions.so"}
    done = subprocess.run(
        [known_programs.build(mpi, str(tmp_path / "named.c"))],
        env=known_programs.environment(DOVETAIL_DIR=str(tmp_path), **more),
        capture_output=True,
        text=True,
        timeout=known_programs.LIMIT,
    )
    assert (done.returncode, done.stdout) == (0, "1 solve\n-1 solve\n"), done.stderr


TOOL = """
#include <mpi.h>
#include <stdio.h>

int MPI_Barrier(MPI_Comm comm)
{
    printf("seen\\n");
    return PMPI_Barrier(comm);
}
"""
"""What wraps MPI for the user, as mpiP and others do."""


@each_mpi
def test_a_tool_of_the_users_that_wraps_mpi_comes_next(mpi, tmp_path):
    (tmp_path / "tool.c").write_text(TOOL)
    tool = tmp_path / "tool.so"
    words = [f"mpicc.{mpi}", "-shared", "-fPIC", "-o", str(tool), str(tmp_path / "tool.c")]
    subprocess.run(words, check=True)
    more = {
        "LD_PRELOAD": f"{known_programs.library(mpi)}:{tool}",
        "DOVETAIL_DIR": str(tmp_path),
    }
    program = known_programs.build(mpi, "known/leaves.c")
    done = subprocess.run(
        [known_programs.LAUNCHERS[mpi], "-np", "1", program],
        env=known_programs.environment(**more),
        capture_output=True,
        text=True,
        timeout=known_programs.LIMIT,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("seen") == 5
    (one,) = page.read_pages(tmp_path)
    assert known_programs.counts(one)["MPI_Barrier"] == 5
