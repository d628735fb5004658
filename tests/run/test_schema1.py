# SPDX-License-Identifier: LGPL-3.0-or-later
"""A log of schema 1, recorded by the demo: replayed, reported on, not gone on with."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from dovetail.controller.settings import Settings
from dovetail.core import eventlog, protocol
from dovetail.core.causes import Cause
from dovetail.core.errors import BadInput
from dovetail.report import summary
from dovetail.report.html import page
from dovetail.run import run
from dovetail.run.resume import replay

pytestmark = pytest.mark.unit

DEMO = Path(__file__).with_name("demo-events-schema1.jsonl.gz")


@pytest.fixture
def demo(tmp_path):
    with gzip.open(DEMO) as file:
        (tmp_path / "events.jsonl").write_bytes(file.read())
    return tmp_path


def test_it_replays_to_the_same_decisions(demo):
    assert replay(demo / "events.jsonl") is None


def test_a_decision_that_was_another_is_found(demo):
    path = demo / "events.jsonl"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"type":"Resize"' in line)
    lines[at] = lines[at].replace('"frozen":false', '"frozen":true', 1)
    path.write_text("\n".join(lines) + "\n")
    found = replay(path)
    assert found is not None
    assert found.seq == at


def test_a_report_is_made_of_it(demo):
    found, history = summary.load(demo)
    assert found.counts == {"done": 6}
    assert found.admissions > 0
    assert "imbalanced-4" in page(found, history)


def test_nothing_is_appended_to_it(demo):
    path = demo / "events.jsonl"
    before = path.read_bytes()
    with pytest.raises(BadInput, match="written by an earlier version"):
        eventlog.Log.append(path)
    assert path.read_bytes() == before
    assert json.loads(before.split(b"\n")[0])["schema"] == 1


def test_what_runs_on_a_cluster_is_not_taken_over_by_who_cannot_go_on_with_its_log(
    demo, monkeypatch
):
    monkeypatch.setattr(run, "resumable", lambda log, asked: 0.0)
    done = []
    executor = SimpleNamespace(capacity=lambda: None, close=lambda: done.append("close"))
    place = SimpleNamespace(
        start=lambda *of, resume: executor, hurry=None, adopt=lambda one: done.append("adopt")
    )
    asked = SimpleNamespace(limits=SimpleNamespace(max_packed=None))
    with pytest.raises(BadInput, match="written by an earlier version"):
        run.execute(asked, demo, SimpleNamespace(), place=place, resume=True)
    assert done == ["close"]


def old(folder, entries):
    """A log of one simulation in schema 1, with these records."""
    head = {
        "dovetail": "0.1.0",
        "schema": 1,
        "specs": [
            {"name": name, "family": "a", "case": "c", "ranks": 1, "weights": [1.0],
             "command": ["run"]} for name in ("a-1", "a-2")
        ],
        "capacity": {"nodes": [{"name": "n", "cpu": 1000, "memory": 1}], "freeze": True},
        "settings": Settings().plain(),
        "versions": {},
    }  # fmt: skip
    lines = [head, *({"seq": seq, **one} for seq, one in enumerate(entries, start=1))]
    path = folder / "events.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def event(kind, t, **fields):
    return {"kind": "event", "type": kind, "t": t, **fields}


def action(kind, **fields):
    return {"kind": "action", "type": kind, **fields}


def note(what, why, **data):
    return action("Note", what=what, why=why, data=data)


LAUNCH = action("Launch", name="a-1", share={"requests": [1000], "frozen": False})
BEGUN = [event("Tick", 0.0), LAUNCH, event("Started", 0.1, name="a-1")]
SIGINT = "interrupted by SIGINT"


def ended(code, reason):
    return event("Finished", 5.0, name="a-1", code=code, reason=reason)


def stop(why, requeue=False):
    return action("Stop", name="a-1", why=why, requeue=requeue)


LOST = "pod lost: evicted"
ENDS = {
    "well": ([ended(0, "")], (Cause.DONE, "done", "")),
    "by itself": (
        [ended(3, ""), note("fail", "a-1 failed: exit code 3", name="a-1")],
        (Cause.FAILED, "failed", "exit code 3"),
    ),
    "without its case": (
        [ended(1, "copying the case failed with exit code 1"),
         note("fail", "a-1 failed: copying the case failed with exit code 1", name="a-1")],
        (Cause.LAUNCH_FAILED, "failed", "copying the case failed with exit code 1"),
    ),
    "for the last time with its pod": (
        [ended(1, LOST), note("fail", f"a-1 failed: {LOST}", name="a-1")],
        (Cause.POD_LOST, "failed", LOST),
    ),
    "with its pod": (
        [ended(1, LOST), note("hold", f"a-1 is queued again: {LOST}")],
        (Cause.POD_LOST, "not started", f"put back into the queue: {LOST}"),
    ),
    "with its pod, before an interrupt": (
        [ended(1, LOST), note("hold", f"a-1 is queued again: {LOST}"),
         event("Interrupted", 6.0, reason=SIGINT)],
        (Cause.POD_LOST, "not started", SIGINT),
    ),
    "with its pod, after an interrupt": (
        [event("Interrupted", 4.0, reason=SIGINT), stop(SIGINT), ended(1, LOST),
         note("fail", f"a-1 failed: {SIGINT}", name="a-1")],
        (Cause.POD_LOST, "failed", SIGINT),
    ),
    "by the interrupt": (
        [event("Interrupted", 4.0, reason=SIGINT), stop(SIGINT), ended(143, f"stopped: {SIGINT}"),
         note("fail", f"a-1 failed: {SIGINT}", name="a-1")],
        (Cause.INTERRUPTED, "failed", SIGINT),
    ),
    "to run again": (
        [stop("taken back, to run again later", True),
         ended(143, "stopped: taken back, to run again later")],
        (Cause.TAKEN_BACK, "not started",
         "put back into the queue: taken back, to run again later"),
    ),
    "for it hung": (
        [stop("hung: no iteration for 300 s, the limit is 300 s"),
         ended(143, "stopped: hung: no iteration for 300 s, the limit is 300 s"),
         note("fail", "a-1 failed: hung: no iteration for 300 s, the limit is 300 s", name="a-1")],
        (Cause.HUNG, "failed", "hung: no iteration for 300 s, the limit is 300 s"),
    ),
    "as the user wished": (
        [event("Unwanted", 4.0, name="a-1", reason="cancelled"), stop("cancelled"),
         ended(143, "stopped: cancelled"), note("fail", "a-1 failed: cancelled", name="a-1")],
        (Cause.CANCELLED, "failed", "cancelled"),
    ),
    "with the interrupted run, to be resumed": (
        [event("Interrupted", 4.0, reason=SIGINT), stop(SIGINT), ended(143, f"stopped: {SIGINT}"),
         note("fail", f"a-1 failed: {SIGINT}", name="a-1"),
         {"kind": "resume", "t": 9.0,
          "capacity": {"nodes": [{"name": "n", "cpu": 1000, "memory": 1}], "freeze": True}}],
        (Cause.INTERRUPTED, "not started", f"put back into the queue: {SIGINT}"),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("records", "expected"), ENDS.values(), ids=ENDS)
def test_ends_have_the_causes_that_their_sentences_say(tmp_path, records, expected):
    _, entries = eventlog.read(old(tmp_path, [*BEGUN, *records]))
    (finished,) = [one for one in entries if isinstance(one, protocol.Finished)]
    found, _ = summary.load(tmp_path)
    assert (finished.cause, found.simulations[0].state, found.simulations[0].reason) == expected


def test_what_waited_when_it_was_interrupted_or_had_no_node_did_not_start(tmp_path):
    away = event("CapacityChanged", 1.0, capacity={"nodes": [], "freeze": True})
    for last, why in (
        (event("Interrupted", 4.0, reason=SIGINT), SIGINT),
        (away, "no node is left"),
    ):
        old(tmp_path, [event("Tick", 0.0), last])
        found, _ = summary.load(tmp_path)
        assert [(one.state, one.reason) for one in found.simulations] == [("not started", why)] * 2
