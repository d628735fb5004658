# SPDX-License-Identifier: LGPL-3.0-or-later
"""Random queues, executed end by end: the same each time, within all limits, judged honestly."""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
from dataclasses import replace

import pytest
from dovetail.bench.choice import (
    CURVE,
    EACH,
    EXACT,
    Execution,
    Kept,
    Kind,
    Queue,
    Result,
    bounds,
    draw,
    execute,
    judged,
    papers,
    rules,
    with_every_noise,
)
from dovetail.cli.main import main
from support.local_runs import wait_for

pytestmark = pytest.mark.unit

FIVE = Queue(2, 0, (Kind({1: 10.0, 2: 6.0}, (1.0,) * 5, {1: 10.0, 2: 6.0}, 0),))


def small(most: int = 30) -> list[int]:
    """Numbers of queues that are done in a moment."""
    return [number for number in range(60) if draw(number).count <= most]


def test_the_same_number_is_the_same_queue_with_any_noise():
    for number in range(20):
        exact, each, curve = (draw(number, noise) for noise in (EXACT, EACH, CURVE))
        assert exact == draw(number)
        truth = [kind.seconds for kind in exact.kinds]
        assert truth == [k.seconds for k in each.kinds] == [k.seconds for k in curve.kinds]
        assert truth == [k.told for k in exact.kinds] == [k.told for k in each.kinds]
        assert [k.factors for k in each.kinds] != [k.factors for k in exact.kinds]
        assert [k.told for k in curve.kinds] != truth


def test_queues_are_of_the_sizes_that_are_claimed():
    drawn = [draw(number) for number in range(300)]
    assert {1, 2} <= {queue.count for queue in drawn}
    assert max(queue.count for queue in drawn) > 900
    assert min(queue.cores for queue in drawn) == 2
    assert 100 < max(queue.cores for queue in drawn) <= 128
    assert 0.15 < sum(queue.memory > 0 for queue in drawn) / 300 < 0.35


def test_rules_take_the_time_that_they_take_by_hand():
    ends = {}
    for name, (widths, at_once) in rules(FIVE).items():
        execution = Execution(FIVE)
        execution.by_rule(widths, at_once)
        ends[name] = execution.makespan()
    assert ends == {
        "one after the other": 30.0,
        "all narrowest": 30.0,
        "all widest": 30.0,
        "knee": 30.0,
    }
    execution = Execution(FIVE)
    execution.chosen()
    assert execution.makespan() == 26.0
    assert bounds(FIVE) == (pytest.approx(25.0), 25.0)


def test_with_exact_times_no_small_queue_ends_later_than_by_the_best_rule():
    results = [execute(number, EXACT) for number in small()]
    assert len(results) > 20
    assert all(one.bound * 0.999 <= one.makespan <= 1.05 * one.best for one in results)
    assert all(one.plain_bound <= one.bound * 1.001 for one in results)
    assert any(one.makespan < 0.99 * one.best for one in results)


def test_with_noise_all_of_a_queue_is_done_and_no_bound_is_undercut():
    for number in small(12):
        for noise in (EACH, CURVE):
            one = execute(number, noise)
            assert one.makespan >= 0.999 * one.bound


def test_a_miss_is_counted_and_told():
    lines: list[str] = []
    good = Result(0, 10.0, {"all narrowest": 10.0}, 9.5, 9.0, 0.01)
    bad = Result(1, 12.0, {"all widest": 10.0, "all narrowest": 11.0}, 9.5, 9.0, 0.01)
    claims = {claim.row.name: claim for claim in judged(EXACT, [good, bad], lines.append)}
    assert claims["exact times: the worst of these"].met is False
    assert claims["exact times: queues above 1.05 times"].row.values == (50.0,)
    assert len(lines) == 1
    assert "queue 1," in lines[0]
    assert "1.200 times 'all widest'" in lines[0]


def test_the_published_case_is_predicted_from_its_own_measurement():
    lines: list[str] = []
    (claim,) = papers(lines.append)
    assert "16: 1670 s" in lines[0]
    assert "1.77 (two at once) to 3.74 (five)" in lines[0]
    assert claim.bound == pytest.approx(5 * 1249 / 1670, abs=0.005)
    assert claim.row.median > claim.bound


def test_a_run_that_was_interrupted_goes_on_with_its_results(tmp_path, monkeypatch):
    kept = Kept(tmp_path / "choice.jsonl")
    assert kept.results() == []
    results = with_every_noise(37)
    kept.add(results)
    again = Kept(kept.path).results()
    assert len(again) == 3
    for one, had in zip(again, results):
        assert (one.number, one.noise, one.makespan) == (37, had.noise, had.makespan)
        assert (one.best, one.foreseen, one.picked) == (had.best, had.foreseen, had.picked)
    kept.add([replace(one, number=38) for one in results])
    whole = kept.path.read_text()
    kept.path.write_text(whole[:-20])  # killed while it wrote
    assert Kept(kept.path).results() == again, "of 38 a part is not there"
    kept.add([replace(one, number=38) for one in results])
    assert [one.number for one in kept.results()] == [37] * 3 + [38] * 3
    with monkeypatch.context() as other:
        other.setattr(platform, "node", lambda: "another machine")
        assert Kept(kept.path).results() == []
    kept.path.write_text(whole.replace(kept.program, "another"))
    assert kept.results() == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_said_in_a_line(tmp_path, number):
    words = [sys.executable, "-m", "dovetail", "bench", "choice", "-o", str(tmp_path)]
    with open(tmp_path / "errors", "wb") as errors:
        bench = subprocess.Popen(words, stderr=errors, start_new_session=True)
    try:
        wait_for((tmp_path / "choice.jsonl").exists, (tmp_path / "errors").read_text)
        os.killpg(bench.pid, number)  # as a terminal and a scheduler do
        assert bench.wait(30) == 130
    finally:
        bench.kill()
        bench.wait()
    assert (tmp_path / "errors").read_text().splitlines()[1:] == ["dovetail: interrupted"]


def test_the_rule_that_a_user_would_have_taken_stands_beside_the_choice():
    ends = {"all widest": 10.0, "all narrowest": 11.0}
    one = Result(1, 10.0, ends, 9.5, 9.0, 0.01, CURVE, "all narrowest")
    claims = {claim.row.name: claim for claim in judged(CURVE, [one], print)}
    assert claims[f"{CURVE}: the worst of these rules"].row.values == (1.1,)
    assert claims[f"{CURVE}: such rules above 1.05 times"].row.values == (100.0,)


@pytest.mark.slow
def test_the_command_prints_every_claim_as_json(capsys):
    assert main(["bench", "choice", "--queues", "1", "--repeat", "1", "--json"]) in (0, 1)
    (name, claims), *rest = json.loads(capsys.readouterr().out).items()
    assert (name, rest) == ("choice", [])
    assert len(claims) == 3 * 9 + 2


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["scale", "--queues", "5"], "--queues: only with choice and all, not with scale"),
        (["choice", "--queues", "0"], "--queues 0: give 1 to 1000000"),
        (["choice", "-o", "/dev/null"], "-o /dev/null: File exists"),
        (["choice", "-o", "/dev/null/a"], "-o /dev/null/a: Not a directory"),
        (["pack", "-o", "a"], "-o: only with demo, choice, all and papers, not with pack"),
    ],
)
def test_bad_options_are_refused(words, sentence, capsys):
    assert main(["bench", *words]) == 2
    assert sentence in capsys.readouterr().err
