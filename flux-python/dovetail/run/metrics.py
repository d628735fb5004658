# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run's metrics, in the text format of Prometheus.

Inputs: what goes into the event log, the controller's views, and on a cluster the share report.
Outputs: the text; `METRICS` says what is in it, and dovetail-metrics(5) the same for the user.
Invariants: counters of the run count from the start of this process; what is not known is left out,
and of simulations those are there that are launched and have not ended, however many there are in
all.
`take` and `look` are for the run's thread and cost it little; `render` is for another one.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from dovetail import __version__
from dovetail.controller.controller import Controller
from dovetail.controller.simulation import Stage
from dovetail.core import protocol
from dovetail.core.protocol import Action, Capacity, Cause, Event

EVERY = 1.0
"""Seconds of the run between two looks at the controller."""
SHARES = "status.json"
"""In the run's directory: the share report of a run on a cluster."""
DECISIONS = (
    "profile", "choice", "resize", "admit", "keep", "rollback", "policy", "bind", "phase", "hold",
    "model", "fail",
)  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """What is measured, under which name and labels."""

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str


ONE = ("simulation", "family")
GROUP = ("simulation", "node", "ranks")
METRICS = (
    Metric("dovetail_run_info", "gauge", ("version", "launcher"),
           "1, with the version of Dovetail and what simulations become on a cluster"),
    Metric("dovetail_run_time_seconds", "gauge", (),
           "The run's clock, which goes on over a resume"),
    Metric("dovetail_simulations", "gauge", ("state",), "Simulations of the run"),
    Metric("dovetail_throughput_ratio", "gauge", (),
           "Work that those running do, against one alone"),
    Metric("dovetail_trial_throughput_ratio", "gauge", (),
           "The same as the last trial has measured it"),
    Metric("dovetail_trial_before_ratio", "gauge", (), "The same before that trial's newcomer"),
    Metric("dovetail_decisions_total", "counter", ("decision",), "Decisions in the event log"),
    Metric("dovetail_launches_total", "counter", (), "Simulations launched"),
    Metric("dovetail_delays_total", "counter", (), "Launches that had to wait for room"),
    Metric("dovetail_ends_total", "counter", ("cause",), "Launches that came to an end"),
    Metric("dovetail_requeues_total", "counter", ("cause",), "Simulations queued again"),
    Metric("dovetail_resizes_total", "counter", ("outcome",),
           "Changes of requests, applied or refused"),
    Metric("dovetail_simulation_ranks", "gauge", ONE, "Ranks of a simulation"),
    Metric("dovetail_simulation_iterations_total", "counter", ONE,
           "Iterations, or periods of its MPI calls"),
    Metric("dovetail_simulation_slowdown_ratio", "gauge", ONE, "Times slower than alone"),
    Metric("dovetail_simulation_left_seconds", "gauge", ONE, "Predicted time until its end"),
    Metric("dovetail_simulation_requested_cores", "gauge", ONE, "CPU requests of its ranks"),
    Metric("dovetail_simulation_cpu_seconds_total", "counter", ONE, "CPU time of its ranks"),
    Metric("dovetail_simulation_useful_seconds_total", "counter", ONE,
           "Time of its ranks outside MPI"),
    Metric("dovetail_simulation_mpi_seconds_total", "counter", ONE, "Time of its ranks inside MPI"),
    Metric("dovetail_simulation_memory_bytes", "gauge", ONE, "Peak resident memory of its ranks"),
    Metric("dovetail_share_wanted_ratio", "gauge", GROUP,
           "Part of its node's CPU that a rank group shall have"),
    Metric("dovetail_share_real_ratio", "gauge", GROUP,
           "The same as the kernel's weights on that node give it"),
    Metric("dovetail_node_up", "gauge", ("node",),
           "1 for a node that can be used, 0 once it is lost"),
    Metric("dovetail_node_cores", "gauge", ("node",), "Cores of a node that the run may use"),
    Metric("dovetail_node_memory_bytes", "gauge", ("node",), "Memory that it may use there"),
)  # fmt: skip

Series = dict[tuple[str, ...], float]


class Metrics(Collector):
    """Follows a run."""

    def __init__(self, directory: Path, capacity: Capacity, launcher: str = "") -> None:
        self._shares = directory / SHARES
        self._lock = threading.Lock()  # for the two that follow
        self._counters: dict[str, Series] = {
            "dovetail_decisions_total": {(what,): 0.0 for what in DECISIONS},
            "dovetail_launches_total": {(): 0.0},
            "dovetail_delays_total": {(): 0.0},
            "dovetail_ends_total": {(cause.value,): 0.0 for cause in Cause},
            "dovetail_requeues_total": {},
            "dovetail_resizes_total": {("applied",): 0.0, ("refused",): 0.0},
        }
        self._gauges: dict[str, Series] = {"dovetail_run_info": {(__version__, launcher): 1.0}}
        self._ranks: dict[str, protocol.Ranks] = {}  # as they were seen last
        self._given: dict[str, protocol.Share] = {}  # the shares that simulations have
        self._asked: list[Mapping[str, protocol.Share]] = []  # and those that were asked for
        self._active: set[str] | None = None  # launched and not ended; None: look for them
        self._looked = -EVERY
        self._registry = CollectorRegistry()
        self._registry.register(self)
        self._take_nodes(capacity)

    def render(self) -> bytes:
        """All of it as text."""
        return generate_latest(self._registry)

    # --- the run's thread ---

    def take(self, entry: Event | Action) -> None:
        """Count what goes into the event log."""
        with self._lock:
            self._take(entry)

    def _take(self, entry: Event | Action) -> None:
        if isinstance(entry, protocol.Sampled):
            self._ranks[entry.name] = entry.ranks
        elif isinstance(entry, protocol.Note):
            self._count("dovetail_decisions_total", entry.what)
            # What no longer pays has a throughput too, and was no trial.
            if entry.what in ("keep", "rollback") and "before" in entry.data:
                for key in ("throughput", "before"):
                    self._gauges[f"dovetail_trial_{key}_ratio"] = {(): float(entry.data[key])}
        elif isinstance(entry, protocol.Launch):
            self._count("dovetail_launches_total")
            self._given[entry.name] = entry.share
            self._begin(entry.name)
        elif isinstance(entry, protocol.Resize):
            self._asked.append(entry.shares)
        elif isinstance(entry, protocol.Delayed):
            self._count("dovetail_delays_total")
        elif isinstance(entry, protocol.Finished):
            self._count("dovetail_ends_total", entry.cause.value)
            self._end(entry.name)
        elif isinstance(entry, protocol.Requeued):
            self._count("dovetail_requeues_total", entry.cause.value)
            self._end(entry.name)
        elif isinstance(entry, protocol.Ended):
            self._end(entry.name)
        elif isinstance(entry, protocol.Resized):
            self._resized(entry.refused)
        elif isinstance(entry, protocol.CapacityChanged):
            self._take_nodes(entry.capacity)

    def look(self, controller: Controller, t: float) -> None:
        """Take over what the controller shows, if the last look was long enough ago."""
        if 0.0 <= t - self._looked < EVERY and not controller.finished:
            return
        self._looked = t
        if self._active is None:  # as after a resume, where some may go on
            self._active = {view.name for view in controller.active_views()}
        views = [controller.view(name) for name in sorted(self._active)]
        counts = controller.status().counts
        states: Series = {(one.value,): float(counts.get(one.value, 0)) for one in Stage}
        del states[(Stage.PAUSED.value,)]  # shown as suspended
        gauges: dict[str, Series] = {
            "dovetail_run_time_seconds": {(): t},
            "dovetail_simulations": states,
        }
        counters: dict[str, Series] = {}
        done = 0.0
        for view in views:
            labels = (view.name, view.family)
            if view.measure != "work":  # of which there are none to count
                counters.setdefault("iterations", {})[labels] = float(view.iterations)
            gauges.setdefault("ranks", {})[labels] = float(view.ranks)
            gauges.setdefault("requested_cores", {})[labels] = sum(view.requests) / 1000.0
            if view.slowdown:
                gauges.setdefault("slowdown_ratio", {})[labels] = view.slowdown
                done += 1.0 / view.slowdown if view.state == "running" else 0.0
            if view.left is not None:
                gauges.setdefault("left_seconds", {})[labels] = view.left
            if ranks := self._ranks.get(view.name):
                counters.setdefault("cpu_seconds", {})[labels] = sum(ranks.cpu)
                counters.setdefault("useful_seconds", {})[labels] = sum(ranks.useful)
                counters.setdefault("mpi_seconds", {})[labels] = sum(ranks.mpi)
                gauges.setdefault("memory_bytes", {})[labels] = float(sum(ranks.memory))
        gauges["dovetail_throughput_ratio"] = {(): done} if done else {}
        with self._lock:
            _replace(self._gauges, gauges, "dovetail_simulation_{}")
            _replace(self._counters, counters, "dovetail_simulation_{}_total")

    def _count(self, name: str, *labels: str) -> None:
        series = self._counters[name]
        series[labels] = series.get(labels, 0.0) + 1.0

    def _resized(self, refused: str) -> None:
        """Count it as the summary does: whoever is bound to cores, suspended or waits differently
        has the requests that it had."""
        asked = self._asked.pop(0) if self._asked else {}
        known = [(self._given.get(name), share) for name, share in asked.items()]
        if not refused:
            self._given.update(asked)
            if any(
                old is None
                or (new.requests != old.requests and not (new.suspended or old.suspended))
                for old, new in known
            ):
                self._count("dovetail_resizes_total", "applied")
        elif not asked or any(
            old is None or replace(new, bound=old.bound) != old for old, new in known
        ):
            self._count("dovetail_resizes_total", "refused")

    def _begin(self, name: str) -> None:
        self._ranks.pop(name, None)  # what it did in an earlier launch
        if self._active is not None:
            self._active.add(name)

    def _end(self, name: str) -> None:
        self._ranks.pop(name, None)
        if self._active is not None:
            self._active.discard(name)

    def _take_nodes(self, capacity: Capacity) -> None:
        up: Series = dict.fromkeys(self._gauges.get("dovetail_node_up", {}), 0.0)
        up.update({(one.name,): 1.0 for one in capacity.nodes})
        self._gauges["dovetail_node_up"] = up
        self._gauges["dovetail_node_cores"] = {(n.name,): n.cpu / 1000.0 for n in capacity.nodes}
        self._gauges["dovetail_node_memory_bytes"] = {
            (one.name,): float(one.memory) for one in capacity.nodes if one.memory
        }

    # --- the thread of who asks ---

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Each metric with what is known of it now; called by the registry."""
        with self._lock:
            known = {name: dict(one) for name, one in {**self._counters, **self._gauges}.items()}
        known.update(_shares(self._shares))
        for metric in METRICS:
            kind: type[CounterMetricFamily] | type[GaugeMetricFamily] = (
                CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            )
            made = kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in known.get(metric.name, {}).items():
                made.add_metric(labels, value)
            yield made


def _replace(kept: dict[str, Series], new: Mapping[str, Series], form: str) -> None:
    """Put in what is new, and take out what was of simulations that are gone."""
    before, after = form.split("{}")
    for name in [one for one in kept if one.startswith(before) and one.endswith(after)]:
        del kept[name]
    for name, series in new.items():
        kept[name if name.startswith("dovetail_") else form.format(name)] = series


def _shares(path: Path) -> dict[str, Series]:
    """What rank groups shall have and have, on a cluster; empty where nothing is written."""
    try:
        groups = json.loads(path.read_text())["groups"]
        rows = [
            ((one["simulation"], one["node"], "-".join(map(str, one["ranks"]))), one)
            for one in groups
        ]
        return {
            "dovetail_share_wanted_ratio": {labels: one["wanted"] for labels, one in rows},
            "dovetail_share_real_ratio": {
                labels: one["real"] for labels, one in rows if one["real"] is not None
            },
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {}
