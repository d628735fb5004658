# SPDX-License-Identifier: LGPL-3.0-or-later
"""Runs variants in turn, again and again, and says how far the repeats lie apart.

Inputs: named callables that return seconds (or any figure). Output: `Row`s, and `Claim`s about
them. Invariant: variants are interleaved, round by round, each round in another order, so that a
slow minute of the machine falls on all of them.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.bench.cases import environment
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host.session import temporary_session
from dovetail.mpi.launcher import ALONE, HERE, UNBOUND, complaint
from dovetail.report import summary

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """The repeats of one variant, in the order in which they were measured."""

    name: str
    values: tuple[float, ...]

    @property
    def median(self) -> float:
        """Middle of the repeats."""
        return statistics.median(self.values)

    @property
    def spread(self) -> tuple[float, float]:
        """Smallest and largest repeat."""
        return min(self.values), max(self.values)


@dataclass(frozen=True)
class Claim:
    """One figure: its repeats, and the bound that its median should keep (`>=` or `<=`).

    `why` says what of it could not be measured, if so; then it is not kept, and may have no repeat.
    """

    row: Row
    unit: str
    relation: str = ""
    bound: float = 0.0
    why: str = ""

    @property
    def met(self) -> bool | None:
        """True if the median keeps the bound, None where there is none."""
        if not self.relation:
            return None
        if self.why:
            return False
        median = self.row.median
        return median >= self.bound if self.relation == ">=" else median <= self.bound


def ratios(over: Row, under: Row, name: str) -> Row:
    """`over / under`, round by round: both of a round met the same machine."""
    pairs = zip(over.values, under.values)
    return Row(name, tuple(a / b for a, b in pairs))


def interleave(
    variants: Mapping[str, Callable[[], float]],
    repeat: int,
    progress: Progress = lambda _: None,
) -> dict[str, Row]:
    """Measure every variant `repeat` times, a round at a time, each in an order of its own."""
    names = list(variants)
    values: dict[str, list[float]] = {name: [] for name in names}
    for number in range(repeat):
        for name in order(names, number):
            value = variants[name]()
            values[name].append(value)
            progress(f"round {number + 1}/{repeat}  {name}: {value:.4g}")
    return {name: Row(name, tuple(values[name])) for name in names}


@contextlib.contextmanager
def on_cores(count: int, name: str) -> Iterator[None]:
    """Keep this process and what it starts to so many cores. BadInput where there are fewer.

    Where the machine has more, a starter would bind ranks to any of them, so none binds.
    """
    before = os.sched_getaffinity(0)
    if len(before) < count:
        raise BadInput(f"{name}: needs {count} cores, and this process may use {len(before)}")
    os.sched_setaffinity(0, sorted(before)[:count])
    told = {key: os.environ[key] for key in UNBOUND if key in os.environ}
    if (os.cpu_count() or 1) > count:
        os.environ.update(UNBOUND)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        for key in UNBOUND:
            os.environ.pop(key, None)
        os.environ.update(told)


def order(names: Sequence[str], turn: int) -> list[str]:
    """The order of a round, in which what a variant leaves behind falls on another one each time.

    In as many rounds as there are variants, or twice as many where their number is odd, each
    follows each other one equally often, and is equally often at each place (Williams, 1949).
    """
    count = len(names)
    places = [turn + (step // 2 + 1 if step % 2 else -step // 2) for step in range(count)]
    found = [names[place % count] for place in places]
    return found[::-1] if count % 2 and turn % 2 else found


def in_turn(number: int, steps: Sequence[Callable[[], None]]) -> None:
    """Do what a round is made of, every other time from its end."""
    for step in reversed(steps) if number % 2 else steps:
        step()


def plain(cases: Sequence[Path], command: Sequence[str], at_once: int) -> float:
    """Run the same command in each case as a user would by hand; returns the makespan, seconds.

    At most `at_once` run at a time, the next one starts when any of them ends. Output goes to
    `log.plain` in the case. Raises WorkFailed when one fails; none is left running, and nothing
    in shared memory, where a launcher that is interrupted leaves its segments.
    """
    return plain_queue([(case, command) for case in cases], at_once)


def plain_queue(jobs: Sequence[tuple[Path, Sequence[str]]], at_once: int) -> float:
    """The same with a command of its own for each case."""
    with temporary_session(f"plain-{secrets.token_hex(4)}") as session:
        # A program without a starter is spared Open MPI's daemon by `dovetail run`, too.
        env = {**ALONE, **plain_environment(), "OMPI_MCA_btl_vader_backing_directory": session}
        return _plain(jobs, at_once, env)


def _plain(jobs: Sequence[tuple[Path, Sequence[str]]], at_once: int, env: dict[str, str]) -> float:
    waiting = list(jobs)
    running: dict[int, tuple[subprocess.Popen[bytes], Path]] = {}
    started = time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                case, command = waiting.pop(0)
                with open(case / "log.plain", "wb") as log:
                    process = subprocess.Popen(command, cwd=case, stdout=log, stderr=log, env=env)
                running[process.pid] = process, case
            # Any child may be first; waiting for all of them at once needs no polling.
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
            if ended is None or ended.si_pid not in running:
                raise WorkFailed("a process that the comparison did not start has ended")
            process, case = running.pop(ended.si_pid)
            if process.wait():  # its log goes with the scratch directory
                said = complaint((case / "log.plain").read_text(errors="replace"))
                code = f"exit code {process.returncode}"
                raise WorkFailed(f"{process.args!r}: {code}" + (f": {said}" if said else ""))
    finally:
        for process, _ in running.values():
            process.terminate()
            process.wait()
    return time.monotonic() - started


def plain_environment() -> dict[str, str]:
    """What a user's shell would hold: Open MPI refuses to run as root without being told.

    As those of a run, ranks are on this machine within any batch system's job.
    """
    made = {**HERE, **environment()}
    if os.geteuid() == 0:
        made.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    return made


def dovetail_run(plan: Path, out: Path, *words: str) -> summary.Summary:
    """`dovetail run` in a process of its own; what it made of the plan. Raises WorkFailed."""
    line = [sys.executable, "-m", "dovetail", "run", "--json", "-o", str(out), *words, str(plan)]
    done = subprocess.run(line, env=plain_environment(), capture_output=True, text=True)
    if done.returncode:
        raise WorkFailed(f"dovetail run {' '.join(words)}: {done.stderr.strip()[-2000:]}")
    return summary.load(out)[0]
