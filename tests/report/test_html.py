# SPDX-License-Identifier: LGPL-3.0-or-later
"""The page: well-formed, self-contained, safe with hostile names, bounded, fit for a phone."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from dovetail.cli import main
from dovetail.core import eventlog, protocol
from dovetail.report import charts, summary
from dovetail.report import html as report
from dovetail.report.alternatives import DOVETAIL, FEWER, SEQUENTIAL, Alternative
from dovetail.report.figures import Point
from dovetail.report.history import Load
from dovetail.report.verdict import Figure, Totals, judge
from support import made_up_runs

pytestmark = pytest.mark.unit

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Page(html.parser.HTMLParser):
    """Checks that elements nest, and collects what a browser would fetch or run."""

    def __init__(self, text):
        super().__init__()
        self.open, self.requests, self.scripts, self.words = [], [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attributes:
            if name in ("src", "href", "data", "action", "xlink:href", "poster"):
                self.requests.append(value)
            if name.startswith("on") or (value or "").strip().startswith("javascript:"):
                self.scripts.append(f"{name}={value}")
        if tag in ("script", "iframe", "object", "embed", "img"):
            self.scripts.append(tag)

    def handle_endtag(self, tag):
        assert self.open
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


def page(run, others=()):
    history = run.history()
    return report.page(summary.summarise(history, others), history)


def failing():
    run = made_up_runs.packed(1)
    run.launch("pitz-1")
    run.finish("pitz-1", 139, "rank 1 died: signal 11")
    return run


def partial():
    run = made_up_runs.mixed()
    run.log = run.log[:80]
    return run


def interrupted():
    run = partial()
    run.add(protocol.Interrupted(run.t, "SIGTERM"))
    return run


def without_iterations():
    run = made_up_runs.Run([made_up_runs.spec("a", "f")], {"f": 0.1})
    run.launch("a")
    run.t += 3
    run.finish("a")
    return run


def nothing():
    return made_up_runs.Run([made_up_runs.spec("a", "f")], {"f": 0.1})


def no_plan():
    return made_up_runs.Run([], {})


RUNS = [
    made_up_runs.mixed,
    made_up_runs.crowd,
    failing,
    partial,
    interrupted,
    without_iterations,
    nothing,
    no_plan,
]


@pytest.mark.parametrize("make", RUNS, ids=lambda make: make.__name__.replace("_", " "))
def test_any_run_has_a_page_that_is_well_formed_and_needs_nothing_else(make):
    text = page(make())
    found = Page(text)
    assert found.requests == []
    assert found.scripts == []
    assert not re.search(r"@import|url\(", text)
    assert not re.search(r"\b(nan|inf|None)\b", " ".join(found.words))


def test_a_thousand_simulations_fit_into_two_megabytes():
    text = page(made_up_runs.crowd())
    assert len(text.encode()) < 2_000_000
    assert "of 1000" in text


def test_a_thousand_families_fit_into_two_megabytes():
    specs = [made_up_runs.spec(f"s-{n}", f"f-{n}") for n in range(1000)]
    run = made_up_runs.Run(specs, {spec.family: 0.1 for spec in specs})
    for spec in specs:
        run.launch(spec.name)
        run.work(2)
        run.finish(spec.name)
    text = page(run)
    assert len(text.encode()) < 2_000_000
    assert "of 1000 families" in text


def test_the_ranks_of_a_large_simulation_are_drawn_in_groups():
    run = made_up_runs.Run([made_up_runs.spec("a", "f", (1.0, 2.0) * 2000)], {"f": 0.1})
    run.launch("a")
    run.work(2)
    run.finish("a")
    text = page(run)
    assert len(text.encode()) < 2_000_000
    assert "ranks 0 to 249" in text


@pytest.mark.filterwarnings("error")
def test_ranks_are_not_compared_with_those_of_a_run_on_fewer():
    alone, packed = (
        Load("f", kind, 9.0, *(np.arange(1.0, count + 1),) * 3)
        for kind, count in (("spinning", 1), ("packed", 2))
    )
    _, chart = report._ranks(SimpleNamespace(name="f", loads=(alone, packed)), 2)
    assert "packed" not in chart
    assert "nan" not in chart


HOSTILE = "</svg><script>alert(1)</script><img src=x onerror='alert(2)'>\"&{{7*7}}"


def test_hostile_names_and_reasons_are_escaped_everywhere():
    run = made_up_runs.Run(
        [made_up_runs.spec(HOSTILE, HOSTILE), made_up_runs.spec(HOSTILE + "2", HOSTILE)],
        {HOSTILE: 0.1},
    )
    run.launch(HOSTILE)
    run.work(2)
    run.note("admit", HOSTILE, name=HOSTILE + "2")
    run.launch(HOSTILE + "2")
    run.work(2, 1.5)
    run.resize((500, 1500), refused=HOSTILE)
    run.finish(HOSTILE, 1, HOSTILE)
    run.add(protocol.Interrupted(run.t, HOSTILE))
    alternative = Alternative(family=HOSTILE, name=FEWER, makespan_s=[1.0], ranks=1)
    text = page(run, [alternative])
    found = Page(text)
    assert found.scripts == []
    assert found.requests == []
    assert "{{7*7}}" in text
    assert "<script" not in text


def test_the_headline_tells_the_finding():
    text = page(made_up_runs.packed(), [])
    assert "about 1.32 times the throughput of one after the other" in text


def test_a_killed_run_says_that_it_is_not_done():
    found = " ".join(Page(page(partial())).words)
    assert "before the queue was done" in found
    assert "1 unfinished" in found or "2 unfinished" in found


def test_a_simulation_that_could_never_start_is_no_end_of_the_log():
    run = made_up_runs.packed(1)
    run.specs.append(made_up_runs.spec("large", "large"))
    assert "before the queue was done" in page(run)
    run.add(protocol.Ended("large", "not started", protocol.Cause.TOO_LARGE, "needs 1 TB"))
    assert "before the queue was done" not in page(run)
    assert "1 not started" in page(run)
    run.resume("large")
    assert "before the queue was done" in page(run)


def test_a_winning_alternative_is_said_before_packing():
    others = [
        Alternative(family="pitz", name=SEQUENTIAL, makespan_s=[36.0], ranks=2),
        Alternative(family="pitz", name=FEWER, makespan_s=[18.0], ranks=1),
    ]
    text = page(made_up_runs.packed(), others)
    assert text.index("run on fewer ranks side by side") < text.index("pack 2 at once")


@pytest.mark.parametrize(
    ("times", "title", "says"),
    [
        ({SEQUENTIAL: 40.0, FEWER: 26.3}, f"As quick as {FEWER}", f"As quick: {FEWER}, 26.3 s"),
        ({FEWER: 26.7}, f"As quick as {FEWER}", f"As quick: {FEWER}, 26.7 s"),
        ({SEQUENTIAL: 26.3, FEWER: 40.0}, f"As quick as {SEQUENTIAL}", "Packing does not pay"),
        ({SEQUENTIAL: 40.0, FEWER: 30.0}, "Dovetail was the quickest", f"way, {FEWER}, took 30.0"),
    ],
)
def test_dovetail_is_not_called_the_quickest_where_another_way_is_as_quick(times, title, says):
    others = [Alternative(family="pitz", name=n, makespan_s=[t], ranks=1) for n, t in times.items()]
    run = made_up_runs.packed()
    verdict = summary.summarise(run.history(), others).verdict
    assert verdict.best == DOVETAIL
    assert says in verdict.words
    words = Page(page(run, others)).words
    assert title in words
    assert ("Dovetail was the quickest" in words) == title.startswith("Dovetail")


def test_a_way_that_is_only_predicted_to_be_as_quick_is_said_to_be_so():
    figures = dict.fromkeys([field.name for field in dataclasses.fields(Totals)], Figure())
    figures.update(makespan_s=Figure(10.0, "measured"), fewer_ranks_s=Figure(9.9, "predicted"))
    (family,) = summary.summarise(made_up_runs.packed().history()).families
    family = dataclasses.replace(family, totals=(totals := Totals(**figures)))
    family = dataclasses.replace(family, verdict=judge(totals, 0, 4))
    title, _ = report._family(family, 2)["alternatives"]
    assert title == "As quick as fewer ranks side by side is predicted to be"
    totals = dataclasses.replace(totals, fewer_ranks_s=Figure(5.0, "predicted"))
    family = dataclasses.replace(family, totals=totals, verdict=judge(totals, 0, 4))
    title, _ = report._family(family, 2)["alternatives"]
    assert title == "Predicted to be the quickest: fewer ranks side by side"


@pytest.mark.parametrize(
    ("sources", "title"),
    [
        (("", ""), "What is known of the alternatives"),
        (("predicted", ""), "Dovetail was quicker than is predicted of the others"),
        (("predicted", "measured"), "Dovetail was the quickest"),
    ],
)
def test_dovetail_is_the_quickest_of_what_was_measured_alone(sources, title):
    (family,) = summary.summarise(made_up_runs.packed().history()).families
    others = (Figure(20.0, source) if source else Figure() for source in sources)
    names = [field.name for field in dataclasses.fields(Totals)]
    figures = {**dict.fromkeys(names, Figure()), "makespan_s": Figure(10.0, "measured")}
    totals = Totals(**{**figures, **dict(zip(("sequential_s", "fewer_ranks_s"), others))})
    family = dataclasses.replace(family, totals=totals, verdict=judge(totals, 0, 4))
    assert family.verdict.best == DOVETAIL
    assert report._family(family, 2)["alternatives"][0] == title


@pytest.mark.parametrize(
    ("two", "three", "throughput", "slowdown"),
    [
        (1.4, 1.3, "Throughput is highest at N=2: 1.40", "At N=3 each runs 2.31 times"),
        (0.5, 0.8, "Packing loses: at most 0.80 times that alone, at N=3", "At N=2 each runs 4.00"),
        (1.01, 0.9, "Packing changes nothing", "At N=3 each runs 3.33"),
    ],
)
def test_titles_say_of_packing_what_was_measured_of_the_best(two, three, throughput, slowdown):
    (family,) = summary.summarise(made_up_runs.packed().history()).families
    gains = {1: 1.005, 2: two, 3: three}
    points = tuple(
        Point(n, gain, (gain, gain), n / gain, (n / gain, n / gain), 9.0)
        for n, gain in gains.items()
    )
    made = report._family(dataclasses.replace(family, points=points), 2)
    assert made["throughput"][0].startswith(throughput)
    assert made["slowdown"][0].startswith(slowdown)


def test_what_ran_beside_others_is_told_as_measured_and_not_as_guessed():
    (family,) = summary.summarise(made_up_runs.packed().history()).families
    points = (
        Point(1, 1.0, (1.0, 1.0), 1.002, (1.0, 1.0), 9.0),
        Point(2, 2.0, (2.0, 2.0), 1.001, (1.0, 1.0), 9.0),
    )
    made = report._family(dataclasses.replace(family, points=points), 8)
    assert made["slowdown"][0] == "Up to N=2 none is slowed down"


@pytest.mark.parametrize(("kind", "cores", "does"), [
    ("spinning", 2, "computes"), ("spinning", 1, "is outside MPI"), ("packed", 2, "is outside MPI"),
])  # fmt: skip
def test_who_shares_a_core_is_not_said_to_compute_all_its_time_outside_mpi(kind, cores, does):
    load = Load("f", kind, 9.0, np.ones(2), np.array([1.0, 3.0]), np.array([3.0, 1.0]))
    title, _ = report._ranks(SimpleNamespace(name="f", loads=(load,)), cores)
    assert f"rank 0 {does} 25% of the time" in title


def test_what_is_said_after_the_longest_bar_is_in_the_picture():
    bar = charts.Bar("wall time", ((100.0, "busy"),), "100% busy")
    drawn = charts.bars([("", [bar])], "ms", "one bar that goes to the end of the axis")
    start = float(re.search(r'<text x="([\d.]+)"[^>]*>100% busy', drawn)[1])
    assert start + 0.62 * charts.TEXT * len(bar.remark) < charts.PANEL  # as wide as usual letters


def test_a_number_below_nothing_is_in_the_chart():
    bar = charts.Bar("R squared", ((-32.5, "own"),), "-32.5", (-40.0, -30.0))
    drawn = charts.bars([("", [charts.Bar("other", ((0.9, "own"),), "0.9"), bar])], "", "models")
    places = re.findall(r' x1?="([-\d.]+)"', drawn)
    assert min(map(float, places)) >= 0


def test_text_in_charts_is_readable_on_a_phone():
    # A 390 px screen leaves 342 px for a panel.
    assert charts.TEXT * 342 / charts.PANEL >= 11
    style = page(made_up_runs.packed())
    for size in re.findall(r"\.grid-text|\.chart \.\w+ \{[^}]*font-size: (\d+)px", style):
        assert float(size or charts.TEXT) >= 13


@pytest.mark.parametrize(
    ("top", "expected"),
    [
        (0.0, [0.0, 1.0]),
        (1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (47.4, [0.0, 10.0, 20.0, 30.0, 40.0, 50.0]),
        (float("inf"), [0.0, 1.0]),
    ],
)
def test_axes_have_round_numbers(top, expected):
    assert charts.ticks(top) == pytest.approx(expected)


# --- the command ---


def test_the_command_writes_the_page_and_prints_the_table(tmp_path, capsys):
    made_up_runs.mixed().save(tmp_path / "out")
    assert main.main(["report", str(tmp_path / "out")]) == 0
    assert "pitz-1" in capsys.readouterr().out
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["events.jsonl", "report.html", "summary.json"]
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["n_max"] == 2


def test_the_page_is_there_though_nobody_reads_the_table(tmp_path):
    made_up_runs.mixed().save(tmp_path / "out:100:")
    command = [sys.executable, "-m", "dovetail", "report", str(tmp_path / "out:100:")]
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(command, stdout=writing, timeout=120, check=False)
    os.close(writing)
    assert done.returncode == 1
    assert (tmp_path / "out:100:" / "report.html").exists()
    again = subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert b"out:100:/report.html" in again.stdout, "and no picture in its name"


def test_with_json_only_the_summary_is_printed(tmp_path, capsys):
    made_up_runs.mixed().save(tmp_path)
    assert main.main(["report", "--json", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["n_max"] == 2
    assert not (tmp_path / "report.html").exists()


def torn(text):
    return text[:-20]


def damaged(text):
    return text.replace('"type":"Started"', '"type":"Stranger"', 1)


def foreign(text):
    return text.replace(f'"schema":{eventlog.SCHEMA}', '"schema":99', 1)


@pytest.mark.parametrize(
    ("spoil", "code"),
    [(torn, 0), (damaged, 2), (foreign, 2), (lambda text: "", 2), (lambda text: "\0\n", 2)],
    ids=["torn last line", "damaged line", "foreign version", "empty", "no log"],
)
def test_a_damaged_log_is_refused_in_one_line(tmp_path, capsys, spoil, code):
    made_up_runs.mixed().save(tmp_path)
    log = tmp_path / "events.jsonl"
    log.write_text(spoil(log.read_text()))
    assert main.main(["report", str(tmp_path)]) == code
    errors = capsys.readouterr().err
    assert errors.count("\n") == (1 if code else 0)


@pytest.mark.parametrize("output", [".", "missing/report.html"])
def test_an_output_that_is_no_file_is_refused(tmp_path, capsys, output):
    made_up_runs.packed(1).save(tmp_path)
    assert main.main(["report", str(tmp_path), "-o", str(tmp_path / output)]) == 2
    assert not (tmp_path / "report.html").exists()


def test_a_device_or_a_pipe_is_not_replaced_by_the_page(tmp_path, capsys):
    """Root would replace /dev/null, for everybody."""
    made_up_runs.packed(1).save(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "null").symlink_to("/dev/null")
    for name in ("pipe", "null"):
        assert main.main(["report", str(tmp_path), "-o", str(tmp_path / name)]) == 2
        assert f"{name}: not a file in an existing directory" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "null").is_symlink()


def test_a_file_that_finds_no_room_is_an_error_and_leaves_no_draft(tmp_path, capsys):
    made_up_runs.packed(1).save(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        code = main.main(["report", str(tmp_path)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert code == 1
    said = capsys.readouterr()
    assert "summary.json: File too large; with -o FILE the page is written elsewhere" in said.err
    assert "pitz-1" in said.out, "the table is there all the same"
    assert [p.name for p in tmp_path.iterdir()] == ["events.jsonl"]


# --- a real browser ---

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = "--headless --hide-scrollbars --no-sandbox --disable-gpu --disable-quic --no-first-run"
FLAGS += " --disable-background-networking --disable-component-update --disable-sync"
PROBE = """<!DOCTYPE html><body><iframe id=f width={width} height=900 srcdoc="{page}"></iframe>
<script>
f.onload = () => {{
  const page = f.contentDocument;
  let least = 99;
  for (const one of page.querySelectorAll('svg text')) {{
    const drawn = one.ownerSVGElement;
    const scale = drawn.getBoundingClientRect().width / drawn.viewBox.baseVal.width;
    const size = parseFloat(f.contentWindow.getComputedStyle(one).fontSize);
    if (scale) least = Math.min(least, scale * size);
  }}
  document.title = `${{page.documentElement.scrollWidth}} ${{least.toFixed(2)}}`;
}};
</script>"""


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
@pytest.mark.parametrize("width", [390, 890, 910, 1280])
@pytest.mark.parametrize(
    "make", [made_up_runs.mixed, made_up_runs.crowd], ids=["two families", "a thousand"]
)
def test_in_a_browser_nothing_overflows_and_charts_are_legible(tmp_path, make, width):
    probe = tmp_path / "probe.html"
    escaped = page(make()).replace("&", "&amp;").replace('"', "&quot;")
    probe.write_text(PROBE.format(width=width, page=escaped))
    command = [CHROMIUM, *FLAGS.split(), f"--user-data-dir={tmp_path}/profile", "--dump-dom"]
    done = subprocess.run(
        [*command, probe.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    title = re.search(r"<title>(\d+) ([\d.]+)</title>", done.stdout.split("<iframe")[0])
    assert title, f"chromium said: {done.stderr[-500:]}"
    assert int(title[1]) <= width
    assert float(title[2]) >= 11


def test_python_dash_m_works(tmp_path):
    made_up_runs.packed(1).save(tmp_path)
    command = [sys.executable, "-m", "dovetail", "report", "--json", str(tmp_path)]
    assert subprocess.run(command, capture_output=True, timeout=120, check=False).returncode == 0


@pytest.mark.parametrize(
    ("letters", "words", "said"),
    [
        ("latin-1", ["requests", "--help"], r"--weights W,W,\u2026"),
        ("ascii", ["report", "caf\udce9"], r"report: caf\udce9/report.html"),
        ("utf-8", ["report", "caf\udce9"], r"report: caf\udce9/report.html"),
    ],
)
def test_what_a_locale_has_no_letters_for_is_printed_all_the_same(tmp_path, letters, words, said):
    made_up_runs.packed(1).save(tmp_path / "caf\udce9")
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", *words],
        env={**os.environ, "PYTHONIOENCODING": f"{letters}:strict"},
        cwd=tmp_path, capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert said in done.stdout.decode(letters)


def test_a_reason_is_printed_in_the_locale_posix_too(tmp_path):
    run = made_up_runs.Run([made_up_runs.spec("a", "f")], {"f": 0.1})
    run.launch("a")
    run.finish("a", 1, "Lösung divergiert")
    run.save(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", "report", str(tmp_path)],
        env={**os.environ, "LC_ALL": "POSIX", "PYTHONUTF8": "0"},
        capture_output=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, b"")
    assert rb"L\xf6sung divergiert" in done.stdout


@pytest.mark.parametrize(("page", "item"), [("run.1", "{} {}"), ("architecture.7", "{} , {}")])
def test_phases_are_called_as_in_the_manual(page, item):
    text = (Path(__file__).resolve().parents[2] / "doc" / f"dovetail-{page}").read_text()
    assert list(report.PHASES) == ["A", "C", "D"], "B is a moment, and so a mark"
    for letter, words in report.PHASES.items():
        assert f".It {item.format(letter, words.partition(':')[0])}\n" in text
