# SPDX-License-Identifier: LGPL-3.0-or-later
"""The local executor starts simulations, ends them, and says how they ended."""

from __future__ import annotations

import dataclasses
import os
import re
import resource
import select
import shlex
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from dovetail.applications import expected_iterations
from dovetail.core import protocol
from dovetail.core.causes import Cause
from dovetail.core.errors import BadInput
from dovetail.executors.local import executor as local_executor
from dovetail.executors.local.executor import LocalExecutor
from dovetail.host import cgroups, install_paths, processes
from dovetail.mpi import page
from dovetail.mpi.control_page import Control
from support import local_runs
from support.local_runs import FAKE_MPIRUN, LIMIT, share, site, wait_for  # noqa: F401

pytestmark = pytest.mark.unit

ENDINGS = {
    "one that succeeds has no reason": ("exit 0", (), 0, ""),
    "one that fails is explained by what it printed": (
        "echo working; echo 'Error: no mesh'; exit 3", (), 3, "exit code 3: Error: no mesh"),
    "one that crashes is explained by the signal": (
        "echo 'Error: no cell'; kill -SEGV $$", (), 139, "killed by signal 11: Error: no cell"),
    "OpenFOAM's own error is found": (
        "echo '--> FOAM FATAL ERROR: '; echo 'cannot find file \"U\"'; echo bye; exit 1", (), 1,
        'exit code 1: FOAM FATAL ERROR: cannot find file "U" bye'),
    "a prepare step that fails is named": (
        "true", ("echo no dictionary; exit 4",), 4,
        "prepare step 'sh -c 'echo no dictionary; exit 4'' failed with exit code 4: no dictionary"),
    "prepare steps run in order in the copy": (
        "grep -q 'as changed' input", ("echo as changed > input", "grep changed input"), 0, ""),
    "one that leaves a daemon ends all the same": (
        "setsid sleep 1000 & exit 0", (), 0, ""),
    "a daemon without its environment ends too": (
        "env -i setsid /bin/sleep 1000 >/dev/null 2>&1 & exit 0", (), 0, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", ENDINGS.values(), ids=ENDINGS.keys())
def test_an_ending_is_reported(site, case):  # noqa: F811
    script, prepare, code, reason = case
    executor = site.executor()
    executor.launch(site.spec("sim", script, *prepare), share())
    finished = site.until(executor, "sim")
    assert (finished.code, finished.reason) == (code, reason)
    assert (site.case / "input").read_text() == "as delivered\n"


STUCK = """
from dovetail.mpi import supervisor
supervisor.LOOK, supervisor.STUCK = 0.1, 0.5
supervisor.main()
"""


@pytest.fixture
def stuck_starter(site, monkeypatch):  # noqa: F811
    """A program that is called as Open MPI's starter, and hangs as that may once ranks failed."""
    monkeypatch.setattr(local_executor, "_RUN_SUPERVISOR", STUCK)
    starter = site.directory / "orterun"
    shutil.copy(os.path.realpath("/bin/sh"), starter)
    os.mkfifo(site.directory / "never")
    said = "echo no mesh; echo Per user-direction, the job has been aborted."
    return f"{starter} -c '{said}; read word < {site.directory}/never'"


def test_a_starter_of_open_mpi_that_outlives_its_ranks_is_ended(site, stuck_starter):  # noqa: F811
    executor = site.executor()
    executor.launch(site.spec("sim", f"exec {stuck_starter}"), share())
    finished = site.until(executor, "sim")
    assert (finished.cause, finished.code) == (Cause.FAILED, 1)
    assert finished.reason.startswith("exit code 1: ")
    assert "; then Open MPI's starter hung, and was ended after" in finished.reason


def test_a_script_goes_on_after_its_starter_that_was_ended(site, stuck_starter):  # noqa: F811
    script = f"{stuck_starter} || echo and so on; read word < {site.directory}/go"
    os.mkfifo(site.directory / "go")
    executor = site.executor()
    executor.launch(site.spec("sim", script), share())
    site.until(executor, "sim", protocol.Started)
    wait_for(lambda: "and so on\n" in site.log("sim"))
    (site.directory / "go").write_text("go\n")
    finished = site.until(executor, "sim")
    assert (finished.cause, finished.code, finished.reason) == (Cause.DONE, 0, "")


def test_an_mpi_whose_library_is_not_there_is_told_once(site, monkeypatch):  # noqa: F811
    """Else its programs would seem to tell nothing, and run one at a time."""
    says = 'echo "mpirun (Open MPI) 4.1"; exit'
    asked = FAKE_MPIRUN.replace("\n", f'\n[ "$1" != --version ] || {{ {says}; }}\n', 1)
    (site.bin / "mpirun").write_text(asked)
    monkeypatch.setenv("DOVETAIL_LIBDIR", str(site.bin))
    executor = site.executor()
    assert [*executor.news()] == []
    for name in ("one", "two"):
        executor.launch(site.spec(name, "true"), share(1))
        site.until(executor, name)
    (told,) = executor.news()
    assert told.startswith("programs of openmpi are not measured: no libdovetail-openmpi.so in ")
    assert [*executor.news()] == []


def test_a_command_that_does_not_exist_is_said_so(site):  # noqa: F811
    executor = site.executor()
    executor.launch(site.spec("sim", "", command=("nosuchprogram",)), share())
    assert "nosuchprogram" in site.until(executor, "sim").reason


@pytest.mark.parametrize(
    ("application", "ranks", "started"),
    [("generic", 1, ["0"]), ("openfoam", 2, ["0", "1"]), ("openfoam", 1, ["none"]),
     ("lammps", 1, ["none"])],
)  # fmt: skip
def test_one_rank_of_a_known_application_is_started_without_mpirun(
    site,  # noqa: F811
    application,
    ranks,
    started,
):
    executor = site.executor()
    asked = site.spec("sim", "echo ${RANK:-none}", application=application, ranks=ranks)
    executor.launch(asked, protocol.Share((500,) * ranks))
    assert site.until(executor, "sim").code == 0
    assert sorted(site.log("sim").split()) == started
    missing = site.spec("other", "", application=application, command=("nonexistent", "x"))
    executor.launch(missing, share())
    assert "nonexistent" in site.until(executor, "other").reason


def test_no_more_supervisors_wait_than_simulations_are_expected(site):  # noqa: F811
    executor = site.executor(launches=2)
    assert len(executor._spares) == 2
    for name in ("one", "two"):
        executor.launch(site.spec(name, "true"), share())
        site.until(executor, name)
    assert executor._spares == []
    executor.launch(site.spec("again", "true"), share())
    assert site.until(executor, "again").code == 0


def test_a_supervisor_has_the_next_simulation_and_keeps_nothing_of_the_last(site):  # noqa: F811
    executor = site.executor()
    had = []
    for name, script in (("one", "echo x; exit 3"), ("two", "true"), ("three", "exec sleep 1000")):
        executor.launch(site.spec(name, script), share())
        supervisor = executor._jobs[name].supervisor.pid
        site.until(executor, name, protocol.Started)
        had.append((supervisor, len(os.listdir(f"/proc/{supervisor}/fd"))))
        if name == "three":
            executor.stop(name, "enough")
        site.until(executor, name)
    assert len(set(had)) == 1, had
    assert executor.results["one"].reason == "exit code 3: x"
    assert executor.results["two"].reason == ""
    assert executor.results["three"].reason == "stopped: enough"


def test_a_program_is_asked_once_for_its_mpi_though_it_has_none(site, monkeypatch):  # noqa: F811
    asked = 'echo $0 >> {0}/asked\nexec {1} "$@"\n'
    (site.bin / "ldd").write_text("#!/bin/sh\n" + asked.format(site.directory, shutil.which("ldd")))
    (site.bin / "ldd").chmod(0o755)
    monkeypatch.setenv("PATH", f"{site.bin}:{os.environ['PATH']}")
    executor = site.executor()
    for name in ("one", "two"):
        executor.launch(site.spec(name, "true", application="lammps"), share())
        assert site.until(executor, name).code == 0
    assert len((site.directory / "asked").read_text().split()) == 1


def test_a_case_that_does_not_exist_is_said_so(site):  # noqa: F811
    executor = site.executor()
    executor.launch(site.spec("sim", "true", case="/nonexistent/case"), share())
    finished = site.until(executor, "sim")
    assert finished.code == 1
    assert finished.reason.startswith("copying the case failed")
    assert "No such file" in finished.reason


@pytest.mark.parametrize("relative", [False, True])
def test_a_case_that_is_a_link_is_copied_and_never_changed(site, relative):  # noqa: F811
    real = site.directory / "cases/version-3"
    real.mkdir(parents=True)
    (real / "input").write_text("as it was")
    (real / "mesh").symlink_to("input")
    link = site.directory / "cases/latest"
    link.symlink_to("version-3" if relative else real)
    executor = site.executor()
    script = "echo changed > input; touch new; readlink mesh"
    executor.launch(site.spec("sim", script, case=str(link)), share())
    assert site.until(executor, "sim").code == 0
    assert sorted(os.listdir(real)) == ["input", "mesh"]
    assert (real / "input").read_text() == "as it was"
    log = (site.directory / "run" / "sim" / "log").read_text()
    assert log.endswith("input\n"), "a link in the case is one in the copy"


def test_started_comes_after_prepare_and_before_finished(site):  # noqa: F811
    executor = site.executor()
    executor.launch(site.spec("sim", "true", "true"), share())
    site.until(executor, "sim")
    seen = (protocol.Sampled, protocol.Counted)
    kinds = [type(event) for event in site.events if not isinstance(event, seen)]
    assert kinds == [protocol.Started, protocol.Finished]
    assert isinstance(site.events[-1], protocol.Finished)


CONTROL = "application any; startTime 0; deltaT 1; endTime 2000;"


@pytest.mark.parametrize(
    ("options", "total"),
    [({"widths": (1, 2)}, 70), ({"widths": (1, 2), "iterations": 9}, 0), ({}, 0)],
)
def test_started_tells_the_iterations_of_the_prepared_case(site, options, total):  # noqa: F811
    (site.case / "system").mkdir()
    (site.case / "system" / "controlDict").write_text(CONTROL)
    asked = site.spec(
        "sim", "true", "sed -i s/2000/70/ system/controlDict", application="openfoam", **options
    )
    assert expected_iterations(asked) == asked.iterations, "it is not known before"
    executor = site.executor()
    executor.launch(asked, share())
    assert site.until(executor, "sim", protocol.Started).total == total
    site.until(executor, "sim")


@pytest.fixture
def no_library(monkeypatch):
    """A preloaded library that there is none of, which the loader tells and goes on without."""
    found = {mpi: f"/nonexistent/of-{mpi}.so" for mpi in LIBRARIES}
    monkeypatch.setattr(install_paths, "libraries", lambda: found)


LIBRARIES = {"openmpi": "libmpi.so.40", "mpich": "libmpi.so.12"}  # as all but Debian call it
PRELOADED = re.compile(r"of-(\w+)\.so")


def preloaded(site, spec, name, value):  # noqa: F811
    """Run it for either MPI, whose environment has another value; what each had preloaded."""
    executor = site.executor()
    found = {}
    for mpi in LIBRARIES:
        environment = {**dict(spec.environment), name: value(mpi)}
        changed = dataclasses.replace(spec, name=mpi, environment=(*environment.items(),))
        executor.launch(changed, share())
        assert site.until(executor, mpi).code == 0
        found[mpi] = {*PRELOADED.findall(site.log(mpi))}
    return found


@pytest.mark.usefixtures("no_library")
def test_whose_a_starter_is_goes_by_the_path_of_each_simulation(site):  # noqa: F811
    for mpi in LIBRARIES:
        place = site.directory / mpi
        place.mkdir()
        (place / f"mpirun.{mpi}").write_text(FAKE_MPIRUN)
        (place / f"mpirun.{mpi}").chmod(0o755)
        (place / "mpirun").symlink_to(f"mpirun.{mpi}")
    command = ("mpirun", "-np", "1", "sh", "-c", 'echo "$LD_PRELOAD"')
    spec = site.spec("sim", "", command=command)
    found = preloaded(site, spec, "PATH", lambda mpi: f"{site.directory / mpi}:/usr/bin:/bin")
    assert found == {mpi: {mpi} for mpi in LIBRARIES}


@pytest.mark.usefixtures("no_library")
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a compiler")
def test_a_program_in_its_case_is_looked_at_there_and_in_its_environment(site):  # noqa: F811
    """It loads an MPI by way of another library, of which there are two."""

    def build(*words):
        subprocess.run(["cc", "-Wl,--no-as-needed", *words], cwd=site.directory, check=True)

    (site.directory / "empty.c").touch()
    main = '#include <stdio.h>\n#include <stdlib.h>\nint main(void) { puts(getenv("LD_PRELOAD")); }'
    (site.directory / "main.c").write_text(main)
    for mpi, name in LIBRARIES.items():
        (site.directory / mpi).mkdir()
        shared = ("-shared", "-fPIC", "empty.c")
        build(*shared, f"-Wl,-soname,{name}", "-o", f"{mpi}/{name}")
        build(*shared, f"{mpi}/{name}", "-Wl,-soname,libmid.so", "-o", f"{mpi}/libmid.so")
    build("main.c", "openmpi/libmid.so", "-Wl,-rpath-link,openmpi", "-o", site.case / "solver")
    spec = site.spec("sim", "", command=("./solver",), application="openfoam")
    found = preloaded(site, spec, "LD_LIBRARY_PATH", lambda mpi: str(site.directory / mpi))
    assert found == {mpi: {mpi} for mpi in LIBRARIES}


HALTED = {
    "there is more to do": ("true", protocol.Cause.CHECKPOINTED),
    "there is not": ("sh -c 'exit 3'", protocol.Cause.DONE),
    "it fails by an error, as of Python's": ("sh -c 'exit 1'", protocol.Cause.CHECKPOINTED),
    "it is killed, as for want of memory": ("sh -c 'kill -9 $$'", protocol.Cause.CHECKPOINTED),
}
STEPS = "until [ -e stop ]; do sleep 0.02; done"


@pytest.mark.parametrize("how", HALTED)
def test_what_has_stopped_at_a_checkpoint_is_done_only_if_that_is_said(site, how):  # noqa: F811
    halted, cause = HALTED[how]
    executor = site.executor()
    executor.launch(site.spec("sim", STEPS, halt="touch stop", halted=halted), share())
    site.until(executor, "sim", protocol.Started)
    executor.checkpoint("sim")
    assert site.until(executor, "sim").cause is cause


SUPERVISOR = """
import os, time
from dovetail.mpi import supervisor

tell = supervisor.Supervisor._tell

def told(self, message):
    tell(self, message)
    if message["kind"] == "started":
        {}

supervisor.Supervisor._tell = told
supervisor.main()
"""  # with something in between that it has started its command, as it says, and that it has


def test_a_checkpoint_may_be_asked_for_as_it_starts(site, monkeypatch):  # noqa: F811
    early = """open("/proc/self/fd/0", "wb", 0).write(b"checkpoint\\n")"""
    monkeypatch.setattr(local_executor, "_RUN_SUPERVISOR", SUPERVISOR.format(early))
    executor = site.executor()
    halt = "sh -c 'echo $DOVETAIL_PID > stop'"
    alone = {"application": "openfoam", "halt": halt, "halted": "true"}
    executor.launch(site.spec("sim", f"echo $$; {STEPS}", **alone), share())
    assert site.until(executor, "sim").cause is protocol.Cause.CHECKPOINTED
    told = (site.directory / "run/sim/case/stop").read_text()
    assert told == site.log("sim"), "the process that is asked"


def test_one_that_is_suspended_by_signals_as_it_starts_stays_so(site, monkeypatch):  # noqa: F811
    monkeypatch.setattr(local_executor, "_RUN_SUPERVISOR", SUPERVISOR.format("time.sleep(0.3)"))
    executor = site.executor(place=cgroups.Group("", ""))
    # One process: a shell may wait for a child that was stopped before it became a program.
    executor.launch(site.spec("sim", "echo $$; exec sleep 1000"), share(suspended=True))
    site.until(executor, "sim", protocol.Started)
    pid = int(wait_for(lambda: site.log("sim")))

    def stopped():
        executor.observe(0.0)
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "T"

    wait_for(stopped)
    executor.resize({"sim": share(suspended=False)})
    wait_for(lambda: not stopped())


def test_a_finished_simulation_has_no_traces_before_the_run_ends(site):  # noqa: F811
    executor = site.executor()
    executor.launch(site.spec("sim", "setsid sleep 1000 &"), share())
    site.until(executor, "sim")
    assert os.listdir(executor.session) == ["owner"]
    assert sorted(os.listdir(site.directory / "run" / "sim")) == ["case", "log"]
    waiting = 1 + 2  # the warden, and supervisors of simulations to come
    assert sum("process" in trace for trace in site.traces()) == waiting


def test_a_simulation_can_run_again_from_a_fresh_copy(site):  # noqa: F811
    executor = site.executor()
    for _ in range(2):
        executor.launch(site.spec("sim", "grep delivered input && echo changed > input"), share())
        assert site.until(executor, "sim").reason == ""


def test_what_has_lost_its_main_thread_is_ended_and_can_run_again(site):  # noqa: F811
    executor = site.executor()
    program = shlex.join([sys.executable, "-c", local_runs.WITHOUT_MAIN_THREAD])
    script = f"{program} & until grep -q ') Z ' /proc/$!/stat; do sleep 0.05; done"
    for _ in range(2):
        executor.launch(site.spec("sim", script), share())
        assert site.until(executor, "sim").reason == ""
        alone = 1 + 2  # the warden, and supervisors of simulations to come
        assert len(processes.members(site.token)) == alone


def test_a_group_that_processes_held_for_too_long_is_made_anew(site):  # noqa: F811
    executor = site.executor()
    executor._group.child("sim").create()
    executor.launch(site.spec("sim", "true"), share())
    assert site.until(executor, "sim").reason == ""


def test_launching_does_not_wait_for_the_simulation(site):  # noqa: F811
    executor = site.executor()
    for number in range(5):
        executor.launch(site.spec(f"sim{number}", "sleep 1000"), share())
    assert not any(isinstance(event, protocol.Finished) for event in executor.observe(0.0))


STOPS = {
    "one that hangs is stopped": "sleep 1000",
    "one that ignores SIGTERM is stopped": "trap '' TERM; while :; do sleep 1000; done",
    "one that is paused by a signal is stopped": "kill -STOP $$",
}


@pytest.mark.parametrize("script", STOPS.values(), ids=STOPS.keys())
def test_stop_ends_it(site, script):  # noqa: F811
    executor = site.executor()
    executor.launch(site.spec("sim", script), share())
    site.until(executor, "sim", protocol.Started)
    executor.stop("sim", "no progress for 60 s")
    finished = site.until(executor, "sim")
    assert finished.code != 0
    assert finished.reason == "stopped: no progress for 60 s"


def test_stop_lets_it_end_by_itself_first(site):  # noqa: F811
    executor = site.executor()
    script = "trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done"
    executor.launch(site.spec("sim", script), share())
    site.until(executor, "sim", protocol.Started)
    wait_for(lambda: "ready" in site.log("sim"))
    executor.stop("sim", "enough")
    site.until(executor, "sim")
    assert "saved" in site.log("sim")


def test_stop_works_while_it_is_being_prepared(site):  # noqa: F811
    executor = site.executor()
    executor.launch(site.spec("sim", "true", "sleep 1000"), share())
    executor.stop("sim", "enough")
    assert site.until(executor, "sim").reason == "stopped: enough"
    assert not any(isinstance(event, protocol.Started) for event in site.events)


def test_a_flood_of_output_is_cut_in_the_middle(site):  # noqa: F811
    executor = site.executor(log_limit=2 << 20)
    executor.launch(site.spec("sim", "echo first; yes | head -c 30000000; echo last"), share())
    assert site.until(executor, "sim").code == 0
    log = site.log("sim")
    assert log.startswith("first\n")
    assert log.endswith("last\n")
    assert len(log) < (2 << 20) + 100
    assert "left out" in executor.results["sim"].trouble


def test_a_full_disk_does_not_end_the_simulation(site):  # noqa: F811
    (site.directory / "run" / "sim").mkdir(parents=True)
    os.symlink("/dev/full", site.directory / "run" / "sim" / "log")
    executor = site.executor()
    executor.launch(site.spec("sim", "yes | head -c 1000000; exit 5"), share())
    assert site.until(executor, "sim").code == 5
    assert "No space left" in executor.results["sim"].trouble


@pytest.fixture
def full(site):  # noqa: F811
    """A disk of 1 MB for the results, on which there is no room for a case; makes room there."""
    if os.getuid() != 0:
        pytest.skip("only root may limit a file system's size")
    small = site.directory / "run"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=True)
    (small / "other").write_bytes(bytes(900_000))
    (site.case / "large").write_bytes(bytes(200_000))
    yield (small / "other").unlink
    subprocess.run(["umount", "--lazy", small], check=True)


@pytest.mark.parametrize("end", ["room", "stop", "time"])
def test_a_case_waits_for_room_on_a_full_disk(site, full, end, monkeypatch):  # noqa: F811
    if end == "time":
        monkeypatch.setattr(local_executor, "ROOM", 3.0)
    executor = site.executor()
    script = f"cmp large {site.case}/large && ls -A .. && exit 5"
    executor.launch(site.spec("sim", script), share())
    delayed = site.until(executor, "sim", protocol.Delayed)
    assert delayed.why.startswith("there is no room for its case on the disk of ")
    if end == "room":
        full()
        assert site.until(executor, "sim").code == 5
        assert site.log("sim").split()[-2:] == ["case", "log"], "there is nothing else of ours"
    elif end == "stop":
        executor.stop("sim", "stopped")
        assert site.until(executor, "sim").cause is Cause.CANCELLED
    else:
        assert "No space left" in site.until(executor, "sim").reason
        executor.launch(site.spec("other", "true"), share())
        assert site.until(executor, "other").cause is Cause.LAUNCH_FAILED, "it waits no more"
    assert sum(isinstance(event, protocol.Delayed) for event in site.events) == 1


def test_iterations_come_from_the_log_where_ranks_tell_nothing(site, monkeypatch):  # noqa: F811
    rank = {
        "world": 0,
        "iteration_source": "none",
        "beat": -1,
        "pid": 1,
        "start_ticks": 1,
        "stamp": 9.0,
        "peak_rss": 7,
    }
    rank.update(cpu_s=1.0, useful_s=2.0, mpi_s=3.0, elapsed_s=5.0, waits=page.Waits(1, 2, None))
    both = [SimpleNamespace(rank=number, **rank) for number in (1, 0)]
    monkeypatch.setattr(page, "read_pages", lambda *_: both)
    executor = site.executor(origin=0.0)
    script = "echo Time = 1; printf 'Time ='; sleep 0.1; printf ' 2\\nno Time = 9\\nTime = 3\\n'"
    script = f'[ "$RANK" = 1 ] || {{ {script}; }}'
    executor.launch(site.spec("sim", script, "echo Time = 0", ranks=2), share())
    site.until(executor, "sim")
    samples = [event for event in site.events if isinstance(event, protocol.Sampled)]
    assert samples[-1].ranks.iterations == (3, 3)
    assert samples[-1].ranks.memory == (7, 7)
    assert samples[-1].ranks.stamp[0] > 0
    counted = [event.contention for event in site.events if isinstance(event, protocol.Counted)]
    assert (counted[-1].involuntary, counted[-1].queued) == ((2, 2), ()), "not told is not 0"


BURN = "i=0; while [ $i -lt 200000 ]; do i=$((i + 1)); done"


def told(text):
    """The CPU seconds that a shell's `times` says of itself and its children."""
    return sum(60 * int(m) + float(s) for m, s in re.findall(r"(\d+)m([\d.]+)s", text))


@pytest.mark.skipif(not cgroups.find().directories, reason="needs a control group")
def test_a_program_without_mpi_is_measured_by_its_cpu_time(site):  # noqa: F811
    executor = site.executor(origin=0.0)
    script = f"echo Time = 1; ({BURN}); ({BURN}) & wait; echo Time = 2; read x < go; times"
    prepare = f"{BURN}; {BURN}; times > prepared; mkfifo go"
    executor.launch(site.spec("sim", script, prepare), share())

    def seen():
        site.until(executor, "sim", protocol.Sampled)
        return site.events[-1].ranks.memory[0] > 1 << 20

    wait_for(seen)
    (site.directory / "run/sim/case/go").write_text("\n")
    site.until(executor, "sim")
    samples = [event.ranks for event in site.events if isinstance(event, protocol.Sampled)]
    assert samples[-1].iterations == (2,)
    assert samples[-1].stamp[0] > 0
    assert samples[-1].memory[0] > 1 << 20
    for values in ([one.cpu for one in samples], [one.useful for one in samples]):
        assert values == sorted(values)
        assert values[-1] > values[0]
    computed = told(site.log("sim"))
    prepared = told((site.directory / "run/sim/case/prepared").read_text())
    assert computed > 0.1
    assert computed - 0.05 < samples[-1].cpu[0] < computed + prepared


@pytest.mark.skipif(not cgroups.find().directories, reason="needs a control group")
def test_lines_that_come_quickly_are_all_counted_though_nothing_follows(site):  # noqa: F811
    executor = site.executor(origin=0.0)
    lines = "for n in 1 2 3 4 5 6 7; do echo Time = $n; sleep 0.03; done"
    executor.launch(site.spec("sim", f"{lines}; read x < go", "mkfifo go"), share())

    def seen():
        return site.until(executor, "sim", protocol.Sampled).ranks.iterations == (6,)

    wait_for(seen)
    (site.directory / "run/sim/case/go").write_text("\n")
    site.until(executor, "sim")
    samples = [event.ranks for event in site.events if isinstance(event, protocol.Sampled)]
    assert samples[-1].iterations == (7,)
    assert site.log("sim").count("Time = ") == 7


def test_a_process_that_took_over_an_id_is_not_moved(site, monkeypatch):  # noqa: F811
    other = os.getpid()
    rank = SimpleNamespace(rank=0, world=0, pid=other, start_ticks=1, beat=-1)
    rank.iteration_source = "none"
    for key in ("stamp", "peak_rss", "cpu_s", "useful_s", "mpi_s"):
        setattr(rank, key, 0)
    monkeypatch.setattr(page, "read_pages", lambda *_: [rank])
    with open("/proc/self/cgroup") as file:
        before = file.read()
    executor = site.executor()
    executor.launch(site.spec("sim", "sleep 1000", ranks_per_pod=1), share())
    site.until(executor, "sim", protocol.Sampled)
    with open("/proc/self/cgroup") as file:
        assert file.read() == before


def test_a_rank_killed_with_9_fails_the_simulation(site):  # noqa: F811
    executor = site.executor()
    script = 'echo $$ > "$DOVETAIL_TEST/pid.$RANK"; exec sleep 5$RANK'
    executor.launch(site.spec("sim", script, ranks=2), share())
    pids = [site.directory / f"pid.{rank}" for rank in (0, 1)]
    wait_for(lambda: all(pid.exists() and pid.read_text().strip() for pid in pids))
    for pid in pids:
        os.kill(int(pid.read_text()), signal.SIGKILL)
    finished = site.until(executor, "sim")
    assert (finished.code, finished.reason) == (137, "killed by signal 9: Killed")


def test_fewer_cpus_are_the_only_ones_used(site):  # noqa: F811
    executor = site.executor(cpus=1)
    assert executor.capacity().cpu == 1000
    executor.launch(site.spec("sim", "grep Cpus_allowed_list /proc/self/status"), share())
    site.until(executor, "sim")
    first = min(os.sched_getaffinity(0))
    assert f":\t{first}\n" in site.log("sim")


@pytest.mark.parametrize("cpus", [0, -1, 100000])
def test_an_absurd_number_of_cpus_is_refused(tmp_path, cpus):
    with pytest.raises(BadInput, match="cpus"):
        LocalExecutor(tmp_path, cpus=cpus)


def test_there_may_be_more_simulations_than_a_process_has_files_open(site):  # noqa: F811
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 12 + len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (few, before[1]))
    try:
        executor = site.executor()
        for n in range(6):
            executor.launch(site.spec(f"sim-{n}", "ulimit -n; exec sleep 1000"), share())
            site.until(executor, f"sim-{n}", protocol.Started)
        wait_for(lambda: site.log("sim-5") == f"{few}\n", "a simulation has the user's own limit")
        executor.close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (few, before[1])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_one_that_cannot_have_its_page_fails_alone(site, monkeypatch):  # noqa: F811
    def full(*_):
        raise page.PageError("control: [Errno 24] Too many open files")

    executor = site.executor()
    with monkeypatch.context() as patch:
        patch.setattr(Control, "create", full)
        executor.launch(site.spec("one", "true"), share())
    executor.launch(site.spec("two", "true"), share())
    assert "cannot be started: control: [Errno 24]" in site.until(executor, "one").reason
    assert site.until(executor, "two").code == 0


def test_one_that_nobody_could_listen_to_fails_alone(site):  # noqa: F811
    executor = site.executor()
    poll = executor._poll

    def register(*_):
        raise OSError(28, "No space left on device")

    executor._poll = SimpleNamespace(register=register, poll=poll.poll, closed=False)
    executor.launch(site.spec("one", "true"), share())
    executor._poll = poll
    assert "No space left on device" in site.until(executor, "one", limit=5.0).reason
    executor.launch(site.spec("two", "true"), share())
    assert site.until(executor, "two").code == 0


def test_closing_twice_is_safe(site):  # noqa: F811
    executor = site.executor()
    executor.launch(site.spec("sim", "sleep 1000"), share())
    executor.close()
    executor.close()
    assert executor.results["sim"].reason == "stopped: the run ended"


def test_what_begins_as_the_run_ends_has_no_supervisor_made_for_others(site):  # noqa: F811
    executor = site.executor()
    executor.launch(site.spec("sim", "sleep 1000"), share())
    said = executor._jobs["sim"].supervisor.stdout
    assert select.select([said], [], [], LIMIT)[0], "that it began, and nobody has listened"
    executor.close()
    site.assert_clean()
