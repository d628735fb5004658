# SPDX-License-Identifier: LGPL-3.0-or-later
"""Duty cycles by rank (arXiv:2604.00377), and the speed-up of OpenFOAM's set-ups.

Inputs: a setting. Outputs: useful and MPI seconds by rank of 4 ranks, cut in zones and evenly, by
Dovetail's profile, which takes wall time outside and inside MPI as the paper does, and beside that
the CPU time of an iteration with waits that sleep, which Dovetail goes by; speed-up S(n) and
efficiency E(n) = S(n)/n of pitzDaily and of motorBike by ranks, cells, cut and wait.
"""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dovetail.bench.cases import mpirun, pitz_daily
from dovetail.bench.harness import Row, plain_environment
from dovetail.bench.papers import motor_bike, published
from dovetail.bench.papers.allocation import ENDLESS, FOUR, cut, one, requests
from dovetail.bench.papers.findings import Figures, Finding, Measured, Setting, plain
from dovetail.bench.papers.place import LOCAL, NotHere, Run
from dovetail.core.errors import WorkFailed

CELLS = 12_225
SLEEPING = "zones, sleeping"
Variants = Mapping[str, Callable[[], Figures]]


# --- duty cycles ---


def duty_variants(setting: Setting) -> Variants:
    """A profile of either cut, and one with waits that sleep."""
    if setting.place.kind != LOCAL:
        raise NotHere("profiles are of processes: --executor local")
    made = {}
    for name, weights in (("zones", FOUR), ("even cut", (1.0,) * 4)):
        folder = setting.place.scratch / f"duty-{name.replace(' ', '-')}"
        refine = setting.scale.refine
        case = pitz_daily(folder, weights, 2 * setting.scale.iterations, refine=refine)
        made[name] = functools.partial(_profile, case)
        if name == "zones":
            made[SLEEPING] = functools.partial(_profile, case, "doorbell")
    return made


def _profile(case: Path, wait: str = "off") -> Figures:
    with tempfile.TemporaryDirectory(prefix="dovetail-bench-") as folder:
        file = Path(folder, "talp.json")
        words = [sys.executable, "-m", "dovetail", "profile", "--wait", wait, "-o", str(file), "--",
                 *mpirun(len(FOUR))]  # fmt: skip
        done = subprocess.run(words, cwd=case, env=_crowded(), capture_output=True, text=True)
        if done.returncode:
            raise WorkFailed(f"dovetail profile: {done.stderr.strip()[-1000:]}")
        profile: dict[str, Any] = json.loads(file.read_text())
        opened = _opened(file, len(FOUR))
    ranks = profile["dovetail"]["ranks"]
    if any(rank["cpu_per_iteration"] is None for rank in ranks):
        raise WorkFailed("dovetail profile: no iteration of the solver was counted")
    duty = {f"duty {rank['rank']}": float(rank["duty"]) for rank in ranks}
    duty |= {f"cpu {rank['rank']}": float(rank["cpu_per_iteration"]) for rank in ranks}
    inside = sum(rank["mpi_s"] for rank in ranks)
    calls: dict[str, float] = {}
    for rank in ranks:
        for name, (_, seconds) in rank["calls"].items():
            if name not in ("MPI_Init", "MPI_Init_thread", "MPI_Finalize"):
                calls[name] = calls.get(name, 0.0) + seconds
    whole = sum(calls.values()) or 1.0
    shares = {name: calls.get(f"MPI_{name}", 0.0) / whole
              for name in ("Allreduce", "Barrier", "Waitall")}  # fmt: skip
    idle = inside / sum(rank["elapsed_s"] for rank in ranks)
    return {**duty, **shares, "idle": idle, **opened}


def _crowded() -> dict[str, str]:
    """Open MPI starts more ranks than cores only if told."""
    return {**plain_environment(), "OMPI_MCA_rmaps_base_oversubscribe": "1"}


def _opened(file: Path, ranks: int) -> dict[str, float]:
    """How many ranks DLB's own tool finds in the profile; nothing where it is not installed."""
    tool = shutil.which("talp")
    if not tool:
        return {}
    inside, made = file.parent / "talp" / "case" / f"{ranks}x1", file.parent / "report"
    inside.mkdir(parents=True)
    shutil.copy(file, inside)
    words = [tool, "ci-report", "-i", str(file.parent / "talp"), "-o", str(made), "--no-badge"]
    done = subprocess.run(words, capture_output=True, text=True)
    pages = list(made.rglob(f"evolution_{ranks}xMPI*.html")) if done.returncode == 0 else []
    return {"talp": float(ranks if pages else 0)}


def duty_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """By rank, zone and cut; what the waiting is made of."""
    theirs = published.of("duty")
    zones, even = measured["zones"], measured["even cut"]

    def extreme(rounds: list[Figures]) -> tuple[float, ...]:
        values = [[v for k, v in figures.items() if k.startswith("duty ")] for figures in rounds]
        return tuple(max(some) / min(some) for some in values)

    made = [
        Finding("duty cycle, densest / sparsest zone", "x",
                Row("", tuple(f["duty 3"] / f["duty 0"] for f in zones)),
                theirs["dense to sparse"]),
        Finding("share of rank time inside MPI, zones", "share", plain(measured, "zones", "idle"),
                theirs["idle"]),
        Finding("share inside MPI of the densest zone's rank", "share",
                Row("", tuple(1 - f["duty 3"] for f in zones)), theirs["idle dense"]),
        Finding("duty cycle, highest / lowest, even cut", "x", Row("", extreme(list(even))),
                theirs["even cut"]),
        Finding("CPU time of an iteration, densest / sparsest zone, waits that sleep", "x",
                Row("", tuple(f["cpu 3"] / f["cpu 0"] for f in measured[SLEEPING])),
                note="what Dovetail takes for the load; the cells are as 15 to 1"),
    ]  # fmt: skip
    for cut_name in ("zones", "even cut"):
        made += [Finding(f"duty cycle of rank {rank}, {cut_name}", "share",
                         plain(measured, cut_name, f"duty {rank}"), group=f"duty, {cut_name}")
                 for rank in range(len(FOUR))]  # fmt: skip
    for call in ("Allreduce", "Waitall", "Barrier"):
        number = theirs["barrier"] if call == "Allreduce" else None
        made.append(Finding(f"share of MPI time in MPI_{call}", "share",
                            plain(measured, "zones", call), number))  # fmt: skip
    if all("talp" in figures for figures in zones):
        row = plain(measured, "zones", "talp")
        made.append(
            Finding("ranks that DLB's talp finds in a profile", "ranks", row, theirs["talp"])
        )
    else:
        why = "DLB's tools are not installed; `pip install talp-pages` has one"
        made.append(Finding("ranks that DLB's talp finds in a profile", "ranks", None,
                            theirs["talp"], why))  # fmt: skip
    return made


# --- set-ups ---


def setups_variants(setting: Setting) -> Variants:
    """One rank and more, by cells; at the cores also with waits that sleep, and cut in zones."""
    made: dict[str, Callable[[], Figures]] = {}
    cores, scratch = setting.place.cores, setting.place.scratch
    for size in setting.scale.sizes:
        name = f"pitzDaily, {CELLS * size * size:,} cells"

        def even(ranks: int, size: int = size) -> Path:
            return cut(setting, f"setup-{size}-{ranks}", (1.0,) * ranks, size)

        made |= _by_ranks(setting, name, even)
        if cores > 1:
            weights = (1.0,) * (cores // 2) + (3.0,) * (cores - cores // 2)
            zones = cut(setting, f"setup-{size}-zones", weights, size)
            made[f"{name}, zones 1 to 3, spinning: {cores}"] = functools.partial(
                one, setting, Run(zones, (1000,) * cores)
            )
    for level in () if motor_bike.missing() else setting.scale.levels:
        setting.progress(f"motorBike, level {level}: making the mesh, unless it is there")
        setting.output.mkdir(parents=True, exist_ok=True)
        whole = motor_bike.meshed(setting.output / f"motorBike-{level}", level, ENDLESS)

        def even_bike(ranks: int, whole: Path = whole) -> Path:
            return motor_bike.cut(whole, scratch / f"{whole.name}-{ranks}", ranks)

        made |= _by_ranks(setting, f"motorBike, {motor_bike.cells(whole):,} cells", even_bike)
    return made


def _by_ranks(
    setting: Setting, name: str, even: Callable[[int], Path]
) -> dict[str, Callable[[], Figures]]:
    """A case that is cut evenly, on one rank and on more; `even` makes it."""
    made: dict[str, Callable[[], Figures]] = {}
    for ranks in _ranks(setting.place.cores):
        run = Run(even(ranks), requests(setting, (1.0,) * ranks, False))
        if ranks == 1:
            run = replace(run, command=("simpleFoam",))
        made[f"{name}, even cut, spinning: {ranks}"] = functools.partial(one, setting, run)
        if ranks == setting.place.cores > 1:
            sleeping = replace(run, wait="doorbell")
            made[f"{name}, even cut, sleeping: {ranks}"] = functools.partial(one, setting, sleeping)
    return made


def _ranks(cores: int) -> list[int]:
    """1, 2, 4, … up to the cores, then twice as many as cores."""
    powers = [n for n in (2**power for power in range(12)) if n < cores]
    return [*powers, cores, 2 * cores]


def setups_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """S(n) and E(n); no number of the papers' could be found for them."""
    made = []
    for name in measured:
        setup, _, ranks = name.rpartition(": ")
        n, mesh = int(ranks), setup[: setup.index(" cells") + len(" cells")]
        if n == 1:
            continue
        base = measured[f"{mesh}, even cut, spinning: 1"]
        speed = tuple(a["seconds"] / b["seconds"] for a, b in zip(base, measured[name]))
        cells = int(mesh.split()[1].replace(",", "")) // n
        made.append(Finding(f"S({n}), {setup}", "x", Row("", speed), group=f"speed-up, {setup}",
                            at=n, note=f"{cells:,} cells for each rank"))  # fmt: skip
        made.append(Finding(f"E({n}), {setup}", "share", Row("", tuple(s / n for s in speed)),
                            group=f"efficiency, {mesh}", detail=True))  # fmt: skip
    if not any(name.startswith("motorBike") for name in measured):
        made.append(Finding("S(n), motorBike", "x", why=motor_bike.missing()))
    return made
