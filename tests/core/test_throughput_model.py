# SPDX-License-Identifier: LGPL-3.0-or-later
"""The throughput model against the papers' table, a two-core machine, and itself."""

from __future__ import annotations

import json
import math

import pytest
from dovetail.cli.main import main
from dovetail.core.errors import BadInput
from dovetail.core.throughput_model import Model, Part, Point, Prior, fit, slowdowns
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.unit

# arXiv:2604.00377: T1 1249 s, 16 ranks, 96 vCPUs.
PAPER = {2: 1410.0, 3: 1446.0, 4: 1604.0, 5: 1670.0}

# Bulk-synchronous ranks (threads that meet at a barrier) of the given loads, on two cores: the
# seconds of 1, 2 and 3 at once, the best of two repeats, and the CPU seconds of one.
TWO_CORES = {
    "load 1:3": (1.210, 1.720, 2.566, 1.617),
    "load 1:9": (1.207, 1.370, 2.101, 1.349),
    "load 1:1": (0.826, 1.615, 2.432, 1.602),
    "load 1:1:4:9": (1.334, 2.042, 3.068, 2.033),
}


def test_the_papers_table_is_fitted_within_4_percent_at_every_point():
    model = Model.fit(1249, 16, 96, PAPER)
    for n, seconds in PAPER.items():
        assert model.makespan(n) == pytest.approx(seconds, rel=0.04)
    assert model.beta == pytest.approx(0.529, abs=0.001)
    assert model.rms_error < 0.04


def test_the_papers_gains_and_knee_come_out():
    model = Model.fit(1249, 16, 96, PAPER)
    assert model.gain(2) == pytest.approx(1.77, rel=0.04)
    assert model.gain(5) == pytest.approx(3.74, rel=0.04)
    assert model.knee(5) == 3


@pytest.mark.parametrize("left_out", PAPER)
def test_each_point_of_the_papers_table_lies_in_the_band_of_the_others(left_out):
    model = Model.fit(1249, 16, 96, {n: t for n, t in PAPER.items() if n != left_out})
    low, high = model.band(left_out)
    assert low <= PAPER[left_out] <= high


@pytest.mark.parametrize("load", TWO_CORES)
def test_three_at_once_are_predicted_from_two_on_saturated_cores(load):
    alone, two, three, cpu = TWO_CORES[load]
    model = Model.fit(alone, 2, 2, {2: two}, need=cpu / alone)
    assert model.makespan(3) == pytest.approx(three, rel=0.03)
    low, high = model.band(3)
    assert low <= three <= high


def test_without_saturation_it_is_the_papers_formula():
    model = Model(100.0, 4, 32, beta=0.5, need=2.0)
    assert model.makespan(3) == pytest.approx(100 * (1 + 0.5 * 2 * 4 / 32))


def test_beyond_saturation_no_prediction_beats_the_cores():
    model = Model(100.0, 2, 2, beta=0.0, need=1.5)
    assert model.makespan(4) == pytest.approx(100 * 4 * 1.5 / 2)
    assert model.gain(4) == pytest.approx(2 / 1.5)


def test_a_measurement_below_the_bound_lowers_the_need():
    model = Model.fit(1.0, 2, 2, {2: 1.4}, need=2.0)
    assert model.need == pytest.approx(1.4)
    assert model.makespan(2) == pytest.approx(1.4)


def test_one_measurement_makes_a_wider_band_than_four_that_agree():
    true = Model(1.0, 16, 96, beta=0.5)
    one = Model.fit(1.0, 16, 96, {2: true.makespan(2)})
    four = Model.fit(1.0, 16, 96, {n: true.makespan(n) for n in (2, 3, 4, 5)})
    assert four.beta == pytest.approx(0.5)
    assert four.beta_error < one.beta_error
    assert _width(four, 6) < _width(one, 6)
    assert four.rms_error == pytest.approx(0, abs=1e-12)


def _width(model: Model, n: int) -> float:
    low, high = model.band(n)
    return high - low


KNEES = {
    "packing that only loses has its knee at one": (Model(1, 2, 2, beta=2.0), 8, 1),
    "packing that neither gains nor loses has its knee at one": (Model(1, 2, 2, beta=1.0), 8, 1),
    "packing that costs nothing has its knee at the end": (Model(1, 2, 64, beta=0.0), 8, 8),
    "free until the cores are full, then flat": (Model(1, 2, 8, beta=0.0, need=2.0), 8, 4),
    "one candidate is its own knee": (Model(1, 2, 2, beta=0.1), 1, 1),
}


@pytest.mark.parametrize("name", KNEES)
def test_knee(name):
    model, up_to, knee = KNEES[name]
    assert model.knee(up_to) == knee


@given(
    st.floats(0.01, 1e6),
    st.integers(1, 1000),
    st.floats(0.5, 1000),
    st.dictionaries(st.integers(1, 50), st.floats(0.01, 1e7), min_size=1, max_size=8),
    st.none() | st.floats(0.01, 1000),
)
def test_a_fit_of_anything_is_finite_or_refused(t1, ranks, vcpus, measured, need):
    try:
        model = Model.fit(t1, ranks, vcpus, measured, need)
    except BadInput:
        return
    for n in (1, 2, 3, 50):
        low, high = model.band(n)
        assert 0 < low <= model.makespan(n) * (1 + 1e-12)
        assert model.makespan(n) <= high * (1 + 1e-12)
        assert math.isfinite(high)
        assert model.gain(n) <= n * (1 + 1e-12)
    assert 1 <= model.knee(10) <= 10


@pytest.mark.parametrize(
    "bad",
    [
        {"t1": 0},
        {"t1": float("nan")},
        {"ranks": -1},
        {"vcpus": float("inf")},
        {"need": 0},
        {"measured": {}},
        {"measured": {1: 5}},
        {"measured": {2: -1}},
        {"measured": {2: float("nan")}},
        {"measured": {0: 5}},
    ],
    ids=str,
)
def test_a_fit_refuses(bad):
    good = {"t1": 1.0, "ranks": 2, "vcpus": 2, "measured": {2: 1.5}, "need": None}
    with pytest.raises(BadInput):
        Model.fit(**{**good, **bad})


# --- The command ---

BASE = ["predict", "--t1", "1249", "--ranks", "16", "--vcpus", "96"]
MEASURED = ["--measured", "2:1410", "3:1446", "4:1604,5:1670"]


def test_the_table_says_prediction_and_marks_the_knee(capsys):
    assert main([*BASE, *MEASURED, "--sims", "1..5"]) == 0
    out = capsys.readouterr().out
    assert "prediction" in out
    marked = [line for line in out.splitlines() if "knee" in line]
    assert len(marked) == 1
    assert marked[0].split()[0] == "3"


def test_days_are_told_in_seconds(capsys):
    words = ["predict", "--t1", "172800", "--ranks", "16", "--vcpus", "96", "--sims", "1..2"]
    assert main([*words, "--measured", "2:180000"]) == 0
    *_, one, two = capsys.readouterr().out.splitlines()
    assert one.split()[1:6] == ["172800", "1.00", "1.00", "172800", "to"]
    assert (two.split()[1], two.split()[-3]) == ("180000", "180000")


def test_measurements_may_come_one_option_each(capsys):
    one_each = [word for pair in MEASURED[1:] for word in ("--measured", pair)]
    assert main([*BASE, *one_each]) == 0
    said = capsys.readouterr().out
    assert main([*BASE, *MEASURED]) == 0
    assert said == capsys.readouterr().out


def test_measurements_may_have_commas_and_spaces_between(capsys):
    assert main([*BASE, *MEASURED]) == 0
    said = capsys.readouterr().out
    assert main([*BASE, "--measured", "2:1410,", "3:1446, 4:1604", "5:1670"]) == 0
    assert said == capsys.readouterr().out


def test_json_has_bands_when_fitted_and_none_otherwise(capsys):
    main([*BASE, *MEASURED, "--json"])
    fitted = json.loads(capsys.readouterr().out)
    main([*BASE, "--beta", "0.53", "--json"])
    given_beta = json.loads(capsys.readouterr().out)
    assert len(fitted["sims"]) == len(given_beta["sims"]) == 8
    assert all("band_s" in row for row in fitted["sims"])
    assert not any("band_s" in row for row in given_beta["sims"])
    assert fitted["kind"] == "prediction"


BAD_OPTIONS = {
    "neither beta nor measured": [],
    "both": ["--beta", "1", "--measured", "2:5"],
    "a measurement without a colon": ["--measured", "1410"],
    "a measurement that is no number": ["--measured", "2:fast"],
    "an N twice": ["--measured", "2:1", "2:2"],
    "negative beta": ["--beta", "-1"],
    "beta nan": ["--beta", "nan"],
    "need zero": ["--beta", "1", "--need", "0"],
    "more cores needed than there are": ["--measured", "2:1410", "--need", "96.5"],
    "sims backwards": ["--beta", "1", "--sims", "8..1"],
    "sims from zero": ["--beta", "1", "--sims", "0..3"],
    "sims absurd": ["--beta", "1", "--sims", "1..999999"],
    "sims words": ["--beta", "1", "--sims", "all"],
    "no measurement": ["--measured", ""],
    "more ranks than a float can hold": ["--beta", "1", "--ranks", "9" * 400],
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_exit_2(name, capsys):
    try:
        code = main([*BASE, *BAD_OPTIONS[name]])
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert capsys.readouterr().err.strip()


PREDICTIONS = [
    ("two busy pairs on two cores", [Part(2, 2, 2.0, True)], 2.0, [2.1]),
    ("two pairs with idle time", [Part(2, 2, 4 / 3, True)], 2.0, [4 / 3 + 0.1]),
    ("spun needs cost what waiting costs", [Part(2, 2, 4 / 3, False)], 2.0, [1.4 + 0.1]),
    (
        "unlike simulations",
        [Part(1, 2, 1.0, True), Part(1, 4, 2.0, True)],
        2.0,
        [1.5 + 0.2, 1.5 + 0.1],
    ),
]


@pytest.mark.parametrize(
    ("what", "parts", "cores", "expected"), PREDICTIONS, ids=[p[0] for p in PREDICTIONS]
)
def test_slowdowns_of_unlike_simulations(what, parts, cores, expected):
    found = slowdowns(parts, cores, beta=0.1, wait_cost=0.05)
    assert found == pytest.approx(expected)


@given(st.integers(1, 9), st.integers(1, 8), st.floats(0.1, 8.0), st.floats(0.0, 1.0))
def test_equal_simulations_are_the_case_of_one_part(n, ranks, need, beta):
    """What the controller predicts by, and what the report and `predict` say, are one model."""
    split = [Part(1, ranks, need), Part(n - 1, ranks, need)] if n > 1 else [Part(1, ranks, need)]
    expected = [Model(1.0, ranks, 4.0, beta, need).slowdown(n)] * len(split)
    assert slowdowns(split, 4.0, beta) == pytest.approx(expected)


BELIEFS = [
    ("nothing is believed: the points alone", Prior(0.05, 0.0, 0.03, 1), 0.2),
    ("a belief as strong as the points: half way", Prior(0.1, 5.0, 0.03, 1), 0.15),
    ("interference is never negative", Prior(-9.0, 1.0, 0.03, 1), 0.0),
]


@pytest.mark.parametrize(("what", "prior", "beta"), BELIEFS, ids=[b[0] for b in BELIEFS])
def test_the_fit_weighs_points_against_what_is_believed(what, prior, beta):
    points = [Point(1.0, 1.5, 1.7), Point(2.0, 2.0, 2.4)]
    assert fit(points, prior).beta == pytest.approx(beta)


def test_more_scatter_means_a_less_certain_beta():
    prior = Prior(0.0, 0.0, 0.03, 1)
    exact = fit([Point(1.0, 1.0, 1.2), Point(2.0, 1.0, 1.4)], prior)
    loose = fit([Point(1.0, 1.0, 1.4), Point(2.0, 1.0, 1.3)], prior)
    assert exact.rms_error == pytest.approx(0.0, abs=1e-9)
    assert exact.beta_error == pytest.approx(0.03 / math.sqrt(2) / math.sqrt(5))
    assert loose.beta_error > 2 * exact.beta_error
