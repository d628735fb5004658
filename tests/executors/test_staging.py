# SPDX-License-Identifier: LGPL-3.0-or-later
"""Folders that a node does not see come to it and go back, by an agent and a hub on one machine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import io
import itertools
import os
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from dovetail.core import eventlog, protocol
from dovetail.core.causes import Cause
from dovetail.executors.kubernetes import transfers
from dovetail.executors.pods import agent, connections, messages, samples, staging
from support.local_runs import LIMIT, wait_for
from support.pod_processes import cluster  # noqa: F401

pytestmark = pytest.mark.unit


@pytest.fixture
def node(cluster, tmp_path):  # noqa: F811
    """A node with a store and a pod of `sim`, and the folder of the controller that it may have."""
    return Node(cluster, tmp_path)


class Node:
    def __init__(self, cluster, tmp_path):  # noqa: F811
        self.cluster, self.hub, self.numbers = cluster, cluster.hub, itertools.count()
        self.machine, self.here = tmp_path / "machine", tmp_path / "here"
        (self.machine / "tmp").mkdir(parents=True)
        store = f"{staging.STORES}{cluster.run}"
        self.there = Path(f"{self.machine}{store}/sim")
        self.here.mkdir()
        self.hub.copies.open("sim", str(self.here), "out")
        self.hub.look({}, store)
        cluster.agent(machine=str(self.machine))
        cluster.entrypoint("sim")
        cluster.until(messages.Pod, "sim")
        wait_for(lambda: "one" in self.hub.unseen())

    def stage(self, way, folder="sim", meanwhile=lambda: None):
        """Copy; what went wrong."""
        number = next(self.numbers)
        assert self.hub.send("one", messages.Stage(
            "sim", number, folder, way, self.hub.copies.port))  # fmt: skip
        meanwhile()
        return self.cluster.until(messages.Staged, "sim", number=number).trouble

    def end(self):
        self.cluster.end("sim")
        wait_for(lambda: not self.there.exists())


def content(folder):
    """All in a folder: modes, texts, where links lead."""
    return {
        str(path.relative_to(folder)): (
            oct(path.lstat().st_mode),
            os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "",
        )
        for path in folder.rglob("*")
    }


def test_a_folder_comes_and_what_was_changed_there_goes_back(node):
    (node.here / "system").mkdir(mode=0o500)
    (node.here / "system" / "controlDict").write_text("endTime 1;")
    (node.here / "big").write_bytes(os.urandom(3 << 20))
    (node.here / "run").write_text("#!/bin/sh")
    (node.here / "run").chmod(0o755)
    (node.here / "link").symlink_to("../nowhere")
    (node.here / "empty").mkdir()
    os.mkfifo(node.here / "pipe")
    assert node.stage("in") == ""
    (node.here / "pipe").unlink()
    assert content(node.there) == content(node.here)
    assert node.there.parent.stat().st_mode & 0o77 == 0, "others cannot look into the store"

    kept = (node.here / "big").stat()
    (node.there / "processor0").mkdir()
    (node.there / "processor0" / "U").write_text("nonuniform")
    (node.there / "system" / "controlDict").write_text("endTime 2;")  # as long as before
    (node.there / "run").unlink()
    (node.here / "of another node").touch()
    assert node.stage("out") == ""
    assert (node.here / "big").stat() == kept, "what is the same is not written"
    (node.here / "of another node").unlink()
    assert content(node.there) == content(node.here)
    node.end()


def test_names_may_be_as_long_as_there_are_and_of_any_bytes(node):
    for name in (b"x" * 255, "\u00e9".encode() * 127, b"\xff" * 255, b"two\nlines", b"part"):
        Path(os.fsdecode(bytes(node.here) + b"/" + name)).write_bytes(name)
    assert node.stage("in") == ""
    assert content(node.there) == content(node.here)
    (node.there / "x").with_name("y" * 255).touch()
    assert node.stage("out") == ""
    assert content(node.there) == content(node.here)
    node.end()


def test_what_went_wrong_with_a_name_of_any_bytes_can_be_read_in_a_log(tmp_path):
    with pytest.raises(staging.StagingError) as wrong:
        staging.listing(os.fsdecode(bytes(tmp_path) + b"/\xff"))
    assert str(wrong.value) == f"{tmp_path}/?: No such file or directory"
    said = eventlog.plain(protocol.Note("fail", str(wrong.value)))
    assert eventlog._checked(protocol.Note, said) == protocol.Note("fail", str(wrong.value))


def test_what_is_in_the_case_is_copied_here_and_not_sent(node, tmp_path, monkeypatch):
    case, made, copied = tmp_path / "case", {}, staging._copied

    def seen(path, *more):
        made[Path(path).name] = copied(path, *more)
        return made[Path(path).name]

    monkeypatch.setattr(staging, "_copied", seen)  # of the hub, which is in this process
    case.mkdir()
    (case / "mesh").write_bytes(os.urandom(3 << 20))
    (case / "changed").write_text("as delivered")
    node.hub.copies.open("cases.1", str(case), "in")
    assert node.stage("in", "cases.1") == ""
    shutil.copytree(node.there.parent / "cases.1", node.there / "case")
    (node.there / "case" / "changed").write_text("as prepared!")
    (case / "changed").write_text("edited since")
    assert node.stage("out") == ""
    assert content(node.there) == content(node.here)
    assert made == {"mesh": True, "changed": False}
    (node.here / "case" / "mesh").unlink()
    (case / "mesh").write_bytes(bytes(3 << 20))  # no longer what it was
    (node.there / "case" / "new").touch()
    (node.there.parent / ".sim.json").unlink()  # it begins anew
    assert node.stage("out") == ""
    assert content(node.there) == content(node.here)
    assert made == {"mesh": False, "changed": False, "new": False}
    node.end()


def test_modes_and_times_go_back_where_contents_are_the_same_and_links_stay(node):
    script = node.here / "run"
    script.write_text("#!/bin/sh")
    (node.here / "link").symlink_to("run")
    link = (node.here / "link").lstat()
    assert node.stage("in") == ""
    (node.there / "run").chmod(0o755)
    os.utime(node.there / "run", (1e9, 1e9))
    os.utime(node.there / "link", (1e9, 1e9), follow_symlinks=False)
    assert node.stage("out") == ""
    assert (oct(script.stat().st_mode & 0o777), script.stat().st_mtime) == ("0o755", 1e9)
    assert (node.here / "link").lstat() == link
    node.end()


def test_a_folder_goes_when_its_copy_has_ended(node):
    """Another copy, as of a node of the same machine, has the folder's lock."""
    (node.here / "input").write_text("x")
    assert node.stage("in") == ""
    with open(staging.records(str(node.there.parent), "sim")[1]) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        node.cluster.end("sim")
        time.sleep(1)
        assert (node.there / "input").exists()
    wait_for(lambda: not node.there.exists())


def test_what_a_pod_wrote_that_was_killed_can_be_fetched_until_the_end_is_known(node):
    """As where the kernel has killed it for memory, and the agent too."""
    node.there.mkdir(parents=True)
    (node.there / "output").write_text("x")
    node.cluster.entrypoints["sim", 0].kill()
    node.cluster.until(messages.Lost, "sim")
    assert node.stage("out") == ""
    assert content(node.there) == content(node.here)
    with node.cluster.another_pod():
        node.cluster.agents["one"].kill()
        node.cluster.until(messages.Gone)
        node.cluster.agent(machine=str(node.machine))
        node.cluster.until(messages.Lost, "sim")
    (node.there / "more").write_text("y")
    assert node.stage("out") == ""
    assert content(node.there) == content(node.here)
    node.hub.tell(messages.End("sim", 1))
    wait_for(lambda: not node.there.exists())
    wait_for(lambda: not (node.cluster.session("one") / "sim").exists())


def test_a_folder_of_which_nothing_was_ever_copied_goes_too(node):
    node.there.mkdir(parents=True)
    node.end()


def test_a_folder_that_is_opened_again_has_no_parts_of_files(node, tmp_path):
    """They are what a killed controller left; what the user has moved elsewhere is left alone."""
    elsewhere, case = tmp_path / "elsewhere", node.here / "case"
    for folder in (elsewhere, case):
        folder.mkdir()
        (folder / "U.0123abcd.part").touch()
    (case / "U.part").touch()
    (node.here / "moved").symlink_to(elsewhere)
    node.hub.copies.open("sim", str(node.here), "out")
    assert len([*case.iterdir()]) == 2, "who opens it does not wait for that"
    assert node.stage("in") == ""
    assert [one.name for one in case.iterdir()] == ["U.part"]
    assert [*elsewhere.iterdir()]
    node.end()


def test_nothing_is_kept_of_a_folder_that_is_shut_but_of_a_case(node, tmp_path):
    """A run has thousands of them, and each may have thousands of files."""
    case, copies = tmp_path / "case", node.hub.copies
    case.mkdir()
    copies.open("cases.1", str(case), "in")
    for folder in ("sim", "cases.1"):
        assert node.stage("in", folder) == ""
    wait_for(lambda: {*copies._listings} == {str(node.here), str(case)})
    copies.shut("sim")
    assert [*copies._listings] == [str(case)]
    node.end()


def test_what_cannot_be_copied_is_said(node):
    assert node.stage("in", "cases.0"), "not opened"
    (node.here / "input").write_text("x")
    assert node.stage("in") == ""
    (node.there / "new").write_text("y")
    (node.here / "input").unlink()
    node.here.rmdir()
    node.here.touch()  # a file is in the way
    assert re.fullmatch(rf"{node.here}.*: (Not a directory|File exists)", node.stage("out"))
    node.here.unlink()
    node.here.mkdir()
    node.end()


def stopped_in_a_copy(node):
    """The agent, which does not go on with a large file that it sends."""
    agent = node.cluster.agents["one"]
    node.there.mkdir(parents=True)
    (node.there / "large").write_bytes(bytes(256 << 20))
    assert node.hub.send("one", messages.Stage("sim", 1, "sim", "out", node.hub.copies.port))
    wait_for(lambda: node.hub.copies.copied("one", "sim")[0] > 0)
    agent.send_signal(signal.SIGSTOP)
    return agent


def test_no_part_of_a_file_is_left_by_a_hub_that_ends(node):
    """The agent is stopped in the midst of a copy, so that the hub waits for it."""
    agent = stopped_in_a_copy(node)
    assert [one.suffix for one in node.here.iterdir()] == [".part"]
    node.hub.close()
    assert not [*node.here.iterdir()]
    agent.send_signal(signal.SIGCONT)


def test_a_node_that_was_away_writes_nothing_after_its_launch_is_over(node):
    """It is stopped in the midst of a copy, and tries again when it goes on."""
    agent = stopped_in_a_copy(node)
    node.hub.copies.shut("sim")
    wait_for(lambda: not [*node.here.iterdir()])
    agent.send_signal(signal.SIGCONT)
    assert node.cluster.until(messages.Staged, "sim", number=1).trouble
    assert not [*node.here.iterdir()]
    node.end()


@pytest.fixture
def small(tmp_path):
    """A file system of 1 MB for both sides; fills it, and makes room again."""
    if os.getuid() != 0:
        pytest.skip("only root can mount one")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "test", tmp_path], check=True)

    def fill():
        with contextlib.suppress(OSError), (tmp_path / "fill").open("wb", buffering=0) as file:
            while file.write(bytes(4096)):
                pass

    yield fill, (tmp_path / "fill").unlink
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def test_a_copy_waits_for_room_and_then_is_made(small, node):
    """A disk that is full for a time costs no simulation its case, and none its results."""
    fill, make_room = small

    def wait():
        time.sleep(1)
        node.cluster.heard += node.hub.take()
        assert not any(isinstance(one, messages.Staged) for _, one in node.cluster.heard)
        make_room()

    (node.here / "input").write_bytes(os.urandom(9000))
    for way in ("in", "out"):
        fill()
        assert node.stage(way, meanwhile=wait) == ""
        assert content(node.there) == content(node.here)
        (node.there / "output").write_bytes(os.urandom(9000))
    node.end()


def test_of_a_disk_that_cannot_be_written_to_any_more_results_come_and_nothing_goes_there(
    small, node
):
    """As a kernel makes one that has errors."""
    (node.here / "input").write_text("x")
    assert node.stage("in") == ""
    (node.there / "0.1").write_text("y")
    store = str(node.there.parent)
    subprocess.run(["mount", "--bind", store, store], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", store], check=True)
    try:
        assert node.stage("out") == ""
        assert content(node.there) == content(node.here)
        assert node.stage("in") == f"{store}/.sim.lock: Read-only file system"
    finally:
        subprocess.run(["umount", "--lazy", store], check=True)
    node.end()


def test_a_lock_that_cannot_be_had_is_told_and_not_tried_for_ever(node):
    lock = Path(staging.records(str(node.there.parent), "sim")[1])
    lock.mkdir()
    for way in ("in", "out"):
        assert node.stage(way) == f"{lock}: Is a directory"
    lock.rmdir()
    node.end()


def test_results_come_from_a_disk_without_room_for_the_record_of_that(small, node, tmp_path):
    """Nobody waits for room there, and what goes away afterwards goes here as well."""
    fill, make_room = small
    (node.here / "input").write_text("x")
    assert node.stage("in") == ""
    record = Path(staging.records(str(node.there.parent), "sim")[0])
    known = record.read_text()
    (node.there / "0.1").write_text("y")
    fill()
    os.truncate(tmp_path / "fill", (tmp_path / "fill").stat().st_size - 4096)  # for it here
    assert node.stage("out") == ""
    assert content(node.there) == content(node.here)
    assert record.read_text() == known
    make_room()
    (node.there / "0.1").unlink()
    assert node.stage("out") == ""
    assert content(node.there) == content(node.here)
    node.end()


def test_what_has_not_come_to_a_node_is_not_taken_for_removed_there(small, node, tmp_path):
    """There is room for the records of a copy, and not for the file: it is tried again and again.

    Between two tries what the node has is fetched, as where the user does not wait for the first.
    """
    fill, make_room = small
    (node.here / "checkpoint").write_bytes(os.urandom(200_000))
    kept = content(node.here)
    fill()
    os.truncate(tmp_path / "fill", (tmp_path / "fill").stat().st_size - 64_000)
    assert node.hub.send("one", messages.Stage("sim", 99, "sim", "in", node.hub.copies.port))
    wait_for(node.there.exists)
    assert node.stage("out") == ""
    assert content(node.here) == kept
    make_room()
    assert node.cluster.until(messages.Staged, "sim", number=99).trouble == ""
    assert content(node.there) == kept
    node.end()


def test_a_node_tells_which_folders_are_not_the_same_there(node, tmp_path):
    case, shared = tmp_path / "case", node.machine / "shared"
    for folder in (case, Path(f"{node.machine}{case}"), shared):
        folder.mkdir(parents=True)
        (folder / "input").write_text("x")
    times = (case / "input").stat()
    os.utime(f"{node.machine}{case}/input", ns=(times.st_atime_ns, times.st_mtime_ns))
    asked = {str(case): staging.mark(str(case)), "/shared": "", "/shared/input": ""}
    asked["/nowhere"] = ""
    node.hub.look(asked)
    assert wait_for(lambda: node.hub.unseen()["one"]) == ["/nowhere"]
    (case / "input").write_text("of another size")
    node.hub.look({str(case): staging.mark(str(case))})
    assert wait_for(node.hub.unseen)["one"] == [str(case)]
    node.end()


def test_links_on_a_node_lead_where_they_do_there(node):
    there = node.machine / "gpfs/home/a/case"
    there.mkdir(parents=True)
    (there / "input").write_text("x")
    links = {
        "home": "/gpfs/home",
        "scratch": "gpfs/../gpfs",
        "gpfs/home/a/near": "./case/../case",
        "up": "../../../../gpfs",
        "circle": "/circle",
        "outside": str(node.here),  # which is on our machine alone
    }
    for name, target in links.items():
        (node.machine / name).symlink_to(target)
    seen = ["/home/a/case", "/scratch/home/a", "/home/a/near", "/up/home", "/home/../home/a"]
    missing = ["/circle", "/circle/a", "/outside", "/home/b"]
    mark = staging.mark(str(there.parent))
    node.hub.look({**dict.fromkeys((*seen, *missing), ""), "/home/a": mark})
    assert wait_for(lambda: node.hub.unseen()["one"]) == missing
    node.end()


@pytest.mark.parametrize("links", [40, 41])
def test_as_many_links_are_followed_as_the_kernel_follows(tmp_path, links):
    (tmp_path / "0").mkdir()
    for number in range(links):
        (tmp_path / f"{number + 1}").symlink_to(f"{number}")
    assert (tmp_path / f"{links}").exists() is (links == 40)
    with (
        contextlib.nullcontext() if links == 40 else pytest.raises(OSError, match="symbolic links")
    ):
        assert agent.beneath(str(tmp_path), f"/{links}") == f"{tmp_path}/0"


@pytest.mark.parametrize("name", ["../out", "/out", "a/../../out", "", "link/out", "folder/./out"])
def test_nothing_is_written_outside_the_folder(tmp_path, name):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "link").symlink_to(tmp_path)
    entry = [staging.FILE, 0o644, 1, [0, 0, 0], "0" * 64]

    with pytest.raises(staging.StagingError):
        staging.receive(str(folder), Sender({name: entry}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder"]


def test_nothing_is_removed_outside_the_folder(tmp_path):
    """Where the user has moved a folder elsewhere, and left a link to it."""
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    for one in (folder, elsewhere):
        one.mkdir()
        (one / "U").touch()
    (folder / "moved").symlink_to(elsewhere)
    staging.receive(str(folder), Sender({}, ["moved/U", "U"]))
    assert [one.name for one in folder.iterdir()] == ["moved"]
    assert [one.name for one in elsewhere.iterdir()] == ["U"]


def test_no_part_of_a_file_is_left_where_one_is_copied_here_as_the_connection_ends(tmp_path):
    folder, same = tmp_path / "folder", tmp_path / "same"
    same.write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    link = Sender({"U": [staging.FILE, 0o644, 1, [0, 0, 0], digest]})
    link.ended = True
    with pytest.raises(EOFError):
        staging.receive(str(folder), link, held={digest: str(same)})
    assert not [*folder.iterdir()]


def test_a_copy_is_tried_again_where_no_thread_can_be_had_and_else_answered(tmp_path):
    """Else whoever waits for it would wait for ever."""
    one = agent.Simulation("sim", str(tmp_path), samples.Reader(str(tmp_path)))
    node = agent.Agent(str(tmp_path), "one", tmp_path, "", "")
    tries = [RuntimeError("can't start new thread"), MemoryError("no room for a listing")]

    async def fail(*of):
        raise tries.pop(0)

    node._transfer = fail
    asked = messages.Stage("sim", 1, "sim", "out", 0)
    asyncio.run(asyncio.wait_for(node._stage(one, asked), LIMIT))
    assert one.stages[1].trouble == "MemoryError: no room for a listing"
    assert not tries


def test_an_agent_that_ends_says_nothing_of_a_store_that_goes(tmp_path):
    """A thread of its own may list a folder at that moment, and would tell that nothing is left."""
    one = agent.Simulation("sim", str(tmp_path / "sim"), samples.Reader(str(tmp_path / "sim")))
    one.told[messages.Result] = messages.Result("sim", Cause.DONE, 0, "", "")
    node = agent.Agent(str(tmp_path), "one", tmp_path, "", "")
    node.simulations["sim"] = one
    here, there = socket.socketpair()
    there.settimeout(LIMIT)
    one.links.add(connections.Channel(here))

    async def end():
        asyncio.get_running_loop().call_later(0.1, os.kill, os.getpid(), signal.SIGTERM)
        await node.run()

    asyncio.run(end())
    assert there.recv(1) == b"", "its connection has ended"
    assert one.end, "and none is begun"
    here.close()
    there.close()


def test_what_goes_away_while_a_folder_is_listed_is_not_there(tmp_path, monkeypatch):
    """As a solver removes old times, and renames what it has written. The folder itself must be."""
    folder, lstat = tmp_path / "folder", os.lstat
    for name in ("0.1", "0.2"):
        (folder / name).mkdir(parents=True)
        (folder / name / "U").touch()
    (folder / "new.tmp").touch()

    def removed(path, **more):
        state = lstat(path, **more)
        if str(path) == f"{folder}/new.tmp":
            monkeypatch.undo()
            (folder / "new.tmp").unlink()
            shutil.rmtree(folder / "0.1")
        return state

    monkeypatch.setattr(os, "lstat", removed)
    assert {*staging.listing(str(folder))} - {"0.1"} == {"0.2", "0.2/U"}

    def all_removed(path, **more):
        monkeypatch.undo()
        shutil.rmtree(folder)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    monkeypatch.setattr(os, "lstat", all_removed)
    for _ in range(2):
        with pytest.raises(staging.StagingError, match=f"{folder}: No such file"):
            staging.listing(str(folder))


def test_of_a_folder_that_comes_again_each_file_is_read_once(tmp_path, monkeypatch):
    """As a case does for each simulation that starts on a node; what is to go is not read."""
    read = []
    monkeypatch.setattr(staging, "digest_of", lambda path: read.append(path) or digest)
    digest = hashlib.sha256(b"x").hexdigest()
    for name in ("mesh", "old"):
        (tmp_path / name).write_bytes(b"x")
    there = {"mesh": [staging.FILE, 0o644, 1, [0, 0, 0], digest]}
    assert {*staging.receive(str(tmp_path), Sender(there, whole=True))} == {"mesh"}
    assert (read, os.listdir(tmp_path)) == ([f"{tmp_path}/mesh"], ["mesh"])


@pytest.mark.parametrize("held", [True, False])
def test_a_file_is_not_whole_whose_disk_is_full_only_as_it_is_closed(tmp_path, monkeypatch, held):
    """As NFS tells of a quota."""
    folder, same, close = tmp_path / "folder", tmp_path / "same", os.close

    def full(file):
        path = os.readlink(f"/proc/self/fd/{file}")
        close(file)
        if path.endswith(".part"):
            raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "close", full)
    same.write_bytes(b"x")
    digest = hashlib.sha256(b"x").hexdigest()
    link = Sender({"U": [staging.FILE, 0o644, 1, [0, 0, 0], digest]})
    with pytest.raises(staging.StagingError, match=f"{folder}/U: Disk quota") as told:
        staging.receive(str(folder), link, held={digest: str(same)} if held else {})
    assert told.value.full
    assert not [*folder.iterdir()]


class Sender:
    """Says what a folder has, and what it has not any more, and then sends a byte."""

    ended = False

    def __init__(self, there, gone=(), whole=False):
        text = staging.packed({"there": there, "gone": gone, "whole": whole, "trouble": ""})
        self.fill = io.BytesIO(text + b"x").readinto

    def write(self, data):
        pass


def test_how_far_a_copy_is_that_somebody_waits_for_is_told_now_and_then(node):
    """Of a node that has no agent, and of one that was sent a part."""
    copies = transfers.Transfers(node.hub)
    began = time.monotonic()
    copies.begin("sim", [("two", "sim", "in")], print, "its case")
    copies.begin("other", [("two", "other", "out")], print)  # for which nobody waits
    assert [*copies.progress(began + 1)] == []
    told = [*copies.progress(began + transfers.TELL + 1)]
    assert told == [("sim", "its case is to be copied to node two, since 6 s")]
    node.hub.copies._copied["two", "sim"] = 256_000_000, 1_024_000_000
    assert [*copies.progress(began + transfers.TELL + 2)] == []
    ((_, words),) = copies.progress(began + 2 * transfers.TELL + 2)
    assert words == "its case is copied to node two: 256 of 1,024 MB, about 36 s more"
    node.end()
