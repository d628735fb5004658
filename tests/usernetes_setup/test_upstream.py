# SPDX-License-Identifier: LGPL-3.0-or-later
"""What is around upstream Usernetes: leases, variables, what is added to its files, and refused.

That clusters come up by it is tested where control groups are of version 2 (tests/machines).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from dovetail.core.errors import WorkFailed
from dovetail.host import processes
from support.clusters import eventually
from support.other_users import TOP
from usernetes_setup.control import api_client
from usernetes_setup.node import namespaces
from usernetes_setup.preflight import usernetes as preflight
from usernetes_setup.upstream import engine, leases, removal, service, verbs
from usernetes_setup.upstream.record import PORTS, Record, here

pytestmark = pytest.mark.unit

ARCHIVE = Path(
    os.environ.get("DOVETAIL_SOURCES", TOP.parent / "shared/sources"), "usernetes.tar.xz"
)
ROUTES = """Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT
eth0\t00000000\t0100640A\t0003\t0\t0\t0\t00000000\t0\t0\t0
eth0\t0000640A\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
"""


def record(**more) -> Record:
    known = {"cluster": "c", "node": "u7s-h", "address": "192.0.2.1", "engine": "podman"}
    more = {"compose": "podman-compose", "project": "dovetail-c-1", "timeout": 900.0, **more}
    return Record(**known, **more)


def test_nodes_that_start_together_get_ports_and_subnets_of_their_own():
    first, second = record(), record()
    held = leases.take(first) + leases.take(second)
    assert not {*first.ports.values()} & {*second.ports.values()}
    assert first.subnet != second.subnet
    third = record(worker=True, ports={"kubelet": first.ports["kubelet"]}, subnet="2")
    with pytest.raises(OSError, match=f"port {first.ports['kubelet']}, which the cluster's nodes"):
        leases.take(third)
    for lease in held:
        lease.close()
    for lease in leases.take(third):
        lease.close()
    assert third.ports["kubelet"] == first.ports["kubelet"]
    assert third.subnet.split(".")[2] == "2"


def test_a_port_that_somebody_listens_on_is_not_free():
    with socket.create_server(("127.0.0.1", 0)) as server:
        wanted = {"kubelet": server.getsockname()[1]}
        with pytest.raises(OSError, match="is in use on this machine"):
            leases.take(record(ports=wanted))


def test_routes_of_the_machine_are_seen():
    assert [str(one) for one in leases.routes(ROUTES)] == ["10.100.0.0/16"]


@pytest.fixture
def checkout(tmp_path):
    if not ARCHIVE.exists():
        pytest.skip(f"no {ARCHIVE}: DOVETAIL_SOURCES names the folder that has it")
    subprocess.run(["tar", "-C", tmp_path, "-xf", ARCHIVE], check=True)
    return tmp_path / "usernetes"


def test_upstreams_files_stay_as_they_are_and_a_second_compose_file_adds(
    checkout, tmp_path, monkeypatch
):
    monkeypatch.setenv("DOVETAIL_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("MAKEFLAGS", "w")  # as where dovetail is run by another makefile
    monkeypatch.setenv("MAKELEVEL", "1")
    wanted = record(image="localhost/node:1", mounts=["/srv"], subnet="10.101.7.0/24",
                    ports=dict(zip(leases.PORTS, itertools.count(20001))))  # fmt: skip
    (tmp_path / "state").mkdir(mode=0o700)
    wanted.folder.mkdir(mode=0o700)
    assert engine.environment(wanted)["PORT_CALICO_TYPHA"] == "20006", "as Gen 3 names it"
    engine.check(checkout)
    engine.copy(wanted, checkout)
    for path in checkout.rglob("*"):
        if path.is_file() and "docs" not in path.parts:
            assert (wanted.checkout / path.relative_to(checkout)).read_bytes() == path.read_bytes()
    added = yaml.safe_load((wanted.folder / "compose.yaml").read_text())["services"]["node"]
    assert "/srv:/srv" in added["volumes"]
    lines = (wanted.folder / "Dockerfile").read_text().splitlines()
    assert lines[0] == "FROM localhost/node:1"
    assert [line.split()[0] for line in lines[1:]] == ["ADD", "ADD", "ENTRYPOINT"]
    configured = yaml.safe_load_all((wanted.folder / "kubeadm-config.yaml").read_text())
    parts = {part["kind"]: part for part in configured}
    begin = parts["InitConfiguration"]
    assert begin["timeouts"]["kubeletHealthCheck"] == "900s"
    assert f"{wanted.folder}/patches:{begin['patches']['directory']}:ro" in added["volumes"]
    for pod in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"):
        patch = json.loads((wanted.folder / f"patches/{pod}+strategic.json").read_text())
        (container,) = patch["spec"]["containers"]
        assert container == {"name": pod, "livenessProbe": {"failureThreshold": 90}}
    cluster = parts["ClusterConfiguration"]
    for part in ("controllerManager", "scheduler"):
        assert {"name": "leader-elect", "value": "false"} in cluster[part]["extraArgs"]
    external = {"name": "cloud-provider", "value": "external"}
    assert external in cluster["controllerManager"]["extraArgs"]
    # Upstream's makefile itself says what it makes of the variables.
    asked = "asked:\n\t@env | grep -E '^(PORT_|NODE_|HOST_IP)'\ninclude Makefile\n"
    told = subprocess.check_output(
        ["make", "-f", "-", "asked"],
        input=asked, text=True, cwd=wanted.checkout, env=engine.environment(wanted),
    )  # fmt: skip
    found = dict(line.split("=", 1) for line in told.splitlines())
    assert found["NODE_IP"] == "10.101.7.100"
    assert (found["PORT_KUBE_APISERVER"], found["PORT_FLANNEL"]) == ("20001", "20004")


@pytest.fixture
def podman(tmp_path, monkeypatch):
    """Makes a podman that notes what it is asked, and a node of it that is only written down."""
    monkeypatch.setenv("DOVETAIL_STATE", str(tmp_path / "state"))
    (tmp_path / "state/c/usernetes").mkdir(parents=True)
    (tmp_path / "state").chmod(0o700)
    (tmp_path / "state/c/usernetes/Makefile").write_text("down-v:\n\t@echo ended\n")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")

    def make(script) -> Record:
        (tmp_path / "bin").mkdir()
        (tmp_path / "bin/podman").write_text(f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n{script}\n')
        (tmp_path / "bin/podman").chmod(0o755)
        made = record(subnet="10.101.1.0/24", alone=True, settings=engine.kept())
        made.save()
        return made

    return make


def test_a_node_whose_engine_does_not_answer_stays_known(podman):
    known = podman("exit 125")
    assert removal.remove(known) == ["podman does not answer"]
    assert here("c") == known


def test_an_engine_that_does_not_tell_what_runs_is_not_restarted(podman, tmp_path, capfd):
    known = podman('[ "$*" != "ps -a -q" ]')  # of this node there is nothing, of others who knows
    assert removal.remove(known) == []
    assert not known.folder.exists()
    asked = (tmp_path / "asked").read_text().splitlines()
    assert "ps -a -q" in asked
    assert "system migrate" not in asked
    told = capfd.readouterr()
    assert (told.out, told.err) == ("", "ended\n"), "a verb's output is JSON"


def test_removal_asks_the_engine_that_made_the_node(podman, tmp_path, monkeypatch):
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/one")
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy")
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    known = podman('echo "$DOCKER_HOST $https_proxy $CONTAINERS_CONF $TMPDIR"')
    monkeypatch.setenv("DOCKER_HOST", "unix:///run/another")
    monkeypatch.setenv("CONTAINERS_CONF", "/another")
    assert engine.ask(known, "info") == "unix:///run/one http://user:secret@proxy  \n"
    told = engine.environment(known)
    assert told["https_proxy"] == "http://user:secret@proxy"
    assert {"u7s-h", "192.0.2.1", "10.101.1.0/24", ".svc"} < {*told["NO_PROXY"].split(",")}
    assert (known.folder / "usernetes.json").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--provider", "usernetes"], "needs --usernetes DIR"),
        (["up", "--provider", "usernetes", "--usernetes", "/usr"], "has no Makefile"),
        (["up", "--provider", "usernetes", "--cpus", "1"], "--cpus: not with --provider usernetes"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(words, said, tmp_path):
    environment = {**os.environ, "DOVETAIL_STATE": str(tmp_path / "state"),
                   "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup"}  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "usernetes_setup", *words], env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "state").exists()


def test_a_folder_whose_name_leaves_no_room_for_a_socket_is_refused(tmp_path):
    state = tmp_path / ("s" * 100)
    words = ["up", "--provider", "usernetes", "--usernetes", "/usr"]
    environment = {**os.environ, "DOVETAIL_STATE": str(state),
                   "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup"}  # fmt: skip
    done = subprocess.run([sys.executable, "-m", "usernetes_setup", *words], env=environment,
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode == 2
    assert f"{state}: a socket there would have a path of" in done.stderr
    assert not state.exists()


def test_clusters_of_two_state_folders_are_two_to_the_engine_whatever_they_mount(
    tmp_path, monkeypatch
):
    """Else the end of one would remove the other's node."""
    for module, name, found in (
        (verbs.engine, "check", None), (verbs.preflight, "problems", []),
        (verbs.preflight, "chosen", ("podman", "podman-compose")),
        (verbs, "usual_address", "192.0.2.1"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, lambda *_, found=found: found)
    args = argparse.Namespace(name="c", timeout=9.0, owner=0, usernetes="u", mount=[str(tmp_path)],
                              address="", node="", node_image="")  # fmt: skip

    def project(state: str) -> str:
        monkeypatch.setenv("DOVETAIL_STATE", state)
        return verbs.plan(args).project

    one, two = (str(tmp_path / name) for name in ("one", "two"))
    assert project(one) == project(one) != project(two)


def test_a_service_runs_nothing_of_a_working_folder(podman, tmp_path, monkeypatch):
    """Python would take a user's queue.py there for the standard library's."""
    known = podman("")
    script = f"#!/bin/sh\nprintf '%s\\n' \"$@\" >{tmp_path}/asked\n"
    (tmp_path / "bin/systemd-run").write_text(script)
    (tmp_path / "bin/systemd-run").chmod(0o755)
    verbs.launch(known)
    assert "--property=WorkingDirectory=/" in (tmp_path / "asked").read_text().splitlines()


def test_nodes_that_are_invited_at_once_get_subnets_of_their_own(podman, tmp_path, monkeypatch):
    started, monitor = record(ports=dict.fromkeys(PORTS, 1), ready=True), os.getpid()
    started.monitor, started.monitor_ticks = monitor, processes.start_ticks(monitor)
    started.folder.mkdir(parents=True, exist_ok=True)
    started.save()
    monkeypatch.setattr(verbs, "join_command", lambda _: "kubeadm join")
    monkeypatch.setattr(verbs, "expire", lambda *_: None)
    subnets = []
    for node in ("u7s-1", "u7s-2"):  # both have read the record before either has the lock
        asked = argparse.Namespace(name="c", node=node, valid=600, invite=str(tmp_path / node))
        verbs.invite(asked, dataclasses.replace(started))
        subnets.append(json.loads((tmp_path / node).read_text())["subnet"])
    assert subnets == [2, 3]


def test_a_token_that_cannot_be_shortened_is_said(monkeypatch):
    class Api:
        def call(self, *words, **more):
            raise api_client.Refused(404, "not found")

    monkeypatch.setattr(service, "api", lambda known: Api())
    with pytest.raises(WorkFailed, match="cluster c: does not answer: 404: not found; try again"):
        verbs.expire(record(), "kubeadm join h:1 --token a.b", 600)


def test_a_node_may_be_waited_for_without_end():
    def work():  # in a process of its own, which has the signals
        reading, writing = os.pipe()
        os.write(writing, b"x")
        ours, _theirs = socket.socketpair()
        monitor = service.Monitor(record(timeout=math.inf), ours)
        assert monitor.wait(monitor.deadline, reading) == reading

    assert namespaces.in_child(work) == ""


def test_a_node_that_is_waited_for_without_end_can_be_set_up(podman, tmp_path):
    known = podman("")
    known.timeout = math.inf
    (tmp_path / "upstream").mkdir()
    (tmp_path / "upstream/kubeadm-config.yaml").write_text("kind: InitConfiguration\n")
    (known.checkout / "Makefile").unlink()
    known.checkout.rmdir()
    engine.copy(known, tmp_path / "upstream")
    configured = (known.folder / "kubeadm-config.yaml").read_text()
    assert "kubeletHealthCheck: 31536000s\n" in configured
    patch = json.loads((known.folder / "patches/etcd+strategic.json").read_text())
    (container,) = patch["spec"]["containers"]
    assert container["livenessProbe"] == {"failureThreshold": 3153600}


def test_what_a_failed_join_says_has_no_token(tmp_path):
    """It goes into a job's output, and others may read that."""
    joined = "kubeadm join m1:20001 --token {} --discovery-token-ca-cert-hash sha256:0123\n"
    (tmp_path / "log").write_text(f"+ {joined.format('abc123.0123456789abcdef')}error: v1.36.3\n")
    said = verbs.last_words(tmp_path).splitlines()
    assert said == ["", f"  + {joined.format('TOKEN')}".rstrip(), "  error: v1.36.3"]


def test_a_node_goes_on_where_a_verb_cannot_be_started_now(monkeypatch):
    new = {"spec": {"taints": [{"key": service.UNINITIALIZED}]}}
    monkeypatch.setattr(service, "EVERY", 0.0)
    monkeypatch.setattr(service, "api", lambda known: object())
    monkeypatch.setattr(service, "nodes", lambda client: [new])

    def work():  # in a process of its own, which has the signals
        ours, _theirs = socket.socketpair()
        monitor = service.Monitor(record(), ours)
        tries = []

        def verbs(name):
            tries.append(name)
            if len(tries) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            raise OSError(errno.EAGAIN, "too many processes")

        monitor.verbs = verbs
        with contextlib.suppress(service.Ended):
            monitor.watch()

    assert namespaces.in_child(work) == ""


def test_a_join_command_that_does_not_come_is_not_waited_for_without_end(podman, tmp_path):
    known = podman("")
    known.timeout = 1.0
    makefile = known.checkout / "Makefile"
    makefile.write_text(f"join-command:\n\t@sleep 100 & echo $$! >{tmp_path}/pid; wait\n")
    with pytest.raises(WorkFailed, match="make join-command: not done after 1 s"):
        verbs.join_command(known)
    left = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not processes.start_ticks(left))
    known.timeout = 60.0
    makefile.write_text("join-command:\n\t@echo kubeadm join m1 >join-command\n")
    assert verbs.join_command(known) == "kubeadm join m1\n"
    assert not (known.checkout / "join-command").exists()
    makefile.write_text("join-command:\n\t@echo no such container >&2; exit 1\n")
    with pytest.raises(WorkFailed, match="make join-command: no such container"):
        verbs.join_command(known)


def test_a_verb_that_takes_too_long_ends_with_all_that_it_started(podman, tmp_path):
    known = podman("")
    (known.checkout / "Makefile").write_text(
        f"up:\n\t@sleep 100 & echo $$! >{tmp_path}/pid; wait\n"
    )

    def work():  # in a process of its own, which has the signals
        ours, _theirs = socket.socketpair()
        monitor = service.Monitor(known, ours)
        monitor.wait(0.0)
        monitor.deadline = time.monotonic() + 1.0
        with contextlib.suppress(WorkFailed):
            monitor.verbs("up")

    assert namespaces.in_child(work) == ""
    left = int((tmp_path / "pid").read_text())
    assert eventually(lambda: not processes.start_ticks(left))


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [([], 2, "usage: usernetes-setup/node-image/make FILE"),
     (["node.tar"], 1, "there is go1.19.8; Go 1.21 or later is needed")],
)  # fmt: skip
def test_a_node_image_is_refused_in_a_line(tmp_path, words, code, said):
    for name in ("go", "mmdebstrap", "cc", "jq"):
        (tmp_path / name).write_text("#!/bin/sh\necho go1.19.8\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [f"{TOP}/usernetes-setup/node-image/make", *words], cwd=tmp_path, text=True,
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}, capture_output=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"node-image: {said}\n"


def test_doctor_says_which_provider_fits_and_why():
    done = subprocess.run(
        [sys.executable, "-m", "usernetes_setup", "preflight", "--json"],
        capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup"},
    )  # fmt: skip
    told = json.loads(done.stdout)
    assert (told["provider"] == "dovetail") == told["can_run"]
    (line,) = [one for one in told["checks"] if one["name"] == "usernetes"]
    assert line["found"].startswith(("can run here, by", "cannot run here: "))
    assert "usernetes" in told["why"]


def test_podman_compose_is_told_as_debians_pip_takes_it(tmp_path, monkeypatch):
    """That refuses what is not in a virtual environment, unless it is told to."""
    (tmp_path / "python3").write_text('#!/bin/sh\n[ "$PIP_BREAK_SYSTEM_PACKAGES" ]\n')
    (tmp_path / "python3").chmod(0o755)
    monkeypatch.setattr(preflight, "chosen", lambda: ("sh", "podman-compose"))
    monkeypatch.setattr(preflight, "_version", lambda program: (1, 0, 3))
    (fix,) = [fix for why, fix, _ in preflight._problems() if "there is 1.0.3" in why]
    shell = ["sh", "-c", f'{fix}\necho "$PATH"']
    path = f"{tmp_path}:{os.environ['PATH']}"
    told = subprocess.check_output(shell, env={"PATH": path, "HOME": "/home/ann"}, text=True)
    assert told == f"/home/ann/.local/bin:{path}\n"
