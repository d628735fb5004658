# SPDX-License-Identifier: LGPL-3.0-or-later
"""Made-up runs for the tests of reports, with figures known beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field

from dovetail.controller.settings import Settings
from dovetail.core import eventlog, protocol
from dovetail.core.protocol import Cause
from dovetail.report import alternatives
from dovetail.report.build_history import tell

CAPACITY = protocol.Capacity((protocol.Node("node", 2000, 8 << 30),))
OFF = protocol.WaitPolicy("off")
SETTINGS = Settings().plain()
BELL = protocol.WaitPolicy("doorbell")


def spec(name, family, weights=(1.0, 3.0)):
    return protocol.Spec(name, family, "case", len(weights), tuple(weights), ("true",))


def header(specs):
    """What a log of these begins with."""
    return eventlog.Header("0", tuple(specs), CAPACITY, SETTINGS, {}, {"schema": eventlog.SCHEMA})


@dataclass
class Run:
    """Writes a log. A simulation alone needs `alone[family]` seconds per iteration."""

    specs: list
    alone: dict
    log: list = field(default_factory=list)
    t: float = 0.0
    counters: dict = field(default_factory=dict)
    wait: protocol.WaitPolicy = OFF

    def add(self, *entries):
        self.log.extend(entries)

    def one(self, name):
        return next(s for s in self.specs if s.name == name)

    def launch(self, name, prepare=0.0, over=0):
        count = self.one(name).ranks
        share = protocol.Share((2000 // count,) * count, self.wait)
        self.add(protocol.Launch(name, share))
        self.t += prepare
        self.counters[name] = [0, self.t] + [[0.0] * count for _ in range(3)]
        self.add(protocol.Started(self.t, name, over))

    def work(self, seconds, slowdown=1.0, period=0.5):
        """All that run go on for so long, `slowdown` times slower than alone."""
        until = self.t + seconds
        while self.t < until - 1e-9:
            self.t = round(min(until, self.t + period), 9)
            for name in self.counters:
                self.sample(name, slowdown)

    def sample(self, name, slowdown, measure="iterations"):
        spec = self.one(name)
        state = self.counters[name]
        each = self.alone[spec.family] * slowdown
        more = int((self.t - state[1]) / each + 1e-6)
        state[0] += more
        state[1] += more * each
        for rank, weight in enumerate(spec.weights):
            useful = self.alone[spec.family] * weight / max(spec.weights)
            waits = each - useful
            spin = waits if self.wait.mode == "off" else 0.1 * waits
            state[2][rank] += more * (useful + spin)
            state[3][rank] += more * useful
            state[4][rank] += more * waits
        n = spec.ranks
        self.add(
            protocol.Sampled(
                self.t,
                name,
                protocol.Ranks(
                    (state[0],) * n,
                    (state[1],) * n,
                    tuple(state[2]),
                    tuple(state[3]),
                    tuple(state[4]),
                    (50 << 20,) * n,
                    measure,
                ),
            )
        )

    def note(self, what, why="because", **data):
        self.add(protocol.Note(what, why, data))

    def resize(self, requests, wait=None, refused="", suspended=False):
        self.wait = wait or self.wait
        shares = {name: protocol.Share(requests, self.wait, suspended) for name in self.counters}
        self.add(protocol.Resize(shares, "load"), protocol.Resized(self.t, tuple(shares), refused))

    def history(self):
        return tell(header(self.specs), self.log)

    def save(self, directory, measured=()):
        """As a run's output directory."""
        directory.mkdir(parents=True, exist_ok=True)
        head = eventlog.header(self.specs, CAPACITY, SETTINGS, {"mpi": "Open MPI 4.1"})
        with eventlog.Log.create(directory / "events.jsonl", head) as log:
            for entry in self.log:
                if isinstance(entry, eventlog.Resumed):
                    log.resume(entry.t, entry.capacity, entry.alive)
                else:
                    log.write(entry)
        if measured:
            alternatives.write(directory, 2, measured)
        return directory

    def finish(self, name, code=0, reason="", cause=None, requeued=""):
        """It ends, and the controller says what it makes of it."""
        self.counters.pop(name, None)
        cause = cause or (Cause.FAILED if code or reason else Cause.DONE)
        self.add(protocol.Finished(self.t, name, cause, code, reason))
        if requeued:
            self.add(protocol.Requeued(name, cause, requeued))
        elif cause is Cause.DONE:
            self.add(protocol.Ended(name, "done", cause))
        else:
            self.add(protocol.Ended(name, "failed", cause, reason or f"exit code {code}"))

    def interrupt(self, *queued, why="interrupted by SIGINT"):
        """The run is to end: those in the queue are given up."""
        self.add(protocol.Interrupted(self.t, why))
        self.add(*[protocol.Ended(n, "not started", Cause.INTERRUPTED, why) for n in queued])

    def resume(self, *names, why="the run was killed and resumed", alive=()):
        """The loop was killed and began again, and these are in the queue again."""
        self.add(eventlog.Resumed(self.t, CAPACITY, alive))
        self.add(*[protocol.Requeued(name, Cause.INTERRUPTED, why) for name in names])


def packed(pairs=2):
    """An imbalanced family, packed in pairs at 1.4 times slower each, after a profile alone."""
    specs = [spec(f"pitz-{n}", "pitz") for n in range(1, 2 * pairs + 1)]
    run = Run(specs, {"pitz": 0.1})
    for pair in range(pairs):
        first, second = specs[2 * pair].name, specs[2 * pair + 1].name
        run.launch(first, 0.2)
        if pair == 0:
            run.work(4)
            run.note("profile", "the ranks' load is 1 : 3", family="pitz")
            run.resize((500, 1500), BELL)
            run.work(2)
        run.note("admit", f"{second} is expected to pay", name=second)
        run.launch(second, 0.2)
        run.work(4, 1.4)
        run.note("keep", "throughput is 1.43 times that alone", name=second)
        run.work(6, 1.4)
        run.finish(first)
        run.finish(second)
    return run


def mixed():
    """The packed family, then a balanced one whose only admission is taken back."""
    run = packed()
    even = [spec(f"even-{n}", "even", (1.0, 1.0)) for n in (1, 2)]
    run.specs += even
    run.alone["even"] = 0.08
    run.wait = OFF
    run.launch("even-1", 0.2)
    run.work(3)
    run.note("profile", "the ranks' load is 1 : 1", family="even")
    run.resize((1000, 1000))
    run.work(1)
    run.note("admit", "worth a try", name="even-2")
    run.launch("even-2", 0.2)
    run.work(3, 2.2)
    run.note("rollback", "throughput fell to 0.91", name="even-2")
    why = "packing does not pay"
    run.add(protocol.Stop("even-2", Cause.TAKEN_BACK, why, True))
    run.finish("even-2", -15, f"stopped: {why}", Cause.TAKEN_BACK, requeued=why)
    run.work(5)
    run.finish("even-1")
    run.launch("even-2", 0.2)
    run.work(8)
    run.finish("even-2")
    return run


def crowd(count=1000, at_once=20):
    """Many small simulations, `at_once` of them at a time; each fiftieth fails."""
    specs = [spec(f"case-{n:04}", "crowd", (1.0, 2.0, 1.0, 3.0)) for n in range(count)]
    run = Run(specs, {"crowd": 0.05})
    run.launch(specs[0].name)
    run.work(2)
    run.note("profile", "the ranks' load is 1 : 2 : 1 : 3", family="crowd")
    run.finish(specs[0].name)
    for start in range(1, count, at_once):
        for one in specs[start : start + at_once]:
            run.note("admit", "cores are free", name=one.name)
            run.launch(one.name)
        run.work(2, 1.5, 1.0)
        for number, one in enumerate(specs[start : start + at_once], start):
            run.t += 0.01
            run.finish(one.name, 1 if number % 50 == 0 else 0)
    return run
