# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail profile` finds known answers, and survives what programs do."""

from __future__ import annotations

import dataclasses
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
from dovetail.cli.main import main
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import processes
from dovetail.mpi import detect, profile, profiled_run
from support import known_programs

mpi_tier = pytest.mark.mpi
unit_tier = pytest.mark.unit
each_mpi = pytest.mark.parametrize("mpi", known_programs.MPIS)


# --- The arithmetic and the file ---


@unit_tier
@pytest.mark.parametrize(
    ("case", "useful", "elapsed", "answer"),
    [
        ("balanced and always useful", [2, 2], [2, 2], (1, 1, 1)),
        ("one of two works a quarter", [1, 4], [4, 4], (0.625, 0.625, 1)),
        ("balanced, half of it communication", [2, 2], [4, 4], (0.5, 1, 0.5)),
        ("both losses", [1, 2, 3, 4], [8, 8, 8, 8], (0.3125, 0.625, 0.5)),
        ("ranks that end apart", [1, 1], [1, 2], (0.5, 1, 0.5)),
        ("no time at all", [0, 0], [0, 0], (0, 0, 0)),
        ("no ranks", [], [], (0, 0, 0)),
    ],
)
def test_pop_efficiencies(case, useful, elapsed, answer):
    pop = profile.together([(useful, elapsed)])
    assert (pop.parallel, pop.load_balance, pop.communication) == pytest.approx(answer)


def some_profile() -> profile.Profile:
    rank = profile.RankProfile(
        rank=0,
        world=0,
        pid=4,
        host="node1",
        ended="finalized",
        iterations=11,
        iteration_source="pcontrol",
        elapsed_s=4.0,
        useful_s=1.0,
        mpi_s=3.0,
        cpu_s=3.5,
        cpu_per_iteration=0.25,
        useful_per_iteration=0.1,
        seconds_per_iteration=None,
        peak_rss=1000,
        calls={"MPI_Send": (3, 0.5)},
    )
    other = dataclasses.replace(rank, rank=1, host="node2", useful_s=4.0, mpi_s=0.0, calls={})
    return profile.Profile(("mpirun", "x"), "openmpi", "off", 0, (rank, other), "2020-01-01")


@unit_tier
def test_a_saved_profile_loads_as_it_was(tmp_path):
    one = some_profile()
    profile.save(one, tmp_path / "p.json")
    assert profile.load(tmp_path / "p.json") == one
    assert os.listdir(tmp_path) == ["p.json"]


@unit_tier
def test_worlds_that_were_spawned_have_efficiencies_of_their_own():
    """Four that computed for as long as they were there, a hundredth of the others' time."""
    one = some_profile()
    spawned = [
        dataclasses.replace(one.ranks[0], rank=n, world=7, elapsed_s=0.04, useful_s=0.04, mpi_s=0.0)
        for n in range(4)
    ]
    pop = dataclasses.replace(one, ranks=(*one.ranks, *spawned)).efficiency
    assert pop.parallel == pytest.approx((5.0 + 0.16) / (8.0 + 0.16))
    assert pop.elapsed_s == 4.0


@unit_tier
def test_the_file_has_the_shape_of_talp():
    data = profile.to_json(some_profile())
    application = data["Application"]["Global"]
    assert application["numMpiRanks"] == application["numNodes"] == 2
    assert application["elapsedTime"] == 4 * 10**9
    assert application["usefulTime"] == 5 * 10**9
    assert application["mpiTime"] == 3 * 10**9
    assert application["numMpiCalls"] == 3
    assert application["parallelEfficiency"] == 0.625
    assert application["mpiLoadBalance"] == 0.625
    assert application["mpiCommunicationEfficiency"] == 1
    assert application["mpiLoadBalanceIn"] == 1
    assert application["mpiLoadBalanceOut"] == 0.625
    first, second = data["Process"]["Global"]
    assert (first["rank"], first["nodeId"], first["hostname"]) == (0, 0, "node1")
    assert (second["usefulTime"], second["mpiTime"]) == (4 * 10**9, 0)


@unit_tier
@pytest.mark.parametrize("words", [["requests", "--cpus", "4", "--profile"], ["advise"]])
def test_what_tells_of_a_part_of_the_ranks_is_not_taken_for_all(tmp_path, capsys, words):
    """As where the others were on another machine."""
    part = dataclasses.replace(some_profile(), unseen=2)
    profile.save(part, tmp_path / "p.json")
    assert profile.load(tmp_path / "p.json") == part
    assert main([*words, str(tmp_path / "p.json")]) == 2
    assert "p.json: 2 of 4 ranks were not seen" in capsys.readouterr().err
    older = profile.to_json(some_profile())
    del older["dovetail"]["unseen"]
    (tmp_path / "p.json").write_text(json.dumps(older))
    assert main([*words, str(tmp_path / "p.json")]) == 0


@unit_tier
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_what_was_measured_is_shown_where_its_file_cannot_be_written(
    monkeypatch, tmp_path, capsys, options
):
    """As where the disk has become full meanwhile."""
    ended = profiled_run.ProfiledRun(some_profile(), "", interrupted=False)
    monkeypatch.setattr(profiled_run, "run", lambda *_, **__: ended)
    out = tmp_path / ("p" * 250)  # a longer name than the file that is written first can have
    assert main(["profile", *options, "-o", str(out), "--mpi", "openmpi", "--", "x"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out) if options else "Efficiency" in printed.err
    assert printed.err.endswith(f"dovetail: {out}: File name too long\n")


@unit_tier
def test_the_calls_of_all_threads_are_shares_of_their_own_sum(monkeypatch, capsys):
    """Threads may be in MPI at once, and the main thread never; sessions begin before all."""
    calls = {"MPI_Session_init": (1, 5.0), "MPI_Send": (3, 6.0), "MPI_Recv": (3, 2.0)}
    rank = dataclasses.replace(some_profile().ranks[0], useful_s=4.0, mpi_s=0.0, calls=calls)
    one = dataclasses.replace(some_profile(), ranks=(rank,))
    ended = profiled_run.ProfiledRun(one, "", interrupted=False)
    monkeypatch.setattr(profiled_run, "run", lambda *_, **__: ended)
    assert main(["profile", "--mpi", "openmpi", "--", "x"]) == 0
    printed = capsys.readouterr().err
    assert re.findall(r"(MPI_\w+) +\d+ +([\d.]+) +([\d.]+)", printed) == [
        ("MPI_Send", "6.000", "75.0"),
        ("MPI_Recv", "2.000", "25.0"),
    ]


@unit_tier
def test_a_rank_that_waited_is_called_as_in_the_table(monkeypatch, capsys):
    """Ranks of a spawned world begin at 0 again."""
    first = dataclasses.replace(some_profile().ranks[0], queued_s=0.0)
    spawned = dataclasses.replace(first, world=1, queued_s=2.0)
    one = dataclasses.replace(some_profile(), ranks=(first, spawned))
    ended = profiled_run.ProfiledRun(one, "", interrupted=False)
    monkeypatch.setattr(profiled_run, "run", lambda *_, **__: ended)
    assert main(["profile", "--mpi", "openmpi", "--", "x"]) == 0
    printed = capsys.readouterr().err
    assert re.search(r"^ *1:0 ", printed, re.M)
    assert "Rank 1:0 waited for a core for 50 % of its time" in printed


def broken(**more: object) -> str:
    data = profile.to_json(some_profile())
    for path, value in more.items():
        target = data["dovetail"]
        *way, last = path.split("__")
        for step in way:
            target = target[int(step[1:]) if step[0] == "i" and step[1:].isdigit() else step]
        target[last] = value
    return json.dumps(data)


BROKEN = {
    "no JSON": ("{", "is not JSON"),
    "nested too deep": ("[" * 100000, "is not JSON"),
    "of another program": ('{"Application": {}}', "no key `dovetail`"),
    "a list": ("[]", "no key `dovetail`"),
    "of a later version": (broken(schema=2), "schema 2, 1 would be right"),
    "without ranks": (broken(ranks=[]), "has no ranks"),
    "ranks that are no list": (broken(ranks=3), "`ranks` is not a list"),
    "a rank that is no object": (broken(ranks=[3]), "rank 0 is not an object"),
    "negative time": (broken(ranks__i1__cpu_s=-1), "rank 1: `cpu_s` is -1"),
    "time that is no number": (broken(ranks__i0__mpi_s=float("nan")), "rank 0: `mpi_s` is nan"),
    "a number too large": (broken(ranks__i0__pid=10**400), "rank 0: `pid` is 1000"),
    "half an iteration": (broken(ranks__i0__iterations=0.5), "`iterations` is 0.5"),
    "true as a number": (broken(ranks__i0__rank=True), "`rank` is True"),
    "a call without a count": (broken(ranks__i0__calls={"MPI_Send": [1]}), "`MPI_Send`"),
}


@unit_tier
@pytest.mark.parametrize("case", BROKEN)
def test_a_damaged_profile_is_refused_with_a_reason(case, tmp_path):
    text, reason = BROKEN[case]
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(BadInput, match=re.escape(reason)) as error:
        profile.load(path)
    assert str(error.value).startswith(str(path))


@unit_tier
@pytest.mark.parametrize("options", [[], ["--mpi", "openmpi"]])
def test_without_a_command_it_is_said(options, capsys):
    assert main(["profile", *options, "--"]) == 2
    assert capsys.readouterr().err.startswith("dovetail: no command: ")


# --- Known answers ---


def ranks_of(path: Path) -> list[dict[str, object]]:
    return known_programs.saved(path)["ranks"]  # type: ignore[return-value]


def undisturbed(seconds, what, mpi, out, words):
    """Profile a program, again if the machine was busy: its pauses are the ranks' too."""
    for _ in range(5):
        done = known_programs.dovetail(
            "-o", str(out), "--", known_programs.LAUNCHERS[mpi], "-np", "2", *words
        )
        assert done.returncode == 0, done.stderr
        if [getattr(r, what) for r in profile.load(out).ranks] == pytest.approx(seconds, rel=0.1):
            break
    return done


@pytest.mark.unit
def test_that_shared_memory_is_full_is_said_with_its_place(monkeypatch, capsys):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(profiled_run.Control, "create", full)
    monkeypatch.setattr(profiled_run.install_paths, "library", lambda mpi: Path("none"))
    assert main(["profile", "--mpi", "openmpi", "--", "true"]) == 2
    said = capsys.readouterr().err
    assert re.fullmatch(r"dovetail: /dev/shm/dovetail-\S+/profile: No space left on device\n", said)


@pytest.mark.alone
@mpi_tier
@each_mpi
def test_known_imbalance_is_found(mpi, tmp_path):
    """Useful 1 to 4: load balance 0.625. Ranks that sleep keep their times on a busy machine."""
    known_programs.library(mpi)
    words = [known_programs.build(mpi, "known/busy.c"), "sleep", "20", "20", "80"]
    out = tmp_path / "p.json"
    done = undisturbed((0.020, 0.080), "useful_per_iteration", mpi, out, words)
    one = profile.load(out)
    assert [rank.iterations for rank in one.ranks] == [20, 20]
    assert {rank.iteration_source for rank in one.ranks} == {"pcontrol"}
    for rank, sleep in enumerate((0.020, 0.080)):
        assert one.ranks[rank].useful_s >= 20 * sleep
        assert one.ranks[rank].useful_per_iteration == pytest.approx(sleep, rel=0.25)
        assert one.ranks[rank].calls["MPI_Barrier"][0] == 20
    assert one.efficiency.load_balance == pytest.approx(0.625, abs=0.06)
    assert one.efficiency.parallel == pytest.approx(0.625, abs=0.08)
    assert one.ranks[0].duty == pytest.approx(0.25, abs=0.08)
    assert "load balance 0.6" in done.stderr


@pytest.mark.alone
@mpi_tier
@each_mpi
def test_known_cpu_time_is_found(mpi, tmp_path):
    """The heavy rank burns 50 ms of CPU time per iteration and hardly waits."""
    words = [known_programs.build(mpi, "known/busy.c"), "burn", "12", "10", "50"]
    out = tmp_path / "p.json"
    undisturbed((0.010, 0.050), "cpu_per_iteration", mpi, out, words)
    light, heavy = profile.load(out).ranks
    assert heavy.cpu_per_iteration == pytest.approx(0.050, rel=0.25)
    assert light.cpu_per_iteration is not None
    assert light.cpu_per_iteration >= 0.0099
    assert light.iterations == heavy.iterations == 12


@mpi_tier
@each_mpi
def test_known_waits_for_a_core_are_found(mpi, tmp_path):
    """Two ranks have one core, and never sleep: what each has not of it, it waits for."""
    known_programs.library(mpi)
    out, core = tmp_path / "p.json", min(os.sched_getaffinity(0))
    words = ["taskset", "-c", str(core), known_programs.build(mpi, "known/busy.c"), "burn", "20"]
    done = known_programs.dovetail(
        "-o", str(out), "--", known_programs.LAUNCHERS[mpi], "-np", "2", *words, "20", "20"
    )
    assert done.returncode == 0, done.stderr
    for one in profile.load(out).ranks:
        assert one.involuntary > 10
        assert one.queued_s > 0.3 * one.elapsed_s
        assert one.cpu_s + one.queued_s == pytest.approx(one.elapsed_s, rel=0.2, abs=0.1)


# --- What programs do ---


@mpi_tier
@each_mpi
def test_a_failing_program_is_still_profiled(mpi, tmp_path):
    words = [known_programs.build(mpi, "known/life.c"), "abort"]
    out = tmp_path / "p.json"
    words = ["-o", str(out), "--", known_programs.LAUNCHERS[mpi], "-np", "2", *words]
    done = known_programs.dovetail(*words, COLUMNS="40")
    assert done.returncode == 1
    assert "ended with exit code 3" in done.stderr
    assert re.search(r"\d +aborted$", done.stderr, re.M), "cut off, as by so narrow a terminal"
    assert known_programs.saved(out)["exit_code"] == 3
    assert [rank["ended"] for rank in ranks_of(out)][1] == "aborted"


@mpi_tier
@each_mpi
@pytest.mark.parametrize("how", [[], ["--json"]], ids=["table", "json"])
def test_ranks_that_are_not_seen_are_told(mpi, how):
    program = [known_programs.build(mpi, "known/threads.c")]
    words = ["-np", "1", "env", "-u", "LD_PRELOAD", *program, ":", "-np", "1", *program]
    done = known_programs.dovetail(*how, "--", known_programs.LAUNCHERS[mpi], *words)
    assert done.returncode == 0, done.stderr
    assert "dovetail: 1 of 2 ranks were not seen" in done.stderr
    if how:
        assert json.loads(done.stdout)["dovetail"]["unseen"] == 1
    words = ["-np", "2", *program]
    done = known_programs.dovetail(*how, "--", known_programs.LAUNCHERS[mpi], *words)
    assert "not seen" not in done.stderr


@mpi_tier
@pytest.mark.parametrize(("then", "told"), [("&", 2), (";", 0)], ids=["at once", "in a row"])
def test_programs_that_run_at_once_are_told(then, told):
    program = known_programs.build("openmpi", "known/busy.c")
    once = f"{known_programs.LAUNCHERS['openmpi']} -np 2 {program} sleep 30 50 50"
    words = ["sh", "-c", f"{once} {then} {once}; wait"]
    done = known_programs.dovetail("--mpi", "openmpi", "--", *words)
    assert done.returncode == 0, done.stderr
    assert (f"ran at once, and {told} of their ranks" in done.stderr) == bool(told)
    assert ("at once" in done.stderr) == bool(told)


@mpi_tier
def test_where_a_program_failed_ranks_may_have_ended_too_soon_to_be_seen():
    program = known_programs.build("openmpi", "known/threads.c")
    words = ["-np", "1", "env", "-u", "LD_PRELOAD", program]
    words += [":", "-np", "1", "sh", "-c", f"{program}; exit 3"]
    done = known_programs.dovetail("--", known_programs.LAUNCHERS["openmpi"], *words)
    assert done.returncode == 1, done.stderr
    assert "1 of 2 ranks were not seen" in done.stderr
    assert "they ended before MPI_Init had, are on another machine" in done.stderr


@mpi_tier
@pytest.mark.parametrize("mode", ["off", "yield"])
def test_ranks_that_the_user_has_give_way_do_so(mode):
    """As without the library, by mpi_yield_when_idle, which is set here: no mode takes it away."""
    words = [known_programs.build("openmpi", "known/waits.c"), "turns"]
    done = known_programs.dovetail("--wait", mode, "--", "mpirun.openmpi", "-np", "2", *words)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@mpi_tier
def test_ranks_wait_as_asked_whatever_the_users_settings():
    words = [known_programs.build("openmpi", "known/waits.c"), "turns"]
    words = ["--wait", "yield", "--", "mpirun.openmpi", "-np", "2", *words]
    done = known_programs.dovetail(*words, OMPI_MCA_mpi_yield_when_idle="0")
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@mpi_tier
@each_mpi
def test_a_profile_outlives_the_handlers_of_the_users_preload(mpi, tmp_path):
    words = [known_programs.build(mpi, "known/threads.c")]
    out, preload = tmp_path / "p.json", known_programs.preload_with_handlers()
    words = ["-o", str(out), "--", known_programs.LAUNCHERS[mpi], "-np", "2", *words]
    done = known_programs.dovetail(*words, LD_PRELOAD=preload)
    assert done.returncode == 0, done.stderr
    assert len(ranks_of(out)) == 2


@mpi_tier
@each_mpi
def test_a_program_with_address_sanitizer_starts_and_is_profiled(mpi, tmp_path):
    words = [known_programs.build(mpi, "known/threads.c", "-fsanitize=address")]
    out = tmp_path / "p.json"
    # What MPI libraries themselves never free is no fault of the program's.
    words = ["-o", str(out), "--", known_programs.LAUNCHERS[mpi], "-np", "2", *words]
    done = known_programs.dovetail(*words, ASAN_OPTIONS="detect_leaks=0")
    assert done.returncode == 0, done.stderr
    assert len(ranks_of(out)) == 2


@mpi_tier
@each_mpi
def test_json_goes_to_standard_output_alone(mpi):
    words = [known_programs.build(mpi, "known/threads.c")]
    done = known_programs.dovetail(
        "--json", "--", known_programs.LAUNCHERS[mpi], "-np", "2", *words
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["dovetail"]
    assert found["mpi"] == mpi
    for rank in found["ranks"]:
        assert rank["voluntary"] + rank["involuntary"] > 0
        assert 0 <= rank["queued_s"] <= 4 * rank["elapsed_s"], "of its four threads at most"
    assert done.stderr.replace("\n", "") == "goodgood"  # the line ends of two ranks may come late


@mpi_tier
def test_a_program_of_the_other_mpi_is_refused():
    words = [known_programs.build("openmpi", "known/threads.c")]
    known_programs.library("mpich")
    done = known_programs.dovetail("--", known_programs.LAUNCHERS["mpich"], "-np", "2", *words)
    assert done.returncode == 2
    assert "is linked with openmpi" in done.stderr


@mpi_tier
@pytest.mark.parametrize(
    ("words", "code", "reason"),
    [
        ([], 2, "no command"),
        (["nosuchcommand"], 2, "nosuchcommand: no such command"),
        (["ls", "/"], 2, "not linked with Open MPI or MPICH"),
        (["mpirun.openmpi", "-np", "2", "ls", "/"], 1, "is no MPI program"),
        (["mpirun.openmpi", "-np", "2", "false"], 1, "before any rank was in MPI"),
    ],
)
def test_what_is_no_mpi_program_is_told_in_one_line(words, code, reason):
    known_programs.library("openmpi")
    done = known_programs.dovetail("--", *words)
    assert done.returncode == code
    assert reason in done.stderr.splitlines()[-1]


@unit_tier
@pytest.mark.parametrize(("mpi", "told"), [("openmpi", True), ("mpich", False)])
def test_sessions_alone_are_a_reason_where_they_are_not_seen(mpi, told):
    with pytest.raises(WorkFailed) as caught:
        profiled_run._no_pages(["it"], mpi, 0, False)
    assert ("opens sessions of MPI 4 alone" in str(caught.value)) == told


@unit_tier
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGRTMIN + 6])
def test_a_signal_without_a_name_is_told_by_its_number(number):
    code = f"import os; os.kill(os.getpid(), {int(number)})"
    with pytest.raises(WorkFailed) as caught:
        profiled_run._no_pages(
            ["it"], "openmpi", *profiled_run._execute([sys.executable, "-c", code], {}, False)
        )
    name = {signal.SIGTERM: "SIGTERM"}.get(number, str(int(number)))
    assert str(caught.value) == f"it ended with signal {name} before any rank was in MPI"


@unit_tier
def test_a_signal_that_was_ignored_stays_so():
    """As a hangup under nohup, or an interrupt in the background of a script."""
    script = (
        "import os, signal\n"
        "from dovetail.mpi.profiled_run import _execute\n"
        "words = ['sh', '-c', 'sleep 0.3; kill -HUP $PPID; kill -INT $PPID']\n"
        "print(*_execute(words, os.environ, quiet=True), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=known_programs.environment(),
        preexec_fn=lambda: [signal.signal(s, signal.SIG_IGN) for s in (1, 2)],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "0 False\n", done.stderr


@unit_tier
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_what_a_script_has_started(number):
    script = (
        "import os, signal, sys\n"
        "from dovetail.mpi import profiled_run\n"
        f"tell = 'sleep 0.3; kill -{int(number)} ' + str(os.getpid())\n"
        "words = ['bash', '-c', f'({tell}) & sleep 60; exit 3']\n"
        "profiled_run.GRACE = 50.0\n"
        "print(profiled_run._execute(words, os.environ, quiet=True)[1])\n"
    )
    words = [sys.executable, "-c", script]
    environment = known_programs.environment()
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=20)
    assert done.stdout == "True\n", done.stderr


@unit_tier
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2])
def test_a_signal_that_means_what_the_program_says_reaches_it_and_ends_nothing(number):
    tell = f"sleep 0.3; kill -{int(number)} $PPID"
    words = ["bash", "-c", f"trap 'exit 7' {number.name}; {tell}; while :; do sleep 0.05; done"]
    script = (
        "import os\nfrom dovetail.mpi.profiled_run import _execute\n"
        f"print(*_execute({words!r}, os.environ, quiet=True))"
    )
    environment = known_programs.environment()
    words = [sys.executable, "-c", script]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
    assert done.stdout == "7 False\n", done.stderr


@unit_tier
def test_the_command_has_open_what_we_were_given():
    """As the socket that PMI_FD names, in a job whose starter has started us."""
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)
    words = [sys.executable, "-c", f"import os; os.write({writing}, b'here')"]
    assert profiled_run._execute(words, os.environ, False) == (0, False)
    assert os.read(reading, 10) == b"here"
    os.close(reading)
    os.close(writing)


@unit_tier
@pytest.mark.parametrize(
    ("command", "answer"),
    [
        ("mpirun -np 2 solver", True),
        ("env A=1 /opt/mpi/bin/mpiexec.hydra -n 2 solver", True),
        ("bash run.txt", True),
        ("{folder}/script", True),
        ("sh", False),
        ("{folder}/nothing", False),
        ("cat mpirun.log/input", False),
    ],
)
def test_whether_a_starter_runs_the_ranks(command, answer, tmp_path):
    (tmp_path / "script").write_text("#!/usr/bin/env python3\n")
    (tmp_path / "script").chmod(0o755)
    assert detect.by_starter(command.format(folder=tmp_path).split()) == answer


@mpi_tier
@each_mpi
@pytest.mark.parametrize("script", [False, True], ids=["its starter", "a script"])
def test_a_rank_reads_what_is_typed(mpi, script, tmp_path):
    """Until the end of file, though the starter is in a session of its own."""
    known_programs.library(mpi)
    words = [known_programs.LAUNCHERS[mpi], "-np", "1", "sh", "-c", "read x; cat; echo got $x"]
    if script:
        (tmp_path / "run").write_text(f"#!/bin/sh\n{shlex.join(words)}\n")
        (tmp_path / "run").chmod(0o755)
        words = [str(tmp_path / "run")]
    code = (
        "import os\nfrom dovetail.mpi.profiled_run import _execute\n"
        f"print('ended', *_execute({words!r}, os.environ, False))"
    )
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(sys.executable, [sys.executable, "-c", code], known_programs.environment())
    try:
        os.write(terminal, b"42\nmore\n\x04")
        seen = ""
        while not re.search(r"ended .*\n", seen):
            assert select.select([terminal], [], [], known_programs.LIMIT)[0], seen
            seen += os.read(terminal, 65536).decode()
        assert re.search(r"(?m)^got 42\r?$", seen), seen
        assert "ended 0 False" in seen
        assert seen.count("more") == 2, "as it is typed, and as it is printed"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


@unit_tier
@pytest.mark.parametrize("number", [signal.SIGALRM, signal.SIGKILL])
def test_a_profile_that_is_killed_leaves_nothing(number, tmp_path):
    known_programs.library("openmpi")
    began = tmp_path / "began"
    script = f"echo $$ > {began}.new; mv {began}.new {began}; exec sleep 1000"
    code = "import sys; from dovetail.cli.main import main; sys.exit(main(sys.argv[1:]))"
    words = ["profile", "--mpi", "openmpi", "--", "sh", "-c", script]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *words], env=known_programs.environment()
    )
    mine = f"-profile-{process.pid}-"
    try:
        wait_for(lambda: began.exists() or None)
        sleeper = int(began.read_text())
        ticks = processes.start_ticks(sleeper)
        process.send_signal(number)
        process.wait(known_programs.LIMIT)
        for _ in range(200):
            if not (processes.alive(sleeper, ticks) or any(mine in name for name in sessions())):
                break
            select.select([], [], [], 0.05)
        assert not processes.alive(sleeper, ticks)
        assert not any(mine in name for name in sessions())
    finally:
        process.kill()
        processes.send(sleeper, ticks, signal.SIGKILL)


@mpi_tier
def test_a_static_program_is_refused(tmp_path):
    known_programs.library("openmpi")
    source = tmp_path / "x.c"
    source.write_text("int main(void) { return 0; }\n")
    program = tmp_path / "static"
    built = subprocess.run(["cc", "-static", "-o", str(program), str(source)], capture_output=True)
    if built.returncode != 0:
        pytest.skip("no static C library here")
    done = known_programs.dovetail("--", "mpirun.openmpi", "-np", "2", str(program))
    assert done.returncode == 2
    assert "statically linked" in done.stderr


@mpi_tier
def test_an_output_that_cannot_be_written_is_told_before_the_run(tmp_path):
    known_programs.library("openmpi")
    words = ["sh", "-c", f"touch {tmp_path}/ran"]
    done = known_programs.dovetail("-o", "/nonexistent/p.json", "--mpi", "openmpi", "--", *words)
    assert done.returncode == 2
    assert not (tmp_path / "ran").exists()


def sessions() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "-profile-" in name}


@mpi_tier
@each_mpi
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_all_and_leaves_nothing(mpi, number, tmp_path):
    program = known_programs.build(mpi, "known/life.c")
    code = (
        "import sys; from dovetail.cli import main; main.COMMANDS = ('profile',); "
        "sys.exit(main.main(['profile', *sys.argv[1:]]))"
    )
    words = [
        sys.executable,
        "-c",
        code,
        "--",
        known_programs.LAUNCHERS[mpi],
        "-np",
        "2",
        program,
        "hang",
    ]
    process = subprocess.Popen(
        words,
        env=known_programs.environment(),
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    mine = f"-profile-{process.pid}-"
    try:
        pages = wait_for(lambda: ranks_running(mine))
        process.send_signal(number)
        _, errors = process.communicate(timeout=known_programs.LIMIT)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert not any(mine in name for name in sessions())
    wait_for(lambda: None if any(still_runs(one) for one in pages) else True)


def ranks_running(mine):
    from dovetail.mpi import page

    for name in sessions():
        if mine in name and os.path.isdir(f"/dev/shm/{name}/profile"):
            pages = page.read_pages(f"/dev/shm/{name}/profile")
            if len(pages) == 2 and all(one.iterations > 5 for one in pages):
                return pages
    return None


def still_runs(one):
    from dovetail.host import processes

    return processes.alive(one.pid, one.start_ticks)


def wait_for(condition):
    end = time.monotonic() + known_programs.LIMIT
    while time.monotonic() < end:
        result = condition()
        if result is not None:
            return result
        select.select([], [], [], 0.02)
    raise AssertionError("the condition never held")


# --- OpenFOAM ---

EXAMPLE = Path("/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily")
DECOMPOSE = """FoamFile {{ version 2.0; format ascii; class dictionary; object decomposeParDict; }}
numberOfSubdomains {n};
method hierarchical;
hierarchicalCoeffs {{ n ({n} 1 1); delta 0.001; order xyz; }}
"""


def foam_case(directory: Path, ranks: int, iterations: int) -> Path:
    """pitzDaily, decomposed, to run for some iterations."""
    if not EXAMPLE.is_dir() or shutil.which("simpleFoam") is None:
        pytest.skip("no OpenFOAM with its examples here")
    case = directory / "pitzDaily"
    shutil.copytree(EXAMPLE, case)
    for packed in case.rglob("*.gz"):
        subprocess.run(["gunzip", str(packed)], check=True)
    control = case / "system" / "controlDict"
    text = re.sub(r"(?m)^endTime .*", f"endTime {iterations};", control.read_text())
    control.write_text(re.sub(r"(?s)\bfunctions\s*\{.*", "", text))
    (case / "system" / "decomposeParDict").write_text(DECOMPOSE.format(n=ranks))
    for command in (["blockMesh"], ["decomposePar"]):
        done = subprocess.run(
            [*command, "-case", str(case)], env=foam(), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
    return case


def foam() -> dict[str, str]:
    return known_programs.environment(WM_PROJECT_DIR="/usr/share/openfoam")


@mpi_tier
def test_openfoam_iterations_are_those_of_its_log(tmp_path):
    known_programs.library("openmpi")
    case = foam_case(tmp_path, 2, 12)
    out = tmp_path / "p.json"
    words = ["mpirun.openmpi", "-np", "2", "simpleFoam", "-parallel", "-case", str(case)]
    done = known_programs.dovetail(
        "-o", str(out), "--", *words, WM_PROJECT_DIR="/usr/share/openfoam"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    logged = len(re.findall(r"(?m)^Time = ", done.stdout))
    one = profile.load(out)
    assert logged == 12
    assert [rank.iterations for rank in one.ranks] == [logged, logged]
    assert {rank.iteration_source for rank in one.ranks} == {"openfoam"}
    for rank in one.ranks:
        assert rank.cpu_per_iteration is not None
        assert 0 < rank.cpu_per_iteration * logged <= rank.cpu_s * 1.001
        assert rank.calls["MPI_Allreduce"][0] > logged
