# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the broker module's decisions cost against the number of slices.

Inputs: sizes in slices, the number of rounds. Outputs: `Claim`s; of each size the seconds that the
state takes, the messages that it sends and their bytes as JSON, and its memory.

Invariants: no Flux, no processes: the state of an instance is told what happens to slices, one
event after the other, as Flux and their agents would, from the first submission to the last end.
"""

from __future__ import annotations

import gc
import json
import time
import tracemalloc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from dovetail.bench.harness import Claim, Progress, Row, ratios
from dovetail.flux.instance import effects
from dovetail.flux.instance.requests import REQUESTS, STREAMS
from dovetail.flux.instance.state import Instance

SIZES = (10, 100, 1_000)
STEPS = ("up", "a slice more", "half lost and replaced", "down")
GROWTH = 1.5
"""What each slice of the most may cost, in proportion to each of a tenth of them."""


def slices(_: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Every size in each round."""
    found: dict[int, list[Cost]] = {size: [] for size in SIZES}
    for number in range(repeat):
        for size in SIZES:
            found[size].append(cost(size))
        said = ", ".join(f"{size:,}: {found[size][-1].whole:.3g} s" for size in SIZES)
        progress(f"round {number + 1}/{repeat}  slices from up to down: {said}")
    most, fewer = SIZES[-1], SIZES[-2]
    last = found[most]
    claims = [
        Claim(Row(f"{most:,} slices, {step}", tuple(one.seconds[step] for one in last)), "s")
        for step in STEPS
    ]

    def grown(name: str, values: Mapping[int, tuple[float, ...]]) -> Claim:
        """What each slice costs."""
        each = {size: Row("", tuple(v / size for v in values[size])) for size in (most, fewer)}
        row = ratios(each[most], each[fewer], f"{name} per slice, {most:,} / {fewer:,} slices")
        return Claim(row, "x", "<=", GROWTH)

    def per(kind: str) -> dict[int, tuple[float, ...]]:
        return {size: tuple(getattr(one, kind) for one in found[size]) for size in SIZES}

    return [
        *claims,
        grown("time", per("whole")),
        grown("messages", per("messages")),
        grown("bytes of messages", per("size")),
        Claim(Row(f"messages, {most:,} slices", per("messages")[most]), ""),
        Claim(Row(f"bytes of messages, {most:,} slices", per("size")[most]), "B"),
        Claim(Row(f"a status, {most:,} slices", tuple(one.status for one in last)), "B"),
        Claim(Row(f"memory, {most:,} slices", tuple(one.memory for one in last)), "B"),
    ]


@dataclass(frozen=True)
class Cost:
    """Seconds of each step; messages sent and their bytes; bytes of a status, and of memory."""

    seconds: Mapping[str, float]
    messages: int
    size: int
    status: int
    memory: int

    @property
    def whole(self) -> float:
        """Seconds of all steps."""
        return sum(self.seconds.values())


def cost(size: int) -> Cost:
    """One life of an instance with so many slices; its memory in another, which takes longer."""
    life = _Life(size)
    gc.collect()
    seconds = {step: life.timed(step) for step in STEPS}
    gc.collect()
    tracemalloc.start()
    try:
        other = _Life(size)
        other.up()
        other.sent.clear()
        gc.collect()
        memory = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    answers = [json.dumps(one.value) for one in life.sent if isinstance(one, effects.Answer)]
    status = json.dumps(other.state.status())
    return Cost(seconds, len(life.sent), sum(map(len, answers)), len(status), memory)


class _Life:
    """An instance, told what happens to its slices."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.state = Instance(size, executor="kubernetes", up_timeout=120.0)
        self.sent: list[effects.Effect] = []
        self.jobs: list[int] = []

    def timed(self, step: str) -> float:
        """Seconds of a step."""
        steps = dict(zip(STEPS, (self.up, self.more, self.replace, self.down)))
        began = time.perf_counter()
        steps[step]()
        return time.perf_counter() - began

    def do(self, wanted: Iterator[effects.Effect]) -> None:
        """Take what the state wants done; slices that it submits have jobs at once."""
        for effect in wanted:
            self.sent.append(effect)
            if isinstance(effect, effects.Submit):
                self.jobs.append(effect.number)

    def tell(self, number: int, **news: object) -> None:
        """What a slice's agent has to say."""
        self.do(REQUESTS["tell"](self.state, f"tell{number}", {"number": number, **news}))

    def submitted(self) -> None:
        """Flux takes the jobs of slices; their agents come, ask to be invited, and are ready."""
        numbers, self.jobs = self.jobs, []
        for number in numbers:
            self.do(self.state.submitted(number, 1000 + number))
        for number in numbers:
            news = {"number": number, "rank": number, "host": f"host{number}"}
            self.do(STREAMS["attach"](self.state, f"agent{number}", news))
            if number:
                self.do(REQUESTS["join"](self.state, f"join{number}", {"number": number}))
        for number in numbers:
            if number:
                self.tell(0, invited=number, join={"token": "made"})
            more = {} if number else {"kubeconfig": "made"}
            self.tell(number, node=f"node{number}", cpus=f"{number}", **more)

    def over(self, number: int, status: int) -> None:
        """The agent of a slice is gone, and its job ends."""
        self.do(self.state.drop({f"agent{number}"}))
        self.do(self.state.finished(number, status))
        self.do(self.state.swept(number, ""))
        self.do(self.state.cleaned(number))

    def up(self) -> None:
        """From nothing."""
        self.do(REQUESTS["wait-up"](self.state, "gate", {}))
        self.do(self.state.start({}))
        self.submitted()

    def more(self) -> None:
        """One slice more than there are."""
        self.do(REQUESTS["resize"](self.state, "resize", {"nodes": self.size + 1}))
        self.submitted()

    def replace(self) -> None:
        """Half of the slices are lost, and others take their places."""
        for number in [number for number in self.state.slices if number % 2]:
            self.over(number, 9)
            self.tell(0, forgotten=f"node{number}")
        self.submitted()

    def down(self) -> None:
        """To nothing."""
        self.do(REQUESTS["down"](self.state, "down", {}))
        for number in sorted(self.state.slices, reverse=True):
            self.tell(number, ended="")
            self.over(number, 0)
            if number:
                self.tell(0, forgotten=f"node{number}")
