# SPDX-License-Identifier: LGPL-3.0-or-later
"""What up, join, status and down do with provider `usernetes`.

Inputs: the user's options, records. Outputs: a service that makes and keeps a node, or its end.
Invariants: input is checked before anything starts; a verb that fails leaves nothing behind that
it made; a join file needs no shared file system, and is private.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import json
import os
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import processes
from dovetail.host.install_paths import package_environment
from dovetail.host.private_files import check_output, write_private

from usernetes_setup import node_options, node_record
from usernetes_setup.control import api_client
from usernetes_setup.node import cgroups, components
from usernetes_setup.preflight import usernetes as preflight
from usernetes_setup.upstream import engine, leases, removal, service
from usernetes_setup.upstream.record import FILE, Record, here, refuse_other

Say = Callable[[str], None]
PATIENCE = 60.0  # seconds for the service manager to start a service
TOKEN = re.compile(r"\b[a-z0-9]{6}\.[a-z0-9]{16}\b")
"""Of kubeadm's."""
OTHERS = ("cpus", "memory", "devices", "network")
"""Options that upstream's node has no equal of: it is the whole machine's."""


def plan(args: argparse.Namespace) -> Record:
    """A node's record, from checked options. Raises BadInput."""
    alone = not pause().exists()  # asked first: podman leaves it behind
    node_record.refuse_strange(args.name)
    folder = node_record.cluster_folder(args.name)
    if (length := len(os.fsencode(folder / service.SOCKET))) > node_record.LONGEST:
        raise BadInput(
            f"{node_record.root()}: a socket there would have a path of {length} bytes, and "
            f"{node_record.LONGEST} are the most; set DOVETAIL_STATE to a shorter folder"
        )
    for option in OTHERS:
        if getattr(args, option, "") not in ("", "auto", "host"):
            raise BadInput(
                f"--{option}: not with --provider usernetes, whose node is the whole machine"
            )
    if not args.timeout > 0:
        raise BadInput(f"--timeout {args.timeout:g}: more than 0 seconds would be right")
    if args.owner and not processes.start_ticks(args.owner):
        raise BadInput(f"--owner {args.owner}: no such process")
    if not args.usernetes:
        raise BadInput(
            f"--provider usernetes: needs --usernetes DIR, a checkout of {engine.SOURCE}"
        )
    engine.check(Path(args.usernetes))
    for shown in args.mount:
        if not (os.path.isabs(shown) and os.path.isdir(shown) and ":" not in shown):
            raise BadInput(f"--mount {shown}: the absolute path of a folder would be right")
    address = node_options.own_address(args.address) or usual_address()
    node = args.node or f"u7s-{node_options.machine_name()}"
    node = node_record.checked_name(node, "node", 40)
    if problems := preflight.problems():
        raise BadInput(
            f"--provider usernetes cannot run here: {problems[0]}; see `dovetail doctor`"
        )
    program, compose = preflight.chosen()
    if args.node_image and engine.quiet([program, "image", "inspect", args.node_image]) is None:
        raise BadInput(f"--node-image {args.node_image}: {program} has no such image")
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:6]
    return Record(
        cluster=args.name, node=node, address=address, engine=program, compose=compose,
        image=args.node_image, project=f"dovetail-{args.name}-{digest}", mounts=args.mount,
        owner=args.owner, timeout=args.timeout, alone=alone, settings=engine.kept(),
    )  # fmt: skip


def pause() -> Path:
    """Where rootless podman notes the process that keeps its namespace."""
    return (
        Path(os.environ.get("XDG_RUNTIME_DIR", f"/run/user/{os.getuid()}")) / "libpod/tmp/pause.pid"
    )


def usual_address() -> str:
    """This machine's address towards others, as upstream finds it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("1.0.0.0", 9))
        except OSError:
            raise BadInput("--address: needed, since this machine has no route to others") from None
        return str(probe.getsockname()[0])


def up(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Start a cluster, or find it running; returns its record."""
    if record := running(args.name):
        return record.described()
    refuse_other(args.name)
    record = plan(args)
    return begin(record, Path(args.usernetes), say)


def running(cluster: str) -> Record | None:
    """The cluster's node on this machine, if it is whole."""
    record = here(cluster)
    return record if record and record.ready and record.alive() else None


def begin(record: Record, checkout: Path, say: Say, joining: str = "") -> dict[str, Any]:
    """Start a node in place of what is left of an earlier one."""
    with node_record.locked(record.cluster):
        if found := running(record.cluster):  # since we looked
            return found.described()
        refuse_other(record.cluster)
        sweep(record.cluster)
        return start(record, checkout, say, joining)


def join(args: argparse.Namespace, content: dict[str, Any], say: Say) -> dict[str, Any]:
    """Start a node that joins a cluster; returns its record."""
    try:
        args.name, args.node = content["cluster"], content["node"]
        ports, subnet, command = content["ports"], content["subnet"], content["command"]
        texts, numbers = (args.name, args.node, command), (subnet, *ports.values())
        if not (all(isinstance(one, str) for one in texts)
                and all(isinstance(one, int) for one in numbers)):  # fmt: skip
            raise TypeError
    except (KeyError, TypeError, AttributeError):
        raise BadInput(f"{args.file}: not a join file; `join --invite` writes one") from None
    if record := running(args.name):
        return record.described()
    refuse_other(args.name)
    args.network = "host"
    record = plan(args)
    record.worker, record.ports, record.subnet = True, ports, str(subnet)
    if server := re.search(r"kubeadm join ([^\s:]+):", command):
        engine.reach(record.settings or {}, server[1])
    return begin(record, Path(args.usernetes), say, json.dumps({"command": command}))


def start(record: Record, checkout: Path, say: Say, joining: str = "") -> dict[str, Any]:
    """Have a service make the node, and wait until it is ready."""
    folder = record.folder
    folder.mkdir(mode=0o700, exist_ok=True)  # left by a verb that was killed
    with socket.socket(socket.AF_UNIX) as listening:
        try:
            record.save()
            engine.copy(record, checkout)
            if joining:
                write_private(folder / service.JOIN, joining)
            listening.bind(f"{folder}/{service.SOCKET}")
            listening.listen(1)
            launch(record)
            if not select.select([listening], [], [], PATIENCE)[0]:
                raise WorkFailed(f"the service {record.unit} did not start")
        except BaseException:
            sweep(record.cluster)
            raise
        channel, _ = listening.accept()
    with channel:
        try:
            listen(channel, record, say)
        except BaseException as error:
            words = last_words(folder)
            channel.close()  # the monitor takes this for our death; its service removes the node
            sweep(record.cluster)
            if isinstance(error, WorkFailed):
                raise WorkFailed(f"{error}{words}") from None
            raise
        channel.sendall(b"ok\n")
    return (here(record.cluster) or record).described()


def listen(channel: socket.socket, record: Record, say: Say) -> None:
    """Pass on what the monitor says, until the node is ready. Raises WorkFailed."""
    with channel.makefile("r") as lines:
        for line in lines:
            if line.startswith("="):
                return
            if line.startswith("!"):
                raise WorkFailed(f"node {record.node}: {line[1:].strip()}")
            say(line.strip())
    raise WorkFailed(f"node {record.node}: its monitor ended")


def launch(record: Record) -> None:
    """Start the service."""
    folder = str(record.folder)
    environment = {**package_environment(), **cgroups.scope_environment()}
    # The rest is in the record, which nobody else can read: a proxy may be told a password.
    kept = ("PATH", "PYTHONPATH", "HOME", "XDG_RUNTIME_DIR")
    module = [sys.executable, "-m", "usernetes_setup.upstream"]
    after = shlex.join([*module[:2], f"{module[2]}.removal", folder])
    words = ["systemd-run", "--user", "--quiet", "--collect", f"--unit={record.unit}",
             "--property=WorkingDirectory=/",  # Python would find the user's modules in another
             "--property=KillMode=mixed", f"--property=ExecStopPost={after}",
             "--property=TimeoutStopSec=300", f"--property=StandardOutput=append:{folder}/log",
             f"--property=StandardError=append:{folder}/log",
             *(f"--setenv={name}={environment[name]}" for name in kept if name in environment),
             *module[:2], f"{module[2]}.service", folder]  # fmt: skip
    done = subprocess.run(words, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise WorkFailed(f"systemd-run: {done.stderr.strip()}")


def last_words(folder: Path) -> str:
    """The end of what upstream's verbs said, of which one says a join command as it is."""
    with contextlib.suppress(OSError):
        text = (folder / "log").read_text(errors="replace")
        lines = TOKEN.sub("TOKEN", text).splitlines()
        return "".join(f"\n  {line[:300]}" for line in lines[-12:])
    return ""


def invite(args: argparse.Namespace, record: Record) -> dict[str, Any]:
    """Write a join file for one node of a cluster that was started here."""
    node_options.check_validity(args.valid)
    check_output("--invite", Path(args.invite))
    if record.worker or not (record.ready and record.alive()):
        raise BadInput(f"cluster {args.name}: is not running here; see `dovetail kube status`")
    if not args.node:
        raise BadInput("join --invite: name the node with --node, such as u7s-HOST")
    node = node_record.checked_name(args.node, "node", 40)
    with node_record.locked(args.name):
        record = here(args.name) or record  # another one may have been invited meanwhile
        if record.given >= leases.SUBNETS[-1]:
            raise BadInput(f"cluster {args.name}: has no subnet for another node")
        command = join_command(record)
        expire(record, command, args.valid)
        record.given += 1
        record.save()
    ports = {name: record.ports[name] for name in ("kubelet", "flannel")}
    content = {"provider": "usernetes", "cluster": record.cluster, "node": node, "ports": ports,
               "subnet": record.given, "command": command}  # fmt: skip
    write_private(Path(args.invite), json.dumps(content, indent=1) + "\n")
    return {"file": args.invite, "node": node}


def join_command(record: Record) -> str:
    """What upstream's verb writes; it has as long as a node may take. Raises WorkFailed."""
    child = subprocess.Popen(
        ["make", "--no-print-directory", "join-command"], cwd=record.checkout, text=True,
        env=engine.environment(record), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    try:
        _, said = child.communicate(timeout=engine.patience(record))
    except BaseException as error:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # with what it started
        child.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            raise WorkFailed(f"make join-command: not done after {record.timeout:.0f} s") from None
        raise
    written = record.checkout / "join-command"
    command = written.read_text() if written.exists() else ""
    written.unlink(missing_ok=True)
    if child.returncode or "kubeadm join" not in command:
        raise WorkFailed(f"make join-command: {said.strip()[-300:] or 'no command'}")
    return command


def expire(record: Record, command: str, seconds: int) -> None:
    """Let the token of a join command be valid no longer: upstream's verb has no word for it.

    Raises WorkFailed.
    """
    token = command.partition("--token ")[2].partition(".")[0]
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + seconds))
    path = f"{api_client.TOKENS}/bootstrap-token-{token}"
    body = {"stringData": {"expiration": when}}
    try:
        service.api(record).call("PATCH", path, body, kind="application/merge-patch+json")
    except (OSError, api_client.Refused, http.client.HTTPException) as error:
        raise WorkFailed(f"cluster {record.cluster}: does not answer: {error}; try again") from None


def status(record: Record) -> dict[str, Any]:
    """A node, and whether it is ready."""
    ready = record.ready and record.alive() and asked(record)
    word = "ready" if ready else "not ready" if record.alive() else "dead"
    usable = sorted(os.sched_getaffinity(0))
    return {**record.described(), "ready": ready, "state": word, "owner": record.owner,
            "cpus": components.listed(usable), "memory": components.host_memory(),
            "network": "flannel", "group": ""}  # fmt: skip


def asked(record: Record) -> bool:
    """What the cluster says of the node."""
    if not record.worker:
        return service.is_ready(service.api(record), record.node)
    words = engine.inside(record, *service.SELF, f"node/{record.node}")
    return bool(engine.quiet(words, engine.settings(record)))


def sweep(cluster: str) -> None:
    """Remove the cluster's node here, if upstream Usernetes made one. Raises WorkFailed."""
    record = here(cluster)
    if record is None:
        return
    environment = {**os.environ, **cgroups.scope_environment()}
    stop = ["systemctl", "--user", "--quiet", "stop", record.unit]
    subprocess.run(
        stop, capture_output=True, env=environment
    )  # which removes it, when it has ended
    if (folder := record.folder / FILE).exists() and (left := removal.remove(record)):
        raise WorkFailed(
            f"cluster {cluster}: could not be removed: {'; '.join(left[:3])}; {folder}"
        )
