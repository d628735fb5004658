# SPDX-License-Identifier: LGPL-3.0-or-later
"""Services beside simulations: the model server, its address, and the hybrid example."""

from __future__ import annotations

import contextlib
import csv
import importlib.util
import itertools
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import yaml
from dovetail.core.errors import BadInput
from dovetail.flux import services
from support import flux_batch, flux_operator
from support.clusters import eventually

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
MODELS = ("linear", "bayesian", "passive-aggressive", "bayesian-cells", "neighbours")
LONG = 600  # seconds; a limit for hangs of the whole example on a busy machine


def needs(*, lammps=False):
    """Skip where what `./bootstrap services` installs is missing."""
    if importlib.util.find_spec("river") is None:
        pytest.skip("river is not installed: run ./bootstrap services")
    if lammps and not shutil.which("lmp"):
        pytest.skip("LAMMPS is not installed: run ./bootstrap services")


# --- Where a service is ---

NAMED = [{"name": "metrics", "containerPort": 9}, {"name": "http", "containerPort": 8473}]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("port", "found"),
    [
        ({"port": 80}, 80),
        ({"port": 80, "targetPort": 8473}, 8473),
        ({"port": 80, "targetPort": "http"}, 8473),
    ],
)
def test_the_port_of_a_service_is_that_of_its_pods(port, found):
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{"ports": NAMED}, {}]}}
    assert services.target_port({"ports": [port]}, pod) == found


@pytest.mark.unit
def test_a_port_that_the_pod_does_not_name_is_said():
    pod = {"metadata": {"name": "p"}, "spec": {"containers": [{}]}}
    with pytest.raises(BadInput, match="pod p has no port called http"):
        services.target_port({"ports": [{"port": 80, "targetPort": "http"}]}, pod)


@pytest.mark.unit
@pytest.mark.parametrize("word", ["../x", "a/b/c", "model/", "Model", "a b", "-x", ""])
def test_what_names_no_service_is_refused_before_the_api_is_asked(word):
    cluster: Any = None
    with pytest.raises(BadInput, match="is not the name of a service"):
        services.url(cluster, word)


# --- The model server and its client ---


@contextlib.contextmanager
def server(**environment):
    """A model server on an address of its own; its URL."""
    needs()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, str(EXAMPLES / "model_server.py"), "127.0.0.1", str(port)]
    with subprocess.Popen(words, env={**os.environ, **environment}, stderr=subprocess.PIPE) as run:
        try:
            url = f"http://127.0.0.1:{port}"
            assert eventually(lambda: run.poll() is not None or ready(url))
            assert run.poll() is None, run.stderr.read()
            yield url
        finally:
            run.terminate()
    assert run.returncode == 0


def ready(url):
    try:
        return urllib.request.urlopen(f"{url}/ready", timeout=5).status == 200
    except OSError:
        return False


def ask(url, sample=None, **headers):
    """The status and the answer of one request."""
    body = None if sample is None else json.dumps(sample).encode()
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=60) as got:
            return got.status, json.load(got)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


@pytest.mark.unit
def test_the_model_learns_what_it_is_fed_and_says_how_well():
    with server() as url:
        for number in range(40):
            x = {"one": 1, "cells": number % 8, "x": number % 8}
            assert ask(f"{url}/learn", {"x": x, "y": 3 * x["cells"] + 2})[0] == 200
        code, guesses = ask(f"{url}/predict", {"x": {"one": 1, "cells": 5, "x": 5}})
        assert (code, set(guesses)) == (200, set(MODELS))
        assert guesses["bayesian-cells"] == pytest.approx(17, rel=0.05)
        assert guesses["neighbours"] == pytest.approx(17, rel=0.2)
        _, found = ask(f"{url}/metrics")
        assert found["samples"] == 40
        assert set(found["mae"]) == set(MODELS)
        assert min(found["mae"].values()) > 0, "errors are of samples before they were learned"


@pytest.mark.unit
def test_the_server_refuses_what_is_no_sample_and_goes_on():
    with server() as url:
        for sample in ([], {}, {"x": 1, "y": 1}, {"x": {"a": "b"}, "y": 1}, {"x": {"a": 1}}):
            code, found = ask(f"{url}/learn", sample)
            assert (code, found["error"][:12]) == (400, "not a sample"), sample
        assert ask(f"{url}/nothing", {})[0] == 404
        assert ask(f"{url}/metrics")[1]["samples"] == 0


@pytest.mark.unit
def test_nobody_without_the_token_learns_predicts_or_looks():
    with server(TOKEN="open sesame\n") as url:
        sample = {"x": {"x": 1}, "y": 1}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "open sesame"}):
            assert ask(f"{url}/learn", sample, **headers)[0] == 401
            assert ask(f"{url}/predict", sample, **headers)[0] == 401
            assert ask(f"{url}/metrics", **headers)[0] == 401
        assert ask(f"{url}/learn", sample, Authorization="Bearer open sesame")[0] == 200


def client(*words, **environment):
    return subprocess.run(
        [sys.executable, EXAMPLES / "model_client.py", *words],
        capture_output=True, text=True, env={**os.environ, **environment},
    )  # fmt: skip


@pytest.mark.unit
def test_the_client_asks_the_server_and_no_proxy(tmp_path):
    lines = "region box block 0 6 0 7 0 8\nLoop time of 1.5 on 2 procs\n99.0% CPU use with 2\n"
    (tmp_path / "log").write_text(lines)
    with server() as url:
        done = client(url, "learn", str(tmp_path / "log"), http_proxy="http://127.0.0.1:1",
                      no_proxy="", NO_PROXY="")  # fmt: skip
    assert (done.stdout, done.stderr) == ("log: sample 1\n", "")


@pytest.mark.unit
def test_the_client_says_in_one_line_what_is_wrong(tmp_path):
    (tmp_path / "log").write_text("LAMMPS\nERROR: no atoms\n")
    done = client("http://127.0.0.1:1", "learn", str(tmp_path / "log"))
    assert (done.returncode, done.stderr) == (
        1, f"model_client: {tmp_path}/log: is no log of a finished LAMMPS job of in.lj\n",
    )  # fmt: skip
    done = client("http://127.0.0.1:1", "learn", str(tmp_path / "none"))
    assert done.stderr.startswith("model_client: [Errno 2] No such file")


@pytest.mark.unit
@pytest.mark.parametrize("used", ["99.0", "0.0"])
def test_one_job_is_predicted_though_it_has_no_variance(used, tmp_path):
    lines = ("region box block 0 10 0 10 0 10", "Loop time of 2.5 on 1 procs", f"{used}% CPU use")
    (tmp_path / "log").write_text("\n".join(lines) + "\n")
    with server() as url:
        words = ["predict", "--output", str(tmp_path / "out"), str(tmp_path / "log")]
        done = client(url, *words)
    assert (done.returncode, done.stderr) == (0, "")
    assert "on 1 unseen jobs: nan" in done.stdout
    assert "predicted" in (tmp_path / "out.svg").read_text()


@pytest.mark.unit
@pytest.mark.parametrize("jobs", ["18", "0,9", "18,1", "1082,250", "a,b", "18,9,1"])
def test_numbers_of_jobs_that_cannot_be_are_told_and_nothing_is_made(tmp_path, jobs):
    done = subprocess.run(["bash", EXAMPLES / "hybrid.sh"], cwd=tmp_path, capture_output=True,
                          env={**os.environ, "HYBRID_JOBS": jobs}, text=True)  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"hybrid.sh: HYBRID_JOBS={jobs}: give LEARNED,UNSEEN")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


# --- In a Flux instance ---


@pytest.fixture
def flux(instances):
    with instances.one() as made:
        yield made


@pytest.fixture
def user(instances):
    """An instance of an ordinary user, whoever runs the tests; Fluxion's, if that is installed."""
    fluxion = "sched-fluxion-qmanager"
    scheduler = fluxion if flux_batch.installed(fluxion) else "sched-simple"
    with instances.one(user=os.getuid() == 0, scheduler=scheduler) as made:
        yield made


def with_examples(flux):
    """The examples where the user is, as in a checkout."""
    shutil.copytree(EXAMPLES, flux.work / "examples")
    for path in (flux.work / "examples", *(flux.work / "examples").iterdir()):
        os.chown(path, flux.uid, flux.uid)
    return flux


def finish(flux, *words):
    """Submit an example and wait for its end; what it printed."""
    job = flux.run("batch", "--output=out.txt", flux_batch.PATIENT, *flux.scheduler, *words)
    # Longer than a test's usual wait.
    subprocess.run(flux.words("job", "wait-event", "-t", str(LONG), job, "clean"),
                   env={**flux.environment, "FLUX_URI": flux.uri}, check=True)  # fmt: skip
    output = flux.output(job)
    assert flux.code(job) == 0, output
    return output


def check_predictions(output, folder):
    """R squared as printed is that of the table, over jobs that were not learned."""
    with open(folder / "predicted.csv") as file:
        rows = list(csv.DictReader(file))
    learned = re.findall(r"^(\S+\.log): sample \d+$", output, re.M)
    assert f"{learned[-1]}: sample {len(learned)}" in output, "the server had all of them"
    assert len(learned) >= 2 * len(rows) > 0
    assert not set(learned) & {row["log"] for row in rows}
    actual = np.array([float(row["actual"]) for row in rows])
    printed = dict(re.findall(r"R squared of (\S+), on \d+ unseen jobs: (\S+)", output))
    assert set(printed) == set(MODELS)
    for name, score in printed.items():
        missed = actual - np.array([float(row[name]) for row in rows])
        wanted = 1 - (missed**2).mean() / actual.var()
        assert float(score) == pytest.approx(wanted, abs=0.001)
    drawing = ElementTree.parse(folder / "predicted.svg").getroot()
    assert len(drawing.findall("{*}circle")) == len(rows) * len(MODELS)


@pytest.mark.first
@pytest.mark.flux
def test_the_hybrid_example_runs(flux):
    needs(lammps=True)
    plan = with_examples(flux).work / "examples/pitzdaily.yaml"
    text, changed = re.subn("endTime -set 100", "endTime -set 40", plan.read_text())
    plan.write_text(text)
    output = finish(flux, "examples/hybrid.sh")
    check_predictions(output, flux.work / "hybrid-out")
    entries = yaml.safe_load(text)["simulations"]
    assert changed == len(entries), "each is made shorter"
    count = sum(entry["count"] for entry in entries)
    assert f"run 1: {count} of {count} simulations done" in output
    assert (flux.work / "hybrid-out" / "token").stat().st_mode & 0o077 == 0
    flux.nothing_left()


@pytest.mark.first
@pytest.mark.flux
def test_the_hybrid_example_runs_as_an_ordinary_user(user):
    needs(lammps=True)
    user.plan()
    folder = user.work / "hybrid-out"
    (folder / "learned").mkdir(parents=True)
    for y, z in itertools.product(range(6, 17), repeat=2):  # as if an earlier job had run these
        log = f"region box block 0 6 0 {y} 0 {z}\nLoop time of {y * z / 1e3} on 2\n99% CPU use\n"
        (folder / f"learned/6-{y}-{z}.log").write_text(log)
    for path in (folder, folder / "learned"):
        os.chown(path, user.uid, user.uid)
    user.environment |= {"HYBRID_RESUME": "1", "HYBRID_JOBS": "12,4"}
    output = finish(with_examples(user), "examples/hybrid.sh", "plan.yaml")
    check_predictions(output, folder)
    learned = re.findall(r"^(\S+\.log): sample", output, re.M)
    assert len(learned) == 12
    made_up = [name.startswith("6-") for name in learned]
    assert True in made_up
    assert made_up == sorted(made_up, reverse=True), "they are learned first"
    assert "99% CPU" in (folder / "learned" / learned[0]).read_text(), "and not run again"
    assert "run 1: 2 of 2 simulations done" in output
    user.nothing_left()


@pytest.mark.flux
def test_simulations_of_a_batch_job_go_through_the_flux_operator(user):
    user.environment["FLUX_OPERATOR"] = str(flux_operator.home())
    user.plan()
    output = finish(with_examples(user), "examples/operator.sh", "plan.yaml")
    assert "run 1: 2 of 2 simulations done" in output
    events = (user.work / "dovetail-out-1" / "events.jsonl").read_text()
    assert "MiniClusters of the Flux Operator" in events
    user.nothing_left()


@pytest.mark.flux
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


NO_URL = {
    "kubernetes": "service kubernetes has no selector or no port, so no pod can be found",
    "nobody": "there is no service nobody",
    "nowhere/model": "there is no service nowhere/model",
    "../../nodes": "'../../nodes' is not the name of a service",
    "model/": "'model/' is not the name of a service",
    "idle": "no pod of service idle is ready",
}


@pytest.mark.flux
def test_a_service_that_cannot_be_reached_is_told_and_harms_nothing(flux):
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "idle"},
               "spec": {"selector": {"app": "idle"}, "ports": [{"port": 1}]}}  # fmt: skip
    (flux.work / "idle.json").write_text(json.dumps(service))
    asking = "\n".join(f"flux dovetail url {name}; echo code $?" for name in NO_URL)
    script = f"""
        exec 2>&1
        flux dovetail up
        flux dovetail kubectl apply -f idle.json
        {asking}
        flux dovetail status
        flux dovetail down
        flux dovetail url idle; echo code $?"""
    output = flux.output(flux.batch(script, dovetail="--dovetail=nodes=1,cores=1"))
    lines = output.splitlines()
    for why in NO_URL.values():
        assert lines[lines.index(f"flux dovetail: {why}") + 1] == "code 2", output
    assert "Kubernetes is up" in lines
    assert lines[lines.index("flux dovetail: Kubernetes was taken down") + 1] == "code 1", output
