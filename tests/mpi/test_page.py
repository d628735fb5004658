# SPDX-License-Identifier: LGPL-3.0-or-later
"""Pages and the control page are read whole or refused with a reason."""

from __future__ import annotations

import os
import struct
import subprocess
from pathlib import Path

import pytest
from dovetail.core.errors import BadInput
from dovetail.core.protocol import WaitPolicy
from dovetail.mpi import control_page, page
from dovetail.mpi.control_page import Control
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.unit

SECOND = 10**9


def good(**more: object) -> bytes:
    """The bytes of a page: a rank that ended 10 s after MPI_Init, 4 of them inside MPI."""
    fields = {
        "magic": page.MAGIC,
        "version": page.VERSION,
        "size": page.SIZE,
        "ncalls": 2,
        "mpi": 1,
        "rank": 1,
        "world_size": 4,
        "world": 0,
        "thread_level": 0,
        "pid": 2**31 - 1,
        "state": 2,
        "source": 1,
        "current": 0,
        "start_ticks": 5,
        "init": 100 * SECOND,
        "init_tick": 1000 * SECOND,
        "host": b"node1",
        "enter_tick": 0,
        "last_tick": 1020 * SECOND,
        "mpi_ticks": 8 * SECOND,
        "init_cpu": SECOND,
        "iteration_seq": 3,
        "latest_seq": 8,
    }
    marks = {
        "first": (0, 101 * SECOND, 1002 * SECOND, SECOND // 2, SECOND, 0, 2**20, 0.5),
        "odd": (20, 109 * SECOND, 1018 * SECOND, 6 * SECOND, 5 * SECOND, 4 * SECOND, 2**20, 0.5),
        "even": (20, 110 * SECOND, 1020 * SECOND, 7 * SECOND, 6 * SECOND, 4 * SECOND, 2**21, 0.5),
    }
    calls = {"MPI_Send": (7, SECOND), "MPI_Recv": (0, 0)}
    names = more.pop("names", list(calls))
    for name, value in more.items():
        (marks if name in marks else fields)[name] = value  # type: ignore[index]
    parts = [page.HEAD.pack(*fields.values()), page.WAITS.pack(30, 4, SECOND)]
    parts += [page.MARK.pack(*marks[m]) for m in ("first", "even", "odd", "even", "odd")]
    table = b"".join(page.CALL.pack(*value) for value in calls.values())
    parts.append(table.ljust(page.CALLS_MAX * page.CALL.size, b"\0"))
    text = b"".join(str(name).encode().ljust(page.NAME_MAX, b"\0") for name in names)
    parts.append(text.ljust(page.CALLS_MAX * page.NAME_MAX, b"\0"))
    return b"".join(parts)


def test_the_figures_of_a_page_are_those_that_were_written():
    one = page.parse(good())
    assert (one.rank, one.world_size, one.world, one.host) == (1, 4, 0, "node1")
    assert (one.mpi, one.state, one.iteration_source) == ("openmpi", "finalized", "openfoam")
    assert not one.alive
    assert one.elapsed_s == pytest.approx(10)
    assert one.useful_s == pytest.approx(6)
    assert one.mpi_s == pytest.approx(4)
    assert one.cpu_s == pytest.approx(7)
    assert one.calls == {"MPI_Send": (7, pytest.approx(0.5))}
    assert (one.iterations, one.iter_stamp, one.iter_cpu_s) == (20, 109.0, 6.0)
    assert (one.iter_useful_s, one.iter_mpi_s, one.peak_rss) == (5.0, 4.0, 2**21)
    assert one.waits == page.Waits(30, 4, 1.0)
    assert one.first is not None
    assert one.first.cpu_s == 0.5


def test_a_rank_without_mpi_has_no_calls():
    one = page.parse(good(ncalls=0))
    assert one.calls == {}
    assert (one.iterations, one.iter_stamp) == (20, 109.0)


@pytest.mark.parametrize(
    ("source", "name", "beat"), [(0, "none", -1), (2, "pcontrol", -1), (3, "lammps", -1),
                                 (4, "rhythm", 0), (35, "rhythm", 31), (36, "rhythm", page.OWN)]
)  # fmt: skip
def test_a_rhythm_says_which_call_it_was_taken_from(source, name, beat, tmp_path):
    one = page.parse(good(source=source))
    assert (one.iteration_source, one.beat) == (name, beat)
    (tmp_path / "rank.1.7").write_bytes(good(source=source))
    with open(tmp_path / "rank.1.7", "rb") as file:
        marks = page.read_marks(file.fileno())
    assert (marks.counts, marks.beat) == (source != 0, beat)


def test_a_killed_rank_counts_to_its_last_mpi_call():
    one = page.parse(good(state=1, last_tick=1016 * SECOND, even=(0,) * 7 + (0.5,)))
    assert not one.alive
    one = page.parse(good(state=1, last_tick=1024 * SECOND))
    assert one.stamp == pytest.approx(112)
    assert one.elapsed_s == pytest.approx(12)
    assert one.mpi_s == pytest.approx(4)
    assert one.useful_s == pytest.approx(8)


@pytest.mark.parametrize(
    ("enter", "state"), [(1019 * SECOND, "running"), (1021 * SECOND, "in_mpi")]
)
def test_a_call_that_has_been_left_is_over(enter, state):
    assert page.parse(good(state=1, enter_tick=enter)).state == state


REFUSED = {
    "another file's first bytes": (good(magic=b"\x7fELF\2\1\1\0"), "not a page"),
    "an empty file": (b"", "not filled in yet"),
    "a foreign version": (good(version=2), "version 2, this program reads 3"),
    "a foreign size": (good(size=4096), "4096"),
    "a page cut short": (good()[:-1], "12823 bytes"),
    "a page cut in its head": (good()[:20], "ends after 20 bytes"),
    "a page with more behind it": (good() + b"x", "12825 bytes"),
    "an unknown MPI": (good(mpi=3), "impossible MPI"),
    "an unknown state": (good(state=0), "impossible state"),
    "an unknown iteration source": (good(source=37), "impossible iteration source"),
    "a rank outside its world": (good(rank=4), "impossible rank"),
    "more calls than there is room for": (good(ncalls=257), "impossible number of calls"),
    "a call that is not in the table": (good(current=3), "impossible current call"),
    "no pid": (good(pid=0), "impossible pid"),
    "an MPI_Init before time began": (good(init=0), "impossible time of MPI_Init"),
    "a clock that is not a number": (good(even=(0,) * 7 + (float("nan"),)), "per tick"),
    "a clock that stands still": (good(even=(0,) * 7 + (0.0,)), "per tick"),
    "a mark before MPI_Init": (good(odd=(1, SECOND, 0, 0, 0, 0, 0, 0.5)), "impossible times"),
    "CPU time of ages": (good(odd=(1, 0, 0, 2**63, 0, 0, 0, 0.5)), "impossible times"),
    "iterations beyond counting": (good(odd=(2**60, 0, 0, 0, 0, 0, 0, 0.5)), "impossible counts"),
    "a call without a name": (good(names=["", "MPI_Recv"]), "call 0 has no name"),
    "a name with a control character": (good(names=["MPI_Se\nd", "MPI_Recv"]), "call 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_is_refused_with_a_reason(case, tmp_path):
    data, reason = REFUSED[case]
    path = tmp_path / "rank.1.77"
    path.write_bytes(data)
    with pytest.raises(page.PageError, match=reason) as error:
        page.read_page(path)
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_a_page_not_yet_filled_in_is_left_out(tmp_path):
    (tmp_path / "rank.0.10").write_bytes(bytes(page.SIZE))
    (tmp_path / "rank.2.12").touch()
    (tmp_path / "rank.1.11").write_bytes(good())
    (tmp_path / "control").write_bytes(b"not a page")
    assert [one.rank for one in page.read_pages(tmp_path)] == [1]


def test_of_programs_in_a_row_the_last_counts(tmp_path):
    later = {"init": 115 * SECOND, "odd": (0,) * 7 + (0.5,), "even": (0,) * 7 + (0.5,)}
    for rank in range(4):
        (tmp_path / f"rank.{rank}.{rank + 10}").write_bytes(good(rank=rank))
    for rank in range(2):
        data = good(rank=rank, world_size=2, source=0, first=(0,) * 7 + (0.0,), **later)
        (tmp_path / f"rank.{rank}.{rank + 5}").write_bytes(data)
    assert [(one.rank, one.world_size) for one in page.read_pages(tmp_path)] == [(0, 2), (1, 2)]


@pytest.mark.parametrize(("tool", "program"), [(1, 2), (3, 3)])
def test_a_tool_that_a_rank_starts_does_not_take_its_place(tool, program, tmp_path):
    """Nor does one that starts the program, as a script with an MPI of its own."""
    later = {"odd": (0,) * 7 + (0.5,), "even": (0,) * 7 + (0.5,), "first": (0,) * 7 + (0.0,)}
    for rank in range(2):
        (tmp_path / f"rank.{rank}.{rank + 10}").write_bytes(good(rank=rank, world_size=2))
    (began,) = {one.init_s for one in page.read_pages(tmp_path)}
    for rank in range(tool):
        data = good(
            rank=rank, world_size=tool, source=0, init=int(began * SECOND) + SECOND, **later
        )
        (tmp_path / f"rank.{rank}.{rank + 5}").write_bytes(data)
    assert {one.world_size for one in page.read_pages(tmp_path)} == {program}


@pytest.mark.parametrize("ends", [False, True], ids=["while it runs", "when it has ended"])
def test_a_tool_as_large_as_the_program_does_not_take_its_place(ends, tmp_path):
    """As where one rank starts a program of one rank; what comes after it is the next program."""
    (tmp_path / "rank.0.10").write_bytes(good(rank=0, world_size=1))
    began = (112 if ends else 105) * SECOND
    marks = dict.fromkeys(("odd", "even", "first"), (0, began, 1000 * SECOND, 0, 0, 0, 0, 0.5))
    data = good(rank=0, world_size=1, source=0, init=began, **marks)
    (tmp_path / "rank.0.9").write_bytes(data)
    (one,) = page.read_pages(tmp_path)
    assert one.init_s == (112 if ends else 100)


def test_spawned_worlds_are_apart(tmp_path):
    for world in (0, 7):
        (tmp_path / f"rank.1.{world}").write_bytes(good(world=world))
    assert [one.world for one in page.read_pages(tmp_path)] == [0, 7]


@pytest.mark.parametrize("kind", ["link", "directory", "missing", "fifo"])
def test_only_a_plain_file_is_a_page(kind, tmp_path):
    path = tmp_path / "rank.0.1"
    if kind == "link":
        (tmp_path / "other").write_bytes(good())
        path.symlink_to(tmp_path / "other")
    elif kind == "directory":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    with pytest.raises(page.PageError):
        page.read_page(path)


def read(data: bytes) -> None:
    reason = ""
    try:
        one = page.parse(data)
    except page.PageError as error:
        reason = str(error)
    else:
        assert one.elapsed_s >= 0
        assert one.elapsed_s == pytest.approx(one.useful_s + one.mpi_s)
    assert "\n" not in reason


@settings(max_examples=300)
@given(st.binary(max_size=300), st.booleans())
def test_no_bytes_crash_the_reader(data, magic):
    read(page.MAGIC + data if magic else data)


@settings(max_examples=500)
@given(
    st.lists(
        st.tuples(
            st.one_of(st.integers(0, 600), st.integers(0, page.SIZE - 8)),
            st.one_of(st.binary(min_size=1, max_size=8), st.sampled_from([b"\xff" * 8, bytes(8)])),
        ),
        max_size=6,
    )
)
def test_no_damage_crashes_the_reader(damage):
    data = bytearray(good())
    for at, what in damage:
        data[at : at + len(what)] = what
    read(bytes(data))


# --- The description in C ---


def test_the_layout_is_that_of_the_header(tmp_path):
    """Offsets as the compiler sees them in page.h."""
    program = tmp_path / "offsets"
    source = tmp_path / "offsets.c"
    header = Path(__file__).resolve().parents[2] / "pmpi" / "page.h"
    source.write_text(
        f"""#include "{header}"
#include <stddef.h>
#include <stdio.h>
#define AT(member) (int)offsetof(struct dovetail_page, member)
int main(void) {{
    printf("%d %d %d %d %d\\n", (int)sizeof(struct dovetail_page), AT(iteration_seq), AT(first),
           AT(calls), AT(names));
    printf("%d %d\\n", (int)sizeof(struct dovetail_control),
           (int)offsetof(struct dovetail_control, seq));
    return 0; }}"""
    )
    subprocess.run(["cc", "-o", str(program), str(source)], check=True)
    done = subprocess.run([str(program)], capture_output=True, text=True, check=True)
    assert list(map(int, done.stdout.split())) == [
        *(page.SIZE, page.SEQUENCES_AT, page.MARKS_AT, page.CALLS_AT, page.NAMES_AT),
        *(control_page.LAYOUT.size, control_page.SEQ_AT),
    ]


# --- Control ---


def test_a_change_of_the_wait_policy_can_be_read_back(tmp_path):
    control = Control.create(tmp_path, WaitPolicy("doorbell", 20))
    assert (tmp_path / "control").stat().st_mode & 0o777 == 0o600
    other = Control(tmp_path)
    for policy in (WaitPolicy("off", 20), WaitPolicy("yield", 0), WaitPolicy("doorbell", 5)):
        control.set(policy)
        assert other.get() == policy
    data = (tmp_path / "control").read_bytes()
    assert struct.unpack_from("=3I", data, control_page.SEQ_AT) == (4, 2, 5)
    control.close()
    other.close()


@pytest.mark.parametrize("policy", [WaitPolicy("sleep"), WaitPolicy("off", -1)])
def test_an_impossible_wait_policy_is_refused(policy, tmp_path):
    with pytest.raises(BadInput):
        Control.create(tmp_path, policy)


@pytest.mark.parametrize("data", [b"", b"x" * 64, control_page.MAGIC + b"\2" * 56])
def test_a_foreign_control_page_is_refused(data, tmp_path):
    (tmp_path / "control").write_bytes(data)
    with pytest.raises(page.PageError):
        Control(tmp_path)
