# SPDX-License-Identifier: LGPL-3.0-or-later
"""Nothing of a batch job with Kubernetes is for others: users, logs, shared files."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import subprocess
import threading
from pathlib import Path

import pytest
from dovetail.flux.instance import requests
from support import known_programs
from support.clusters import STRANGER, as_user, below
from support.flux_batch import LIMIT, eventually
from support.strangers import attempt

pytestmark = pytest.mark.flux
# Asks everything that the module answers, and says what became of each.
ASKING = """
import json, sys, flux
handle, found = flux.Flux(), {"size": flux.Flux().attr_get("size")}
for topic in sys.argv[1:]:
    payload = {"number": 0, "slice": 0, "service": "model", "nodes": 1, "run": 1, "name": "sim-1"}
    try:
        found[topic] = str(handle.rpc("dovetail." + topic, payload, 0).wait_for(20).get())
    except OSError as error:
        found[topic] = error.errno
print(json.dumps(found))
"""


@pytest.fixture
def flux(instances):
    with instances.one() as made:
        yield made


def simulating(user):
    """A plan of one simulation of two ranks, which runs until it is ended."""
    program = Path(known_programs.build("openmpi", "known/busy.c"))
    for path in (program, program.parent):
        path.chmod(0o755)
    entry = {"name": "sim", "case": str(user.work / "case"), "ranks": 2,
             "command": [str(program), "sleep", "1000000", "20", "20"]}  # fmt: skip
    (user.work / "plan.yaml").write_text(json.dumps({"simulations": [entry]}))
    return program


def shared(user):
    """The user's folders in shared memory; in a pod the user has another number."""
    folders = Path("/dev/shm").glob("dovetail-*")
    return [folder for folder in folders if folder.exists() and folder.stat().st_uid == user.uid]


def pages(user):
    """The pages of the simulation's ranks."""
    files = [path for folder in shared(user) for path in below(folder)]
    return [path for path in files if path.name.startswith("rank")]


def processes(user):
    """All of the user's: pid to command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            uid = re.search(r"^Uid:\t(\d+)", (folder / "status").read_text(), re.MULTILINE)[1]
            line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if int(uid) == user.uid and line:
                found[int(folder.name)] = line
    return found


def as_stranger(user, uri, *words):
    """Run a flux command as somebody else, who knows where the instance is."""
    environment = {**user.environment, "FLUX_URI": uri, "HOME": "/nonexistent"}
    line = as_user(STRANGER, user.flux, *words)
    return subprocess.run(line, env=environment, cwd="/", capture_output=True, text=True,
                          timeout=LIMIT, start_new_session=True)  # fmt: skip


def test_another_user_on_the_node_gets_nothing_of_a_job(user):
    program = simulating(user)
    script = "flux dovetail submit --wait-up plan.yaml; flux dovetail top >/dev/null"
    job = user.batch(script, size=2)
    uri = user.inside(job)
    assert eventually(lambda: len(pages(user)) == 2, LIMIT), user.status(uri)
    shown = user.run("dovetail", "kubectl", "config", "view", uri=uri)
    server = re.search(r"server: (\S+)", shown)[1]
    folders = [*Path("/tmp").glob(f"dovetail-{user.uid}-*"), *shared(user)]
    inside = [path for folder in folders for path in below(folder)]
    assert any(path.name == "kubeconfig" for path in inside)
    running = processes(user)
    parts = ("kube-apiserver", "etcd", "flux-dovetail slice", "module-python-exec", str(program))
    for part in parts:
        assert any(part in line for line in running.values()), part
    got, gone = attempt(
        urls=[f"{server}{path}" for path in ("/api", "/version", "/metrics", "/api/v1/secrets")],
        files=[*map(str, folders), *map(str, inside[:3000]), *map(str, pages(user))],
        sockets=[str(path) for path in inside if path.is_socket()],
        pids=sorted(running),
    )
    assert got == []
    assert len(gone) < len(running) // 2
    user.run("cancel", job)
    user.wait(job)


@pytest.mark.parametrize("guests", [False, True], ids=["is not let in", "is let in as a guest"])
def test_the_module_answers_nobody_but_its_owner_when_another_user(guests, user):
    options = ["--conf=access.allow-guest-user=true"] if guests else []
    job = user.batch("flux dovetail up; flux dovetail top >/dev/null", *options, size=2)
    uri = user.inside(job)
    user.run("dovetail", "up", uri=uri)
    for folder in Path(uri.removeprefix("local://")).parents:
        if guests and folder.stat().st_uid == user.uid:
            os.chmod(folder, 0o755)  # even then
    topics = sorted({*requests.REQUESTS, *requests.STREAMS})
    done = as_stranger(user, uri, "python", "-c", ASKING, *topics)
    if guests:
        found = json.loads(done.stdout)
        assert found.pop("size") == "2", "a guest is connected"
        assert dict.fromkeys(topics, 1) == found, "EPERM"
    else:
        assert done.returncode != 0
        assert done.stdout == ""
    for words in (("kubectl", "get", "nodes"), ("status",), ("top",), ("url", "model"), ("down",),
                  ("up", "--dovetail=nodes=1")):  # fmt: skip
        done = as_stranger(user, uri, "dovetail", *words)
        assert done.returncode in (1, 2), done.stdout
        assert done.stdout == ""
        assert "Traceback" not in done.stderr
        assert not guests or "belongs to another user" in done.stderr
    assert user.status(uri)["phase"] == "up"
    user.run("cancel", job)
    user.wait(job)


def test_nothing_secret_is_in_the_kvs_the_jobs_the_log_or_shared_files(flux):
    script = """
        flux dovetail up
        until [ -e joined ]; do sleep 0.2; done
        flux dump - | tar xOf - >everything
        flux dmesg >>everything"""
    job = flux.batch(script, dovetail="--dovetail=nodes=1,cores=1")
    uri = flux.inside(job)
    flux.run("dovetail", "up", uri=uri)
    view = ("config", "view", "--raw", "-o", "jsonpath={.users[0].user.client-key-data}")
    key = flux.run("dovetail", "kubectl", *view, uri=uri)
    with every_process() as seen:
        token = invited(flux, uri)
    assert any(b"kubelet\0" in line for line in seen), "of the node that joined"
    (flux.work / "joined").touch()
    assert flux.code(job) == 0
    everything = (flux.work / "everything").read_bytes()
    assert len(everything) > 10000
    shared = [path.read_bytes() for path in flux.folder.rglob("*") if path.is_file()]
    assert everything in shared
    for secret in (key.encode(), base64.b64decode(key).splitlines()[1], token, b"BEGIN CERT"):
        assert len(secret) >= 10
        assert [place for place in (*seen, *shared) if secret in place] == []


@contextlib.contextmanager
def every_process():
    """The arguments and environments of all processes, in short intervals while in here."""
    seen, over = set(), threading.Event()

    def look():
        while not over.wait(0.02):
            for path in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    seen.update((path / name).read_bytes() for name in ("cmdline", "environ"))

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        yield seen
    finally:
        over.set()
        watcher.join()


def invited(flux, uri):
    """Have a node join, and catch its join token, which is there for a moment."""
    tokens = ("-n", "kube-system", "get", "secrets", "-w", "-o",
              'jsonpath={.data.token-secret}{"\\n"}')  # fmt: skip
    with flux.start("dovetail", "kubectl", *tokens, uri=uri) as watching:
        words = ("create", "secret", "generic", "probe", "--from-literal=token-secret=probe")
        flux.run("dovetail", "kubectl", "-n", "kube-system", *words, uri=uri)
        caught = (base64.b64decode(line) for line in watching.stdout)
        assert b"probe" in caught, "the watch is there"
        flux.run("dovetail", "resize", "2", uri=uri)
        token = next(filter(None, caught))
        watching.terminate()
    return token
