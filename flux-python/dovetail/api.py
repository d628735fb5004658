# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the commands do, as functions; `import dovetail` offers them. See dovetail-python(7).

Inputs: what a command line or a plan would say. Outputs: what the commands print, as objects.
Invariants: nothing is printed on standard output but by programs that are profiled; what is wrong
raises `BadInput` before anything is started, what fails `WorkFailed`.

    run = dovetail.run_plan("plan.yaml", "results")
    print(run.summary.totals.makespan_s.value, run.report)
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from dovetail.core import cpu_requests, units
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.protocol import WaitPolicy
from dovetail.core.throughput_model import Model, check_need
from dovetail.mpi import detect, profiled_run
from dovetail.mpi.control_page import MODES
from dovetail.mpi.profile import Profile
from dovetail.plan import schema
from dovetail.run import run, target
from dovetail.run.run import RunOutcome

__all__ = [
    "BadInput",
    "Model",
    "Profile",
    "RunOutcome",
    "WorkFailed",
    "predict",
    "profile_command",
    "requests",
    "run_plan",
]


def run_plan(
    plan: str | Path | Mapping[str, Any],
    output: str | Path = "dovetail-out",
    *,
    resume: bool = False,
    checkpoint: bool = False,
    kubeconfig: str | Path | None = None,
    network: str = "",
    launcher: str = "",
) -> RunOutcome:
    """Run a queue of simulations to its end, as `dovetail run` does; see dovetail-run(1).

    `plan` is a file, or what would be in one, whose paths are then relative to the current folder.
    `output` is where everything is written. The others are the command's options. Progress is told
    on standard error; Ctrl-C ends the run in order, `interrupted` then names the signal. Must be
    called in the main thread.

    A simulation that fails raises nothing: `RunOutcome.done` tells whether all are done, and
    `summary.simulations` how each ended. Times there are in seconds, CPU in cores. Nor does what
    the command would end with after that, as a report that cannot be written: `trouble` has it.
    """
    _in_main_thread("run_plan")
    asked = _load(plan)
    for line in schema.warnings(asked):
        print(f"dovetail: {line}", file=sys.stderr)
    place = target.chosen(None if kubeconfig is None else Path(kubeconfig), network, launcher)
    run.check(asked, place, Path(output), checkpoint=checkpoint)
    return run.run(
        asked, Path(output), place=place, resume=resume, quiet=True, checkpoint=checkpoint
    )


def profile_command(
    command: Sequence[str],
    *,
    wait: str = "off",
    yields: int = 20,
    mpi: str = "",
    check: bool = True,
) -> Profile:
    """Run an unmodified MPI program and tell where its ranks' time went; see dovetail-profile(1).

    `command` as on a command line, with `mpirun` and all; `wait` is how ranks wait inside MPI
    (off, yield or doorbell), and `yields` how often one yields before it sleeps; `mpi` is openmpi
    or mpich, found out if empty. Its output goes where ours does. With `check` a program that
    fails raises WorkFailed, else its profile has the `exit_code`; it has the `unseen` ranks, too.
    KeyboardInterrupt if it was ended by a signal. Must be called in the main thread.
    """
    _in_main_thread("profile_command")
    if wait not in MODES:
        raise BadInput(f"wait: {wait!r} is not one of {', '.join(MODES)}")
    words = _words(command)
    ended = profiled_run.run(
        words, mpi or detect.mpi_of(words), WaitPolicy(wait, yields), quiet=False
    )
    if ended.interrupted:
        raise KeyboardInterrupt
    if check and ended.failure:
        raise WorkFailed(ended.failure)
    return ended.profile


def _words(command: Sequence[str]) -> list[str]:
    """The words of a command, of which some may be paths."""
    try:
        if not isinstance(command, str):
            return [os.fspath(word) for word in command]
    except TypeError:
        pass
    raise BadInput(f"command: {command!r} is not a list of words, as shlex.split gives one")


def predict(
    t1: float,
    ranks: int,
    vcpus: float,
    *,
    beta: float | None = None,
    measured: Mapping[int, float] | None = None,
    need: float | None = None,
) -> Model:
    """How much slower simulations run at once, a prediction; see dovetail-predict(1).

    `t1` is the seconds of one alone on its `ranks`, `vcpus` what all share; then either `beta`,
    the model's parameter, or `measured`, seconds by the number of simulations at once, to fit it.
    `need` is the cores that one keeps busy alone.
    """
    if (beta is None) == (measured is None):
        raise BadInput("predict: give either beta or measured")
    if measured is not None:
        model = Model.fit(t1, ranks, vcpus, measured, need)
    else:
        assert beta is not None
        model = Model(t1, ranks, vcpus, beta, need)
    check_need(need, vcpus)
    return model


def requests(
    load: Profile | Sequence[float], cpus: float | str, floor: float | str = "10m"
) -> tuple[int, ...]:
    """CPU requests in proportion to the ranks' load, millicores, which add up to `cpus` exactly.

    `load` is a profile, or one weight per rank; `cpus` cores (4, 2.5) or millicores ("2500m") to
    share; `floor` the least of a rank. See dovetail-requests(1).
    """
    weights = load.load if isinstance(load, Profile) else _weights(load)
    least = cpu_requests.parse_cpu(cpu_requests.cores_as_text(floor), "floor", least=0)
    total = cpu_requests.parse_cpu(cpu_requests.cores_as_text(cpus))
    return cpu_requests.proportional(weights, total, least)


def _weights(load: Sequence[float]) -> tuple[float, ...]:
    """Numbers of whatever kind, as those in an array."""
    try:
        if not isinstance(load, str):
            return tuple(float(weight) for weight in load)
    except (TypeError, ValueError, OverflowError):
        pass
    raise BadInput(f"load: {units.show(load)} is no profile, nor a list of one number per rank")


def _load(plan: str | Path | Mapping[str, Any]) -> schema.Plan:
    if not isinstance(plan, Mapping):
        return schema.load(plan)
    try:
        text = json.dumps(plan, default=_plain)
    except (TypeError, ValueError) as error:
        raise BadInput(f"plan: {error}") from None
    # JSON itself is not all YAML: 1e-05 is text there, and two escapes are two letters.
    return schema.load("plan", yaml.safe_dump(json.loads(text), sort_keys=False).encode())


def _plain(value: object) -> object:
    """What JSON has no word for: paths, other mappings, and numpy's numbers and arrays."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return dict(value)
    if callable(numbers := getattr(value, "tolist", None)):
        return numbers()
    raise TypeError(f"{value!r} is no text, number, list or mapping")


def _in_main_thread(what: str) -> None:
    if threading.current_thread() is not threading.main_thread():
        raise BadInput(f"{what}: must be called in the main thread, where signals arrive")
