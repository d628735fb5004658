# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the verbs up, join, status and down do.

Inputs: the user's options, the records of `node_record.py`. Outputs: started or ended monitors.
Invariants: input is checked before anything starts; a verb that fails leaves nothing behind
that it made; `down` needs no part of the node to be alive or well.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import select
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import processes
from dovetail.host.private_files import check_output, write_private
from dovetail.host.progress import Progress

from usernetes_setup import node_options, node_record
from usernetes_setup.build import programs as build
from usernetes_setup.control import api_client, csr_approver
from usernetes_setup.node import carrier, components, joining, monitor, namespaces, removal
from usernetes_setup.node_record import Node, NodeState
from usernetes_setup.preflight import machine, report
from usernetes_setup.upstream import record as usernetes
from usernetes_setup.upstream import service
from usernetes_setup.upstream import verbs as upstream

Say = Callable[[str], None]
MADE_LATER = (
    "/readyz",  # the built-in roles among others
    f"{api_client.ACCOUNTS}/default",  # no pod can be made without it
    f"{api_client.BINDINGS}/dovetail-kubelets",  # no log can be read
)
JOIN_FILE = ("cluster", "node", "server", "authority", "token")  # all of them text
LONGEST_LOOPBACK = "127.77.255.254"
MONITORED = (NodeState.RUNNING, NodeState.MONITOR_ALONE)
LEAST = node_options.LEAST
THEIRS = ("usernetes", "node-image", "mount")
"""Options of nodes that upstream Usernetes makes."""
COMPLAINT = (
    r'[EF]\d{4} |.*(level=(error|fatal)|"err)|\{"level":"(error|panic|fatal)"|panic: '
    r"|(offer-devices|carry-packets|ctr): |(\w+\.)*\w*(Error|Exception|Refused|Failed)(: |$)"
)
"""What components of Go, of ours and of Python's say of what ended them."""
NOISE = (
    r"W\d{4} |.*(metrics\.k8s\.io|manifest file is empty|Found stale data|RuntimeConfig from"
    r"|max file handles|may not have completed yet|checkpoint is not found|no imagefs label"
    r'|does not have NodeReady|has been modified|(nodes?|namespaces) \\"[^"]*\\" not found|err=<$)'
)
"""What they say so as well where all goes well."""


def plan(args: argparse.Namespace, joined: str, network: str) -> Node:
    """A node's record but for its programs, from checked options. Raises BadInput."""
    node_record.refuse_strange(args.name)
    for option in THEIRS:
        if getattr(args, option.replace("-", "_"), None):
            raise BadInput(
                f"--{option}: for provider usernetes alone, and cluster {args.name} is one of "
                "provider dovetail"
            )
    if not args.timeout > 0:
        raise BadInput(f"--timeout {args.timeout:g}: more than 0 seconds would be right")
    address = node_options.own_address(args.address)
    if args.owner and not processes.start_ticks(args.owner):
        raise BadInput(f"--owner {args.owner}: no such process")
    if address and not args.node:
        args.node = node_options.machine_name()
    if args.node and not address and network == "host" and not args.node.startswith("127."):
        raise BadInput("--node: only with --address; on loopback a node is named by its address")
    if args.node:
        node_record.checked_name(args.node, "node", 40)
    if (over := len(args.node or LONGEST_LOOPBACK) - node_record.room(args.name)) > 0:
        raise BadInput(
            f"{node_record.root()}: sockets of {args.node or 'a node'} there would have paths of "
            f"{node_record.LONGEST + over} bytes, and {node_record.LONGEST} are the most; "
            "give a shorter name, or set DOVETAIL_STATE to a shorter folder"
        )
    usable, wanted = node_options.cores(args.cpus)
    return Node(
        cluster=args.name, name=args.node or f"new-{os.getpid()}", address=address,
        cpus=components.listed(usable), wanted=wanted, memory=node_options.memory(args.memory),
        network=network, user=namespaces.user_name(), group="", binaries="",
        joined=joined, owner=args.owner, devices=node_options.devices(args.devices),
    )  # fmt: skip


def client(name: str) -> api_client.Client:
    """The API of one of our clusters, as its administrator."""
    folder = node_record.cluster_folder(name)
    try:
        if record := usernetes.here(name):
            return service.api(record)
        server = json.loads((folder / "kubeconfig").read_text())["clusters"][0]["cluster"]["server"]
        return api_client.Client(
            server, (folder / "pki/ca.crt").read_text(), folder / "pki/admin.crt"
        )
    except OSError:
        raise BadInput(
            f"cluster {name}: has no control node here; see `dovetail kube status`"
        ) from None


def binaries(say: Say) -> str:
    """The build, made now if it is missing; first of all, whether anything could run here."""
    errors = report.errors()
    if errors:
        raise BadInput(f"user-space Kubernetes cannot run here: {errors[0]}; see `dovetail doctor`")
    return str(build.built() or build.build(say))


def up(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Start a cluster, or find it running; returns its record."""
    refuse_taken(args.name)
    here = running(args.name, args.network)
    record = plan(args, "", args.network or "host")  # before a build, which takes minutes
    programs = "" if here else binaries(say)  # one that runs needs no more room, nor a build
    with node_record.locked(args.name):
        refuse_taken(args.name)  # by another verb, in these minutes
        if here := running(args.name, args.network):
            cores = args.cpus and record.wanted != components.count(here.cpus)
            if cores or (args.memory and record.memory != here.memory):
                say(f"cluster {args.name} runs already, and stays as it is: cores {here.cpus}, "
                    f"{here.memory >> 20}Mi of memory")  # fmt: skip
            await_answer(here, args.timeout, say)
            return described(here)
        sweep(args.name)
        record.binaries = programs or binaries(say)
        node, handle = start(record)
        with unwound(node, handle):
            wait_ready(node, handle, args.timeout, say)
        return described(node)


def running(name: str, network: str) -> Node | None:
    """The cluster's control node here, if it runs; BadInput if that is not on `network`, if any."""
    for node in node_record.nodes(name):
        if node.control and node.state() is NodeState.RUNNING:
            if network not in ("", node.network):
                raise BadInput(
                    f"--network {network}: cluster {name} runs already, on network "
                    f"{node.network}; end it with `dovetail kube down --name {name}` before, or "
                    "give another --name"
                )
            return node
    return None


def join(args: argparse.Namespace, say: Say) -> dict[str, Any]:
    """Start a node that joins a cluster; returns its record."""
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text()
        content = json.loads(text)
        theirs = content.get("provider") == "usernetes"
        if not (theirs or all(isinstance(content[key], str) for key in JOIN_FILE)):
            raise TypeError
        place = 0 if theirs else carrier.place(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise BadInput(f"{args.file}: not a join file; `join --invite` writes one") from None
    if theirs:
        return upstream.join(args, content, say)
    name, server, args.node = content["cluster"], content["server"], content["node"]
    args.name = name
    refuse_taken(name, server)
    if not (args.address or args.node.startswith("127.")):
        raise BadInput(
            f"{args.file}: is for a node that others reach; give this machine's --address"
        )
    record = plan(args, text, "bridge" if "carrier" in content else "host")  # before a build
    record.place, programs = place, ""
    if not any(joined(node, args.node) for node in node_record.nodes(name)):
        machine.join_skew(server)
        check_invitation(args.file, content)
        programs = binaries(say)
    with node_record.locked(name):
        refuse_taken(name, server)
        for node in node_record.nodes(name):
            if joined(node, args.node):
                return described(node)
            if node.name == args.node and (left := removal.from_outside(node)):
                raise WorkFailed(f"node {node.name}: could not be removed: {left[0]}")
        record.server, record.binaries = server, programs or binaries(say)
        node, handle = start(record)
        with unwound(node, handle):
            wait_ready(node, handle, args.timeout, say, content)
    return described(node)


def check_invitation(file: str, content: dict[str, str]) -> None:
    """Refuse a join file that opens nothing any more: its node would be waited for in vain."""
    server, token = content["server"], content["token"]
    used = False
    try:
        api = api_client.Client(server, content["authority"], None, token)
        used = csr_approver.used(api, token)
    except ssl.SSLCertVerificationError:
        raise BadInput(f"{file}: {server} is not the cluster that it is for") from None
    except api_client.Refused as error:
        used = error.status == 401
    except (OSError, http.client.HTTPException):  # it may answer a kubelet, which asks again
        pass
    if used:
        raise BadInput(
            f"{file}: the invitation has expired, or was used; `dovetail kube join --invite` "
            "writes another"
        )


def refuse_taken(name: str, server: str = "") -> None:
    """Refuse a name that a node here has which runs for another cluster. Raises BadInput.

    `server` is that of the cluster to join, or "" for one to be started: of a control node here
    that has gone, and was on loopback, workers are a rest.
    """
    usernetes.refuse(name)
    nodes = node_record.nodes(name)
    own = server or next((node.server for node in nodes if node.control), "")
    for node in nodes:
        rest = not own and node.server.startswith("https://127.")
        if node.server != own and node.state() is not NodeState.DEAD and not rest:
            raise BadInput(
                f"cluster {name}: node {node.name} here is of another one of that name, at "
                f"{node.server}; `dovetail kube down --name {name}` ends it"
            )


def joined(node: Node, name: str) -> bool:
    """Whether this is the node of that name, and runs."""
    return node.name == name and node.state() is NodeState.RUNNING


def described(node: Node) -> dict[str, Any]:
    """What a caller needs to know of a node."""
    known = {"cluster": node.cluster, "node": node.name, "server": node.server, "cpus": node.cpus,
             "memory": node.memory, "network": node.network, "folder": str(node.folder),
             "group": node.group, "devices": counted(node)}  # fmt: skip
    if node.control:
        known["kubeconfig"] = str(node_record.cluster_folder(node.cluster) / "kubeconfig")
    return known


def counted(node: Node) -> dict[str, int]:
    """How many of each device pods may have at once."""
    return {name: len(one["units"]) * one["each"] for name, one in node.devices.items()}


def start(record: Node) -> tuple[Node, monitor.Handle]:
    """Start a monitor and wait until its supervisor runs."""
    folder = record.folder
    try:
        folder.mkdir(mode=0o700, parents=True)
        write_private(folder / "node.json", json.dumps(vars(record)))
        handle = monitor.start(folder)
    except OSError as error:  # a quota is used up, or there are too many processes
        removal.discard(record)
        raise WorkFailed(f"the node did not start: {error}") from None
    answer = handle.answer()
    if answer.startswith("!"):
        handle.process.wait()
        left = []
        for node in node_record.nodes(record.cluster):
            if node.monitor == handle.process.pid:
                left += removal.from_outside(node)  # again; with a record `down` can, too
        if not left and folder.exists():  # it died before it could read what it is for
            removal.discard(record)
        more = f"; could not be removed: {'; '.join(left[:3])}" if left else ""
        raise WorkFailed(f"the node did not start: {answer[1:]}{more}")
    nodes = node_record.nodes(record.cluster)
    return next(node for node in nodes if node.name == answer), handle


@contextlib.contextmanager
def unwound(node: Node, handle: monitor.Handle) -> Iterator[None]:
    """Keep the node if the block succeeds; else have it removed, and say what its logs say."""
    try:
        yield
        handle.channel.sendall(b"ok\n")
    except BaseException as error:
        complaint = last_words(node)
        handle.channel.close()  # the monitor takes this for our death, and removes the node
        with contextlib.suppress(subprocess.TimeoutExpired):
            handle.process.wait(removal.LIMIT + 2)
        if isinstance(error, WorkFailed):
            raise WorkFailed(f"{error}{complaint}") from None
        if complaint and not isinstance(error, KeyboardInterrupt):
            print(f"node {node.name}: ended before it was ready:{complaint}", file=sys.stderr)
        raise


def last_words(node: Node) -> str:
    """The last error in each component's log, for a failed start."""
    found = []
    with contextlib.suppress(OSError):
        for log in sorted((node.folder / "log").iterdir()):
            lines = log.read_text(errors="replace").splitlines()
            bad = [one for one in lines if re.match(COMPLAINT, one) and not re.match(NOISE, one)]
            if bad:
                found.append(f"\n  {log.name}: {bad[-1][:300]}")
    return "".join(found)


def is_ready(node: Node, patience: float = 2.0) -> bool:
    """Whether the API says that the node is ready; False while it cannot be asked.

    `patience` is for each answer, seconds.
    """
    with contextlib.suppress(OSError, api_client.Refused, http.client.HTTPException, BadInput):
        who = client(node.cluster) if node.control else kubelet_client(node)
        found = who.call("GET", f"{api_client.NODES}/{node.name}", timeout=patience)
        for path in MADE_LATER if node.control else ():
            who.call("GET", path, timeout=patience)
        if not node.control and not (node.folder / joining.SERVED).exists():
            return False  # logs and exec would be refused
        there = found["status"].get("allocatable", {})
        offers = all(there.get(name) == str(number) for name, number in counted(node).items())
        return offers and api_client.condition(found, "Ready") == "True"
    return False


def wait_ready(
    node: Node, handle: monitor.Handle, limit: float, say: Say,
    invitation: Mapping[str, str] | None = None,
) -> None:  # fmt: skip
    """Wait until the node is ready; who waits at a terminal is told, and no log.

    A worker joins before, by its `invitation`: the content of its join file.
    """
    what = f"waiting for node {node.name} to be ready, {limit:.0f} s at most"
    deadline = time.monotonic() + limit
    with Progress(say if sys.stderr.isatty() else lambda _: None, what):
        if invitation:
            joining.join(node, invitation, deadline)
        if not _until_ready(node, handle, deadline):
            raise WorkFailed(f"node {node.name} is not ready after {limit:.0f} s")


def _until_ready(node: Node, handle: monitor.Handle, deadline: float) -> bool:
    while time.monotonic() < deadline:
        if handle.process.poll() is not None:
            raise WorkFailed(f"node {node.name}: {handle.answer()[1:]}")
        before = time.process_time()
        if is_ready(node):
            return True
        # Nothing can be waited on: there is no server to hold a watch until the API is up. On a
        # slow machine, what waits shall not take the time of what it waits for; a server that
        # begins to answer holds a question for seconds, which takes none.
        select.select([], [], [], max(0.1, 4 * (time.process_time() - before)))
    return False


def await_answer(node: Node, limit: float, say: Say) -> None:
    """See that a cluster which runs can be used; one that was just disturbed is waited for."""
    deadline = time.monotonic() + limit
    if is_ready(node):
        return
    say(f"cluster {node.cluster} runs, and is not ready; waiting {limit:.0f} s at most")
    while time.monotonic() < deadline:
        if is_ready(node):
            return
        select.select([], [], [], 0.5)
    raise WorkFailed(
        f"cluster {node.cluster} runs, and is not ready after {limit:.0f} s: its API does not "
        f"answer, or has no node that is ready; make a new one with `dovetail kube down --name "
        f"{node.cluster}` and `up`{last_words(node)}"
    )


def kubelet_client(node: Node) -> api_client.Client:
    """The API as a joined node itself; OSError until it has its certificate."""
    authority = (node.folder / "ca.crt").read_text()
    return api_client.Client(node.server, authority, node.folder / joining.CURRENT)


def here(name: str) -> Sequence[Node | usernetes.Record]:
    """A cluster's nodes on this machine, whatever made them."""
    theirs = usernetes.here(name)
    return [theirs] if theirs else node_record.nodes(name)


def takes_nodes(name: str, patience: float = 1.0) -> bool:
    """Whether nodes can join a cluster of ours, which is before its own node is ready."""
    if record := usernetes.here(name):
        return record.ready and record.alive()
    with contextlib.suppress(OSError, api_client.Refused, http.client.HTTPException, BadInput):
        client(name).call("GET", f"{api_client.BINDINGS}/{api_client.JOIN}", timeout=patience)
        return True
    return False


def invite(args: argparse.Namespace) -> dict[str, Any]:
    """Write a join file for one node of one of our clusters."""
    if record := usernetes.here(args.name):
        return upstream.invite(args, record)
    node_options.check_validity(args.valid)
    check_output("--invite", Path(args.invite))
    control = next(
        (node for node in node_record.nodes(args.name) if node.control and node.alive()), None
    )
    if control is None:
        raise BadInput(f"cluster {args.name}: is not running here; see `dovetail kube status`")
    loopback = control.address.startswith("127.")
    if not loopback and not args.node:
        raise BadInput("join --invite: name the node with --node, since its token is for it alone")
    node = (
        namespaces.any_loopback() if loopback else node_record.checked_name(args.node, "node", 40)
    )
    carried = {}
    try:
        api = client(args.name)
        authority = (node_record.cluster_folder(args.name) / "pki/ca.crt").read_text()
        if control.network == "bridge":
            there = {one["metadata"]["name"] for one in api.call("GET", api_client.NODES)["items"]}
            carried = {"carrier": carrier.invite(control, node, args.valid, there)}
        token = csr_approver.invite(api, node, args.valid)
        csr_approver.await_known(api_client.Client(control.server, authority, None, token), token)
    except (OSError, api_client.Refused, http.client.HTTPException) as error:
        raise WorkFailed(f"cluster {args.name}: does not answer: {error}; try again") from None
    content = {"cluster": args.name, "node": node, "server": control.server,
               "authority": authority, "token": token, **carried}  # fmt: skip
    write_private(Path(args.invite), json.dumps(content, indent=1) + "\n")
    return {"file": args.invite, "node": node}


def status(name: str) -> list[dict[str, Any]]:
    """Every node of this user on this machine, with its parts and whether it is ready."""
    found = []
    for cluster in [name] if name else node_record.clusters():
        if record := usernetes.here(cluster):
            found.append(upstream.status(record))
            continue
        nodes = node_record.nodes(cluster)
        if not nodes:
            found.append(
                {"cluster": cluster, "node": "", "ready": False, "state": "no such cluster"}
            )
        for node in nodes:
            ready = node.alive() and is_ready(node)
            word = "ready" if ready else "not ready" if node.alive() else "dead"
            found.append({**described(node), "ready": ready, "state": word, "owner": node.owner})
    return found


def down(name: str, only: str = "") -> None:
    """End a cluster's nodes here, or one of them; no node at all is fine."""
    with node_record.locked(name):
        if record := usernetes.here(name):
            if only in ("", record.node):
                upstream.sweep(name)
        else:
            sweep(name, only)


def sweep(name: str, only: str = "") -> None:
    """Remove nodes with all they left, whatever is still alive of them."""
    deadline = time.monotonic() + removal.LIMIT
    nodes = [node for node in node_record.nodes(name) if only in ("", node.name)]
    if only:
        for node in nodes:
            forget(node)
    asked = {}
    for node in nodes:
        if node.state() in MONITORED:
            with contextlib.suppress(ProcessLookupError):
                asked[node.name] = os.pidfd_open(node.monitor)
                os.kill(node.monitor, signal.SIGTERM)
    left: list[str] = []
    for node in reversed(nodes):  # workers first
        if watched := asked.get(node.name):
            # A monitor that hangs gets half of the time, and we do its work in the other half.
            patience = deadline - removal.LIMIT / 2 - time.monotonic()
            select.select([watched], [], [], max(0.0, patience))
            os.close(watched)
        if node.state() in MONITORED:
            os.kill(node.monitor, signal.SIGKILL)
        left += removal.from_outside(node, deadline)
    if left:
        raise WorkFailed(f"cluster {name}: could not be removed: {'; '.join(left[:3])}")
    if not only:
        clear(node_record.cluster_folder(name))
    for node in nodes if only else ():
        forget_pods(node)


def clear(folder: Path) -> None:
    """Remove a cluster's folder with what a start that was killed left, but nothing of others.

    Raises WorkFailed if something else is there.
    """
    with contextlib.suppress(FileNotFoundError):
        for path in list(folder.iterdir()):
            if not node_record.OWN.fullmatch(path.name):
                continue
            if path.is_dir() and not path.is_symlink():
                namespaces.remove_folder(path, namespaces.user_name())
            else:
                path.unlink(missing_ok=True)
        if left := sorted(os.listdir(folder)):
            raise WorkFailed(f"{folder}: stays, since it holds {left[0]}")
        folder.rmdir()


def sweep_dead() -> None:
    """Remove this folder's clusters of which nothing runs any more."""
    for name in node_record.clusters():
        with node_record.locked(name):
            if usernetes.here(name):
                continue  # its service sees to it
            if all(node.state() is NodeState.DEAD for node in node_record.nodes(name)):
                sweep(name)


def forget(node: Node) -> None:
    """Tell the cluster that a worker leaves on purpose, if it can still be told."""
    if node.control or not node.alive():
        return
    with contextlib.suppress(OSError, api_client.Refused, http.client.HTTPException, BadInput):
        client(node.cluster).call("DELETE", f"{api_client.NODES}/{node.name}", timeout=2.0)


def forget_pods(node: Node) -> None:
    """Tell the cluster that a worker's pods have ended, if it can still be told."""
    if node.control:
        return
    with contextlib.suppress(OSError, api_client.Refused, http.client.HTTPException, BadInput):
        api_client.delete_pods(client(node.cluster), node.name, timeout=2.0)
