# SPDX-License-Identifier: LGPL-3.0-or-later
"""Agents, entrypoints, hub and ranks die one at a time, and nothing is lost or left."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest
from dovetail.core.causes import Cause
from dovetail.executors.kubernetes.agent_hub import Hub
from dovetail.executors.pods import messages, rsh_agent
from dovetail.executors.pods.spawn import Spawner
from dovetail.host import processes
from dovetail.host.session import sweep_sessions
from support.local_runs import wait_for
from support.pod_processes import ADDRESSES, cluster, name_of  # noqa: F401

pytestmark = [pytest.mark.unit, pytest.mark.slow]

WAITS = "while [ ! -e go ]; do sleep 0.05; done; echo went"


def go(cluster, name="sim"):  # noqa: F811
    """Let a simulation that runs WAITS go on."""
    (cluster.directory / "run" / name / "case" / "go").touch()


def ranks(cluster, name="sim", node="one"):  # noqa: F811
    """The processes of a simulation."""
    return processes.members(f"DOVETAIL_DIR={cluster.session(node)}/{name}")


def kill(started):
    started.kill()
    started.wait()


def test_a_pod_that_is_killed_is_reported_and_nothing_of_it_is_left(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", "trap '' TERM; setsid sleep 1000 & while :; do sleep 1000; done")
    cluster.until(messages.Started, "sim")
    wait_for(lambda: ranks(cluster))
    kill(cluster.entrypoints["sim", 0])
    assert cluster.until(messages.Lost, "sim") == messages.Lost("sim", 0, "uid0")
    wait_for(lambda: not ranks(cluster))
    wait_for(lambda: not (cluster.session("one") / "sim").exists())
    cluster.hub.tell(messages.End("sim", 1))


def test_a_pod_that_is_deleted_tells_how_its_simulation_ended(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", "sleep 1000")
    cluster.until(messages.Started, "sim")
    cluster.entrypoints["sim", 0].terminate()
    assert cluster.until(messages.Result, "sim").code == 143
    assert cluster.entrypoints["sim", 0].wait(120) == 143
    assert not [m for _, m in cluster.heard if isinstance(m, messages.Lost)]


@pytest.mark.parametrize("moment", ["before it is the program", "when it is forked"])
def test_a_signal_to_a_program_that_is_about_to_start_ends_it(moment):
    handled = signal.signal(signal.SIGTERM, lambda number, frame: None)
    here, there = os.pipe()

    def ready():
        os.write(there, b"x")
        time.sleep(5)  # in which it is to end

    try:
        pid = processes.start_child(["true"], "/", dict(os.environ), {}, ready)
        if moment == "before it is the program":
            assert os.read(here, 1) == b"x"
        os.killpg(pid, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, handled)
        os.close(here)
        os.close(there)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_process_ids_of_several_pods_differ(number):
    pid = processes.start_child(["true"], "/", dict(os.environ), {}, remainder=(number, 3))
    assert pid % 3 == number
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_simulation_goes_on_without_its_agent(cluster):  # noqa: F811
    agent = cluster.agent()
    cluster.launch("sim", WAITS)
    cluster.until(messages.Started, "sim")
    kill(agent)
    cluster.until(messages.Gone)
    cluster.agent()
    assert cluster.until(messages.Pod, "sim") == messages.Pod("sim", 0, "uid0")
    go(cluster)
    assert cluster.until(messages.Result, "sim").code == 0
    assert cluster.log("sim") == "went\n"
    cluster.end("sim")


def test_a_result_that_comes_while_the_agent_is_dead_is_kept(cluster):  # noqa: F811
    agent = cluster.agent()
    cluster.launch("sim", WAITS)
    cluster.until(messages.Started, "sim")
    kill(agent)
    go(cluster)
    wait_for(lambda: not ranks(cluster))
    cluster.agent()
    assert cluster.until(messages.Result, "sim").code == 0
    kill(cluster.agents["one"])
    cluster.agent()  # which says it again, and the hub does not
    cluster.until(messages.Pod, "sim")
    cluster.end("sim")
    cluster.heard += cluster.hub.take()
    assert not [m for _, m in cluster.heard if isinstance(m, (messages.Result, messages.Lost))]


@pytest.mark.alone  # any other run sweeps dead sessions
def test_a_pod_that_dies_while_the_agent_is_dead_is_found(cluster):  # noqa: F811
    agent = cluster.agent()
    cluster.launch("sim", "sleep 1000")
    cluster.until(messages.Started, "sim")
    with cluster.another_pod():
        kill(agent)
        kill(cluster.entrypoints["sim", 0])
        cluster.agent()
        assert cluster.until(messages.Lost, "sim").uid == "uid0"
    wait_for(lambda: not (cluster.session("one") / "sim").exists())
    cluster.hub.tell(messages.End("sim", 1))


def test_a_hub_that_comes_back_is_told_all_it_missed(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("done", WAITS)
    cluster.launch("goes-on", WAITS)
    for name in ("done", "goes-on"):
        cluster.until(messages.Started, name)
    cluster.hub.close()
    go(cluster, "done")
    wait_for(lambda: not ranks(cluster, "done"))
    before = cluster.hub
    cluster.hub = Hub("127.0.0.1", cluster.directory / "hub")
    assert (cluster.hub.port, cluster.hub.credentials()) == (before.port, before.credentials())
    cluster.heard.clear()
    assert cluster.until(messages.Result, "done").code == 0
    cluster.until(messages.Pod, "goes-on")
    cluster.until(messages.Started, "goes-on")
    go(cluster, "goes-on")
    assert cluster.until(messages.Result, "goes-on").code == 0
    cluster.end("done")
    cluster.end("goes-on")


def test_a_hub_whose_port_is_anothers_now_is_found_by_the_secret(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", WAITS)
    cluster.until(messages.Started, "sim")
    cluster.hub.close()
    with socket.create_server((cluster.hub.address, cluster.hub.port)):
        cluster.hub = Hub("127.0.0.1", cluster.directory / "hub")
        cluster.write_credentials()  # as the kubelet does, a while later
        cluster.heard.clear()
        cluster.until(messages.Pod, "sim")
        go(cluster)
        assert cluster.until(messages.Result, "sim").code == 0
        cluster.end("sim")


@contextlib.contextmanager
def told(cluster, node, *words):  # noqa: F811
    """A node's agent that has said these words: a function that gives what it hears next."""
    decoder, heard = messages.Decoder(), []

    def hear(kind):
        while not any(isinstance(message, kind) for message in heard):
            data = link.recv(1 << 16)
            assert data, heard
            heard.extend(decoder.feed(data))
        place = next(at for at, message in enumerate(heard) if isinstance(message, kind))
        return heard.pop(place)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection(("127.0.0.1", cluster.hub.port), 10) as plain,
        context.wrap_socket(plain) as link,
    ):
        hello = messages.Hello(node, cluster.hub.credentials()["token"])
        # The last is heard by the executor: then the hub has taken all of them in.
        for message in (hello, *words, messages.Started("sim", "", 0)):
            link.sendall(messages.encode(message))
        cluster.until(messages.Started, "sim")
        yield hear


def test_the_clock_of_a_node_that_was_booted_again_is_not_the_old_one(cluster):  # noqa: F811
    for uptime in (1e6, 5.0):
        before = time.monotonic() - uptime
        with told(cluster, "one", messages.Sample(uptime, {"sim": {"0": [1.0] * 7}}, {})):
            after = time.monotonic() - uptime
            assert before <= cluster.hub.clocks.offset("one") <= after


def test_what_a_pod_wants_of_another_waits_until_the_others_node_is_there(cluster):  # noqa: F811
    asked = messages.Spawn("sim", 1, 0, 7, "daemon", {}, "/dev/shm/x")
    done = messages.Spawned("sim", 0, 7, False, 0, "")
    first, second = messages.Pod("sim", 0, "a"), messages.Pod("sim", 1, "b")
    # Nobody knows yet where the second group is.
    with told(cluster, "one", first, asked), told(cluster, "two", second) as hear:
        assert hear(messages.Spawn) == asked
    cluster.until(messages.Gone)
    cluster.until(messages.Gone)
    # And the first group's node is away.
    with told(cluster, "two", second, done), told(cluster, "one", first) as hear:
        assert hear(messages.Spawned) == done
        cluster.hub.tell(messages.End("sim", 0))
        hear(messages.End)
    with told(cluster, "one", first, second) as hear:
        cluster.hub.tell(messages.Stop("sim"))
        assert [hear(object) for _ in range(3)][-1] == messages.Stop("sim")  # after two Ends


def test_what_a_pod_wants_of_another_waits_until_that_has_met_the_agent(cluster):  # noqa: F811
    agent = cluster.agent()
    for group in (0, 1):
        cluster.entrypoint("sim", group)
        cluster.until(messages.Pod, "sim", group=group)
    asks = f"{sys.executable} {rsh_agent.__file__} spawn {ADDRESSES[1]} touch there"
    script = f"{WAITS}; DOVETAIL_GROUP=0 timeout 20 {asks}"
    hosts = [{"address": address, "ranks": 1} for address in ADDRESSES]
    cluster.hub.tell(messages.Run("sim", cluster.config("sim", ("sh", "-c", script)), hosts))
    cluster.until(messages.Started, "sim")
    kill(agent)
    os.kill(cluster.entrypoints["sim", 1].pid, signal.SIGSTOP)
    try:
        cluster.agent()
        cluster.until(messages.Pod, "sim", group=0)
        go(cluster)
        wait_for(lambda: any(b"spawn" in words(pid) for pid in ranks(cluster)))
        with pytest.raises(AssertionError, match="nothing"):  # comes of it so far
            wait_for(lambda: not ranks(cluster), "nothing", limit=1.0)
    finally:
        os.kill(cluster.entrypoints["sim", 1].pid, signal.SIGCONT)
    assert cluster.until(messages.Result, "sim").reason == ""
    cluster.end("sim")


def words(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def test_a_daemon_that_has_closed_its_output_takes_nothing_from_others(tmp_path):
    watched, said = {}, []
    spawner = Spawner(str(tmp_path / "pod.0.sock"), 0, watched.__setitem__, said.append)
    spawner.meet([{"address": "127.0.0.1", "ranks": 1}])
    command = "exec >/dev/null 2>&1; exec sleep 1000"
    before = {*watched}
    spawner.spawn(messages.Spawn("sim", 0, 1, 7, command, dict(os.environ), str(tmp_path)))
    (output,) = {*watched} - before
    select.select([output], [], [], 60)
    watched[output]()
    assert watched[output] is None
    mine, theirs = os.pipe()  # which has the same number now
    os.set_blocking(mine, False)
    os.write(theirs, b"a rank's request")
    assert mine == output
    (pid,) = wait_for(lambda: processes.members(f"DOVETAIL_DIR={tmp_path}"))
    os.kill(pid, signal.SIGKILL)
    spawner.ended(*os.waitpid(pid, 0))
    assert said[-1].code == 128 + signal.SIGKILL
    assert os.read(mine, 100) == b"a rank's request"
    spawner.close(str(tmp_path / "pod.0.sock"))
    for fd in (mine, theirs):
        os.close(fd)


def test_without_a_controller_everything_ends(cluster):  # noqa: F811
    agent = cluster.agent(DOVETAIL_ORPHAN_S="5")
    cluster.launch("sim", "trap '' TERM; while :; do sleep 1000; done")
    cluster.until(messages.Started, "sim")
    cluster.hub.close()
    assert cluster.entrypoints["sim", 0].wait(120) == 143
    assert agent.wait(120) == 0
    wait_for(lambda: not cluster.traces(), lambda: f"still there: {cluster.traces()}")


def test_an_agent_that_is_ended_while_it_starts_leaves_nothing(cluster):  # noqa: F811
    agent = cluster.agent()
    while not cluster.session("one").exists():
        assert agent.poll() is None
    agent.terminate()
    assert agent.wait(120) == 0
    assert not cluster.session("one").exists()


def test_without_an_agent_a_pod_ends(cluster):  # noqa: F811
    entrypoint = cluster.entrypoint("sim", DOVETAIL_ORPHAN_S="1")
    assert entrypoint.wait(120) == 143
    agent = cluster.agent()
    cluster.until(messages.Joined)
    entrypoint = cluster.entrypoint("sim", DOVETAIL_ORPHAN_S="1")
    cluster.until(messages.Pod, "sim")
    kill(agent)
    assert entrypoint.wait(120) == 143
    wait_for(lambda: not cluster.traces(), lambda: f"still there: {cluster.traces()}")


def test_a_supervisor_that_is_killed_is_named(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", "setsid sleep 1000 & sleep 1000")
    cluster.until(messages.Started, "sim")
    wait_for(lambda: ranks(cluster))  # before, what becomes one has the supervisor's name
    (supervisor,) = [
        p for p in processes.members(cluster.token) if "dovetail.mpi.supervisor" in name_of(p)
    ]
    os.kill(supervisor, signal.SIGKILL)
    result = cluster.until(messages.Result, "sim")
    assert (result.code, result.reason) == (137, "its supervisor failed: ended by signal 9")
    wait_for(lambda: not ranks(cluster))
    cluster.end("sim", 1)


def test_of_a_supervisor_that_fails_the_last_words_are_told(cluster):  # noqa: F811
    """As where the node's memory is full, and it cannot keep what it has to."""
    cluster.agent()
    cluster.entrypoint("sim")
    cluster.until(messages.Pod, "sim")
    config = {**cluster.config("sim", ("true",)), "log_limit": "no number"}
    cluster.hub.tell(messages.Run("sim", config, [{"address": ADDRESSES[0], "ranks": 1}]))
    result = cluster.until(messages.Result, "sim")
    assert result.code == 1
    assert result.reason.startswith("its supervisor failed: exit code 1: TypeError: ")
    cluster.end("sim", 1)


@pytest.mark.alone  # any other run sweeps dead sessions
def test_the_next_agent_sweeps_a_session_of_which_all_are_dead(cluster):  # noqa: F811
    agent = cluster.agent()
    cluster.launch("sim", "sleep 1000")
    cluster.until(messages.Started, "sim")
    kill(agent)
    cluster.until(messages.Gone)
    kill(cluster.entrypoints["sim", 0])
    old = cluster.session("one")
    assert old.exists()
    cluster.run += "b"
    cluster.agent()
    wait_for(lambda: not old.exists())
    wait_for(cluster.hub.nodes)  # until then a signal ends it before it can leave its session


@pytest.mark.alone  # any other run sweeps dead sessions
def test_two_runs_on_a_node_leave_each_other_alone(cluster):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", "sleep 1000")
    cluster.until(messages.Started, "sim")
    wait_for(lambda: ranks(cluster))
    assert sweep_sessions() == []
    assert ranks(cluster)
    cluster.end("sim", 1)


def test_a_simulation_runs_though_shared_memory_is_full(cluster):  # noqa: F811
    small = 'mount -t tmpfs -o size=4k small /dev/shm && exec "$@"'
    prefix = ("unshare", "--mount", "sh", "-c", small, "sh")
    if subprocess.run([*prefix, "true"], capture_output=True).returncode:
        pytest.skip("cannot make namespaces here")
    agent = cluster.agent("one", *prefix)
    cluster.until(messages.Joined)
    inside = ("nsenter", "--mount", "--target", str(agent.pid))
    cluster.launch("sim", "echo Time = 1; echo Time = 2; exit 4", prefix=inside)
    result = cluster.until(messages.Result, "sim")
    assert (result.code, result.trouble) == (4, "")
    cluster.end("sim", 4)


STRANGERS = {
    "says nothing": b"",
    "speaks without TLS": None,
    "has another token": messages.encode(messages.Hello("one", "0" * 64)),
    "wants a folder": messages.encode(messages.Transfer("one", "0" * 64, "sim", "in")),
    "begins with another message": messages.encode(messages.Result("sim", Cause.DONE, 0, "", "")),
    "sends a long message": messages.LENGTH.pack(1 << 30),
    "sends no message": messages.LENGTH.pack(2) + b"[]",
    "sends an unfinished message": messages.LENGTH.pack(200) + b'{"kind":"Hello"',
}


@pytest.mark.parametrize("of", ["agent_hub", "copies"])
@pytest.mark.parametrize("words", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_stranger_hears_nothing(cluster, words, of, monkeypatch):  # noqa: F811
    monkeypatch.setattr(f"dovetail.executors.kubernetes.{of}._PATIENCE", 1.0)
    cluster.hub.copies.open("sim", str(cluster.case), "in")
    port = cluster.hub.copies.port if of == "copies" else cluster.hub.port
    with socket.create_connection(("127.0.0.1", port), 120) as plain:
        if words is None:
            plain.sendall(
                messages.encode(messages.Hello("one", cluster.hub.credentials()["token"]))
            )
            with contextlib.suppress(ConnectionResetError):
                assert not plain.recv(100).startswith(b"{")
        else:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            with context.wrap_socket(plain) as link:
                link.sendall(words)
                assert link.recv(100) == b""
    assert cluster.hub.nodes() == set()
    assert cluster.hub.take() == []


def test_an_agent_says_nothing_to_a_hub_with_another_certificate(cluster, tmp_path):  # noqa: F811
    other = Hub("127.0.0.1", tmp_path / "other")
    try:
        for name in ("address", "socket", "token"):
            (cluster.credentials / name).write_text(other.credentials()[name])
        cluster.agent()
        cluster.entrypoint("sim")
        wait_for(lambda: (cluster.session("one") / "sim" / "pod.0").exists())
        assert other.nodes() == set()
        cluster.write_credentials()  # the right ones come late
        cluster.until(messages.Pod, "sim")
        assert other.take() == []
        cluster.end("sim", 1)
    finally:
        other.close()


def test_secrets_are_in_private_files(cluster):  # noqa: F811
    folder = cluster.directory / "hub"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.name: path.stat().st_mode & 0o77 for path in folder.iterdir()}["hub.key"] == 0
    assert Path(folder, "token").stat().st_mode & 0o77 == 0
    agent = cluster.agent()
    cluster.until(messages.Joined)
    token = cluster.hub.credentials()["token"]
    for name in ("cmdline", "environ"):
        assert token.encode() not in Path(f"/proc/{agent.pid}/{name}").read_bytes()


@pytest.mark.parametrize(
    "command", ["trap 'exit 1' TERM; while :; do sleep 0.1; done", "sleep 9999"]
)
def test_a_pod_that_its_node_ends_says_so(cluster, command):  # noqa: F811
    cluster.agent()
    cluster.launch("sim", command)
    cluster.until(messages.Started, "sim")
    cluster.entrypoints["sim", 0].terminate()
    result = cluster.until(messages.Result, "sim")
    assert (result.cause, bool(result.code)) == (Cause.POD_LOST, True), result
