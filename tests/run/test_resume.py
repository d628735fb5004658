# SPDX-License-Identifier: LGPL-3.0-or-later
"""Any recorded run replays to the same decisions, and can be taken up again."""

from __future__ import annotations

import dataclasses
import json
import os
import tracemalloc
from types import SimpleNamespace

import pytest
from dovetail.controller.controller import Controller
from dovetail.controller.settings import Settings
from dovetail.core import eventlog, protocol
from dovetail.core.errors import BadInput
from dovetail.core.protocol import Capacity, Node, Spec
from dovetail.executors.simulated.executor import Fault, Simulated, Work
from dovetail.plan import schema
from dovetail.run import run
from dovetail.run.loop import Signals
from dovetail.run.resume import rebuild, replay, taken_up
from dovetail.run.simulate import run_simulated

pytestmark = pytest.mark.unit

NODES = [Node("n0", 2000, 8 << 30)]
WORK = Work((0.01, 0.03), 150)
SPECS = [Spec(f"a-{i}", "a", "case", 2, (1.0, 3.0), ("run",)) for i in range(5)]
CAPACITY = Capacity(tuple(NODES))
OVER = ("done", "failed", "not started")


def recorded(path, faults=()):
    head = eventlog.header(SPECS, CAPACITY, Settings().plain())
    with eventlog.Log.create(path, head) as log:
        return run_simulated(SPECS, {"a": WORK}, NODES, faults=faults, log=log)


FAULTS = [
    (),
    (Fault(4.0, "death", "a-1"),),
    (Fault(3.0, "refuse", "", 5.0), Fault(9.0, "clock", "", 7200.0)),
    (Fault(5.0, "stall", "a-0"), Fault(6.0, "clock", "", -3.0)),
]


@pytest.mark.parametrize("faults", FAULTS)
def test_a_recorded_run_replays_to_the_same_decisions(tmp_path, faults):
    path = tmp_path / "events.jsonl"
    result = recorded(path, faults)
    assert result.count(protocol.Launch) >= 5
    assert replay(path) is None


def test_a_changed_decision_is_found(tmp_path):
    path = tmp_path / "events.jsonl"
    recorded(path)
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"Resize"' in line)
    record = json.loads(lines[at])
    record["why"] = "another reason"
    lines[at] = json.dumps(record)
    path.write_text("\n".join(lines) + "\n")
    found = replay(path)
    assert found is not None
    assert found.seq == at
    assert isinstance(found.recorded, protocol.Resize)
    assert found.recorded.why == "another reason"
    assert isinstance(found.replayed, protocol.Resize)


def notes_changed(path, **changes):
    """The place of the first note in a log, after some of its fields were changed there."""
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"Note"' in line)
    lines[at] = json.dumps({**json.loads(lines[at]), **changes})
    path.write_text("\n".join(lines) + "\n")
    return at


def test_a_note_may_be_worded_otherwise(tmp_path):
    path = tmp_path / "events.jsonl"
    recorded(path)
    notes_changed(path, why="in other words")
    assert replay(path) is None


@pytest.mark.parametrize("changes", [{"what": "keep"}, {"data": {"n": 7}}])
def test_a_note_of_another_kind_or_with_other_figures_is_found(tmp_path, changes):
    path = tmp_path / "events.jsonl"
    recorded(path)
    at = notes_changed(path, **changes)
    found = replay(path)
    assert found is not None
    assert found.seq == at


def test_settings_that_are_none_are_refused(tmp_path):
    path = tmp_path / "events.jsonl"
    with eventlog.Log.create(path, eventlog.header(SPECS, CAPACITY, {"colour": 1})):
        pass
    with pytest.raises(BadInput, match=r"line 1.*colour"):
        replay(path)


@pytest.mark.parametrize("share", [0.1, 0.4, 0.7, 0.95])
def test_a_run_whose_loop_was_killed_is_taken_up_again(tmp_path, share):
    path = tmp_path / "events.jsonl"
    recorded(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    controller = rebuild(path)
    before = {view.name: view for view in controller.views()}
    t = 3.0 + max(entry.t for entry in eventlog.read(path)[1] if hasattr(entry, "t"))
    machine = Simulated(NODES, {"a": WORK})
    machine.clock = t
    with eventlog.Log.append(path) as log:
        log.resume(t, CAPACITY)
        pending = controller.resume(t, CAPACITY)
        launched: list[str] = []
        while not controller.finished:
            for action in pending:
                log.write(action)
                if isinstance(action, protocol.Launch):
                    launched.append(action.name)
                    machine.launch(next(s for s in SPECS if s.name == action.name), action.share)
                elif isinstance(action, protocol.Resize):
                    machine.resize(action.shares)
            pending = []
            machine.advance(0.1)
            for event in [*machine.observe(machine.now), protocol.Tick(machine.now)]:
                log.write(event)
                for action in controller.handle(event):
                    log.write(action)
                    if isinstance(action, protocol.Launch):
                        launched.append(action.name)
                        spec = next(s for s in SPECS if s.name == action.name)
                        machine.launch(spec, action.share)
                    elif isinstance(action, protocol.Resize):
                        machine.resize(action.shares)
    done = {name for name, view in before.items() if view.state in OVER}
    assert sorted(launched) == sorted(set(before) - done)
    for view in controller.views():
        assert view.state == "done"
        begun = before[view.name].state not in ("queued", "done")
        assert view.restarts == (1 if begun else 0)
    assert replay(path) is None


def drive(controller, machine, log, pending, until):
    """Go on until a condition holds; the simulations that were launched."""
    launched = []

    def act(actions):
        for action in actions:
            log.write(action)
            if isinstance(action, protocol.Launch):
                launched.append(action.name)
                machine.launch(controller.spec(action.name), action.share)
            elif isinstance(action, protocol.Resize):
                machine.resize(action.shares)

    act(pending)
    while not until():
        machine.advance(0.1)
        for event in [*machine.observe(machine.now), protocol.Tick(machine.now)]:
            log.write(event)
            act(controller.handle(event))
    return launched


@pytest.mark.parametrize("seconds", [1.0, 4.0, 8.0, 12.0])
def test_simulations_that_outlive_the_controller_are_taken_over(tmp_path, seconds):
    path = tmp_path / "events.jsonl"
    machine = Simulated(NODES, {"a": WORK})
    first = Controller(SPECS, CAPACITY, Settings())
    with eventlog.Log.create(path, eventlog.header(SPECS, CAPACITY, Settings().plain())) as log:
        once = drive(first, machine, log, [], lambda: machine.now >= seconds)
    controller = rebuild(path)
    alive = tuple(controller.running())
    assert alive
    machine.resize({name: controller.running()[name] for name in alive})
    with eventlog.Log.append(path) as log:
        log.resume(machine.now, CAPACITY, alive)
        pending = controller.resume(machine.now, CAPACITY, alive)
        again = drive(controller, machine, log, pending, lambda: controller.finished)
    assert not set(again) & set(alive), "none of them is started again"
    assert sorted({*once, *again}) == sorted(spec.name for spec in SPECS)
    views = {view.name: view for view in controller.views()}
    assert {view.state for view in views.values()} == {"done"}
    assert all(views[name].restarts == 0 for name in alive)
    assert replay(path) is None


@pytest.mark.parametrize(("cores", "packs"), [(2, True), (1, False)])
def test_what_paid_on_other_cores_is_not_taken_to_pay_where_a_run_is_resumed(
    tmp_path, cores, packs
):
    path = tmp_path / "events.jsonl"
    specs = [dataclasses.replace(SPECS[0], name=f"a-{i}") for i in range(12)]
    machine = Simulated(NODES, {"a": WORK})
    first = Controller(specs, CAPACITY, Settings())
    with eventlog.Log.create(path, eventlog.header(specs, CAPACITY, Settings().plain())) as log:
        drive(first, machine, log, [], lambda: machine.now >= 25.0)
    before = eventlog.read(path)[1]
    assert any(isinstance(one, protocol.Note) and one.what == "keep" for one in before)
    controller = rebuild(path)
    there = Simulated([Node("n0", 1000 * cores, 8 << 30)], {"a": WORK})
    there.clock = machine.now
    with eventlog.Log.append(path) as log:
        log.resume(there.now, there.capacity())
        pending = controller.resume(there.now, there.capacity())
        drive(controller, there, log, pending, lambda: controller.finished)
    since = eventlog.read(path)[1][len(before) :]
    notes = [one for one in since if isinstance(one, protocol.Note)]
    assert any("this has paid before" in one.why for one in notes) == packs
    assert not any(one.what == "rollback" for one in notes)


def test_a_simulation_that_has_to_wait_is_noted_once(tmp_path):
    controller = Controller(SPECS, CAPACITY, Settings())
    controller.handle(protocol.Tick(0.0))
    (note,) = controller.handle(protocol.Delayed(0.1, "a-0", "no room"))
    assert note == protocol.Note("hold", "a-0 waits: no room", {"name": "a-0"})


@pytest.mark.parametrize("allowed", [True, False])
def test_what_is_started_again_goes_on_if_it_may(allowed):
    spec = Spec("a", "a", "case", 2, (1.0, 1.0), ("run",), checkpoint=allowed)
    controller = Controller((spec,), CAPACITY, Settings())
    (first,) = [a for a in controller.handle(protocol.Tick(0.0)) if isinstance(a, protocol.Launch)]
    assert not first.continued
    again = controller.resume(5.0, CAPACITY)
    (second,) = [a for a in again if isinstance(a, protocol.Launch)]
    assert second.continued == allowed


def test_a_node_may_be_lost_three_times_however_often_the_run_is_killed(tmp_path):
    path = tmp_path / "events.jsonl"
    lost = protocol.Finished(1.0, "a-0", protocol.Cause.NODE_LOST, 1, "node lost: n0")
    with eventlog.Log.create(path, eventlog.header(SPECS, CAPACITY, Settings().plain())) as log:
        log.write(protocol.Tick(0.0))
        log.write(lost)
        for _ in range(3):
            log.resume(1.0, CAPACITY)
        log.write(lost)
    controller, states = rebuild(path), []
    for _ in range(2):
        controller.handle(lost)
        states.append(controller.view("a-0").state)
    assert states == ["preparing", "failed"]
    assert controller.view("a-0").restarts == 6


def test_what_runs_on_a_cluster_is_taken_over_though_the_disk_is_full(
    tmp_path, monkeypatch, capsys
):
    path = tmp_path / run.LOG
    with eventlog.Log.create(path, eventlog.header(SPECS, CAPACITY, Settings().plain())) as log:
        tick, controller = protocol.Tick(0.0), Controller(SPECS, CAPACITY, Settings())
        for entry in (tick, *controller.handle(tick)):
            log.write(entry)
    write = os.write

    def full(fd, data):
        if os.path.samestat(os.fstat(fd), path.stat()):
            raise OSError(28, "No space left on device")
        return write(fd, data)

    monkeypatch.setattr(eventlog.os, "write", full)
    monkeypatch.setattr(run, "load_report", lambda quiet: None)
    ended = []
    executor = SimpleNamespace(
        capacity=lambda: CAPACITY,
        close=lambda: ended.append("close"),
        hurry=lambda: None,
        news=lambda: ended.append("under way") or (),
        observe=lambda t: [],
        resize=lambda shares: None,
        silent=lambda: True,
        stop=lambda name, why, cause: None,
        wait=lambda timeout: monkeypatch.undo(),  # then there is room again
    )
    place = SimpleNamespace(
        start=lambda *of, resume: executor, hurry=None, adopt=lambda controller: ["a-0"],
        launcher=str, troubles=list,
    )  # fmt: skip
    asked = schema.Plan(tuple(SPECS), schema.Limits())
    with Signals() as signals:
        signals.caught = "SIGTERM"  # so that it is over once it is under way
        log = run.execute(asked, tmp_path, signals, place=place, resume=True, quiet=True)
    assert ended[0] == "under way", "and not closed, which would end what was taken over"
    assert capsys.readouterr().err.count("the event log is kept in memory") == 1
    assert (log.failed, log.held) == ("", b"")
    (resumed,) = [one for one in eventlog.read(path)[1] if isinstance(one, eventlog.Resumed)]
    assert resumed.alive == ("a-0",)


def test_a_long_log_is_not_all_held_in_memory(tmp_path, monkeypatch):
    path = tmp_path / "events.jsonl"
    with eventlog.Log.create(path, eventlog.header((), CAPACITY, Settings().plain())) as log:
        for n in range(5000):
            log.write(protocol.Tick(n * 0.01))
    with path.open("a") as file:
        file.write('{"seq": 5001, "ki')
    monkeypatch.setattr(eventlog, "BLOCK", 1 << 12)
    tracemalloc.start()
    try:
        taken_up(path)
        with eventlog.Log.append(path) as log:
            log.write(protocol.Tick(50.0))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size
    assert len(eventlog.read(path)[1]) == 5001
