# SPDX-License-Identifier: LGPL-3.0-or-later
"""The state of Dovetail in one Flux instance: its slices, and what follows.

Inputs: requests, and news of slice jobs and of their agents. Outputs: effects, as iterators
that must be run to their end. Pure: no clock, no Flux, no files. Invariants: slice 0 holds the
control plane; a slice that ends unasked is replaced if it had been ready, unless the user
cancelled it; nothing starts once the end has begun; when it can never be up (again), all that
is left ends and everybody who waits is told why; the control slice keeps what another one must
know that comes after us.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

from dovetail.core.messages import encode
from dovetail.flux.instance import messages
from dovetail.flux.instance.effects import Answer, Cancel, Effect, Key, Log, Submit, Sweep, Watch
from dovetail.flux.instance.pending import DOWN, PendingRequests, Situation
from dovetail.flux.instance.runs import Runs
from dovetail.flux.instance.simulations import Simulations
from dovetail.flux.instance.slices import Left, Slice, Slices, SliceState


class Instance:
    """Slices and requests of one Flux instance.

    `nodes` are wanted at first, `executor` is where simulations run, and `up_timeout` seconds are
    what Kubernetes has to come up; somebody else looks at the clock.
    """

    def __init__(self, nodes: int, executor: str, up_timeout: float) -> None:
        self.executor, self.up_timeout = executor, up_timeout
        self.wanted = nodes
        self.room = 0  # for so many slices, however idle all else is; 0 is not known
        self.slices = Slices()
        self.agents: dict[Key, int] = {}  # the slices of those that listen for orders
        self.last = 0  # highest slice number so far
        self.lost: list[str] = []
        self.runs = Runs()
        self.simulations = Simulations()
        self.pending = PendingRequests()
        self.failure = ""  # why it can never be up (again)
        self.followed: set[int] = set()  # jobs of slices
        self.begun = False
        self.restored = False  # what was before us
        self.held: dict[Key, Callable[[], Iterator[Effect]]] = {}  # requests, until it does
        self.kept = messages.Kept()  # by the control slice
        self.ending = False
        self.overdue = False  # the time to end was over, and slices were left
        self.was_up = False
        self.kubeconfig = ""
        self.leaving: set[str] = set()  # nodes that the control slice removes from Kubernetes

    @property
    def phase(self) -> str:
        """starting, up, degraded (was up, a slice is missing), failed, ending or down."""
        if self.ending:
            return "ending" if self.slices or not self.begun else "down"
        if self.failure:
            return "failed"
        if self.control_ready and self.ready_nodes >= self.wanted:
            return "up"
        return "degraded" if self.was_up else "starting"

    @property
    def control_ready(self) -> bool:
        """Whether somebody can be asked, or told to do something."""
        control = self.slices.get(0)
        return control is not None and control.state is SliceState.READY

    @property
    def ready_nodes(self) -> int:
        """Nodes that are part of Kubernetes now."""
        return self.slices.count(SliceState.READY)

    @property
    def usable(self) -> bool:
        """Whether simulations can run: what is up is used, also where more is wanted."""
        return self.phase == "up" or (self.phase == "degraded" and self.control_ready)

    def status(self) -> dict[str, Any]:
        """All that a user may see."""
        return {
            "phase": self.phase, "reason": self.failure,
            "wanted": self.wanted, "ready": self.ready_nodes,
            "slices": [self.slices[number].plain() for number in sorted(self.slices)],
            "lost": self.lost[-20:], "runs": [run.plain() for run in self.runs.all.values()],
        }  # fmt: skip

    # --- The life of a slice ---

    def start(self, adopted: Mapping[int, int]) -> Iterator[Effect]:
        """Submit all slices, or take over those that run (number: job) after a reload."""
        self.begun = True
        for number, job in adopted.items():
            self.slices.add(number, job)
        self.last = max(adopted, default=0)
        if self.ending or self.failure:  # already, before we knew what there is
            yield from self.end_slices()
        elif 0 in adopted:
            yield from self.watch(self.slices[0])  # its agent tells the rest
        elif adopted:
            yield from self.fail("the control slice ended while the module was not loaded")
        else:
            self.restored = True
            for number in range(self.wanted):
                yield self.add(number)
        yield from self.settle()

    def learn(self, kept: messages.Kept) -> Iterator[Effect]:
        """Go on from what the control slice kept; slices that ended meanwhile are seen to end."""
        self.restored = True
        self.wanted = self.wanted if kept.wanted is None else kept.wanted
        self.was_up = self.was_up if kept.up is None else kept.up
        self.lost = self.lost if kept.lost is None else [*kept.lost]
        for old in kept.slices:
            job_runs = old.number in self.slices
            one = self.slices[old.number] if job_runs else self.slices.add(old.number, old.job)
            one.recalled(old, job_runs=job_runs)
            if old.state is SliceState.ENDING:
                yield from self.end(one)
        self.last = max([self.last, *self.slices])
        for one in list(self.slices.values()):
            yield from self.watch(one)

    def watch(self, one: Slice) -> Iterator[Effect]:
        """Follow a slice's job, once."""
        if one.job and one.job not in self.followed:
            self.followed.add(one.job)
            yield Watch(one.number, one.job)

    def add(self, number: int) -> Effect:
        """One more slice."""
        self.last = max(self.last, number)
        self.slices.add(number)
        return Submit(number)

    def submitted(self, number: int, job: int, why: str = "") -> Iterator[Effect]:
        """Flux took the job, or did not (`job` is 0)."""
        one = self.slices[number]
        one.submitted(job)
        if not job:
            yield from self.cleaned(number, why)
            return
        yield from self.watch(one)
        if one.state is SliceState.ENDING:
            yield Cancel(job, "no longer wanted")
        yield from self.settle()

    def ready(self, number: int, news: messages.NodeReady) -> Iterator[Effect]:
        """A slice's node is ready in Kubernetes."""
        one = self.slices.get(number)
        if one is None or one.state is SliceState.ENDING:
            return
        one.became_ready(news.node, news.cpus)
        if number == 0:
            self.kubeconfig = news.kubeconfig
        yield from self.settle()

    def excepted(self, number: int, kind: str, note: str) -> Iterator[Effect]:
        """A slice's job has a fatal exception."""
        one = self.slices.get(number)
        if one is not None and one.state is not SliceState.ENDING:
            if kind == "cancel":
                one.cancelled()
            one.keep_reason(f"{kind}: {note}".rstrip(": "))
            if number == 0:  # nothing brings it back, and what is told now must be true
                yield from self.unasked(one, one.reason)
        yield from self.settle()

    def finished(self, number: int, status: int) -> Iterator[Effect]:
        """A slice's processes have ended, with this wait status."""
        one = self.slices.get(number)
        if one is None:
            return
        if status:
            signal, code = status & 0x7F, status >> 8
            one.keep_reason(f"killed by signal {signal}" if signal else f"exit code {code}")
        if not one.machine_clean:
            yield from self.sweep(one)

    def sweep(self, one: Slice) -> Iterator[Effect]:
        """Have removed what an agent could not remove itself."""
        if one.rank < 0:  # it never had anything to remove
            yield from self.confirm(one, "")
        elif one.sweep_begins():
            yield Sweep(one.number, one.rank)

    def swept(self, number: int, trouble: str) -> Iterator[Effect]:
        """A slice's machine was swept, or cannot be reached any more."""
        if number in self.slices:
            yield from self.confirm(self.slices[number], trouble)

    def confirm(self, one: Slice, trouble: str) -> Iterator[Effect]:
        """Nothing of a slice is left, or nobody can say more than `trouble`."""
        one.machine_is_clean(trouble)
        if trouble:
            yield Log(f"slice {one.number}: its end is not confirmed: {trouble}")
        yield from self.pending.ended(one.number, trouble)
        yield from self.gone(one.number)

    def detached(self, one: Slice) -> Iterator[Effect]:
        """A slice's agent is gone; the end of its job follows."""
        one.agent_lost()
        if one.number == 0:
            self.leaving.clear()
        yield from self.settle()

    def cleaned(self, number: int, why: str = "") -> Iterator[Effect]:
        """A slice's job is over, or could not be submitted; it may have been cancelled early."""
        one = self.slices.get(number)
        if one is not None:
            one.job_is_over()
            one.keep_reason(why)
            if one.rank < 0:
                yield from self.confirm(one, "")
            yield from self.gone(number)

    def gone(self, number: int) -> Iterator[Effect]:
        """Go on without a slice, once its job is over and nothing of it is left."""
        one = self.slices.get(number)
        if one is None or one.left is not Left.NOTHING:
            return
        self.slices.remove(number)
        self.pending.joining.pop(number, None)
        if one.node and number and 0 in self.slices and self.slices[0].agent is not None:
            self.leaving.add(one.node)
            yield from self.tell(messages.Forget(one.node, ended=not one.doubt))
        if one.state is not SliceState.ENDING:
            yield from self.unasked(one, one.reason or "its job ended")
        yield from self.settle()

    def unasked(self, one: Slice, reason: str) -> Iterator[Effect]:
        """A slice ended that should not have."""
        self.lost.append(f"slice {one.number}: {reason}")
        yield Log(self.lost[-1])
        if one.number == 0:
            yield from self.fail(f"the control slice ended: {reason}")
        elif one.state.was_ready or (self.was_up and one.node_failed):
            yield self.add(self.last + 1)
        elif self.was_up:
            self.wanted = max(1, self.wanted - 1)
        else:
            yield from self.fail(f"slice {one.number} did not come up: {reason}")

    def resize(self, nodes: int) -> Iterator[Effect]:
        """More slices, or fewer: those that are not ready go first, the control slice never."""
        self.wanted = nodes
        if not self.begun:  # all are submitted then
            return
        active = [one for one in self.slices.values() if one.state is not SliceState.ENDING]
        active.sort(
            key=lambda one: (one.number != 0, one.state is not SliceState.READY, one.number)
        )
        for one in active[nodes:]:
            yield from self.end(one)
        for _ in range(nodes - len(active)):
            yield self.add(self.last + 1)

    # --- The end ---

    def end(self, one: Slice) -> Iterator[Effect]:
        """Let a slice end by itself, or cancel its job where nobody listens there."""
        one.told_to_end()
        if one.agent is not None:
            yield Answer(one.agent, encode(messages.End()))
        elif one.job:
            yield Cancel(one.job, "no longer wanted")

    def end_slices(self) -> Iterator[Effect]:
        """All slices end, and so do all runs."""
        yield from self.learn(messages.Kept())
        for one in list(self.slices.values()):
            yield from self.end(one)
        yield from self.end_work()

    def end_work(self) -> Iterator[Effect]:
        """Where all ends, no run or simulation goes on, be it that we are told of it only now."""
        why = self.failure or (DOWN if self.ending else "")
        if why:
            yield from self.simulations.end_all(None, why)
            yield from self.runs.end_all(why)

    def fail(self, why: str) -> Iterator[Effect]:
        """It cannot be up any more: release everything, tell everybody."""
        if not self.failure and not self.ending:
            self.failure = why
            yield Log(why)
            yield from self.end_slices()
            yield from self.settle()

    def late(self) -> Iterator[Effect]:
        """The time to come up is over."""
        if self.phase == "starting":
            missing = [
                one.described() for one in self.slices.values() if one.state is not SliceState.READY
            ]
            limit = f"not up after {self.up_timeout:.0f} s"
            yield from self.fail(f"{limit}: {', '.join(missing) or 'no slice was submitted yet'}")

    def late_down(self, *, last: bool) -> Iterator[Effect]:
        """The time to end is over: cancel the jobs, or with `last` say what is left."""
        for one in self.slices.values():
            if one.job and not last:
                yield Cancel(one.job, "did not end in time")
        if last:
            self.overdue = True
            yield from self.settle()

    def drop(self, gone: Collection[Key]) -> Iterator[Effect]:
        """A sender is gone: forget its requests; it may have been an agent."""
        self.pending.drop(gone)
        self.runs.drop(gone)
        self.simulations.drop(gone)
        for key in gone:
            self.held.pop(key, None)
            one = self.slices.get(self.agents.pop(key, -1))
            if one is not None and one.agent == key:
                yield from self.detached(one)

    # --- What follows ---

    def tell(self, order: messages.Order) -> Iterator[Effect]:
        """An order for the control slice's agent."""
        control = self.slices.get(0)
        if control is not None and control.agent is not None:
            yield Answer(control.agent, encode(order))

    def keep(self) -> Iterator[Effect]:
        """Have the control slice keep what is not to be lost with us."""
        control = self.slices.get(0)
        if control is None or control.agent is None:
            return
        slices, gone = self.slices.take_changed()
        found = messages.Kept(self.wanted, self.was_up, tuple(self.lost[-20:]))
        if slices or gone or found != self.kept:
            new = {name: value for name, value in vars(found).items()
                   if value != getattr(self.kept, name)}  # fmt: skip
            self.kept = found
            changed = messages.Kept(**{**new, "slices": slices})
            yield from self.tell(messages.Keep(encode(changed), gone or None))
        for number, plan in self.runs.take_untold().items():
            queued = messages.QueuedPlan(number=number, executor=self.executor, **vars(plan))
            yield from self.tell(messages.Queue(queued))

    def invite(self, number: int) -> Iterator[Effect]:
        """Have join data made for a slice that asked for them, if anybody listens."""
        yield from self.tell(messages.Invite(number, self.slices[number].wanted_node))

    def settle(self) -> Iterator[Effect]:
        """Start what can start, answer everybody whose condition is met."""
        self.was_up = self.was_up or self.phase == "up"
        yield from self.keep()
        if self.usable:
            number = self.runs.next()
            if number:
                yield from self.tell(messages.StartRun(number))
        if self.restored:
            held, self.held = self.held, {}
            for again in held.values():
                yield from again()
        shrinking = self.leaving or self.slices.count(SliceState.ENDING)
        yield from self.pending.settle(
            Situation(self.phase, self.failure, self.wanted, self.ready_nodes, self.lost[-1:]),
            self.status, usable=self.usable, resized=not shrinking,
        )  # fmt: skip
        if self.overdue and self.slices:  # nobody looks at the clock again, whoever asks
            left = ", ".join(f"slice {number}" for number in sorted(self.slices))
            yield from self.pending.overdue(left)
