# SPDX-License-Identifier: LGPL-3.0-or-later
"""The papers' tables: verdicts, going on, the page; and one cheap measurement."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace

import pytest
from dovetail.bench import cases
from dovetail.bench.harness import Row, plain
from dovetail.bench.papers import (
    allocation,
    containers,
    converged,
    motor_bike,
    packing,
    papers,
    published,
    setups,
)
from dovetail.bench.papers.findings import (
    CONFIRMED,
    DISTURBED,
    LARGER,
    NO_NUMBER,
    NOT_MEASURED,
    NOT_SEEN,
    OPPOSITE,
    SMALLER,
    Experiment,
    Finding,
    Setting,
    verdict,
)
from dovetail.bench.papers.kept import FILE, Kept
from dovetail.bench.papers.page import Outcome, page
from dovetail.bench.papers.page import row as page_row
from dovetail.bench.papers.place import (
    KUBERNETES,
    NotHere,
    Place,
    Run,
    Seen,
    began_anew,
    need_groups,
)
from dovetail.bench.papers.published import Published
from dovetail.bench.papers.scales import SCALES
from dovetail.cli import bench, main
from dovetail.core import cpu_requests, protocol
from dovetail.core.errors import BadInput, WorkFailed
from support import flux_batch, known_programs
from support.clusters import eventually

GAIN, LOSS = 1.77, 0.8


@pytest.mark.unit
@pytest.mark.parametrize(
    ("kind", "theirs", "ours", "word"),
    [
        ("effect", GAIN, (1.7, 1.8, 1.9), CONFIRMED),
        ("effect", GAIN, (2.5, 2.6, 2.7), CONFIRMED),
        ("effect", GAIN, (1.1, 1.2, 1.3), SMALLER),
        ("effect", GAIN, (0.9, 1.1, 1.3), NOT_SEEN),
        ("effect", GAIN, (1.01,), NOT_SEEN),
        ("effect", GAIN, (0.5, 0.6, 0.7), OPPOSITE),
        ("effect", LOSS, (0.7, 0.75, 0.8), CONFIRMED),
        ("effect", LOSS, (0.9, 0.91, 0.92), SMALLER),
        ("effect", LOSS, (1.1, 1.2, 1.3), OPPOSITE),
        ("effect", 78.0, (3.6, 3.7, 3.8), SMALLER),
        ("amount", 0.88, (0.8, 0.9, 0.9), CONFIRMED),
        ("amount", 0.88, (0.3, 0.4, 0.5), SMALLER),
        ("amount", 0.79, (-0.6, -0.5, -0.4), OPPOSITE),
        ("most", 0.04, (0.01, 0.03, 0.2), CONFIRMED),
        ("most", 0.04, (0.05,), NOT_SEEN),
        ("most", 0.0, (0.0,), CONFIRMED),
        ("same", 1.0, (0.9, 1.02, 1.1), CONFIRMED),
        ("same", 1.0, (1.2, 1.3, 1.4), OPPOSITE),
        ("same", 1.0, (0.98, 1.5, 1.9), NOT_SEEN),
        ("same", 1.08, (0.98, 1.07, 1.2), CONFIRMED),
        ("amount", 108.0, (120.0, 130.0, 600.0), CONFIRMED),
        ("amount", 108.0, (400.0, 500.0, 600.0), LARGER),
        ("amount", -0.56, (-33.0, -32.0, -8.0), CONFIRMED),
        ("effect", None, (1.0,), NO_NUMBER),
    ],
)
def test_a_verdict_is_about_the_effect(kind, theirs, ours, word):
    number = Published("x", published.RANKS, "table 1", "a figure", theirs, kind)
    assert verdict(number, Row("", ours)) == word
    assert verdict(number, None) == NOT_MEASURED


@pytest.mark.unit
def test_packing_is_compared_with_fewer_ranks_at_its_best():
    def turn(rate: float) -> dict[str, float]:
        names = ("mean", "makespan", "unfair", "cores", "requested", "switches", "waited_s")
        return {**dict.fromkeys(names, 1.0), "rate": rate,
                **{f"time {number}": 1.0 for number in range(1, packing.MOST + 1)}}  # fmt: skip

    rates = {packing.OWN: (1.0, 1.5, 1.2, 0.9, 0.5), packing.IDLE: (1.0, 2.0, 1.9, 1.8, 1.8)}
    measured = {
        f"{way}: {n}": [turn(rates.get(way, (1.0,) * 5)[n - 1])]
        for way in packing.WAYS for n in range(1, packing.MOST + 1)
    }  # fmt: skip
    place = SimpleNamespace(cores=2, kind="local")
    setting = Setting(place, None, 0.0, lambda _: None, None)
    found = {one.what: one.row for one in packing.packing_findings(setting, measured)}
    what = f"throughput, one rank each / {packing.OWN}, each with as many at once as are best"
    assert found[what].values == (pytest.approx(2.0 / 1.5),)


@pytest.mark.unit
def test_what_others_disturbed_says_nothing_about_a_paper():
    number = published.of("allocation")["limits at once"]
    finding = Finding("time", "x", Row("", (0.5, 0.5)), number)
    assert finding.verdict == OPPOSITE
    assert replace(finding, disturbed=True).verdict == DISTURBED
    assert replace(finding, disturbed=True, row=None).verdict == NOT_MEASURED


@pytest.mark.unit
def test_every_published_number_has_a_place_a_paper_and_a_name_of_its_own():
    for table in published.TABLES.values():
        assert len({one.key for one in table}) == len(table)
    for one in published.every():
        assert one.paper in published.PAPERS
        assert one.where
    assert set(published.TABLES) == set(papers.EXPERIMENTS)


@pytest.mark.unit
def test_what_was_measured_is_not_measured_again(tmp_path):
    about = {"scale": "small"}
    kept = Kept(tmp_path, about)
    kept.add("packing", "two", 0, {"rate": 2.0}, 0.5)
    kept.add("packing", "one", 0, {"rate": 1.0}, 0.0)
    kept.add("packing", "two", 1, {"rate": 3.0}, 0.3)
    kept.close()
    with (tmp_path / FILE).open("a") as file:
        file.write('{"experiment": "packing", "var')  # killed while it wrote
    again = Kept(tmp_path, about)
    assert again.has("packing", "two", 1)
    assert not again.has("packing", "one", 1)
    again.add("packing", "one", 1, {"rate": 1.5}, 0.1)
    again.finish("packing", ["two", "one"])
    again.close()
    last = Kept(tmp_path, about)
    assert last.finished("packing")
    assert last.others("packing") == {0: 0.25, 1: pytest.approx(0.2)}
    assert len(last.rounds("packing", 3)["one"]) == 2
    last.close()
    with pytest.raises(BadInput, match=r"scale small, not medium.*-o"):
        Kept(tmp_path, {"scale": "medium"})
    (tmp_path / FILE).write_text('{"scale": "sm')  # killed while it wrote the first line
    Kept(tmp_path, {"scale": "medium"}).close()
    assert json.loads((tmp_path / FILE).read_text()) == {"scale": "medium"}


@pytest.mark.unit
@pytest.mark.parametrize("line", ["[]", '{"experiment": "packing"}', '{"finished": []}'])
def test_a_file_that_is_not_of_measurements_is_refused(tmp_path, line):
    (tmp_path / FILE).write_text(f'{{"scale": "small"}}\n{line}\n{{}}\n')
    with pytest.raises(BadInput, match="line 2 is damaged"):
        Kept(tmp_path, {"scale": "small"})
    (tmp_path / FILE).write_text(f"{line}\n")
    with pytest.raises(BadInput):
        Kept(tmp_path, {"scale": "small"})
    assert (tmp_path / FILE).read_text() == f"{line}\n"


@pytest.mark.unit
def test_two_at_once_do_not_measure_into_one_directory(tmp_path):
    first = Kept(tmp_path, {"scale": "small"})
    with pytest.raises(BadInput, match="another `dovetail bench papers` writes there"):
        Kept(tmp_path, {"scale": "small"})
    first.close()
    Kept(tmp_path, {"scale": "small"}).close()


@pytest.mark.unit
def test_on_a_full_disk_what_was_measured_stays(tmp_path):
    path = tmp_path / FILE
    path.write_text('{"scale": "small"}\n{"round": 1}\n{"round": 2')  # there the disk was full
    script = (
        "import resource, signal; from pathlib import Path\n"
        "from dovetail.bench.papers.kept import whole_lines\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        f"assert len(whole_lines(Path({str(path)!r}))) == 2\n"
    )
    done = subprocess.run([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    assert path.read_text() == '{"scale": "small"}\n{"round": 1}\n', done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.unit
def test_on_a_full_disk_it_is_said_which_file_could_not_be_written(tmp_path):
    script = (
        "import resource, signal; from pathlib import Path\n"
        "from dovetail.bench.papers.kept import Kept\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"kept = Kept(Path({str(tmp_path)!r}), {{}})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
        "try:\n kept.finish('one', [])\nexcept Exception as error:\n print(error)\n"
        "kept.close()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout == f"{tmp_path / FILE}: File too large\n"
    assert done.returncode == 0, done.stderr


@pytest.mark.unit
def test_an_interrupted_experiment_goes_on_with_what_is_missing(tmp_path, monkeypatch):
    seen: list[str] = []

    def variants(setting: Setting):
        def measure(name: str) -> dict[str, float]:
            seen.append(name)
            if len(seen) == 3:
                raise KeyboardInterrupt
            return {"rate": float(len(seen))}

        return {name: lambda name=name: measure(name) for name in ("a", "b")}

    def findings(setting: Setting, measured) -> list[Finding]:
        return [Finding("rate", "x", Row("", tuple(one["rate"] for one in measured["a"])))]

    fake = {"fake": Experiment("fake", "a fake", findings, variants)}
    monkeypatch.setattr(papers, "EXPERIMENTS", fake)
    monkeypatch.setitem(published.TABLES, "fake", ())
    asked = papers.check(tmp_path / "out", ["fake"], "local", "small", 0.0)
    with pytest.raises(KeyboardInterrupt):
        papers.run(asked, lambda _: None)
    outcomes, well = papers.run(asked, lambda _: None)
    assert well
    assert len(seen) == 1 + 2 * SCALES["small"].rounds  # the one that was interrupted, twice
    count = len(seen)
    assert papers.run(asked, lambda _: None)[0][0].findings == outcomes[0].findings
    assert len(seen) == count
    assert (
        json.loads((tmp_path / "out/papers.json").read_text())["experiments"][0]["name"] == "fake"
    )


@pytest.mark.unit
def test_what_goes_on_without_a_program_that_was_there_at_first_has_all_its_rounds(
    tmp_path, monkeypatch
):
    lammps = ["LAMMPS"]

    def variants(setting: Setting):
        def measure() -> dict[str, float]:
            if lammps:
                lammps.clear()
                raise KeyboardInterrupt
            return {"rate": 1.0}

        made = {name: lambda: {"rate": 1.0} for name in lammps}
        return {**made, "OpenFOAM": measure}

    def findings(setting: Setting, measured) -> list[Finding]:
        return [Finding(name, "x", Row("", tuple(one["rate"] for one in rounds)))
                for name, rounds in measured.items()]  # fmt: skip

    fake = {"fake": Experiment("fake", "a fake", findings, variants)}
    monkeypatch.setattr(papers, "EXPERIMENTS", fake)
    asked = papers.check(tmp_path / "out", [], "local", "small", 0.0)
    with pytest.raises(KeyboardInterrupt):
        papers.run(asked, lambda _: None)
    for _ in range(2):  # measured, and as it was kept
        (outcome,) = papers.run(asked, lambda _: None)[0]
        assert [(one.what, len(one.row.values)) for one in outcome.findings] == [("OpenFOAM", 3)]


@pytest.mark.unit
def test_rounds_of_messages_may_lack_what_others_have():
    whole = made_up_round(converged.SETUPS, **{"pull": 1.5, "pull, MB": 28.0})
    less = {name: value for name, value in whole.items() if "LAMMPS" not in name}
    del less["pull"]
    found = converged.converged_findings(None, {converged.ROUND: [whole, less]})
    assert not [one.what for one in found if one.what.startswith("LAMMPS:")]
    assert {one.what: one.why for one in found}["pull of an image"].startswith("there is no lmp")


@pytest.mark.unit
def test_results_of_another_program_or_mpi_are_not_mixed_with_these(tmp_path, monkeypatch):
    package = tmp_path / "package"
    (package / "controller").mkdir(parents=True)
    module = package / "controller" / "choice.py"
    names = []
    for text in ("one", "two", "one"):
        module.write_text(text)
        names.append(papers.program(package))
    assert names[0] == names[2] != names[1]
    module.rename(package / "choice.py")
    assert papers.program(package) != names[0]

    monkeypatch.setattr(papers, "EXPERIMENTS", {})
    asked = papers.Asked(tmp_path / "out", (), "local", SCALES["small"], 0.0)
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    for version in ("4.1.4", "5.0.2"):
        mpirun = programs / "mpirun"
        mpirun.write_text(f"#!/bin/sh\necho\necho 'mpirun (Open MPI)  {version}'\n")
        mpirun.chmod(0o755)
        if version == "4.1.4":
            papers.run(asked, lambda _: None)
    with pytest.raises(BadInput, match=r"with mpi mpirun \(Open MPI\) 4\.1\.4, not .* 5\.0\.2"):
        papers.run(asked, lambda _: None)


@pytest.mark.unit
def test_an_experiment_that_cannot_be_started_says_why_and_the_others_run(tmp_path, monkeypatch):
    def variants(setting: Setting):
        return {"a": lambda: plain([tmp_path], ["no-such-mpirun"], 1)}

    fake = {name: Experiment(name, name, lambda *_: [], variants) for name in ("one", "two")}
    monkeypatch.setattr(papers, "EXPERIMENTS", fake)
    for name in fake:
        monkeypatch.setitem(published.TABLES, name, ())
    asked = papers.check(tmp_path / "out", [], "local", "small", 0.0)
    outcomes, well = papers.run(asked, lambda _: None)
    assert not well
    for one, name in zip(outcomes, fake):
        assert (one.name, len(one.findings)) == (name, 1)
        assert one.findings[0].why.endswith("No such file or directory: 'no-such-mpirun'")


@pytest.mark.unit
def test_beside_what_starts_clusters_of_its_own_there_is_no_other(tmp_path, monkeypatch):
    up: list[str] = []
    seen: list[tuple[str, bool]] = []

    @contextlib.contextmanager
    def started(cores, progress):
        up.append("cluster")
        try:
            yield tmp_path / "kubeconfig"
        finally:
            up.pop()

    def experiment(name: str, **more: bool) -> Experiment:
        def variants(setting: Setting):
            seen.append((name, bool(up)))
            return {"a": lambda: {"rate": 1.0}}

        return Experiment(name, name, lambda *_: [], variants, **more)

    fake = {"pods": experiment("pods"), "own": experiment("own", own_clusters=True)}
    monkeypatch.setattr(papers, "EXPERIMENTS", fake)
    monkeypatch.setattr(papers.preflight, "errors", lambda: [])
    monkeypatch.setattr(papers.ondemand, "started", started)
    asked = papers.check(tmp_path / "out", [], "kubernetes", "small", 0.0)
    assert papers.run(asked, lambda _: None)[1]
    assert seen == [("pods", True), ("own", False)]
    assert not up


@pytest.mark.unit
def test_where_no_cluster_starts_each_experiment_says_why_and_the_others_run(tmp_path, monkeypatch):
    def refuses(cores, progress):
        raise WorkFailed("the node is not ready")

    def variants(setting: Setting):
        return {"a": lambda: {"rate": 1.0}}

    fake = {name: Experiment(name, name, lambda *_: [], variants, own_clusters=name == "own")
            for name in ("pods", "own")}  # fmt: skip
    monkeypatch.setattr(papers, "EXPERIMENTS", fake)
    for name in fake:
        monkeypatch.setitem(published.TABLES, name, ())
    monkeypatch.setattr(papers.preflight, "errors", lambda: [])
    monkeypatch.setattr(papers.ondemand, "started", refuses)
    asked = papers.check(tmp_path / "out", [], "kubernetes", "small", 0.0)
    outcomes, well = papers.run(asked, lambda _: None)
    assert not well
    assert [[one.why for one in outcome.findings] for outcome in outcomes] == [
        ["failed: the node is not ready"],
        [],
    ]
    assert (tmp_path / "out/papers.html").exists()


class Slow:
    """A place where so many iterations are done in the time, of however many are asked for."""

    kind, cores = KUBERNETES, 4

    def __init__(self, scratch: Path, done: int) -> None:
        self.scratch, self.done = scratch, done

    def measure(self, runs, iterations, seconds, during):
        changes = []
        for done in range(self.done + 1):
            during(done, changes.append)
        took = 1.0 + len(changes) / self.done  # a resize takes as long as an iteration
        return [Seen(took, 1.0, (), (), 0.0, 0.0, 0.0, 0.0)]


@pytest.mark.unit
@pytest.mark.parametrize("done", [60, 4])
def test_a_resize_costs_what_it_adds_to_the_iterations_that_were_done(tmp_path, monkeypatch, done):
    monkeypatch.setattr(allocation, "need_groups", lambda _: None)
    monkeypatch.setattr(allocation, "cut", lambda *_: tmp_path)
    setting = Setting(Slow(tmp_path, done), SCALES["small"], 0.0, lambda _: None, tmp_path)
    rounds = {name: [measure()] for name, measure in allocation.phases_variants(setting).items()}
    found = {one.what: one for one in allocation.phases_findings(setting, rounds)}
    added = found["what a resize adds to the ranks' time"]
    if done < 5:
        assert (added.row, added.why) == (None, "no round had five iterations in its time")
    else:
        assert added.row.values == (pytest.approx(1000.0),)


class Whole:
    """A place where all iterations are done, and a rank began anew once; what it was asked for."""

    kind, cores = KUBERNETES, 4

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        self.asked: list[list[tuple[int, ...]]] = []

    def measure(self, runs, iterations, seconds, during):
        self.asked.append([tuple(runs[0].requests)])
        for done in range(iterations + 2):  # a look may come late
            during(done, lambda requests: self.asked[-1].append(tuple(requests)))
        return [Seen(1.0, 1.0, (), (), 0.0, 0.0, 0.0, 0.0, restarts=len(self.asked) == 2)]


@pytest.mark.unit
def test_three_phases_begin_with_the_first_and_restarts_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(allocation, "need_groups", lambda _: None)
    monkeypatch.setattr(allocation, "cut", lambda *_: tmp_path)
    place = Whole(tmp_path)
    setting = Setting(place, SCALES["small"], 0.0, lambda _: None, tmp_path)
    rounds = {name: [measure()] for name, measure in allocation.phases_variants(setting).items()}
    asked = dict(zip(rounds, place.asked))
    phases = [cpu_requests.proportional(one, 4000) for one in allocation.PHASES]
    assert phases[0] == (1000,) * 4
    assert asked["fixed"] == [phases[1]]
    assert asked["three phases"] == phases
    assert asked["a resize every 5 iterations"][:4] == [*phases, phases[0]]
    found = {one.what: one for one in allocation.phases_findings(setting, rounds)}
    assert (found["restarts"].row.values, found["restarts"].verdict) == ((1.0,), NOT_SEEN)
    assert found["restarts"].note.startswith("25 resizes")


@pytest.mark.unit
def test_ranks_that_count_from_the_beginning_have_begun_anew():
    def ranks(*done: int) -> protocol.Ranks:
        return protocol.Ranks(done, *[(0.0,) * len(done)] * 4, (1,) * len(done))

    assert began_anew(ranks(7, 8), ranks(8, 2))
    assert not began_anew(ranks(7, 8), ranks(7, 9))


@pytest.mark.unit
def test_others_disturb_by_what_they_take_of_our_cores_alone():
    stat = (
        "cpu  900 0 100 700 60 0 0 5 0 0\n"
        "cpu0 10 1 2 300 30 3 4 5 0 0\n"
        "cpu1 890 0 98 400 30 0 0 0 0 0\n"
        "cpu10 7 0 0 0 0 0 0 0 0 0\nintr 1 2 3\n"
    )
    assert papers.used(stat, {0}) == 25
    assert papers.used(stat, {0, 1}) == 25 + 988


@pytest.mark.unit
@pytest.mark.parametrize(("taken", "rounds"), [("001", [3]), ("011", [2, 3]), ("000", [])])
def test_each_round_that_others_disturbed_is_told(tmp_path, monkeypatch, taken, rounds):
    cores = len(os.sched_getaffinity(0))
    turns = iter(taken)

    def findings(setting: Setting, measured) -> list[Finding]:
        number = published.of("allocation")["limits at once"]
        return [Finding("time", "x", Row("", (80.0,)), number)]

    def variants(setting: Setting):
        return {"a": lambda: {"rate": 1.0}}

    fake = {"fake": Experiment("fake", "a fake", findings, variants)}
    monkeypatch.setattr(papers, "EXPERIMENTS", fake)
    monkeypatch.setattr(papers, "busy", lambda: float(next(turns)) * cores)
    asked = papers.check(tmp_path / "out", [], "local", "small", 0.0)
    for _ in range(2):  # measured, and as it was kept
        (outcome,) = papers.run(asked, lambda _: None)[0]
        (found,) = outcome.findings
        assert found.verdict == (DISTURBED if len(rounds) > 1 else CONFIRMED)
        (shown,) = json.loads((tmp_path / "out/papers.json").read_text())["experiments"]
        assert (shown["disturbed"], shown["others"]) == (rounds, cores if rounds else 0)
        words = f"a quarter of all or more in round {', '.join(map(str, rounds))}"
        assert (words in (tmp_path / "out/papers.html").read_text()) == bool(rounds)
        bench.show_papers([outcome], "a machine")


@pytest.mark.unit
def test_each_round_of_few_variants_begins_with_another(tmp_path, monkeypatch):
    seen: list[str] = []

    def variants(setting: Setting):
        def measure(name: str) -> dict[str, float]:
            seen.append(name)
            return {"rate": 1.0}

        return {name: lambda name=name: measure(name) for name in "ab"}

    fake = {"fake": Experiment("fake", "a fake", lambda *_: [], variants)}
    monkeypatch.setattr(papers, "EXPERIMENTS", fake)
    papers.run(papers.check(tmp_path / "out", [], "local", "medium", 0.0), lambda _: None)
    assert "".join(seen) == "abbaabbaab"


@pytest.mark.unit
def test_the_page_keeps_what_was_measured_before_when_one_is_asked_for(tmp_path, monkeypatch):
    def experiment(name: str) -> Experiment:
        def variants(setting: Setting):
            return {"a": lambda: {"rate": 1.0}}

        return Experiment(name, name, lambda *_: [Finding(name, "x", Row("", (1.0,)))], variants)

    fake = {name: experiment(name) for name in ("one", "two", "three")}
    monkeypatch.setattr(papers, "EXPERIMENTS", fake)
    for names in (["two"], ["one"]):
        asked = papers.check(tmp_path / "out", names, "local", "small", 0.0)
        assert [one.name for one in papers.run(asked, lambda _: None)[0]] == names
    found = json.loads((tmp_path / "out/papers.json").read_text())["experiments"]
    assert [one["name"] for one in found] == ["one", "two"]
    os.utime(tmp_path / "out" / FILE, (0, 86400 * 365.5))  # measured long ago
    papers.run(asked, lambda _: None)
    machine = json.loads((tmp_path / "out/papers.json").read_text())["measured_on"]
    assert machine.endswith("January 1971")
    assert machine in (tmp_path / "out/papers.html").read_text()
    assert 'id="two"' in (tmp_path / "out/papers.html").read_text()


@pytest.mark.unit
def test_a_reason_is_printed_as_it_is(capsys):
    why = "failed: [vm:4711] no route; [/opt/mpi] is missing"
    outcome = Outcome("one", "one", (Finding("time", "s", why=why),), "")
    bench.show_papers([outcome], "a machine")
    told = capsys.readouterr().out
    for word in ("[vm:4711]", "[/opt/mpi]"):
        assert word in told


@pytest.mark.unit
def test_models_of_no_use_are_not_put_in_a_ratio():
    (theirs,) = [one for one in published.TABLES["hybrid"] if (one.value or 0) < 0]
    found = Finding("R squared", "R squared", Row("", (-32.5,)), theirs)
    assert (found.ratio, found.verdict) == (None, "confirmed")


@pytest.mark.unit
def test_a_batch_job_that_went_on_is_said_to_have_no_duration():
    one = {"learned": 18.0, "unseen": 9.0, "kept": 0.0, "ordinary": 1.0, "cpu": 0.3,
           "seconds": 70.0, "R squared, linear": 0.7, "R squared, neighbours": 0.9}  # fmt: skip

    def found(figures: dict[str, float]) -> dict[str, Finding]:
        made = converged.hybrid_findings(None, {"batch job": [figures]})
        return {finding.what: finding for finding in made}

    rows = found(one)
    assert rows["R squared, linear"].verdict == CONFIRMED
    assert "18 jobs learned, 9 unseen, of an ordinary user" in rows["R squared, linear"].note
    assert rows["R squared, neighbours"].published is None
    assert rows["the whole batch job"].row.median == 70.0
    gone_on = found({**one, "kept": 12.0})["the whole batch job"]
    assert (gone_on.row, gone_on.verdict) == (None, NOT_MEASURED)
    assert "after 12 of its jobs" in gone_on.why


def made_up_round(setups: tuple[str, ...], **more: float) -> dict[str, float]:
    """A round in which everything takes a second when bare, and two elsewhere; ranks share it."""
    made = dict(more)
    for setup in setups:
        takes = 1.0 if setup == converged.BARE else 2.0
        made |= {f"{test}, {setup}": takes for test in (*published.OSU, "LAMMPS")}
        made |= {f"LAMMPS on 1 rank, {setup}": 1.8 * takes, f"LAMMPS CPU, {setup}": 0.99}
        if setup.startswith(published.INSIDE):
            made |= {f"start-up, {setup}": 4.0, f"start of pods, {setup}": 0.9}
    return made


@pytest.mark.unit
def test_set_ups_between_hosts_are_rows_of_their_own():
    pulled = {"pull": 1.5, "pull, MB": 28.0, "start of a pod, pulled": 2.0,
              "start of a pod, image there": 0.5}  # fmt: skip
    here = [made_up_round(converged.SETUPS, **pulled)] * 2
    apart = [made_up_round(converged.SETUPS[:-1], hosts=3.0)] * 2
    found = converged.converged_findings(None, {converged.ROUND: here, converged.BETWEEN: apart})
    rows = {one.what: one for one in found}
    assert len(rows) == len(found)
    name = f"latency, 8 B: {converged.PODS} / bare"
    for what in (name, f"between hosts: {name}"):
        assert (rows[what].row.values, rows[what].verdict) == ((2.0, 2.0), CONFIRMED)
        assert rows[what].published == published.of("converged")["latency, 8 B, in Kubernetes"]
    assert rows[f"between hosts: {converged.BRIDGE}"].why == "no /dev/net/tun"
    speed_up = rows["between hosts: LAMMPS, speed-up from 1 to 2 hosts, bare"]
    assert speed_up.row.median == pytest.approx(1.8)
    assert rows["between hosts: LAMMPS, speed-up from 4 to 32 nodes"].why == "3 hosts"
    assert rows["LAMMPS, speed-up from 4 to 32 nodes"].why == "one machine"
    assert (rows["pull of an image"].row.median, rows["pull of an image"].verdict) == (1.5, SMALLER)
    assert "28 MB packed" in rows["pull of an image"].note


@pytest.mark.unit
def test_what_one_core_or_one_machine_cannot_measure_says_why():
    apart = made_up_round((converged.BARE, converged.CONTAINER, converged.PODS), hosts=2.0)
    rows = {
        one.what: one for one in converged.converged_findings(None, {converged.BETWEEN: [apart]})
    }
    assert rows["on one machine"].why == converged.ONE_CORE
    assert rows["between hosts: bare beside"].why == "Kubernetes has all cores"
    here = converged.converged_findings(None, {converged.ROUND: [made_up_round(converged.SETUPS)]})
    assert (here[-1].what, here[-1].why) == ("between hosts: every set-up", "one machine")
    assert (here[-1].verdict, page_row(here[-1])["theirs"]) == (NOT_MEASURED, "")
    assert {one.what: one.why for one in here}["pull of an image"].startswith("there is no lmp")


@pytest.mark.unit
def test_every_other_round_of_set_ups_ends_with_bare(tmp_path, monkeypatch):
    seen: list[str] = []
    text = json.dumps({"latency, 8 B": 1.0})

    @contextlib.contextmanager
    def started(cores, progress, network, purpose):
        yield tmp_path / network

    def says(where: str, _: object = None) -> str:
        seen.append(where)
        return text

    monkeypatch.setattr(converged.hybrid, "mpi_run", lambda *_: says("bare"))
    monkeypatch.setattr(converged.containers, "run", lambda *_: says("container"))
    monkeypatch.setattr(converged.ondemand, "started", started)
    monkeypatch.setattr(
        converged, "_in_pods", lambda _, __, network, waits, *___: says(network, waits.append(0.5))
    )
    setting = Setting(Place(tmp_path), SCALES["small"], 0.0, lambda _: None, tmp_path)
    for number in (0, 1):
        found = converged._round(setting, tmp_path, [["sweep"]], None, number)
        assert set(converged.SETUPS) == {name.rpartition("8 B, ")[2] for name in found
                                         if name.startswith("latency")}  # fmt: skip
    beside = ["bare", "bare", "host"]
    assert seen == ["bare", "container", *beside, "bridge", "bridge", *beside, "container", "bare"]


JOB = """#!/bin/bash
#flux: -N1
mkdir -p hybrid-out/learned hybrid-out/unseen
cd hybrid-out
echo "$(id -u) $HYBRID_JOBS" >learned/1.log
echo half >learned/2.log.part
[ -e learned/0.log ] || exit 1
printf 'log,actual,linear\\na,1,1\\nb,2,2\\n' | tee predicted.csv >predicted.svg
"""


@pytest.mark.flux
def test_the_batch_job_has_the_jobs_of_its_scale_and_goes_on(monkeypatch):
    monkeypatch.setenv("FLUX", flux_batch.flux_command())
    monkeypatch.setattr(sys, "argv", [str(flux_batch.COMMANDS / "dovetail")])
    monkeypatch.setattr(converged, "_LOOK", 0.5)
    folder = Path(tempfile.mkdtemp(prefix="dovetail-papers-"))
    folder.chmod(0o755)  # for the user of the job
    (folder / "hybrid.sh").write_text(JOB)
    output = folder / "out"
    setting = Setting(Place(folder), SCALES["papers"], 0.0, lambda _: None, output)
    (output / "learned").mkdir(parents=True)
    (output / "learned/0.log").write_text("of an earlier one\n")
    try:
        found = converged._job(setting, folder / "hybrid.sh")
        assert sorted(path.name for path in output.glob("*/*")) == ["0.log", "1.log"]
        uid, jobs = (output / "learned/1.log").read_text().split()
        assert jobs == "1000,250"
        assert (found["kept"], found["R squared, linear"]) == (1.0, 1.0)
        assert found["ordinary"] == (uid != "0")
        assert found["ordinary"] or os.getuid() == 0
        assert (output / "predicted.svg").exists()
    finally:
        shutil.rmtree(folder)


@pytest.mark.kube
def test_a_container_of_the_benches_has_what_the_machine_has_and_leaves_nothing(tmp_path):
    engine = containers.runc(lambda _: None)
    words = ("sh", "-c", "echo $$; ls /proc/self/task; cat /etc/hostname")
    lines = containers.run(engine, tmp_path, words, 2).split()
    processes = [int(line) for line in lines if line.isdigit()]
    assert len(processes) == 4
    assert max(processes) < 100  # it counts them by itself
    assert lines.count(Path("/etc/hostname").read_text().strip()) == 2
    with pytest.raises(WorkFailed, match="no such program"):
        containers.run(engine, tmp_path, ("sh", "-c", "echo no such program; exit 3"), 1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.kube
def test_nothing_is_left_of_a_container_whose_maker_is_killed(tmp_path):
    containers.runc(lambda _: None)
    words = [sys.executable, "-m", containers.__name__, "sh", "-c", "echo up; exec sleep 600"]
    environment = known_programs.environment(TMPDIR=str(tmp_path))
    maker = subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True)
    assert maker.stdout.readline() == "up\n"
    (bundle,) = tmp_path.iterdir()
    state = next(bundle.glob("state/*/state.json"))
    inside = json.loads(state.read_text())["init_process_pid"]
    maker.kill()
    maker.wait()
    maker.stdout.close()
    assert eventually(lambda: not list(tmp_path.iterdir()))
    assert eventually(lambda: not Path(f"/proc/{inside}").exists())


@pytest.mark.mpi
def test_motor_bike_is_meshed_once_with_fewer_cells(tmp_path):
    if motor_bike.missing():
        pytest.skip(motor_bike.missing())
    (tmp_path / "bike.part").mkdir()  # of one that was interrupted
    case = motor_bike.meshed(tmp_path / "bike", 2, 3)
    assert 1000 < motor_bike.cells(case) < 20_000
    made = (case / "constant/polyMesh/owner").stat().st_mtime_ns
    assert motor_bike.meshed(case, 2, 3) == case
    assert (case / "constant/polyMesh/owner").stat().st_mtime_ns == made
    assert plain([motor_bike.cut(case, tmp_path / "cut", 2)], cases.mpirun(2), 1) > 0


@pytest.mark.unit
def test_each_mesh_has_its_own_speed_up_and_one_that_is_missing_says_why(monkeypatch):
    measured = {
        "pitzDaily, 12,225 cells, even cut, spinning: 1": [{"seconds": 1.0}],
        "pitzDaily, 12,225 cells, even cut, spinning: 2": [{"seconds": 0.5}],
        "motorBike, 40,000 cells, even cut, spinning: 1": [{"seconds": 3.0}],
        "motorBike, 40,000 cells, even cut, sleeping: 2": [{"seconds": 2.0}],
    }
    rows = {one.what: one for one in setups.setups_findings(None, measured)}
    assert rows["S(2), pitzDaily, 12,225 cells, even cut, spinning"].row.median == 2.0
    bike = rows["S(2), motorBike, 40,000 cells, even cut, sleeping"]
    assert (bike.row.median, bike.note) == (1.5, "20,000 cells for each rank")
    assert rows["E(2), motorBike, 40,000 cells, even cut, sleeping"].row.median == 0.75
    assert page_row(bike)["verdict"] == NO_NUMBER
    monkeypatch.setattr(motor_bike, "missing", lambda: "there is no snappyHexMesh")
    some = {name: rounds for name, rounds in measured.items() if "pitz" in name}
    assert setups.setups_findings(None, some)[-1].why == "there is no snappyHexMesh"


@pytest.mark.unit
def test_a_profile_without_iterations_is_work_that_failed(tmp_path, monkeypatch):
    def profiled(words, **_):
        ranks = [{"rank": 0, "duty": 0.5, "cpu_per_iteration": None}]
        Path(words[words.index("-o") + 1]).write_text(json.dumps({"dovetail": {"ranks": ranks}}))
        return subprocess.CompletedProcess(words, 0)

    monkeypatch.setattr(setups.subprocess, "run", profiled)
    with pytest.raises(WorkFailed, match="no iteration of the solver was counted"):
        setups._profile(tmp_path)


@pytest.mark.unit
def test_pods_of_more_ranks_than_cores_ask_for_the_cores_that_there_are(tmp_path):
    place = Place(tmp_path, tmp_path / "kubeconfig")
    place.cores = 4
    setting = Setting(place, SCALES["small"], 0.0, lambda _: None, tmp_path)
    made = setups._by_ranks(setting, "a case", lambda ranks: tmp_path)
    runs = {name: one.args[1] for name, one in made.items()}
    asked = {len(run.requests): sum(run.requests) for run in runs.values()}
    assert asked == {1: 1000, 2: 2000, 4: 4000, 8: 4000}


class _Page(HTMLParser):
    """Elements that a page must not have, and what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.bad: list[str] = []
        self.words = ""

    def handle_starttag(self, tag, attrs):
        links = [value for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag in ("script", "link", "img", "iframe") or any(not v.startswith("#") for v in links):
            self.bad.append(tag)

    def handle_data(self, data):
        self.words += data


@pytest.mark.unit
def test_the_page_has_every_finding_and_needs_nothing_else():
    number = published.of("packing")["throughput 3"]
    some = (
        Finding("3 at once", "x", Row("", (1.2, 1.3, 1.4)), number, group="throughput", at=3),
        Finding("limits <once>", "x", Row("", (3.0,)), published.of("allocation")["limits at once"],
                group="limits"),
        Finding("across", "x", None, published.of("allocation")["across hosts"], "one machine"),
        Finding("a detail", "s", Row("", (0.01,)), detail=True),
    )  # fmt: skip
    text = page([Outcome("packing", "Packing", some, "dovetail bench papers packing")], "a machine")
    read = _Page()
    read.feed(text)
    assert read.bad == []
    for words in ("limits <once>", "smaller", "not measured here", "one machine", "2604.00377",
                  "a detail", "78 x", "dovetail bench papers packing"):  # fmt: skip
        assert words in read.words


@pytest.mark.unit
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["papers", "nonsense"], "nonsense: no experiment; there are allocation"),
        (["papers", "--kubernetes"], "--executor kubernetes"),
        (["papers", "--price", "-1"], "--price"),
        (["pack", "allocation"], "allocation: only with queues, scale, papers, not with pack"),
        (["pack", "--scale", "small"], "--scale: only with papers"),
        (["papers", "--repeat", "3"], "--repeat: not with papers: --scale says how many rounds"),
        (["demo", "--repeat", "3"], "--repeat: not with demo: it has one round"),
        (["scale", "ranks", "nonsense"], "there is nothing called 'nonsense'; there are ranks"),
        (["queues", "short", "nonsense"], "there is no queue 'nonsense'; there are imbalanced"),
    ],
)
def test_what_cannot_be_is_said_in_a_line_and_nothing_is_started(tmp_path, capsys, words, said):
    output = tmp_path / "out"
    assert main.main(["bench", *words, "-o", str(output)]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert len(errors.strip().splitlines()) == 1
    assert not output.exists()


class Late(Place):
    """Not all ranks are seen in their groups at the first look after limits were lifted."""

    late = False

    def _lift(self, name, run):
        super()._lift("who is not there", run)
        super()._lift(name, run)
        self.late = True

    def _arrange(self, name, run, done):
        late = self.late and name not in done
        self.late = self.late and not late
        return not late and super()._arrange(name, run, done)


class Empty:
    """A group into which a process comes after the first look."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.looks = 0

    def members(self) -> dict[int, int]:
        self.looks += 1
        return {self.pid: 1} if self.looks > 1 else {}


@pytest.mark.unit
def test_a_simulation_has_its_cpus_once_its_processes_are_there(tmp_path, monkeypatch):
    cpu = max(os.sched_getaffinity(0))
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            place, group = Place(tmp_path), Empty(process.pid)
            monkeypatch.setattr(place, "_groups", lambda *_: [group])
            run, done = Run(tmp_path, (1000,), cpus=(cpu,)), set()
            assert not place._arrange("s1", run, done)
            assert place._arrange("s1", run, done)
            assert os.sched_getaffinity(process.pid) == {cpu}
        finally:
            process.kill()


@pytest.mark.mpi
def test_limits_are_lifted_until_simulations_begin_and_hold_then(tmp_path, monkeypatch):
    program = known_programs.build("openmpi", "known/busy.c")
    place = Late(tmp_path / "runs")
    (tmp_path / "case").mkdir()
    monkeypatch.setattr("dovetail.bench.papers.place._START", 4.0)
    monkeypatch.setattr("dovetail.bench.papers.place._LIFT", 2.0)
    words = (str(program), "burn", "1000000", "100")
    run = Run(tmp_path / "case", (20,), command=words, apart=True, limit=1.0)
    try:
        need_groups(place)
        (seen,) = place.measure([run], 2, 6.0)  # the first may have been done before they held
    except NotHere as why:
        pytest.skip(str(why))
    finally:
        place.close()
    assert seen.seconds > 1.0  # 100 ms of work at a fiftieth of a core
    assert seen.throttled > 0.0


@pytest.mark.mpi
def test_simulations_are_measured_over_their_iterations_while_all_run(tmp_path):
    program = known_programs.build("openmpi", "known/busy.c")
    place = Place(tmp_path / "runs")
    (tmp_path / "case").mkdir()
    words = (str(program), "sleep", "1000000", "2", "8")
    run = Run(tmp_path / "case", (500, 500), command=words, apart=True)
    try:
        seen = place.measure([run, run], 20, 10.0)
    finally:
        place.close()
    assert len(seen) == 2
    for one in seen:
        assert one.seconds >= 0.008  # what an iteration sleeps at least
        assert one.useful[0] < one.useful[1]
        assert one.mpi[0] > one.mpi[1]
