# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a profiled run says: figures per rank, POP efficiencies, and their file.

In: the pages of a program that ended, or a file written earlier. Out: a `Profile`, and JSON in
the shape that TALP of DLB writes (https://pm.bsc.es/dlb), with all that TALP has no place for
under the key `dovetail`, from which `load` reads it back.

Efficiencies follow the POP project (https://pop-coe.eu/node/69): with the useful time of each
rank and the elapsed time of all, parallel efficiency = average useful / elapsed, which is load
balance (average / maximum useful) times communication efficiency (maximum useful / elapsed).
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dovetail import __version__
from dovetail.core.contention import Contention, Throttling
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host.private_files import write_whole
from dovetail.mpi.page import MEASURES, RankPage

SCHEMA = 1
REGION = "Global"
TALP = "3.6"
"""The version of DLB whose shape this is: its tools read no file that does not begin with one."""


@dataclass(frozen=True)
class RankProfile:
    """One rank. Seconds since MPI_Init: elapsed = useful + MPI wall time, and CPU time.

    The figures per iteration are taken from the first boundary to the last, so that starting
    up does not count; they are None where fewer than two boundaries were seen. `ended` is
    finalized, aborted or killed. `calls` has (count, seconds) by MPI function. Over all threads it
    gave up its core `voluntary` times, lost it `involuntary` times, and waited `queued_s` for one;
    None if unknown.
    """

    rank: int
    world: int
    pid: int
    host: str
    ended: str
    iterations: int
    iteration_source: str
    elapsed_s: float
    useful_s: float
    mpi_s: float
    cpu_s: float
    cpu_per_iteration: float | None
    useful_per_iteration: float | None
    seconds_per_iteration: float | None
    peak_rss: int
    calls: Mapping[str, tuple[int, float]]
    voluntary: int | None = None
    involuntary: int | None = None
    queued_s: float | None = None

    @property
    def measure(self) -> str:
        """What its progress is told by: `iterations`, `periods` of a rhythm, or `work` alone."""
        return MEASURES.get(self.iteration_source, "iterations")

    @property
    def duty(self) -> float:
        """Wall duty cycle: the share of its time outside MPI, 0 to 1."""
        return self.useful_s / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True)
class Efficiency:
    """POP efficiencies, 0 to 1; `parallel` is the product of the other two."""

    parallel: float
    load_balance: float
    communication: float
    elapsed_s: float


@dataclass(frozen=True)
class Profile:
    """A run: what was run, how it waited and ended, and its ranks by world and number.

    `throttling` is what a limit of CPU around it did, None if there is none, and `pressure` the
    seconds for which something in its control group waited for a core, None if unknown. There were
    `unseen` further ranks, as on other machines.
    """

    command: tuple[str, ...]
    mpi: str
    wait: str
    exit_code: int
    ranks: tuple[RankProfile, ...]
    created: str = field(default="")
    throttling: Throttling | None = None
    pressure: float | None = None
    unseen: int = 0

    @property
    def efficiency(self) -> Efficiency:
        """Of all ranks that were seen, each world by itself: what was spawned may not live long."""
        worlds: dict[int, list[RankProfile]] = {}
        for rank in self.ranks:
            worlds.setdefault(rank.world, []).append(rank)
        found = together(
            [([r.useful_s for r in w], [r.elapsed_s for r in w]) for w in worlds.values()]
        )
        return dataclasses.replace(
            found, elapsed_s=max((r.elapsed_s for r in self.ranks), default=0.0)
        )

    @property
    def contention(self) -> Contention:
        """What kept its ranks from their cores."""
        queued = [r.queued_s for r in self.ranks if r.queued_s is not None]
        known = len(queued) == len(self.ranks)
        return Contention(
            self.throttling,
            self.pressure,
            tuple(r.voluntary for r in self.ranks if r.voluntary is not None),
            tuple(r.involuntary for r in self.ranks if r.involuntary is not None),
            tuple(queued) if known else (),
            tuple(r.elapsed_s for r in self.ranks) if known else (),
        )

    @property
    def load(self) -> tuple[float, ...]:
        """Seconds of work of each rank, per iteration if every rank counted iterations.

        CPU seconds if ranks gave the CPU back while they waited, but not more than those outside
        MPI, as some builds of MPI cannot be had to; a rank that spins or yields burns as much CPU
        waiting as working, so then it is the seconds outside MPI. Raises BadInput where a rank has
        done no work, or was not seen.
        """
        self.check_all_seen()
        ranks = [rank for rank in self.ranks if rank.world == 0]
        per_iteration = [r.useful_per_iteration for r in ranks]
        whole = [r.useful_s for r in ranks]
        if self.wait == "doorbell":
            cpu = [r.cpu_per_iteration for r in ranks]
            per_iteration = [
                None if a is None or b is None else min(a, b) for a, b in zip(per_iteration, cpu)
            ]
            whole = [min(r.useful_s, r.cpu_s) for r in ranks]
        counted = [load for load in per_iteration if load is not None]
        loads = counted if len(counted) == len(ranks) else whole
        if not loads or min(loads) <= 0:
            raise BadInput("not every rank has done work; profile a longer run")
        return tuple(loads)

    def check_all_seen(self) -> None:
        """Raise BadInput where figures of the ranks that were seen are not those of all."""
        if self.unseen:
            whole = len(self.ranks) + self.unseen
            raise BadInput(
                f"{self.unseen} of {whole} ranks were not seen, and so it tells too little; "
                "profile a run whose ranks are all on one machine"
            )


def together(programs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> Efficiency:
    """POP efficiencies of several programs, each by its ranks' useful and elapsed seconds.

    Each counts with its ranks times its time, as if they had run one after the other; `elapsed_s`
    is the sum of their times.
    """
    average = whole = most = elapsed_s = 0.0
    for useful, elapsed in programs:
        average += sum(useful)
        most += len(useful) * max(useful, default=0.0)
        whole += len(useful) * max(elapsed, default=0.0)
        elapsed_s += max(elapsed, default=0.0)
    if whole <= 0 or most <= 0:
        return Efficiency(0.0, 0.0, 0.0, max(elapsed_s, 0.0))
    return Efficiency(average / whole, average / most, most / whole, elapsed_s)


# --- From pages ---


def from_pages(
    pages: Sequence[RankPage],
    command: Sequence[str],
    wait: str,
    exit_code: int,
    throttling: Throttling | None = None,
    pressure: float | None = None,
) -> Profile:
    """The profile of a program that has ended; raises WorkFailed if it left no page."""
    if not pages:
        raise WorkFailed("no rank called MPI_Init")
    now = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    ranks = tuple(_rank(page) for page in pages)
    unseen = sum({page.world: page.world_size for page in pages}.values()) - len(pages)
    return Profile(
        tuple(command), pages[0].mpi, wait, exit_code, ranks, now, throttling, pressure,
        max(0, unseen),
    )  # fmt: skip


def _rank(page: RankPage) -> RankProfile:
    per: dict[str, float | None] = {"cpu": None, "useful": None, "seconds": None}
    first = page.first
    if first and page.iterations > first.iterations:
        n = page.iterations - first.iterations
        per["cpu"] = (page.iter_cpu_s - first.cpu_s) / n
        per["useful"] = (page.iter_useful_s - first.useful_s) / n
        per["seconds"] = (page.iter_stamp - first.stamp) / n
    return RankProfile(
        rank=page.rank,
        world=page.world,
        pid=page.pid,
        host=page.host,
        ended=page.state if page.state in ("finalized", "aborted") else "killed",
        iterations=page.iterations,
        iteration_source=page.iteration_source,
        elapsed_s=page.elapsed_s,
        useful_s=page.useful_s,
        mpi_s=page.mpi_s,
        cpu_s=page.cpu_s,
        cpu_per_iteration=per["cpu"],
        useful_per_iteration=per["useful"],
        seconds_per_iteration=per["seconds"],
        peak_rss=page.peak_rss,
        calls=page.calls,
        voluntary=page.waits.voluntary,
        involuntary=page.waits.involuntary,
        queued_s=page.waits.queued_s,
    )


# --- To and from JSON ---


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _talp_process(rank: RankProfile, node: int) -> dict[str, Any]:
    """TALP's record of one process; what we do not measure is 0, as TALP itself writes it."""
    return {
        "rank": rank.rank,
        "pid": rank.pid,
        "nodeId": node,
        "hostname": rank.host,
        "cpuset": [],
        "numCpus": 1,
        "avgCpus": round(rank.cpu_s / rank.elapsed_s, 1) if rank.elapsed_s > 0 else 0.0,
        "cycles": 0,
        "instructions": 0,
        "numMeasurements": 1,
        "numResets": 0,
        "numMpiCalls": sum(count for count, _ in rank.calls.values()),
        "numOmpParallels": 0,
        "numOmpTasks": 0,
        "elapsedTime": _ns(rank.elapsed_s),
        "usefulTime": _ns(rank.useful_s),
        "mpiTime": _ns(rank.mpi_s),
        "ompLoadImbalanceTime": 0,
        "ompSchedulingTime": 0,
        "ompSerializationTime": 0,
    }


def _talp_application(profile: Profile, processes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """TALP's record of the whole, where each rank has one CPU."""
    pop = profile.efficiency
    hosts = sorted({r.host for r in profile.ranks})
    on = {h: [r.useful_s for r in profile.ranks if r.host == h] for h in hosts}
    useful = sum(r.useful_s for r in profile.ranks)
    mpi = sum(r.mpi_s for r in profile.ranks)
    most = max(r.useful_s for r in profile.ranks)
    busiest = max(profile.ranks, key=lambda r: r.useful_s)
    node = max(sum(times) / len(times) for times in on.values())  # average of the busiest node
    n = len(profile.ranks)
    return {
        "numCpus": n,
        "numMpiRanks": n,
        "numNodes": len(hosts),
        "avgCpus": round(sum(p["avgCpus"] for p in processes), 1),
        "cycles": 0,
        "instructions": 0,
        "numMeasurements": n,
        "numMpiCalls": sum(p["numMpiCalls"] for p in processes),
        "numOmpParallels": 0,
        "numOmpTasks": 0,
        "elapsedTime": _ns(pop.elapsed_s),
        "usefulTime": _ns(useful),
        "mpiTime": _ns(mpi),
        "ompLoadImbalanceTime": 0,
        "ompSchedulingTime": 0,
        "ompSerializationTime": 0,
        "usefulNormdApp": _ns(useful / n),
        "mpiNormdApp": _ns(mpi / n),
        "maxUsefulNormdProc": _ns(most),
        "maxUsefulNormdNode": _ns(node),
        "mpiNormdOfMaxUseful": _ns(busiest.mpi_s),
        "parallelEfficiency": round(pop.parallel, 4),
        "mpiParallelEfficiency": round(pop.parallel, 4),
        "mpiCommunicationEfficiency": round(pop.communication, 4),
        "mpiLoadBalance": round(pop.load_balance, 4),
        "mpiLoadBalanceIn": round(node / most, 4) if most > 0 else 0.0,
        "mpiLoadBalanceOut": round(useful / n / node, 4) if node > 0 else 0.0,
        "ompParallelEfficiency": 1.0,
        "ompLoadBalance": 1.0,
        "ompSchedulingEfficiency": 1.0,
        "ompSerializationEfficiency": 1.0,
    }


def to_json(profile: Profile) -> dict[str, Any]:
    """The profile in TALP's shape, times in nanoseconds, and ours in seconds."""
    hosts = sorted({r.host for r in profile.ranks})
    processes = [_talp_process(r, hosts.index(r.host)) for r in profile.ranks]
    application = _talp_application(profile, processes)
    ranks = [{**dataclasses.asdict(r), "duty": r.duty, "measure": r.measure} for r in profile.ranks]
    return {
        "dlbVersion": f"{TALP} (dovetail {__version__})",
        "timestamp": profile.created,
        "resources": {k: application[k] for k in ("numCpus", "numNodes", "numMpiRanks")},
        "Application": {REGION: application},
        "Process": {REGION: processes},
        "dovetail": {
            "schema": SCHEMA,
            "version": __version__,
            "command": list(profile.command),
            "mpi": profile.mpi,
            "wait": profile.wait,
            "exit_code": profile.exit_code,
            "efficiency": dataclasses.asdict(profile.efficiency),
            "throttling": profile.throttling and dataclasses.asdict(profile.throttling),
            "pressure_s": profile.pressure,
            "unseen": profile.unseen,
            "ranks": ranks,
        },
    }


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write the file whole or not at all; raises WorkFailed."""
    path = Path(path)
    try:
        write_whole(path, json.dumps(to_json(profile), indent=2) + "\n")
    except OSError as error:
        raise WorkFailed(f"{path}: {error.strerror}") from error


def load(path: str | os.PathLike[str]) -> Profile:
    """Read a profile file of ours; raises BadInput with what is wrong in it."""
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise BadInput(f"{path}: is not JSON: {error}") from error
    ours = data.get("dovetail") if isinstance(data, dict) else None
    if not isinstance(ours, dict):
        raise BadInput(f"{path}: is not a profile of `dovetail profile` (no key `dovetail`)")
    if ours.get("schema") != SCHEMA:
        raise BadInput(f"{path}: has schema {ours.get('schema')!r}, {SCHEMA} would be right")
    try:
        ranks = tuple(_load_rank(item, i) for i, item in enumerate(_list(ours, "ranks")))
        if not ranks:
            raise BadInput("has no ranks")
        return Profile(
            command=tuple(str(word) for word in _list(ours, "command")),
            mpi=_text(ours, "mpi"),
            wait=_text(ours, "wait"),
            exit_code=int(_number(ours, "exit_code", whole=True, least=-128)),
            ranks=ranks,
            created=str(data.get("timestamp", "")),
            throttling=_load_throttling(ours.get("throttling")),
            pressure=_maybe(ours, "pressure_s"),
            unseen=int(_number({"unseen": 0, **ours}, "unseen", whole=True)),
        )
    except BadInput as error:
        raise BadInput(f"{path}: {error}") from None


def _load_rank(item: object, index: int) -> RankProfile:
    if not isinstance(item, dict):
        raise BadInput(f"rank {index} is not an object")
    values: dict[str, Any] = {}
    try:
        for name in ("rank", "world", "pid", "iterations", "peak_rss"):
            values[name] = int(_number(item, name, whole=True))
        for name in ("host", "ended", "iteration_source"):
            values[name] = _text(item, name)
        for name in ("elapsed_s", "useful_s", "mpi_s", "cpu_s"):
            values[name] = _number(item, name)
        for name in ("cpu_per_iteration", "useful_per_iteration", "seconds_per_iteration"):
            values[name] = _maybe(item, name)
        for name in ("voluntary", "involuntary"):
            values[name] = None if item.get(name) is None else int(_number(item, name, whole=True))
        values["queued_s"] = _maybe(item, "queued_s")
        calls = item.get("calls")
        if not isinstance(calls, dict):
            raise BadInput("`calls` is not an object")
        values["calls"] = {name: _call(name, pair) for name, pair in calls.items()}
    except BadInput as error:
        raise BadInput(f"rank {index}: {error}") from None
    return RankProfile(**values)


def _load_throttling(item: object) -> Throttling | None:
    if item is None:
        return None
    if not isinstance(item, dict):
        raise BadInput("`throttling` is not an object")
    limit, periods, throttled = (
        int(_number(item, key, whole=True)) for key in ("limit", "periods", "throttled")
    )
    return Throttling(limit, periods, throttled, _number(item, "seconds"), _number(item, "of"))


def _maybe(data: Mapping[str, Any], name: str) -> float | None:
    return None if data.get(name) is None else _number(data, name)


def _call(name: str, pair: object) -> tuple[int, float]:
    if not isinstance(pair, list) or len(pair) != 2:
        raise BadInput(f"`{name}` is not a count and seconds")
    both = {"count": pair[0], "seconds": pair[1]}
    return int(_number(both, "count", whole=True)), _number(both, "seconds")


def _list(data: Mapping[str, Any], name: str) -> list[Any]:
    value = data.get(name)
    if not isinstance(value, list):
        raise BadInput(f"`{name}` is not a list")
    return value


def _text(data: Mapping[str, Any], name: str) -> str:
    value = data.get(name)
    if not isinstance(value, str):
        raise BadInput(f"`{name}` is not a text")
    return value


def _number(data: Mapping[str, Any], name: str, whole: bool = False, least: float = 0.0) -> float:
    value: Any = data.get(name)
    kind = int if whole else (int, float)
    # A comparison holds neither for what is not a number nor for infinity.
    if isinstance(value, kind) and not isinstance(value, bool) and least <= value < 2**63:
        return float(value)
    right = "a whole number" if whole else "a number"
    raise BadInput(f"`{name}` is {value!r}, {right} from {least:g} would be right")
