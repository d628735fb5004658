# SPDX-License-Identifier: LGPL-3.0-or-later
"""The states of slices and runs, and what changes them."""

from __future__ import annotations

import itertools

import pytest
from dovetail.core.messages import decode, encode
from dovetail.flux.instance import slices
from dovetail.flux.instance.run import Run, RunState
from dovetail.flux.instance.slices import Left, Slice
from support.broker_states import Play

pytestmark = pytest.mark.unit

EVENTS = {
    "attach": lambda one: one.attached("agent", "host", 2),
    "ready": lambda one: one.became_ready("n1", "0-1"),
    "agent lost": lambda one: one.agent_lost(),
    "cancel": lambda one: one.cancelled(),
    "end": lambda one: one.told_to_end(),
}
LIVES = {  # what happens to a slice: its state, what users see, is it replaced
    (): (slices.SliceState.SUBMITTED, "submitted", False),
    ("attach",): (slices.SliceState.STARTING, "starting", False),
    ("attach", "ready"): (slices.SliceState.READY, "ready", True),
    ("attach", "agent lost"): (slices.SliceState.START_LOST, "lost", False),
    ("attach", "ready", "agent lost"): (slices.SliceState.LOST, "lost", True),
    ("attach", "ready", "cancel"): (slices.SliceState.CANCELLED, "lost", False),
    ("cancel", "attach", "ready", "agent lost"): (slices.SliceState.CANCELLED, "lost", False),
    ("end", "cancel", "attach", "ready", "agent lost"): (slices.SliceState.ENDING, "ending", False),
}


@pytest.mark.parametrize("life", LIVES, ids=", ".join)
def test_the_life_of_a_slice(life):
    one = Slice(1, 100)
    for event in life:
        EVENTS[event](one)
    assert (one.state, one.plain()["state"], one.state.was_ready) == LIVES[life]


@pytest.mark.parametrize(
    ("before", "job_runs", "after"),
    [("ready", True, "expected"), ("ready", False, "lost"), ("expected", True, "expected"),
     ("starting", True, "submitted"), ("starting", False, "start lost"),
     ("cancelled", True, "cancelled"), ("ending", False, "ending")],
)  # fmt: skip
def test_what_an_earlier_module_knew_of_a_slice(before, job_runs, after):
    old = Slice(1, 100, slices.SliceState(before), node="n1", rank=3)
    new = Slice(1, 100)
    new.recalled(old.kept(), job_runs=job_runs)
    assert (new.state.value, new.node, new.rank) == (after, "n1", 3)
    told = Slice(1, 100)
    told.attached("agent", "host", 4)
    told.recalled(old.kept(), job_runs=job_runs)
    assert (told.state, told.rank) == (slices.SliceState.STARTING, 4), "its agent knows better"


@pytest.mark.parametrize("order", itertools.permutations(("job", "sweep", "clean")), ids=" ".join)
def test_nothing_is_left_once_the_job_is_over_and_the_machine_clean(order):
    one, begun = Slice(1), []
    for event in order:
        assert one.left is not Left.NOTHING or event == "sweep"
        if event == "job":
            one.job_is_over()
        elif event == "clean":
            one.machine_is_clean()
        else:
            begun = [one.sweep_begins(), one.sweep_begins()]
    assert one.left is Left.NOTHING
    swept_first = order.index("sweep") < order.index("clean")
    assert begun == [swept_first, False], "once, and not where it is clean"


def test_a_slice_that_the_user_cancelled_is_not_replaced_after_a_reload_either():
    before = Play(2).begin().ready(0, 1)
    before.do(before.state.excepted(1, "cancel", "")).ask("status", "s")
    play = Play(2).begin({0: 100, 1: 101}).attach(0, node="n0", kept=before.kept())
    play.over(1, 15)
    assert play.submits() == []
    assert play.state.wanted == 1


RUNS = {  # what happens to a run: its state, what users see, its exit code
    (): ("PENDING", "waiting", -1),
    ("start",): ("RUNNING", "running", -1),
    ("start", "cancel"): ("CANCELLING", "running", -1),
    ("cancel",): ("CANCELLED", "cancelled", 1),
    ("start", "done"): ("DONE", "done", 0),
    ("start", "failed"): ("FAILED", "failed", 3),
    ("start", "cancel", "failed"): ("CANCELLED", "cancelled", 3),
    ("start", "cancel", "done"): ("DONE", "done", 0),
    ("start", "cancel", "lost"): ("FAILED", "failed", 1),
    ("start", "done", "cancel", "lost"): ("DONE", "done", 0),
}
RUN_EVENTS = {
    "start": lambda run: run.start(),
    "cancel": lambda run: run.cancel(),
    "done": lambda run: run.end(0, ""),
    "failed": lambda run: run.end(3, "bad"),
    "lost": lambda run: run.lose("Kubernetes is gone"),
}


@pytest.mark.parametrize("life", RUNS, ids=", ".join)
def test_the_life_of_a_run(life):
    run = Run(1, "p", "o")
    for event in life:
        RUN_EVENTS[event](run)
    state, shown, code = RUNS[life]
    assert (run.state, run.plain()["state"], run.code) == (RunState[state], shown, code)
    assert decode(Run, encode(run)) == run
