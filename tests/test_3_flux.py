# SPDX-License-Identifier: LGPL-3.0-or-later
"""Steps 1 to 8 in a real Flux instance: batch jobs with Kubernetes, and everything that ends them.

Every test ends with a look for what is left: processes, folders, control groups, mounts.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from clusters import SETUP, USER
from dovetail import paths
from dovetail.errors import BadInput
from fluxed import Flux, eventually, flux_command
from others import WHY_NOT

pytestmark = pytest.mark.flux
TOP = Path(__file__).resolve().parents[1]


@pytest.fixture
def flux():
    made = Flux()
    yield made
    made.close()


@pytest.fixture
def user(binaries):
    """The same as an ordinary user, who exists only here."""
    if os.getuid() != 0 or WHY_NOT:
        pytest.skip(WHY_NOT or "this is an ordinary user already")
    flux_command()
    subprocess.run([SETUP / "delegate", str(USER)], check=True)
    made = Flux(size=2, uid=USER, cache=binaries.parents[1])
    yield made
    made.close()
    subprocess.run([SETUP / "delegate", str(USER), "--remove"], check=True)


def test_an_ordinary_user_needs_no_more_than_a_batch_script(user):
    user.plan()
    job = user.batch("""
        set -ex
        flux dovetail submit --wait-up plan.yaml
        flux dovetail wait --all
        flux dovetail kubectl get nodes -o name | grep -c ^node/
        ls -ld /tmp/dovetail-$(id -u)-*
        flux dovetail report""", size=2)  # fmt: skip
    output = user.output(job)
    assert user.code(job) == 0, output
    assert "run 1: 2 of 2 simulations done" in output
    assert output.count("drwx------") == 2
    user.nothing_left()


def test_a_hybrid_batch_script_runs_to_its_end(flux):
    flux.plan()
    job = flux.batch("""
        set -ex
        flux dovetail submit --wait-up plan.yaml
        flux dovetail kubectl get nodes -o name | grep -c ^node/
        flux run -N2 echo bare metal
        flux dovetail wait --all
        flux dovetail report
        test -s dovetail-out-1/report.html
        flux dovetail logs 1 | grep 'sim-1 starts'
        flux dovetail status""")
    output = flux.output(job)
    assert flux.code(job) == 0, output
    lines = output.splitlines()
    assert "2" in lines
    assert lines.count("bare metal") == 2
    assert f"run 1: 2 of 2 simulations done; {flux.work}/dovetail-out-1/report.html" in lines
    assert "Kubernetes is up" in lines
    flux.nothing_left()


ENDS = {
    "it is cancelled": lambda flux, job, uri: flux.run("cancel", job),
    "its instance is shut down": lambda flux, job, uri: flux.run("shutdown", uri=uri, code=None),
    "its module was killed": lambda flux, job, uri: (
        flux.kill("module-python-exec", "broker_module"), flux.run("cancel", job)),
    "its module was removed": lambda flux, job, uri: (
        flux.run("module", "remove", "dovetail", uri=uri), flux.run("cancel", job)),
    "its control slice was killed": lambda flux, job, uri: (
        flux.kill("flux-dovetail slice --number 0"), flux.run("cancel", job)),
}  # fmt: skip


@pytest.mark.parametrize("how", ENDS)
def test_nothing_is_left_of_a_job_when(how, flux):
    job = flux.batch("flux dovetail up; sleep 1000")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    ENDS[how](flux, job, uri)
    flux.wait(job)
    flux.nothing_left()


def test_nothing_is_left_when_the_script_fails_or_its_time_is_over(flux):
    assert flux.code(flux.batch("flux dovetail up; exit 3")) == 3
    flux.nothing_left()
    job = flux.batch("flux dovetail up; sleep 1000", "-t", "20s")
    flux.wait(job)
    assert "timeout" in flux.run("job", "eventlog", job)
    flux.nothing_left()


def test_a_job_ends_well_while_kubernetes_is_still_starting(flux):
    assert flux.code(flux.batch("true")) == 0
    flux.nothing_left()


def test_the_module_may_be_killed_and_loaded_anew_while_simulations_run(flux):
    flux.plan("until [ -e go ]; do sleep 0.2; done", count=1)
    job = flux.batch("flux dovetail submit --wait-up plan.yaml; sleep 1000")
    uri = flux.inside(job)
    assert eventually(lambda: [r["state"] for r in flux.status(uri)["runs"]] == ["running"])
    before = flux.status(uri)
    flux.kill("module-python-exec", "broker_module")
    assert eventually(lambda: not flux.works(uri))
    flux.run("module", "load", "--name=dovetail", broker_module(), uri=uri)
    assert eventually(lambda: flux.works(uri) and flux.status(uri)["phase"] == "up")
    after = flux.status(uri)
    assert [s["node"] for s in after["slices"]] == [s["node"] for s in before["slices"]]
    let_go(flux)
    flux.run("dovetail", "wait", "--all", uri=uri)
    flux.run("cancel", job)
    flux.wait(job)
    flux.nothing_left()


def let_go(flux):
    """Let the simulation that runs now go on: its command waits for a file in its case."""
    output = flux.work / "dovetail-out-1"
    assert eventually(lambda: list(output.rglob("input")))
    next(output.rglob("input")).with_name("go").touch()


def broker_module():
    """The module's file, as it is installed."""
    from dovetail import fluxed

    return os.path.join(os.path.dirname(os.path.dirname(fluxed.__file__)), "broker_module.py")


def test_every_simulation_is_a_job(flux):
    flux.plan("echo begun; until [ -e go ]; do sleep 0.2; done; echo over; exit 7", count=2)
    job = flux.batch("flux dovetail submit --wait-up plan.yaml; sleep 1000")
    uri = flux.inside(job)

    def jobs():
        lines = flux.run("jobs", "-ano", "{name} {id} {state}", uri=uri).splitlines()
        return {line.split()[0]: line.split()[1:] for line in lines if line.startswith("sim")}

    assert eventually(lambda: jobs().get("sim-1", ["", ""])[1] == "RUN")
    first = jobs()["sim-1"][0]
    used = json.loads(flux.run("resource", "R", "-s", "allocated", uri=uri))
    let_go(flux)
    assert "over" in flux.run("job", "attach", first, uri=uri, code=7)
    assert used == json.loads(flux.run("resource", "R", "-s", "allocated", uri=uri))
    assert eventually(lambda: jobs().get("sim-2", ["", ""])[1] == "RUN")
    flux.run("cancel", jobs()["sim-2"][0], uri=uri)
    flux.run("dovetail", "wait", "--all", uri=uri, code=1)
    assert eventually(lambda: jobs()["sim-2"][1] == "INACTIVE")
    text = (flux.work / "dovetail-out-1" / "summary.json").read_text()
    reasons = [one["reason"] for one in json.loads(text)["simulations"]]
    assert reasons == ["exit code 7: over", "cancelled"]
    flux.run("cancel", job)
    flux.wait(job)


def test_a_slice_that_is_lost_is_replaced_and_the_others_go_on(flux):
    job = flux.batch("flux dovetail up; sleep 1000")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    flux.kill("flux-dovetail slice --number 1")
    assert eventually(lambda: [s["number"] for s in flux.status(uri)["slices"]] == [0, 2])
    flux.run("dovetail", "up", uri=uri)
    nodes = flux.run("dovetail", "kubectl", "get", "nodes", "-o", "name", uri=uri).split()
    assert sorted(nodes) == sorted(f"node/{s['node']}" for s in flux.status(uri)["slices"])
    assert flux.status(uri)["lost"]
    flux.run("cancel", job)
    flux.wait(job)


def test_slices_end_when_the_leading_broker_dies(flux):
    job = flux.batch("flux dovetail up; exec flux dovetail top")  # ends without a broker, too
    flux.run("dovetail", "up", uri=flux.inside(job))
    flux.kill("broker -c", "/jobtmp-0-")
    flux.nothing_left()
    flux.run("cancel", job)  # Flux itself lets the other brokers wait
    flux.wait(job)


def test_a_lost_broker_costs_its_slice_alone(flux):
    job = flux.batch("flux dovetail up; sleep 1000", dovetail="--dovetail=nodes=2,cores=all")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    flux.kill("broker -c", "/jobtmp-1-")  # sched-simple takes the nodes in order
    assert eventually(lambda: [s["number"] for s in flux.status(uri)["slices"]] == [0, 2])
    flux.run("dovetail", "up", uri=uri)
    nodes = flux.run("dovetail", "kubectl", "get", "nodes", "-o", "name", uri=uri)
    assert len(nodes.split()) == 2
    flux.run("cancel", job)
    flux.wait(job)
    flux.nothing_left()


def test_nodes_come_and_go_while_the_job_runs(flux):
    job = flux.batch("flux dovetail up; sleep 1000", dovetail="--dovetail=nodes=1,cores=1")
    uri = flux.inside(job)
    for number in (3, 1, 2):
        flux.run("dovetail", "resize", str(number), uri=uri)
        nodes = flux.run("dovetail", "kubectl", "get", "nodes", "-o", "name", uri=uri)
        assert len(nodes.split()) == number
    flux.run("dovetail", "resize", "0", uri=uri, code=2)
    flux.run("dovetail", "down", uri=uri)
    assert [line for line in flux.left() if "broker_module" not in line] == []
    assert "taken down" in flux.run("dovetail", "up", uri=uri, code=1)


def test_a_service_is_reached_from_a_bare_metal_job(flux):
    pod = {
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": "model", "labels": {"app": "model"}},
        "spec": {"hostNetwork": True, "containers": [{
            "name": "main", "image": "localhost/dovetail/host:1", "imagePullPolicy": "Never",
            "command": ["/usr/bin/python3", "-m", "http.server", "--bind", "$(ADDRESS)", "18473"],
            "env": [{"name": "ADDRESS",
                     "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}],
            "volumeMounts": [{"name": n, "mountPath": f"/{n}"} for n in ("usr", "lib", "lib64")],
            "readinessProbe": {"httpGet": {"port": 18473}, "periodSeconds": 1},
        }],
        "volumes": [{"name": n, "hostPath": {"path": f"/{n}"}} for n in ("usr", "lib", "lib64")]},
    }  # fmt: skip
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "model"},
               "spec": {"selector": {"app": "model"}, "ports": [{"port": 18473}]}}  # fmt: skip
    (flux.work / "model.json").write_text(
        json.dumps({"apiVersion": "v1", "kind": "List", "items": [pod, service]})
    )
    script = """
        flux dovetail up
        flux dovetail kubectl apply -f model.json
        flux dovetail kubectl wait --for=condition=Ready --timeout=100s pod/model
        until url=$(flux dovetail url model); do sleep 0.5; done
        flux run python3 -c 'import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1]).status)' $url"""
    job = flux.batch(script, dovetail="--dovetail=nodes=1,cores=1")
    output = flux.output(job)
    assert "200" in output.split(), output


def test_kubernetes_that_cannot_come_up_is_told_in_time(flux):
    job = flux.batch("flux dovetail up; echo code $?; flux jobs -ano '{name} {status}'",
                     "--conf=dovetail.up-timeout=1")  # fmt: skip
    output = flux.output(job)
    assert "flux dovetail: not up after 1 s: slice 0 is" in output
    assert "code 1" in output
    assert flux.code(job) == 0


def test_a_plain_job_waits_until_kubernetes_is_up_or_fails_with_the_reason(flux):
    paths_or_skip()
    script = """
        id=$(flux submit -n1 --dependency=dovetail:up flux dovetail status)
        flux job attach $id
        flux dovetail down
        id=$(flux submit -n1 --dependency=dovetail:up true)
        flux job wait-event $id clean
        flux job eventlog $id
        flux job eventlog $(flux jobs -n -o '{id}' -f completed --name=dovetail-node)"""
    output = flux.output(flux.batch(script))
    assert "Kubernetes is up" in output
    assert "Kubernetes was taken down" in output
    assert 'epilog-finish description="dovetail-release" status=0' in output


def paths_or_skip():
    """Skip where the jobtap plugins are not built."""
    try:
        paths.jobtap("gate")
    except BadInput as error:
        pytest.skip(str(error))


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


def test_a_nested_instance_that_did_not_ask_has_none(flux):
    script = """
        id=$(flux batch -n1 --output=nested.txt --wrap flux dovetail status)
        flux job wait-event $id clean
        cat nested.txt"""
    output = flux.output(flux.batch(script, dovetail="--dovetail=nodes=1,cores=1"))
    assert "Dovetail is not loaded in this Flux instance" in output


def test_a_submitted_command_becomes_the_first_program_of_an_instance(flux):
    words = ("submit", "-N2", "--dovetail=nodes=1,cores=1", "--output=out.txt", "flux", "dovetail")
    output = flux.output(flux.run(*words, "up"))
    assert "Kubernetes is up: 1 nodes" in output
    flux.nothing_left()


def test_the_example_runs(flux):
    flux.plan()
    text = (TOP / "examples" / "hybrid.sh").read_text()
    (flux.work / "hybrid.sh").write_text(text)
    job = flux.run("batch", "--output=out.txt", "hybrid.sh", "plan.yaml")
    output = flux.output(job)
    assert "run 1: 2 of 2 simulations done" in output
    assert flux.code(job) == 0


def test_an_instance_without_it_starts_it_by_hand(flux):
    script = """
        flux dovetail up --dovetail=nodes=1,cores=1
        flux dovetail kubectl get nodes -o name
        flux dovetail up --dovetail=nodes=1"""
    job = flux.batch(script, dovetail="")
    output = flux.output(job)
    assert "Kubernetes is up: 1 nodes" in output
    assert "loaded here already" in output
    assert flux.code(job) == 2
    flux.nothing_left()


@pytest.mark.parametrize(
    ("value", "word"),
    [("nodes=0", "number from 1"), ("nodes=9", "-N"), ("2", "nodes=N"), ("nodes=1,x=1", "x=1")],
)
def test_a_bad_request_is_refused_before_submission(flux, value, word):
    script = flux.work / "script.sh"
    script.write_text("#!/bin/sh\ntrue\n")
    said = flux.run("batch", "-N4", f"--dovetail={value}", str(script), code=1)
    assert word in said
    assert "Traceback" not in said
    assert flux.run("jobs", "-ano", "{id}") == ""


def test_nothing_secret_is_in_the_kvs_the_jobs_or_the_log(flux):
    script = """
        flux dovetail up
        flux dovetail kubectl config view --raw -o 'jsonpath={.users[0].user.client-key-data}' >key
        flux dump - | tar xOf - >everything
        flux dmesg >>everything
        cat /proc/[0-9]*/cmdline >>everything 2>/dev/null"""
    job = flux.batch(script)
    assert flux.code(job) in (0, 1)
    key = (flux.work / "key").read_text()
    assert len(key) > 200
    everything = (flux.work / "everything").read_bytes()
    assert len(everything) > 10000
    assert key.encode() not in everything
    assert b"BEGIN CERT" not in everything
