# SPDX-License-Identifier: LGPL-3.0-or-later
"""What happens between the start of a batch job and its Kubernetes being up, and when.

Inputs: the batch job's instance, when its job started, and until when. Outputs: `Span`s, and lines
that draw them. The times are those of Flux's event logs, and of the kernel for when a process
started, in hundredths of a second; a component's span ends with the slice that it belongs to,
since it says nowhere that it is ready.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from usernetes_setup import node_record
from usernetes_setup.node_record import Node

from dovetail.bench.jobtap import Flux
from dovetail.flux.jobspec import SLICE_NAME
from dovetail.host import processes

WIDTH = 60
"""Characters in which the whole time is drawn."""
HERTZ = os.sysconf("SC_CLK_TCK")
_PATIENCE = 10.0  # seconds for an event that is on its way


@dataclass(frozen=True)
class Span:
    """One thing that takes time; seconds from the start of the batch job."""

    name: str
    begin: float
    end: float


def spans(flux: Flux, batch: str, uri: str, up: float) -> list[Span]:
    """What the instance at `uri` of job `batch` did, which was up `up` seconds after its start."""
    started = float(flux.run("jobs", "-no", "{t_run}", batch))
    names = dict(line.split() for line in
                 flux.run("jobs", "-no", "{id.dec} {name}", uri=uri).splitlines())  # fmt: skip
    slices = {name: job for job, name in names.items() if SLICE_NAME.fullmatch(name)}
    first = min(_event(flux, uri, job, "eventlog", "submit") for job in slices.values())
    made = [Span("Flux's instance", 0.0, first - started)]
    for name, job in sorted(slices.items()):
        submitted = _event(flux, uri, job, "eventlog", "submit")
        task = _event(flux, uri, job, "guest.exec.eventlog", "shell.start")
        ready = _event(flux, uri, job, "guest.output", "data")
        made.append(Span(f"{name}: its job", submitted - started, task - started))
        pid = int(flux.run("job", "hostpids", job, uri=uri).rpartition(":")[2])
        node = _node(pid)
        if node is None:
            continue
        began = _epoch(node.monitor_ticks)
        made.append(Span(f"{name}: its agent", task - started, began - started))
        inside = _epoch(node.supervisor_ticks)
        made.append(Span(f"{name}: its node's namespaces", began - started, inside - started))
        for at, component in sorted(_components(node)):
            made.append(Span(f"{name}: {component}", at - started, ready - started))
    return [*made, Span("up", up, up)]


def drawn(found: Sequence[Span]) -> list[str]:
    """A line for each, with its beginning and its end in seconds, and a bar."""
    whole = max(one.end for one in found) or 1.0
    longest = max(len(one.name) for one in found)
    lines = []
    for one in found:
        left, right = (round(WIDTH * at / whole) for at in (one.begin, one.end))
        bar = " " * left + "#" * max(1, right - left)
        lines.append(f"{one.name:{longest}} {one.begin:6.2f} {one.end:6.2f}  {bar}")
    return lines


def _event(flux: Flux, uri: str, job: str, log: str, name: str) -> float:
    """When a job's log first says this, which may be about to; seconds since the epoch."""
    words = ["job", "wait-event", "--format=json", f"--timeout={_PATIENCE:g}", f"--path={log}"]
    return float(json.loads(flux.run(*words, job, name, uri=uri))["timestamp"])


def _node(agent: int) -> Node | None:
    """The node that an agent's process owns."""
    for record in Path("/tmp").glob(f"dovetail-{os.getuid()}-*/*/nodes/*/node.json"):
        node = node_record.read(record)
        if node.owner == agent:
            return node
    return None


def _components(node: Node) -> Iterator[tuple[float, str]]:
    """When the process of each component that runs started, and the name of its log."""
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        if processes.parent(pid) == node.supervisor:
            log = Path(os.readlink(folder / "fd/1"))
            yield _epoch(processes.start_ticks(pid)), log.name


def _epoch(ticks: int) -> float:
    """Clock ticks since boot as seconds since the epoch."""
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / HERTZ
