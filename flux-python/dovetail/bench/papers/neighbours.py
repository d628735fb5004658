# SPDX-License-Identifier: LGPL-3.0-or-later
"""A noisy neighbour on the same node, and what keeps it off: weights, cpusets, both.

Inputs: a setting. Outputs: seconds per iteration of OpenFOAM, of STREAM's triad, and of LAMMPS and
HPCG where they are on PATH, on half of the cores: alone, and beside a neighbour that copies memory
with a process for each core. Where a cluster can be started, also how long simulations of pods take
to begin, two of which want all cores at the same time.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from usernetes_setup.build import programs
from usernetes_setup.preflight import report

from dovetail.bench import hybrid, ondemand
from dovetail.bench.harness import dovetail_run
from dovetail.bench.papers.allocation import cut
from dovetail.bench.papers.findings import Figures, Finding, Measured, Setting, plain, ratio
from dovetail.bench.papers.place import LOCAL, WARM, NotHere, Run, need_groups
from dovetail.core.errors import BadInput
from dovetail.host import install_paths
from dovetail.report import summary

NEIGHBOUR = """
import os
one, other = bytearray(64 << 20), bytearray(64 << 20)
for _ in range({count} - 1):
    if os.fork() == 0:
        break
while True:
    one[:] = other
"""
WEIGHTS, CPUSETS = "weights", "cpusets"
WAYS: Mapping[str, tuple[str, ...]] = {
    "nothing": (), WEIGHTS: (WEIGHTS,), CPUSETS: (CPUSETS,), "both": (WEIGHTS, CPUSETS),
}  # fmt: skip
_UNBOUNDED = 10**9  # short steps: they are measured for a time
HPCG_SETUP = 600  # sums of all ranks, three an iteration, before those that it times, all alike
GANG = "gang start"
LIGHT = 10  # millicores of a neighbour that shall have only what is left
Variants = Mapping[str, Callable[[], Figures]]


def neighbours_variants(setting: Setting) -> Variants:
    """Each program alone, and with the neighbour in every way."""
    place = setting.place
    if place.kind != LOCAL:
        raise NotHere("cpusets of pods are the kubelet's to give: --executor local")
    need_groups(place)
    if place.cores < 2:
        raise NotHere("one core: a neighbour could not be kept on others")
    ranks, empty = place.cores // 2, place.scratch / "neighbour"
    empty.mkdir(parents=True)
    foam = cut(setting, "victim", (1.0,) * ranks, setting.scale.refine)
    solver = ("simpleFoam", "-parallel") if ranks > 1 else ("simpleFoam",)
    victims = {"OpenFOAM": Run(foam, (1000,) * ranks, command=solver)}
    for name, command in (("LAMMPS", _lammps()), ("STREAM", _stream()), ("HPCG", _hpcg())):
        if command:
            warm = HPCG_SETUP if name == "HPCG" else WARM
            victims[name] = Run(empty, (1000,) * ranks, command=command, warm=warm)
    made: dict[str, Callable[[], Figures]] = {}
    for name, run in victims.items():
        made[f"{name} alone"] = functools.partial(_beside, setting, run, None)
        for way, means in WAYS.items():
            made[f"{name}, {way}"] = functools.partial(_beside, setting, run, means)
    if not report.errors():
        made[GANG] = functools.partial(_gang, setting)
    return made


def _lammps() -> tuple[str, ...]:
    program = shutil.which("lmp")
    try:
        script = programs.examples() / "in.lj"
    except BadInput:
        return ()
    if not program:
        return ()
    size = [word for axis in "xyz" for word in ("-var", axis, "10")]
    return (program, "-in", str(script), "-log", "none", "-var", "steps", "10000000", *size)


def _stream() -> tuple[str, ...]:
    return str(install_paths.bench("openmpi", "bench_pairs")), "stream"


def _hpcg() -> tuple[str, ...]:
    """On one thread for each rank, and for ever."""
    program = shutil.which("xhpcg")
    size = [f"--n{axis}=32" for axis in "xyz"]
    return ("env", "OMP_NUM_THREADS=1", program, *size, "--rt=100000") if program else ()


def _gang(setting: Setting) -> Figures:
    """Two simulations that want all cores, as pods of a rank each, on a cluster that is new.

    A scheduler without gang start may begin both in part, and none would ever run.
    """
    cores, scratch = setting.place.cores, setting.place.scratch
    entry = {"name": "gang", "case": str(scratch / "neighbour"), "ranks": cores, "ranks_per_pod": 1,
             "count": 2, "environment": hybrid.TCP,
             "command": [str(install_paths.bench("openmpi", "bench_pairs")), "pairs"]}  # fmt: skip
    plan, out = scratch / "gang.json", scratch / "gang"
    plan.write_text(json.dumps({"simulations": [entry]}))
    shutil.rmtree(out, ignore_errors=True)
    with ondemand.started(cores, setting.progress, purpose="gang") as kubeconfig:
        dovetail_run(plan, out, "--kubeconfig", str(kubeconfig))
    attempts = [one for track in summary.load(out)[1].tracks for one in track.attempts]
    begun = [one.start - one.launch for one in attempts if one.start is not None]
    return {"first": begun[0], "last": begun[-1], "part": float(len(attempts) - len(begun))}


def _beside(setting: Setting, run: Run, means: Sequence[str] | None) -> Figures:
    cpus = sorted(os.sched_getaffinity(0))
    half = len(cpus) // 2
    count = len(cpus)
    word = NEIGHBOUR.format(count=count)
    neighbour = Run(setting.place.scratch / "neighbour", (1000 * count,),
                    command=("python3", "-c", word), counted=False)  # fmt: skip
    runs = [run]
    if means is not None:
        if WEIGHTS in means:
            neighbour = replace(neighbour, requests=(LIGHT,))
        if CPUSETS in means:
            neighbour = replace(neighbour, cpus=tuple(cpus[half:]))
            runs = [replace(run, cpus=tuple(cpus[:half]))]
        runs.append(neighbour)
    scale = setting.scale
    steps = scale.iterations if run.command[0] == "simpleFoam" else _UNBOUNDED
    return setting.place.measure(runs, steps, scale.seconds / 2)[0].figures()


def neighbours_findings(setting: Setting, measured: Measured) -> list[Finding]:
    """Time beside the neighbour over that alone; there are no published numbers for it."""
    made = []
    victims = sorted({name.partition(",")[0] for name in measured if "," in name})
    for name in victims:
        for way in WAYS:
            row = ratio(measured, f"{name}, {way}", f"{name} alone", "seconds")
            made.append(Finding(f"time beside a neighbour / alone: {name}, kept off by {way}",
                                "x", row, group="time / alone"))  # fmt: skip
        made += [Finding(f"ready without a core: {one}", "s/s", plain(measured, one, "waited_s"),
                         group="ready without a core", detail=True)
                 for one in measured if one.startswith(name)]  # fmt: skip
    for name, how in (("LAMMPS", "there is no lmp: ./bootstrap services installs it"),
                      ("HPCG", "there is no xhpcg on PATH; it is built from its source, as no "
                               "system packages it")):  # fmt: skip
        if name not in victims:
            made.append(Finding(f"time of {name} beside a neighbour", "x", why=how))
    made.append(Finding("time of MiniFE beside a neighbour", "x", why="one of HPCG and MiniFE"))
    if GANG not in measured:
        errors = report.errors()
        made.append(Finding(GANG, "s", why=errors[0] if errors else ""))
        return made
    note = "of two simulations that want all cores"
    for figure, which in (("first", "first on a cluster"), ("last", "next")):
        what = f"gang start: from the launch of pods until all ranks run, the {which}"
        made.append(Finding(what, "s", plain(measured, GANG, figure), note=note))
    made.append(Finding("gang start: simulations of which only a part began", "simulations",
                        plain(measured, GANG, "part"), note=note))  # fmt: skip
    return made
