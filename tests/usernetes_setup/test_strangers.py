# SPDX-License-Identifier: LGPL-3.0-or-later
"""Another user of the host gets nothing."""

from __future__ import annotations

import contextlib
import json
import os
import ssl
import subprocess
import sys
from pathlib import Path

import pytest
from support import known_programs
from support.clusters import COMPONENTS, ROOT, as_user, below, eventually, record, start
from support.strangers import attempt
from usernetes_setup.node import cgroups

pytestmark = pytest.mark.kube


@pytest.mark.skipif(not ROOT, reason="only root can play another user")
def test_another_user_of_the_host_gets_nothing(machine):
    made = machine.up("--name", "one")
    start(machine, made, "first")
    parts, folder = record(made), Path(made["folder"])
    kubelet = f"https://{parts['address']}:{parts['ports']['kubelet']}"
    streams = f"https://{parts['address']}:{parts['ports']['stream']}"
    metrics = f"https://{parts['address']}:{parts['ports']['metrics']}"
    inside = [str(path) for path in below(folder)]
    attempts = {
        "urls": [f"{made['server']}{path}" for path in
                 ("/api", "/version", "/readyz", "/healthz", "/metrics", "/api/v1/secrets")]
        + [f"{kubelet}{path}" for path in
           ("/pods", "/metrics", "/runningpods/", "/healthz", "/configz",
            "/run/default/first/main?cmd=id", "/logs/")]
        + [f"{metrics}/apis/metrics.k8s.io/v1beta1/nodes"]
        + [f"{streams}{path}" for path in ("/", "/exec/x", "/attach/x", "/portforward/x")],
        "files": [made["kubeconfig"], str(folder), str(folder.parents[1] / "pki"), *inside[:2000]],
        "sockets": [path for path in inside if Path(path).is_socket()],
        "pids": sorted({parts["monitor"], *cgroups.processes(made["group"])}),
    }  # fmt: skip
    assert attempts["sockets"]
    parts_of = {parts["supervisor"], *(p for name in COMPONENTS for p in machine.pids(made, name))}
    assert len(parts_of) == 1 + len(COMPONENTS)
    # Besides them there are the pod's program, its pause program and their shim.
    assert parts_of < set(attempts["pids"])
    assert len(attempts["pids"]) >= len(parts_of) + 4
    got, gone = attempt(**attempts)
    assert got == []
    assert not set(gone) & parts_of


def holds(line, program):
    try:
        return os.fsencode(program) in line.read_bytes()
    except OSError:
        return False


@contextlib.contextmanager
def simulation(machine):
    """A simulation of two ranks that runs until we end it; yields its folder in shared memory."""
    program = Path(known_programs.build("openmpi", "known/busy.c"))
    for path in (program, program.parent):
        path.chmod(0o755)
    line = [sys.executable, "-m", "dovetail", "profile", "--", "mpirun.openmpi", "-np", "2",
            str(program), "sleep", "1000000", "20", "20"]  # fmt: skip
    environment = {**known_programs.environment(), "HOME": str(machine.folder)}
    line = line if machine.uid == os.getuid() else as_user(machine.uid, *line)
    sessions = set(Path("/dev/shm").glob(f"dovetail-{machine.uid}-profile-*"))
    with subprocess.Popen(line, env=environment, cwd=machine.folder, stderr=subprocess.PIPE) as run:
        try:
            pages = eventually(lambda: run.poll() is not None or [
                path for path in Path("/dev/shm").glob(f"dovetail-{machine.uid}-profile-*/*/*")
                if path.parents[1] not in sessions and path.name.startswith("rank")
            ][1:])  # fmt: skip
            assert isinstance(pages, list), run.stderr.read()
            lines = Path("/proc").glob("[0-9]*/cmdline")
            yield pages[0].parents[1], [int(p.parent.name) for p in lines if holds(p, program)]
        finally:
            run.terminate()
    assert not pages[0].exists()


@pytest.mark.skipif(not ROOT, reason="only root can play another user")
def test_another_user_of_the_host_gets_no_page_and_no_rank_of_a_simulation(machine):
    with simulation(machine) as (session, ranks):
        inside = [session, *session.rglob("*")]
        assert [str(path) for path in inside if path.stat().st_mode & 0o077] == []
        got, gone = attempt(files=list(map(str, inside)), pids=ranks)
        assert got == []
        # A child of the launcher has its name too until it becomes another program.
        assert len({*ranks} - {*gone}) >= 3, "two ranks and their launcher"


def test_every_listener_is_bound_to_the_nodes_address(any_machine):
    made = any_machine.up("--name", "one")
    parts = record(made)
    inside = os.readlink(f"/proc/{parts['supervisor']}/ns/pid")
    sockets = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(folder / "ns/pid") == inside:
                for descriptor in (folder / "fd").iterdir():
                    target = os.readlink(descriptor)
                    if target.startswith("socket:["):
                        sockets.add(target[8:-1])
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in sockets:
                addresses.add(fields[1].split(":")[0])
    wanted = bytes(reversed([int(part) for part in parts["address"].split(".")])).hex().upper()
    assert addresses == {wanted}


def test_exec_is_served_by_tls_with_the_nodes_own_certificate(any_machine):
    made = any_machine.up("--name", "one")
    parts = record(made)
    # Whoever connects sees the certificate, so any user can check this.
    shown = ssl.get_server_certificate((parts["address"], parts["ports"]["stream"]))
    own = (Path(made["folder"]) / "stream.crt").read_text()
    assert ssl.PEM_cert_to_DER_cert(shown) == ssl.PEM_cert_to_DER_cert(own)
    start(any_machine, made, "first")
    assert any_machine.kubectl(made, "exec", "first", "--", "echo", "hello") == "hello\n"
    sent = any_machine.kubectl(made, "exec", "first", "-i", "--", "cat", text="to a pod\n")
    assert sent == "to a pod\n"


def test_secrets_are_in_private_files_and_in_no_argument_or_environment(any_machine):
    machine = any_machine
    made = machine.up("--name", "one")
    invitation = machine.folder / "join.json"
    machine.verb("join", "--name", "one", "--invite", str(invitation))
    token = json.loads(invitation.read_text())["token"]
    worker = json.loads(machine.verb("join", "--json", str(invitation)).stdout)
    start(machine, made, "first")
    secrets, wide = {token.encode()}, []
    for path in below(machine.folder / "s"):
        with contextlib.suppress(OSError):  # it has just gone
            assert path.parent.stat().st_uid == machine.uid
            if not path.is_file() or path.is_symlink() or path.stat().st_size >= 1 << 20:
                continue
            content, private = path.read_bytes(), path.stat().st_mode & 0o077 == 0
            if b"PRIVATE KEY" in content or token.encode() in content or b"client-key" in content:
                wide += [] if private else [path]
            if b"PRIVATE KEY" in content:
                lines = content.split(b"PRIVATE KEY-----")[1].splitlines()
                secrets.add(max(lines, key=len))
    assert wide == []
    assert len(secrets) > 8, "the keys of every component, and the token"
    pids = {record(made)["monitor"], record(worker)["monitor"]}
    pids |= cgroups.processes(made["group"]) | cgroups.processes(worker["group"])
    shown = b""
    for pid in pids:
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                shown += Path(f"/proc/{pid}/{name}").read_bytes()
    assert b"kube-apiserver" in shown
    assert [secret for secret in secrets if secret in shown] == []
