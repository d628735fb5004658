# SPDX-License-Identifier: LGPL-3.0-or-later
"""Whatever happens to a run, nothing is left behind and every simulation accounted for."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from pathlib import Path

import pytest
from dovetail.host import processes
from dovetail.host.session import SESSION_ROOT
from dovetail.run.loop import Signals
from support.local_runs import wait_for
from support.other_users import WHY_NOT, needs_nobody
from support.run_command import NOBODY, site  # noqa: F401

pytestmark = [pytest.mark.unit, pytest.mark.slow]

HANG = 'touch "$DOVETAIL_TEST/reached"; trap "" TERM; while :; do sleep 1000; done'
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1]
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


def three(site, phase):  # noqa: F811
    """A plan: one simulation that ends, one that hangs in a phase, and one after it."""
    hang = ("true", HANG) if phase == "prepare" else (HANG,)
    return site.plan(
        site.shell("echo once >> ../../ended", name="first"),
        site.shell(*hang, name="second"),
        site.shell("echo once >> ../../ended", name="third"),
        cpus=1,  # so that they run one at a time
    )


def reached(site, plan, *words):  # noqa: F811
    """Start a run of `three` and wait until the second hangs."""
    run = site.start(plan, "-o", "out", *words)
    wait_for(lambda: (site.directory / "reached").exists(), site.errors)
    return run


@pytest.mark.parametrize("phase", ["prepare", "starting"])
@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_in_order(site, phase, number):  # noqa: F811
    run = reached(site, three(site, phase))
    code, _, errors = site.end(run, number)
    assert code == 130
    assert errors.endswith(f"dovetail: interrupted by {number.name}\n")
    assert site.states() == {"first": "done", "second": "failed", "third": "not started"}
    second = site.summary()["simulations"][1]
    assert second["reason"] == f"interrupted by {number.name}"


def test_a_terminal_that_is_closed_says_so_twice_and_means_once():
    with Signals() as signals:
        signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)
    assert (signals.caught, signals.count) == ("SIGHUP", 1)


def test_json_is_printed_after_a_signal_too(site):  # noqa: F811
    run = reached(site, three(site, "starting"), "--json")
    code, output, _ = site.end(run, signal.SIGINT)
    assert (code, json.loads(output)) == (130, site.summary())


@pytest.mark.parametrize("phase", ["prepare", "starting"])
def test_a_second_signal_does_not_wait_for_the_grace(site, phase):  # noqa: F811
    run = reached(site, three(site, phase))
    os.killpg(run.pid, signal.SIGINT)
    # The one that hangs ignores SIGTERM, so that the run now waits for the grace to end.
    site.until(lambda log: any(r["type"] == "Interrupted" for r in log))
    code, _, _ = site.end(run, signal.SIGINT)
    assert code == 130
    assert site.states() == {"first": "done", "second": "failed", "third": "not started"}


@pytest.mark.parametrize("count", [1, 2])
def test_signals_before_anything_runs_start_nothing(site, count):  # noqa: F811
    plan = site.plan(site.shell("touch ../../ran", count=2))
    code, _, _ = site.run(plan, "out", command=(sys.executable, "-c", BEFORE, str(count)))
    assert code == 130
    assert set(site.states().values()) == {"not started"}
    assert not (site.out / "ran").exists()


BEFORE = """
import os, signal, sys
from dovetail.cli import main
from dovetail.run import run
Live = run.Live
def late(**options):
    for _ in range(int(sys.argv[1])):
        os.kill(os.getpid(), signal.SIGINT)
    return Live(**options)
run.Live = late
sys.exit(main.main(["run", sys.argv[2], "-o", sys.argv[3]]))
"""

REPORT = """
import os, signal, sys
from dovetail.cli import main
from dovetail.report import html
publish = html.publish
def late(*words):
    os.kill(os.getpid(), getattr(signal, sys.argv[1]))
    return publish(*words)
html.publish = late
sys.exit(main.main(["run", sys.argv[2], "-o", sys.argv[3]]))
"""


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_during_the_report_leaves_a_whole_report(site, number):  # noqa: F811
    plan = site.plan(site.shell("true"))
    code, _, _ = site.run(plan, "out", command=(sys.executable, "-c", REPORT, number.name))
    assert code == 130
    assert site.states() == {"sim": "done"}
    assert (site.out / "report.html").read_text().rstrip().endswith("</html>")


def test_an_interrupted_run_says_that_its_report_could_not_be_written(site):  # noqa: F811
    run = reached(site, three(site, "starting"))
    (site.out / "report.html").mkdir()
    code, _, errors = site.end(run, signal.SIGINT)
    assert code == 130
    assert errors.endswith(
        "dovetail: out/report.html: not a file in an existing directory\n"
        "dovetail: interrupted by SIGINT\n"
    )


def resumed(site, plan, restarts):  # noqa: F811
    """Resume a run of `three` to its end and check that nothing is counted twice."""
    (site.directory / "reached").unlink(missing_ok=True)
    code, _, errors = site.run(plan, "-o", "out", "--resume")
    assert code == 0, errors
    assert set(site.states().values()) == {"done"}
    assert (site.out / "ended").read_text() == "once\n" * 3
    found = site.summary()
    assert {one["name"]: one["restarts"] for one in found["simulations"]} == restarts
    assert (found["complete"], found["interrupted"]) == (True, "")


ONCE = (
    'if [ ! -e ../../hung ]; then touch ../../hung "$DOVETAIL_TEST/reached"; '
    'trap "" TERM; while :; do sleep 1000; done; fi'
)


def three_once(site, phase):  # noqa: F811
    """Like `three`, but the second hangs only the first time."""
    end = "echo once >> ../../ended"
    prepare = (ONCE,) if phase == "prepare" else ()
    script = end if phase == "prepare" else f"{ONCE}; {end}"
    return site.plan(
        site.shell(end, name="first"),
        site.shell(script, *prepare, name="second"),
        site.shell(end, name="third"),
        cpus=1,  # so that they run one at a time
    )


@pytest.mark.parametrize("phase", ["prepare", "starting"])
@pytest.mark.parametrize("user", ["root", "nobody"])
def test_after_kill_9_the_run_is_resumed(site, phase, user):  # noqa: F811
    if user == "nobody":
        become_nobody(site)
    plan = three_once(site, phase)
    run = reached(site, plan)
    site.end(run, signal.SIGKILL)
    resumed(site, plan, {"first": 0, "second": 1, "third": 0})


def become_nobody(site):  # noqa: F811
    if WHY_NOT:
        pytest.skip(WHY_NOT)
    for path in (site.directory, site.temporary, site.case):
        os.chown(path, 65534, 65534)
    site.prefix = NOBODY


def test_after_kill_9_there_is_nothing_left(site):  # noqa: F811
    run = reached(site, three(site, "starting"))
    assert site.traces()
    site.end(run, signal.SIGKILL)
    site.assert_clean()
    assert not (site.out / "summary.json").exists()


@pytest.mark.parametrize("torn", ['{"seq":99', '{"seq":99,"kind":"event"}'])
def test_a_torn_last_line_is_no_obstacle(site, torn):  # noqa: F811
    plan = three_once(site, "starting")
    site.end(reached(site, plan), signal.SIGKILL)
    with (site.out / "events.jsonl").open("a") as log:
        log.write(torn)
    resumed(site, plan, {"first": 0, "second": 1, "third": 0})


def test_a_run_killed_again_and_again_is_resumed(site):  # noqa: F811
    plan = three(site, "starting")
    for _ in range(3):
        words = ["--resume"] if site.out.exists() else []
        site.end(reached(site, plan, *words), signal.SIGKILL)
        (site.directory / "reached").unlink()
    code, _, _ = site.end(reached(site, plan, "--resume"), signal.SIGTERM)
    assert code == 130
    assert site.states() == {"first": "done", "second": "failed", "third": "not started"}
    assert [one["restarts"] for one in site.summary()["simulations"]] == [0, 3, 0]
    assert (site.out / "ended").read_text() == "once\n"


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupted_run_is_resumed(site, number):  # noqa: F811
    plan = three_once(site, "starting")
    assert site.end(reached(site, plan), number)[0] == 130
    resumed(site, plan, {"first": 0, "second": 1, "third": 0})


def test_a_run_resumed_at_once_waits_for_the_dead_ones_end(site):  # noqa: F811
    """The simulation writes until it is killed; no line of it may be in the new one's case."""
    write = "while :; do echo old >> written; done"
    plan = site.plan(site.shell(f"[ -e ../../again ] || {{ touch ../../again; {write}; }}"))
    run = site.start(plan, "-o", "out")
    wait_for(lambda: (site.out / "sim" / "case" / "written").exists())
    site.end(run, signal.SIGKILL)
    assert site.run(plan, "-o", "out", "--resume")[0] == 0
    assert site.states() == {"sim": "done"}
    assert not (site.out / "sim" / "case" / "written").exists()


@needs_root
def test_a_full_disk_is_survived_and_told(site):  # noqa: F811
    """Its own small file system; what is not written is in the summary on standard output."""
    site.out.mkdir()
    fill = "cat /dev/zero > ../../fill"
    plan = site.plan(
        site.shell("true", name="before"),
        site.shell(fill, name="fills"),
        site.shell("true", name="after", count=20),  # more to log than what is left of a page
        cpus=1,  # so that they run one at a time
    )
    code = "from dovetail.cli import main; from dovetail.executors.local import executor; "
    code += "executor.ROOM = 3.0; main.entry()"  # seconds, for which cases wait
    words = shlex.join((sys.executable, "-c", code, "run", str(plan), "-o", "out", "--json"))
    script = f"mount -t tmpfs -o size=1m dovetail-test {site.out} && exec {words}"
    code, output, errors = site.run(script, command=("unshare", "--mount", "sh", "-c"))
    assert code == 1
    states = {one["name"]: one["state"] for one in json.loads(output)["simulations"]}
    assert states.pop("before") == "done"
    assert set(states.values()) == {"failed"}
    assert "the event log is kept in memory" in errors
    assert errors.rstrip().endswith("No space left on device")


@needs_root
def test_a_full_disk_at_the_start_is_told_before_anything_runs(site):  # noqa: F811
    site.out.mkdir()
    plan = site.plan(site.shell("touch ../../ran"))
    words = shlex.join((sys.executable, "-m", "dovetail", "run", str(plan), "-o", "out"))
    mount = f"mount -t tmpfs -o size=64k dovetail-test {site.out} && cat /dev/zero > out/fill"
    script = f"{mount}; {words}; code=$?; ls -A out; exit $code"
    code, output, errors = site.run(script, command=("unshare", "--mount", "sh", "-c"))
    assert (code, output) == (1, "fill\n")
    assert "dovetail: the event log cannot be written" in errors
    assert "No space left" in errors


@needs_root
def test_a_read_only_file_system_is_called_so(site):  # noqa: F811
    site.out.mkdir()
    words = shlex.join((sys.executable, "-m", "dovetail", "run", str(site.plan({})), "-o", "out"))
    script = f"mount -t tmpfs -o ro dovetail-test {site.out} && exec {words}"
    code, _, errors = site.run(script, command=("unshare", "--mount", "sh", "-c"))
    assert (code, errors) == (2, "dovetail: out: cannot be used: Read-only file system\n")


@needs_nobody
def test_an_ordinary_user_without_control_groups_is_told_and_served(site):  # noqa: F811
    become_nobody(site)
    plan = site.plan(site.shell("exit 1", name="bad"), site.shell("true", name="good"))
    code, _, errors = site.run(plan, "-o", "out")
    assert code == 1
    assert site.states() == {"bad": "failed", "good": "done"}
    assert "no control group can be made here: simulations run without CPU weights" in errors


def test_a_session_whose_process_id_was_given_to_another_is_removed(site):  # noqa: F811
    """Its owner seems to live: our own id, and in one of the two even our own start time."""
    for name, ticks in (("reused", 1), ("unlocked", processes.start_ticks(os.getpid()))):
        session = Path(SESSION_ROOT, f"dovetail-{os.getuid()}-{os.getpid()}{name}")
        session.mkdir(0o700)
        site.sessions.add(session.name)
        owner = {"pid": os.getpid(), "start_ticks": ticks}
        (session / "owner").write_text(json.dumps({**owner, "weight": "", "control": ""}))
    assert site.run(site.plan(site.shell("true")), "-o", "out")[0] == 0
    assert site.states() == {"sim": "done"}


@pytest.mark.parametrize("word", ["dovetail.mpi.supervisor", "sweep_session"])
def test_a_helper_killed_with_9_does_no_harm(site, word):  # noqa: F811
    run = reached(site, three(site, "starting"))
    for pid in site.processes(word):
        os.kill(pid, signal.SIGKILL)
    if word == "dovetail.mpi.supervisor":
        site.until(lambda log: any(r["type"] == "Finished" and r["code"] for r in log))
        assert site.end(run)[0] == 1
        assert site.states() == {"first": "done", "second": "failed", "third": "done"}
        assert "its supervisor failed" in site.summary()["simulations"][1]["reason"]
    else:
        assert site.end(run, signal.SIGINT)[0] == 130
        assert site.states() == {"first": "done", "second": "failed", "third": "not started"}
