# SPDX-License-Identifier: LGPL-3.0-or-later
"""What simulations cost as pods: makespan, short ones, messages, resizes and watching of many.

Inputs: the number of rounds. Outputs: `Claim`s. Clusters are started for it, as whoever runs it,
and end with this process. What is bare or as processes runs beside them; they are idle then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from usernetes_setup.preflight import report

from dovetail.bench import demo, moldable, ondemand, pairs
from dovetail.bench.cases import pitz_daily
from dovetail.bench.harness import Claim, Progress, dovetail_run, interleave, ratios
from dovetail.core.errors import BadInput, WorkFailed

PODS = 64
CORES = 2


def pods(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """Every figure of the executor for Kubernetes."""
    from dovetail.bench import many  # its client is slow to load, and every --help loads this

    errors = report.errors()
    if errors:
        raise BadInput(f"user-space Kubernetes cannot run here: {errors[0]}; see `dovetail doctor`")
    with ondemand.started(1, progress, nodes=2) as kubeconfig:
        claims = many.resized(scratch / "resized", kubeconfig, PODS, repeat, progress)
        claims += many.watched(scratch / "watched", kubeconfig, PODS, repeat, progress)
    with ondemand.started(CORES, progress) as kubeconfig:
        claims += makespan(scratch / "plan", kubeconfig, repeat, progress)
        claims += moldable.short(scratch / "short", repeat, progress, kubeconfig)
        with ondemand.started(CORES, progress, network="bridge") as bridge:
            claims += pairs.messages(scratch / "pairs", kubeconfig, bridge, repeat, progress)
    with ondemand.started(CORES, progress, network="bridge") as bridge:
        claims += makespan(scratch / "bridged", bridge, repeat, progress, network="bridge")
    return claims


def makespan(
    scratch: Path,
    kubeconfig: Path,
    repeat: int,
    progress: Progress,
    families: Sequence[demo.Family] = demo.FAMILIES,
    network: str = "host",
) -> list[Claim]:
    """The demo's plan as pods on either network, and as processes."""
    scratch.mkdir()
    for one in families:
        pitz_daily(scratch / "cases" / one.name / "0", one.weights, one.iterations)
    plan = scratch / "plan.yaml"
    plan.write_text(demo.demo_plan(scratch, families))
    numbers = iter(range(2 * repeat))

    def took(*words: str) -> float:
        found = dovetail_run(plan, scratch / f"out{next(numbers)}", *words)
        seconds = found.totals.makespan_s.value
        if seconds is None:
            raise WorkFailed("a simulation of the plan is not done")
        return seconds

    pods = "as pods" if network == "host" else f"as pods on a {network}"
    words = ("--kubeconfig", str(kubeconfig), "--network", network)
    rows = interleave({pods: lambda: took(*words), "as processes": took}, repeat, progress)
    ratio = ratios(rows[pods], rows["as processes"], f"makespan, {pods} / as processes")
    return [Claim(ratio, "x", "<=", ondemand.BOUND), *(Claim(row, "s") for row in rows.values())]
