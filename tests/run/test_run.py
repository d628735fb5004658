# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a user meets who types `dovetail run`: output, exit codes, refusals."""

from __future__ import annotations

import errno
import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dovetail.run import run
from dovetail.run.resume import replay
from support.local_runs import LIMIT, wait_for
from support.other_users import needs_nobody
from support.run_command import COMMAND, NOBODY, site  # noqa: F401

pytestmark = pytest.mark.unit


def test_a_queue_is_run_to_its_end(site):  # noqa: F811
    entry = site.shell("grep -q changed input && echo 'Time = 1'", "echo changed > input", count=3)
    code, output, errors = site.run(site.plan(entry), "-o", "out")
    assert (code, site.states()) == (0, {f"sim-{n}": "done" for n in (1, 2, 3)})
    assert "sim-2 starts" in errors  # no terminal: a line for each decision
    assert "\x1b" not in output + errors
    assert f"report: {Path('out/report.html')}" in output
    assert (site.out / "report.html").stat().st_size > 1000
    assert (site.out / "sim-3" / "log").read_text() == "Time = 1\n"
    assert (site.case / "input").read_text() == "as delivered\n"


def test_no_more_run_at_once_than_files_may_be_open(site):  # noqa: F811
    many = "os.sched_getaffinity = lambda _: {*range(40)}"  # cores, one for each simulation
    program = f"import os; {many}; from dovetail.cli.main import main; raise SystemExit(main())"
    site.prefix = ("sh", "-c", 'ulimit -n 100; exec "$@"', "sh")
    words = (site.plan(site.shell("exec sleep 1", count=40)), "-o", "out")
    code, _, errors = site.run("run", *words, command=(sys.executable, "-c", program))
    assert (code, {*site.states().values()}) == (0, {"done"}), errors
    told = [line for line in errors.splitlines() if "files" in line]
    assert told == ["at most 12 run at once: no more files may be open here (ulimit -Hn)"]


def test_requests_change_with_the_phases_of_the_plan(site):  # noqa: F811
    steps = 'n=0; while [ $n -lt 60 ]; do n=$((n+1)); echo "Time = $n"; sleep 0.05; done'
    phases = [{"until": {"iteration": 20}, "requests": ["300m"]}, {"requests": ["700m"]}]
    code, output, _ = site.run(site.plan(site.shell(steps, phases=phases)), "-o", "out")
    assert code == 0
    shares = [one["shares"]["sim"] for one in site.log() if one.get("type") == "Resize"]
    assert [share["requests"] for share in shares] == [[700]]
    (one,) = site.summary()["simulations"]
    first, second = one["phases"]
    assert (first["requests"], second["requests"]) == ([300], [700])
    assert 20 <= first["iterations"] < 60
    assert first["iterations"] + second["iterations"] == 60
    assert first["end_s"] == second["start_s"]
    assert "Phases of the plan" in output
    assert "Phases of the plan" in (site.out / "report.html").read_text()


def test_json_is_all_that_json_prints(site):  # noqa: F811
    code, output, _ = site.run(site.plan(site.shell("echo noise")), "-o", "out", "--json")
    assert code == 0
    assert json.loads(output) == site.summary()


ENDINGS = {
    "a command that fails": (("echo 'Error: no mesh'; exit 3",), "exit code 3: Error: no mesh"),
    "a command that crashes": (("kill -SEGV $$",), "killed by signal 11"),
    "a prepare step that fails": (("true", "exit 4"), "failed with exit code 4"),
    "a prepare step that crashes": (("true", "kill -9 $$"), "failed with exit code 137"),
}


UNNEEDED = """
import sys
from dovetail.cli import main
from dovetail.run import run
ready = run.load_report
def load(quiet):
    ready(quiet)
    open("ready", "w").close()
run.load_report = load
code = main.main(["run", "--json", sys.argv[1], "-o", sys.argv[2]])
sys.exit(code or "rich" in sys.modules)
"""


def test_what_only_a_terminal_needs_is_not_loaded_for_json(site):  # noqa: F811
    wait = "until [ -e ../../../ready ]; do sleep 0.02; done"
    plan = site.plan(site.shell(wait))
    assert site.run(plan, "out", command=(sys.executable, "-c", UNNEEDED))[0] == 0


def test_simulations_that_fail_leave_the_others_alone(site):  # noqa: F811
    entries = [
        site.shell(*scripts, name=f"bad{number}")
        for number, (scripts, _) in enumerate(ENDINGS.values())
    ]
    entries.insert(2, site.shell("true", name="good"))
    code, _, _ = site.run(site.plan(*entries), "-o", "out")
    assert code == 1
    assert site.states().pop("good") == "done"
    reasons = {one["name"]: one["reason"] for one in site.summary()["simulations"]}
    for number, (what, (_, reason)) in enumerate(ENDINGS.items()):
        assert reason in reasons[f"bad{number}"], what


def test_the_last_words_of_a_program_are_no_orders_to_the_terminal(site):  # noqa: F811
    plan = site.plan(site.shell(r"printf '\033[31mFatal error\n'; exit 1"))
    code, output, errors = site.run(plan, "-o", "out")
    assert code == 1
    assert "exit code 1: \ufffd[31mFatal error" in errors
    assert "\x1b" not in output + errors


def test_a_flood_of_output_is_bounded_and_said(site):  # noqa: F811
    entry = site.shell("echo first; yes | head -c 80000000; echo last")
    code, _, errors = site.run(site.plan(entry), "-o", "out")
    assert (code, site.states()) == (0, {"sim": "done"})
    assert "sim: log too long" in errors
    assert (site.out / "sim" / "log").stat().st_size < (64 << 20) + 100


def test_simulations_without_iterations_run_on_as_many_cores_as_there_are(site):  # noqa: F811
    both = "touch ../../$$.here; until [ $(ls ../../*.here | wc -l) -ge 2 ]; do sleep 0.05; done"
    code, _, _ = site.run(site.plan(site.shell(both, count=3)), "-o", "out")
    assert (code, set(site.states().values())) == (0, {"done"})
    assert site.summary()["n_max"] == 2
    assert {one["measure"] for one in site.summary()["simulations"]} == {"work"}
    order = [r["type"] for r in site.log() if r["type"] in ("Launch", "Finished")]
    assert order[:2] == ["Launch", "Launch"]


def test_prepare_lines_find_dovetail_without_an_activated_environment(site):  # noqa: F811
    if not Path(sys.executable).with_name("dovetail").exists():
        pytest.skip("dovetail is not installed in this Python environment")
    path = {"PATH": f"{site.bin}:/usr/bin:/bin"}
    entry = {"prepare": ["dovetail requests --weights 1,3 --cpus 2"], "environment": path}
    assert site.run(site.plan(entry), "-o", "out")[0] == 0
    assert "1500m" in (site.out / "sim" / "log").read_text()


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_dry_run_starts_and_writes_nothing(site, form):  # noqa: F811
    plan = site.plan(site.shell("touch started", "touch started", count=2))
    before = sorted(site.directory.rglob("*"))
    code, output, _ = site.run(plan, "-o", "out", "--dry-run", *(["--json"] * (form == "json")))
    assert code == 0
    after = sorted(path for path in site.directory.rglob("*") if path.name != "stderr")
    assert (after, site.sessions) == (before, set())
    if form == "json":
        found = json.loads(output)["simulations"]
        assert [one["name"] for one in found] == ["sim-1", "sim-2"]
        assert [len(one["requests"]) for one in found] == [1, 1]


def test_a_dry_run_tells_no_seconds_as_it_knows_none(site):  # noqa: F811
    entry = {"application": "lammps", "command": "lmp -in f", "count": 4}
    plan = site.plan({**entry, "ranks": "1-2"}, {**entry, "name": "wide", "ranks": 2}, cpus=2)
    code, output, _ = site.run(plan, "-o", "out", "--dry-run")
    assert (code, "dual approximation" in output) == (0, True)
    assert not re.search(r"\d s\b", output)


def test_a_dry_run_tells_more_ranks_than_cores(site):  # noqa: F811
    entry = {"application": "lammps", "command": "lmp -in f"}
    wide = {"name": "wide", "ranks": 4}, {"name": "open", "ranks": "3-6"}
    plan = site.plan({**entry, "ranks": "1-2"}, *({**entry, **one} for one in wide), cpus=2)
    code, output, _ = site.run(plan, "-o", "out", "--dry-run", "--json")
    assert code == 0
    chosen = json.loads(output)["choice"]["widths"]
    assert (chosen["wide"], chosen["open"]) == ({"4": 1}, {"3": 1})


def test_a_dry_run_shows_commands_as_they_are(site):  # noqa: F811
    words = ["sh", "-c", "true", "[/x]", "data[ab]", ":100:", "\x1b[2J"]
    code, output, _ = site.run(site.plan({"command": words}), "-o", "out", "--dry-run")
    assert code == 0
    assert all(word in output for word in words[:-1]), output
    assert "\x1b" not in output


REFUSED = {
    "a plan that is not there": ((), {}, ["none.yaml"], "none.yaml"),
    "an unknown key": (({"colour": 1},), {}, [], "plan.yaml:1: simulations[0].colour: unknown"),
    "a reserved name": (({"name": "owner"},), {}, [], "simulations[0].name: 'owner' is taken"),
    "the name of what is in the run's directory": (
        ({"name": "kubernetes"},),
        {},
        [],
        "simulations[0].name: 'kubernetes' is taken",
    ),
    "a part of a CPU": (({},), {"cpus": "1500m"}, [], "cpus: 1500m is not possible here"),
    "more CPUs than there are": (({},), {"cpus": 4096}, [], "cpus: 4096000m is not possible"),
    "more memory than there is": (({"memory": "900T"},), {}, [], "sim asks for"),
    "a directory below a file": (({},), {}, ["-o", "plan.yaml/out"], "plan.yaml/out: cannot be"),
    "a directory that is a file": (({},), {}, ["-o", "plan.yaml"], "plan.yaml: cannot be used"),
    "checkpoints of a script that has no name": (
        ({"application": "lammps", "checkpoint": "allowed"},),
        {},
        [],
        "sim: `checkpoint: allowed` cannot be: its command has no `-in SCRIPT`",
    ),
    "checkpoints of partitions": (
        ({"command": "lmp -in in.tad -partition 2", "ranks": 2, "checkpoint": "allowed"},),
        {},
        [],
        "sim: `checkpoint: allowed` cannot be: its partitions would all write the same restart",
    ),
    "checkpoints of collated files": (
        ({"command": "simpleFoam -fileHandler collated", "ranks": 2, "checkpoint": "allowed"},),
        {},
        [],
        "sim: `checkpoint: allowed` cannot be: its command has files collated; use uncollated ones",
    ),
    "a directory in a case": (({},), {}, ["-o", "case/out"], "case/out: lies in the case"),
    "a directory where a simulation would be written into its case": (
        ({"name": "case"},),
        {},
        ["-o", "."],
        ".: simulation case would be written into the case ",
    ),
    "another's case inside a simulation's folder": (
        ({"name": "case"}, {"case": "case/mesh"}),
        {},
        ["-o", "."],
        ".: simulation case would be written into the case ",
    ),
    "a simulation's folder that is a link into a case": (
        ({"name": "link"},),
        {},
        ["-o", "links"],
        "links: simulation link would be written into the case ",
    ),
    "a directory that OpenFOAM cannot read": (
        ({"command": "simpleFoam"},),
        {},
        ["-o", "my out"],
        "my out: OpenFOAM reads no case in a folder with ' ' in its name",
    ),
    "a directory whose name is no text": (
        ({},),
        {},
        ["-o", "b\udcff"],
        "b\\udcff': this path is no",
    ),
    "nothing to resume": (({},), {}, ["--resume"], "holds no run to resume"),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_one_line_before_anything_starts(site, case):  # noqa: F811
    entries, limits, words, message = case
    plan = site.plan(*entries, **limits)
    (site.case / "mesh").mkdir()
    (site.directory / "links").mkdir()
    (site.directory / "links" / "link").symlink_to(site.case / "mesh")
    before = sorted(site.directory.rglob("*"))
    code, output, errors = site.run(*(words if words[:1] == ["none.yaml"] else [plan, *words]))
    assert (code, output) == (2, "")
    assert message in errors
    assert errors.startswith("dovetail: ")
    assert errors.count("\n") == 1
    after = sorted(path for path in site.directory.rglob("*") if path.name != "stderr")
    assert (after, site.sessions) == (before, set())


@needs_nobody
def test_a_directory_that_may_not_be_written_is_refused(site):  # noqa: F811
    site.prefix = NOBODY
    (site.directory / "theirs").mkdir()
    (site.directory / "closed").mkdir(mode=0o700)
    (site.directory / "closed" / "in it").mkdir()
    for where in ("out", "theirs", "closed/out", "closed/in it"):
        code, _, errors = site.run(site.plan({}), "-o", where)
        assert (code, errors) == (2, f"dovetail: {where}: cannot be used: Permission denied\n")


@pytest.mark.parametrize(
    "words",
    ["run plan.yaml", "bench choice", "bench demo", "report out", "profile -- true"],
)
def test_an_output_that_names_nothing_is_not_the_directory_where_one_is(site, words):  # noqa: F811
    """As of an unset variable of the shell."""
    site.plan(site.shell("true"))
    (site.directory / "stderr").touch()
    before = sorted(os.listdir(site.directory))
    name, *more = words.split()
    told = "dovetail: -o '': names nothing; a path would be right, or . for this directory\n"
    assert site.run(name, "-o", "", *more, command=COMMAND[:-1]) == (2, "", told)
    assert sorted(os.listdir(site.directory)) == before


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["report", ""], COMMAND[:-1]),
        (["status", ""], COMMAND[:-1]),
        (["top", ""], COMMAND[:-1]),
        (["advise", ""], COMMAND[:-1]),
        (["decompose", "--ranks", "2", ""], COMMAND[:-1]),
        (["requests", "--cpus", "2", "--case", ""], COMMAND[:-1]),
        (["requests", "--cpus", "2", "--profile", ""], COMMAND[:-1]),
        ([""], COMMAND),
    ],
    ids=lambda one: one[0] if one is not COMMAND else "",
)
def test_an_input_that_names_nothing_is_not_the_directory_where_one_is(site, words, command):  # noqa: F811
    told = "dovetail: '' names nothing; a path would be right, or . for this directory\n"
    assert site.run(*words, command=command) == (2, "", told)


def test_a_directory_whose_links_lead_to_each_other_is_refused(site):  # noqa: F811
    (site.directory / "out").symlink_to("out")
    code, _, errors = site.run(site.plan({}), "-o", "out")
    assert (code, len(errors.splitlines())) == (2, 1)
    assert errors.startswith("dovetail: out: cannot be used: ")


def test_damaged_alternatives_are_refused_before_anything_runs(site):  # noqa: F811
    site.out.mkdir()
    (site.out / "alternatives.json").write_text("{")
    code, _, errors = site.run(site.plan({}), "-o", "out")
    assert (code, len(errors.splitlines())) == (2, 1)
    assert errors.startswith("dovetail: out/alternatives.json: file: Invalid JSON")
    assert [one.name for one in site.out.iterdir()] == ["alternatives.json"]


@pytest.mark.parametrize("what", ["case/input", "log"])
def test_what_is_of_no_run_is_not_replaced(site, what):  # noqa: F811
    theirs = site.directory / "sim" / what
    theirs.parent.mkdir(parents=True)
    theirs.write_text("the only copy")
    code, _, errors = site.run(site.plan({}), "-o", ".")
    there = what.partition("/")[0]
    assert code == 2
    assert errors.startswith(f"dovetail: .: has sim/{there} of no run, which simulation sim would")
    assert theirs.read_text() == "the only copy"


def test_a_directory_is_used_once(site):  # noqa: F811
    plan = site.plan({"environment": site.shell("")["environment"]})
    assert site.run(plan, "-o", "out")[0] == 0
    log = (site.out / "events.jsonl").read_bytes()
    code, _, errors = site.run(plan, "-o", "out")
    assert code == 2
    assert "holds a run already; go on with --resume" in errors
    assert (site.out / "events.jsonl").read_bytes() == log


def test_a_log_that_is_empty_is_of_no_run(site):  # noqa: F811
    """A machine that went down as a run began may leave it so."""
    plan = site.plan({"environment": site.shell("")["environment"]})
    site.out.mkdir()
    (site.out / "events.jsonl").touch()
    assert site.run(plan, "-o", "out")[0] == 0
    assert site.states() == {"sim": "done"}


def test_a_run_that_is_over_can_be_resumed_and_does_nothing(site):  # noqa: F811
    plan = site.plan(site.shell("exit 1", name="bad"), site.shell("echo once", name="good"))
    assert site.run(plan, "-o", "out")[0] == 1
    assert site.run(plan, "-o", "out", "--resume")[0] == 1
    assert site.states() == {"bad": "failed", "good": "done"}
    assert len(site.of_type("Launch")) == 2


@pytest.mark.parametrize("code", [0, 1])
def test_what_had_ended_as_the_run_was_killed_has_ended(site, code):  # noqa: F811
    """It was killed between the end of a simulation and what the controller made of it."""
    plan = site.plan(site.shell(f"exit {code}"))
    assert site.run(plan, "-o", "out")[0] == code
    log, states = site.out / "events.jsonl", site.states()
    text = log.read_text()
    log.write_text(text[: text.index("\n", text.index('"Finished"')) + 1])
    assert site.run(plan, "-o", "out", "--resume")[0] == code
    assert site.states() == states
    assert len(site.of_type("Launch")) == len(site.of_type("Ended")) == 1
    assert replay(log) is None


LOGS = {
    "of a foreign version": (lambda text: text.replace('"schema":2', '"schema":7', 1), "schema 7"),
    "that is damaged": (lambda text: text.replace('"seq":2,', '"seq":9,', 1), "line 3: damaged"),
    "that is empty": (lambda text: "", "holds no run to resume; events.jsonl is empty"),
}


@pytest.mark.parametrize("damage", LOGS.values(), ids=LOGS.keys())
def test_a_log_is_refused_and_left_as_it_is(site, damage):  # noqa: F811
    change, reason = damage
    plan = site.plan(site.shell("true"))
    assert site.run(plan, "-o", "out")[0] == 0
    log = site.out / "events.jsonl"
    log.write_text(change(log.read_text()))
    before = log.read_bytes()
    code, _, errors = site.run(plan, "-o", "out", "--resume")
    assert code == 2
    assert reason in errors
    assert errors.count("\n") == 1
    assert log.read_bytes() == before


@pytest.mark.parametrize(
    ("kept", "cluster", "option"),
    [
        ('{"run": "r", "kubeconfig": "/of my/own"}', "the cluster of /of my/own", "'/of my/own'"),
        ('{"run": "r"}', "a cluster", "FILE"),  # of an earlier version
        ("", "a cluster", "FILE"),
    ],
)
def test_a_run_whose_pods_may_go_on_is_not_resumed_as_processes(site, kept, cluster, option):  # noqa: F811
    """Its controller was killed; a simulation would write where a pod of it does."""
    plan = site.plan({})
    assert site.run(plan, "-o", "out")[0] == 0
    before = site.log()
    own = site.out / "kubernetes"
    own.mkdir()
    (own / "run.json").write_text(kept)
    code, _, errors = site.run(plan, "-o", "out", "--resume")
    assert code == 2
    assert errors == (
        f"dovetail: out: the run is on {cluster}, where its pods may go on; resume it with "
        f"--kubeconfig {option}, or, if that cluster is gone, remove out/kubernetes first\n"
    )
    assert site.log() == before
    shutil.rmtree(own)
    assert site.run(plan, "-o", "out", "--resume")[0] == 0


def test_another_plan_is_not_resumed(site):  # noqa: F811
    assert site.run(site.plan(site.shell("true")), "-o", "out")[0] == 0
    others = (
        site.plan(site.shell("true; true")),
        site.plan(site.shell("true"), max_packed=1),
        site.plan(site.shell("true", count=2)),
    )
    for plan in others:
        code, _, errors = site.run(plan, "-o", "out", "--resume")
        assert (code, errors.count("\n")) == (2, 1)
        assert "started with another plan" in errors


def test_a_case_that_says_another_length_is_the_same_plan(site):  # noqa: F811
    words = ["sh", "-c", "true", "-in", "in.melt"]
    entry = {**site.shell(""), "command": words, "ranks": [1, 2], "application": "lammps"}
    (site.case / "in.melt").write_text("run 30\n")
    code, _, errors = site.run(site.plan(entry), "-o", "out")
    assert code == 0, errors
    assert "lammps, on 1 or 2 ranks" in errors
    head = json.loads((site.out / "events.jsonl").read_text().split("\n")[0])
    assert head["specs"][0]["iterations"] == 30
    (site.case / "in.melt").write_text("run 50\n")
    code, _, errors = site.run(site.plan(entry), "-o", "out", "--resume")
    assert code == 0, errors
    code, _, errors = site.run(site.plan({**entry, "iterations": 50}), "-o", "out", "--resume")
    assert "started with another plan" in errors


def test_two_runs_in_one_directory_are_refused(site):  # noqa: F811
    plan = site.plan(site.shell("trap 'exit 0' TERM; while [ ! -e ../../go ]; do sleep 0.05; done"))
    first = site.start(plan, "-o", "out")
    site.until(lambda log: any(r["type"] == "Started" for r in log))
    for words in ([], ["--resume"]):
        code, _, errors = site.run(plan, "-o", "out", *words)
        assert code == 2
        assert "another run is using it" in errors or "holds a run already" in errors
    (site.out.parent / "out" / "go").touch()
    assert site.end(first)[0] == 0
    assert site.states() == {"sim": "done"}


@pytest.mark.parametrize("number", [errno.EBADF, errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_used_all_the_same(tmp_path, monkeypatch, number):
    def flock(file, how):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(run.fcntl, "flock", flock)
    with run.held(tmp_path / "out"):
        assert (tmp_path / "out").is_dir()


def test_two_runs_in_two_directories_leave_each_other_alone(site):  # noqa: F811
    plan = site.plan(site.shell("while [ ! -e ../../go ]; do sleep 0.05; done"))
    runs = [site.start(plan, "-o", out) for out in ("out1", "out2")]
    assert len(site.sessions) == 2
    first, second = (site.directory / out for out in ("out1", "out2"))
    (first / "go").touch()
    assert site.end(runs[0])[0] == 0
    assert runs[1].poll() is None
    (second / "go").touch()
    assert site.end(runs[1])[0] == 0
    assert site.states(first) == site.states(second) == {"sim": "done"}


def test_a_reader_that_leaves_does_not_end_the_run(site):  # noqa: F811
    plan = site.plan(site.shell("true", count=3))
    words = shlex.join((*COMMAND, str(plan), "-o", "out"))
    line = f"{words} 2>&1 >/dev/null | true; exit ${{PIPESTATUS[0]}}"
    code, _, _ = site.run(line, command=("bash", "-c"))
    assert code == 0
    assert set(site.states().values()) == {"done"}


STREAMS = {
    "a full disk under the output": (">/dev/full", 1, "dovetail: [Errno 28] No space left"),
    "a full disk under the errors": ("2>/dev/full", 0, ""),
    "a closed output": (">&-", 0, "sim starts"),
    "closed errors": ("2>&-", 0, ""),
    "everything closed": ("<&- >&- 2>&-", 0, ""),
}


@pytest.mark.parametrize("stream", STREAMS.values(), ids=STREAMS.keys())
def test_standard_streams_that_fail_do_not_end_the_run(site, stream):  # noqa: F811
    where, expected, message = stream
    words = shlex.join((*COMMAND, str(site.plan(site.shell("true"))), "-o", "out", "--json"))
    code, output, errors = site.run(f"{words} {where}", command=("sh", "-c"))
    assert (code, site.states()) == (expected, {"sim": "done"})
    assert message in errors
    assert "Traceback" not in errors
    assert not output or json.loads(output) == site.summary()


@pytest.mark.parametrize("end", ["by itself", "by Ctrl-C", "by closing the terminal"])
def test_a_terminal_shows_a_table(site, end):  # noqa: F811
    """On a terminal of its own, which sends the signals as a user's does."""
    plan = site.plan(site.shell("touch ../../up; while [ ! -e ../../go ]; do sleep 0.05; done"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(site.directory)
        environment = site.environment()
        os.execve(COMMAND[0], [*COMMAND, str(plan), "-o", "out"], environment)
    try:
        wait_for(lambda: site.note_session(pid))
        seen = Terminal(terminal)
        seen.until(lambda text: "starting" in text and "sim starts, nothing else" in text)
        if end == "by closing the terminal":
            os.close(terminal)
        elif end == "by Ctrl-C":
            os.write(terminal, b"\x03")
        else:
            (site.out / "go").touch()
        if end != "by closing the terminal":
            seen.until(lambda text: "report: out/report.html" in text)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if end != "by closing the terminal":
        os.close(terminal)
    assert code == {"by itself": 0, "by Ctrl-C": 130}.get(end, 1), "1: its table has no reader"
    assert site.states() == {"sim": "done" if end == "by itself" else "failed"}
    if end == "by closing the terminal":
        assert site.summary()["interrupted"] == "interrupted by SIGHUP"


def test_while_it_is_suspended_the_terminal_is_as_it_was(site):  # noqa: F811
    plan = site.plan(site.shell("while [ ! -e ../../go ]; do sleep 0.05; done"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(site.directory)
        os.execve(COMMAND[0], [*COMMAND, str(plan), "-o", "out"], site.environment())
    seen = Terminal(terminal)
    try:
        wait_for(lambda: site.note_session(pid))
        seen.until(lambda text: "running" in text or "starting" in text)
        os.kill(pid, signal.SIGTSTP)  # it goes on at once, as no shell waits for it
        seen.until(lambda text: len(re.findall(r"\x1b\[\?25[hl]", text)) == 3)
        (site.out / "go").touch()
        seen.until(lambda text: "report: out/report.html" in text)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    os.close(terminal)
    assert re.findall(r"\x1b\[\?25([hl])", seen.text) == ["l", "h", "l", "h"]


def test_in_the_background_of_a_terminal_it_has_lines(site):  # noqa: F811
    plan = site.plan(site.shell("true"))
    words = shlex.join((*COMMAND, str(plan), "-o", "out"))
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(site.directory)
        os.execvpe("bash", ["bash", "-mc", f"{words} & wait"], site.environment())
    seen = Terminal(terminal)
    try:
        seen.until(lambda text: "report: out/report.html" in text)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    os.waitpid(pid, 0)
    os.close(terminal)
    assert "sim starts, nothing else runs" in seen.text
    assert "\x1b[?25l" not in seen.text, "the cursor is the shell's"


def test_a_terminal_that_cannot_draw_has_lines(site):  # noqa: F811
    ours, theirs = pty.openpty()
    words = [*COMMAND, str(site.plan(site.shell("true"))), "-o", "out"]
    environment = {**site.environment(), "TERM": "dumb"}
    subprocess.run(
        words, env=environment, cwd=site.directory, check=True, timeout=LIMIT,
        stdout=subprocess.DEVNULL, stderr=theirs,
    )  # fmt: skip
    assert b"sim starts, nothing else runs" in os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)


class Terminal:
    """What a user sees; read on, since a terminal that is not read stops its writers."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.text = ""

    def until(self, condition):
        """Read until the condition holds for the text so far."""
        start = time.monotonic()
        while not condition(self.text):
            assert select.select([self.number], [], [], LIMIT)[0], self.text
            assert time.monotonic() - start < LIMIT, self.text
            try:
                self.text += os.read(self.number, 65536).decode(errors="replace")
            except OSError as error:
                raise AssertionError(self.text) from error


def test_an_ignored_interrupt_stays_ignored(site):  # noqa: F811
    plan = site.plan(site.shell("while [ ! -e ../../go ]; do sleep 0.05; done"))
    words = ("sh", "-c", 'trap "" INT; exec "$@"', "sh", *COMMAND)
    run = site.start(plan, "-o", "out", command=words)
    site.until(lambda log: any(r["type"] == "Started" for r in log))
    os.kill(run.pid, signal.SIGINT)
    (site.out / "go").touch()
    assert site.end(run)[0] == 0


def test_one_simulation_can_be_stopped_from_outside_and_the_others_go_on(site):  # noqa: F811
    plan = site.plan(
        site.shell("sleep 1000", name="long"), site.shell("true", name="short"), max_packed=1
    )
    words = [*COMMAND, "--orders", "-o", str(site.out), str(plan)]
    with subprocess.Popen(
        words, cwd=site.directory, env=site.environment(), stdin=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert any("long starts" in line for line in process.stderr)
        process.stdin.write("stop nobody\nnonsense\nstop long\n")
        process.stdin.flush()
        process.communicate(timeout=LIMIT)
    assert process.returncode == 1
    assert site.states() == {"long": "failed", "short": "done"}
    assert site.summary()["simulations"][0]["reason"] == "cancelled"
