# SPDX-License-Identifier: LGPL-3.0-or-later
"""The plans that were submitted: one runs at a time, the others are pending.

A run is one `dovetail run`, a process in the control slice, which keeps the pending ones too.
Pure: what shall happen comes back as effects. Invariant: a run ends once, and everybody who
waits for it is told.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from dovetail.flux.instance.effects import INVALID, NOENT, Answer, Effect, Key, Refuse
from dovetail.flux.instance.messages import ChooseRuns, SubmitPlan
from dovetail.flux.instance.run import Run, RunState


class Runs:
    """All runs of the instance."""

    def __init__(self) -> None:
        self.all: dict[int, Run] = {}
        self.untold: dict[int, SubmitPlan] = {}  # plans that the control slice has not got yet
        self.waiting: dict[Key, tuple[int, ...]] = {}

    def submit(self, key: Key, plan: SubmitPlan) -> Iterator[Effect]:
        """Queue a plan, in a directory that no other run is to write to."""
        for run in self.all.values():
            if run.output == plan.output and not run.state.ended:
                yield Refuse(key, INVALID, f"run {run.number} writes to {plan.output}")
                return
        number = max(self.all, default=0) + 1
        self.all[number] = Run(number, plan.plan, plan.output, plan.cwd)
        self.untold[number] = plan
        yield Answer(key, {"run": number})

    def take_untold(self) -> Mapping[int, SubmitPlan]:
        """The plans that the control slice was not told of, by the numbers of their runs."""
        untold, self.untold = self.untold, {}
        return untold

    def next(self) -> int:
        """The run to start now, or 0; it counts as running from here on."""
        if any(run.state.has_process for run in self.all.values()):
            return 0
        number = next((n for n, run in self.all.items() if run.state is RunState.PENDING), 0)
        if number:
            self.all[number].start()
        return number

    def adopt(self, known: Iterable[Run]) -> None:
        """Take over what the control slice knows, after the module was loaded anew."""
        for one in known:
            self.all.setdefault(one.number, one)

    def ended(
        self, number: int, code: int, reason: str, *, reported: bool = False
    ) -> Iterator[Effect]:
        """A run's process ended."""
        run = self.all.get(number)
        if run is not None:
            run.end(code, reason, reported=reported)
            yield from self.settle()

    def report_written(self, number: int) -> None:
        """A run wrote its report as all ended; its own end is no matter any more."""
        if number in self.all:
            self.all[number].report_written()

    def end_all(self, reason: str) -> Iterator[Effect]:
        """Nothing can run any more."""
        for run in self.all.values():
            run.lose(reason)
        yield from self.settle()

    def cancel(self, numbers: Iterable[int]) -> list[int]:
        """Mark runs as unwanted; returns those of which the control slice must be told."""
        told = []
        for number in numbers:
            run = self.all[number]
            if not run.state.ended and self.untold.pop(number, None) is None:
                told.append(number)
            run.cancel()
        return told

    def chosen(self, asked: ChooseRuns) -> tuple[tuple[int, ...], str]:
        """The runs that a request names (all, if none), or what is wrong with it."""
        if asked.runs is None:
            return tuple(self.all), ""
        unknown = [number for number in asked.runs if number not in self.all]
        if unknown:
            return (), f"there is no run {min(unknown)}; see `flux dovetail status`"
        return asked.runs, ""

    def wait(self, key: Key, asked: ChooseRuns) -> Iterator[Effect]:
        """Answer when the named runs have ended."""
        numbers, wrong = self.chosen(asked)
        if wrong:
            yield Refuse(key, NOENT, wrong)
            return
        self.waiting[key] = numbers
        yield from self.settle()

    def drop(self, gone: Collection[Key]) -> None:
        """Forget the requests whose sender is gone."""
        for key in gone:
            self.waiting.pop(key, None)

    def settle(self) -> Iterator[Effect]:
        """Answer those whose runs have all ended."""
        for key, numbers in list(self.waiting.items()):
            runs = [self.all[number] for number in numbers]
            if all(run.state.ended for run in runs):
                del self.waiting[key]
                yield Answer(key, {"runs": [run.plain() for run in runs]})
