# SPDX-License-Identifier: LGPL-3.0-or-later
"""A whole run with the simulated executor: what a plan would do, in no time.

Inputs: specs, the work they mean, nodes, faults. Outputs: makespans, actions, how many ran.

Invariants: deterministic by seed; the run always ends (`limit` virtual seconds at the latest).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dovetail.controller.controller import Controller
from dovetail.controller.settings import Settings
from dovetail.core import protocol
from dovetail.core.eventlog import Log
from dovetail.core.protocol import Action, Node, Spec
from dovetail.executors.simulated.executor import Fault, Simulated, Work


@dataclass
class SimulatedRun:
    """What a simulated run did; times in virtual seconds.

    `sequential` is one after the other with waits off, `running` is (t, N) at each change,
    `memory` the greatest sum of specs' memory that was started at one moment, bytes.
    """

    makespan: float
    sequential: float
    controller: Controller
    running: list[tuple[float, int]] = field(default_factory=list)
    actions: list[tuple[float, Action]] = field(default_factory=list)
    memory: int = 0
    ended: bool = True

    @property
    def gain(self) -> float:
        """Throughput against one after the other."""
        return self.sequential / self.makespan if self.makespan > 0.0 else 1.0

    def count(self, kind: type) -> int:
        """How many actions of a type there were."""
        return sum(isinstance(action, kind) for _, action in self.actions)

    def notes(self, what: str) -> list[protocol.Note]:
        """The notes of one kind, in order."""
        return [a for _, a in self.actions if isinstance(a, protocol.Note) and a.what == what]


def sequential(specs: Sequence[Spec], works: Mapping[str, Work], nodes: Sequence[Node]) -> float:
    """Seconds for all specs one after the other with spinning waits, measured in simulation."""
    alone: dict[str, float] = {}
    for spec in specs:
        if spec.family not in alone:
            executor = Simulated(nodes, works)
            executor.launch(spec, protocol.Share((1000,) * spec.ranks))
            while not any(isinstance(e, protocol.Finished) for e in executor.observe(0.0)):
                executor.advance(0.05)
            alone[spec.family] = executor.clock
    return sum(alone[spec.family] for spec in specs)


def run_simulated(
    specs: Sequence[Spec],
    works: Mapping[str, Work],
    nodes: Sequence[Node],
    seed: int = 0,
    faults: Sequence[Fault] = (),
    settings: Settings | None = None,
    dt: float = 0.1,
    limit: float = 1e6,
    weights: bool = True,
    suspend: bool = True,
    log: Log | None = None,
    executor: type[Simulated] = Simulated,
    binds: bool = False,
) -> SimulatedRun:
    """Drive a controller with a simulated executor to the end, and record what it did."""
    machine = executor(nodes, works, seed, faults, weights, suspend, binds)
    controller = Controller(specs, machine.capacity(), settings)
    result = SimulatedRun(0.0, sequential(specs, works, nodes), controller)
    started: dict[str, int] = {}
    suspended: set[str] = set()
    while not controller.finished and machine.clock < limit:
        happened = [*machine.observe(machine.now), protocol.Tick(machine.now)]
        for event in happened:
            if log is not None:
                log.write(event)
            if isinstance(event, protocol.Finished):
                started.pop(event.name, None)
                suspended.discard(event.name)
                result.makespan = machine.clock
            for action in controller.handle(event):
                if log is not None:
                    log.write(action)
                _act(machine, controller, action, started, suspended)
                result.actions.append((machine.clock, action))
        n = len(set(started) - suspended)
        if not result.running or result.running[-1][1] != n:
            result.running.append((machine.clock, n))
        result.memory = max(result.memory, sum(started.values()))
        machine.advance(dt)
    result.ended = controller.finished
    return result


def _act(
    executor: Simulated,
    controller: Controller,
    action: Action,
    started: dict[str, int],
    suspended: set[str],
) -> None:
    if isinstance(action, protocol.Launch):
        spec = controller.spec(action.name)
        executor.launch(spec, action.share)
        started[action.name] = spec.memory
    elif isinstance(action, protocol.Resize):
        executor.resize(action.shares)
        for name, share in action.shares.items():
            (suspended.add if share.suspended else suspended.discard)(name)
    elif isinstance(action, protocol.Stop):
        executor.stop(action.name, action.why, action.cause)
    elif isinstance(action, protocol.Checkpoint):
        executor.checkpoint(action.name)
        suspended.discard(action.name)
