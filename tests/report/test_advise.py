# SPDX-License-Identifier: LGPL-3.0-or-later
"""Advice: right in the cases whose answer is known, with evidence, alternatives first."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest
import yaml
from dovetail.cli import main
from dovetail.core import protocol, units
from dovetail.mpi import profile
from dovetail.report import advise, figures, summary
from dovetail.report.advise import Known
from dovetail.report.alternatives import FEWER, SEQUENTIAL, Alternative
from dovetail.report.history import Load
from support import made_up_runs

pytestmark = pytest.mark.unit


def known(*need, wall=1.0, **more):
    return Known("case", np.array(need), wall, "100 iterations", **more)


def by_topic(one, cores):
    return {piece.topic: piece for piece in advise.advise([one], cores)}


@pytest.mark.parametrize(
    ("one", "cores", "pays", "bound"),
    [
        (known(1 / 3, 1.0), 2, True, 1.5),
        (known(1.0, 1.0), 2, False, 1.0),
        (known(0.97, 1.0), 2, False, 1.02),
        (known(1.0, 1.0), 8, True, 4.0),
        (known(1.0), 1, False, 1.0),
        (known(1 / 15, 1 / 15, 1 / 3, 1.0), 4, True, 2.73),
        (known(1.0, 1.0, 1.0, 1.0), 2, False, 1.0),
    ],
    ids=[
        "two ranks 1 to 3 on two cores",
        "balanced on full cores",
        "almost balanced on full cores",
        "balanced with free cores",
        "one rank on one core",
        "four ranks 1 1 5 15",
        "measured on twice the cores",
    ],
)
def test_packing_is_advised_where_cores_are_idle(one, cores, pays, bound):
    packing = by_topic(one, cores)["packing"]
    assert ("do not pack" in packing.statement) != pays
    assert packing.source == "predicted"
    assert packing.range[0] <= packing.gain <= packing.range[1] <= bound * 1.01
    assert f"{bound:.2f}" in packing.statement


def test_packing_never_breaks_the_slowdown_budget():
    tight = by_topic(known(1 / 3, 1.0, slowdown=1.1), 2)["packing"]
    assert "do not pack" in tight.statement
    assert "1.1 at most" in tight.statement, "as it would bring something, it says what is against"


def test_ranks_that_have_cores_to_themselves_need_no_slowdown():
    """A run packs them so, whatever the plan allows."""
    packing = by_topic(known(1.0, slowdown=1.0), 4)["packing"]
    assert "packing 4 at once" in packing.statement


@pytest.mark.parametrize(
    ("one", "cores", "gain"),
    [
        (known(1 / 3, 1.0), 2, 1.35),
        (known(0.5, 0.5), 2, 1.8),
        (known(1.0, 1.0), 2, None),
        (known(1.0), 2, None),
        (known(0.2, 0.2, outside=np.array([0.5, 0.5])), 2, 1.8),
        (known(0.2, 0.2, outside=np.array([1.0, 1.0])), 2, None),
    ],
    ids=[
        "imbalanced",
        "half the time in MPI",
        "nothing to win",
        "one rank already",
        "some sleep",
        "all the time outside MPI, and mostly asleep",
    ],
)
def test_fewer_ranks_are_advised_where_the_work_adds_up_to_less(one, cores, gain):
    fewer = by_topic(one, cores).get("fewer ranks")
    assert (fewer.gain if fewer else None) == (pytest.approx(gain) if gain else None)
    if fewer:
        assert fewer.range[0] < fewer.range[1]
        assert "memory" in fewer.statement
        assert f"{cores} or more of them with 1 rank each" in fewer.statement
        assert "while they iterate" in fewer.statement
        assert "put `ranks: 1-2` into the plan" in fewer.statement


def test_what_beats_packing_is_said_first():
    topics = [piece.topic for piece in advise.advise([known(1 / 3, 1.0)], 2)]
    assert topics.index("fewer ranks") < topics.index("packing")


@pytest.mark.parametrize(
    ("one", "cores", "advised"),
    [
        (known(1 / 3, 1.0), 2, True),
        (known(1.0, 1.0), 2, False),
        (known(1 / 3, 1.0), 1, False),
    ],
    ids=["imbalanced, a core each", "balanced", "ranks share cores"],
)
def test_another_decomposition_is_advised_where_it_shortens_the_iteration(one, cores, advised):
    weights = by_topic(one, cores).get("weights")
    assert (weights is not None) == advised
    if weights:
        assert weights.gain == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("weights", "advised"),
    [((1.0, 3.0), False), ((1.0, 1.0), True), ((1.0, 2.9), False), ((), False)],
    ids=["as the load", "not as the load", "near enough", "unknown"],
)
def test_requests_follow_the_load_and_not_the_plan(weights, advised):
    pieces = advise.advise([known(1 / 3, 1.0, weights=weights)], 1)
    given = [piece.statement for piece in pieces if piece.topic == "weights"]
    assert given == (
        ["case: put weights 1,3 into the plan; its weights are not the ranks' load."]
        if advised
        else []
    )


def test_small_parts_of_the_work_are_told_apart():
    one = known(*[1.0] * 60, 1.5, weights=(1.0,) * 61)
    pieces = advise.advise([one], 64)
    told = [piece.evidence for piece in pieces if "put weights" in piece.statement]
    assert told == ["rank 60 does 2.4% of the work and has 1.6% of the weight (100 iterations)"]


@pytest.mark.parametrize("light", [1 / 100, 1 / 123, 1e-6])
def test_a_plan_takes_the_weights_that_are_advised(light):
    """1e+02 is a text to YAML."""
    pieces = advise.advise([known(light, 1.0, weights=(1.0, 1.0))], 1)
    (said,) = [piece.statement for piece in pieces if piece.topic == "weights"]
    weights = yaml.safe_load(f"[{said.partition('weights ')[2].partition(' ')[0]}]")
    assert [units.weight(one) for one in weights] == [1.0, pytest.approx(1 / light)]


def test_a_limit_is_advised_against_once():
    pieces = advise.advise([known(1.0, 1.0), known(0.25, 0.5)], 2)
    assert [piece.topic for piece in pieces].count("limit") == 1
    assert "2000m" in pieces[-1].statement


def test_nothing_known_gives_no_advice():
    assert advise.advise([], 2) == []


def test_every_piece_has_evidence_and_a_source():
    for piece in advise.advise([known(1 / 3, 1.0, weights=(1.0, 1.0)), known(1.0, 1.0)], 2):
        assert piece.evidence
        assert piece.source in ("measured", "predicted")
        assert piece.statement.endswith(".")


def test_a_run_gives_measured_advice():
    found = summary.summarise(made_up_runs.mixed().history())
    pieces = advise.advise(advise.from_summary(found), 2)
    packing = {p.name: p for p in pieces if p.topic == "packing"}
    assert {p.source for p in packing.values()} == {"measured"}
    assert packing["pitz"].statement.startswith("pitz: pack 2 at once")
    assert packing["even"].statement.startswith("even: do not pack")


def point(n, throughput, seconds=20.0, slowdown=1.5):
    same = (throughput, throughput)
    return figures.Point(n, throughput, same, slowdown, (slowdown, slowdown), seconds)


@pytest.mark.parametrize(
    ("points", "says"),
    [
        ((point(2, 1.3), point(3, 1.5, 2.5)), "pack 2 at once; while they iterate, it gives 1.30"),
        ((point(2, 1.3), point(3, 1.5, slowdown=2.3)), "pack 2 at once; while they iterate"),
        ((point(2, 1.3), point(3, 1.32)), "pack 2 at once; while they iterate"),
        ((point(2, 1.3), point(3, 1.4)), "pack 3 at once; while they iterate"),
        ((point(2, 0.95), point(3, 1.4, 2.5)), "do not pack; 2 at once gave 0.95"),
        ((point(2, 1.3, 2.5),), "whether packing pays is not known; 2 at once gave 1.30 times"),
        ((point(2, 0.9, 2.5, 2.2),), "do not pack; 2 at once gave 0.90"),
        ((point(2, 1.3, slowdown=2.3),), "each ran 2.30 times slower than alone, where its slow"),
    ],
    ids=[
        "three were tried for a moment",
        "three are slower than the plan allows",
        "three bring no more",
        "three bring more",
        "two bring nothing",
        "a moment is all there is",
        "a moment that brought nothing",
        "two are slower than the plan allows",
    ],
)
def test_no_packing_is_advised_that_the_run_would_take_back(points, says):
    packing = by_topic(known(1 / 3, 1.0, wall=0.1, points=points), 2)["packing"]
    assert says in packing.statement
    assert packing.source == "measured"


def test_long_iterations_take_longer_to_tell_whether_packing_pays():
    made = [known(0.3, 1.0, wall=wall, points=(point(2, 1.3, 20.0),)) for wall in (1.0, 10.0)]
    said = [by_topic(one, 2)["packing"].statement for one in made]
    assert ["pack 2 at once" in one for one in said] == [True, False]


def test_ranks_with_cores_to_themselves_need_no_budget_to_be_packed():
    packing = by_topic(known(0.3, 1.0, points=(point(2, 1.3, slowdown=2.5),)), 4)["packing"]
    assert packing.statement.startswith("case: pack 2 at once")


@pytest.mark.parametrize(
    ("seconds", "says"),
    [(18.0, "run on fewer ranks side by side"), (30.0, "stay with these ranks")],
    ids=["fewer ranks win", "fewer ranks lose"],
)
def test_measured_fewer_ranks_are_reported_as_they_came_out(seconds, says):
    others = [
        Alternative(family="pitz", name=FEWER, makespan_s=[seconds], ranks=1),
        Alternative(family="pitz", name=SEQUENTIAL, makespan_s=[36.0], ranks=2),
    ]
    found = summary.summarise(made_up_runs.packed().history(), others)
    fewer = by_topic(advise.from_summary(found)[0], 2)["fewer ranks"]
    assert says in fewer.statement
    assert ("`ranks: 1-2` in the plan" in fewer.statement) == (seconds < 30.0)
    assert (fewer.source, fewer.gain) == ("measured", pytest.approx(36.0 / seconds))


def test_what_a_run_finds_out_by_itself_is_not_advised():
    """Where the plan leaves ranks open: it packs and takes fewer as far as that pays."""
    run = made_up_runs.packed()
    kept = {one.topic for one in advise.advise(advise.from_summary(summarised(run)), 2)}
    run.specs = [replace(one, widths=(1, 2)) for one in run.specs]
    left = {one.topic for one in advise.advise(advise.from_summary(summarised(run)), 2)}
    assert kept - left == {"packing", "fewer ranks"}
    assert left == {"weights", "limit"}


def summarised(run):
    return summary.summarise(run.history())


def test_what_was_measured_on_other_cores_is_not_told_of_these():
    found = summary.summarise(made_up_runs.packed().history())

    def source(cores):
        given = advise.advise(advise.from_summary(found, cores), cores)
        return next(one.source for one in given if one.topic == "packing")

    assert source(2.0) == "measured"
    assert source(64.0) == "predicted"


def test_the_command_takes_a_run_and_its_cores(tmp_path, capsys):
    made_up_runs.mixed().save(tmp_path)
    assert main.main(["advise", "--json", str(tmp_path)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["cores"] == 2
    assert {"topic", "statement", "evidence", "source", "gain", "range"} <= set(data["advice"][0])
    assert main.main(["advise", str(tmp_path)]) == 0
    assert "[measured]" in capsys.readouterr().out


def test_a_run_that_tells_nothing_says_why(tmp_path, capsys):
    """It may have run for hours."""
    run = made_up_runs.packed()
    run.log = [uncounted(entry) for entry in run.log]
    run.save(tmp_path / "work")
    assert main.main(["advise", str(tmp_path / "work")]) == 2
    assert "pitz: measured by work, which tells of rates" in capsys.readouterr().err
    run = made_up_runs.mixed()
    run.log.clear()
    run.save(tmp_path / "none")
    assert main.main(["advise", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    why = "none: pitz: no iteration was seen while a simulation ran alone, and likewise 1 more\n"
    assert said.startswith("dovetail: nothing to give advice by: ")
    assert said.endswith(why)


def test_of_several_those_that_tell_nothing_are_named(tmp_path, capsys):
    made_up_runs.mixed().save(tmp_path / "mixed")
    run = made_up_runs.packed()
    run.log.clear()
    run.save(tmp_path / "none")
    assert main.main(["advise", str(tmp_path / "mixed"), str(tmp_path / "none")]) == 0
    told = capsys.readouterr()
    assert "pitz: pack 2 at once" in told.out
    why = "pitz: no iteration was seen while a simulation ran alone"
    assert told.err == f"dovetail: no advice on {tmp_path}/none: {why}\n"


def uncounted(entry):
    if not isinstance(entry, protocol.Sampled):
        return entry
    return replace(entry, ranks=replace(entry.ranks, iterations=(0, 0), measure="work"))


@pytest.mark.parametrize("cores", ["0", "-1", "nan", "1e9"])
def test_cores_that_make_no_sense_are_refused(tmp_path, capsys, cores):
    assert main.main(["advise", "--cores", cores, str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def rank(number, cpu, useful, wall, iterations=100, counted=True):
    return profile.RankProfile(
        rank=number,
        world=0,
        pid=1,
        host="h",
        ended="finalized",
        iterations=iterations,
        iteration_source="openfoam",
        elapsed_s=wall * 100,
        useful_s=useful * 100,
        mpi_s=(wall - useful) * 100,
        cpu_s=cpu * 100,
        cpu_per_iteration=cpu if counted else None,
        useful_per_iteration=useful if counted else None,
        seconds_per_iteration=wall if counted else None,
        peak_rss=0,
        calls={},
    )


def save(path, *ranks):
    profile.save(profile.Profile(("a.out",), "openmpi", "off", 0, ranks), path)
    return path


@pytest.mark.parametrize("counted", [True, False], ids=["with iterations", "without"])
def test_a_profile_file_gives_the_advice_of_its_figures(tmp_path, capsys, counted):
    ranks = [rank(n, 1.0, useful, 1.0, counted=counted) for n, useful in enumerate((1 / 3, 1.0))]
    path = save(tmp_path / "pitz.json", *ranks)
    assert main.main(["advise", "--json", "--cores", "2", str(path)]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    packing = next(piece for piece in advice if piece["topic"] == "packing")
    assert "at most 1.50" in packing["statement"]
    assert packing["name"] == "pitz"


def test_a_program_that_sleeps_outside_mpi_is_not_told_that_fewer_ranks_sleep_less(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    one = advise.from_file(save(tmp_path / "a.json", *(rank(n, 0.2, 1.0, 1.0) for n in range(2))))
    assert "fewer ranks" not in by_topic(one, 2)
    told = by_topic(one, 4)["fewer ranks"]
    assert "0.4 CPU seconds per iteration, and 1.6 s that they sleep outside MPI" in told.evidence
    assert told.gain == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("kind", "cpu", "cores", "seen"),
    [("spinning", 1.0, 2, 0.9), ("packed", 0.2, 2, None), ("blocking", 0.2, 1, None),
     ("blocking", 0.2, 2, 0.9), ("spinning", 0.01, 2, 0.9)],
)  # fmt: skip
def test_time_outside_mpi_counts_where_each_rank_had_a_core(kind, cpu, cores, seen):
    two = np.ones(2)
    load = Load("a", kind, 9.0, cpu * two, 0.9 * two, 0.1 * two)
    found = figures.outside([load], cores)
    assert (found.tolist() if found is not None else None) == (seen and [seen] * 2)


def test_files_of_one_name_in_two_folders_are_told_apart(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("left", "right"):
        (tmp_path / folder).mkdir()
        save(tmp_path / folder / "profile.json", rank(0, 1.0, 1.0, 1.0))
    save(tmp_path / "other.json", rank(0, 1.0, 1.0, 1.0))
    words = ["left/profile.json", "right/profile.json", "other.json"]
    assert main.main(["advise", "--json", "--cores", "2", *words]) == 0
    advice = json.loads(capsys.readouterr().out)["advice"]
    assert [piece["name"] for piece in advice if piece["topic"] == "packing"] == [
        "left/profile.json: profile",
        "right/profile.json: profile",
        "other",
    ]


def test_a_profile_from_a_busy_machine_is_doubted_first(tmp_path):
    one = advise.from_file(save(tmp_path / "pitz.json", rank(0, 0.4, 0.3, 1.0)))
    assert advise.advise([one], 1)[0].topic == "measure again"


def test_a_run_on_a_busy_machine_is_doubted_first():
    run = made_up_runs.packed()
    run.log = [starved(entry) for entry in run.log]
    known_ones = advise.from_summary(summary.summarise(run.history()))
    assert advise.advise(known_ones, 2)[0].topic == "measure again"


def starved(entry):
    if not isinstance(entry, protocol.Sampled):
        return entry
    cpu = tuple(seconds / 2 for seconds in entry.ranks.cpu)
    return replace(entry, ranks=replace(entry.ranks, cpu=cpu))


def test_ranks_that_sleep_outside_mpi_are_not_taken_for_disturbed_ones(tmp_path):
    one = advise.from_file(save(tmp_path / "sleeps.json", rank(0, 0.4, 0.9, 1.0)))
    assert "measure again" not in {piece.topic for piece in advise.advise([one], 1)}


@pytest.mark.parametrize("ranks", [[], [rank(0, 0.0, 0.0, 1.0)], [rank(0, 0.0, 0.0, 0.0)]])
def test_a_profile_without_work_is_refused(tmp_path, capsys, ranks):
    path = tmp_path / "empty.json"
    if ranks:
        save(path, *ranks)
    assert main.main(["advise", str(path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
