# SPDX-License-Identifier: LGPL-3.0-or-later
"""The agent of one slice: the only task of its Flux job, `flux dovetail slice`.

Inputs: the cores that Flux gave it, orders from the broker module. It starts its part of
user-space Kubernetes on exactly those cores and stays until told; in slice 0 it also runs the
submitted plans and answers what needs the cluster's administrator. Invariants: the node's
owner is this process, so that the node ends with it, however it dies; when Flux is gone, or
the job is cancelled, it ends by itself. No secret in a file but those of the cluster itself.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import json
import math
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from usernetes_setup import cluster, node_options, node_record
from usernetes_setup.build import programs
from usernetes_setup.control import api_client
from usernetes_setup.node import components

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.messages import MessageError, encode
from dovetail.flux import jobspec, services
from dovetail.flux.client import SUBMIT, Client
from dovetail.flux.instance import messages
from dovetail.flux.instance.effects import FAILED
from dovetail.flux.load import flux
from dovetail.flux.plan_runner import PlanRunner, apart, end
from dovetail.host import processes
from dovetail.host.install_paths import package_environment
from dovetail.host.line_splitter import LineSplitter

Line = Mapping[str, Any]  # from the module: an answer, an order or an event
PATIENCE = 10.0  # seconds for a node to be removed by whoever is at it
LONGEST = 3600.0  # seconds that one look at the selector may take; it refuses some weeks
EVERY = 30.0  # seconds after which we look again at the job's time, which may have been changed
SOON = 0.1  # seconds between two looks whether nodes can join, while any waits for it
SUBMITS = 8  # jobs of simulations whose submission is not answered yet; more would fill the pipe
TRIED = 60.0  # seconds for which one is tried again, where the cluster does not answer
INVITED = 600  # seconds that an invitation is good for, or as long as a node has to come up
TIME_LEFT = ("job", "timeleft")
UNLIMITED = 1e9  # seconds, from which on what Flux says stands for no limit
VERB = (sys.executable, "-m", "usernetes_setup")


class Agent:
    """One slice's life, driven by what its selector wakes it for."""

    def __init__(
        self, number: int, name: str, *, machine_address: bool, timeout: float, stop_before: float,
        devices: str = "auto", network: str = "host", usernetes: str = "", node_image: str = "",
    ) -> None:  # fmt: skip
        self.number, self.name, self.stop_before = number, name, stop_before
        self.devices, self.timeout = devices, timeout
        self.network, self.usernetes, self.node_image = network, usernetes, node_image
        self.next_look = math.inf  # when to look whether the job's time is over, CLOCK_MONOTONIC
        self.machine_address, self.address = machine_address, ""
        self.node_name = node_name(number, name) if machine_address else ""
        self.cpus = components.listed(os.sched_getaffinity(0))
        self.client = Client()
        self.selector = selectors.DefaultSelector()
        self.splitter = LineSplitter()
        self.rank = -1
        self.attached: set[int] = set()  # numbers of our requests, of which all but one are refused
        self.joining, self.invited = 0, False
        # Nodes that wait until the cluster takes any, and until when they are tried; by slice.
        self.uninvited: dict[int, tuple[str, float]] = {}
        self.node: dict[str, Any] = {}
        self.starting: subprocess.Popen[str] | None = None
        self.plans = PlanRunner(self.tell, self.when_ended, self.selector, self.submit_proxy_job)
        self.proxy_jobs: dict[int, dict[str, Any]] = {}  # launches, by our request for their job
        # Launches whose job is not submitted yet, with the jobs of their slices.
        self.unsubmitted: deque[tuple[dict[str, Any], list[int]]] = deque()
        self.submitting: set[int] = set()  # requests for jobs that are not answered yet
        self.kept: dict[str, Any] = {}  # for the module, should it be loaded anew,
        self.kept_slices: dict[int, dict[str, Any]] = {}  # with what it knows of slices
        self.errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as we live)
        self.failed = ""
        self.over = False

    # --- The loop ---

    def live(self) -> int:
        """Until told, or until it makes no sense any more; returns the job's exit code."""
        wake = processes.signal_pipe()
        for caught in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(caught, self.asked_to_end)
        self.selector.register(wake, selectors.EVENT_READ, lambda: os.read(wake, 4096) and None)
        relay = self.client.process.stdout
        assert relay is not None
        self.selector.register(relay, selectors.EVENT_READ, self.heard)
        try:
            self.begin()
            while not self.over:
                self.look(LONGEST)
        finally:
            code = self.end()
        return code

    def look(self, longest: float) -> None:
        """Take what there is, or wait for it, for so many seconds at most."""
        wait = max(0.0, self.next_look - time.monotonic())
        if self.uninvited:
            longest = min(longest, SOON)
        for key, _ in self.selector.select(min(wait, longest)):
            key.data()
        if self.uninvited:
            self.invite()
        if time.monotonic() >= self.next_look:
            self.next_look = math.inf
            if self.plans.running is not None:
                self.look_at_time()

    def look_at_time(self) -> None:
        """End runs if the job's time is nearly over, else look again soon."""
        left = seconds_left() - self.stop_before
        self.next_look = time.monotonic() + min(left, EVERY) if left > 0.0 else math.inf
        if left <= 0.0:
            self.plans.time_is_over()
        else:
            self.plans.time_is_left()

    def asked_to_end(self, *_: object) -> None:
        """SIGTERM: the job is cancelled, or its time is over."""
        self.over = True

    def heard(self) -> None:
        """Lines from the module."""
        assert self.client.process.stdout is not None
        block = os.read(self.client.process.stdout.fileno(), 1 << 16)
        if not block:
            self.failed, self.over = "Flux is gone", True
            return
        for line in self.splitter.take(block):
            self.take(json.loads(line))

    def take(self, line: Line) -> None:
        """One answer, order or event."""
        if "event" in line:
            self.rank = line.get("rank", self.rank)
            self.attach()
        elif line["id"] == self.joining:
            self.join(line)
        elif line["id"] in self.attached and "value" in line:
            try:
                self.obey(messages.order(line["value"]))
            except MessageError as error:  # another version's; we go on without
                print(f"slice {self.number}: not an order: {error}", file=sys.stderr, flush=True)
        elif line["id"] in self.attached and line["error"][0] == errno.ENODATA:
            self.over = True
        elif line["id"] in self.proxy_jobs:
            self.proxy_job_changed(line)
        # Any other error: the module is not there (yet, or any more) and will say when it is.

    def tell(self, **news: object) -> None:
        """News for the module."""
        self.client.send("dovetail.tell", {"number": self.number, **news})

    def attach(self) -> None:
        """Say that we are there and what we know, and listen for orders."""
        host = {"number": self.number, "host": socket.gethostname(), "rank": self.rank}
        kept = {**self.kept, "slices": [*self.kept_slices.values()]}
        known = {**host, **self.known(), "kept": kept}
        known["runs"] = [encode(run) for run in self.plans.all.values()]
        known["simulations"] = list(self.plans.simulations.values())
        self.attached.add(self.client.send("dovetail.attach", known, stream=True))
        if not self.node and self.number and not self.invited:
            self.joining = self.client.send(
                "dovetail.join", {"number": self.number, "node": self.node_name}
            )

    def submit_proxy_job(self, launch: dict[str, Any], nodes: Sequence[str]) -> None:
        """Submit the job that a simulation on these nodes is for Flux.

        It has the cores of their slices; ours, if there are none. We submit it, as the module may
        be away.
        """
        slices = {one["node"]: one["job"] for one in self.kept_slices.values()}
        jobs = sorted({slices[node] for node in nodes if node in slices})
        self.unsubmitted.append((launch, jobs))
        self.submit_more()

    def submit_more(self) -> None:
        """Submit the next jobs, a few at a time: orders must not wait for a thousand of them."""
        while self.unsubmitted and len(self.submitting) < SUBMITS and not self.over:
            launch, jobs = self.unsubmitted.popleft()
            wanted = {"spec": jobspec.proxy_job(launch), "jobs": jobs}
            request = self.client.send(SUBMIT, wanted)
            self.proxy_jobs[request] = launch
            self.submitting.add(request)

    def proxy_job_changed(self, line: Line) -> None:
        """A simulation has a job, or goes on without; or that was cancelled or killed."""
        launch = self.proxy_jobs[line["id"]]
        self.submitting.discard(line["id"])
        self.submit_more()
        if "error" in line:
            why = line["error"][1]
            print(f"simulation {launch['name']} has no job: {why}", file=sys.stderr, flush=True)
        elif "cancelled" in line["value"]:
            self.plans.stop(launch)

    def known(self) -> dict[str, Any]:
        """What the module needs to know, anew if it was loaded anew."""
        found: dict[str, Any] = {}
        if self.node:
            found = {"node": self.node["node"], "cpus": self.cpus}
        if self.node and self.number == 0:
            text = Path(self.node["kubeconfig"]).read_text()
            if self.usernetes:  # upstream's is for the machine that it is on
                text = text.replace("//127.0.0.1:", f"//{self.address}:")
            found["kubeconfig"] = text
        return found

    # --- Kubernetes ---

    def begin(self) -> None:
        """Start the control plane; a worker's start waits for its invitation."""
        try:
            self.address = own_address() if self.machine_address else ""
            found = self.usernetes or programs.built()
        except (BadInput, WorkFailed) as error:
            return self.complain(str(error))
        if found is None:
            self.complain("Kubernetes is not built for this user: type `dovetail kube build` once")
        elif self.number == 0:
            words = ["--node", self.node_name] if self.node_name else []
            words += ["--provider", "usernetes"] if self.usernetes else ["--network", self.network]
            self.start("up", "--name", self.name, *words)
            self.give("")
        else:
            self.start("join", "-")

    def memory(self) -> str:
        """Our cores' part of what a node may offer."""
        whole = components.host_memory() // 4 * 3
        part = whole * components.count(self.cpus) // (os.cpu_count() or 1)
        return str(max(part, cluster.LEAST))

    def start(self, *words: str) -> None:
        """Start our node in the background, as soon as that is given its input."""
        offer = ["--owner", str(os.getpid()), "--timeout", f"{self.timeout:g}"]
        if self.usernetes:  # of which a node is the whole machine
            offer += ["--usernetes", self.usernetes, "--node-image", self.node_image]
        else:
            cpus = f"{self.cpus}-{self.cpus}" if self.cpus.isdecimal() else self.cpus
            offer += ["--cpus", cpus, "--memory", self.memory(), "--devices", self.devices]
        if self.address:
            offer += ["--address", self.address]
        # Its words go into the job's output, and the first of them to the module.
        try:
            self.starting = subprocess.Popen(
                [*VERB, *words, "--json", *offer], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self.errors, text=True, env=package_environment(), preexec_fn=apart,
            )  # fmt: skip
        except OSError as error:
            return self.complain(f"its node cannot be started: {error.strerror}")
        self.when_ended(self.starting, self.started)

    def give(self, text: str) -> None:
        """Give the start of our node its input."""
        if self.starting is not None and self.starting.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # it has failed, and says why
                self.starting.stdin.write(text)
                self.starting.stdin.close()

    def join(self, line: Line) -> None:
        """Our invitation, or why there is none; where the module is away we ask again later."""
        if "value" in line and not self.invited:
            self.invited = True
            self.give(json.dumps(line["value"]))
        elif line["error"][0] == FAILED:
            self.complain(f"cannot be invited: {line['error'][1]}")

    def started(self) -> None:
        """Our node is ready, or will never be."""
        assert self.starting is not None
        assert self.starting.stdout is not None
        words = self.repeat()
        if self.starting.returncode:
            self.complain(" ".join(words.split())[:800] or "it did not start")
            return
        self.node = json.loads(self.starting.stdout.read())
        self.follow_node()
        if self.over:
            return
        print(f"slice {self.number}: node {self.node['node']}, cores {self.cpus}", flush=True)
        self.tell(**self.known())

    def follow_node(self) -> None:
        """End when our node does: its monitor and its supervisor do not outlive each other."""
        for node in cluster.here(self.name):
            with contextlib.suppress(ProcessLookupError):
                self.when_gone(node.monitor, lambda: self.complain("its node ended"))
            if processes.alive(node.monitor, node.monitor_ticks):
                return
        self.complain("its node ended")  # already

    def repeat(self) -> str:
        """Print what the start of our node said, into the job's output."""
        self.errors.seek(0)
        words = self.errors.read()
        print(words, end="", file=sys.stderr, flush=True)
        return words

    def complain(self, why: str) -> None:
        """Tell why this slice cannot be, and end."""
        self.failed = why.removeprefix("dovetail kube: ")
        print(f"slice {self.number}: {why}", file=sys.stderr, flush=True)
        self.tell(failed=self.failed)
        self.over = True

    def admin(self) -> api_client.Client:
        """The cluster's API, in the control slice."""
        return cluster.client(self.name)

    # --- Orders ---

    def obey(self, order: messages.Order) -> None:
        """Do what the module wants."""
        if isinstance(order, messages.End):
            self.over = True
        elif isinstance(order, messages.Invite):
            self.uninvited[order.invite] = order.node, math.inf
        elif isinstance(order, messages.Forget):
            with contextlib.suppress(OSError, HTTPException, api_client.Refused, BadInput):
                admin = self.admin()
                admin.call("DELETE", f"{api_client.NODES}/{order.forget}")
                if order.ended:
                    api_client.delete_pods(admin, order.forget)
            self.tell(forgotten=order.forget)
        elif isinstance(order, messages.Keep):
            self.keep(order)
        elif isinstance(order, messages.Queue):
            self.plans.queue(order.queue)
        elif isinstance(order, messages.StartRun):
            self.look_at_time()
            self.plans.start(order.run, self.node["kubeconfig"])
        elif isinstance(order, messages.CancelRun):
            self.plans.cancel(order.cancel)
        else:
            service = order.url
            self.answer(order.question, lambda: {"url": self.url(service)})

    def url(self, service: str) -> str:
        """Where a service is reached. Raises BadInput."""
        if self.usernetes or self.network == "bridge":
            space, _, name = service.rpartition("/")
            words = f"port-forward {f'-n {space} ' if space else ''}service/{name} PORT"
            raise BadInput(
                "pods of this Kubernetes are on a network of their own; "
                f"`flux dovetail kubectl {words}` leads there"
            )
        return services.url(self.admin(), service)

    def keep(self, order: messages.Keep) -> None:
        """Keep what is new beside what we keep already."""
        self.kept.update(order.keep)
        for one in self.kept.pop("slices", ()):
            self.kept_slices[one["number"]] = one
        for number in order.gone or ():
            self.kept_slices.pop(number, None)

    def answer(self, question: int, find: Callable[[], dict[str, Any]]) -> None:
        """Answer a question, or say why not."""
        try:
            self.tell(answer=question, value=find())
        except (OSError, HTTPException, api_client.Refused, BadInput, WorkFailed) as error:
            self.tell(answer=question, why=str(error))

    def invite(self) -> None:
        """Make join data for who waits; they are in this cluster's private folder for a moment."""
        if not cluster.takes_nodes(self.name) or (self.usernetes and not self.node):
            return  # upstream's verb that makes our node still has the cluster to itself
        valid = max(INVITED, math.ceil(self.timeout))
        waiting, self.uninvited = self.uninvited, {}
        for number, (node, until) in waiting.items():
            until = min(until, time.monotonic() + TRIED)
            path = node_record.cluster_folder(self.name) / f"invite-{number}"
            try:
                cluster.invite(
                    argparse.Namespace(name=self.name, invite=path, node=node, valid=valid)
                )
            except (BadInput, WorkFailed, OSError) as error:
                if isinstance(error, WorkFailed) and time.monotonic() < until:
                    self.uninvited[number] = node, until
                else:
                    self.tell(invited=number, why=str(error))
                continue
            content = json.loads(path.read_text())
            path.unlink()
            self.tell(invited=number, join=content)

    # --- The end ---

    def when_ended(self, process: subprocess.Popen[Any], call: Callable[[], None]) -> None:
        """Call once a child has ended."""

        def ended() -> None:
            process.wait()
            call()

        self.when_gone(process.pid, ended)

    def when_gone(self, pid: int, call: Callable[[], None]) -> None:
        """Call once a process has ended. Raises ProcessLookupError."""
        watched = os.pidfd_open(pid)

        def ended() -> None:
            self.selector.unregister(watched)
            os.close(watched)
            call()

        self.selector.register(watched, selectors.EVENT_READ, ended)

    def end(self) -> int:
        """End all that this slice started; returns the job's exit code."""
        unready = self.starting is not None and self.starting.poll() is None
        self.plans.end()
        end(self.starting)
        if unready:
            self.repeat()
        with contextlib.suppress(WorkFailed):
            self.plans.last_news()
        trouble = sweep(self.name)
        with contextlib.suppress(WorkFailed, OSError):
            self.tell(ended=trouble)
            self.client.close()
        return 1 if self.failed or trouble else 0


def seconds_left() -> float:
    """Until our job's time is over, which may have been changed; infinity if it never is.

    Where a default for the time of jobs was taken off ours, only the instance's own says when.
    """
    for words in (TIME_LEFT, ("env", "env", "-u", "FLUX_JOB_ID", "flux", *TIME_LEFT)):
        try:
            left = float(flux(*words))
        except (WorkFailed, ValueError, OSError):  # the last one: no process can be had just now
            continue
        if left < UNLIMITED:
            return left
    return math.inf


def own_address() -> str:
    """This machine's address, as the others reach it: its name's, or else that of the way out.

    By their names Flux's brokers meet too; the way out may lead through a network of its own.
    """
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        found = socket.gethostbyname(socket.gethostname())
        probe.bind((found, 0))  # or the name is another's, or an old one
        if not found.startswith("127."):
            return found
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
            return str(probe.getsockname()[0])
    except OSError:
        raise WorkFailed(
            f"{socket.gethostname()} has no address that other machines reach: its name has none, "
            "and there is no way out; an administrator gives the name one in /etc/hosts"
        ) from None


def node_name(number: int, cluster: str) -> str:
    """What a node with the machine's address is called: several slices may share a machine.

    As much of the machine's name as leaves room for the paths of sockets, with a dash for what
    Kubernetes has in no name, as in `gpu_07`.
    """
    host, end = node_options.machine_name(), f"-{number}"
    return host[: min(40, node_record.room(cluster)) - len(end)] + end


def use_folder(number: int, name: str) -> None:
    """A folder of its own for each slice, since slices may share a machine; verbs lock theirs."""
    folder = f"/tmp/dovetail-{os.getuid()}-{name.partition('-')[2]}-{number}"
    os.environ["DOVETAIL_STATE"] = folder


def sweep(name: str) -> str:
    """Remove all that is left of this slice's node, alive or not; returns what went wrong."""
    folder = Path(os.environ["DOVETAIL_STATE"])
    deadline = time.monotonic() + PATIENCE
    while folder.exists():  # looking into it would make it
        try:
            cluster.down(name)
            with contextlib.suppress(FileNotFoundError):  # the node's monitor was first
                folder.rmdir()
        except (BadInput, WorkFailed, OSError) as error:
            if time.monotonic() > deadline:
                return str(error)
            select.select([], [], [], 0.2)  # the monitor holds the lock, and is at it
    return ""


def sweep_killed() -> None:
    """Remove what our user's slices left on this machine that were killed whole.

    A batch system may kill all processes of a job at once, and then nobody was there to clean up.
    A cluster that a verb holds, or of which anything runs, is left alone.
    """
    own = os.environ["DOVETAIL_STATE"]
    for folder in map(str, Path("/tmp").glob(f"dovetail-{os.getuid()}-????????-*")):
        os.environ["DOVETAIL_STATE"] = folder
        with contextlib.suppress(BadInput, WorkFailed, OSError):
            if folder != own:
                cluster.sweep_dead()
    os.environ["DOVETAIL_STATE"] = own


def main(
    number: int, name: str, *, machine_address: bool, timeout: float, stop_before: float,
    devices: str, network: str, usernetes: str, node_image: str, only_sweep: bool,
) -> int:  # fmt: skip
    """Be the agent of slice `number` of cluster `name`, or only remove what it left."""
    os.umask(0o077)
    use_folder(number, name)
    if only_sweep:
        trouble = sweep(name)
        print(trouble, end="", file=sys.stderr)
        return 1 if trouble else 0
    sweep_killed()
    return Agent(
        number, name, machine_address=machine_address, timeout=timeout, stop_before=stop_before,
        devices=devices, network=network, usernetes=usernetes, node_image=node_image,
    ).live()  # fmt: skip
