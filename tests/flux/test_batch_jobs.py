# SPDX-License-Identifier: LGPL-3.0-or-later
"""Batch jobs with Kubernetes, and what is lost in them.

Every test ends with a look for what is left: processes, folders, control groups, mounts.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from dovetail.applications import lammps_checkpoint
from dovetail.applications.openfoam import written_times
from dovetail.bench.cases import OPENFOAM_ETC, pitz_daily
from support import known_programs
from support.clusters import TOP
from support.flux_batch import LIMIT, Flux, eventually
from usernetes_setup import node_record

pytestmark = pytest.mark.flux


@pytest.fixture
def flux(request, instances):
    """An instance; the parameter, if there is one, is what schedules it and all inside it."""
    with instances.one(scheduler=getattr(request, "param", "sched-simple")) as made:
        yield made


ONE = "--dovetail=nodes=1,cores=1"
either = pytest.mark.parametrize("flux", ["sched-simple", "sched-fluxion-qmanager"], indirect=True)


def test_an_ordinary_user_needs_no_more_than_a_batch_script(user):
    user.plan(devices={"/dev/null": 1})
    job = user.batch("""
        set -ex
        flux dovetail submit --wait-up plan.yaml
        flux dovetail wait --all
        flux dovetail kubectl get nodes -o name | grep -c ^node/
        flux dovetail kubectl get nodes -o json | grep '"dovetail/dev.null": "7"'
        ls -ld /tmp/dovetail-$(id -u)-*
        flux dovetail report""", '--conf=dovetail.devices="/dev/null=7"', size=2)  # fmt: skip
    output = user.output(job)
    assert user.code(job) == 0, output
    assert "run 1: 2 of 2 simulations done" in output
    assert output.count("drwx------") == 2
    user.nothing_left()


@either
def test_a_hybrid_batch_script_runs_to_its_end(flux):
    flux.plan()
    job = flux.batch("""
        set -ex
        flux dovetail submit --wait-up plan.yaml
        flux dovetail kubectl -n default get nodes -o name | grep -c ^node/
        flux run -N2 echo bare metal
        flux dovetail wait --all
        flux dovetail report
        test -s dovetail-out-1/report.html
        flux dovetail logs 1 | grep 'sim-1 starts'
        flux dovetail top 1 --json | grep -q '"sim-1"'
        test "$(flux dovetail top 1 | grep -c '^sim-[12] .*done')" = 2
        ! flux dovetail top 9
        flux dovetail status""")
    output = flux.output(job)
    assert flux.code(job) == 0, output
    lines = output.splitlines()
    assert "2" in lines
    assert lines.count("bare metal") == 2
    assert "top: there is no run 9; see `flux dovetail status`" in output
    assert f"run 1: 2 of 2 simulations done; {flux.work}/dovetail-out-1/report.html" in lines
    assert "Kubernetes is up" in lines
    flux.nothing_left()


@pytest.mark.alone  # others' tests would find it
def test_what_a_job_left_that_was_killed_whole_goes_with_the_next():
    """Its slices' folders with the keys in them, and its control groups."""
    with contextlib.closing(Flux()) as flux:
        flux.batch("flux dovetail up; touch up; sleep 1000")
        assert eventually((flux.work / "up").exists)
        flux.kill_all()
        assert any("/cgroup/" in one for one in flux.left())
        with contextlib.closing(Flux()) as later:
            later.run("dovetail", "up", uri=later.inside(later.batch("sleep 1000")))
            assert not flux.left()


def test_nothing_is_lost_when_the_module_is_killed_reloaded_or_away(flux):
    flux.plan(count=1)
    (flux.work / "plan.yaml").rename(flux.work / "next.yaml")
    flux.plan("until [ -e go ]; do sleep 0.2; done")
    submit = "flux dovetail submit --wait-up"
    job = flux.batch(f"{submit} plan.yaml\n{submit} next.yaml\nsleep 1000")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    states = ["running", "waiting"]
    assert eventually(lambda: [r["state"] for r in flux.status(uri)["runs"]] == states)
    before = flux.status(uri)
    begun(flux, "sim-1")
    flux.kill("module-python-exec", "dovetail.py")
    assert eventually(lambda: not flux.works(uri))
    let_go(flux, "sim-1")
    begun(flux, "sim-2")
    flux.run("module", "load", "dovetail", uri=uri)
    after = flux.status(uri)
    assert [r["state"] for r in after["runs"]] == states
    assert eventually(lambda: flux.status(uri)["phase"] == "up")
    assert [s["node"] for s in flux.status(uri)["slices"]] == [s["node"] for s in before["slices"]]
    assert eventually(lambda: names(flux, uri) == ["1.1:sim", "1.2:sim"]), names(flux, uri)
    flux.run("submit", "--job-name=kube-9", "sleep", "1000", uri=uri)  # which is no slice
    flux.run("module", "reload", "dovetail", uri=uri)
    shown = [line.split()[2] for line in flux.run("jobs", "-n", uri=uri).splitlines()]
    assert {"kube-0", "kube-1", "1.2:sim"} <= set(shown), shown
    let_go(flux, "sim-2")
    flux.run("dovetail", "wait", "--all", uri=uri)
    assert [r["state"] for r in flux.status(uri)["runs"]] == ["done", "done"]
    assert eventually(lambda: names(flux, uri) == ["1.1:sim", "1.2:sim", "2:sim"])
    flux.run("module", "remove", "dovetail", uri=uri)
    flux.kill("flux-dovetail slice --number 1")
    flux.run("module", "load", "dovetail", uri=uri)
    assert eventually(lambda: [s["number"] for s in flux.status(uri)["slices"]] == [0, 2])
    assert eventually(lambda: flux.status(uri)["phase"] == "up")
    assert eventually(lambda: agree(flux, uri))
    assert flux.run("dovetail", "submit", "plan.yaml", uri=uri) == "3"
    flux.run("cancel", job)
    flux.wait(job)
    flux.nothing_left()


def test_a_plan_that_is_edited_while_it_waits_runs_as_it_was_submitted(flux):
    second = flux.work / "plans" / "second.yaml"
    second.parent.mkdir()
    flux.plan("cat input; echo as submitted", count=1)
    case = json.dumps(str(flux.work / "case"))
    submitted = (flux.work / "plan.yaml").read_text().replace(case, '"../case"')
    second.write_text(submitted)
    flux.plan("until [ -e go ]; do sleep 0.2; done", count=1)
    submit = "flux dovetail submit --wait-up"
    job = flux.batch(f"{submit} plan.yaml\n(cd plans; {submit} second.yaml)\nsleep 1000")
    uri = flux.inside(job)
    states = ["running", "waiting"]
    assert eventually(lambda: [r["state"] for r in flux.status(uri)["runs"]] == states)
    second.write_text(submitted.replace("as submitted", "as edited"))
    (flux.work / "case" / "input").write_text("changed before the launch\n")
    let_go(flux, "sim")
    flux.run("dovetail", "wait", "--all", uri=uri)
    assert flux.status(uri)["runs"][1]["plan"] == str(second)
    out = flux.work / "plans" / "dovetail-out-2"
    log = (out / "sim" / "log").read_text()
    assert "as submitted" in log
    assert "changed before the launch" in log, "cases are copied when their simulation starts"
    assert (out / "submitted-plan.yaml").read_text() == submitted
    flux.run("cancel", job)
    flux.wait(job)


def names(flux, uri):
    """The simulations' jobs, past and present."""
    lines = flux.run("jobs", "-ano", "{name}", uri=uri).splitlines()
    return sorted(line for line in lines if line.endswith(":sim"))


def agree(flux, uri):
    """Whether Kubernetes has the slices' nodes; that of a lost one goes a moment after it."""
    nodes = flux.run("dovetail", "kubectl", "get", "nodes", "-o", "name", uri=uri).split()
    return sorted(nodes) == sorted(f"node/{s['node']}" for s in flux.status(uri)["slices"])


def begun(flux, name):
    """The case of a simulation of the first run, once it is there."""
    folder = flux.work / "dovetail-out-1" / name
    assert eventually(lambda: list(folder.rglob("input"))), name
    return next(folder.rglob("input"))


def let_go(flux, name="sim-1"):
    """Let a simulation go on: its command waits for a file in its case."""
    begun(flux, name).with_name("go").touch()


def tasks(job):
    """The processes that a job's shell has started, and theirs, of one that runs here."""
    found = []
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"FLUX_JOB_ID={job}".encode() in environment.read_bytes().split(b"\0"):
                found.append(environment.parent)
    return found


def test_every_simulation_is_a_job(flux):
    flux.plan("echo begun; until [ -e go ]; do sleep 0.2; done; echo over; exit 7", count=4)
    job = flux.batch("flux dovetail submit --wait-up plan.yaml; sleep 1000")
    uri = flux.inside(job)

    def running(name):
        words = ("jobs", "-no", "{id}", "--filter=running", f"--name={name}")
        return flux.run(*words, uri=uri)

    def ended(job):
        flux.run("job", "wait-event", job, "clean", uri=uri)
        return flux.run("jobs", "-no", "{status} {returncode} {inactive_reason}", job, uri=uri)

    assert eventually(lambda: running("1.1:sim"))
    first = running("1.1:sim")
    used = json.loads(flux.run("resource", "R", "-s", "allocated", uri=uri))
    assert len(tasks(first)) == 1, "there may be a hundred on a node"
    let_go(flux)
    assert "over" in flux.run("job", "attach", first, uri=uri, code=7)
    assert used == json.loads(flux.run("resource", "R", "-s", "allocated", uri=uri))
    assert ended(first) == "FAILED 7 Exit 7"
    assert eventually(lambda: running("1.2:sim"))
    lost = running("1.2:sim")
    begun(flux, "sim-2")
    pods = ("pods", "--namespace=dovetail", "-l", "batch.kubernetes.io/job-completion-index")
    flux.run("dovetail", "kubectl", "delete", *pods, "--wait=false", uri=uri)
    assert ended(lost).startswith("FAILED 1 Exception: type=dovetail note=pod lost: ")
    assert eventually(lambda: running("1.2:sim"))
    again = running("1.2:sim")
    flux.run("cancel", again, uri=uri)
    assert ended(again).startswith("CANCELED ")
    assert eventually(lambda: running("1.3:sim"))
    told = running("1.3:sim")
    flux.run("job", "wait-event", "-W", "-p", "guest.output", told, "data", uri=uri)
    flux.run("job", "kill", told, uri=uri)
    assert ended(told).startswith("CANCELED ")
    assert eventually(lambda: running("1.4:sim"))
    killed = running("1.4:sim")
    flux.run("job", "kill", "-s", "KILL", killed, uri=uri)
    flux.run("dovetail", "wait", "--all", uri=uri, code=1)
    assert ended(killed).startswith("FAILED 137 ")
    text = (flux.work / "dovetail-out-1" / "summary.json").read_text()
    reasons = [one["reason"] for one in json.loads(text)["simulations"]]
    assert reasons == ["exit code 7: over", "cancelled", "cancelled", "cancelled"]
    flux.run("cancel", job)
    flux.wait(job)


@either
def test_the_job_of_a_simulation_has_the_cores_where_its_pods_are(flux):
    program = known_programs.build("openmpi", "known/busy.c")
    entry = {
        "name": "wide", "case": str(flux.work / "case"), "ranks": 2, "ranks_per_pod": 1,
        "command": [program, "sleep", "0", "20", "20"], "environment": {"BUSY_UNTIL": "stop"},
        "prepare": ["echo begun"],
    }  # fmt: skip
    (flux.work / "plan.yaml").write_text(json.dumps({"simulations": [entry]}))
    script = "flux dovetail submit --wait-up plan.yaml; sleep 1000"
    job = flux.batch(script, dovetail="--dovetail=nodes=3,cores=1")
    uri = flux.inside(job)
    assert eventually(lambda: flux.run("jobs", "-no", "{id}", "--name=1:wide", uri=uri))
    (one,) = flux.run("jobs", "-no", "{id}", "--name=1:wide", uri=uri).split()

    def cores(*jobs):
        """What all these jobs have together, in Flux's own words."""
        sets = [flux.run("job", "info", str(job), "R", uri=uri) for job in jobs]
        together = flux.run("R", "append", given="\n".join(sets))
        return flux.run("R", "decode", "--short", given=together)

    pods = ("get", "pods", "-n", "dovetail", "-l", "batch.kubernetes.io/job-completion-index")
    pods = json.loads(flux.run("dovetail", "kubectl", *pods, "-o", "json", uri=uri))["items"]
    nodes = {pod["spec"]["nodeName"] for pod in pods}
    slices = {one["node"]: one["job"] for one in flux.status(uri)["slices"]}
    assert len(nodes) == 2 < len(slices)
    assert cores(one) == cores(*(slices[node] for node in nodes))
    assert flux.run("jobs", "-no", "{nnodes} {ncores} {ntasks}", one, uri=uri) == "2 2 2"
    (flux.work / "dovetail-out-1/wide/case/stop").touch()
    assert flux.run("job", "attach", one, uri=uri).count("begun") == 1
    assert flux.run("jobs", "-no", "{status}", one, uri=uri) == "COMPLETED"
    flux.run("cancel", job)
    flux.wait(job)


def test_a_simulation_that_goes_on_on_more_ranks_stays_the_same_job(flux):
    """It goes on on two ranks, in two pods, once another one has ended."""
    program = known_programs.build("openmpi", "known/busy.c")
    stop = "sh -c 'touch stop'", "sh -c 'rm -f stop; echo 1'"
    open_ranks = {"case": str(flux.work / "case"), "ranks": "1-2"}
    entries = [
        {**open_ranks, "name": "long", "command": [program, "sleep", "0", "200", "200"],
         "iterations": 10**6, "environment": {"BUSY_UNTIL": "stop", "BUSY_SHARED": "1"},
         "checkpoint": dict(zip(("write", "restart"), stop))},
        {**open_ranks, "name": "short", "command": [program, "sleep", "50", "20", "20"],
         "iterations": 50},
    ]  # fmt: skip
    (flux.work / "plan.yaml").write_text(json.dumps({"simulations": entries}))

    def jobs():
        words = ("jobs", "-ano", "{name} {status} {id}", "--name=1:long")
        return [line.split() for line in flux.run(*words, uri=uri).splitlines()]

    def row():
        found = json.loads(flux.run("dovetail", "top", "1", "--json", uri=uri))["simulations"]
        (one,) = [one for one in found if one["name"] == "long"]
        return one

    job = flux.batch("flux dovetail submit --wait-up plan.yaml; sleep 1000")
    uri = flux.inside(job)
    assert eventually(lambda: [one[1] for one in jobs()] == ["RUN"])
    before = jobs()

    def wider():
        found = row()
        return len(found["ranks"]) == 2 and found["state"] == "running"

    assert eventually(wider), row()
    assert jobs() == before, "the same job, which runs"

    def over():
        (flux.work / "dovetail-out-1/long/case/stop").touch()  # a restart removes it
        return flux.status(uri)["runs"][0]["state"] != "running"

    assert eventually(over)
    ((_, status, _),) = jobs()
    assert status == "COMPLETED"
    text = (flux.work / "dovetail-out-1/summary.json").read_text()
    (one,) = [one for one in json.loads(text)["simulations"] if one["name"] == "long"]
    assert (one["restarts"], one["ranks"]) == (0, 2)
    assert one["continued"] == one["checkpoints"]
    flux.run("cancel", job)
    flux.wait(job)


def test_a_run_that_is_cancelled_is_shown_live_and_every_command_speaks_json(flux):
    def told(*words, code=0):
        return json.loads(flux.run("dovetail", *words, "--json", uri=uri, code=code))

    def shown(run):
        """Its states, each once, in the order in which `top` showed them."""
        found = map(json.loads, (flux.work / "top").read_text().split("\n")[:-1])
        return list(dict.fromkeys(r["state"] for f in found for r in f["runs"][run - 1 : run]))

    flux.plan("sleep 1000", count=1)
    job = flux.batch("""
        flux dovetail top --json >top & flux dovetail top >text &
        flux dovetail up; sleep 1000""", dovetail="--dovetail=nodes=1,cores=1")  # fmt: skip
    uri = flux.inside(job)
    assert told("up") == {"nodes": 1}
    assert told("submit", "plan.yaml")["run"] == 1
    assert told("submit", "plan.yaml")["run"] == 2
    outside = ("proxy", uri, flux.flux)
    seen = json.loads(flux.run(*outside, "dovetail", "status", "--json"))
    assert [run["number"] for run in seen["runs"]] == [1, 2]
    there = ("exec", "-r", "0", flux.flux, "dovetail", "kubectl", "get", "nodes", "-oname")
    assert flux.run(*outside, *there).startswith("node/")
    names = ("jobs", "-no", "{name}")
    assert eventually(lambda: "1:sim" in flux.run(*names, uri=uri).split())
    assert eventually(lambda: "sim starts" in told("logs", "1")["log"])
    assert told("cancel", "2", "1") == {"runs": [2, 1]}
    runs = {one["number"]: one for one in told("wait", "--all", code=1)}
    assert [runs[n]["state"] for n in (1, 2)] == ["cancelled"] * 2
    assert eventually(lambda: "1:sim" not in flux.run(*names, uri=uri).split())
    assert eventually(lambda: shown(1) == ["running", "cancelled"])
    assert eventually(lambda: shown(2) == ["waiting", "cancelled"])
    assert eventually(lambda: (flux.work / "text").read_text().count("cancelled") > 1)
    assert "\n0      control  ready " in (flux.work / "text").read_text()
    assert "no run 3;" in flux.run("dovetail", "cancel", "3", uri=uri, code=2)
    assert told("logs", "--slice", "0")["log"].startswith("slice 0: node ")
    assert "no slice 1" in flux.run("dovetail", "logs", "--slice", "1", uri=uri, code=2)
    assert "no run 3" in flux.run("dovetail", "logs", "3", uri=uri, code=2)
    assert told("doctor")["can_run"]
    assert [run["number"] for run in told("report", "--all")] == [1], "the one that began"
    assert "no run 3" in flux.run("dovetail", "report", "3", uri=uri, code=2)
    assert told("submit", "plan.yaml")["run"] == 3
    assert eventually(lambda: "3:sim" in flux.run(*names, uri=uri).split())
    assert told("down") == {"phase": "down"}
    (_, ended) = told("report", "--all")
    assert (ended["number"], ended["reason"]) == (3, "Kubernetes was taken down")
    assert ended["summary"]["interrupted"] == "interrupted by SIGTERM"
    flux.run("cancel", job)
    flux.wait(job)


@either
def test_a_slice_that_is_lost_is_replaced_once_there_is_a_core_and_the_others_go_on(flux):
    job = flux.batch("flux dovetail up; sleep 1000")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    cores = int(flux.run("resource", "list", "-s", "all", "-no", "{ncores}", uri=uri))
    blocker = flux.run("submit", "--urgency=31", f"-n{cores - 1}", "sleep", "1000", uri=uri)
    flux.kill("flux-dovetail slice --number 1")
    flux.run("job", "wait-event", blocker, "start", uri=uri)  # with the core of the lost one
    states = [(0, "ready"), (2, "submitted")]
    assert eventually(
        lambda: [(s["number"], s["state"]) for s in flux.status(uri)["slices"]] == states
    )
    assert flux.status(uri)["phase"] == "degraded"
    said = flux.run("dovetail", "up", uri=uri)
    assert said == "Kubernetes is degraded: 1 of 2 nodes", "and keeps nobody waiting"
    flux.run("cancel", blocker, uri=uri)
    assert eventually(lambda: flux.status(uri)["phase"] == "up")
    assert eventually(lambda: agree(flux, uri))
    assert flux.status(uri)["lost"]
    flux.run("cancel", job)
    flux.wait(job)


def kill_node(flux, number):
    """Kill all of a slice's node, of which its agent is no part."""
    (folder,) = (
        found for found in flux.folders()
        if found.name.split("-")[2] in flux.clusters and found.name.endswith(f"-{number}")
    )  # fmt: skip
    (record,) = folder.glob("*/nodes/*/node.json")
    node = node_record.read(record)
    assert node.state() is node_record.NodeState.RUNNING
    for pid in (node.monitor, node.supervisor):
        os.kill(pid, signal.SIGKILL)


def real_programs(flux):
    """A plan of the real programs that are here, which never end by themselves but write often.

    Returns their names, and of each what tells of its last step that is written.
    """
    entries, written = [], {}
    folder = flux.work / "dovetail-out-1"
    if shutil.which("simpleFoam"):
        case = pitz_daily(flux.work / "pitz", (1,), 10**6, refine=1)
        control = case / "system/controlDict"
        text = re.sub(r"(?m)^(writeInterval)\s+\S+;", r"\1 20;", control.read_text())
        control.write_text(re.sub(r"(?m)^(purgeWrite)\s+\S+;", r"\1 3;", text))
        entries.append({"name": "pitz", "case": str(case), "command": "simpleFoam",
                        "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC}})  # fmt: skip
        here = folder / "pitz/case"
        # The one before the last one, whose fields may be half written.
        written["pitz"] = lambda: int(["0", "0", *written_times.times(here)][-2])
    if shutil.which("lmp"):
        text = (TOP / "examples/in.lj").read_text()
        (flux.work / "case/in.lj").write_text(text.replace("thermo 50", "restart 100 one two"))
        entries.append({"name": "melt", "case": str(flux.work / "case"),
                        "command": f"lmp -in in.lj -var steps {10**7}"})  # fmt: skip
        ends = [folder / "melt/case/one", folder / "melt/case/two"]
        written["melt"] = lambda: max(lammps_checkpoint.written_step(path) or 0 for path in ends)
    if not entries:
        pytest.skip("neither OpenFOAM nor LAMMPS is installed")
    usual = {"ranks": 1, "checkpoint": "allowed"}
    plan = {"simulations": [{**usual, **one} for one in entries]}
    (flux.work / "plan.yaml").write_text(json.dumps(plan))
    return written


def lose_and_go_on(flux, written, lose):
    """Each program goes on from what it had written when it was lost, or later."""

    def starts(name):
        return [r["iterations"] for r in records(flux)
                if (r.get("type"), r.get("name")) == ("Started", name)]  # fmt: skip

    before = {name: starts(name)[-1] for name in written}
    assert eventually(lambda: all(last() > before[name] for name, last in written.items()))
    times = {name: len(starts(name)) for name in written}
    last = {name: step() for name, step in written.items()}
    lose()
    for name in written:
        assert eventually(lambda: len(starts(name)) > times[name]), name  # noqa: B023
        assert starts(name)[times[name]] >= last[name], name


def test_what_a_lost_slice_ran_goes_on_from_what_is_written_and_with_the_control_node_all_ends(
    flux,
):
    """A node is killed, and its slice replaced; then that is taken away."""
    written = real_programs(flux)
    job = flux.batch("flux dovetail up; sleep 1000", dovetail="--dovetail=nodes=2,cores=all")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    control = flux.status(uri)["slices"][0]["node"]
    flux.run("dovetail", "kubectl", "cordon", control, uri=uri)  # they run on the other one
    flux.run("dovetail", "submit", "plan.yaml", uri=uri)
    runs = lambda: sum(r.get("type") == "Started" for r in records(flux))  # noqa: E731
    assert eventually(lambda: runs() == len(written))

    def kill():
        kill_node(flux, 1)
        assert eventually(lambda: [s["number"] for s in flux.status(uri)["slices"]] == [0, 2])
        assert eventually(lambda: flux.status(uri)["phase"] == "up")
        assert flux.status(uri)["lost"] == ["slice 1: its node ended"]

    def take_away():
        flux.run("dovetail", "kubectl", "uncordon", control, uri=uri)
        flux.run("dovetail", "resize", "1", uri=uri)
        found = flux.run("dovetail", "kubectl", "get", "pods", "-A", "-o", "json", uri=uri)
        for pod in json.loads(found)["items"]:
            if pod["spec"].get("nodeName", control) != control:
                # Without grace: no kubelet is left that would end it.
                assert pod["metadata"].get("deletionGracePeriodSeconds") == 0, pod["metadata"]

    lose_and_go_on(flux, written, kill)
    lose_and_go_on(flux, written, take_away)
    causes = {(r["name"], r["cause"]) for r in records(flux) if r.get("type") == "Requeued"}
    assert {name for name, _ in causes} == set(written)
    assert {cause for _, cause in causes} <= {"node lost", "pod lost"}
    kill_node(flux, 0)
    said = flux.run("dovetail", "wait", "--all", uri=uri, code=1)
    assert "the control slice ended: its node ended" in said
    assert flux.status(uri)["phase"] == "failed"
    flux.run("cancel", job)
    flux.wait(job)
    flux.nothing_left()


def test_a_dead_leader_is_missed_after_a_minute_unless_somebody_said_otherwise(flux):
    for options, limit in (((), 60.0), (("--conf=heartbeat.timeout=90s",), 90.0)):
        assert flux.code(flux.batch("flux module stats heartbeat >stats", *options)) == 0
        assert json.loads((flux.work / "stats").read_text())["timeout"] == limit


def test_a_lost_broker_costs_its_slice_alone(flux):
    job = flux.batch("flux dovetail up; sleep 1000", dovetail="--dovetail=nodes=2,cores=all")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    flux.kill("broker -c", "/jobtmp-1-")  # sched-simple takes the nodes in order

    def replaced() -> bool:
        """By the second, or a later one if that was given the same node once more."""
        now = flux.status(uri)
        numbers = [one["number"] for one in now["slices"]]
        return len(numbers) == now["wanted"] == 2 and 1 not in numbers and now["phase"] == "up"

    assert eventually(replaced)
    assert eventually(lambda: agree(flux, uri))
    flux.run("cancel", job)
    flux.wait(job)
    flux.nothing_left()


@either
def test_nodes_come_and_go_while_the_job_runs(flux):
    job = flux.batch("flux dovetail up; sleep 1000", dovetail="--dovetail=nodes=1,cores=1")
    uri = flux.inside(job)
    for number in (3, 1, 2):
        flux.run("dovetail", "resize", str(number), uri=uri)
        nodes = flux.run("dovetail", "kubectl", "get", "nodes", "-o", "json", uri=uri)
        offered = [node["status"]["allocatable"]["cpu"] for node in json.loads(nodes)["items"]]
        assert offered == ["1"] * number, "the cores of each slice, and no others"
    flux.run("dovetail", "resize", "0", uri=uri, code=2)
    flux.run("dovetail", "down", uri=uri)

    def rest():
        return [line for line in flux.left() if "module-python-exec" not in line]

    assert eventually(lambda: not rest(), 60), rest()
    assert "taken down" in flux.run("dovetail", "up", uri=uri, code=1)


def test_more_nodes_than_there_are_free_cores_for_block_nothing(flux):
    flux.plan()
    job = flux.batch("flux dovetail up; sleep 1000", dovetail="--dovetail=nodes=1,cores=1")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    cores = int(flux.run("resource", "list", "-s", "all", "-no", "{ncores}", uri=uri))
    too_many = flux.run("dovetail", "resize", str(cores + 1), uri=uri, code=2)
    assert f"{cores + 1} nodes do not fit into this instance; {cores} do" in too_many
    flux.run("submit", "-n2", "sleep", "inf", uri=uri)
    waiting = flux.start("dovetail", "resize", str(cores), uri=uri)
    assert eventually(lambda: flux.status(uri)["phase"] == "degraded")
    assert f" of {cores} nodes" in flux.run("dovetail", "status", uri=uri)
    assert flux.run("dovetail", "up", uri=uri).startswith("Kubernetes is degraded: ")
    held = flux.run("submit", "--dependency=dovetail:up", "--cores=1", "true", uri=uri)
    flux.run("job", "wait-event", held, "depend", uri=uri)
    flux.run("dovetail", "submit", "plan.yaml", uri=uri)
    flux.run("dovetail", "wait", "--all", uri=uri)
    assert waiting.poll() is None, "it is not so"
    flux.run("dovetail", "resize", "1", uri=uri)
    assert flux.status(uri)["phase"] == "up"
    waiting.wait(LIMIT)
    flux.run("cancel", job)
    flux.wait(job)


def end_soon(flux, job, seconds, seen):
    """Let a job go on that has so many seconds from now, and more until something was seen."""
    limit = float(flux.run("jobs", "-no", "{runtime}", job)) + seconds
    flux.run("update", job, f"duration={limit:.0f}s")
    (flux.work / "go").touch()
    for _ in range(10):
        if eventually(lambda: any(map(seen, records(flux))), 20):
            break
        flux.run("update", job, "duration=+25s")


def records(flux):
    """The event log of the first run so far."""
    path = flux.work / "dovetail-out-1/events.jsonl"
    text = path.read_text() if path.exists() else ""
    return map(json.loads, text.split("\n")[1:-1])


def test_a_run_that_the_jobs_time_ends_says_timeout_and_a_next_job_goes_on_with_it(flux):
    flux.plan("case $PWD in *sim-1*) ;; *) until [ -e go ]; do sleep 0.2; done ;; esac")
    script = """
        flux dovetail up; until [ -e go ]; do sleep 0.2; done
        flux dovetail submit plan.yaml
        flux dovetail wait --all; echo code $?
        flux dovetail report"""
    job = flux.batch(script, "--conf=dovetail.stop-before=40", dovetail=ONE)
    flux.run("dovetail", "up", uri=flux.inside(job))
    end_soon(flux, job, 95, lambda one: (one.get("type"), one.get("name")) == ("Finished", "sim-1"))
    output = flux.output(job)
    assert "timeout: the job's time is over" in output
    assert "code 1\n" in output
    assert "run 1: 1 of 2 simulations done, interrupted by timeout; " in output
    (flux.work / "case" / "go").touch()
    resume = """
        dovetail run plan.yaml --plan-copy dovetail-out-1/submitted-plan.yaml -o dovetail-out-1 \
            --resume --json | grep '"done": 2'"""
    job = flux.batch(resume, dovetail="")
    assert flux.code(job) == 0, flux.output(job)


@pytest.mark.skipif(not shutil.which("simpleFoam"), reason="OpenFOAM is not installed")
def test_at_the_end_of_the_jobs_time_simulations_stop_at_checkpoints(flux):
    case = pitz_daily(flux.work / "pitz", (1, 1), 100000, refine=1)
    entry = {
        "name": "pitz", "case": str(case), "ranks": 1, "command": "simpleFoam",
        "environment": {"WM_PROJECT_DIR": OPENFOAM_ETC}, "checkpoint": "allowed",
    }  # fmt: skip
    (flux.work / "plan.yaml").write_text(json.dumps({"simulations": [entry]}))
    script = """
        flux dovetail up; until [ -e go ]; do sleep 0.2; done
        flux dovetail submit plan.yaml
        flux dovetail wait --all"""
    job = flux.batch(script, "--conf=dovetail.stop-before=20", dovetail=ONE)
    flux.run("dovetail", "up", uri=flux.inside(job))
    end_soon(flux, job, 80, lambda one: one.get("type") == "Sampled")
    output = flux.output(job)
    assert "timeout: the job's time is over" in output
    summary = flux.work / "dovetail-out-1/summary.json"
    (one,) = json.loads(summary.read_text())["simulations"]
    assert one["state"] == "checkpointed", (one, output)
    (told,) = [one for one in records(flux) if one.get("type") == "Interrupted"]
    assert 0 < told["within"] < 30, "no longer than the job has"
    control = flux.work / "dovetail-out-1/pitz/case/system/controlDict"
    end = one["iterations"] + 20
    control.write_text(control.read_text().replace("endTime 100000", f"endTime {end}"))
    resume = """
        dovetail run plan.yaml --plan-copy dovetail-out-1/submitted-plan.yaml -o dovetail-out-1 \\
            --resume"""
    job = flux.batch(resume, dovetail="")
    assert flux.code(job) == 0, flux.output(job)
    (one,) = json.loads(summary.read_text())["simulations"]
    assert (one["state"], one["iterations"], one["continued"]) == ("done", end, 1)


def test_plans_that_are_submitted_at_once_have_directories_of_their_own(flux):
    flux.plan()
    job = flux.batch("flux dovetail up; sleep 1000", dovetail="--dovetail=nodes=1,cores=1")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    submits = [flux.start("dovetail", "submit", "--json", "plan.yaml", uri=uri) for _ in range(3)]
    told = [json.loads(submit.communicate(timeout=LIMIT)[0]) for submit in submits]
    assert len({one["output"] for one in told}) == 3, told
    taken = told[0]["output"]
    said = flux.run("dovetail", "submit", "-o", taken, "plan.yaml", uri=uri, code=2)
    assert f"writes to {taken}" in said or f"{taken} holds a run already" in said
    runs = json.loads(flux.run("dovetail", "wait", "--json", "--all", uri=uri))
    assert sorted(run["output"] for run in runs) == sorted(one["output"] for one in told)
    assert [run["state"] for run in runs] == ["done"] * 3
    said = flux.run("dovetail", "submit", "-o", taken, "plan.yaml", uri=uri, code=2)
    assert f"{taken} holds a run already" in said
    reports = json.loads(flux.run("dovetail", "report", "--json", "--all", uri=uri))
    assert [one["number"] for one in reports] == [1, 2, 3]
    flux.plan("sleep 1000", count=1)
    flux.run("dovetail", "submit", "plan.yaml", uri=uri)
    assert "run 4 has no report: it is " in flux.run("dovetail", "report", "4", uri=uri, code=1)
    flux.run("cancel", job)
    flux.wait(job)


def test_nothing_is_up_once_its_jobs_are_cancelled(flux):
    flux.plan()
    job = flux.batch("flux dovetail up; sleep 1000")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    reason = "100% of it: %s%s%s%s"  # as words for printf(3), the end of the module
    flux.run("cancel", "--all", f"--message={reason}", uri=uri)
    assert flux.status(uri)["phase"] == "failed"
    said = flux.run("dovetail", "submit", "plan.yaml", uri=uri, code=1)
    assert f"the control slice ended: cancel: {reason}" in said
    assert not list(flux.work.glob("dovetail-out-*")), "no directory is made for nothing"
    flux.run("cancel", job)
    flux.wait(job)


@either
def test_a_slice_that_is_lost_as_flux_tells_of_no_jobs_is_noticed(flux):
    """The shells of running jobs end when this module of Flux is loaded anew."""
    job = flux.batch("flux dovetail up; sleep 1000", dovetail="--dovetail=nodes=1,cores=1")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    flux.run("module", "reload", "job-info", uri=uri)
    assert eventually(lambda: flux.status(uri)["phase"] == "failed"), flux.status(uri)
    assert flux.status(uri)["reason"].startswith("the control slice ended: exec: ")
    flux.run("dovetail", "down", uri=uri)
    flux.run("cancel", job)
    flux.wait(job)


def test_two_jobs_on_one_node_do_not_meet(flux):
    jobs = []
    for number in (1, 2):
        script = f"flux dovetail up; flux dovetail kubectl get nodes -o name >nodes{number}"
        more = f"; touch up{number}; until [ -e up{3 - number} ]; do sleep 0.2; done"
        jobs.append(flux.batch(script + more, f"--output=out{number}.txt", "-n1", size=1,
                               dovetail="-c1 --dovetail=nodes=1,cores=1"))  # fmt: skip
    assert [flux.code(job) for job in jobs] == [0, 0]
    one, two = ((flux.work / f"nodes{n}").read_text() for n in (1, 2))
    assert one.startswith("node/")
    assert two.startswith("node/")
    assert one != two
