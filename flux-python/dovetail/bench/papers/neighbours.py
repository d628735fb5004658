# SPDX-License-Identifier: LGPL-3.0-or-later
"""A noisy neighbour on the same node, and what keeps it off: weights, cpusets, both.

Inputs: a setting. Outputs: seconds per iteration of OpenFOAM, and of LAMMPS where it is installed,
on half of the cores: alone, and beside a neighbour that copies memory with a process for each core,
as STREAM does. HPCG and MiniFE are in no registry that this uses.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from usernetes_setup.build import programs

from dovetail.bench.papers.allocation import cut
from dovetail.bench.papers.findings import Figures, Finding, Measured, Setting, plain, ratio
from dovetail.bench.papers.place import LOCAL, NotHere, Run, need_groups
from dovetail.core.errors import BadInput

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
_UNBOUNDED = 10**9  # steps of LAMMPS, which are short: it is measured for a time
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
    lammps = _lammps()
    if lammps:
        victims["LAMMPS"] = Run(empty, (1000,) * ranks, command=lammps)
    made: dict[str, Callable[[], Figures]] = {}
    for name, run in victims.items():
        made[f"{name} alone"] = functools.partial(_beside, setting, run, None)
        for way, means in WAYS.items():
            made[f"{name}, {way}"] = functools.partial(_beside, setting, run, means)
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
    victims = sorted({name.split(",")[0].removesuffix(" alone") for name in measured})
    for name in victims:
        for way in WAYS:
            row = ratio(measured, f"{name}, {way}", f"{name} alone", "seconds")
            made.append(Finding(f"time beside a neighbour / alone: {name}, kept off by {way}",
                                "x", row, group="time / alone"))  # fmt: skip
        made += [Finding(f"ready without a core: {one}", "s/s", plain(measured, one, "waited_s"),
                         group="ready without a core", detail=True)
                 for one in measured if one.startswith(name)]  # fmt: skip
    if "LAMMPS" not in victims:
        why = "there is no lmp: ./bootstrap services installs LAMMPS"
        made.append(Finding("time of LAMMPS beside a neighbour", "x", why=why))
    made.append(Finding("time of HPCG and MiniFE beside a neighbour", "x",
                        why="neither is packaged for this system"))  # fmt: skip
    made.append(Finding("gang start", "s", why="all pods of a simulation start or none does, which "
                        "is a promise and no time; dovetail-pods(7)"))  # fmt: skip
    return made
