# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail top`: what a user sees of a run that goes on in another process."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import math
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich.live
from dovetail.cli import main
from dovetail.controller.controller import Controller
from dovetail.controller.settings import Settings
from dovetail.controller.simulation import Stage
from dovetail.core import eventlog, protocol
from dovetail.core.contention import Contention, Throttling
from dovetail.core.errors import BadInput
from dovetail.executors.simulated.executor import Fault, Simulated, Work
from dovetail.plan import schema
from dovetail.report import build_history, html, summary
from dovetail.run import follow, live_table, orders, top
from dovetail.run.follow import Follower
from dovetail.run.run import LOG
from dovetail.run.simulate import run_simulated
from rich.console import Console
from support import made_up_runs
from support.local_runs import wait_for
from support.other_users import let_in, needs_nobody
from support.run_command import site  # noqa: F401

pytestmark = pytest.mark.unit

STEPS = """
n=0; until [ -e {stop} ]; do n=$((n+1)); echo "Time = $n"; echo step $n; sleep 0.05; done"""


@pytest.fixture
def running(site):  # noqa: F811
    """A run of three simulations, which iterate until a file is there, on two cores."""
    stop = site.directory / "stop"
    entry = site.shell(STEPS.format(stop=stop), count=3, iterations=10**6)
    run = site.start(site.plan(entry, cpus=2), "-o", "out")

    def iterate(log):
        return {e["name"] for e in log if max(e.get("ranks", {}).get("iterations", [0])) > 3}

    site.until(lambda log: len(iterate(log)) == 2)
    yield run
    stop.touch()
    if run.poll() is None:
        site.end(run)


def command(site, *words, code=0):  # noqa: F811
    """What it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", "top", *words],
        env=site.environment(), cwd=site.directory, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == code, done.stderr
    return done.stdout + (done.stderr if code else "")


def test_without_a_terminal_it_prints_one_table(site, running):  # noqa: F811
    text = command(site, "out")
    assert "2 running, 1 queued" in text
    assert re.search(r"sim-1 +running +0 ", text)
    assert "sim-3" not in text.split("admit")[0], "what waits is not shown"
    assert "\x1b" not in text
    assert "quit" not in text, "there are no keys"


def test_on_a_terminal_that_cannot_draw_it_prints_one_table(tmp_path):
    made_up_runs.packed(1).save(tmp_path)
    ours, theirs = pty.openpty()
    words = [sys.executable, "-m", "dovetail", "top", str(tmp_path)]
    environment = {**os.environ, "TERM": "dumb"}
    subprocess.run(words, env=environment, stdin=theirs, stdout=theirs, timeout=60, check=True)
    assert b"pitz-2" in os.read(ours, 65536)
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("name", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_into_a_pipe_it_ends_though_colours_are_wished_for(tmp_path, name):
    made_up_runs.packed(1).save(tmp_path)
    ours, theirs = pty.openpty()
    done = subprocess.run(
        [sys.executable, "-m", "dovetail", "top", str(tmp_path)],
        env={**os.environ, name: "1"}, stdin=theirs, stdout=subprocess.PIPE, timeout=60, check=True,
    )  # fmt: skip
    os.close(ours)
    os.close(theirs)
    assert b"pitz-2" in done.stdout
    assert b"\x1b[?1049h" not in done.stdout, "it takes no screen"


def test_json_is_the_state_once(site, running):  # noqa: F811
    found = json.loads(command(site, "out", "--json"))
    first, _, last = found["simulations"]
    assert (found["over"], found["silent"]) == (False, None)
    assert (first["name"], first["state"], last["state"]) == ("sim-1", "running", "queued")
    assert first["iterations"] > 3
    (rank,) = first["ranks"]
    assert rank["request"] == 1000
    assert rank["duty"] == 1.0, "without MPI all its time is outside MPI"
    assert 0.0 <= rank["cpu"] <= 1.5
    assert rank["lost"] == pytest.approx(max(0.0, 1.0 - rank["cpu"])), "it sleeps, outside MPI"


def test_a_run_that_is_over_says_so_and_shows_all(site, running):  # noqa: F811
    (site.directory / "stop").touch()
    site.end(running)
    text = command(site, "out")
    assert "3 done" in text
    assert "the run is over" in text
    assert re.search(r"sim-2 +done", text)
    assert json.loads(command(site, "out", "--json"))["over"] is True


def test_a_run_that_was_killed_is_told_from_one_that_goes_on(site, running, monkeypatch):  # noqa: F811
    monkeypatch.setattr(follow, "SILENT", 0.5)
    running.send_signal(signal.SIGKILL)
    running.wait()
    follower = Follower(site.out, LOG)
    wait_for(lambda: follower.silent is not None, lambda: "it is not silent")
    assert (
        "it may have been killed"
        in top.Screen(follower, site.out).draw(80, 24, True).renderables[0]
    )


@pytest.mark.parametrize("what", ["missing", "a pipe", "another file", "earlier"])
def test_what_holds_no_run_is_refused_in_a_line(site, what):  # noqa: F811
    folder = site.directory / "none"
    folder.mkdir()
    if what == "a pipe":
        os.mkfifo(folder / LOG)
    elif what != "missing":
        words = {"another file": "{}", "earlier": '{"dovetail":"0","schema":1}'}
        (folder / LOG).write_text(words[what] + "\n")
    said = command(site, "none", code=2)
    assert said.startswith("dovetail: none/events.jsonl: ")
    assert said.count("\n") == 1


@pytest.mark.parametrize("columns", [80, 200])
def test_keys_on_a_terminal(site, running, columns):  # noqa: F811
    before, after, seen = on_a_terminal(site, columns, [b"s", b"a", b"\x1b[B", b"l", b"q"])
    assert before == after, "the terminal is as it was"
    assert seen.startswith("\x1b[?1049h")
    assert seen.endswith("\x1b[?25h\x1b[?1049l"), "the screen of before is back"
    for word in ("by plan", "by slowdown", "sim-3", "q quit", "c cancel"):
        assert word in seen, word
    # Which is the second depends on how slow each is; the third has no log while it waits.
    assert re.search(r"sim-[12]/log(?s:.)*step |sim-3/log(?s:.)*no log", seen)
    column = re.search(r"iterations(?!/s)", seen)  # a note may have the latter, on any terminal
    assert bool(column) == (columns == 200)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "\n", seen)
    assert max(len(line) for line in plain.splitlines()) <= columns


def test_the_manual_has_every_state():
    """Which metrics have as a label too."""
    page = (Path(__file__).resolve().parents[2] / "doc" / "dovetail-top.1").read_text()
    told = re.findall(r"^\.Cm ([a-z ]+?) ?[;,]?$", page.partition(".It rank")[0], re.MULTILINE)
    assert told == [one.value for one in Stage if one is not Stage.PAUSED]


def test_keys_that_come_together_all_count(monkeypatch):
    """As those of an arrow that is held down, on a terminal that is far away."""
    ours, theirs = pty.openpty()
    with open(theirs) as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", terminal)
        with top._keys() as key:
            os.write(ours, b"\x1b[B\x1b[Bsa\x1b[15~\x1b[A")
            found = [key(5.0) for _ in range(6)]
            assert found == ["down", "down", "s", "a", "\x1b", "up"]
            assert key(0.0) is None
    os.close(ours)


def test_a_simulation_is_cancelled_once_the_user_says_so_twice(site, running):  # noqa: F811
    chosen = [b"\x1b[A", b"\x1b[A"]  # the first, whichever that was
    _, _, seen = on_a_terminal(site, 80, [*chosen, b"c", b"n", b"q"])
    assert "cancel sim-1? y: yes" in seen
    assert not (site.out / orders.FILE).exists()
    _, _, seen = on_a_terminal(site, 80, [*chosen, b"c", b"y", b"q"])
    assert "sim-1: the run is asked to cancel it" in seen
    site.until(lambda log: any((e.get("name"), e.get("state")) == ("sim-1", "failed") for e in log))
    (site.directory / "stop").touch()
    assert site.end(running)[0] == 1
    assert site.states() == {"sim-1": "failed", "sim-2": "done", "sim-3": "done"}
    assert site.summary()["simulations"][0]["reason"] == "cancelled"
    assert not (site.out / orders.FILE).exists()


def test_what_kept_ranks_from_cores_is_that_of_late(tmp_path):
    run = made_up_runs.Run([made_up_runs.spec("a", "f")], {"f": 0.1})
    run.launch("a")
    for t, seconds in ((5.0, 1.0), (10.0, 5.0)):
        stops = Throttling(500, round(10 * t), round(10 * t), seconds, t)
        seen = Contention(stops, None, (1, 1), (1, 1), (seconds, 0.0), (t, t))
        run.work(t - run.t)
        run.add(protocol.Counted(t, "a", seen))
    (one,) = top.snapshot(Follower(run.save(tmp_path), LOG))["simulations"]
    assert one["throttled"] == pytest.approx(0.8)
    assert [rank["queued"] for rank in one["ranks"]] == pytest.approx([0.8, 0.0])
    out = io.StringIO()
    screen = top.Screen(Follower(tmp_path, LOG), tmp_path)
    Console(file=out, width=140).print(screen.draw(140, 40, keys=False))
    assert re.search(r"throttled +waits", out.getvalue())
    assert out.getvalue().count("80%") == 2


def test_the_choice_of_ranks_and_its_reason_are_at_the_head(tmp_path):
    """Of a run on the simulated executor, whose controller chooses; and so says the report."""
    node = protocol.Node("node", 2000, 8 << 30)
    specs = [
        protocol.Spec(f"a-{n}", "a", "case", 2, (1.0, 1.0), ("true",), widths=(1, 2))
        for n in range(4)
    ]
    head = eventlog.header(specs, protocol.Capacity((node,)), Settings().plain())
    with eventlog.Log.create(tmp_path / LOG, head) as log:
        work = Work((0.01, 0.03), 300, cuts={1: (0.036,)})
        ended = run_simulated(specs, {"a": work}, [node], log=log)
    whole = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    sampled = [n for n, line in enumerate(whole) if b'"Sampled"' in line]
    (tmp_path / LOG).write_bytes(b"".join(whole[: sampled[len(sampled) // 2]]))
    follower = Follower(tmp_path, LOG)
    (line,) = top.snapshot(follower)["decided"]
    assert re.fullmatch(
        r"decided: 1 rank each, 2 at once: [\d.]+ ms per iteration and core \(measured\) "
        r"against [\d.]+ \(predicted\) on 2 ranks",
        line,
    )
    screen = top.Screen(follower, tmp_path)
    out = io.StringIO()
    Console(file=out, width=80).print(screen.draw(80, 24, keys=False))
    assert out.getvalue().splitlines()[1].startswith("decided: 1 rank each, 2 at once: ")
    assert line in " ".join(out.getvalue().split()), "all of it, in lines of 80"
    out = io.StringIO()
    live = live_table.Live()
    live.live = rich.live.Live(console=Console(file=out, force_terminal=True, width=160))
    with live.live:
        live.show(ended.controller, 1.0)
    assert "decided: 1 rank each: " in out.getvalue()
    history = build_history.tell(*eventlog.read(tmp_path / LOG))
    assert line in html.page(summary.summarise(history), history)


def test_what_is_shown_is_what_was_launched_and_has_not_ended(tmp_path):
    node, works = protocol.Node("node", 2000, 8 << 30), {n: Work((0.01, 0.03), 300) for n in "ab"}
    capacity = Simulated([node], works).capacity()
    specs = [
        protocol.Spec(f"{name}-{n}", name, "case", 2, (1.0, 3.0), ("true",))
        for name in "ab"
        for n in range(3)
    ]
    with eventlog.Log.create(tmp_path / LOG, eventlog.header(specs, capacity, {})) as log:
        run_simulated(specs, works, [node], faults=[Fault(22.0, "stall", "b-0")], log=log)
    controller, states = Controller(specs, capacity), set()
    for entry in eventlog.read(tmp_path / LOG)[1]:
        if not isinstance(entry, protocol.ACTIONS):
            controller.handle(entry)
            shown = controller.active_views()
            states.update(view.state for view in shown)
            assert shown == [view for view in controller.views() if view.state in top.ACTIVE]
    assert controller.finished
    assert {"preparing", "running", "suspended", "terminating"} <= states


def test_ranks_that_are_suspended_do_nothing(tmp_path):
    """Their last samples are from before: a rank that stands has no further iteration."""
    node, works = protocol.Node("node", 2000, 8 << 30), {n: Work((0.01, 0.03), 300) for n in "ab"}
    specs = [protocol.Spec(f"{n}-0", n, "case", 2, (1.0, 3.0), ("true",)) for n in "ab"]
    head = eventlog.header(specs, Simulated([node], works).capacity(), Settings().plain())
    with eventlog.Log.create(tmp_path / "whole", head) as log:
        run_simulated(specs, works, [node], log=log)
    lines = (tmp_path / "whole").read_bytes().splitlines(keepends=True)
    (tmp_path / LOG).write_bytes(lines[0])
    follower, seen = Follower(tmp_path, LOG), [("queued", False)]
    with (tmp_path / LOG).open("ab", buffering=0) as log:
        for line in lines[1:]:
            log.write(line)
            follower.look()
            one = top.snapshot(follower)["simulations"][0]
            now = one["state"], one["ranks"][1]["cpu"] is not None
            seen += [now] if now != seen[-1] else []
    at = seen.index(("suspended", False))
    assert ("suspended", True) not in seen
    assert seen[at - 1] == ("running", True)
    assert seen[at + 1 : at + 3] == [("running", False), ("running", True)], "by what it does since"


def test_a_table_of_a_long_queue_looks_at_what_runs_alone(monkeypatch):
    node = protocol.Node("node", 2000, 8 << 30)
    specs = [protocol.Spec(f"a-{n}", "a", "case", 2, (1.0, 3.0), ("true",)) for n in range(99)]
    controller, looked = Controller(specs, protocol.Capacity((node,))), []
    controller.handle(protocol.Tick(0.0))
    view = controller.view
    monkeypatch.setattr(controller, "view", lambda name: looked.append(name) or view(name))
    live_table.table(controller, 0.0)
    assert looked == ["a-0"]


def test_slow_iterations_are_not_told_to_stand_still():
    view = SimpleNamespace(rate=0.00412, measure="iterations", error=None)
    assert live_table.speed(view) == "0.00412"


@pytest.mark.parametrize("width", [0, 1, 80, 2000])
def test_what_a_log_says_is_no_order_to_the_terminal(tmp_path, width):
    """It may be another user's, and has the last words of programs."""
    run = made_up_runs.Run([made_up_runs.spec("[/x]\x1b[2J", "a\x1b[2J")], {"a\x1b[2J": 0.1})
    run.launch(run.specs[0].name)
    run.work(2)
    known = {"measured": [2], "iterations": 9}
    run.note("choice", open={"a\x1b[2J": known}, widths={"a\x1b[2J": {"2": 1}},
             seconds={"a\x1b[2J": {"2": 1.0}}, cores=2)  # fmt: skip
    run.note("fail", "it said \x1b]52;c;bm8=\x07\x1b[31m")
    run.save(tmp_path)
    out = io.StringIO()
    screen = top.Screen(Follower(tmp_path, LOG), tmp_path)
    Console(file=out, width=width).print(screen.draw(width, 24, keys=True))
    screen.key("l")
    Console(file=out, width=width).print(screen.draw(width, 24, keys=True))
    assert not {"\x1b", "\x07"} & {*out.getvalue()}
    if width >= 80:
        assert "[/x]\ufffd[2J" in out.getvalue()
        assert "it said \ufffd]52" in out.getvalue()


def test_orders_in_the_file_are_for_this_run_and_of_its_owner(tmp_path):
    orders.cancel(tmp_path, "of an earlier run")
    asked = orders.Orders()
    asked.listen(tmp_path)
    assert asked.take() == []
    orders.cancel(tmp_path, "one")
    with (tmp_path / orders.FILE).open("a") as file:
        file.write("nonsense\nstop two\nstop th")
    assert asked.take() == ["one", "two"]
    with (tmp_path / orders.FILE).open("a") as file:
        file.write("ree\n")
    assert asked.take() == ["three"]
    assert asked.take() == []
    if os.getuid() == 0:
        os.chown(tmp_path / orders.FILE, 65534, -1)
        orders.cancel(tmp_path, "four")
        assert asked.take() == []
    asked.forget()
    assert not (tmp_path / orders.FILE).exists()
    os.mkfifo(tmp_path / orders.FILE)
    assert asked.take() == []


def test_orders_by_a_socket_leave_it_as_it_is_for_the_output():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        asked = orders.Orders(ours.fileno())
        assert os.get_blocking(ours.fileno())
        assert asked.take() == []
        theirs.sendall(b"stop one\nst")
        assert asked.take() == ["one"]
        theirs.sendall(b"op two\n")
        theirs.shutdown(socket.SHUT_WR)
        assert asked.take() == ["two"]
        assert asked.take() == []


def test_who_gave_orders_may_go_without_reading_what_was_said():
    ours, theirs = socket.socketpair()
    with ours:
        asked = orders.Orders(ours.fileno())
        theirs.sendall(b"stop one\n")
        ours.sendall(b"progress")
        theirs.close()
        assert asked.take() == ["one"]
        assert asked.take() == []


@needs_nobody
def test_what_root_asks_for_can_be_read_by_the_run_and_added_to(tmp_path):
    let_in(tmp_path)
    os.chown(tmp_path, 65534, 65534)
    orders.cancel(tmp_path, "one")
    try:
        os.seteuid(65534)  # whose run it is
        orders.cancel(tmp_path, "two")
        found = (tmp_path / orders.FILE).read_text()
    finally:
        os.seteuid(0)
    assert found == "stop one\nstop two\n"
    assert (tmp_path / orders.FILE).stat().st_uid == 65534


def test_no_simulation_has_the_name_of_the_file_of_orders(site):  # noqa: F811
    """Each has a folder beside it."""
    with pytest.raises(BadInput, match="lower-case letters, digits and hyphens"):
        schema.load(site.plan(site.shell("true", name=orders.FILE)))
    plan = site.plan(site.shell("true", name="orders"))
    assert site.end(site.start(plan, "-o", "out"))[0] == 0


def test_who_may_not_write_there_is_told(site, running):  # noqa: F811
    screen = top.Screen(Follower(site.out, LOG), site.out / "missing")
    screen.draw(80, 24, True)
    assert screen.key("c")
    assert screen.key("y")
    assert screen.said == f"{site.out}/missing/orders.txt: No such file or directory"


def test_an_interrupt_leaves_the_terminal_and_the_run_as_they_were(site, running):  # noqa: F811
    before, after, _ = on_a_terminal(site, 80, [b"\x03"], code=130)
    assert before == after
    assert running.poll() is None


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_being_ended_from_elsewhere_leaves_the_terminal_as_it_was(site, running, number):  # noqa: F811
    before, after, seen = on_a_terminal(site, 80, [number], code=130)
    assert before == after
    assert "\x1b[?1049l" in seen, "the screen of before is back"


def test_while_it_is_suspended_the_terminal_is_as_it_was(site, running):  # noqa: F811
    before, after, seen = on_a_terminal(site, 80, [signal.SIGTSTP, b"q"])
    assert before == after
    screens = re.findall(r"\x1b\[\?1049([hl])", seen)
    assert screens == ["h", "l", "h", "l"], "there and gone, and so again"


def on_a_terminal(site, columns, keys, code=0):  # noqa: F811
    """Type these keys, one after each picture; the terminal's state before and after, and all.

    A signal among them is sent to it.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = {k: v for k, v in site.environment().items() if k not in ("COLUMNS", "LINES")}
    started = subprocess.Popen(
        [sys.executable, "-m", "dovetail", "top", "out"], env=environment,
        cwd=site.directory, stdin=theirs, stdout=theirs, stderr=theirs,
        preexec_fn=lambda: (os.setsid(), fcntl.ioctl(0, termios.TIOCSCTTY, 0)),
    )  # fmt: skip
    seen, end = b"", time.monotonic() + 60
    pictures = 0
    while started.poll() is None and time.monotonic() < end:
        if select.select([ours], [], [], 0.1)[0]:
            with contextlib.suppress(OSError):
                seen += os.read(ours, 1 << 16)
        drawn = sum(map(seen.count, (b"q quit", b"? y: yes", b" is asked to ")))
        if keys and drawn > pictures:
            pictures = drawn
            key = keys.pop(0)
            if isinstance(key, signal.Signals):
                started.send_signal(key)
            else:
                os.write(ours, key)
    while select.select([ours], [], [], 0.1)[0]:
        seen += os.read(ours, 1 << 16)
    assert started.wait(10) == code, seen
    after = termios.tcgetattr(theirs)
    os.close(ours)
    os.close(theirs)
    return before, after, seen.decode()


def test_a_log_that_is_read_in_pieces_tells_the_same(site, running):  # noqa: F811
    (site.directory / "stop").touch()
    site.end(running)
    whole = (site.out / LOG).read_bytes()
    folder = site.directory / "pieces"
    folder.mkdir()
    (folder / LOG).touch()
    follower = Follower(folder, LOG)
    assert follower.controller is None
    for at in range(0, len(whole), 97):
        with (folder / LOG).open("ab") as file:
            file.write(whole[at : at + 97])
        follower.look()
    assert top.snapshot(follower) == top.snapshot(Follower(site.out, LOG))


def test_a_line_that_is_taken_back_is_no_damage(tmp_path):
    """As where the disk is full, or its machine was lost, and the run is resumed."""
    made_up_runs.packed(1).save(tmp_path)
    whole = (tmp_path / LOG).read_bytes().splitlines(keepends=True)
    half = len(whole) // 2
    (tmp_path / LOG).write_bytes(b"".join(whole[:half]) + b'{"seq":7,"kind":"action"')
    follower = Follower(tmp_path, LOG)
    before = follower.t
    with eventlog.Log.append(tmp_path / LOG) as log:
        log.write(protocol.Tick(before + 1.0))
    follower.look()
    assert follower.t == before + 1.0


# --- `dovetail status`, which shows what a run on a cluster has written ---

GROUP = {"simulation": "a", "ranks": [0, 1], "node": "n", "pod": "p", "cpu": 500, "file": "",
         "value": None, "wanted": 0.5, "real": None}  # fmt: skip
STATUS = {"schema": 1, "run": "abc", "written": 1.0, "formula": "", "groups": [GROUP]}


@pytest.mark.parametrize("options", [[], ["--json"]])
@pytest.mark.parametrize(
    "text",
    [
        "[]", "{}", "[" * 100_000, json.dumps({**STATUS, "written": "soon"}),
        json.dumps({**STATUS, "written": math.nan}), json.dumps({**STATUS, "groups": [{}]}),
        json.dumps(STATUS).replace('"wanted": 0.5', '"wanted": 1e999'),
        *(json.dumps({**STATUS, "groups": [{**GROUP, key: []}]}) for key in ("ranks", "wanted")),
    ],
)  # fmt: skip
def test_a_damaged_status_is_refused_in_a_line(tmp_path, capsys, text, options):
    (tmp_path / "status.json").write_text(text)
    assert main.main(["status", *options, str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"dovetail: {tmp_path}/status.json: cannot be read: ")
    assert said.err.count("\n") == 1


def test_a_status_is_shown_as_it_is(tmp_path, capsys):
    path = tmp_path / "status.json"
    os.mkfifo(path)
    assert main.main(["status", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("status.json: cannot be read: not a file\n")
    path.unlink()
    path.write_text(json.dumps({**STATUS, "groups": [{**GROUP, "node": "[/n] \x1b[2J"}]}))
    assert main.main(["status", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "[/n] \ufffd[2J" in shown
    assert "run abc, unchanged for " in shown, "weights that stay are not written again"
