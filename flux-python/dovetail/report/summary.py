# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a run gained, in figures that say where they come from.

In: a run's `History`, and the measured alternatives where there are any. Out: a `Summary`,
its JSON (`summary.json`) and the table that ends a run.

Invariants: each simulation of the plan is counted exactly once. Every figure is `measured`,
`predicted`, or None with the reason why there is none. Nothing is compared unless the whole
queue is done. Medians of repeats, with the fastest and the slowest beside them.
"""

from __future__ import annotations

import math
import pathlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dovetail.core import eventlog, protocol, units
from dovetail.core.contention import Contention, Hindrance, hindrances
from dovetail.core.decided import Decided
from dovetail.core.throughput_model import Model
from dovetail.core.units import progress
from dovetail.mpi.profile import Efficiency, together
from dovetail.report import alternatives, figures, plan_phases, time_spent
from dovetail.report.alternatives import FEWER, NAIVE, SEQUENTIAL, Alternative
from dovetail.report.build_history import tell
from dovetail.report.figures import FamilyFigures
from dovetail.report.history import UNKNOWN, History, Track
from dovetail.report.plan_phases import PhaseFigures
from dovetail.report.verdict import Figure, Totals, Verdict, judge, ratio

if TYPE_CHECKING:  # only a terminal needs it, and it takes a while to import
    from rich.console import Console, JustifyMethod
    from rich.table import Table
    from rich.text import Text


@dataclass(frozen=True)
class Simulation:
    """One simulation's outcome; `wall_s` and `slowdown` (against alone) are None if unknown.

    `iterations` are what `measure` says, see `protocol.Ranks`; 0 for work.
    It stopped at a checkpoint `checkpoints` times, was started again for another reason `restarts`
    times, and went on `continued` times from what it had written.
    `efficiency` is that of its ranks until the last iteration, `contention` what kept them from
    their cores, and `hindrances` what of that was material; None if unknown. `phases` are those of
    its plan that it was in.
    """

    name: str
    family: str
    ranks: int
    state: str
    reason: str
    iterations: int
    measure: protocol.Measure
    wall_s: float | None
    slowdown: float | None
    restarts: int
    checkpoints: int
    continued: int
    memory_bytes: int
    efficiency: Efficiency | None = None
    contention: Contention | None = None
    hindrances: tuple[Hindrance, ...] = ()
    phases: tuple[PhaseFigures, ...] = ()


@dataclass(frozen=True)
class Summary:
    """A run in figures; `to_json` is what `summary.json` holds.

    `decided` says of each family that may run on several numbers of ranks on which it did, and why,
    see `core.decided`.
    `bound` says of each family on each number of ranks that was measured so whether its ranks
    were bound to cores at the end, and why. `efficiency` is that of all simulations together, each
    with its ranks times its time.
    """

    simulations: tuple[Simulation, ...]
    cores: float
    n_max: int
    totals: Totals
    resizes: int
    resizes_refused: int
    admissions: int
    rollbacks: int
    families: tuple[FamilyFigures, ...]
    verdict: Verdict
    complete: bool
    interrupted: str
    elapsed_s: float
    decided: tuple[str, ...] = ()
    bound: tuple[str, ...] = ()
    efficiency: Efficiency | None = None
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> dict[str, int]:
        """How many simulations ended how."""
        return dict(Counter(one.state for one in self.simulations))

    @property
    def model(self) -> dict[str, Any]:
        """The model of the family that was packed most; nulls where nothing was packed."""
        packed = max(self.families, key=lambda one: one.n_max, default=None)
        return _model(packed.model if packed else None)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON: figures are numbers or null, with `provenance` beside them."""
        data = asdict(self)
        data.update(schema=1, counts=self.counts, **_flat(data.pop("totals")))
        data["model"] = self.model
        for plain_family, own in zip(data["families"], self.families):
            plain_family.update(_flat(plain_family.pop("totals")))
            plain_family["model"] = _model(own.model)
            plain_family["alternatives"] = [one.model_dump() for one in own.alternatives]
        return {key: _plain(value) for key, value in data.items()}


def load(directory: pathlib.Path, held: bytes = b"") -> tuple[Summary, History]:
    """Read a run's directory; `held` is what the log could not write.

    Raises BadInput where its log or alternatives are damaged.
    """
    header, entries = eventlog.scan(directory / "events.jsonl", held)
    history = tell(header, entries)
    versions = {**header.versions, "dovetail": header.dovetail}
    return summarise(history, alternatives.read(directory), versions), history


def summarise(
    history: History,
    measured: Sequence[Alternative] = (),
    versions: Mapping[str, Any] | None = None,
) -> Summary:
    """The summary of a run, beside the alternatives that were measured for it. Pure."""
    families = figures.families(history, measured)
    whole = _whole(families, history)
    alone = {one.name: one.alone.value for one in families}
    marks = Counter(mark.what for mark in history.marks)
    alike = figures.alike(history.tracks, figures.comparable(history, measured))
    return Summary(
        simulations=tuple(
            _simulation(t, alone[t.spec.family], history.end) for t in history.tracks
        ),
        cores=history.cpu / 1000,
        n_max=max((len(spell.running) for spell in history.spells), default=0),
        totals=whole,
        resizes=history.resizes,
        resizes_refused=history.refused,
        admissions=marks["admit"],
        rollbacks=marks["rollback"],
        families=families,
        verdict=judge(whole, alike, len(history.tracks)),
        complete=history.complete,
        interrupted=history.interrupted,
        elapsed_s=history.end,
        decided=_decided(history),
        bound=_bound(history),
        efficiency=_efficiency(history.tracks),
        versions={key: str(value) for key, value in (versions or {}).items()},
    )


def _decided(history: History) -> tuple[str, ...]:
    """On how many ranks those ran that might have run on several, and why."""
    choices = Decided()
    for mark in history.marks:
        if mark.what == "choice":
            choices.take(mark.data)
    family_of = {track.spec.name: track.spec.family for track in history.tracks}
    at_once: Counter[str] = Counter()
    for spell in history.spells:
        at_once |= Counter(family_of[name] for name in spell.running)
    ran: dict[str, Counter[int]] = {}
    for track in history.tracks:
        if track.attempts:
            ran.setdefault(track.spec.family, Counter())[track.spec.ranks] += 1
    return tuple(choices.lines(at_once, ran))


def _bound(history: History) -> tuple[str, ...]:
    """What was decided last of binding each family on each number of ranks."""
    last = {
        (mark.data["family"], mark.data["ranks"]): mark.why
        for mark in history.marks
        if mark.what == "bind"
    }
    return tuple(last.values())


def _efficiency(tracks: Iterable[Track]) -> Efficiency | None:
    """Of these together; None if nothing is known of any."""
    known = [(t.useful, tuple(map(sum, zip(t.useful, t.mpi)))) for t in tracks if t.useful]
    return together(known) if known else None


def _limited(spec: protocol.Spec) -> bool:
    return spec.limit > 0 or any(phase.limit > 0 for phase in spec.phases)


def _simulation(track: Track, alone: float | None, end: float) -> Simulation:
    slowdown = None
    count, seconds = track.stepping
    if alone and count:
        slowdown = seconds / count / alone
    return Simulation(
        name=track.spec.name,
        family=track.spec.family,
        ranks=track.spec.ranks,
        state=track.state,
        reason=track.reason,
        iterations=track.iterations,
        measure=track.measure,
        wall_s=track.wall,
        slowdown=slowdown,
        restarts=sum(not attempt.halted for attempt in track.attempts[:-1]),
        checkpoints=sum(attempt.halted for attempt in track.attempts),
        continued=sum(attempt.over > 0 for attempt in track.attempts),
        memory_bytes=track.memory,
        efficiency=_efficiency([track]),
        contention=track.contention if track.contention != UNKNOWN else None,
        hindrances=tuple(hindrances(track.contention, _limited(track.spec))),
        phases=plan_phases.figures(track, end),
    )


def _whole(families: Sequence[FamilyFigures], history: History) -> Totals:
    """The whole queue: this run's makespan, and the families' figures, added up where they may."""
    attempts = [attempt for track in history.tracks for attempt in track.attempts]
    undone = sum(track.state != "done" for track in history.tracks)
    makespan = Figure(how=f"{undone} of {len(history.tracks)} simulations are not done")
    if not undone and any(one.unseen for one in attempts):
        makespan = figures.UNSEEN
    elif not undone and attempts:
        how = "this run, from first launch to last end"
        # The log may go on after that: a run that is over can be resumed.
        last = max(history.end if one.end is None else one.end for one in attempts)
        makespan = Figure(last - min(one.launch for one in attempts), "measured", how)
    if len(families) == 1:
        return families[0].totals
    sums = {
        name: _sum([getattr(one.totals, name) for one in families])
        for name in ("sequential_s", "naive_s", "fewer_ranks_s", "bound_s")
    }
    # Of ways in which simulations share the cores, those of other families would share them, too.
    single = next((one.name for one in families if one.simulations == 1), None)
    if single is not None and sums["naive_s"].value is not None:
        how = f"measured for each family alone, and {single} is a single simulation"
        sums["naive_s"] = Figure(how=how)
    if not undone and families and (single or sums["fewer_ranks_s"].source != "measured"):
        sums["fewer_ranks_s"] = figures.fewer_ranks(history)
    gain, bound = ratio(sums["sequential_s"], makespan), ratio(sums["bound_s"], makespan)
    return Totals(makespan_s=makespan, throughput_gain=gain, bound_ratio=bound, **sums)


def _sum(parts: Sequence[Figure]) -> Figure:
    """Families one after the other; one that is not known leaves the sum unknown."""
    values = [one.value for one in parts if one.value is not None]
    if len(values) < len(parts) or not parts:
        return Figure(how=next((one.how for one in parts if one.value is None), "nothing ran"))
    source = "measured" if all(one.source == "measured" for one in parts) else "predicted"
    spreads = [one.spread for one in parts if one.spread is not None]
    spread = None
    if len(spreads) == len(parts):
        spread = (sum(low for low, _ in spreads), sum(high for _, high in spreads))
    return Figure(
        sum(values), source, f"sum over {len(parts)} families, one after the other", spread
    )


def _flat(totals: Mapping[str, Any]) -> dict[str, Any]:
    flat = {name: figure["value"] for name, figure in totals.items()}
    flat["provenance"] = {
        name: {key: figure[key] for key in ("source", "how", "spread")}
        for name, figure in totals.items()
    }
    return flat


def _model(model: Model | None) -> dict[str, Any]:
    """Beta with its standard error, and `error`: root mean square, relative, at the points."""
    if model is None:
        return {"beta": None, "beta_error": None, "error": None, "points": 0}
    return {
        "beta": model.beta,
        "beta_error": model.beta_error,
        "error": model.rms_error,
        "points": model.points,
    }


def _plain(value: object) -> object:
    """JSON has no arrays of numpy, no tuples and no infinities."""
    if isinstance(value, np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, (list, tuple, frozenset)):
        return [_plain(one) for one in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# --- for the terminal ---


def show(summary: Summary, console: Console) -> None:
    """Print the table that ends a run, and under it the verdicts in words."""
    from rich.table import Table

    table = Table(title="Simulations", title_justify="left")
    headings = ["simulation", "ranks", "state", "iterations", "wall s", "slowdown", "restarts"]
    stopped = any(one.checkpoints for one in summary.simulations)
    for heading in [*headings, *["checkpoints"] * stopped]:
        table.add_column(
            heading,
            justify="left" if heading in ("simulation", "state") else "right",
            overflow="fold",  # two long names may differ in their last letters alone
        )
    for one in summary.simulations[:SHOWN]:
        table.add_row(
            printable(one.name),
            str(one.ranks),
            one.state,
            progress(one.iterations, one.measure),
            number(one.wall_s),
            number(one.slowdown),
            str(one.restarts),
            *[str(one.checkpoints)] * stopped,
        )
    console.print(table)
    if len(summary.simulations) > SHOWN:
        console.print(f"{len(summary.simulations) - SHOWN} more are in summary.json")
    _show_time(summary, console)
    _show_phases(summary, console)
    table = Table(title="How long the queue takes, in seconds", title_justify="left")
    for heading in ("", *HEADINGS.values()):
        table.add_column(heading, justify="left" if not heading else "right", overflow="fold")
    rows = [(one.name, one.totals) for one in summary.families]
    if len(rows) > 1:
        rows.append(("all", summary.totals))
    for name, totals in rows:
        table.add_row(printable(name), *(figure(getattr(totals, key)) for key in HEADINGS))
    console.print(table)
    console.print(
        "~ is predicted, the rest is measured; - was not measured. Gain is throughput against one "
        "after the other; of bound is 1.00 where the cores do nothing but the ranks' own work.",
        style="dim",
    )
    if summary.interrupted:
        console.print(printable(f"The run was interrupted: {summary.interrupted}"))
    for words in (*summary.decided, *summary.bound):
        console.print(printable(words))
    for words in reasons(summary):
        console.print(printable(words))
    for name, words in verdicts(summary):
        console.print(printable(f"{name}: {words}"))


def _show_time(summary: Summary, console: Console) -> None:
    """Print where the simulations' time went, if that is known of any."""
    headings, rows = time_spent.table(summary.simulations[:SHOWN], summary.efficiency)
    if not headings:
        return
    table = _frameless("Where their time went")
    for heading in headings:
        justify: JustifyMethod = "left" if heading == headings[0] else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows:
        table.add_row(*map(printable, row))
    console.print(table)
    for words in time_spent.sentences(summary.simulations):
        console.print(printable(words))


def _frameless(title: str) -> Table:
    """A table of many columns, which shall fit into 80."""
    from rich.table import Table

    return Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0))


def _show_phases(summary: Summary, console: Console) -> None:
    """Print what was done in the phases of the plan, if it has any."""
    rows = plan_phases.table((one.name, one.phases) for one in summary.simulations)
    if not rows:
        return
    table = _frameless("Phases of the plan")
    for heading in plan_phases.HEADINGS:
        justify: JustifyMethod = "left" if heading == "simulation" else "right"
        table.add_column(heading, justify=justify, overflow="fold")
    for row in rows[:SHOWN]:
        table.add_row(*map(printable, row))
    console.print(table)
    if len(rows) > SHOWN:
        console.print(f"{len(rows) - SHOWN} more are in summary.json")


def reasons(summary: Summary) -> list[str]:
    """Why simulations ended as they did, where there is a reason; a line for each that is unlike.

    A table has no room for them: a program's last words may be long.
    """
    alike: dict[tuple[str, str], list[str]] = {}
    for one in summary.simulations:
        if one.reason:
            alike.setdefault((one.state, one.reason), []).append(one.name)
    return [
        f"{', '.join(names[:NAMED])}{f' and {len(names) - NAMED} more' if names[NAMED:] else ''} "
        f"{state}: {reason}"
        for (state, reason), names in alike.items()
    ]


def verdicts(summary: Summary) -> list[tuple[str, str]]:
    """Whose and what: the whole queue's first, then the families' that can be told apart."""
    families = [(one.name, one.verdict.words) for one in summary.families if one.verdict.best]
    whole = [("all", summary.verdict.words)] if len(summary.families) > 1 else []
    return whole + families or [(one.name, one.verdict.words) for one in summary.families]


SHOWN = 40
NAMED = 3
"""Simulations that one line names."""
HEADINGS = {
    "makespan_s": "Dovetail",
    "sequential_s": SEQUENTIAL,
    "naive_s": NAIVE,
    "fewer_ranks_s": FEWER,
    "throughput_gain": "gain",
    "bound_ratio": "of bound",
}


def number(value: float | None, digits: int = 2) -> str:
    """A number for a table; a dash where there is none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def figure(one: Figure) -> str:
    """A figure for a table: predicted ones carry a tilde."""
    return ("~" if one.source == "predicted" else "") + number(one.value)


def printable(words: str) -> Text:
    """Text from a log, without the markup and the control characters it may hold."""
    from rich.text import Text

    return Text(units.printable(words))
