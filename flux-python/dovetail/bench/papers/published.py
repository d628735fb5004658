# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the papers say: every number that is compared with a measurement, and where it stands.

Inputs: none. Outputs: `PAPERS`, and `Published` values by key. Invariants: no number is here that
was not read; `source` says where, if that was not the paper itself; a claim without a number that
could be found has None for it.

`effect` is a ratio that is 1 where there is no effect, `amount` a size that is 0 where there is
none, `most` a bound that must not be exceeded, `same` a ratio of which the paper says that it is 1.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

RANKS, PACKING, CONVERGED = "2603.22691", "2604.00377", "2406.06995"
PAPERS = {
    RANKS: "T. Xie, Rank-Aware Resource Scheduling for Tightly-Coupled MPI Workloads on Kubernetes",
    PACKING: "T. Xie, Reclaiming Idle CPU Cycles on Kubernetes: Sparse-Domain Multiplexing for "
    "Concurrent MPI-CFD Simulations",
    CONVERGED: "V. Sochat, D. Fox, D. Milroy, HPC Alongside User-space Kubernetes",
}
MACHINES = {
    RANKS: "2 to 4 c5.xlarge (4 vCPU each), k3s 1.35, OpenFOAM 10; 3 runs each",
    PACKING: "12 c5.2xlarge (96 vCPU), k3s 1.35, 16 ranks, 498,834 cells, OpenFOAM 10",
    CONVERGED: "4 to 32 hpc7g.4xlarge, EFA, 16 ranks on each, 20 runs each",
}
QUOTED = "a public summary of the paper that quotes its table"
RAW = "median of 20 in the authors' data, github.com/converged-computing/flux-usernetes"

Kind = Literal["effect", "amount", "most", "same"]


@dataclass(frozen=True)
class Published:
    """One number: `value` in `unit` (x: a ratio), None if the text says none that was found."""

    key: str
    paper: str
    where: str
    what: str
    value: float | None
    kind: Kind = "effect"
    unit: str = "x"
    source: str = ""


_ALLOCATION = (
    Published(
        "limits at once", RANKS, "abstract",
        "time with CPU limits equal to proportional requests / without limits, 4 ranks", 78.0,
    ),
    Published(
        "limits twice", RANKS, "tables of C0 to C5",
        "time with limits of twice the requests / without limits", None,
    ),
    Published(
        "concentric", RANKS, "abstract",
        "time of the concentric cut with equal requests / of the even cut, 4 ranks", 0.81,
    ),
    Published(
        "proportional", RANKS, "abstract",
        "time with proportional / equal requests, concentric cut, 4 ranks", 0.97,
    ),
    Published(
        "both", RANKS, "abstract",
        "time of the concentric cut with proportional requests / of the even cut, 4 ranks", 0.79,
    ),
    Published(
        "sixteen ranks", RANKS, "abstract",
        "time with proportional / equal requests, concentric cut, 16 ranks", 0.80,
    ),
    Published(
        "sparse request", RANKS, "abstract",
        "request of a rank of the sparse zone / its equal share, 16 ranks", 0.18,
    ),
    Published(
        "across hosts", RANKS, "text", "time with ranks on several hosts, by TCP / on one", 1.30,
        source="a public list of related work that quotes the paper",
    ),
)  # fmt: skip

_PHASES = (
    Published(
        "phases", RANKS, "section on vertical scaling",
        "time with requests that change by phase / with fixed ones", None,
    ),
    Published(
        "restarts", PACKING, "section 5.4", "restarts caused by 64 resizes in place", 0.0, "most",
        "restarts", QUOTED,
    ),
)  # fmt: skip

THROUGHPUT = {2: 1.77, 3: 2.59, 4: 3.11, 5: 3.74}
SLOWDOWN = {2: 1.07, 3: 1.16, 4: 1.28, 5: 1.34}
SAVED = {2: 0.44, 3: 0.62, 4: 0.68, 5: 0.73}
MAKESPAN = {1: 1249.0, 2: 1410.0, 3: 1446.0, 4: 1604.0, 5: 1670.0}  # seconds, on 16 of 96 vCPU each
BETA = 0.524
"""Fitted by the paper to its makespans."""

_PACKING = (
    *(Published(f"throughput {n}", PACKING, "table 4 and figure 5",
                f"throughput of {n} at once / one after the other, proportional requests", gain,
                source="" if n in (2, 5) else QUOTED)
      for n, gain in THROUGHPUT.items()),
    Published("throughput 2E", PACKING, "table 4",
              "throughput of 2 at once / one after the other, equal requests", 1.83,
              source=QUOTED),
    *(Published(f"makespan {n}", PACKING, "table 4",
                f"makespan of {n} at once / one after the other, proportional requests",
                MAKESPAN[n] / n / MAKESPAN[1], source=QUOTED)
      for n in THROUGHPUT),
    *(Published(f"efficiency {n}", PACKING, "table 4 and figure 5",
                f"throughput of {n} at once / {n} times that of one", gain / n, "amount", "share",
                "calculated from the throughput")
      for n, gain in THROUGHPUT.items()),
    *(Published(f"slowdown {n}", PACKING, "table 4 and figure 5",
                f"mean slowdown of {n} at once, proportional requests, at most", slower, "most",
                source=QUOTED)
      for n, slower in SLOWDOWN.items()),
    Published("proportional alone", PACKING, "table 4",
              "time of one alone with proportional / equal requests, at most", 1249 / 1179, "most",
              source=QUOTED),
    Published("fairness", PACKING, "table 4", "slowest / fastest of those at once, at most", 1.10,
              "most", source=QUOTED),
    Published("model", PACKING, "abstract",
              "error of the makespan by a model with one parameter, fitted to all, at most", 0.04,
              "most", "share"),
    Published("controller", PACKING, "abstract",
              "throughput of 4 simulations under the controller / one after the other", 3.25),
)  # fmt: skip

_COST = (
    *(Published(f"cost {n}", PACKING, "table 5", f"cost of a simulation with {n} at once / alone",
                1 - saved, source=QUOTED)
      for n, saved in SAVED.items()),
    Published("dollars", PACKING, "table 5", "price of a simulation alone", 1.43, "amount", "$",
              QUOTED),
)  # fmt: skip

_DUTY = (
    Published("dense to sparse", PACKING, "duty cycles",
              "duty cycle of the densest zone / of the sparsest (19.4 % / 5.0 %)", 19.4 / 5.0,
              source=QUOTED),
    Published("idle", PACKING, "duty cycles", "share of all rank time inside MPI, concentric cut",
              0.88, "amount", "share", QUOTED),
    Published("idle dense", PACKING, "duty cycles",
              "share inside MPI of the densest zone's ranks", 1 - 0.194, "amount", "share", QUOTED),
    Published("even cut", PACKING, "duty cycles",
              "highest / lowest duty cycle of the even cut (13.1 % / 7.7 %)", 13.1 / 7.7,
              source=QUOTED),
    Published("barrier", PACKING, "duty cycles", "share of MPI time in MPI_Allreduce", None,
              "amount", "share"),
    Published("talp", PACKING, "none", "a profile opened by DLB's own tools", None, "amount",
              "ranks"),
)  # fmt: skip

# Medians of the authors' raw data: microseconds, MB/s of bandwidth, seconds of LAMMPS. Point to
# point on 2 nodes; Allreduce and Barrier on 4 nodes of 16 ranks, the fewest that there are.
BARE, BESIDE, CONTAINER, INSIDE = "bare", "bare beside", "container", "in Kubernetes"
OSU: dict[str, dict[str, float]] = {
    "latency, 1 B": {BARE: 7.49, BESIDE: 7.5, CONTAINER: 7.5, INSIDE: 12.685},
    "latency, 8 B": {BARE: 7.78, BESIDE: 7.785, CONTAINER: 7.79, INSIDE: 12.975},
    "latency, 1 KB": {BARE: 8.06, BESIDE: 8.06, CONTAINER: 8.08, INSIDE: 13.34},
    "latency, 64 KB": {BARE: 13.975, BESIDE: 14.075, CONTAINER: 14.03, INSIDE: 20.955},
    "latency, 1 MB": {BARE: 77.86, BESIDE: 77.88, CONTAINER: 77.88, INSIDE: 95.235},
    "bandwidth, 1 B": {BARE: 1.72, BESIDE: 1.715, CONTAINER: 1.7, INSIDE: 1.325},
    "bandwidth, 8 B": {BARE: 14.7, BESIDE: 14.695, CONTAINER: 14.555, INSIDE: 11.33},
    "bandwidth, 1 KB": {BARE: 1543.54, BESIDE: 1527.765, CONTAINER: 1521.485, INSIDE: 1242.115},
    "bandwidth, 64 KB": {BARE: 11339.71, BESIDE: 11259.235, CONTAINER: 11002.155,
                         INSIDE: 11106.295},
    "bandwidth, 1 MB": {BARE: 23705.33, BESIDE: 23695.985, CONTAINER: 23700.615,
                        INSIDE: 23380.59},
    "Allreduce, 8 B": {BARE: 32.23, BESIDE: 33.635, CONTAINER: 32.195, INSIDE: 69.775},
    "Allreduce, 1 KB": {BARE: 35.035, BESIDE: 36.86, CONTAINER: 35.495, INSIDE: 71.9},
    "Allreduce, 64 KB": {BARE: 229.92, BESIDE: 235.47, CONTAINER: 230.185, INSIDE: 383.01},
    "Allreduce, 1 MB": {BARE: 704.36, BESIDE: 738.915, CONTAINER: 706.655, INSIDE: 2068.115},
    "Barrier": {BARE: 40.525, BESIDE: 42.12, CONTAINER: 40.525, INSIDE: 71.49},
}  # fmt: skip
LAMMPS = {  # seconds by nodes, with 16 ranks each
    BARE: {4: 82.0, 8: 45.0, 16: 25.0, 32: 14.0},
    BESIDE: {4: 82.0, 8: 46.0, 16: 26.0, 32: 16.0},
    CONTAINER: {4: 82.0, 8: 45.0, 16: 25.0, 32: 14.0},
    INSIDE: {4: 83.0, 8: 46.0, 16: 27.0, 32: 16.0},
}
CPU_SHARE = {BARE: 0.998, INSIDE: 0.997}  # of LAMMPS on 4 nodes

_CONVERGED = (
    *(Published(f"{test}, {setup}", CONVERGED, "OSU figures", f"{test}: {setup} / bare",
                found[setup] / found[BARE], "effect" if setup == INSIDE else "same", source=RAW)
      for test, found in OSU.items() for setup in (BESIDE, CONTAINER, INSIDE)),
    *(Published(f"LAMMPS, {setup}", CONVERGED, "LAMMPS figure",
                f"LAMMPS on 4 nodes: {setup} / bare", LAMMPS[setup][4] / LAMMPS[BARE][4], "same",
                source=RAW)
      for setup in (BESIDE, CONTAINER, INSIDE)),
    Published("LAMMPS scaling", CONVERGED, "LAMMPS figure",
              "LAMMPS, speed-up from 4 to 32 nodes in Kubernetes (bare: 5.9)",
              LAMMPS[INSIDE][4] / LAMMPS[INSIDE][32], source=RAW),
    Published("LAMMPS CPU", CONVERGED, "CPU figure",
              "share of CPU that LAMMPS reports: in Kubernetes / bare",
              CPU_SHARE[INSIDE] / CPU_SHARE[BARE], "same", source=RAW),
    Published("start-up", CONVERGED, "text", "seconds until Kubernetes is up", None, "amount", "s"),
    Published("pull", CONVERGED, "none",
              "seconds from the creation of 32 pods until they run, with the pull of an image",
              108.0, "amount", "s", "median of 32 pods in the authors' data, "
              "github.com/converged-computing/flux-usernetes"),
)  # fmt: skip

_HYBRID = (
    Published("linear", CONVERGED, "regression figures",
              "R squared of linear regression, 1,000 jobs learned, 250 unseen", 0.792, "amount",
              "R squared", "calculated from the authors' 250 predictions"),
    Published("bayesian", CONVERGED, "regression figures",
              "R squared of Bayesian linear regression, the same", 0.605, "amount",
              "R squared", "calculated from the authors' 250 predictions"),
    Published("passive-aggressive", CONVERGED, "regression figures",
              "R squared of passive-aggressive regression, the same", -0.564, "amount",
              "R squared", "calculated from the authors' 250 predictions"),
)  # fmt: skip

TABLES: dict[str, tuple[Published, ...]] = {
    "allocation": _ALLOCATION,
    "limits": (),
    "phases": _PHASES,
    "packing": _PACKING,
    "cost": _COST,
    "duty": _DUTY,
    "converged": _CONVERGED,
    "hybrid": _HYBRID,
    "setups": (),
    "orchestrators": (),
}


def of(table: str) -> dict[str, Published]:
    """The numbers of one table, by key."""
    return {one.key: one for one in TABLES[table]}


def every() -> Iterable[Published]:
    """All numbers."""
    return (one for table in TABLES.values() for one in table)
