# SPDX-License-Identifier: LGPL-3.0-or-later
"""Stops an OpenFOAM solver at a written time, and goes on from there on any number of ranks.

Inputs: the run's own copy of a case, and the weights of its ranks. Outputs: further
entries at the end of its `system/controlDict`, where the later of two entries counts; processor
directories for the new ranks; `.dovetail-checkpoint`, which says how the case is cut.

OpenFOAM looks at controlDict in every step: `stopAt writeNow` there ends the solver after the
step that it is in, with all ranks at the same time. That one time is written in binary, so that
no digit is lost; the user's own format is in force again when the solver goes on.

Invariants: each function may be cut off at any point, and may then be called again: what can be
gone on from is there at each moment. The user's own case is never written to.

    begin(case, [1, 1])     # two equal ranks; before the solver first starts
    stop(case)              # while it runs; it ends by itself
    unfinished(case, log)   # once it has: True if there are steps left
    stopped(case)           # then: who goes on in the case by hand is not stopped
    go_on(case, [1], log)   # '137', from where the solver goes on, on one rank, once started
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from dovetail.applications.openfoam import control_dict, processors, written_times
from dovetail.applications.openfoam.cell_counts import number_of_cells
from dovetail.core.causes import NOT_NOW, NOTHING_LEFT
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import borrowed_python, install_paths
from dovetail.host.memory import free_memory
from dovetail.host.private_files import write_whole

_MARK = "// Dovetail wrote what follows, for checkpoints; OpenFOAM takes the last of two entries."
_ALWAYS = {"runTimeModifiable": "yes"}
_EXACT = {"writeFormat": "binary", "writePrecision": "17"}
_OURS = re.compile(
    r"^(?:runTimeModifiable yes|writeFormat binary|writePrecision 17|stopAt writeNow|"
    r"startFrom startTime|startTime \S+|writeControl \w+; writeInterval \S+);\n",
    re.MULTILINE,
)
_STATE = ".dovetail-checkpoint"
_LOG = "log.checkpoint"
_OLD = ".dovetail-old-cut"
_NEW = ".dovetail-new-cut"
_CUT = ("constant/cellDecomposition", "system/decomposeParDict")
"""What tells decomposePar how to cut. The second tells reconstructPar of some versions how many
ranks there are, and solvers refuse to start on fewer than it says."""
_MEMORY = 4096
"""Bytes for each cell, with which a cut may be made beside reconstructPar, twice what both took."""
_NEWER = 60.0
"""Seconds by which a change of controlDict is dated after the one before, at least: OpenFOAM
takes no notice of one within its `fileModificationSkew`, which is 10 s as shipped."""
_HEADER = 2048  # bytes in which a field's header is
_ROUNDING = 1e-6
"""Part of a write interval that the name of a time may leave out."""
_UNSET = re.compile(
    rb"^( *type +uniformFixedValue;\n(?: *patchType .*\n)?)"
    rb" *value +nonuniform List<(scalar|vector)> \n(\d{1,18})\n\(",
    re.MULTILINE,
)
_LAST = re.compile(rb"^ ?(?:Time = (\S+?)s?|\w+ solution converged in .*)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class _State:
    """How the case is cut: `weights` has one entry per rank, none while it is being cut.

    `before` are the times that it had before the solver first ran, `sure` the one from which it
    went on last, or at which it was stopped since, "" if there is none. `first` is how many time
    steps were over before it first ran, as where the user's case goes on from a run of its own:
    solvers count on from there.
    """

    weights: tuple[float, ...]
    before: tuple[str, ...]
    sure: str = ""
    first: int = 0


def begin(case: Path, weights: Sequence[float]) -> None:
    """Make a case that is cut for these ranks ready to be stopped; before its solver starts.

    Raises BadInput with the reason if it cannot be.
    """
    handler = os.environ.get("FOAM_FILEHANDLER")
    if handler in control_dict.COLLATED or any(case.glob("processors[0-9]*")):
        raise BadInput(f"{case}: no checkpoints with collated files; use uncollated ones")
    places = written_times.directories(case, len(weights))
    before = {name for place in {case, *places} for name in written_times.times(place)}
    _set_control(case, {})
    state = _State(tuple(weights), tuple(sorted(before, key=float)), first=_first(case, places[0]))
    _save(case, state)


def stop(case: Path) -> None:
    """Have the running solver end after this step, with all fields written.

    Raises BadInput for a case that was not made ready.
    """
    state = _load(case)
    if state is None:
        raise BadInput(f"{case}: it was not made ready to be stopped")
    # A solver that was only just started reads from here where it goes on, too.
    start = _from(_exact(case, state, state.sure)) if state.sure else {}
    _set_control(case, {**start, **_EXACT, "stopAt": "writeNow"})


def unfinished(case: Path, log: Path) -> bool:
    """Whether a solver that ended well has steps left: it did not converge, or come to its end.

    True where case or log do not tell: a solver that goes on from its end ends at once.
    """
    try:
        told = [text.decode(errors="replace") for text in _LAST.findall(log.read_bytes())[-2:]]
    except OSError:
        return True
    if not told:
        return True
    if not told[-1]:
        return False  # it has converged
    found = _entries(case)
    if control_dict.INCLUDED in found:
        return True
    words = told[0], told[-1], found.get("endTime", ""), found.get("deltaT", "")
    before, time, end, step = map(control_dict.number, words)
    if time is None or end is None or step is None:
        return True
    if control_dict.varies(found):  # deltaT is just the first step
        step = 0.0 if before is None else max(0.0, time - before)
    return time < end - step / 2


def stopped(case: Path) -> None:
    """Take back what `stop` asked for: who goes on by hand shall not stop after one step again.

    As the solver has ended well, its last time is written, though not all say `Time =` in a log.
    """
    state = _load(case)
    if state is None:
        return
    _set_control(case, {})
    names = written_times.times(written_times.directories(case, len(state.weights))[0])
    if names and names[-1] not in state.before:
        _save(case, replace(state, sure=names[-1]))


def go_on(case: Path, weights: Sequence[float], log: Path) -> str | None:
    """Make the case ready to go on with such ranks from its last whole time, which is returned.

    None if it has none. Raises BadInput or WorkFailed if it cannot be cut again.
    """
    state = _load(case)
    if state is None:
        return None
    places = written_times.directories(case, len(state.weights))
    name = written_times.latest(places, log, state.before, state.sure)
    if name is None:
        return None
    for place in {case, *places}:
        for other in written_times.times(place):
            if other not in state.before and float(other) > float(name):
                shutil.rmtree(place / other)  # damaged, and computed again
    if state.weights != tuple(weights):
        try:
            _cut_again(case, state, name, weights)
        except WorkFailed as error:
            if len(state.weights) != len(weights):
                raise
            print(f"it goes on as it was cut: {error}", flush=True)
            weights = state.weights
        finally:
            shutil.rmtree(case / _NEW, ignore_errors=True)
    state = replace(state, weights=tuple(weights), sure=name)
    _set_control(case, {})
    _set_control(case, {**_from(_exact(case, state, name)), **_writes(case, state, name)})
    _save(case, state)
    return name


def over(case: Path, name: str) -> int:
    """The time steps from the solver's first start to the time from which it goes on."""
    state = _load(case)
    return 0 if state is None else _over(case, state, name)


def _over(case: Path, state: _State, name: str) -> int:
    place = written_times.directories(case, len(state.weights))[0]
    return max(0, written_times.steps(place, name) - state.first)


def _exact(case: Path, state: _State, name: str) -> str:
    return written_times.exact(written_times.directories(case, len(state.weights))[0], name)


def _writes(case: Path, state: _State, name: str) -> dict[str, str]:
    """Entries with which a solver that goes on from that time writes when it would have.

    OpenFOAM counts intervals of time from where it starts, and so would write between the times
    that the user's controlDict means, and not at the end; steps it counts from the very first.
    Where steps vary, as many writes as are left are spread so that the last one stays.
    """
    found = _entries(case)
    control, first = found.get("writeControl"), _start(state.before, found)
    words = (found.get(key, "") for key in ("endTime", "deltaT", "writeInterval"))
    now, end, step, interval = map(control_dict.number, (_exact(case, state, name), *words))
    if control not in ("runTime", "adjustable", "adjustableRunTime"):
        return {}
    if control_dict.INCLUDED in found or first is None or now is None or end is None:
        return {}
    if not step or step < 0 or not interval or interval < 0:
        return {}
    steps = round(interval / step)
    whole = abs(interval / step - steps) < _ROUNDING * steps and state.first % steps == 0
    in_step = abs(now - first - _over(case, state, name) * step) < step / 2
    if whole and in_step and not control_dict.varies(found):
        return {"writeControl": f"timeStep; writeInterval {steps}"}
    over, last = (now - first) / interval, math.floor((end - first) / interval + _ROUNDING)
    left = last - math.floor(over + _ROUNDING)
    if left < 1 or abs(over - round(over)) < _ROUNDING:
        return {}
    return {"writeControl": f"{control}; writeInterval {(first + last * interval - now) / left!r}"}


def _entries(case: Path) -> dict[str, str]:
    """controlDict's entries; where it includes, computes or names some, as OpenFOAM reads them."""
    found = control_dict.entries(case)
    if found and control_dict.INCLUDED not in found and "$" not in "".join(found.values()):
        return found
    with contextlib.suppress(OSError):
        told = subprocess.run(
            ["foamDictionary", "-expand", "system/controlDict"],
            cwd=case,
            env=install_paths.package_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if told.returncode == 0:
            return control_dict.read(told.stdout.decode(errors="replace"))
    return found


def _first(case: Path, place: Path) -> int:
    """The time steps that are over where the solver begins, which has its times there."""
    names = written_times.times(place)
    begun = _start(names, _entries(case))
    return next((written_times.steps(place, one) for one in names if float(one) == begun), 0)


def _start(names: Sequence[str], found: dict[str, str]) -> float | None:
    """The time from which a solver begins that has these times, by controlDict's entries."""
    return control_dict.start([float(name) for name in names], found)


def _cut_again(case: Path, state: _State, name: str, weights: Sequence[float]) -> None:
    """Bring the fields of one time into one piece, and cut that for other ranks.

    What fails leaves it cut as it was.
    """
    try:
        processors.check_regions(case)
        processors.own_folders(case)  # now, and not while others read there
    except BadInput as error:
        raise WorkFailed(str(error)) from None
    # Which cell is whose depends on the mesh alone: that is found out beside what follows.
    with ThreadPoolExecutor(1) as beside:
        cells = beside.submit(_assign, case, weights)
        if free_memory() < _MEMORY * (number_of_cells(case) or 0):
            cells.result()
        if len(state.weights) > 1:
            _keep_results(case, state, name)
            # It brings the points of a moving mesh into one piece where they are others than
            # those that it began with.
            _set_control(case, {**_EXACT, **_from(min([*state.before, name], key=float))})
            shutil.rmtree(case / name, ignore_errors=True)
            _tool(case, "reconstructPar", "-time", name)
            _leave_out_unset(case / name)
        cells.result()
    new = case / _NEW
    _set_control(case, {**_EXACT, **_from(name)})
    # From here until the new cut is there, the case in one piece is what counts.
    _save(case, replace(state, weights=(), sure=name))
    old = case / _OLD
    shutil.rmtree(old, ignore_errors=True)
    old.mkdir()
    _move(case, old, *(name for name in _CUT if (new / name).exists()))
    _move(new, case, *_CUT)
    try:
        if len(weights) > 1:
            # Without -copyUniform ranks get links to what the next cut begins by removing.
            _tool(case, "decomposePar", "-force", "-copyUniform", "-time", name)
    except WorkFailed:
        for place in case.glob("processor[0-9]*"):
            shutil.rmtree(place)
        _move(old, case, *_CUT)
        shutil.rmtree(old)
        _save(case, state)
        raise
    shutil.rmtree(old)


def _leave_out_unset(time: Path) -> None:
    """Leave out what reconstructPar does not set: the values of point fields that are one each.

    It writes what was in memory, which no solver reads; without, they take it from `uniformValue`.
    """
    for path in time.iterdir():
        data = path.read_bytes() if path.is_file() else b""
        if not re.search(rb"class +point\w+Field;", data[:_HEADER]) or b"binary;" not in data:
            continue
        at, kept = 0, b""
        while found := _UNSET.search(data, at):
            end = found.end() + int(found[3]) * (8 if found[2] == b"scalar" else 24)
            if data[end : end + 3] != b");\n":
                break
            kept, at = kept + data[at : found.end(1)], end + 3
        if at:
            path.write_bytes(kept + data[at:])


def _move(source: Path, target: Path, *files: str) -> None:
    """Move what ranks have there, and those of these files that are there."""
    there = [name for name in files if os.path.lexists(source / name)]
    for name in [*(place.name for place in source.glob("processor[0-9]*")), *there]:
        (target / name).parent.mkdir(exist_ok=True)
        (source / name).rename(target / name)


def _assign(case: Path, weights: Sequence[float]) -> None:
    """Write which cell of the mesh is whose, for decomposePar, in a folder of its own until then.

    Until it is cut so, what the case has tells how it is cut.
    """
    shutil.rmtree(case / _NEW, ignore_errors=True)
    if len(weights) > 1:
        (case / _NEW / "constant").mkdir(parents=True)
        (case / _NEW / "constant" / "polyMesh").symlink_to("../../constant/polyMesh")
        ranks, shares = str(len(weights)), ",".join(map(str, weights))
        cut = ["decompose", "--ranks", ranks, "--weights", shares, _NEW]
        _tool(case, *install_paths.dovetail_command(borrowed_python.own()), *cut)


def _keep_results(case: Path, state: _State, name: str) -> None:
    """Bring times before this one into one piece, in the user's format; their ranks' go away."""
    places = written_times.directories(case, len(state.weights))
    there = {*state.before, *written_times.times(case), name}
    results = [time for time in written_times.times(places[0]) if time not in there]
    whole = [time for time in results if written_times.whole(places, time)]
    if whole:
        _set_control(case, _from(name))
        _tool(case, "reconstructPar", "-time", ",".join(whole))


def _tool(case: Path, *words: str) -> None:
    """Run a program in the case. Raises WorkFailed.

    Its words have a log of their own: its times are not the solver's.
    """
    environment = install_paths.package_environment()
    try:
        with (case / _LOG).open("ab") as log:
            code = subprocess.run(
                words,
                cwd=case,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                check=False,
            ).returncode
    except OSError as error:
        raise WorkFailed(f"{words[0]} cannot be run: {error.strerror}") from None
    if code:
        raise WorkFailed(f"{' '.join(words)} in {case} ended with exit code {code}, see {_LOG}")


# --- Files ---


def _from(name: str) -> dict[str, str]:
    return {"startFrom": "startTime", "startTime": name}


def _set_control(case: Path, entries: dict[str, str]) -> None:
    """Have exactly these entries of ours at the end of controlDict."""
    path = case / "system" / "controlDict"
    if path.parent.resolve() != case.resolve() / "system":
        raise BadInput(f"{path.parent}: is a link, and what it leads to is not the run's to change")
    try:
        text, _, added = path.read_text(errors="replace").partition(_MARK)
        # While it ran its user may have put something at the end, which counts as much.
        text = "\n".join([text.rstrip("\n"), *_OURS.sub("", added).strip("\n").splitlines()])
        changed = path.stat().st_mtime
        lines = [f"{key} {value};" for key, value in {**_ALWAYS, **entries}.items()]
        write_whole(path, "\n".join([text, "", _MARK, *lines, ""]))
        newer = max(time.time(), changed + _NEWER)
        os.utime(path, (newer, newer))
    except OSError as error:
        raise BadInput(f"{path}: cannot be changed: {error.strerror}") from None


def _save(case: Path, state: _State) -> None:
    try:
        write_whole(case / _STATE, json.dumps(asdict(state)))
    except OSError as error:
        raise WorkFailed(f"{case / _STATE}: cannot be written: {error.strerror}") from None


def _load(case: Path) -> _State | None:
    """What `begin` or `go_on` wrote last; None if there is nothing to go on from."""
    try:
        found = json.loads((case / _STATE).read_text())
        return _State(
            tuple(found["weights"]), tuple(found["before"]), found["sure"], found.get("first", 0)
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


# --- As steps of a launch ---


def main() -> None:
    """A step of `Spec` and the ranks' weights, in the case; `go-on` prints how many steps are over.

    What cannot be gone on with may run all the same, so `begin` never fails.
    """
    verb, weights, case = sys.argv[1], [float(word) for word in sys.argv[2:]], Path()
    log = case / ".." / "log"
    try:
        if verb == "halted":
            left = unfinished(case, log)
            with contextlib.suppress(BadInput, WorkFailed):
                stopped(case)
            sys.exit(0 if left else NOTHING_LEFT)
        if verb in ("begin", "halt"):
            begin(case, weights) if verb == "begin" else stop(case)
            return
        name = go_on(case, weights, log)
    except (BadInput, WorkFailed, OSError) as error:
        what = "it cannot go on" if verb == "go-on" else "no checkpoint"
        print(f"{what}: {error}", flush=True)
        sys.exit({"begin": 0, "go-on": NOT_NOW}.get(verb, 1))
    if name is None:
        sys.exit("no time is written whole")
    print(f"it goes on from time {name}; time steps that are over:\n{over(case, name)}", flush=True)
