# SPDX-License-Identifier: LGPL-3.0-or-later
"""Ranks on a node that is cut off stand still: what it had may run elsewhere, in the same folders.

Agents are quicker here than on clusters to take their node for cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
import tempfile
import threading
import time
from types import SimpleNamespace

import pytest
from dovetail.core.causes import Cause
from dovetail.executors.kubernetes import manifests, nodes
from dovetail.executors.kubernetes import session as kubernetes
from dovetail.executors.kubernetes.agent_hub import Hub
from dovetail.executors.pods import agent, messages
from dovetail.host import processes, way_out
from support.local_runs import wait_for
from support.pod_processes import cluster, state  # noqa: F401

pytestmark = [pytest.mark.unit, pytest.mark.slow]

SECONDS = {"ASK": 0.2, "CUT_OFF": 2.0, "SETTLED": 3.0, "_ANSWER": 0.5}
LONG = 3 * SECONDS["CUT_OFF"]
WORKS = "trap 'echo went on' CONT; while [ ! -e go ]; do sleep 0.05; done; echo done"


class Api:
    """Who listens as an API server does, and refuses us; or says nothing while it `hangs`."""

    def __init__(self, listening, tls=None):
        self.hangs = threading.Event()
        self.place = listening.getsockname()
        self._listening, self._tls = listening, tls
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        held = []
        while True:
            try:
                there = self._take()
            except OSError:  # it is closed
                return
            if self.hangs.is_set():
                held.append(there)
                continue
            with contextlib.suppress(OSError), there:
                there = self._tls.wrap_socket(there, server_side=True) if self._tls else there
                there.recv(100)
                there.sendall(b"HTTP/1.0 403 Forbidden\r\n\r\n")
                there.close()

    def _take(self):
        return self._listening.accept()[0]

    def close(self):
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()


class LedApi(Api):
    """The same, at the end of a node's way out, to which it is told who is wanted."""

    def __init__(self, path, tls):
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(path)
        listening.listen()
        super().__init__(listening, tls)

    def _take(self):
        there, _ = self._listening.accept()
        while there.recv(1) != b"\n":
            pass
        return there


@pytest.fixture
def api(cluster):  # noqa: F811
    found = Api(socket.create_server(("127.0.0.1", 0)))
    (cluster.credentials / "server").write_text("http://{}:{}\n".format(*found.place))
    yield found
    found.close()


@contextlib.contextmanager
def hub_hangs(cluster):  # noqa: F811
    """It takes connections, and says nothing to anybody."""
    over = threading.Event()
    cluster.hub._loop.call_soon_threadsafe(over.wait)
    try:
        yield
    finally:
        over.set()


def begin(cluster):  # noqa: F811
    """An agent, and ranks that run."""
    cluster.agent(log=cluster.directory / "agent.log", seconds=SECONDS)
    cluster.launch("sim", WORKS)
    cluster.until(messages.Started, "sim")
    assert wait_for(lambda: "sleep" in names(cluster))
    time.sleep(1.0)  # in which it finds that there is an API


def names(cluster):  # noqa: F811
    return [name for pid in ranks(cluster) for name in words(pid)]


def words(pid):
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline") as file:
        return file.read().split("\0")
    return []


def ranks(cluster):  # noqa: F811
    """The processes of the simulation."""
    return processes.members(f"DOVETAIL_DIR={cluster.session('one')}/sim")


def stand_still(cluster):  # noqa: F811
    return {state(pid) for pid in ranks(cluster)} == {"T"}


def go_on(cluster):  # noqa: F811
    """Whether they do all the time in which they would stand still if the node were cut off."""
    end = time.monotonic() + LONG
    while not stand_still(cluster):
        if time.monotonic() > end:
            return True
        time.sleep(0.2)
    return False


def finish(cluster):  # noqa: F811
    """Let the ranks end by themselves; their log."""
    (cluster.directory / "run/sim/case/go").touch()
    assert cluster.until(messages.Result, "sim").code == 0
    cluster.end("sim")
    return cluster.log("sim")


def said(cluster):  # noqa: F811
    return (cluster.directory / "agent.log").read_text().splitlines()


def test_a_node_takes_itself_for_cut_off_before_its_run_does():
    assert agent.CUT_OFF < nodes.LOST


def test_agents_are_told_where_the_api_is(tmp_path):
    made = {}
    server = "https://192.0.2.1:6443"
    there = SimpleNamespace(
        server=server, create=lambda path, thing: made.update({thing["kind"]: thing}),
        patch=lambda path, body: None,
    )  # fmt: skip
    seen = manifests.Folders(("/usr",), ("/dev/shm",))
    ours = SimpleNamespace(api=there, run="run", launcher=SimpleNamespace(seen=seen))
    hub = Hub("127.0.0.1", tmp_path / "hub")
    kubernetes.Session._start_agents(ours, hub)
    hub.close()
    assert made["Secret"]["stringData"]["server"] == server


def test_ranks_stand_still_while_nobody_answers_and_go_on_when_the_hub_does(cluster, api):  # noqa: F811
    begin(cluster)
    api.hangs.set()
    with hub_hangs(cluster):
        wait_for(lambda: stand_still(cluster))
    wait_for(lambda: not stand_still(cluster))
    assert "went on" in finish(cluster)
    assert said(cluster) == [
        "ranks are suspended: neither run nor API has answered for 2 s",
        "ranks go on: there is an answer again",
    ]


def goes_on_without_a_hub(cluster):  # noqa: F811
    cluster.hub.close()
    assert go_on(cluster)
    cluster.hub = Hub("127.0.0.1", cluster.directory / "hub")
    assert finish(cluster) == "done\n"


def test_ranks_go_on_without_the_hub_while_the_api_answers(cluster, api):  # noqa: F811
    begin(cluster)
    goes_on_without_a_hub(cluster)


def test_ranks_go_on_without_the_api_while_the_hub_is_there(cluster, api):  # noqa: F811
    begin(cluster)
    api.hangs.set()
    assert go_on(cluster)
    assert finish(cluster) == "done\n"


def test_where_no_api_was_ever_heard_its_silence_says_nothing(cluster, api):  # noqa: F811
    api.hangs.set()
    begin(cluster)
    goes_on_without_a_hub(cluster)


def test_what_is_suspended_stays_so_when_its_node_is_back(cluster, api):  # noqa: F811
    begin(cluster)
    cluster.hub.tell(messages.Suspend("sim", True))
    wait_for(lambda: stand_still(cluster))
    api.hangs.set()
    with hub_hangs(cluster):
        wait_for(lambda: said(cluster))
    wait_for(lambda: len(said(cluster)) == 2)
    time.sleep(1.0)
    assert stand_still(cluster)
    cluster.hub.tell(messages.Suspend("sim", False))
    assert "went on" in finish(cluster)


def test_what_was_given_up_meanwhile_does_not_go_on_for_a_moment(cluster, api):  # noqa: F811
    begin(cluster)
    api.hangs.set()
    with hub_hangs(cluster):
        wait_for(lambda: stand_still(cluster))
        cluster.hub.tell(messages.End("sim", 1))
    assert cluster.entrypoints["sim", 0].wait(120) == 1
    assert cluster.log("sim") == ""


def heard_by_a_hub_that_is_made_again(cluster, api):  # noqa: F811
    """Ranks that have begun stand still without hub and API; then there is a hub again."""
    begin(cluster)
    cluster.hub.close()
    api.hangs.set()
    wait_for(lambda: stand_still(cluster))
    cluster.hub = Hub("127.0.0.1", cluster.directory / "hub")
    cluster.until(messages.Pod, "sim")
    cluster.until(messages.Ping)


def test_nor_does_it_where_a_hub_that_is_made_again_has_yet_to_be_told_of_that(cluster, api):  # noqa: F811
    heard_by_a_hub_that_is_made_again(cluster, api)
    assert stand_still(cluster)
    cluster.hub.tell(messages.End("sim", 1))
    cluster.hub.answer("one")
    assert cluster.entrypoints["sim", 0].wait(120) == 1
    assert cluster.log("sim") == ""


def test_ranks_go_on_when_a_hub_that_is_made_again_has_been_told_of_them(cluster, api):  # noqa: F811
    heard_by_a_hub_that_is_made_again(cluster, api)
    cluster.hub.answer("one")
    wait_for(lambda: not stand_still(cluster))
    assert go_on(cluster), "it answers by itself from now on"
    assert "went on" in finish(cluster)


def test_a_pod_that_is_deleted_where_it_was_given_up_does_not_go_on(cluster, api):  # noqa: F811
    begin(cluster)
    api.hangs.set()
    with hub_hangs(cluster):
        wait_for(lambda: stand_still(cluster))
        cluster.entrypoints["sim", 0].terminate()
        assert cluster.entrypoints["sim", 0].wait(120) == 137
    assert cluster.until(messages.Result, "sim").cause is Cause.POD_LOST
    assert cluster.log("sim") == ""
    cluster.hub.tell(messages.End("sim", 1))


def test_ranks_go_on_once_the_api_alone_has_answered_for_long(cluster, api):  # noqa: F811
    """Until then the node ends the pods that it was to end."""
    begin(cluster)
    api.hangs.set()
    with hub_hangs(cluster):
        wait_for(lambda: stand_still(cluster))
        api.hangs.clear()
        back = time.monotonic()
        wait_for(lambda: not stand_still(cluster))
        assert time.monotonic() - back > SECONDS["SETTLED"]
    assert "went on" in finish(cluster)


def test_an_agent_that_is_started_again_has_ranks_go_on_that_stood_still(cluster, api):  # noqa: F811
    begin(cluster)
    api.hangs.set()
    with hub_hangs(cluster):
        wait_for(lambda: stand_still(cluster))
        cluster.agents["one"].kill()
        cluster.agents["one"].wait()
        cluster.agent()
        time.sleep(1.0)
        assert stand_still(cluster)
    assert "went on" in finish(cluster)


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("led", [False, True], ids=["straight", "by the way out"])
def test_an_api_is_heard_whatever_it_says(cluster, scheme, led):  # noqa: F811
    tls = None
    if scheme == "https":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(cluster.directory / "hub/hub.crt", cluster.directory / "hub/hub.key")
    with tempfile.TemporaryDirectory() as machine, socket.create_server(("127.0.0.1", 0)) as plain:
        (cluster.credentials / "server").write_text(
            "{}://{}:{}\n".format(scheme, *plain.getsockname())
        )
        ours = agent.Agent("", "one", cluster.credentials, "", machine)
        if led:
            plain.close()
            place = machine + way_out.PATH
            os.makedirs(os.path.dirname(place))
            found = LedApi(place, tls)
        else:
            found = Api(plain, tls)
        assert asyncio.run(ours._api_answers())
        found.close()
        assert not asyncio.run(ours._api_answers())
