# SPDX-License-Identifier: LGPL-3.0-or-later
"""The event log: exact round trips, and refusal of all that is damaged."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import get_args

import pytest
from dovetail.controller.settings import Settings
from dovetail.core import eventlog, protocol
from dovetail.core.errors import BadInput
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.unit

texts = st.text(max_size=8)
reals = st.floats(allow_nan=False, allow_infinity=False)
wholes = st.integers(-(2**63), 2**63)


def many(inner):
    return st.lists(inner, max_size=3).map(tuple)


waits = st.builds(protocol.WaitPolicy, texts, wholes)
causes = st.sampled_from(protocol.Cause)
ENDS = get_args(protocol.EndState)
shares = st.builds(protocol.Share, many(wholes), waits, st.booleans())
nodes = st.builds(protocol.Node, texts, wholes, wholes)
capacities = st.builds(protocol.Capacity, many(nodes), *3 * [st.booleans()])
ranks = st.builds(
    protocol.Ranks, many(wholes), many(reals), many(reals), many(reals), many(reals), many(wholes)
)
plain = st.recursive(
    st.none() | st.booleans() | wholes | reals | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
entries = st.one_of(
    st.builds(protocol.Tick, reals),
    st.builds(protocol.Started, reals, texts),
    st.builds(protocol.Sampled, reals, texts, ranks),
    st.builds(protocol.Finished, reals, texts, causes, wholes, texts),
    st.builds(protocol.Resized, reals, many(texts), texts),
    st.builds(protocol.CapacityChanged, reals, capacities),
    st.builds(protocol.Interrupted, reals, texts, reals),
    st.builds(protocol.Launch, texts, shares),
    st.builds(protocol.Resize, st.dictionaries(texts, shares, max_size=2), texts),
    st.builds(protocol.Stop, texts, causes, texts, st.booleans()),
    st.builds(protocol.Checkpoint, texts, texts),
    st.builds(protocol.Requeued, texts, causes, texts),
    st.builds(protocol.Ended, texts, st.sampled_from(ENDS), causes, texts),
    st.builds(protocol.Note, texts, texts, st.dictionaries(texts, plain, max_size=2)),
)
specs = st.builds(
    protocol.Spec,
    name=texts,
    family=texts,
    case=texts,
    ranks=wholes,
    weights=many(reals),
    command=many(texts),
    prepare=many(texts),
    slowdown=reals,
    memory=wholes,
    deadline=st.none() | reals,
    environment=many(st.tuples(texts, texts)),
)

CAPACITY = protocol.Capacity((protocol.Node("n0", 2000, 1 << 30),))
SPEC = protocol.Spec("a-0", "a", "case", 2, (1.0, 3.0), ("run",))


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "events.jsonl"
    with eventlog.Log.create(path, eventlog.header([SPEC], CAPACITY, Settings().plain())) as log:
        log.write(protocol.Tick(0.0))
        log.write(protocol.Launch("a-0", protocol.Share((500, 1500))))
        log.write(protocol.Finished(1.5, "a-0", protocol.Cause.DONE))
    return path


@given(entries)
def test_every_event_and_action_survives_json(entry):
    assert eventlog.decode(json.loads(json.dumps(eventlog.encode(entry)))) == entry


@settings(suppress_health_check=list(HealthCheck))
@given(specs, capacities)
def test_every_plan_survives_the_log(tmp_path, spec, capacity):
    path = tmp_path / "events.jsonl"
    eventlog.Log.create(path, eventlog.header([spec], capacity, {})).close()
    head, _ = eventlog.read(path)
    assert (head.specs, head.capacity) == ((spec,), capacity)


def test_what_was_written_is_read(path):
    head, found = eventlog.read(path)
    assert head.specs == (SPEC,)
    assert head.capacity == CAPACITY
    assert Settings.of(head.settings) == Settings()
    assert [type(entry).__name__ for entry in found] == ["Tick", "Launch", "Finished"]
    assert [json.loads(line).get("seq") for line in path.read_text().splitlines()] == [
        None,
        1,
        2,
        3,
    ]


def test_every_cause_is_in_the_manual_page():
    page = (Path(__file__).parents[2] / "doc" / "dovetail-run.1").read_text()
    assert [cause.value for cause in protocol.Cause if f".Ql {cause.value}" not in page] == []


def test_a_torn_last_line_is_dropped_and_written_over(path):
    whole = path.read_bytes()
    for cut in range(len(whole.split(b"\n")[0]) + 1, len(whole)):
        path.write_bytes(whole[:cut])
        _, found = eventlog.read(path)
        assert len(found) == whole[:cut].count(b"\n") - 1
    with eventlog.Log.append(path) as log:
        log.resume(2.0, CAPACITY)
        log.write(protocol.Tick(2.0))
    _, found = eventlog.read(path)
    assert found[-2:] == [eventlog.Resumed(2.0, CAPACITY), protocol.Tick(2.0)]


def edited(line: int, change):
    def edit(lines: list[str]) -> list[str]:
        record = json.loads(lines[line])
        change(record)
        lines[line] = json.dumps(record)
        return lines

    return edit


DAMAGE = [
    ("an empty file", lambda lines: [], "line 1"),
    ("another program's log", lambda lines: ['{"hello": 1}', *lines[1:]], "line 1"),
    ("a future schema", edited(0, lambda r: r.update(schema=3)), "schema 3"),
    ("a schema that is a truth", edited(0, lambda r: r.update(schema=True)), "schema True"),
    ("a header without specs", edited(0, lambda r: r.pop("specs")), "specs"),
    ("a capacity of text", edited(0, lambda r: r.update(capacity="2")), "line 1"),
    ("a line that is missing", lambda lines: [lines[0], *lines[2:]], "line 2"),
    ("a line that is doubled", lambda lines: [*lines[:2], *lines[1:]], "line 3"),
    ("a line of something else", lambda lines: [*lines[:2], "[]", *lines[2:]], "line 3"),
    ("half a line in the middle", lambda lines: [lines[0], lines[1][:20], *lines[2:]], "line 2"),
    ("an unknown type", edited(1, lambda r: r.update(type="Dance")), "Dance"),
    ("an event that is called an action", edited(1, lambda r: r.update(kind="action")), "line 2"),
    ("a field too few", edited(3, lambda r: r.pop("cause")), "cause"),
    ("a cause that nobody knows", edited(3, lambda r: r.update(cause="fate")), "cause"),
    ("a field too many", edited(3, lambda r: r.update(colour=1)), "colour"),
    (
        "a number that is text",
        edited(3, lambda r: r.update(t="soon")),
        "t: Input should be a valid number",
    ),
    ("a number that is none", edited(3, lambda r: r.update(t=float("nan"))), "NaN"),
    ("a truth for a number", edited(3, lambda r: r.update(code=True)), "code"),
    ("a list for a text", edited(3, lambda r: r.update(type=[])), "line 4"),
]


@pytest.mark.parametrize(("what", "damage", "reason"), DAMAGE, ids=[d[0] for d in DAMAGE])
def test_it_refuses(path, what, damage, reason):
    lines = damage(path.read_text().splitlines())
    path.write_text("".join(line + "\n" for line in lines))
    with pytest.raises(BadInput) as caught:
        eventlog.read(path)
    assert reason in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_bad_input(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for name in ("none", "pipe", "."):
        with pytest.raises(BadInput):
            eventlog.read(tmp_path / name)


@pytest.mark.parametrize("size", [1, 100, 1000, 1 << 20])
def test_a_log_that_is_read_in_blocks_tells_the_same(path, monkeypatch, size):
    monkeypatch.setattr(eventlog, "BLOCK", size)
    held = json.dumps({"seq": 4, **eventlog.encode(protocol.Tick(2.0))}).encode() + b"\n"
    head, found = eventlog.scan(path, held)
    assert head.specs == (SPEC,)
    assert [type(entry).__name__ for entry in found] == ["Tick", "Launch", "Finished", "Tick"]


@settings(suppress_health_check=list(HealthCheck), max_examples=300)
@given(data=st.data())
def test_any_damage_is_read_or_refused_with_a_line(path, data):
    whole = bytearray(path.read_bytes())
    original = bytes(whole)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=3))
    path.write_bytes(bytes(whole))
    reason = "line 1"
    try:
        eventlog.read(path)
    except BadInput as error:
        reason = str(error)
    finally:
        path.write_bytes(original)
    assert "line " in reason
    assert "\n" not in reason


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(tmp_path_factory, noise):
    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    path.write_bytes(noise)
    with pytest.raises(BadInput):
        eventlog.read(path)


def test_deep_nesting_is_refused_and_not_a_crash(path):
    with path.open("a") as file:
        file.write('{"seq":4,"kind":"action","type":"Note","data":' + "[" * 100_000 + "\n")
    with pytest.raises(BadInput, match="line 5"):
        eventlog.read(path)


def test_a_full_disk_is_told_and_leaves_whole_lines(path, monkeypatch):
    log = eventlog.Log.append(path)
    write = os.write
    calls = []

    def full(fd, data):
        calls.append(fd)
        if len(calls) == 1:
            return write(fd, bytes(data)[:5])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(eventlog.os, "write", full)
    log.write(protocol.Tick(2.0))
    monkeypatch.undo()
    assert "No space left" in log.failed
    assert len(eventlog.read(path)[1]) == 3
    assert eventlog.read(path, log.held)[1][3:] == [protocol.Tick(2.0)]


def test_a_disk_that_has_room_again_gets_all_that_was_held(path, monkeypatch):
    log = eventlog.Log.append(path)

    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(eventlog.os, "write", full)
    log.write(protocol.Tick(2.0))
    log.write(protocol.Tick(3.0))
    monkeypatch.undo()
    log.write(protocol.Tick(4.0))
    log.close()
    assert (log.failed, log.held) == ("", b"")
    assert [entry.t for entry in eventlog.read(path)[1][3:]] == [2.0, 3.0, 4.0]


def held_up(path, monkeypatch, records):
    """A log, with so many records that could not be written, and the sizes that were tried."""
    log, tried = eventlog.Log.append(path), []

    def full(fd, data):
        tried.append(len(data))
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(eventlog.os, "write", full)
    for number in range(records):
        log.write(protocol.Tick(2.0 + number))
    return log, tried


def test_a_full_disk_is_tried_with_one_line_however_much_is_held(path, monkeypatch):
    log, tried = held_up(path, monkeypatch, 100)
    assert len(tried) == 100
    assert len(set(tried)) == 1
    assert log.held.count(b"\n") == 100
    monkeypatch.undo()
    log.close()


def test_a_log_that_is_closed_tries_once_more(path, monkeypatch):
    log, _ = held_up(path, monkeypatch, 2)
    monkeypatch.undo()
    log.close()
    assert (log.failed, log.held) == ("", b"")
    assert [entry.t for entry in eventlog.read(path)[1][3:]] == [2.0, 3.0]


def test_with_more_than_can_be_held_the_log_has_what_was_and_says_that_it_ends(path, monkeypatch):
    monkeypatch.setattr(eventlog, "HELD", 100)
    log, _ = held_up(path, monkeypatch, 9)
    monkeypatch.undo()
    log.write(protocol.Tick(11.0))
    assert log.held == b""
    log.write(protocol.Tick(12.0))  # nothing may follow what was left out
    log.close()
    assert log.failed == f"{path}: ends before the run, as it could not be written for too long"
    assert [entry.t for entry in eventlog.read(path)[1][3:]] == [2.0, 3.0, 4.0]


def test_a_disk_with_a_little_room_gets_whole_lines(path, monkeypatch):
    log, _ = held_up(path, monkeypatch, 3)
    monkeypatch.undo()
    write, room = os.write, [log.held.index(b"\n") + 6]

    def little(fd, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        done = write(fd, bytes(data)[: room[0]])
        room[0] -= done
        return done

    monkeypatch.setattr(eventlog.os, "write", little)
    log.write(protocol.Tick(5.0))
    monkeypatch.undo()
    assert [entry.t for entry in eventlog.read(path)[1][3:]] == [2.0]
    assert [entry.t for entry in eventlog.read(path, log.held)[1][3:]] == [2.0, 3.0, 4.0, 5.0]
    log.close()


def test_a_log_that_cannot_begin_is_not_left_behind(tmp_path, monkeypatch):
    def full(fd, data):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(eventlog.os, "write", full)
    with pytest.raises(eventlog.LogStopped):
        eventlog.Log.create(tmp_path / "events.jsonl", eventlog.header([SPEC], CAPACITY, {}))
    assert list(tmp_path.iterdir()) == []


def test_dev_full_is_a_full_disk():
    with pytest.raises(eventlog.LogStopped, match="No space left"):
        eventlog.Log.create("/dev/full", eventlog.header([SPEC], CAPACITY, {}))
