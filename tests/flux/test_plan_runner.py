# SPDX-License-Identifier: LGPL-3.0-or-later
"""The runs of the control slice, as real child processes; the module is a list of what it heard."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from dovetail.flux import command, format, plan_runner
from dovetail.flux.instance.messages import QueuedPlan
from dovetail.flux.instance.run import Run
from dovetail.flux.plan_runner import COPY, EVENTS, LOG, SUMMARY, TIMEOUT, PlanRunner
from dovetail.host.file_tail import Tail
from support.local_runs import FAKE_MPIRUN

pytestmark = pytest.mark.unit


@pytest.fixture
def heard():
    return []


@pytest.fixture
def runner(heard):
    def watch(process, ended):
        process.wait()
        ended()

    with selectors.DefaultSelector() as selector:
        yield PlanRunner(lambda **news: heard.append(news), watch, selector, lambda *launch: None)


def order(folder, **more):
    return QueuedPlan(
        1, str(folder / "plan.yaml"), str(folder / "out"), str(folder), "local", **more
    )


def test_a_run_reads_its_plan_as_it_was_submitted(runner, heard, tmp_path):
    (tmp_path / "plan.yaml").write_text("edited: since\n")
    runner.queue(order(tmp_path, content="# as submitted\n3\n"))
    runner.start(1, "")
    [news] = heard
    assert (news["run"], news["code"]) == (1, 2)
    assert f"{tmp_path}/plan.yaml:1: a plan is a mapping" in news["why"], "the user's own path"
    assert (tmp_path / "out" / COPY).read_text() == "# as submitted\n3\n"
    assert (tmp_path / "out" / LOG).read_text().strip() == news["why"]


@pytest.fixture
def private():
    """As slices are."""
    before = os.umask(0o077)
    yield
    os.umask(before)


def test_what_a_run_writes_is_for_whom_the_user_s_umask_lets_read_it(
    runner, heard, tmp_path, private
):
    (tmp_path / "case").mkdir()
    entry = "{name: a, case: case, ranks: 1, command: touch result}"
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    (tmp_path / "mpirun").write_text(FAKE_MPIRUN)
    (tmp_path / "mpirun").chmod(0o755)
    content = f"simulations: [{entry}]\n"
    runner.queue(order(tmp_path, content=content, umask=0o027, environment=path))
    runner.start(1, "")
    assert [news["code"] for news in heard if "run" in news] == [0]
    found = {one.name: one.stat().st_mode & 0o777 for one in (tmp_path / "out").rglob("*")}
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o750
    files = (COPY, LOG, EVENTS, SUMMARY, "report.html", "result", "log")
    assert [f"{found[name]:o}" for name in files] == ["640"] * len(files)
    assert os.umask(0o077) == 0o077, "we ourselves stay as we were"


def test_a_run_has_the_umask_of_who_submits_it(private):
    assert command.umask() == command.umask() == 0o077


def test_a_run_serves_its_metrics_where_it_was_submitted_for(runner, heard, tmp_path):
    (tmp_path / "case").mkdir()
    entry = "{name: a, case: case, ranks: 1, command: sh -c true}"
    where = f"unix:{tmp_path}/none/socket"
    runner.queue(order(tmp_path, content=f"simulations: [{entry}]\n", metrics=where))
    runner.start(1, "")
    [news] = heard
    assert news["why"].startswith(f"dovetail: --metrics {where}: cannot listen there")
    assert news["code"] == 2


def test_a_run_that_a_signal_killed_says_so(heard, tmp_path):
    def watch(process, ended):
        process.kill()
        process.wait()
        ended()

    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOG).write_text("1 of 2 simulations done\n")
    with selectors.DefaultSelector() as selector:
        runner = PlanRunner(lambda **n: heard.append(n), watch, selector, lambda *launch: None)
        runner.queue(order(tmp_path))
        runner.start(1, "")
    [news] = heard
    assert (news["code"], news["why"]) == (137, "killed by signal 9")
    assert " 137  " in format.runs([runner.all[1].plain()])


CODES = {  # of a run that was interrupted as it wrote its report: its states, code and reason
    "all are done": (["done", "done"], 130, ("done", 0, "")),
    "one is not": (["done", "failed"], 130, ("failed", 130, "not all of its simulations are done")),
    "its page could not be written": (["done", "done"], 1, ("failed", 1, "report.html: no room")),
}


@pytest.mark.parametrize("what", CODES)
def test_a_run_of_which_all_simulations_are_done_is_done(
    runner, heard, tmp_path, monkeypatch, what
):
    """By a signal that comes as it writes its report it was interrupted, and nothing else was."""
    states, code, (state, told, why) = CODES[what]
    summary = json.dumps({"simulations": [{"state": one} for one in states]})
    script = f"echo '{summary}' >out/{SUMMARY}; echo report.html: no room; exit {code}"
    monkeypatch.setattr(plan_runner, "dovetail_command", lambda _: ["sh", "-c", script])
    runner.queue(order(tmp_path))
    runner.start(1, "")
    assert heard == [{"run": 1, "code": told, "why": why, "reported": True}]
    assert runner.all[1].state.value == state


def test_a_run_that_is_done_before_it_notices_that_it_is_cancelled_is_done():
    run = Run(1, "plan.yaml", "/o")
    run.start()
    run.cancel()
    run.end(0, "")
    assert (run.state.value, run.reason) == ("done", "")


@pytest.mark.parametrize("written", [True, False])
def test_of_a_run_that_ends_with_its_slice_the_report_is_told_and_not_the_end(
    runner, heard, tmp_path, written
):
    """Else its end might be told before what it comes of, the slice's."""
    runner.queue(order(tmp_path))
    runner.last_news()
    assert not heard, "it waits"
    runner.all[1].start()
    runner.number, runner.summary = 1, tmp_path / SUMMARY
    with subprocess.Popen(["sleep", "1000"]) as runner.running:
        runner.end()
    if written:
        runner.summary.write_text("{}")
    runner.last_news()
    assert heard == [{"report": 1}] * written


def test_who_cancels_a_run_again_changes_nothing(runner, heard, tmp_path):
    signals = []
    runner.queue(order(tmp_path))
    runner.all[1].start()
    runner.number, runner.running = 1, SimpleNamespace(send_signal=signals.append)
    for _ in range(3):
        runner.cancel(1)
    assert signals == [signal.SIGINT]


def test_what_a_message_cannot_hold_is_left_out_of_the_environment_and_named(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", {"A": "caf\xe9", "GREETING": "caf\udce9", "FLUX_URI": "x"})
    assert command.environment() == {"A": "caf\xe9"}
    assert "'GREETING' is left out" in capsys.readouterr().err


def test_a_plan_that_a_job_submits_has_nothing_of_that_jobs_own(monkeypatch):
    """A program of MPICH takes the descriptor for its way to others, and fails without it."""
    job = {"FLUX_JOB_TMPDIR": "/tmp/j", "OMPI_MCA_btl_vader_backing_directory": "/tmp/j"}
    rank = {"PMI_RANK": "0", "PMI_SIZE": "1", "PMI_FD": "18"}
    users = {"OMPI_MCA_btl": "self,vader", "TMPDIR": "/scratch"}
    monkeypatch.setattr(os, "environ", {**job, **rank, **users})
    assert command.environment() == users


def test_a_plan_that_is_refused_for_its_folder_leaves_no_directory(monkeypatch, tmp_path, capsys):
    place = tmp_path / "caf\udce9"
    (place / "case").mkdir(parents=True)
    entry = "{name: a, case: case, ranks: 1, command: sh -c true}"
    (place / "plan.yaml").write_text(f"simulations: [{entry}]\n")
    monkeypatch.chdir(place)
    monkeypatch.setattr(command.client, "call", lambda topic, payload=None: {"runs": []})
    assert command.main(["submit", "plan.yaml"]) == 2
    assert "is no text in UTF-8; rename its folder" in capsys.readouterr().err
    assert sorted(os.listdir()) == ["case", "plan.yaml"]


@pytest.mark.parametrize("begun", [False, True])
def test_a_submission_that_is_interrupted_leaves_no_empty_directory(
    monkeypatch, tmp_path, capsys, begun
):
    def call(topic, payload=None):
        if topic == "dovetail.status":
            return {"runs": []}
        if begun:  # its run was quicker
            (tmp_path / "dovetail-out-1" / LOG).touch()
        raise KeyboardInterrupt

    (tmp_path / "case").mkdir()
    entry = "{name: a, case: case, ranks: 1, command: sh -c true}"
    (tmp_path / "plan.yaml").write_text(f"simulations: [{entry}]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.client, "call", call)
    assert command.main(["submit", "plan.yaml"]) == 130
    assert capsys.readouterr().err == "flux dovetail: interrupted\n"
    assert (tmp_path / "dovetail-out-1").exists() is begun


def test_a_plan_whose_output_is_a_file_is_refused_before_it_is_sent(monkeypatch, tmp_path, capsys):
    (tmp_path / "case").mkdir()
    (tmp_path / "file").touch()
    entry = "{name: a, case: case, ranks: 1, command: sh -c true}"
    (tmp_path / "plan.yaml").write_text(f"simulations: [{entry}]\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command.client, "call", lambda topic, payload=None: {"run": 1})
    assert command.main(["submit", "-o", "file", "plan.yaml"]) == 2
    assert capsys.readouterr().err == "flux dovetail: -o file is not a directory\n"
    assert command.main(["submit", "-o", "", "plan.yaml"]) == 2
    assert capsys.readouterr().err.startswith("flux dovetail: -o '': names nothing; ")


def test_events_that_cannot_be_read_end_nobody_who_follows_them(tmp_path):
    with contextlib.closing(Tail(tmp_path / "events.jsonl")) as tail:
        (tmp_path / "events.jsonl").mkdir()  # where reading is an error
        assert tail.read() == b""


def test_the_copy_of_an_earlier_run_in_the_same_directory_stays(runner, heard, tmp_path):
    (tmp_path / "case").mkdir()
    out = tmp_path / "out"
    out.mkdir()
    (out / COPY).write_text("of before\n")
    (out / EVENTS).write_text(json.dumps({"type": "Launch", "name": "a"}) + "\n")
    (out / SUMMARY).write_text("{}")
    entry = "{name: a, case: case, ranks: 1, command: sh -c true}"
    runner.queue(order(tmp_path, content=f"simulations: [{entry}]\n"))
    runner.start(1, "")
    [news] = heard
    assert "holds a run already" in news["why"], "and the earlier run's launches are not told"
    assert not news["reported"], "the summary is not of this run"
    assert (out / COPY).read_text() == "of before\n"


SLOW = """
trap 'n=$((n + 1)); echo $n; [ $n -ge 2 ] && sleep 0.5 && exit $n' TERM INT ALRM
n=0; echo $n; while :; do sleep 0.05; done"""


@pytest.mark.parametrize("told", [0, 1, 2])
def test_a_run_that_ends_slowly_as_its_slice_does_is_told_so_twice(
    runner, tmp_path, monkeypatch, told
):
    """By the second signal it waits for nothing any more; by a third it writes no summary."""
    monkeypatch.setattr(plan_runner, "SOON", 0.3)
    runner.queue(order(tmp_path))
    runner.all[1].start()
    words = {"stdout": subprocess.PIPE, "text": True, "bufsize": 1}
    with subprocess.Popen(["bash", "-c", SLOW], **words) as run:
        assert run.stdout.readline() == "0\n"
        runner.number, runner.running = 1, run
        for number, one in enumerate((runner.time_is_over, lambda: runner.cancel(1))[:told], 1):
            one()
            assert run.stdout.readline() == f"{number}\n"
        runner.end()
        assert (run.returncode, run.stdout.read()[-2:]) == (2, "" if told == 2 else "2\n")


def test_a_run_whose_jobs_time_is_over_says_so_and_no_other_starts(heard, tmp_path):
    (tmp_path / "case").mkdir()
    entry = "{name: a, case: case, ranks: 1, command: sh -c 'echo begun; sleep 1000'}"
    log = tmp_path / "out" / "a" / "log"

    def watch(process, ended):
        while not (log.exists() and "begun" in log.read_text()):
            assert process.poll() is None
            time.sleep(0.05)
        runner.time_is_over()
        process.wait()
        ended()

    with selectors.DefaultSelector() as selector:
        runner = PlanRunner(lambda **n: heard.append(n), watch, selector, lambda *launch: None)
        mpirun = tmp_path / "bin" / "mpirun"
        mpirun.parent.mkdir()
        mpirun.write_text(FAKE_MPIRUN)
        mpirun.chmod(0o755)
        path = {"PATH": f"{mpirun.parent}:/usr/bin:/bin"}
        runner.queue(order(tmp_path, content=f"simulations: [{entry}]\n", environment=path))
        runner.queue(replace(runner.pending[1], number=2))
        runner.start(1, "")
        runner.start(2, "")
    ends = [news for news in heard if "run" in news]
    assert [(news["why"], news["reported"]) for news in ends] == [(TIMEOUT, True), (TIMEOUT, False)]
    summary = json.loads((tmp_path / "out" / SUMMARY).read_text())
    assert summary["interrupted"] == "interrupted by timeout"
    assert summary["simulations"][0]["reason"] == "interrupted by timeout"
    log = (tmp_path / "out" / LOG).read_text()
    assert "The run was interrupted: interrupted by timeout" in log
    said = format.reports([{"number": 1, "output": "out", "summary": summary}])
    assert said == "run 1: 0 of 1 simulations done, interrupted by timeout; out/report.html"


def test_a_run_that_failed_without_a_report_has_ended(monkeypatch, capsys):
    failed = {"number": 1, "state": "failed", "reason": "lost", "reported": False, "output": "/o"}
    runs = []
    monkeypatch.setattr(command.client, "call", lambda topic: {"runs": runs})
    report = SimpleNamespace(runs=[], json=False)
    assert command.do_report(report) == 0
    assert capsys.readouterr().out == "no run was submitted yet\n"
    runs.append(failed)
    assert command.do_report(report) == 0
    assert capsys.readouterr().out == "run 1 has no report: lost\n"


STORIES = {
    "one that ends": (
        ["Launch", ("Finished", "done", 0), ("Ended", "done", "done")],
        [(0, "done")],
    ),
    "one whose pod is lost, which is another for Flux as it runs again": (
        ["Launch", ("Finished", "pod lost", 1), "Requeued", "Launch", ("Finished", "done", 0)],
        [(1, "pod lost"), (0, "done")],
    ),
    "one that stops at checkpoints and goes on": (
        ["Launch", *[("Finished", "checkpointed", 0), "Requeued", "Launch"] * 2,
         ("Finished", "failed", 3), ("Ended", "failed", "failed")],
        [(3, "failed")],
    ),
    "one that stops at a checkpoint at the end of the run": (
        ["Launch", ("Finished", "checkpointed", 0), ("Ended", "checkpointed", "checkpointed")],
        [(0, "checkpointed")],
    ),
    "one that is cancelled before it goes on": (
        ["Launch", ("Finished", "checkpointed", 0), "Requeued", ("Ended", "cancelled", "failed")],
        [(143, "cancelled")],
    ),
    "one that was never started": ([("Ended", "interrupted", "not started")], []),
}  # fmt: skip


def tell_story(runner, written, tmp_path):
    """Have the run of a runner write such events, one after the other."""
    runner.number = 1
    runner.all[1] = Run(1, "plan.yaml", str(tmp_path), str(tmp_path))
    runner.events = Tail(tmp_path / EVENTS)
    with (tmp_path / EVENTS).open("a") as log:
        for entry in written:
            kind, cause, more = (*([entry] if isinstance(entry, str) else entry), "", "")[:3]
            said = {"name": "sim", "cause": cause, "reason": cause, "code": more, "state": more}
            log.write(json.dumps({"type": kind, **said, "nodes": more}) + "\n")
            log.flush()
            runner.read()
    runner.events.close()


@pytest.mark.parametrize("story", STORIES)
def test_a_simulation_is_one_for_flux_as_long_as_it_goes_on(story, heard, tmp_path):
    written, ends = STORIES[story]
    jobs = []
    runner = PlanRunner(
        lambda **n: heard.append(n), None, None, lambda launch, nodes: jobs.append(launch)
    )
    tell_story(runner, written, tmp_path)
    known = [runner.simulations[one["launch"]] for one in jobs]
    assert [(one["code"], one["cause"]) for one in known] == ends
    told = [news["simulation"] for news in heard]
    assert len(told) == 2 * len(ends), "the launch and the end of each, and nothing else"


PLACED = [
    ([], []),
    ([("Placed", "", ["n1", "n2"])], [["n1", "n2"]]),
    ([("Placed", "", ["n1"]), ("Finished", "pod lost", 1), "Launch", ("Placed", "", ["n2"])],
     [["n1"], ["n2"]]),
    ([("Placed", "", ["n1"]), ("Finished", "checkpointed", 0), "Launch", ("Placed", "", ["n2"])],
     [["n1"]]),
    ([("Finished", "launch failed", 1), ("Ended", "launch failed", "failed")], [()]),
]  # fmt: skip


@pytest.mark.parametrize(("written", "nodes"), PLACED)
def test_a_simulation_in_pods_is_a_job_once_they_have_nodes(written, nodes, heard, tmp_path):
    found = []
    runner = PlanRunner(
        lambda **n: heard.append(n), None, None, lambda launch, nodes: found.append(nodes)
    )
    runner.in_pods = True
    tell_story(runner, ["Launch", *written], tmp_path)
    assert found == nodes
