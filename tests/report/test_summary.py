# SPDX-License-Identifier: LGPL-3.0-or-later
"""The summary: each figure with its source, and no comparison that would flatter Dovetail."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import tracemalloc

import pytest
from dovetail.core import eventlog, protocol
from dovetail.core.contention import Contention, Throttling
from dovetail.core.errors import BadInput
from dovetail.report import alternatives, html, summary
from dovetail.report.alternatives import DOVETAIL, FEWER, NAIVE, SEQUENTIAL, Alternative
from dovetail.report.verdict import Figure, judge
from rich.console import Console
from support import made_up_runs

pytestmark = pytest.mark.unit


def measured(name, *times, family="pitz", ranks=2):
    return Alternative(family=family, name=name, makespan_s=list(times), ranks=ranks)


def totals(run, *others):
    return summary.summarise(run.history(), others).totals


def test_without_measured_alternatives_sequential_is_predicted_from_the_rate_alone():
    found = totals(made_up_runs.packed())
    # 346 iterations of 0.1 s, and 0.2 s to prepare each of four simulations.
    assert found.sequential_s.source == "predicted"
    assert found.sequential_s.value == pytest.approx(346 * 0.1 + 4 * 0.2, rel=0.01)
    assert found.throughput_gain.source == "predicted"
    assert found.naive_s.value is None
    assert "not measured" in found.naive_s.how


def test_a_slowdown_that_no_model_goes_through_costs_no_summary():
    run = made_up_runs.Run([made_up_runs.spec(name, "f") for name in "ab"], {"f": 1e-7})
    run.launch("a")
    run.work(10.0)
    run.launch("b")
    run.work(10.0, slowdown=1e7)
    run.finish("a")
    run.finish("b")
    (family,) = summary.summarise(run.history(), ()).families
    assert [point.n for point in family.points] == [1, 2]
    assert family.points[1].slowdown > 1e6
    assert family.model is None


def test_one_after_the_other_nothing_is_prepared_beside_others():
    """Packed, preparation takes longer, and that is no merit of packing."""
    run = made_up_runs.Run([made_up_runs.spec(n, "f", (1.0, 1.0)) for n in "abcd"], {"f": 0.1})
    for name, prepare in zip("abcd", (20.0, 40.0, 40.0, 40.0)):
        run.launch(name, prepare=prepare)
        run.work(10.0)
        run.finish(name)
    assert totals(run).sequential_s.value == pytest.approx(4 * (20.0 + 10.0), rel=0.01)
    run.log.pop()
    run.add(protocol.Requeued("d", protocol.Cause.CHECKPOINTED, "to go on"))
    run.launch("d", over=100)  # in its directory, which is there
    run.work(10.0)
    run.finish("d")
    assert totals(run).sequential_s.value == pytest.approx(4 * 30.0 + 10.0, rel=0.02)


def test_what_waits_where_a_checkpoint_stopped_it_has_done_its_iterations():
    run = made_up_runs.Run([made_up_runs.spec(n, "f", (1.0, 1.0)) for n in "ab"], {"f": 0.1})
    for name in "ab":
        run.launch(name)
    run.work(10.0)
    run.finish("a", cause=protocol.Cause.CHECKPOINTED, requeued="the run is resumed")
    run.finish("b", cause=protocol.Cause.INTERRUPTED, requeued="the run is resumed")
    assert [track.iterations for track in run.history().tracks] == [100, 0]


@pytest.mark.parametrize("beside", [False, True])
def test_one_after_the_other_the_first_prepares_what_the_others_take(beside):
    specs = [made_up_runs.spec(n, "f", (1.0, 1.0)) for n in "abc"]
    other = made_up_runs.spec("other", "g")
    run = made_up_runs.Run([other, *specs], {"f": 0.1, "g": 0.1})
    if beside:
        run.launch("other")
    for name, prepare in zip("abc", (20.0, 1.0, 1.0)):
        run.launch(name, prepare=prepare)
        if beside and name == "a":
            run.finish("other")
        run.work(10.0)
        run.finish(name)
    (family,) = [one for one in summary.summarise(run.history(), ()).families if one.name == "f"]
    more = 0.0 if beside else 19.0  # which may be by what else was prepared
    assert family.totals.sequential_s.value == pytest.approx(3 * 11.0 + more, rel=0.02)


def test_fewer_ranks_are_not_promised_to_shorten_a_start():
    run = made_up_runs.Run(
        [made_up_runs.spec(name, "f", (1.0, 1.0)) for name in "abcd"], {"f": 0.01}
    )
    for name in "abcd":
        run.launch(name, prepare=1.0)
        run.work(0.3, period=0.05)
        run.finish(name)
    fewer = totals(run).fewer_ranks_s
    assert fewer.value is None
    assert "what fewer ranks would change in that is unknown" in fewer.how


def test_fewer_ranks_take_as_long_to_start():
    run = made_up_runs.Run(
        [made_up_runs.spec(name, "f", (1.0, 1.0)) for name in "abcd"], {"f": 0.1}
    )
    for name in "abcd":
        run.launch(name, prepare=1.0)
        run.work(10.0)
        run.finish(name)
    # Two rounds, of two at once, of 1 s and 20 s; between that and a quarter more.
    assert totals(run).fewer_ranks_s.spread == pytest.approx((2 * 21.0, 2 * 21.0 / 0.8))


def test_fewer_ranks_are_not_all_as_long_as_the_longest():
    run = made_up_runs.Run(
        [made_up_runs.spec(name, "f", (1.0, 1.0)) for name in "abcd"], {"f": 0.1}
    )
    for name, seconds in zip("abcd", (40.0, 4.0, 4.0, 4.0)):
        run.launch(name, prepare=1.0)
        run.work(seconds)
        run.finish(name)
    # One of 1 s and 80 s, and the other three, of 1 s and 8 s, beside it.
    assert totals(run).fewer_ranks_s.spread == pytest.approx((81.0, 81.0 / 0.8))


def test_no_more_are_said_to_run_at_once_than_there_are():
    run = made_up_runs.Run([made_up_runs.spec("a", "f", (1.0, 1.0))], {"f": 0.1})
    run.launch("a")
    run.work(10.0)
    run.finish("a")
    assert "1 rank each, 1 at once" in totals(run).fewer_ranks_s.how


def test_measured_alternatives_go_before_predictions_as_medians_with_their_spread():
    found = totals(made_up_runs.packed(), measured(SEQUENTIAL, 40.0, 38.0, 39.0))
    assert (found.sequential_s.value, found.sequential_s.source) == (39.0, "measured")
    assert found.sequential_s.spread == (38.0, 40.0)
    assert found.throughput_gain.source == "measured"


@pytest.mark.parametrize(("cores", "compared"), [(2, True), (1.9, True), (4, False), (1, False)])
def test_alternatives_on_other_cores_are_not_compared(tmp_path, cores, compared):
    some = [measured(NAIVE, 90.0), measured(FEWER, 10.0, ranks=1)]
    directory = made_up_runs.packed().save(tmp_path / "run")
    alternatives.write(directory, cores, some)
    found = summary.load(directory)[0]
    for totals in (found.totals, found.families[0].totals):
        assert (totals.naive_s.value == 90.0) is compared
        assert (totals.fewer_ranks_s.source == "measured") is compared
    assert len(found.families[0].alternatives) == (2 if compared else 0)
    if not compared:
        assert found.totals.naive_s.how == f"measured on {cores} cores, not on the run's"
        assert "Better" not in found.verdict.words.replace("Probably better", "")


def test_the_bound_is_the_cpu_needed_over_the_cores():
    found = totals(made_up_runs.packed())
    # The ranks need 1/30 s and 1/10 s for an iteration, whatever they spin.
    assert found.bound_s.value == pytest.approx(346 * (0.1 + 0.1 / 3) / 2, rel=0.01)
    assert found.bound_ratio.value == pytest.approx(found.bound_s.value / found.makespan_s.value)


def test_the_bound_takes_each_iteration_as_measured_on_its_number_of_ranks():
    run = made_up_runs.Run(
        [made_up_runs.spec("a", "f"), made_up_runs.spec("b", "f", (1.0,))], {"f": 0.1}
    )
    for name in "ab":
        run.launch(name)
        run.work(10.0)
        run.finish(name)
    run.specs.append(made_up_runs.spec("c", "f"))
    run.launch("c")
    run.work(4.0)
    run.finish("c", cause=protocol.Cause.CHECKPOINTED, requeued="to go on with one rank")
    run.specs[-1] = made_up_runs.spec("c", "f", (1.0,))
    run.launch("c", over=35)
    run.work(6.0)
    run.finish("c")
    found = totals(run).bound_s
    assert found.value == pytest.approx((135 * (0.1 + 0.1 / 3) + 160 * 0.1) / 2, rel=0.01)
    assert found.source == "measured"
    assert found.how.count("spinning, on 1 rank, and ") == 1
    assert found.how.endswith("spinning, on 2 ranks")


def test_there_is_no_bound_where_ranks_of_some_number_were_not_measured():
    run = made_up_runs.Run(
        [made_up_runs.spec("a", "f"), made_up_runs.spec("b", "f", (1.0,))], {"f": 0.1}
    )
    for name, seconds in (("a", 10.0), ("b", 0.5)):
        run.launch(name)
        run.work(seconds)
        run.finish(name)
    found = totals(run).bound_s
    assert (found.value, found.source) == (None, "")
    assert found.how == "no two samples of a running simulation, on 1 rank"


def test_families_are_judged_apart_and_the_whole_is_their_sum():
    found = summary.summarise(made_up_runs.mixed().history())
    assert [one.name for one in found.families] == ["pitz", "even"]
    assert [one.points[-1].throughput for one in found.families] == pytest.approx(
        [2 / 1.4, 2 / 2.2], rel=0.01
    )
    for name in ("sequential_s", "bound_s", "makespan_s"):
        parts = [getattr(one.totals, name).value for one in found.families]
        assert getattr(found.totals, name).value == pytest.approx(sum(parts), rel=0.01), name


def sweep(*families, seconds=5.0, weights=(1.0, 3.0)):
    """A simulation for each of these, one after the other."""
    specs = [made_up_runs.spec(f"{name}-{n}", name, weights) for n, name in enumerate(families)]
    run = made_up_runs.Run(specs, dict.fromkeys(families, 0.1))
    for one in specs:
        run.launch(one.name)
        run.work(seconds)
        run.finish(one.name)
    return run


def test_a_sweep_of_many_entries_is_a_queue_on_fewer_ranks_as_well():
    """Of an entry with a single simulation nothing is beside it, but the queue has others."""
    one, many = (summary.summarise(sweep(*names).history()) for names in ("ffffff", "abcdef"))
    assert many.totals.fewer_ranks_s == one.totals.fewer_ranks_s
    assert many.totals.fewer_ranks_s.how.startswith("1 rank each, 2 at once, if ")
    assert many.totals.fewer_ranks_s.value == pytest.approx(6 * 5.0 * 4 / 3 / 2 / 0.9, rel=0.01)
    assert many.verdict == one.verdict
    assert many.verdict.best == FEWER
    assert "Probably better: fewer ranks side by side" in many.verdict.words


def test_what_has_a_single_rank_keeps_it_beside_those_on_fewer():
    specs = [made_up_runs.spec(n, n, w) for n, w in (("a", (1.0, 1.0)), ("b", (1.0,)))]
    run = made_up_runs.Run(specs, {"a": 0.1, "b": 0.1})
    for one in specs:
        run.launch(one.name, prepare=20.0 * (one.name == "b"))  # which stays as it is
        run.work(10.0)
        run.finish(one.name)
    found = summary.summarise(run.history())
    assert found.families[1].totals.fewer_ranks_s.value is None
    assert found.totals.fewer_ranks_s.spread == pytest.approx((30.0, 30.0 / 0.8))


def test_one_of_which_nothing_was_counted_is_not_promised_to_take_no_time():
    run = sweep("a", "b")
    quiet = [one for one in run.log if not (isinstance(one, protocol.Sampled) and "b" in one.name)]
    fewer = summary.summarise(dataclasses.replace(run, log=quiet).history()).totals.fewer_ranks_s
    assert (fewer.value, fewer.source) == (None, "")


def test_single_simulations_that_were_measured_alone_are_not_added_up_as_if_at_once():
    run = sweep("a", "b")
    others = [measured(n, 5.0, family=f) for n in (NAIVE, FEWER, SEQUENTIAL) for f in "ab"]
    found = totals(run, *others)
    assert found.sequential_s.value == 10.0
    assert (found.naive_s.value, found.fewer_ranks_s.source) == (None, "predicted")
    assert found.naive_s.how == "measured for each family alone, and a is a single simulation"
    several = totals(sweep("a", "a", "b", "b"), *others)
    assert several.naive_s.value == several.fewer_ranks_s.value == 10.0
    assert several.fewer_ranks_s.how == "sum over 2 families, one after the other"


def test_what_was_counted_is_called_by_its_name():
    run = made_up_runs.Run([made_up_runs.spec("melt", "melt")], {"melt": 0.1})
    run.launch("melt")
    run.t += 4.0
    run.sample("melt", 1.0, "periods")
    none = ((0.0, 0.0),) * 4
    nothing_counts_any_more = protocol.Ranks((0, 0), *none, (1, 1), "work")
    run.add(protocol.Sampled(run.t, "melt", nothing_counts_any_more))
    found = summary.summarise(run.history())
    assert (found.simulations[0].iterations, found.simulations[0].measure) == (40, "periods")
    out = io.StringIO()
    summary.show(found, Console(file=out, width=200))
    assert "40 periods" in out.getvalue()


def test_one_after_the_other_is_as_the_plan_cuts_it():
    run = made_up_runs.Run([made_up_runs.spec(f"a-{n}", "a") for n in (1, 2)], {"a": 0.1})
    run.launch("a-1")
    run.work(4.0)
    run.note("hold", name="a-1", weights=[1.2, 0.8])
    run.finish("a-1", cause=protocol.Cause.CHECKPOINTED, requeued="to go on as cut now")
    run.alone["a"] = 0.06
    for name in ("a-1", "a-2"):
        run.launch(name)
        run.work(6.0)
        run.finish(name)
    (family,) = (found := summary.summarise(run.history())).families
    assert (family.recut, family.weights) == ((1.2, 0.8), (1.0, 3.0))
    assert family.alone.value == pytest.approx(0.1, rel=0.03)
    assert family.totals.sequential_s.value == pytest.approx(2 * 100 * 0.1, rel=0.05)
    assert found.totals.throughput_gain.value == pytest.approx(20 / 16, rel=0.05)
    (load,) = family.loads
    assert max(load.useful) == pytest.approx(0.06, rel=0.03), "as cut anew"
    assert found.simulations[1].slowdown == pytest.approx(0.6, rel=0.03)


def test_what_is_cut_as_before_again_is_not_told_as_cut_anew():
    run = made_up_runs.Run([made_up_runs.spec("a-1", "a")], {"a": 0.1})
    run.note("hold", family="a", name="a-1", weights=[1.2, 0.8])
    run.note("hold", family="a", ranks=2, uncut=True)
    run.launch("a-1")
    run.work(4)
    run.finish("a-1")
    (family,) = summary.summarise(run.history()).families
    assert family.recut == ()


def test_families_that_ran_together_have_no_makespan_of_their_own():
    run = made_up_runs.Run(
        [made_up_runs.spec("a", "f"), made_up_runs.spec("b", "g")], {"f": 0.1, "g": 0.1}
    )
    run.launch("a")
    run.launch("b")
    run.work(2)
    run.finish("a")
    run.finish("b")
    found = summary.summarise(run.history())
    assert [one.totals.makespan_s.value for one in found.families] == [None, None]
    assert "together" in found.families[0].totals.makespan_s.how
    assert found.totals.makespan_s.value == pytest.approx(2.0)


@pytest.mark.parametrize("families", [1, 2])
def test_what_lies_between_two_attempts_counts_in_the_makespan(families):
    specs = [made_up_runs.spec("a", "f"), made_up_runs.spec("b", "g")][:families]
    run = made_up_runs.Run(specs, {"f": 0.1, "g": 0.1})
    run.launch("a")
    run.work(2)
    run.finish("a", cause=protocol.Cause.NODE_LOST, reason="lost", requeued="its node was lost")
    run.t += 3.0
    run.add(protocol.Tick(run.t))  # no node has had room
    run.launch("a")
    run.work(2)
    run.finish("a")
    for spec in specs[1:]:
        run.launch(spec.name)
        run.work(4)
        run.finish(spec.name)
    found = summary.summarise(run.history())
    assert [one.totals.makespan_s.value for one in found.families] == [7.0, 4.0][:families]
    assert found.totals.makespan_s.value == [7.0, 11.0][families - 1]


@pytest.mark.parametrize("families", ["ff", "fg"])
@pytest.mark.parametrize("gap", ["killed", "stopped", "nothing ran"])
def test_work_done_while_the_clock_stood_is_no_gain(gap, families):
    """Of which the iterations count, and the time does not."""
    specs = [made_up_runs.spec(n, f, (1.0, 1.0)) for n, f in zip("ab", families)]
    specs[0] = dataclasses.replace(specs[0], phases=(protocol.PlanPhase(0, (500, 500)),))
    run = made_up_runs.Run(specs, {"f": 0.1, "g": 0.1})
    run.launch("a")
    run.work(10.0)
    if gap == "nothing ran":
        run.finish("a")
    if gap == "killed":
        run.resume(alive=("a",))
        run.counters["a"][:2] = [1000, run.t]
    else:
        run.t += 100.0
        run.add(protocol.Tick(run.t))
    if gap != "nothing ran":
        run.work(5.0)
        run.finish("a")
    run.launch("b")
    run.work(10.0)
    run.finish("b")
    found = summary.summarise(run.history())
    figures = (found.totals.makespan_s, found.totals.throughput_gain, found.totals.bound_ratio)
    known = gap == "nothing ran"
    assert [one.value is not None for one in figures] == [known] * 3
    assert found.simulations[0].wall_s == (10.0 if known else None)
    assert found.simulations[0].phases[0].seconds == (pytest.approx(0.1) if known else None)
    assert found.simulations[1].wall_s == 10.0
    assert found.families[-1].totals.makespan_s.value == (
        10.0 if families == "fg" else 20.0 if known else None
    )
    assert all("while the run stood" in one.how for one in figures) != known
    assert (found.verdict.best == "") != known


def test_a_queue_takes_no_longer_where_a_run_that_is_over_is_resumed():
    run = made_up_runs.Run(
        [made_up_runs.spec("a", "f"), made_up_runs.spec("b", "g")], {"f": 0.1, "g": 0.1}
    )
    for name in "ab":
        run.launch(name)
        run.work(1)
        run.finish(name)
    before = summary.summarise(run.history()).totals.makespan_s
    run.resume()
    run.add(protocol.Tick(run.t + 5.0))
    found = summary.summarise(run.history())
    assert found.elapsed_s == run.t + 5.0
    assert found.totals.makespan_s == before


@pytest.mark.parametrize(
    ("times", "best", "says"),
    [
        ({SEQUENTIAL: 40.0, NAIVE: 80.0, FEWER: 30.0}, DOVETAIL, "times the throughput"),
        ({SEQUENTIAL: 40.0, FEWER: 20.0}, FEWER, "Better: fewer ranks side by side"),
        ({SEQUENTIAL: 20.0}, SEQUENTIAL, "Better: one after the other"),
        ({SEQUENTIAL: 26.8}, DOVETAIL, "Packing does not pay"),
        ({SEQUENTIAL: 40.0, FEWER: 26.5}, DOVETAIL, "times the throughput"),
        ({SEQUENTIAL: 40.0, DOVETAIL: 50.0}, SEQUENTIAL, "0.80 times the throughput"),
    ],
    ids=[
        "Dovetail wins",
        "fewer ranks win",
        "one after the other wins",
        "as long as one after the other",
        "fewer ranks are no better within the noise",
        "repeats of Dovetail count before the one run of the log",
    ],
)
def test_the_verdict_names_the_winner(times, best, says):
    others = [measured(name, time) for name, time in times.items()]
    verdict = summary.summarise(made_up_runs.packed().history(), others).verdict
    assert verdict.best == best
    assert says in verdict.words


@pytest.mark.parametrize(
    ("ranks", "says"), [(2, "Dovetail ran 4 of 4 on as many ranks; "), (1, "")]
)
def test_a_way_that_was_chosen_as_well_and_won_is_said_to_be_the_same(ranks, says):
    """Or the report would call a way better that its run has gone."""
    run = made_up_runs.packed()
    assert {track.spec.ranks for track in run.history().tracks} == {2}
    better = measured(FEWER, 20.0).model_copy(update={"ranks": ranks})
    words = summary.summarise(run.history(), [better]).verdict.words
    assert "Better: fewer ranks side by side" in words
    assert (says in words) if says else ("Dovetail ran" not in words)


def test_of_some_that_ran_the_same_the_difference_is_not_said_to_be_noise():
    totals = summary.summarise(made_up_runs.packed().history(), [measured(FEWER, 20.0)]).totals
    assert "repeats differ by." in judge(totals, 4, 4).words
    words = judge(totals, 3, 4).words
    assert words.endswith("Dovetail ran 3 of 4 on as many ranks.")


@pytest.mark.parametrize("count", [1, 6])
def test_those_of_one_rank_have_a_way_that_a_user_would_take(count):
    """One after the other would leave cores idle, and be beaten by anything."""
    names = [f"f-{number}" for number in range(count)]
    run = made_up_runs.Run([made_up_runs.spec(name, "f", (1.0,)) for name in names], {"f": 0.1})
    for pair in zip(names[::2], names[1::2]) if count > 1 else [names]:
        for name in pair:
            run.launch(name)
        run.work(10.0)
        for name in pair:
            run.finish(name)
    (family,) = summary.summarise(run.history()).families
    fewer = family.totals.fewer_ranks_s
    if count == 1:
        assert fewer == Figure(how="no smaller number of ranks is possible")
    else:
        assert fewer.spread == pytest.approx((30.0, 30.0 / 0.8), rel=0.02)
        assert fewer.value == fewer.spread[0]
        assert fewer.how.startswith("1 rank each, 2 at once, as they are;")
        assert family.verdict.best == DOVETAIL
        title, _ = html._family(family, 2)["alternatives"]
        assert title == "As quick as fewer ranks side by side is predicted to be"


def test_of_one_simulation_nothing_is_said_of_packing():
    run = made_up_runs.Run([made_up_runs.spec("a", "f")], {"f": 0.1})
    run.launch("a")
    run.work(10)
    run.finish("a")
    found = summary.summarise(run.history())
    assert found.verdict.words.startswith("Dovetail took 10.0 s, as long as one after the other")
    assert "acking" not in found.verdict.words, "there was nothing to pack it with"
    assert html.headline(found).startswith("1 simulation on 2 cores: about 1.00 times")


def test_what_is_only_predicted_to_be_as_quick_is_not_said_to_be():
    run = made_up_runs.Run([made_up_runs.spec(name, "f") for name in ("a", "b")], {"f": 0.1})
    run.note("choice", "decided", seconds={"f": {"2": 2.0, "4": 1.0}})
    for name in ("a", "b"):
        run.launch(name)
        run.work(1)
        run.finish(name)
    words = summary.summarise(run.history()).verdict.words
    assert "(2.0 s, predicted). By that prediction packing does not pay" in words
    assert words.endswith("1 s each on 4 ranks, by the run's model of what it had measured, "
                          "where none was on so many ranks).")  # fmt: skip


def test_the_choice_of_ranks_is_said_with_its_reason_and_how_many_ran_so():
    specs = [dataclasses.replace(made_up_runs.spec(n, "f", (1.0,)), widths=(1, 2)) for n in "abc"]
    run = made_up_runs.Run(specs, {"f": 0.1})
    known = {"open": {"f": {"iterations": 100, "measured": [1]}}, "cores": 2}
    seconds = {"f": {"1": 10.0, "2": 6.0}}
    run.note("choice", "decided", **known, widths={"f": {"1": 3}}, seconds={})
    for name in "ab":
        run.launch(name)
    run.work(10)
    run.note("choice", "decided", **known, widths={"f": {"1": 1}}, seconds=seconds)
    for name in "ab":
        run.finish(name)
    run.launch("c")
    run.work(10)
    run.finish("c")
    found = summary.summarise(run.history())
    assert found.decided == (
        "decided: 1 rank each, 2 at once: 100 ms per iteration and core (measured) against 120 "
        "(predicted) on 2 ranks",
    )
    assert found.to_json()["decided"] == list(found.decided)
    out = io.StringIO()
    summary.show(found, Console(file=out, width=160))
    assert found.decided[0] in out.getvalue()
    kept = summary.summarise(made_up_runs.packed().history())
    assert kept.decided == (), "the plan keeps their ranks"


def test_one_after_the_other_has_no_more_ranks_than_fill_the_cores():
    """Of more the prediction is that they are a little quicker, and no run chooses them."""
    run = made_up_runs.Run(
        [dataclasses.replace(made_up_runs.spec("a", "f"), widths=(1, 2, 3))], {"f": 0.1}
    )
    seconds = {"f": {"1": 18.0, "2": 10.0, "3": 9.5}}
    run.note("choice", "decided", cores=2, widths={"f": {"2": 1}}, seconds=seconds)
    run.launch("a")
    run.work(10.0)
    run.finish("a")
    found = totals(run).sequential_s
    assert found.value == 10.0
    assert "10 s each on 2 ranks, by" in found.how


def test_nothing_is_compared_while_simulations_are_missing():
    run = made_up_runs.packed()
    run.log = run.log[:-1]
    found = summary.summarise(run.history(), [measured(SEQUENTIAL, 40.0)])
    assert found.totals.throughput_gain.value is None
    assert found.totals.bound_ratio.value is None
    assert found.totals.throughput_gain.how == "1 of 4 simulations are not done"
    assert found.verdict.best == ""


def test_every_figure_in_the_json_has_its_provenance():
    data = summary.summarise(made_up_runs.mixed().history()).to_json()
    for part in (data, *data["families"]):
        for name, provenance in part["provenance"].items():
            assert provenance["source"] in ("measured", "predicted", "")
            assert (part[name] is None) == (provenance["source"] == "")
            assert provenance["how"]


def test_the_json_has_what_is_promised(tmp_path):
    found, _ = summary.load(made_up_runs.mixed().save(tmp_path))
    data = json.loads(json.dumps(found.to_json(), allow_nan=False))
    promised = "simulations cores n_max makespan_s sequential_s naive_s fewer_ranks_s"
    promised += " throughput_gain bound_ratio resizes admissions rollbacks model versions"
    assert set(promised.split()) <= set(data)
    each = {"name", "state", "iterations", "measure", "wall_s", "slowdown", "restarts"}
    assert each <= set(data["simulations"][0])
    assert {"beta", "error"} <= set(data["model"])
    assert data["versions"]["mpi"] == "Open MPI 4.1"
    assert (data["admissions"], data["rollbacks"], data["n_max"]) == (3, 1, 2)
    assert [one["restarts"] for one in data["simulations"]] == [0, 0, 0, 0, 0, 1]


def test_pop_efficiencies_are_told_of_each_simulation_and_of_the_queue():
    run = made_up_runs.Run(
        [made_up_runs.spec("a", "f"), made_up_runs.spec("b", "g", (1.0, 1.0))],
        {"f": 0.1, "g": 0.1},
    )
    for name in ("a", "b"):
        run.launch(name)
        run.work(10.0)
        run.finish(name)
    found = summary.summarise(run.history())
    one, two = (each.efficiency for each in found.simulations)
    assert (one.load_balance, one.communication) == pytest.approx((2 / 3, 1.0))
    assert (two.load_balance, two.communication) == pytest.approx((1.0, 1.0))
    both = found.efficiency  # as long as the other, on as many ranks
    assert both.parallel == pytest.approx((one.parallel + two.parallel) / 2)
    assert both.parallel == pytest.approx(both.load_balance * both.communication)
    assert found.to_json()["simulations"][0]["efficiency"]["parallel"] == pytest.approx(2 / 3)


def test_what_kept_ranks_from_their_cores_is_told_where_it_mattered():
    specs = [made_up_runs.spec(f"a-{n}", "a") for n in range(3)]
    specs[0] = dataclasses.replace(specs[0], limit=1.5)
    run = made_up_runs.Run(specs, {"a": 0.1})
    stops = Throttling(1500, 100, 80, 6.2, 20.0)
    seen = [
        Contention(stops, None, (5, 6), (7, 8), (6.0, 6.0), (10.0, 10.0)),
        Contention(None, 0.5, (1, 2), (3, 4), (0.5, 4.0), (10.0, 10.0)),
        Contention(None, 0.1, (1, 2), (3, 4), (0.5, 1.0), (10.0, 10.0)),
    ]
    for one, told in zip(specs, seen):
        run.launch(one.name)
        run.work(2.0)
        run.add(protocol.Counted(run.t, one.name, told))
        run.finish(one.name)
    found = summary.summarise(run.history())
    assert [[one.words for one in each.hindrances] for each in found.simulations] == [
        ["throttled for 31 % of its time: its limit of 1.5 cores is too small"],
        ["rank 1 waited for a core for 40 % of its time: more wants to run there than can at once"],
        [],
    ]
    plain = found.to_json()["simulations"][0]["contention"]
    assert (plain["throttling"]["throttled"], plain["pressure"]) == (80, None)
    out = io.StringIO()
    summary.show(found, Console(file=out, width=200))
    assert re.search(r"a-0 .* 31 % +60 % +11 +15 +-", out.getvalue())
    assert "a-0: throttled for 31 % of its time" in out.getvalue()


def test_the_slowdown_is_against_alone():
    found = summary.summarise(made_up_runs.packed().history())
    assert found.simulations[1].slowdown == pytest.approx(1.4, rel=0.01)


@pytest.mark.parametrize("iterations", [1, 2, 3])
def test_the_last_iterations_alone_are_no_measure_of_the_others(iterations):
    run = made_up_runs.Run([made_up_runs.spec(f"a-{i}", "a") for i in range(2)], {"a": 0.1})
    run.launch("a-0")
    run.launch("a-1")
    run.work(2.0)
    run.finish("a-0")
    run.work((1 + iterations) * 0.1, period=0.1)  # seen from the first one on
    run.finish("a-1")
    found = summary.summarise(run.history())
    alone = found.families[0].alone
    assert [one.slowdown is None for one in found.simulations] == [iterations < 3] * 2
    if iterations < 3:
        assert found.totals.throughput_gain.value is None
        assert alone.how.startswith(f"only {iterations} iteration")


def test_the_model_is_fitted_to_what_was_measured():
    model = summary.summarise(made_up_runs.packed().history()).families[0].model
    assert model.slowdown(2) == pytest.approx(1.4, rel=0.01)


@pytest.mark.parametrize(
    "run", [made_up_runs.Run([], {}), made_up_runs.Run([made_up_runs.spec("a", "f")], {})]
)
def test_a_run_that_did_nothing_has_a_summary(run):
    found = summary.summarise(run.history())
    assert found.totals.makespan_s.value is None
    assert json.dumps(found.to_json(), allow_nan=False)


def test_alternatives_are_read_as_they_were_written(tmp_path):
    some = [measured(SEQUENTIAL, 1.5, 2.5), measured(FEWER, 1.0, ranks=1)]
    alternatives.write(tmp_path, 2, some)
    assert alternatives.read(tmp_path) == [one.model_copy(update={"cores": 2}) for one in some]
    assert not list(tmp_path.glob("*.new"))
    assert alternatives.read(tmp_path / "elsewhere") == []


GOOD = {"family": "f", "name": DOVETAIL, "makespan_s": [1.0], "ranks": 2}


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"schema": 2, "cores": 2, "alternatives": []}, "schema"),
        ({"schema": 1, "cores": 2, "alternatives": [{**GOOD, "makespan_s": []}]}, "makespan_s"),
        ({"schema": 1, "cores": 2, "alternatives": [{**GOOD, "makespan_s": [-1]}]}, "makespan_s"),
        ({"schema": 1, "cores": 2, "alternatives": [{**GOOD, "name": "magic"}]}, "name"),
        ({"schema": 1, "cores": 2, "alternatives": [{**GOOD, "more": 1}]}, "more"),
        ({"schema": 1, "cores": 2, "alternatives": [GOOD, GOOD]}, "twice"),
        ([], "file"),
    ],
    ids=["version", "no repeat", "negative", "unknown name", "unknown key", "twice", "no object"],
)
def test_damaged_alternatives_are_refused_with_the_key(tmp_path, data, says):
    (tmp_path / "alternatives.json").write_text(json.dumps(data))
    with pytest.raises(BadInput, match=says) as caught:
        alternatives.read(tmp_path)
    assert "\n" not in str(caught.value)


def test_the_table_shows_names_as_they_are_and_no_control_characters():
    run = made_up_runs.Run([made_up_runs.spec("[red]\x1b[31mx", "f")], {"f": 0.1})
    out = io.StringIO()
    summary.show(summary.summarise(run.history()), Console(file=out, width=200))
    assert "[red]�[31mx" in out.getvalue()
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize("width", [80, 40])
def test_no_name_is_cut_off_where_lines_are_short(width):
    """As in the file of a batch job, which has 80 columns."""
    names = [f"channel-reynolds-180-fine-mesh-{n}" for n in (1, 2)]
    run = made_up_runs.Run([made_up_runs.spec(name, "f") for name in names], {"f": 0.1})
    out = io.StringIO()
    summary.show(summary.summarise(run.history()), Console(file=out, width=width))
    table = out.getvalue().partition("How long")[0]
    assert "…" not in out.getvalue()
    cells = [line.split("│")[1].strip() for line in table.splitlines() if line.startswith("│")]
    assert "".join(cells) == "".join(names)


def test_a_reason_that_many_share_is_said_once_under_the_table():
    specs = [made_up_runs.spec(f"a-{n}", "a") for n in range(5)]
    run = made_up_runs.Run(specs, {"a": 0.1})
    reason = "exit code 1: FOAM FATAL ERROR: " + "no such file " * 9
    for one in specs:
        run.launch(one.name)
        run.work(1.0)
        run.finish(one.name, 1, reason)
    out = io.StringIO()
    summary.show(summary.summarise(run.history()), Console(file=out, width=200))
    said = out.getvalue().replace("\n", " ")
    assert said.count("FOAM FATAL ERROR") == 1
    assert "a-0, a-1, a-2 and 2 more failed: exit code 1: FOAM" in said


def test_families_that_ran_together_are_told_as_one_queue():
    run = made_up_runs.Run(
        [made_up_runs.spec("a-1", "a"), made_up_runs.spec("b-1", "b")], {"a": 0.1, "b": 0.1}
    )
    run.launch("a-1")
    run.launch("b-1")
    run.work(10)
    run.finish("a-1")
    run.finish("b-1")
    found = summary.summarise(run.history())
    assert [name for name, _ in summary.verdicts(found)] == ["all"]
    assert found.simulations[0].ranks == 2


def test_a_log_may_be_larger_than_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(eventlog, "BLOCK", 1 << 16)
    run = made_up_runs.Run([made_up_runs.spec("a", "a", (1.0,) * 64)], {"a": 0.1})
    run.launch("a")
    run.work(1000)
    run.finish("a")
    size = (run.save(tmp_path) / "events.jsonl").stat().st_size
    run.log.clear()
    summary.load(tmp_path)  # for what is made once
    tracemalloc.start()
    found, _ = summary.load(tmp_path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found.complete
    assert most < size, f"{most} bytes for a log of {size}"
