# SPDX-License-Identifier: LGPL-3.0-or-later
"""A rhythm makes a sample's iterations where all ranks have the same, and nothing tells better."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from dovetail.executors.kubernetes.rank_samples import RankSamples
from dovetail.executors.pods.samples import Reader
from dovetail.mpi import page, sampling, time_lines

pytestmark = pytest.mark.unit

NOW = 1000.0
COUNTED, UNCOUNTED = (40, 41), (0, 0)


@dataclass(frozen=True)
class Rank:
    """What a sample takes of a rank's page; it is beyond its last iteration."""

    iterations: int
    beat: int = 2
    iteration_source: str = "rhythm"
    iter_stamp: float = NOW - 1
    stamp: float = NOW
    iter_cpu_s: float = 1.0
    iter_useful_s: float = 1.0
    iter_mpi_s: float = 1.0
    cpu_s: float = 2.0
    useful_s: float = 2.0
    mpi_s: float = 2.0
    peak_rss: int = 4096


CASES = {
    "all ranks have it": ((Rank(40), Rank(41)), COUNTED),
    "they took it from two calls": ((Rank(40), Rank(41, beat=3)), UNCOUNTED),
    "each found one, and they count alike": ((Rank(40, page.OWN), Rank(41, page.OWN)), COUNTED),
    "each found one, half of the other's": ((Rank(40, page.OWN), Rank(20, page.OWN)), UNCOUNTED),
    "one found its own": ((Rank(40), Rank(41, page.OWN)), UNCOUNTED),
    "one has none": ((Rank(40), Rank(41, -1, "none")), UNCOUNTED),
    "one tells its iterations": ((Rank(40), Rank(41, -1, "pcontrol")), UNCOUNTED),
    "one has been silent for long": (
        (Rank(40), Rank(41, iter_stamp=NOW - page.QUIET)), UNCOUNTED),
    "iterations do not fall silent": (
        tuple(Rank(n, -1, "openfoam", NOW - page.QUIET) for n in COUNTED), COUNTED),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_rhythm_counts_if_all_ranks_have_it(case, tmp_path):
    ranks, iterations = case
    sample = sampling.of_pages(ranks, tmp_path, 0.0)
    assert sample.iterations == iterations
    kind = "iterations" if ranks[0].beat < 0 else "periods"
    assert sample.measure == (kind if iterations == COUNTED else "work")
    fresh = all(NOW - rank.iter_stamp < page.QUIET for rank in ranks)
    assert sample.cpu == ((1.0, 1.0) if iterations == COUNTED and fresh else (2.0, 2.0))


@pytest.mark.parametrize(("beat", "source"), [(2, "rhythm"), (-1, "openfoam")])
def test_lines_of_the_log_count_before_a_rhythm_and_after_all_else(beat, source, tmp_path):
    time_lines.Counter(str(tmp_path)).take(b"Time = 1\nTime = 2\nTime = 3\n")
    sample = sampling.of_pages([Rank(40, beat, source)], tmp_path, 0.0)
    assert sample.iterations == ((2,) if source == "rhythm" else (40,))
    assert sample.measure == "iterations"


def test_where_the_last_iteration_is_long_over_a_sample_tells_what_ranks_do_now(tmp_path):
    works = Rank(40, -1, "lammps", NOW - page.QUIET, cpu_s=30.0, useful_s=31.0)
    stopped = Rank(40, -1, "lammps", NOW - page.QUIET, cpu_s=1.0, useful_s=61.0)
    sample = sampling.of_pages([works, stopped], tmp_path, 0.0)
    assert (sample.iterations, sample.stamp) == ((40, 40), (NOW - page.QUIET,) * 2)
    assert sample.useful == (30.0, 1.0), "what uses no CPU does not work"
    sample = sampling.of_pages([works, stopped], tmp_path, 0.0, awaited=(5.0, 20.0))
    assert sample.useful == (31.0, 21.0), "what waits for a core would, outside MPI"


ALIKE = {
    "both new": ((16, 16), True),
    "one a beat ahead, one not published": ((18, 16), True),
    "two for three, as early as may be": ((16, 24), False),
    "one for two": ((16, 32), False),
    "a little apart": ((10000, 9400), True),
    "drifted apart": ((10000, 9300), False),
    "fifteen for sixteen": ((15000, 16000), True),
    "fourteen for fifteen": ((14000, 15000), False),
}


@pytest.mark.parametrize("case", ALIKE.values(), ids=ALIKE.keys())
def test_ranks_that_found_their_beats_alone_must_count_alike(case):
    counts, alike = case
    assert page.count_alike([page.OWN] * 2, counts) == alike
    assert page.count_alike([2, 2], counts), "a call of all ranks is the same for all"
    rows = [[count, 1.0, 1.0, 1.0, 1.0, 1, page.OWN] for count in counts]
    sample = sampling.of_values(rows, (0, 0.0, -1.0), False)
    assert (sample.measure, sample.iterations) == (
        ("periods", counts) if alike else ("work", UNCOUNTED)
    )


@pytest.mark.parametrize(
    ("other", "count", "kind"),
    [(page.RHYTHM + page.OWN, 10, "rhythm"), (page.RHYTHM + page.OWN, 20, "none"), (0, 0, "none")],
    ids=["alike", "unlike", "a master without"],
)
def test_pages_read_together_have_a_beat_that_each_found_alone_if_they_count_alike(
    other, count, kind, tmp_path
):
    publish(tmp_path, page.RHYTHM + page.OWN, 0.0, ranks=2)
    publish(tmp_path, other, 0.0, rank=1, ranks=2, count=count)
    first, second = page.read_pages(tmp_path)
    assert (first.iteration_source, second.iteration_source) == (kind, kind)
    assert (first.iterations, second.iterations) == ((10, 10) if kind == "rhythm" else (0, 0))
    assert (first.first is None) == (kind == "none")


@pytest.mark.parametrize("other", [page.RHYTHM + 1, 0], ids=["another call", "none"])
def test_pages_read_together_have_no_rhythm_where_ranks_took_it_from_different_calls(
    other, tmp_path
):
    publish(tmp_path, page.RHYTHM, 0.0, ranks=2, count=24)
    publish(tmp_path, other, 0.0, rank=1, ranks=2, count=9)
    found = page.read_pages(tmp_path)
    assert [one.iteration_source for one in found] == ["none", "none"]
    assert [one.first for one in found] == [None, None]


def publish(
    directory: Path,
    source: int,
    age: float,
    rank: int = 0,
    ranks: int = 1,
    count: int = 10,
    pid: int = 7,
    began: int = 1,
    queued: int = 0,
    useful: int = 7,
    world: int = 0,
) -> None:
    """A rank's page: so many iterations, the last one `age` seconds ago."""
    now = time.monotonic_ns()
    boundary = (count, now - int(age * 1e9), 0, 5, 5, 5, 4096, 1.0)
    latest = (count, now, 0, 7, useful, 7, 4096, 1.0)
    head = (
        page.MAGIC, page.VERSION, page.SIZE, 0, 1, rank, ranks, world, 0, pid, 1, source, 0, 5,
        began, 1, b"node",
    )  # fmt: skip
    parts = [page.HEAD.pack(*head, 0, 0, 0, 0, count, now), page.WAITS.pack(0, 0, queued)]
    parts += [page.MARK.pack(*one) for one in (boundary, boundary, boundary, latest, latest)]
    (directory / f"rank.{rank}.{pid}").write_bytes(b"".join(parts).ljust(page.SIZE, b"\0"))


@pytest.mark.parametrize(
    ("source", "age", "count"),
    [(1, 999.0, 10), (3, 999.0, 10), (6, 0.0, 10), (6, 999.0, -1), (0, 0.0, -1)],
    ids=["iterations", "time steps", "a rhythm", "a rhythm that fell silent", "none"],
)  # fmt: skip
def test_pods_send_the_same(source, age, count, tmp_path):
    publish(tmp_path, source, age)
    reader = Reader(str(tmp_path))
    found, _ = reader.look()
    assert found["0"][0] == count
    assert found["0"][6] == (2 if source == 6 and count > 0 else -1), "the call of the rhythm"
    assert found["0"][2] == pytest.approx(7e-9 if count < 0 or age else 5e-9), "as of now"
    assert found["0"][3] == pytest.approx(found["0"][2])
    assert reader.look()[0] == {}
    reader.close()


def test_pages_of_spawned_worlds_are_read_once(tmp_path):
    """A program may spawn thousands."""
    publish(tmp_path, 1, 0.0)
    for pid in range(20, 24):
        publish(tmp_path, 1, 0.0, pid=pid, world=pid)
    spawned: set[str] = set()
    (own,) = sampling.here(tmp_path, spawned)
    assert (own.pid, len(spawned)) == (7, 4)
    reader, before = Reader(str(tmp_path)), len(os.listdir("/proc/self/fd"))
    assert reader.look()[0].keys() == {"0"}
    assert len(os.listdir("/proc/self/fd")) == before + 1
    for name in spawned:
        (tmp_path / name).write_bytes(b"nobody reads this")
    assert [one.pid for one in sampling.here(tmp_path, spawned)] == [7]
    publish(tmp_path, 1, 0.0, count=11)
    assert reader.look()[0]["0"][0] == 11
    assert len(os.listdir("/proc/self/fd")) == before + 1
    reader.close()


def test_pods_count_what_a_rank_waits_for_a_core_as_work(tmp_path):
    publish(tmp_path, 1, 999.0, queued=100, useful=40)
    reader = Reader(str(tmp_path))
    assert reader.look()[0]["0"][3] == pytest.approx(7e-9), "from then on"
    publish(tmp_path, 1, 999.0, queued=120, useful=40)
    assert reader.look()[0]["0"][3] == pytest.approx(27e-9)
    publish(tmp_path, 1, 999.0, queued=200, useful=40)
    assert reader.look()[0]["0"][3] == pytest.approx(40e-9), "outside MPI"
    publish(tmp_path, 1, 0.0, queued=200, count=12)
    assert reader.look()[0]["0"][3] == pytest.approx(5e-9)
    publish(tmp_path, 1, 999.0, queued=220, useful=40, count=13)
    assert reader.look()[0]["0"][3] == pytest.approx(27e-9), "since its iteration"
    reader.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_pods_do_not_take_a_tool_that_a_rank_started_for_it(ranks, tmp_path):
    for rank in range(ranks):
        publish(tmp_path, 1, 0.0, rank, ranks)
    reader = Reader(str(tmp_path))
    assert reader.look()[0].keys() == {str(rank) for rank in range(ranks)}
    publish(tmp_path, 0, 0.0, pid=8, count=0, began=time.monotonic_ns())
    reader.look()  # nobody can tell yet
    for rank in range(ranks):
        publish(tmp_path, 1, 0.0, rank, ranks, count=12)
    found, _ = reader.look()
    assert [found[str(rank)][0] for rank in range(ranks)] == [12] * ranks
    assert len(reader.waits()) == ranks
    reader.close()


def test_pods_say_when_a_rhythm_falls_silent_or_the_log_tells_better(tmp_path, monkeypatch):
    publish(tmp_path, 6, 0.0)
    reader = Reader(str(tmp_path))
    assert reader.look()[0]["0"][0] == 10
    assert reader.look()[0] == {}
    time_lines.Counter(str(tmp_path)).take(b"Time = 1\n")
    assert reader.look()[1][0] == 1
    assert reader.look()[0]["0"][0] == -1
    reader.forget()
    assert reader.look()[0]["0"][0] == -1
    os.unlink(tmp_path / time_lines.FILE)
    reader.close()
    reader = Reader(str(tmp_path))
    assert reader.look()[0]["0"][0] == 10
    monkeypatch.setattr(page, "QUIET", 0.0)
    assert reader.look()[0]["0"][0] == -1
    assert reader.look()[0] == {}
    reader.close()


def test_pods_whose_pages_tell_nothing_are_known_by_what_they_use():
    """Two ranks in the first pod, of which both have a page, and one in another that has none."""
    samples = RankSamples(3)
    rows = {str(rank): [-1, 7.0, 1.0, 2.0, 3.0, 100, -1] for rank in range(2)}
    samples.take(rows, None, 3.0)
    assert samples.new(False) is None
    samples.take_used({"1": [5.0, 300], "7": [1.0, 1]}, (2, 1), 11.0)
    first = samples.new(False)
    assert first.measure == "work"
    assert (first.stamp, first.cpu, first.memory) == ((10, 10, 11), (1, 1, 5), (100, 100, 300))
    samples.take_used({"0": [4.0, 500], "1": [6.0, 300]}, (2, 1), 13.0)
    second = samples.new(False)
    assert (second.cpu, second.useful, second.mpi) == ((3, 3, 6), (5, 5, 2), (3, 3, 0))
    assert second.memory == (250, 250, 300)
    samples.take({"0": [40, 9.0, 5.0, 5.0, 5.0, 100, 2]}, None, 3.0)
    samples.take_used({"0": [9.0, 500]}, (2, 1), 14.0)
    assert samples.new(False).cpu[0] == 5.0, "it counts"
