# SPDX-License-Identifier: LGPL-3.0-or-later
"""Input, leases, records."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import fcntl
import io
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import processes
from dovetail.host.private_files import write_private
from support.clusters import eventually, node
from usernetes_setup import __main__ as verbs
from usernetes_setup import cluster, node_options, node_record
from usernetes_setup.build import programs
from usernetes_setup.node import cgroups, components, monitor, namespaces, supervisor
from usernetes_setup.node_record import NodeState
from usernetes_setup.preflight import machine, report
from usernetes_setup.upstream import verbs as upstream
from usernetes_setup.upstream.record import Record

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("private_state")]
STATE = f"/tmp/dovetail-test-{os.getpid()}"  # short: a node's sockets have room


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [("1Gi", 1 << 30), ("512Mi", 512 << 20), ("2G", 2 * 10**9), ("0.5Gi", 1 << 29)],
)
def test_memory_is_read_with_its_unit(wanted, meant):
    assert node_options.memory(wanted) == meant


@pytest.mark.parametrize(
    "wanted", ["1", "-1Gi", "9999Ti", "lots", "1GB", "100Mi", "9" * 400, f"{'9' * 400}.5Gi"]
)
def test_absurd_memory_is_refused(wanted):
    with pytest.raises(BadInput, match="--memory"):
        node_options.memory(wanted)


@pytest.mark.parametrize(
    "wanted",
    ["0", "100000", "-1", "a", "0-", "99999", "1,,2", "0-1,0-3000000000", "\u00b2", "9" * 5000],
)
def test_cores_that_are_not_there_are_refused(wanted):
    with pytest.raises(BadInput, match="--cpus"):
        node_options.cores(wanted)


def test_a_device_for_more_pods_than_can_be_read_is_refused():
    with pytest.raises(BadInput, match="is for a number of pods at once"):
        node_options.devices(f"/dev/null={'9' * 5000}")


def test_cores_are_ours_and_as_many_as_asked_for():
    usable = os.sched_getaffinity(0)
    assert node_options.cores("") == (sorted(usable), len(usable))
    assert node_options.cores("1") == (sorted(usable), 1)
    one = min(usable)
    assert node_options.cores(f"{one}-{one}") == ([one], 1)


@pytest.mark.parametrize("name", ["", "A", "a/b", "..", "-a", "a" * 21, "a b"])
def test_cluster_names_that_could_leave_the_folder_are_refused(name):
    with pytest.raises(BadInput, match="cluster name"):
        node_record.cluster_folder(name)


@pytest.mark.parametrize("address", ["0.0.0.0", "127.0.0.1", "203.0.113.9", "::1", "host"])
def test_addresses_too_wide_or_not_ours_are_refused(address):
    with pytest.raises(BadInput, match="--address"):
        node_options.own_address(address)


def test_a_state_folder_that_others_can_open_is_refused(private_state):
    (private_state / "state").mkdir(mode=0o755)
    (private_state / "state").chmod(0o755)
    with pytest.raises(BadInput, match="0700"):
        node_record.root()


def test_a_state_folder_that_is_a_link_is_refused(private_state):
    (private_state / "elsewhere").mkdir(mode=0o700)
    (private_state / "state").symlink_to(private_state / "elsewhere")
    with pytest.raises(BadInput, match="state"):
        node_record.root()


def test_a_state_folder_that_cannot_be_made_is_refused(private_state, monkeypatch):
    (private_state / "file").touch()
    monkeypatch.setenv("DOVETAIL_STATE", str(private_state / "file/state"))
    with pytest.raises(BadInput, match="file/state cannot be made: Not a directory; set"):
        node_record.root(make=True)
    assert (machine.disk().level, machine.disk().who) == ("error", "user")


def test_a_state_folder_that_is_not_the_users_to_look_at_is_refused(private_state, monkeypatch):
    def closed(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "lstat", closed)
    with pytest.raises(BadInput, match="cannot be looked at: Permission denied; set DOVETAIL_STA"):
        node_record.clusters()


def test_whoever_only_asks_makes_no_state_folder(private_state):
    assert (node_record.clusters(), node_record.nodes("one")) == ([], [])
    assert machine.disk().level == "ok"
    assert list(private_state.iterdir()) == []


def test_what_else_the_state_folder_holds_is_nobodys_to_list_or_remove(private_state):
    kept = node_record.root(make=True) / "results/nodes/mesh.dat"
    kept.parent.mkdir(parents=True)
    kept.write_text("a month's work")
    assert node_record.clusters() == []
    for verb in (cluster.down, lambda name: node_record.locked(name).__enter__()):
        with pytest.raises(BadInput, match="cluster results: .* is no cluster's, and holds nodes"):
            verb("results")
    assert kept.exists()
    assert not (node_record.root() / "results.lock").exists()


def test_of_a_clusters_folder_all_goes_but_what_its_user_put_there(private_state):
    folder = node_record.root(make=True) / "one"
    (folder / "nodes/new-1").mkdir(parents=True)  # of a verb that was killed
    for name in ("one.lock", "one/.kubeconfig.12.new", "one/invite-0", "one/notes"):
        (node_record.root() / name).touch()
    assert node_record.clusters() == ["one"]
    with pytest.raises(WorkFailed, match="one: stays, since it holds notes"):
        cluster.down("one")
    assert os.listdir(folder) == ["notes"]
    assert node_record.clusters() == []
    (folder / "notes").unlink()
    cluster.down("one")
    assert not node_record.root().exists()


def test_what_is_left_of_a_cluster_whose_records_were_aged_is_removed():
    """systemd-tmpfiles takes from /tmp, file by file, what nobody used for some days."""
    folder = node_record.root(make=True) / "one/nodes/127.77.1.1"
    (folder / "log").mkdir(parents=True)
    (folder / "log/kubelet").touch()
    assert node_record.clusters() == [], "a user may have such a file"
    (folder / "etcd/member").mkdir(parents=True)
    assert node_record.clusters() == ["one"]
    cluster.down("one")
    assert not node_record.root().exists()


def test_a_folder_that_is_not_the_users_to_search_is_passed_over(private_state):
    """Root may search any, but for these capabilities."""
    (node_record.root(make=True) / "another").mkdir(mode=0o000)
    code = (
        "from usernetes_setup import cluster\nprint(cluster.status(''))\ncluster.down('another')\n"
    )
    bound = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    words = [*(bound if os.getuid() == 0 else []), sys.executable, "-c", code]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "[]\n"), done.stderr
    assert "BadInput: cluster another: " in done.stderr
    assert "is no cluster's, and holds what you may not see;" in done.stderr


def test_a_relative_path_is_the_same_for_a_monitor_elsewhere(private_state, monkeypatch):
    monkeypatch.chdir(private_state)
    monkeypatch.setenv("DOVETAIL_STATE", "state")
    monkeypatch.setenv("DOVETAIL_CACHE", "cache")
    assert node_record.root() == private_state / "state"
    assert programs.cache() == private_state / "cache/kube"


def test_two_verbs_do_not_change_one_cluster_at_once():
    with (
        node_record.locked("one"),
        pytest.raises(WorkFailed, match="another"),
        node_record.locked("one"),
    ):
        pass
    with node_record.locked("one"):
        pass


def test_what_a_killed_verb_left_is_removed_and_nothing_is_made_for_that(private_state):
    node_record.wait_unlocked("one")
    assert not (private_state / "state").exists()
    node_record.root(make=True)
    node_record.wait_unlocked("one")
    assert not (private_state / "state").exists()
    (node_record.root(make=True) / "one.lock").touch()
    node_record.wait_unlocked("one")
    assert not (private_state / "state").exists()
    (node_record.root(make=True) / "one").mkdir()
    (node_record.root() / "one.lock").touch()
    node_record.wait_unlocked("one")
    assert (node_record.root() / "one.lock").exists(), "it goes with its cluster"


def test_a_verb_that_is_killed_after_another_leaves_nothing_either():
    """The first ends well, and the second begins and dies before we are woken."""
    lock, code = node_record.root(make=True) / "one.lock", "from usernetes_setup import node_record"
    waiting = [sys.executable, "-c", f"{code}; node_record.wait_unlocked('one')"]
    with open(lock, "w") as first, open(lock.with_suffix(".new"), "w") as second:
        fcntl.flock(first, fcntl.LOCK_EX)
        fcntl.flock(second, fcntl.LOCK_EX)
        with subprocess.Popen(waiting) as waiter:
            assert eventually(lambda: any(
                "->" in line and f":{lock.stat().st_ino} " in line
                for line in Path("/proc/locks").read_text().splitlines()))  # fmt: skip
            lock.with_suffix(".new").rename(lock)
            first.close()
            second.close()
            assert waiter.wait(60) == 0
    assert not lock.exists()


def running(process):
    return process.pid, processes.start_ticks(process.pid)


@pytest.mark.parametrize(
    ("inside", "outside", "state"),
    [(True, True, NodeState.RUNNING), (True, False, NodeState.UNMONITORED),
     (False, True, NodeState.MONITOR_ALONE), (False, False, NodeState.DEAD)],
    ids=lambda value: value.value if isinstance(value, NodeState) else str(value),
)  # fmt: skip
def test_what_runs_of_a_node_is_one_state(inside, outside, state):
    with subprocess.Popen(["sleep", "600"]) as program:
        pid, ticks = running(program)
        here = node(supervisor=pid, supervisor_ticks=ticks if inside else ticks - 1,
                    monitor=pid, monitor_ticks=ticks if outside else ticks - 1)  # fmt: skip
        assert here.state() is state
        assert here.alive() is inside
        program.kill()


def test_the_record_of_a_node_that_an_earlier_version_started_is_understood():
    here = node()
    node_record.root(make=True)
    here.folder.mkdir(parents=True)
    fields = {**vars(here), "keeper": 12, "keeper_ticks": 34}
    del fields["monitor"], fields["monitor_ticks"]
    (here.folder / "node.json").write_text(json.dumps(fields))
    assert [(one.monitor, one.monitor_ticks) for one in node_record.nodes("c")] == [(12, 34)]


def test_a_component_that_fails_starts_again_later_each_time_and_one_that_is_done_does_not():
    for once, code, after in [
        (False, 0, supervisor.ComponentState.WAITING),
        (False, 1, supervisor.ComponentState.WAITING),
        (True, 1, supervisor.ComponentState.WAITING),
        (True, 0, supervisor.ComponentState.DONE),
    ]:
        one = supervisor.Component(components.Command("c", ["c"], lambda: True, once=once))
        assert one.may_start()
        pauses = []
        for _ in range(8 if after is supervisor.ComponentState.WAITING else 1):
            one.runs(1)
            assert not one.may_start()
            one.ended(code)
            assert one.state is after, (once, code)
            assert not one.may_start()
            pauses.append(round(one.not_before - one.started, 1))
        if after is supervisor.ComponentState.WAITING:
            assert pauses == sorted(pauses)
            assert pauses[0] == pytest.approx(supervisor.BACKOFF, abs=0.1)
            assert pauses[-1] == pytest.approx(5, abs=0.1)
            one.runs(1)
            one.started -= supervisor.STEADY + 1  # it ran for long, which counts as a success
            one.ended(code)
            assert one.failures == 1


def test_a_component_that_fails_for_hours_ends_nobody():
    """A full disk over night is 5000 failures, one each 5 s and more."""
    one = supervisor.Component(components.Command("c", ["c"], lambda: True))
    for _ in range(5000):
        one.runs(1)
        one.ended(1)
    assert one.not_before - one.started == pytest.approx(5, abs=1)


def test_a_component_waits_for_what_is_used_up_and_its_node_goes_on(monkeypatch):
    tries = [OSError(errno.EAGAIN, "too many processes"), OSError(errno.ENOSPC, "no space"), 7]

    def start(self, command):
        if isinstance(one := tries.pop(0), OSError):
            raise one
        return one

    monkeypatch.setattr(supervisor.Supervisor, "_start", start)
    found = supervisor.Supervisor(node(), [components.Command("c", ["c"], lambda: True)])
    (one,) = found.components
    while tries:
        found.start_ready()
        one.not_before = 0.0
    assert (one.state, one.pid, one.failures) == (supervisor.ComponentState.RUNNING, 7, 2)
    tries.append(OSError(errno.ENOENT, "no such program"))
    one.state = supervisor.ComponentState.WAITING
    with pytest.raises(OSError, match="no such program"):
        found.start_ready()


def test_only_our_helpers_among_the_components_get_our_pythons_libraries(monkeypatch):
    here = node()
    node_record.root(make=True)
    (here.folder / "log").mkdir(parents=True)
    monkeypatch.setenv("PYTHONPATH", "")
    monkeypatch.setenv("LD_LIBRARY_PATH", "/a/module/lib")
    monkeypatch.setattr(sys, "executable", "/bin/sh")
    for name, shell in (("ours", "/bin/sh"), ("other", "sh")):
        words = [shell, "-c", "echo ${LD_LIBRARY_PATH-none}"]
        command = components.Command(name, words, lambda: True)
        os.waitpid(supervisor.Supervisor(here, [])._start(command), 0)
    assert (here.folder / "log/ours").read_text() == "/a/module/lib\n"
    assert (here.folder / "log/other").read_text() == "none\n"


def test_a_damaged_record_is_not_a_node():
    folder = node_record.root(make=True) / "c/nodes/n"
    folder.mkdir(parents=True)
    (folder / "node.json").write_text('{"cluster": "c"')
    assert node_record.nodes("c") == []


def test_a_lease_ends_with_its_holder_however_it_dies():
    code = (
        "import sys, time; from usernetes_setup.node import namespaces;"
        "h = namespaces.lease(sys.argv[1]); print(bool(h), flush=True); time.sleep(600)"
    )
    name = f"test-{os.getpid()}"
    with subprocess.Popen([sys.executable, "-c", code, name], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"True\n"
        assert namespaces.lease(name) is None
        other.kill()
    held = namespaces.lease(name)
    assert held
    held.close()


def test_leased_ports_and_addresses_are_all_different():
    leases = [namespaces.lease_loopback() for _ in range(20)]
    ports = [namespaces.lease_port("127.0.0.1") for _ in range(20)]
    assert len({address for address, _ in leases}) == 20
    assert len({port for port, _ in ports}) == 20
    clients = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    if clients[0] == "32768":  # as the kernel has it, unless somebody else chooses
        assert all(port < int(clients[0]) for port, _ in ports), "no connection takes it meanwhile"
    for _, held in [*leases, *ports]:
        held.close()


def test_a_group_is_made_while_the_one_above_is_removed_again_and_again(tmp_path):
    """The last node of root's that ends takes it away, when another one may begin."""
    above, over = tmp_path / "above", threading.Event()

    def nodes_that_end() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):
                above.rmdir()

    others = threading.Thread(target=nodes_that_end)
    others.start()
    try:
        for number in range(500):
            cgroups._make(above / str(number))
            (above / str(number)).rmdir()
    finally:
        over.set()
        others.join()


def test_a_child_that_fails_says_why():
    def work():
        raise OSError("no such luck")

    assert namespaces.in_child(work) == "no such luck"
    assert namespaces.in_child(lambda: None) == ""


def test_a_user_namespace_without_ids_says_who_refused_them(monkeypatch):
    def refuses(*_):
        raise OSError("newuidmap: uid range [1-9) -> [1000-1008) not allowed")

    monkeypatch.setattr(namespaces, "map_ids", refuses)
    said = namespaces.in_child(lambda: namespaces.enter_user_namespace("ann"))
    assert said.endswith("got no ids: newuidmap: uid range [1-9) -> [1000-1008) not allowed")


@pytest.mark.parametrize("way", ["real", "link", "real/nodes/..", "real/../link"])
def test_removal_leaves_what_is_mounted_however_the_folder_is_called(tmp_path, way):
    data, top = tmp_path / "data", tmp_path / "b\N{LATIN SMALL LETTER O WITH DIAERESIS}se name"
    data.mkdir()
    (data / "mesh").write_text("a month's work")
    volume = top / "real/nodes/n/kubelet/volume"
    volume.mkdir(parents=True)
    (top / "link").symlink_to("real")

    def work():
        if os.getuid() != 0:
            namespaces.enter_user_namespace(namespaces.user_name())
        namespaces.unshare(namespaces.NEWNS)
        namespaces.mount("none", "/", "", namespaces.REC | namespaces.PRIVATE)
        namespaces.mount(str(data), str(volume), "", namespaces.BIND)
        assert (volume / "mesh").exists()
        namespaces.remove_folder(top / way / "nodes/n", "")

    assert namespaces.in_child(work) == ""
    assert (data / "mesh").exists()
    assert not (top / "real/nodes/n").exists()


@pytest.mark.parametrize("way", ["link/state", "real/../link/state", "real/state/inside/.."])
def test_the_state_folder_is_known_by_its_path_without_links(private_state, monkeypatch, way):
    (private_state / "real").mkdir()
    (private_state / "link").symlink_to("real")
    monkeypatch.setenv("DOVETAIL_STATE", str(private_state / way))
    assert node_record.root() == private_state / "real/state"


def test_removal_never_follows_a_mount(tmp_path, monkeypatch):
    (tmp_path / "node").mkdir()
    (tmp_path / "node/data").write_text("x")
    stuck = [str(tmp_path / "node")]
    monkeypatch.setattr(namespaces, "mounts_below", lambda folder: stuck)
    monkeypatch.setattr(namespaces, "unmount", lambda target: None)
    with pytest.raises(OSError, match="still mounted"):
        namespaces.remove_folder(tmp_path / "node", "u")
    assert (tmp_path / "node/data").exists()


def test_a_node_sees_all_of_a_system_folder_but_what_components_write_to():
    def work():
        if os.getuid() != 0:
            namespaces.enter_user_namespace(namespaces.user_name())
        namespaces.unshare(namespaces.NEWNS)
        namespaces.mount("none", "/", "", namespaces.REC | namespaces.PRIVATE)
        namespaces.mount("none", "/var/lib", "tmpfs")
        for name in ("containers", "dovetail"):
            Path("/var/lib", name, "state").mkdir(parents=True)
        namespaces.copy_up("/var/lib", Path("/var/lib/copy"))
        assert os.listdir("/var/lib/dovetail") == ["state"]
        assert not os.path.exists("/var/lib/containers")

    assert namespaces.in_child(work) == ""


@pytest.mark.parametrize("sign", [*'"%#\\,:?*$\n', "ö"])
def test_a_place_that_components_cannot_be_told_of_is_refused(private_state, monkeypatch, sign):
    monkeypatch.setenv("DOVETAIL_STATE", f"{private_state}/a{sign}b")
    found = machine.disk()
    assert (found.level, found.who) == ("error", "user")
    assert repr(sign) in found.found
    monkeypatch.setenv("DOVETAIL_STATE", f"{private_state}/a+@=~ 'x-_.b")
    assert machine.disk().level == "ok"
    if sign in ':"\\\n':
        monkeypatch.setenv("DOVETAIL_CACHE", f"{private_state}/a{sign}b")
        assert repr(sign) in machine.node_programs().found


@pytest.mark.parametrize(
    ("variable", "asked"),
    [("DOVETAIL_STATE", machine.disk), ("DOVETAIL_CACHE", machine.node_programs)],
)
def test_what_a_node_could_not_see_is_refused(monkeypatch, variable, asked):
    for place in ("/run/dovetail/a", "/var/run/dovetail", "/var/lib/containers/a/b"):
        monkeypatch.setenv(variable, place)
        assert asked().level == "error"
        assert "of which each node sees its own" in asked().found
    for place in ("/var/lib/dovetail/a", "/run/dovetail-a"):
        monkeypatch.setenv(variable, place)
        assert "each node" not in asked().found


@pytest.mark.parametrize(
    ("place", "full"), [("", False), ("state", False), ("", True)],
    ids=["absolute", "relative", "its disk is full"],
)  # fmt: skip
def test_a_monitor_whose_input_is_wrong_leaves_nothing(private_state, monkeypatch, place, full):
    monkeypatch.chdir(private_state)
    monkeypatch.setenv("DOVETAIL_STATE", place or str(private_state / "state"))
    folder = node_record.root(make=True) / "c/nodes/new-1"
    folder.mkdir(mode=0o700, parents=True)
    here = node(name="new-1", address="", joined='{"no": "authority"}')
    write_private(folder / "node.json", json.dumps(vars(here)))
    if full:  # so that it cannot even say what is wrong
        (folder / "monitor.log").symlink_to("/dev/full")
    handle = monitor.start(folder)
    assert handle.answer() == "!'authority'", "it knows its folder"
    assert handle.process.wait(20) != 0
    assert not (node_record.root() / "c").exists()


@pytest.mark.parametrize(
    ("fails", "said"),
    [("supervisor.serve", "its supervisor died: no room for a mount"),
     ("cgroups.enter", "no room for a mount")],
)  # fmt: skip
def test_a_supervisor_that_cannot_start_says_why(monkeypatch, fails, said):
    def full(*_):
        raise OSError("no room\nfor a mount")

    monkeypatch.setattr(cgroups, "enter", lambda _: None)
    monkeypatch.setattr(f"usernetes_setup.node.monitor.{fails}", full)
    ours, theirs = socket.socketpair()
    here = node(user=namespaces.user_name())

    def work():
        here.supervisor, _pipe, last_words = monitor.launch(here, None, theirs)
        raise OSError(monitor.watch(here, last_words, theirs))

    with ours, theirs:
        found = namespaces.in_child(work)
    if found in ("unshare: Operation not permitted", "unshare: No space left on device"):
        pytest.skip("no namespaces here")
    assert found in (said, "no room for a mount")  # which its pid may come after
    assert found == said or fails == "supervisor.serve"


NOISE = (
    'W1130 13:10:18.1 15 x.go:1] [core] grpc: createTransport failed. Err: desc = "error reading"',
    "E1130 13:10:58.1 17 x.go:1] Found stale data, removed previous endpoints on kubernetes",
    'E1130 13:11:00.1 17 x.go:1] "Unhandled Error" err="loading OpenAPI spec for '
    r'\"v1beta1.metrics.k8s.io\" failed with: resource not found" logger="UnhandledError"',
)
KUBELETS_NOISE = (
    'E1130 13:11:02.1 17 x.go:1] "RuntimeConfig from runtime service failed" err="unknown method"',
    'E1130 13:11:02.1 17 x.go:1] "Failed to set rlimit on max file handles" err="not permitted"',
    'E1130 13:11:02.1 17 x.go:1] "Skipping pod synchronization" err="[container runtime status '
    'check may not have completed yet, PLEG is not healthy]"',
    r'E1130 13:11:02.1 17 x.go:1] "Error getting the node" err="node \"127.77.3.1\" not found"',
    'E1130 13:11:02.1 17 x.go:1] "Failed to read data" err="checkpoint is not found"',
    r'E1130 13:10:58.1 25 x.go:1] "Server rejected event" err="namespaces \"default\" not found"',
)
"""Of a start that went well; see `cluster.NOISE`."""


@pytest.mark.parametrize(
    ("component", "lines", "said"),
    [
        ("control", ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>',
                     "OSError: [Errno 98] Address already in use"], "Address already in use"),
        ("control", ["usernetes_setup.control.api_client.Refused: 403: no"], "403: no"),
        ("carrier", ["carry-packets: no such device"], "no such device"),
        ("images", ["unpacking localhost/dovetail/host:1 (sha256:1)...", "ctr: no space"], "no sp"),
        ("images", ["unpacking localhost/dovetail/host:1 (sha256:1)...done"], ""),
        ("apiserver", ["I1130 09:42:44.1 1 x.go:1] Error: none"], ""),
        ("apiserver", ['E1130 13:11:00.1 17 x.go:1] "command failed" err="no such key"', *NOISE],
         "no such key"),
        ("apiserver", NOISE, ""),
        ("kubelet", KUBELETS_NOISE, ""),
    ],
)  # fmt: skip
def test_of_a_node_that_is_not_ready_the_last_complaint_of_each_component_is_said(
    component, lines, said
):
    node_record.root(make=True)
    here = node()
    (here.folder / "log").mkdir(parents=True)
    (here.folder / "log" / component).write_text("\n".join([*lines, ""]))
    found = cluster.last_words(here)
    assert said in found
    assert bool(found) == bool(said)
    assert len(found.splitlines()) <= 2


def test_who_waits_for_a_node_is_told_why_its_monitor_ended_it():
    ours, theirs = socket.socketpair()
    with ours, theirs, subprocess.Popen(["true"]) as ended:
        ended.wait()
        theirs.sendall(b"127.77.0.1\n!its supervisor died: no mount\n")
        handle = monitor.Handle(ended, ours)
        assert handle.answer() == "127.77.0.1"
        with pytest.raises(WorkFailed, match="node n: its supervisor died: no mount"):
            cluster.wait_ready(node(), handle, 9.0, print)


@pytest.mark.parametrize("read", [True, False])
def test_a_node_ends_where_the_command_that_waits_for_it_died(read):
    ours, theirs = socket.socketpair()
    here = node(supervisor=os.getpid())  # one that is there

    def work():
        raise OSError(monitor.watch(here, io.StringIO(), theirs))

    with theirs:
        theirs.sendall(b"127.77.0.1\n")
        assert not read or ours.recv(16)
        ours.close()
        assert namespaces.in_child(work) == "the command that started it died"


def test_a_monitor_that_dies_at_once_leaves_nothing():
    here = node(name="new-1")
    here.unknown = "to what reads the record"
    node_record.root(make=True)
    with pytest.raises(WorkFailed, match="its monitor died"):
        cluster.start(here)
    assert not (node_record.root() / "c").exists()


@pytest.mark.parametrize("fails", ["write_private", "monitor.start"])
def test_a_node_that_cannot_be_described_or_watched_leaves_nothing(
    private_state, monkeypatch, fails
):
    def full(*_):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(f"usernetes_setup.cluster.{fails}", full)
    with pytest.raises(WorkFailed, match="did not start: .*quota"), node_record.locked("c"):
        cluster.start(node(name=f"new-{os.getpid()}"))
    assert not (private_state / "state").exists()


def test_a_node_that_did_not_start_keeps_its_record_while_something_is_left(monkeypatch):
    here = node()
    node_record.root(make=True)

    def start(folder):
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.sendall(b"!no space\n")
        process = subprocess.Popen(["true"])
        dataclasses.replace(here, monitor=process.pid, group="/dovetail.c.n").save()
        return monitor.Handle(process, ours)

    monkeypatch.setattr(monitor, "start", start)
    monkeypatch.setattr(cgroups, "remove", lambda group, deadline: [f"{group}: busy"])
    with pytest.raises(WorkFailed, match="no space; could not be removed: /dovetail.c.n: busy"):
        cluster.start(here)
    assert [one.group for one in node_record.nodes("c")] == ["/dovetail.c.n"]
    monkeypatch.setattr(cgroups, "remove", lambda group, deadline: [])
    cluster.down("c")
    node_record.root(make=True)
    with pytest.raises(WorkFailed, match="no space$"):
        cluster.start(here)
    assert node_record.nodes("c") == []


def test_a_join_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "f").write_text("{}")
    for name in ("f", "missing"):
        args = argparse.Namespace(file=str(tmp_path / name), name="x", node="")
        with pytest.raises(BadInput, match="join file"):
            cluster.join(args, print)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["f", "--name", "mine"], "--name: only with --invite; f says for which node it is"),
        (["f", "--valid", "60"], "--valid: only with --invite; f says"),
        (["--invite", "f", "--cpus", "1"], "--cpus: not with --invite; it is for where the node"),
        (["--invite", "f", "--node-image", "i"], "--node-image: not with --invite"),
    ],
)
def test_options_of_the_other_form_of_join_are_refused(words, said):
    with pytest.raises(BadInput, match=said):
        verbs.main(["join", *words])


def test_a_join_does_not_share_a_folder_with_another_provider(tmp_path):
    """Either way round: what one removes is the other's."""
    args = argparse.Namespace(file=str(tmp_path / "join"), name="", node="", timeout=1.0)
    own = {"cluster": "c", "node": "n", "server": "s", "authority": "a", "token": "t"}
    theirs = {"provider": "usernetes", "cluster": "c", "node": "n", "ports": {"kubelet": 1},
              "subnet": 2, "command": "kubeadm join"}  # fmt: skip
    folder = node_record.root(make=True) / "c"
    folder.mkdir()
    Record("c", "n", "192.0.2.1", "podman", "podman-compose").save()
    Path(args.file).write_text(json.dumps(own))
    with pytest.raises(BadInput, match="is one of provider usernetes"):
        cluster.join(args, print)
    (folder / "usernetes.json").unlink()
    here = node()
    here.folder.mkdir(parents=True)
    here.save()
    Path(args.file).write_text(json.dumps(theirs))
    with pytest.raises(BadInput, match="is one of provider dovetail"):
        cluster.join(args, print)
    with pytest.raises(BadInput, match="is one of provider dovetail"):
        upstream.begin(Record("c", "n", "192.0.2.1", "podman", "podman-compose"), tmp_path, print)
    assert os.listdir(folder) == ["nodes"]


def test_the_end_of_all_goes_on_after_one_that_cannot_be_ended(private_state, capsys):
    root = node_record.root(make=True)
    for name in ("one", "three", "two"):
        (root / name / "nodes").mkdir(parents=True)
        (root / f"{name}.lock").touch()
    for name in ("one", "two"):
        (root / name / "notes").touch()
    with pytest.raises(WorkFailed, match="two: stays, since it holds notes"):
        verbs.main(["down", "--all"])
    assert "one: stays, since it holds notes" in capsys.readouterr().err
    assert node_record.clusters() == []
    assert not (root / "three").exists()


def test_what_up_prints_is_for_a_shell(monkeypatch, capsys):
    made = {"kubeconfig": "/tmp/my clusters/default/kubeconfig"}
    monkeypatch.setattr(cluster, "up", lambda args, say: made)
    assert verbs.main(["up"]) == 0
    assert shlex.split(capsys.readouterr().out) == ["export", f"KUBECONFIG={made['kubeconfig']}"]


def test_a_name_under_which_a_node_here_runs_for_another_cluster_is_refused(tmp_path):
    file, server = tmp_path / "join", "https://192.0.2.1:1"
    content = {"cluster": "c", "node": "n", "server": server, "authority": "a", "token": "t"}
    file.write_text(json.dumps(content))
    node_record.root(make=True)
    with subprocess.Popen(["sleep", "30"]) as program:
        pid, ticks = running(program)
        here = node(joined="yes", server="https://192.0.2.2:1", supervisor=pid, monitor=pid,
                    supervisor_ticks=ticks, monitor_ticks=ticks)  # fmt: skip
        here.folder.mkdir(parents=True)
        here.save()
        for verb in (cluster.up, cluster.join):
            with pytest.raises(
                BadInput, match=r"of another one of that name, at https://192.0.2.2"
            ):
                verb(argparse.Namespace(name="c", file=str(file), node=""), print)
        cluster.refuse_taken("c", here.server)
        here.server = "https://127.77.1.1:1"  # of a control node that was here, and has gone
        here.save()
        cluster.refuse_taken("c")
        with pytest.raises(BadInput, match="of another one"):
            cluster.refuse_taken("c", server)
        assert program.poll() is None
        program.kill()


def test_a_cluster_that_runs_on_another_network_than_is_asked_for_is_refused(monkeypatch):
    """What it refuses pods for is cured by that very network, says it."""
    monkeypatch.setenv("DOVETAIL_STATE", STATE)
    monkeypatch.setattr(cluster, "binaries", lambda _: "")
    monkeypatch.setattr(cluster, "await_answer", lambda *_: None)
    parser, said = argparse.ArgumentParser(), []
    verbs.configure(parser, "up")

    def up(*words):
        return cluster.up(parser.parse_args(["--name", "c", *words]), said.append)

    node_record.root(make=True)
    with subprocess.Popen(["sleep", "30"]) as program, contextlib.ExitStack() as afterwards:
        afterwards.callback(program.kill)
        afterwards.callback(shutil.rmtree, STATE)
        pid, ticks = running(program)
        here = node(network="host", cpus="0", supervisor=pid, monitor=pid,
                    supervisor_ticks=ticks, monitor_ticks=ticks)  # fmt: skip
        here.folder.mkdir(parents=True)
        here.save()
        with pytest.raises(BadInput, match="--network bridge: cluster c runs already, on network"):
            up("--network", "bridge")
        assert up("--cpus", "1") == up("--network", "host") == cluster.described(here)
        assert said == []
        up("--memory", "512Mi")
        assert said == ["cluster c runs already, and stays as it is: cores 0, 1024Mi of memory"]


@pytest.mark.parametrize("verb", ["up", "join"])
def test_a_node_that_runs_is_found_where_no_other_could_start(monkeypatch, tmp_path, verb):
    """As where its disk has become full, or a new build would be needed."""
    monkeypatch.setenv("DOVETAIL_STATE", STATE)
    monkeypatch.setattr(report, "errors", lambda: ["disk: 0 MiB free, 1 GiB needed"])
    monkeypatch.setattr(cluster, "await_answer", lambda *_: None)
    name, server = "127.77.1.2", "https://127.77.1.1:1"
    content = {"cluster": "c", "node": name, "server": server, "authority": "a", "token": "t"}
    (tmp_path / "join").write_text(json.dumps(content))
    parser = argparse.ArgumentParser()
    verbs.configure(parser, verb)
    words = ["--name", "c"] if verb == "up" else [str(tmp_path / "join")]
    node_record.root(make=True)
    with subprocess.Popen(["sleep", "30"]) as program, contextlib.ExitStack() as afterwards:
        afterwards.callback(program.kill)
        afterwards.callback(shutil.rmtree, STATE)
        pid, ticks = running(program)
        here = node(name=name, joined="yes" if verb == "join" else "", server=server, cpus="0",
                    supervisor=pid, monitor=pid, supervisor_ticks=ticks,
                    monitor_ticks=ticks)  # fmt: skip
        here.folder.mkdir(parents=True)
        here.save()
        found = getattr(cluster, verb)(parser.parse_args(words), print)
        assert found == cluster.described(here)


def test_ending_what_is_not_there_is_fine():
    cluster.down("nothing")
    assert not node_record.root().exists()


@pytest.mark.parametrize("group", ["", "/", "/dovetail-0", "/user.slice"])
def test_only_a_nodes_own_group_can_ever_be_emptied(group):
    assert cgroups.processes(group) == set()
    assert cgroups.remove(group, 0) == []
