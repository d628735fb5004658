# SPDX-License-Identifier: LGPL-3.0-or-later
"""Stands in for a cluster's nodes, where there is an API server alone.

Inputs: the server, how many nodes there shall seem to be. Outputs: Node objects; for each Job its
pods, on the nodes that the executor chose; their statuses, as kubelets would write them: running
at once, resized at once, gone at once; and an agent for each node, connected to the run's hub,
which says that rank groups are there, that programs have started, and a new iteration of each rank
every `ITERATION` seconds, as `executors.pods.agent` does.

Invariants: there are no pods' processes, nothing is mounted or run, and all of it ends with
`close`. It is slower than as many kubelets would be: what is measured against it is the
controller's cost, not that of a cluster.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import http.client
import itertools
import json
import queue
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dovetail.bench.scale.api_server import Server
from dovetail.core.errors import WorkFailed
from dovetail.executors.kubernetes import manifests, pod_status
from dovetail.executors.kubernetes.manifests import path
from dovetail.executors.pods import connections, messages
from dovetail.executors.pods.agent import PERIOD

Object = dict[str, Any]
CORES, PODS = 128, 110  # of each node; 110 pods are what a kubelet takes unless told otherwise
ITERATION = 0.5  # seconds
WORKERS = 8
JSON, MERGE = "application/json", "application/merge-patch+json"


class NoNodes:
    """See above. `failed` has the first thing that went wrong, if any did."""

    def __init__(self, server: Server, count: int) -> None:
        self._server, self._count = server, count
        self._client = server.client()
        self._work: queue.SimpleQueue[Callable[[_Link], None] | None] = queue.SimpleQueue()
        self._pods: dict[str, Object] = {}  # by name, as they were seen last
        self._written: dict[str, tuple[int, bool]] = {}  # generation, and whether deleted
        self._agents: dict[str, _Agent] = {}
        self._hub: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # of which the loop keeps no reference
        self._ended = False
        self.failed = ""
        self._loop = asyncio.new_event_loop()
        threads = [("agents", self._loop.run_forever), ("jobs", self._follow_jobs),
                   ("pods", self._follow_pods)]  # fmt: skip
        threads += [(f"worker {number}", self._labour) for number in range(WORKERS)]
        self._boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        for number in range(count):
            self._client.call("POST", path("Node"), self._node(f"none-{number}"))
        for name, run in threads:
            threading.Thread(target=self._guarded, args=(run,), name=name, daemon=True).start()

    def close(self) -> None:
        """End it all."""
        self._ended = True
        for _ in range(WORKERS):
            self._work.put(None)
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)

    def _guarded(self, run: Callable[[], None]) -> None:
        try:
            run()
        except Exception as error:
            if not self._ended:
                self.failed = self.failed or f"{type(error).__name__}: {error}"

    def _node(self, name: str) -> Object:
        """A node that is this machine, ready, with room for many pods."""
        room = {"cpu": str(CORES), "memory": "1Ti", "pods": str(PODS + 1)}
        return {
            "metadata": {"name": name},
            "status": {
                "allocatable": room, "capacity": room,
                "conditions": [{"type": "Ready", "status": "True"}],
                "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
                "nodeInfo": {"bootID": self._boot, **dict.fromkeys(
                    ("machineID", "systemUUID", "kernelVersion", "osImage", "kubeletVersion",
                     "containerRuntimeVersion", "kubeProxyVersion", "operatingSystem",
                     "architecture"), "none")},
            },
        }  # fmt: skip

    # --- the API ---

    def _labour(self) -> None:
        with contextlib.closing(_Link(self._server)) as link:
            while (work := self._work.get()) is not None:
                work(link)

    def _follow_jobs(self) -> None:
        """Make what Jobs are for; there is no Job before the first run."""
        for kind, job in self._changes(path("Job", namespace="")):
            if kind == "ADDED":
                self._make_pods(job)

    def _changes(self, where: str) -> Iterator[tuple[str, Object]]:
        version = self._client.call("GET", where)["metadata"]["resourceVersion"]
        query = f"{where}?watch=1&allowWatchBookmarks=true"
        with contextlib.closing(_Link(self._server)) as link:
            while not self._ended:
                for line in link.open("GET", f"{query}&resourceVersion={version}"):
                    change = json.loads(line)
                    if change["type"] == "ERROR":
                        raise WorkFailed(f"{where}: {change['object'].get('message')}")
                    version = change["object"]["metadata"]["resourceVersion"]
                    if change["type"] != "BOOKMARK":
                        yield change["type"], change["object"]

    def _make_pods(self, job: Object) -> None:
        """The pods of a Job, on the nodes where admission would put them."""
        name = job["metadata"]["name"]
        template = job["spec"]["template"]
        where = self._client.call("GET", path("ConfigMap", manifests.REQUESTS))["data"]
        for index in range(job["spec"]["completions"]):
            labels = {**template["metadata"]["labels"], "batch.kubernetes.io/job-name": name,
                      manifests.INDEX: str(index)}  # fmt: skip
            made = {
                "metadata": {**template["metadata"], "name": f"{name}-{index}", "labels": labels},
                "spec": {**template["spec"], "nodeName": where[f"{name}.{index}.node"]},
            }
            self._work.put(lambda link, made=made: link.call("POST", path("Pod"), made))  # type: ignore[misc]

    def _follow_pods(self) -> None:
        for kind, pod in self._changes(path("Pod")):
            name = pod["metadata"]["name"]
            if kind == "DELETED":
                self._pods.pop(name, None)
                self._written.pop(name, None)
                self._tell(pod, lambda agent, pod: agent.gone(pod))
                continue
            self._pods[name] = pod
            state = pod["metadata"].get("generation", 0), pod_status.deleted(pod)
            if self._written.get(name) != state:
                self._written[name] = state
                self._work.put(lambda link, pod=pod: self._keep_up(link, pod))  # type: ignore[misc]

    def _keep_up(self, link: _Link, pod: Object) -> None:
        """What a kubelet does: run it, resize it, end it."""
        where = path("Pod", pod["metadata"]["name"])
        if pod_status.deleted(pod):
            link.call("DELETE", where, {"gracePeriodSeconds": 0}, missing=True)
            return
        container = pod["spec"]["containers"][0]
        real = {"requests": container["resources"]["requests"]}
        now = "2000-01-01T00:00:00Z"
        status = {
            "phase": "Running", "podIP": "127.0.0.1", "hostIP": "127.0.0.1", "startTime": now,
            "observedGeneration": pod["metadata"].get("generation", 0),
            "containerStatuses": [{
                "name": container["name"], "image": container["image"], "imageID": "none",
                "containerID": f"none://{pod['metadata']['uid']}", "ready": True, "started": True,
                "restartCount": 0, "state": {"running": {"startedAt": now}},
                "resources": real, "allocatedResources": real["requests"],
            }],
        }  # fmt: skip
        link.call("PATCH", f"{where}/status", {"status": status}, kind=MERGE, missing=True)
        if pod["metadata"].get("generation", 0) <= 1:
            self._tell(pod, lambda agent, pod: agent.there(pod))

    # --- the agents ---

    def _tell(self, pod: Object, what: Callable[[_Agent, Object], None]) -> None:
        """Have the agent of a pod's node know something; the first time it connects."""
        node = pod_status.node_of(pod)
        credentials = self._credentials(pod) if not self._hub else self._hub
        self._hub = credentials

        def tell() -> None:
            if node not in self._agents:
                self._agents[node] = _Agent(node, credentials, self._pods)
                self._tasks.add(self._loop.create_task(self._agents[node].live()))
            what(self._agents[node], pod)

        self._loop.call_soon_threadsafe(tell)

    def _credentials(self, pod: Object) -> dict[str, str]:
        """How agents of the pod's run find the hub."""
        run = pod["metadata"]["labels"][manifests.RUN]
        secret = self._client.call("GET", path("Secret", manifests.hub_secret(run)))
        return {name: base64.b64decode(text).decode() for name, text in secret["data"].items()}


class _Agent:
    """One node's end of its connection to the hub. Its rank groups have a rank each."""

    def __init__(
        self, node: str, credentials: Mapping[str, str], pods: Mapping[str, Object]
    ) -> None:
        self._node, self._credentials, self._pods = node, credentials, pods
        self._writer: asyncio.StreamWriter | None = None
        self._places: dict[str, tuple[str, int]] = {}  # by the pod's name: simulation, group
        self._begun: dict[str, float] = {}  # simulations that run here, and since when

    def there(self, pod: Object) -> None:
        """A pod runs."""
        meta = pod["metadata"]
        self._place(meta["name"], meta["labels"][manifests.KEY], pod_status.group_of(pod))

    def _place(self, pod: str, simulation: str, group: int) -> None:
        self._places[pod] = simulation, group
        self._say(messages.Pod(simulation, group, self._pods[pod]["metadata"]["uid"]))

    def gone(self, pod: Object) -> None:
        """A pod is no more."""
        self._places.pop(pod["metadata"]["name"], None)

    def _say(self, message: messages.Message) -> None:
        if self._writer is not None:
            self._writer.write(messages.encode(message))

    async def live(self) -> None:
        """Until the hub is gone."""
        host, _, port = self._credentials["address"].rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=connections.stranger())
        writer.write(messages.encode(messages.Hello(self._node, self._credentials["token"])))
        self._writer = writer
        for name, place in self._places.items():  # that were there before we were connected
            self._say(messages.Pod(*place, self._pods[name]["metadata"]["uid"]))
        sampling = asyncio.get_running_loop().create_task(self._sample())
        decoder = messages.Decoder()
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                for message in decoder.feed(data):
                    self._hear(message)
        sampling.cancel()
        writer.transport.abort()

    def _hear(self, message: messages.Message) -> None:
        if isinstance(message, messages.Look):
            self._say(messages.Seen([]))
        elif isinstance(message, messages.Run):
            self._begun.setdefault(message.simulation, time.monotonic())
            if (message.simulation, 0) in self._places.values():
                self._say(messages.Started(message.simulation, "", 0))
        elif isinstance(message, messages.End) and message.next:
            for name, (simulation, group) in list(self._places.items()):
                if simulation == message.simulation:
                    self._place(name, message.next, group)
        elif isinstance(message, messages.Check):
            self._say(messages.Weights(self._weights(set(message.uids))))

    def _weights(self, uids: set[str]) -> dict[str, dict[str, str]]:
        """What runc makes of requests with control groups version 1."""
        ours = (self._pods[name] for name in self._places if name in self._pods)
        return {
            pod["metadata"]["uid"]: {"cpu.shares": str(pod_status.born_with(pod)[0] * 1024 // 1000)}
            for pod in ours
            if pod["metadata"]["uid"] in uids
        }

    async def _sample(self) -> None:
        """As an agent does, four times a second what is new; half of the ranks each time."""
        turns = round(ITERATION / PERIOD)
        for turn in itertools.count():
            await asyncio.sleep(PERIOD)
            now = time.monotonic()
            ranks: dict[str, dict[str, list[float]]] = {}
            for simulation, group in self._places.values():
                begun = self._begun.get(simulation)
                if begun is not None and group % turns == turn % turns:
                    done = 1 + int((now - begun) / ITERATION)
                    used = done * ITERATION / 2
                    row = [done, now, used, used, used, 1 << 20, -1.0]
                    ranks.setdefault(simulation, {})[str(group)] = row
            if ranks:
                self._say(messages.Sample(now, ranks, {}))


class _Link:
    """A connection that is kept, for one thread."""

    def __init__(self, server: Server) -> None:
        where = urlsplit(server.url)
        context = ssl.create_default_context(cadata=server.authority)
        context.load_cert_chain(server.certificate, server.certificate.with_suffix(".key"))
        self._link = http.client.HTTPSConnection(where.hostname or "", where.port, context=context)

    def close(self) -> None:
        """End it."""
        self._link.close()

    def open(self, method: str, where: str, body: object = None, kind: str = JSON) -> Any:  # noqa: ANN401
        """The answer to a request, which has not been read yet."""
        data = None if body is None else json.dumps(body)
        self._link.request(method, where, data, {"Content-Type": kind})
        return self._link.getresponse()

    def call(
        self, method: str, where: str, body: object, kind: str = JSON, *, missing: bool = False
    ) -> None:
        """One request; WorkFailed where it is refused, but for one of what may be `missing`."""
        answer = self.open(method, where, body, kind)
        text = answer.read()
        if answer.status >= 400 and not (missing and answer.status in (404, 409)):
            raise WorkFailed(f"{method} {where}: {text[:500].decode(errors='replace')}")
