# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the broker module and the agents of slices say to each other, as JSON."""

from __future__ import annotations

import json

import pytest
from dovetail.core.causes import Cause
from dovetail.core.messages import MessageError, decode, encode
from dovetail.flux.instance import messages
from dovetail.flux.instance.run import Run, RunState
from dovetail.flux.instance.simulations import Simulation
from dovetail.flux.instance.slices import KeptSlice, SliceState

pytestmark = pytest.mark.unit

PLAN = {"number": 2, "plan": "p", "output": "o", "cwd": "/", "executor": "local"}
MORE = {"content": "c", "environment": {"A": "b"}, "metrics": "h:1", "umask": 18}
ORDERS = [
    (messages.End(), '{"end": true}'),
    (messages.Invite(1, ""), '{"invite": 1, "node": ""}'),
    (messages.Forget("n1", ended=True), '{"forget": "n1", "ended": true}'),
    (messages.Keep({"more": [1]}), '{"keep": {"more": [1]}}'),
    (messages.Queue(messages.QueuedPlan(**PLAN)), json.dumps({"queue": PLAN})),
    (
        messages.Queue(messages.QueuedPlan(**PLAN, **MORE)),
        json.dumps({"queue": {**PLAN, **MORE}}),
    ),
    (messages.StartRun(2), '{"run": 2}'),
    (messages.CancelRun(2), '{"cancel": 2}'),
    (messages.FindService("web", 7), '{"url": "web", "question": 7}'),
]


@pytest.mark.parametrize(("order", "text"), ORDERS, ids=[text for _, text in ORDERS])
def test_an_order_is_what_it_says(order, text):
    assert json.dumps(encode(order)) == text
    assert messages.order(json.loads(text)) == order


@pytest.mark.parametrize("text", ["{}", '{"dance": 1}', '{"run": "2"}', '{"queue": {"number": 2}}'])
def test_what_is_no_order_is_refused(text):
    with pytest.raises(MessageError):
        messages.order(json.loads(text))


KNOWN = [
    (
        messages.Kept(2, True, ("slice 1: bad",), (KeptSlice(1, 7, SliceState.ENDING, "n1", 3),)),
        '{"wanted": 2, "up": true, "lost": ["slice 1: bad"], "slices": [{"number": 1, "job": 7,'
        ' "state": "ending", "node": "n1", "rank": 3}]}',
    ),
    (
        Run(1, "p", "o", "/", RunState.CANCELLING, -1, "cancelled"),
        '{"number": 1, "plan": "p", "output": "o", "cwd": "/", "state": "cancelling", "code": -1,'
        ' "reason": "cancelled", "reported": false}',
    ),
    (
        Simulation("a-1", 1, "sim", "log", 3, "bad", Cause.FAILED),
        '{"launch": "a-1", "run": 1, "name": "sim", "log": "log", "code": 3, "reason": "bad",'
        ' "cause": "failed"}',
    ),
]


@pytest.mark.parametrize(("known", "text"), KNOWN, ids=["Kept", "Run", "Simulation"])
def test_what_outlives_the_module_is_what_it_was(known, text):
    assert json.dumps(encode(known)) == text
    assert decode(type(known), json.loads(text)) == known


WRONG = {
    "Attach: runs: Run: state is not a RunState":
        {"runs": [{"number": 1, "plan": "p", "output": "o", "state": "lost"}]},
    "Attach: simulations: Simulation: log is missing":
        {"simulations": [{"launch": "a", "run": 1, "name": "s"}]},
    "Attach: kept: Kept: slices: KeptSlice: job is missing":
        {"kept": {"slices": [{"number": 1}]}},
}  # fmt: skip


@pytest.mark.parametrize("why", WRONG)
def test_what_an_agent_knows_wrongly_is_named(why):
    with pytest.raises(MessageError) as found:
        decode(messages.Attach, {"number": 0, "rank": 0, **WRONG[why]})
    assert str(found.value) == why
