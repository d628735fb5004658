# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whatever dies, nothing of a simulation is left behind, and nothing else is harmed."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from dovetail.core import protocol
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.executors.local.executor import LocalExecutor
from dovetail.host import cgroups, processes, session
from dovetail.host.session import (
    SESSION_ROOT,
    create_session,
    remove_tree,
    sweep_session,
    sweep_sessions,
    temporary_session,
)
from support.local_runs import Site, share, site, wait_for  # noqa: F401
from support.other_users import let_in, needs_nobody

pytestmark = [pytest.mark.unit, pytest.mark.slow]

PHASES = ("idle", "starting", "prepare", "running", "suspended")


def controller(site, phase, *prefix):  # noqa: F811
    """A controlling process of its own whose simulation has come to `phase`."""
    driver = Path(__file__).parents[1] / "support" / "local_runs.py"
    started = subprocess.Popen(
        [*prefix, sys.executable, driver, site.directory, phase],
        stdout=subprocess.PIPE,
        start_new_session=True,
        text=True,
    )
    site.sessions.append(started.stdout.readline().strip())
    assert site.sessions[-1].startswith("dovetail-")
    return started


def end(driver, number):
    os.killpg(driver.pid, number)
    driver.wait()
    driver.stdout.close()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_all_ends_when_the_controlling_process_dies(site, phase, number):  # noqa: F811
    driver = controller(site, phase)
    assert site.traces()
    end(driver, number)
    site.assert_clean()


def helpers(site, word=b"dovetail.mpi.supervisor"):  # noqa: F811
    """The test's processes of which `word` is in the command line: its supervisors."""
    found = []
    for pid in processes.members(site.token):
        with contextlib.suppress(OSError):  # it has just ended
            found += [pid] if word in Path(f"/proc/{pid}/cmdline").read_bytes() else []
    return found


@pytest.mark.parametrize("groups", [True, False])
def test_a_supervisor_killed_with_9_is_noticed(site, groups):  # noqa: F811
    executor = site.executor(place=None if groups else cgroups.Group("", ""))
    executor.launch(site.spec("sim", "echo up; setsid sleep 1000 & sleep 1000"), share())
    site.until(executor, "sim", protocol.Started)
    wait_for(lambda: "up" in site.log("sim"))
    for pid in helpers(site):
        os.kill(pid, signal.SIGKILL)
    finished = site.until(executor, "sim")
    assert finished.code == 137
    assert "supervisor failed: ended by signal 9" in finished.reason
    assert len(processes.members(site.token)) == 1  # the warden
    assert os.listdir(executor.session) == ["owner"]


def test_a_run_goes_on_after_its_session_was_removed(site):  # noqa: F811
    """As by systemd-logind, when the last of its user's logins on the machine ends."""
    executor = site.executor()
    first = "echo up; while [ ! -e $DOVETAIL_TEST/go ]; do sleep 0.05; done; exit 3"
    executor.launch(site.spec("first", first), share())
    site.until(executor, "first", protocol.Started)
    wait_for(lambda: "up" in site.log("first"))
    session.remove_tree(executor.session)
    executor.launch(site.spec("second", "true"), share())
    assert site.until(executor, "second").code == 0
    assert sweep_sessions() == [], "it is this run's still"
    (site.directory / "go").touch()
    finished = site.until(executor, "first")
    assert (finished.code, finished.cause) == (3, protocol.Cause.FAILED)


def test_a_supervisor_that_hangs_is_not_waited_for_for_ever(site, monkeypatch):  # noqa: F811
    monkeypatch.setattr("dovetail.executors.local.executor._PATIENCE", 0.5)
    executor = site.executor()
    executor.launch(site.spec("sim", "echo up; sleep 1000"), share())
    site.until(executor, "sim", protocol.Started)
    wait_for(lambda: "up" in site.log("sim"))
    for pid in helpers(site):
        os.kill(pid, signal.SIGSTOP)
    executor.stop("sim", "enough")
    assert site.until(executor, "sim").reason == "stopped: enough"


def test_a_supervisor_that_cannot_start_fails_the_simulation(site, monkeypatch):  # noqa: F811
    monkeypatch.setattr(
        "dovetail.executors.local.executor._RUN_SUPERVISOR", "raise SystemExit('no luck')"
    )
    executor = site.executor()
    executor.launch(site.spec("sim", "true"), share())
    assert site.until(executor, "sim").reason == "its supervisor failed: exit code 1: no luck"


def test_of_a_supervisor_that_fails_the_last_words_are_told(site, monkeypatch):  # noqa: F811
    text = "import sys; print('one', file=sys.stderr); print('two', file=sys.stderr); sys.exit(3)"
    monkeypatch.setattr("dovetail.executors.local.executor._RUN_SUPERVISOR", text)
    executor = site.executor()
    executor.launch(site.spec("sim", "true"), share())
    assert site.until(executor, "sim").reason == "its supervisor failed: exit code 3: two"


def test_without_a_temporary_directory_nothing_is_made(tmp_path, monkeypatch):
    def none():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in []")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    place = cgroups.Group(str(tmp_path), str(tmp_path))
    with pytest.raises(WorkFailed, match="cannot make a session: No usable temporary directory"):
        LocalExecutor(tmp_path / "out", place=place)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("phase", ["running", "suspended"])
def test_the_next_run_sweeps_what_a_dead_run_could_not(site, phase):  # noqa: F811
    driver = controller(site, phase)
    for pid in helpers(site):
        os.kill(pid, signal.SIGSTOP)  # so that it cannot clean up between the kills
    for pid in helpers(site, b"sweep_session"):
        os.kill(pid, signal.SIGKILL)
    end(driver, signal.SIGKILL)
    for pid in helpers(site):
        os.kill(pid, signal.SIGKILL)
    site.executor().close()  # a run of another test, which sweeps too, may have been first
    site.assert_clean()


def test_two_runs_at_once_leave_each_other_alone(site):  # noqa: F811
    driver = controller(site, "running")
    executor = site.executor()
    assert site.sessions[0] not in executor.swept
    executor.launch(site.spec("sim2", "exit 0"), share())
    assert site.until(executor, "sim2").code == 0
    executor.close()
    assert driver.poll() is None
    assert any("process" in trace for trace in site.traces())
    assert os.path.isdir(f"{SESSION_ROOT}/{site.sessions[0]}/sim")
    end(driver, signal.SIGKILL)


@pytest.mark.parametrize(("age", "left"), [(0, True), (3600, False), (-3600, False)])
def test_a_session_without_an_owner_is_swept_unless_it_is_new(tmp_path, age, left):
    """Whose run died while it made it; one of later than now is of before the clock was set."""
    session = tmp_path / f"dovetail-{os.getuid()}-half"
    session.mkdir(mode=0o700)
    os.utime(session, (time.time() - age,) * 2)
    assert sweep_sessions(str(tmp_path)) == ([] if left else [session.name])
    assert session.exists() == left


def test_a_dead_run_is_swept_though_its_process_id_lives_on(tmp_path):
    session, lock = create_session("reused", cgroups.Group("", ""), "", str(tmp_path))
    record = json.loads(Path(session, "owner").read_text())
    assert record["pid"] == os.getpid()  # which lives, and after the close no longer owns it
    assert sweep_sessions(str(tmp_path)) == []
    os.close(lock)
    assert sweep_sessions(str(tmp_path)) == [os.path.basename(session)]
    assert os.listdir(tmp_path) == []


def test_what_a_launcher_writes_at_its_end_goes_too(tmp_path, monkeypatch):
    root, temporary = tmp_path / "shm", tmp_path / f"dovetail-{os.getuid()}-late"
    for made in (root, temporary):
        made.mkdir()
    _, lock = create_session("late", cgroups.Group("", ""), str(temporary), str(root))
    os.close(lock)
    removed = []

    def remove(top):
        """The launcher of this test comes again right after the first removal, and not later."""
        remove_tree(top)
        if not removed:
            (temporary / "again").mkdir(parents=True)
        removed.append(top)

    monkeypatch.setattr(session, "remove_tree", remove)
    assert sweep_sessions(str(root)) == [temporary.name]
    assert (os.listdir(root), temporary.exists()) == ([], False)


def test_a_signal_for_a_dead_process_never_reaches_its_successor():
    child = subprocess.Popen(["sleep", "1000"])
    try:
        ticks = processes.start_ticks(child.pid)
        assert not processes.send(child.pid, ticks - 1, signal.SIGKILL)
        assert processes.alive(child.pid, ticks)
        assert not processes.alive(child.pid, ticks + 1)
        assert not processes.alive(child.pid, 0)
        assert processes.send(child.pid, ticks, signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    assert processes.start_ticks(child.pid) == 0


def test_a_session_is_private_and_locked_and_ends_with_its_processes():
    with temporary_session(f"test-{os.getpid()}") as session:
        assert os.stat(session).st_mode & 0o777 == 0o700
        assert not sweep_session(session)
        os.mkdir(session + "/sim")
        child = subprocess.Popen(["sleep", "1000"], env={"DOVETAIL_DIR": session + "/sim"})
        with pytest.raises(BadInput, match="exists"), temporary_session(f"test-{os.getpid()}"):
            pass
    assert child.wait() == -signal.SIGKILL
    assert not os.path.exists(session)


FOREIGN = {
    "a record that is damaged": b"{",
    "a record that lists what is not the run's own": None,
}


@pytest.mark.parametrize("record", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_sweep_removes_nothing_foreign(tmp_path, record):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "data").touch()
    root = tmp_path / "root"
    root.mkdir()
    session = root / f"dovetail-{os.getuid()}-dead"
    session.mkdir()
    if record is None:
        place = {"weight": str(precious), "control": str(precious), "temporary": str(precious)}
        record = json.dumps(place).encode()
    (session / "owner").write_bytes(record)
    (session / "link").symlink_to(precious)
    (root / f"dovetail-{os.getuid()}-link").symlink_to(precious)
    sweep_sessions(str(root))
    assert (precious / "data").exists()
    assert not os.path.exists(session)


@needs_nobody
@pytest.mark.parametrize("phase", PHASES)
def test_an_ordinary_user_without_control_groups_leaves_nothing(site, phase):  # noqa: F811
    let_in(site.directory)
    os.chown(site.directory, 65534, 65534)
    nobody = ("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups")
    driver = controller(site, phase, *nobody)
    name = site.sessions[0]
    assert name.startswith("dovetail-65534-")
    assert not any("cgroup" in trace for trace in site.traces())
    end(driver, signal.SIGKILL)
    words = [*nobody, sys.executable, "-c"]
    look = f"from dovetail.host import processes; print(processes.members({site.token!r}))"
    wait_for(lambda: subprocess.check_output([*words, look], text=True).strip() == "{}")
