# SPDX-License-Identifier: LGPL-3.0-or-later
"""Tells a run's history from its event log.

In: a log's header, and its events and actions in order. Out: a `History`.

Invariants: what became of a simulation is what the controller said of it (`Ended`, `Requeued`);
nothing is decided again. Pure, one pass, and memory in proportion to simulations and decisions,
not to samples. A simulation has one track however often it was started. Rates come only from
whole iterations that began and ended within one spell, so no figure mixes two situations. An
action has no time of its own; it is dated by the event before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from dovetail.core import protocol
from dovetail.core.errors import BadInput
from dovetail.core.eventlog import Entry, Header, Resumed
from dovetail.report.history import UNKNOWN, Array, Attempt, History, Load, Mark, Spell, Track

KINDS = {"off": "spinning", "yield": "yielding", "doorbell": "blocking"}


def tell(header: Header, log: Iterable[Entry]) -> History:
    """The history of a run, from its log's header and entries in order.

    Raises BadInput where the header lacks one of the run's settings that are needed.
    """
    teller = _Teller(header)
    for entry in log:
        teller.take(entry)
    return teller.history()


class _Teller:
    """The state of the one pass over the log."""

    def __init__(self, header: Header) -> None:
        capacity = header.capacity
        self.warmup = _setting(header, "warmup")  # first iterations that no rate is taken from
        self.jump = _setting(header, "jump")  # seconds beyond which the clock was set
        self.now = 0.0
        self.jumped: float | None = None
        self.cpu = capacity.cpu
        self.tracks = {spec.name: Track(spec) for spec in header.specs}
        self.marks: list[Mark] = []
        self.spells: list[Spell] = []
        self.sums: dict[tuple[str, str, int], tuple[float, Array]] = {}  # by kind and ranks
        self.shares: dict[str, protocol.Share] = {}
        self.pending: list[Mapping[str, protocol.Share]] = []
        self.running: dict[str, None] = {}
        self.last: dict[str, tuple[protocol.Ranks, int]] = {}
        self.steps: dict[str, tuple[float, float]] = defaultdict(lambda: (0.0, 0.0))
        self.spell_start = 0.0
        self.phase: dict[str, tuple[str, float]] = {}
        self.suspended: dict[str, float] = {}
        self.profiled: set[str] = set()
        self.trials: set[str] = set()
        self.kept: set[tuple[str, ...]] = set()
        self.cuts: set[tuple[str, int]] = set()  # families, on so many ranks, that are cut anew
        self.interrupted = ""
        self.resizes = self.refused = 0

    def take(self, entry: Entry) -> None:
        """One more entry; those about simulations that the plan does not have are left out."""
        if not isinstance(entry, protocol.ACTIONS):
            self._clock(entry.t)
        name = getattr(entry, "name", None)
        if name is not None and name not in self.tracks:
            return
        getattr(self, "_" + type(entry).__name__.lower())(entry)

    def _clock(self, t: float) -> None:
        """Go on to `t` of the log's clock; like the controller, let no time pass in a jump."""
        step = t - self.now if self.jumped is None else t - self.now - self.jumped
        if not 0 <= step <= self.jump and (self.now or step < 0):
            self._turn()
            self.last.clear()
            self.jumped = t - self.now
            if step > 0:
                self._stood(self.tracks)
        else:
            self.now += step

    # --- actions ---

    def _launch(self, action: protocol.Launch) -> None:
        track = self.tracks[action.name]
        ranks = len(action.share.requests)
        recut = (track.spec.family, ranks) in self.cuts
        self.tracks[action.name] = replace(
            track,
            spec=track.spec.on(ranks),
            attempts=(*track.attempts, Attempt(self.now, ranks, recut=recut)),
            state="unfinished",
            ended=False,
            reason="",
            iterations=0,
            stepping=(0.0, 0.0),
            useful=(),
            mpi=(),
            contention=UNKNOWN,
            turns=(),
        )
        self.shares[action.name] = action.share
        self.last.pop(action.name, None)

    def _resize(self, action: protocol.Resize) -> None:
        self.pending.append(action.shares)

    def _stop(self, action: protocol.Stop) -> None:
        self.marks.append(Mark(self.now, "stop", action.why, (action.name,)))

    def _checkpoint(self, action: protocol.Checkpoint) -> None:
        self.marks.append(Mark(self.now, "checkpoint", action.why, (action.name,)))

    def _requeued(self, action: protocol.Requeued) -> None:
        self._died(action.name, action.why)
        track = self.tracks[action.name]
        why = f"put back into the queue: {action.why}" if track.attempts else ""
        kept = track.iterations if track.attempts and track.attempts[-1].halted else 0
        self.tracks[action.name] = replace(
            track,
            state="not started",
            ended=False,
            reason=why,
            iterations=kept,
            stepping=(0.0, 0.0),
        )

    def _ended(self, action: protocol.Ended) -> None:
        self._died(action.name, action.reason)
        track = self.tracks[action.name]
        self.tracks[action.name] = replace(
            track, state=action.state, ended=True, reason=action.reason
        )

    def _died(self, name: str, why: str) -> None:
        """Close an attempt of which no end was reported: the run died, and it with the run."""
        attempts = self.tracks[name].attempts
        if attempts and attempts[-1].end is None:
            self._close(name, -1, why)

    def _note(self, action: protocol.Note) -> None:
        names = self._names(action.data)
        beside = action.data.get("n", 2) != 1
        if action.what == "admit" and not beside:
            return  # it has the machine to itself: nothing was decided
        self.marks.append(Mark(self.now, action.what, action.why, names, action.data))
        self._cut(self.marks[-1])
        if action.what == "phase":
            number, over = action.data.get("phase"), action.data.get("iterations")
            if isinstance(number, int) and isinstance(over, int):
                for name in names:
                    turns = (*self.tracks[name].turns, (number, self.now, over))
                    self.tracks[name] = replace(self.tracks[name], turns=turns)
        if action.what == "profile" and "family" in action.data:
            self.profiled.add(str(action.data["family"]))
            for name, (letter, _) in list(self.phase.items()):
                if letter == "A" and self.tracks[name].spec.family in self.profiled:
                    self._enter(name, "D")
        elif action.what == "admit":
            self.trials.update(names)
            for name in set(names) & self.phase.keys():
                self._enter(name, self._letter(name))
        elif action.what in ("keep", "rollback"):
            if action.what == "keep":
                self.kept.add(self._mix(self.running))
            for name in self.trials & self.phase.keys():
                self._enter(name, "D")
            self.trials.clear()

    # --- events ---

    def _tick(self, event: protocol.Tick) -> None:
        pass

    def _delayed(self, event: protocol.Delayed) -> None:
        pass  # the controller's note on it says the same

    def _placed(self, event: protocol.Placed) -> None:
        pass  # Flux's jobs tell where; a report compares times

    def _started(self, event: protocol.Started) -> None:
        self._attempt(event.name, {"start": self.now, "over": event.iterations})
        self.tracks[event.name] = replace(self.tracks[event.name], iterations=event.iterations)
        self._turn()
        self.running[event.name] = None
        self._enter(event.name, self._letter(event.name))

    def _sampled(self, event: protocol.Sampled) -> None:
        before, spell = self.last.get(event.name, (None, -1))
        self.last[event.name] = (event.ranks, len(self.spells))
        track = self.tracks[event.name]
        now = event.ranks
        over = track.attempts[-1].over if track.attempts else 0
        self.tracks[event.name] = replace(
            track,
            iterations=max(track.iterations, over + min(now.iterations, default=0)),
            measure=now.measure if any(now.iterations) or not track.iterations else track.measure,
            memory=max(track.memory, sum(now.memory)),
            useful=now.useful,
            mpi=now.mpi,
        )
        if before is None or len(before.iterations) != len(now.iterations):
            return
        if min(before.iterations, default=0) == 0:
            return  # a rank that has ended no iteration has no stamp either: it reads as 0
        steps = np.subtract(now.iterations, before.iterations).astype(np.float64)
        if not len(steps) or steps.min() <= 0:
            # Nothing whole has happened yet: measure from the older sample next time.
            if not len(steps) or steps.min() == 0:
                self.last[event.name] = (before, spell)
            return
        seconds = float(np.mean(np.subtract(now.stamp, before.stamp)))
        if seconds <= 0.0:
            return  # the clock of its node is better known than it was
        count = float(steps.mean())
        track = self.tracks[event.name]
        done, spent = track.stepping
        self.tracks[event.name] = replace(track, stepping=(done + count, spent + seconds))
        warm = min(before.iterations) >= self.warmup
        since = self.spell_start + (self.jumped or 0.0)
        if warm and spell == len(self.spells) and min(before.stamp) >= since:
            done, spent = self.steps[event.name]
            self.steps[event.name] = (done + count, spent + seconds)
            self._add_load(event.name, before, now, count)

    def _counted(self, event: protocol.Counted) -> None:
        track = self.tracks[event.name]
        self.tracks[event.name] = replace(track, contention=event.contention)

    def _add_load(
        self, name: str, before: protocol.Ranks, now: protocol.Ranks, count: float
    ) -> None:
        """Add what the ranks did between two samples to the sums of the family on as many."""
        mode = self.shares[name].wait.mode
        kind = "packed" if len(self.running) > 1 else KINDS.get(mode, "spinning")
        delta = np.array([np.subtract(getattr(now, key), getattr(before, key)) for key in _LOADS])
        key = (self.tracks[name].spec.family, kind, delta.shape[1])
        iterations, sums = self.sums.get(key, (0.0, np.zeros_like(delta)))
        self.sums[key] = (iterations + count, sums + delta)

    def _finished(self, event: protocol.Finished) -> None:
        self._close(event.name, event.code, event.reason)
        self._attempt(event.name, {"halted": event.cause is protocol.Cause.CHECKPOINTED})

    def _resized(self, event: protocol.Resized) -> None:
        shares = self.pending.pop(0) if self.pending else {}
        names = tuple(name for name in event.names if name in self.tracks)
        known = {name: self._unbound(name) for name in shares}
        binds = bool(shares) and all(replace(s, bound=False) == known[n] for n, s in shares.items())
        if event.refused:
            if not binds:  # which is another decision's mark
                self.refused += 1
                self.marks.append(Mark(self.now, "refused", event.refused, names))
            return
        if not binds:
            self._turn()
        changed = False
        for name, share in shares.items():
            if name not in self.tracks or name not in self.shares:
                continue
            moved = share.requests != self.shares[name].requests
            # Standing still takes the requests away, and going on gives them back.
            changed = changed or (moved and not share.suspended | self.shares[name].suspended)
            self.shares[name] = share
            self._suspend(name, share.suspended)
        self.resizes += changed
        if changed:
            self.marks.append(Mark(self.now, "resize", "requests follow the load", names))

    def _unbound(self, name: str) -> protocol.Share | None:
        """Its share, whether bound to cores or not: measuring that is no other way to run."""
        return replace(self.shares[name], bound=False) if name in self.shares else None

    def _capacitychanged(self, event: protocol.CapacityChanged) -> None:
        self._turn()
        self.cpu = max(self.cpu, event.capacity.cpu)
        why = f"{event.capacity.cpu / 1000:g} cores now"
        self.marks.append(Mark(self.now, "capacity", why))

    def _unwanted(self, event: protocol.Unwanted) -> None:
        """Its Stop follows, which tells."""

    def _interrupted(self, event: protocol.Interrupted) -> None:
        self.interrupted = event.reason or "interrupted"
        self.marks.append(Mark(self.now, "interrupt", self.interrupted))

    def _resumed(self, event: Resumed) -> None:
        """The loop was killed; what the controller then queued again follows as Requeued."""
        for name in event.alive:
            self.last.pop(name, None)
        self._stood(event.alive)
        self.interrupted = ""
        self.pending.clear()
        self.cpu = max(self.cpu, event.capacity.cpu)
        why = "the run was killed and resumed"
        self.marks.append(Mark(self.now, "resume", why))

    # --- helpers ---

    def _stood(self, names: Iterable[str]) -> None:
        """The clock stood, and those of these that had not ended went on meanwhile."""
        for name in names:
            track = self.tracks.get(name)
            if track is not None and track.attempts and track.attempts[-1].end is None:
                self._attempt(name, {"unseen": True})

    def _cut(self, mark: Mark) -> None:
        """Some families may be cut anew from now on, and what their ranks did tells no more."""
        for family in {self.tracks[name].spec.family for name in mark.names} if mark.cut else ():
            self.cuts.add((family, len(mark.cut)))
            for key in [key for key in self.sums if (key[0], key[2]) == (family, len(mark.cut))]:
                del self.sums[key]
        if mark.data.get("uncut"):
            taken_back = mark.data.get("family"), mark.data.get("ranks")
            self.cuts = {cut for cut in self.cuts if cut != taken_back}

    def _mix(self, names: Iterable[str]) -> tuple[str, ...]:
        """The families of some simulations, as often as they are there."""
        return tuple(sorted(self.tracks[name].spec.family for name in names))

    def _letter(self, name: str) -> str:
        """The phase in which a simulation begins, or goes on, beside those that run."""
        if self.tracks[name].spec.family not in self.profiled:
            return "A"
        together = {*self.running, name}
        ranks = sum(self.tracks[one].spec.ranks for one in together)
        # A mix is judged once, and not at all where each rank has a core.
        judged = self._mix(together) in self.kept or 1000 * ranks <= self.cpu
        return "D" if judged or name not in self.trials else "C"

    def _names(self, data: Mapping[str, Any]) -> tuple[str, ...]:
        """The simulations that a note is about, by name or by family."""
        family = data.get("family")
        found = [data.get(key) for key in ("name", "simulation")]
        many = data.get("names", ())
        found += many if isinstance(many, (list, tuple)) else []
        named = tuple(n for n in found if isinstance(n, str) and n in self.tracks)
        if named or not isinstance(family, str):
            return named
        return tuple(n for n in self.phase if self.tracks[n].spec.family == family)

    def _attempt(self, name: str, changes: Mapping[str, Any]) -> None:
        track = self.tracks[name]
        if track.attempts:
            last = replace(track.attempts[-1], **changes)
            self.tracks[name] = replace(track, attempts=(*track.attempts[:-1], last))

    def _close(self, name: str, code: int, reason: str) -> None:
        """An attempt is over; what becomes of the simulation is the controller's to say."""
        self._turn()
        self._enter(name, "")
        self._suspend(name, False)
        self.running.pop(name, None)
        self.trials.discard(name)
        self._attempt(name, {"end": self.now, "code": code, "reason": reason})

    def _enter(self, name: str, letter: str) -> None:
        """Close the simulation's phase and, unless `letter` is empty, open the next."""
        before = self.phase.pop(name, None)
        if before is not None and self.now > before[1]:
            track = self.tracks[name]
            self.tracks[name] = replace(track, phases=(*track.phases, (*before, self.now)))
        if letter:
            self.phase[name] = (letter, self.now)

    def _suspend(self, name: str, suspended: bool) -> None:
        since = self.suspended.pop(name, None)
        if since is not None and not suspended:
            track = self.tracks[name]
            self.tracks[name] = replace(track, suspended=(*track.suspended, (since, self.now)))
        elif suspended:
            self.suspended[name] = self.now if since is None else since
            self.running.pop(name, None)
            return
        if since is not None and not suspended and name in self.phase:
            self.running[name] = None

    def _turn(self) -> None:
        """A new spell begins: who runs, or under what share, is about to change."""
        wait = frozenset(self.shares[name].wait.mode for name in self.running)
        recut = any(self.tracks[name].attempts[-1].recut for name in self.running)
        steps = dict(self.steps)
        spell = Spell(self.spell_start, self.now, tuple(self.running), wait, steps, recut)
        if spell.end > spell.start:
            self.spells.append(spell)
        self.spell_start = self.now
        self.steps.clear()

    def history(self) -> History:
        """What was told; simulations still running are closed where the log ends."""
        self._turn()
        for name in list(self.suspended):
            self._suspend(name, False)
        for name in list(self.phase):
            self._enter(name, "")
        for name, track in self.tracks.items():
            if track.state == "not started" and not track.reason:
                why = "its turn had not come where the log ends"
                self.tracks[name] = replace(track, reason=why)
            if track.state == "unfinished":
                why = f"still running where the log ends, at {self.now:.1f} s"
                if track.attempts[-1].end is not None:
                    why = "it ended where the log ends"
                self.tracks[name] = replace(track, reason=why)
        loads = tuple(
            Load(family, kind, count, *(np.maximum(row, 0) / count for row in sums))
            for (family, kind, _), (count, sums) in self.sums.items()
            if count > 0
        )
        return History(
            tuple(self.tracks.values()),
            tuple(self.marks),
            tuple(self.spells),
            loads,
            self.cpu,
            self.now,
            self.interrupted,
            self.resizes,
            self.refused,
        )


def _setting(header: Header, name: str) -> float:
    """One of the run's own settings, a number."""
    value = header.settings.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise BadInput(f"the event log's header has no number as the setting {name!r}")
    return float(value)


_LOADS = ("cpu", "useful", "mpi")
