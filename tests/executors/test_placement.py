# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which rank groups a simulation gets, what fits on the nodes, and the manifests."""

from __future__ import annotations

import queue
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from dovetail.core import protocol
from dovetail.core.errors import BadInput
from dovetail.executors.kubernetes import devices, manifests, placement, pod_status
from dovetail.executors.kubernetes.minicluster import minicluster
from dovetail.executors.kubernetes.nodes import Nodes
from dovetail.executors.kubernetes.placement import Room
from dovetail.executors.kubernetes.session import Session

pytestmark = pytest.mark.unit
GIB = 1 << 30


def node(name, cpu="4", memory="8Gi", pods="110", ready="True", **spec):
    return {
        "metadata": {"name": name},
        "spec": spec,
        "status": {
            "allocatable": {"cpu": cpu, "memory": memory, "pods": pods},
            "conditions": [{"type": "Ready", "status": ready}],
        },
    }


def pod(on, cpu="500m", memory="1Gi", phase="Running", namespace="kube-system", has=None, **meta):
    container = {"name": "main", "resources": {"requests": {"cpu": cpu, "memory": memory}}}
    status = {"phase": phase}
    if has:
        status["containerStatuses"] = [{"name": "main", "allocatedResources": {"cpu": has}}]
    return {
        "metadata": {"name": "p", "namespace": namespace, **meta},
        "spec": {"nodeName": on, "containers": [container]},
        "status": status,
    }


QUANTITIES = [("2", 2000), ("1990m", 1990), ("0.5", 500), ("100u", 1), ("1e3m", 1000), (3, 3000)]


@pytest.mark.parametrize(("text", "wanted"), QUANTITIES)
def test_cpu_quantities_are_read_as_kubernetes_writes_them(text, wanted):
    assert placement.millicores(text) == wanted


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("6Gi", 6 * GIB), ("128974848", 128974848), ("129M", 129 * 10**6), ("123Ki", 123 << 10)],
)
def test_memory_quantities_are_read_as_kubernetes_writes_them(text, wanted):
    assert int(placement.quantity(text)) == wanted


@pytest.mark.parametrize("text", ["", "many", "1Xi", "2 Gi"])
def test_what_is_no_quantity_is_refused(text):
    with pytest.raises(ValueError, match="no quantity"):
        placement.quantity(text)


def test_room_is_what_pods_that_are_not_over_leave():
    nodes = [node("a"), node("b", cpu="2")]
    pods = [pod("a"), pod("a", phase="Succeeded"), pod("b", cpu="1500m"), pod("")]
    assert placement.rooms(nodes, pods) == [
        Room("a", 3500, 7 * GIB, 109),
        Room("b", 500, 7 * GIB, 109),
    ]


def test_a_pod_that_is_being_made_smaller_counts_with_what_it_still_has():
    assert placement.rooms([node("a")], [pod("a", cpu="100m", has="900m")])[0].cpu == 3100


def part(cpu, **more):
    return {"name": f"c{cpu}", "resources": {"requests": {"cpu": cpu}}, **more}


@pytest.mark.parametrize(
    ("before", "whole", "left"),
    [
        ((part("300m"),), {}, 3500),
        ((part("900m"),), {}, 3100),
        ((part("300m", restartPolicy="Always"),), {}, 3200),
        ((part("300m", restartPolicy="Always"), part("900m")), {}, 2800),
        ((part("900m"), part("300m", restartPolicy="Always")), {}, 3100),
        ((), {"requests": {"cpu": "2"}}, 2000),
        ((), {"requests": {"memory": "2Gi"}}, 3500),
    ],
)
def test_sidecars_and_what_a_pod_asks_for_as_a_whole_take_room(before, whole, left):
    """As the scheduler counts them."""
    one = pod("a")
    one["spec"].update(initContainers=list(before), resources=whole)
    for seen in (one, pod_status.slim(one)):
        assert placement.rooms([node("a")], [seen])[0].cpu == left


@pytest.mark.parametrize(
    "closed",
    [
        node("a", ready="False"),
        node("a", ready="Unknown"),
        node("a", unschedulable=True),
        node("a", taints=[{"effect": "NoSchedule"}]),
    ],
)
def test_nodes_that_take_no_pods_have_no_room(closed):
    assert placement.rooms([closed], []) == []


def test_all_ranks_are_one_group_where_one_node_has_room():
    free = [Room("a", 4000, GIB, 9), Room("b", 4000, GIB, 9)]
    assert placement.groups(4, 0, (1000,) * 4, 0, free) == [4]


def test_ranks_are_divided_over_as_few_nodes_as_hold_them():
    free = [Room("a", 3000, GIB, 9), Room("b", 2000, GIB, 9), Room("c", 2000, GIB, 9)]
    assert placement.groups(5, 0, (1000,) * 5, 0, free) == [3, 2]
    assert placement.groups(7, 0, (1000,) * 7, 0, free) == [3, 2, 2]


def test_heavy_ranks_are_divided_by_their_load():
    free = [Room("a", 1000, GIB, 9), Room("b", 1000, GIB, 9)]
    assert placement.groups(4, 0, (900, 300, 300, 300), 0, free) == [1, 3]


def test_memory_divides_ranks_as_well():
    free = [Room("a", 9000, 2 * GIB, 9), Room("b", 9000, 2 * GIB, 9)]
    assert placement.groups(4, 0, (100,) * 4, 3 * GIB, free) == [2, 2]


def test_the_user_may_ask_for_a_rank_per_pod():
    assert placement.groups(5, 2, (100,) * 5, 0, []) == [2, 2, 1]
    assert placement.groups(3, 1, (100,) * 3, 0, []) == [1, 1, 1]


LACKS = [
    ([3000], [1], "3000m of CPU, and at most 2000m are free"),
    ([1500, 1500, 1500], [1] * 3, "1500m of CPU, and at most 500m"),
    ([100], [9 * GIB], "9216 MiB of memory, and at most 4096 MiB"),
    ([1] * 7, [1] * 7, "no node takes another pod"),
    ([2000, 1000, 1000], [1] * 3, ""),
]


@pytest.mark.parametrize(("cpu", "memory", "why"), LACKS)
def test_what_does_not_fit_all_at_once_does_not_fit(cpu, memory, why):
    free = [Room("a", 2000, 4 * GIB, 3), Room("b", 2000, 4 * GIB, 3)]
    nodes, said = placement.placed(cpu, memory, free)
    assert why in said if why else said == ""
    assert len(nodes) == (0 if why else len(cpu))


def test_no_node_at_all_is_said_so():
    assert placement.placed([1], [1], []) == ({}, "no node is ready")


def test_a_light_group_leaves_the_room_that_the_heavy_one_needs():
    free = [Room("empty", 980, GIB, 9), Room("busy", 380, GIB, 9)]
    assert placement.placed([300, 900], [1, 1], free) == ({0: "busy", 1: "empty"}, "")


def test_a_quota_that_would_be_exceeded_is_named():
    quota = {
        "metadata": {"name": "site"},
        "status": {"hard": {"requests.cpu": "2"}, "used": {"requests.cpu": "1500m"}},
    }
    assert placement.over_quota([quota], [500], [1]) == ""
    said = placement.over_quota([quota], [300, 300], [1, 1])
    assert said == "quota site has 0.5 of 2 requests.cpu left, and 0.6 are needed"


def by_class(operator, *values):
    one = {"scopeName": "PriorityClass", "operator": operator, "values": [*values]}
    return {"scopeSelector": {"matchExpressions": [one]}}


@pytest.mark.parametrize(
    ("spec", "counts"),
    [
        ({}, True),
        ({"scopes": ["NotBestEffort", "NotTerminating"]}, True),
        ({"scopes": ["BestEffort"]}, False),
        ({"scopes": ["NotBestEffort", "Terminating"]}, False),
        ({"scopes": ["CrossNamespacePodAffinity"]}, False),
        (by_class("In", "dovetail-simulation"), True),
        (by_class("In", "high"), False),
        (by_class("NotIn", "high"), True),
        (by_class("NotIn", "dovetail-simulation"), False),
        (by_class("Exists"), True),
        (by_class("DoesNotExist"), False),
    ],
)
def test_a_quota_that_is_for_other_pods_keeps_no_simulation_waiting(spec, counts):
    quota = {"metadata": {"name": "site"}, "spec": spec, "status": {"hard": {"pods": "0"}}}
    assert bool(placement.over_quota([quota], [100], [1])) is counts


def test_a_whole_node_is_offered_and_requests_leave_room_for_the_agent():
    nodes = Nodes((None, None))
    nodes.listed([node("a", cpu="2")], [])
    assert nodes.capacity.cpu == 2000
    asked = nodes.divided([2, 2], (500, 500, 500, 500))
    assert sum(asked) + manifests.AGENT_CPU <= 2000
    assert asked[0] == asked[1]


def test_limits_of_the_plan_bound_the_offer():
    nodes = Nodes((3000, GIB))
    nodes.listed([node("a", cpu="2"), node("b", cpu="2")], [pod("b")])
    assert [(one.name, one.cpu) for one in nodes.capacity.nodes] == [("a", 2000), ("b", 1000)]
    assert nodes.capacity.memory == GIB


def test_pods_on_a_node_ask_for_no_more_than_it_has():
    nodes = Nodes((None, None))
    nodes.listed([node("a", cpu="1"), node("b", cpu="3")], [])
    room = 1000 - manifests.AGENT_CPU
    assert nodes.fitted("a", [200, 300], 100) == [200, 300]
    assert nodes.fitted("a", [500, 1500], 0) == [room // 4, room * 3 // 4]
    assert nodes.fitted("a", [500, 1500], 580) == [100, 300]
    assert nodes.fitted("b", [500, 1500], 580) == [500, 1500]
    assert nodes.fitted("a", [500, 1500], room) == [500, 1500], "it shall be refused"
    assert nodes.fitted("gone", [500], 0) == [500]


def test_ranks_of_which_no_node_has_room_for_their_part_fit_with_less():
    """What they shall have is a part of all cores, which are those of two nodes."""
    there = [node("a", cpu="1"), node("b", cpu="1")]
    nodes, free = Nodes((None, None)), placement.rooms(there, [])
    nodes.listed(there, [])
    spec = protocol.Spec("sim", "sim", "/case", 3, (1.0,) * 3, ("program",), ranks_per_pod=1)
    whole, less = (nodes.fit(spec, (667, 667, 666), 0, free, {}, less) for less in (False, True))
    assert whole.nodes == {}
    assert whole.why.startswith("a rank group asks for 652m of CPU, and at most ")
    assert sorted(less.nodes.values()) == ["a", "a", "b"]
    assert 480 <= min(less.cpu) <= max(less.cpu) <= 500
    away = nodes.fit(spec, (667, 667, 666), 0, free[:1], {}, True)
    assert away.nodes == {}, "ranks wait for a node, rather than to crowd on what is left"


def test_a_node_is_lost_only_when_it_and_its_agent_are_silent_for_long():
    nodes = Nodes((None, None))
    nodes.listed([node("a", ready="Unknown")], [])
    assert nodes.lost(0.0, {"a"}, {"a"}) == {}
    assert nodes.lost(100.0, {"a"}, {"a"}) == {}, "its agent talks"
    assert nodes.lost(200.0, set(), {"a"}) == {}
    assert nodes.lost(210.0, set(), {"a"}) == {}
    assert nodes.lost(230.0, set(), {"a"}) == {"a": "it is not ready"}


@pytest.mark.parametrize("closed", ["unschedulable", "taints"])
def test_a_node_that_takes_no_more_pods_is_not_lost_while_its_agent_is_away(closed):
    """As one that an administrator has cordoned, and whose agent is started again."""
    nodes, one = Nodes((None, None)), node("a")
    one["spec"][closed] = {"unschedulable": True, "taints": [{"effect": "NoSchedule"}]}[closed]
    nodes.listed([one], [])
    assert not nodes.capacity.nodes
    assert nodes.lost(0.0, set(), {"a"}) == nodes.lost(100.0, set(), {"a"}) == {}


SPEC = protocol.Spec("sim", "sim", "/tmp", 3, (1.0,) * 3, ("true",))


def made(**more):
    seen = manifests.Folders(("/usr", "/tmp"), ("/dev/shm", "/out"))
    return manifests.job("abc123", SPEC, "sim", [2, 1], [700, 300], [GIB, GIB], seen, **more)


def test_a_simulation_is_an_indexed_job_with_requests_and_no_limits():
    job = made()
    assert job["metadata"]["name"] == "sim-abc123"
    spec = job["spec"]
    assert (spec["completionMode"], spec["completions"], spec["backoffLimit"]) == ("Indexed", 2, 0)
    resources = spec["template"]["spec"]["containers"][0]["resources"]
    assert resources == {"requests": {"cpu": "500m", "memory": str(GIB)}}
    assert manifests.sizes_of(job) == [2, 1]


def test_what_is_only_read_is_mounted_so():
    container = made()["spec"]["template"]["spec"]["containers"][0]
    mounts = {one["mountPath"]: one.get("readOnly", False) for one in container["volumeMounts"]}
    assert mounts == {"/usr": True, "/tmp": True, "/dev/shm": False, "/out": False}


@pytest.mark.parametrize("wish", ["3600", "0.5", "inf", ""])
def test_pods_wait_for_a_controller_as_long_as_the_user_says(monkeypatch, wish):
    monkeypatch.setenv("DOVETAIL_ORPHAN_S", wish)
    assert manifests.orphan_limit() == ({"DOVETAIL_ORPHAN_S": wish} if wish else {})


@pytest.mark.parametrize("wish", ["1h", "0", "-5", "nan", "10 minutes"])
def test_a_time_that_pods_would_not_understand_is_refused(monkeypatch, wish):
    monkeypatch.setenv("DOVETAIL_ORPHAN_S", wish)
    with pytest.raises(BadInput, match=f"^DOVETAIL_ORPHAN_S: '{wish}' is not a number of seconds"):
        made()


def test_names_fit_what_kubernetes_allows():
    long = "a" * 33 + ".abcdef"
    assert len(manifests.job_name("123456", long) + "-99999") <= 63


def test_pods_see_programs_cases_and_commands_and_no_folder_twice(tmp_path):
    case, tools = tmp_path / "case", tmp_path / "tools"
    case.mkdir()
    tools.mkdir()
    spec = protocol.Spec("s", "s", str(case), 1, (1.0,), (f"{tools}/solver", "-x"))
    seen = manifests.folders([spec], tmp_path / "out")
    assert (seen.cases, seen.programs) == ((str(case),), (str(tools),))
    assert "/usr/bin" not in (*seen.read, *seen.paths), "it is in /usr"
    mounts = {one.target: one for one in seen.mounts()}
    assert [name for name, one in mounts.items() if not one.fixed] == [
        "/dev/shm", str(tmp_path / "out")
    ]  # fmt: skip
    assert len(mounts) == len(seen.mounts())
    made = {name for name, one in mounts.items() if not one.kind}
    assert not made & {str(case), str(tools), str(tmp_path / "out")}, "none is made by a runtime"


def seen_by(tmp_path, *command, path="", write="", restart="", **environment):
    """What pods see of a simulation's programs and besides, below `tmp_path` or in /tmp."""
    pairs = tuple({"PATH": path, **environment}.items())
    more = {"write": write, "restart": restart, "environment": pairs}
    spec = protocol.Spec("s", "s", "/usr", 1, (1.0,), command, **more)
    seen = manifests.folders([spec], tmp_path / "out")
    return {*seen.programs}, {name for name in seen.paths if name.startswith("/tmp")}


def program(file):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch(0o755)
    return file


@pytest.mark.parametrize("starter", [(), ("mpirun", "-np", "2")])
def test_pods_see_where_links_to_programs_lead_and_the_installations(tmp_path, starter):
    real = program(tmp_path / "spack/lmp-1/bin/lmp")
    view = tmp_path / "view/bin"
    view.mkdir(parents=True)
    (view / "lmp").symlink_to(real)
    programs, paths = seen_by(tmp_path, *starter, "lmp", "-in", "x", path=str(view))
    assert programs == (set() if starter else {str(view), str(real.parent)})
    assert paths == {str(view.parent), str(real.parents[1])}
    spec = protocol.Spec("s", "s", "/usr", 1, (1.0,), (str(view / "lmp"),))
    mounts = [one.target for one in manifests.folders([spec], tmp_path / "out").mounts()]
    assert str(view.parent) in mounts
    assert str(view) not in mounts, "it is in that"


def test_pods_see_the_programs_that_write_checkpoints_and_go_on_from_them(tmp_path):
    write, restart = (program(tmp_path / f"{name}/program") for name in ("write", "restart"))
    programs, _ = seen_by(tmp_path, "true", write=f"sh {write}", restart=f"{restart} {{ranks}}")
    assert programs == {str(write.parent), str(restart.parent)}


def test_no_home_is_seen_for_a_program_in_it_or_a_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    solver = program(tmp_path / "bin/solver")
    (tmp_path / "mesh").touch()
    programs, paths = seen_by(tmp_path, str(solver), f"--in={tmp_path}/mesh", DATA=str(tmp_path))
    assert (programs, paths) == ({f"{tmp_path}/bin"}, {f"{tmp_path}/mesh"})


@pytest.mark.parametrize(
    ("word", "found"),
    [
        ("--in=TOP/data/mesh", {"TOP/data"}),
        ("--in=TOP/data/new", {"TOP/data"}),
        ("--in=TOP/data", {"TOP/data"}),
        ("in=TOP/data/../data/mesh", {"TOP/data"}),
        ("--in=TOP/nowhere/mesh", set()),
        ("--in=data/mesh", set()),
        ("--in=TOP/a:b/mesh", set()),
        ("--in=/usr/share/x", set()),
        ("--out=TOP/out/log", set()),
    ],
)
def test_pods_see_what_is_named_behind_an_equals_sign(tmp_path, word, found):
    for name in ("data", "a:b", "out"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mesh").touch()
    _, paths = seen_by(tmp_path, "true", word.replace("TOP", str(tmp_path)))
    assert paths == {name.replace("TOP", str(tmp_path)) for name in found}


def test_pods_see_what_the_simulations_environment_names_if_it_is_there(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    (tmp_path / "two/file").touch()
    libraries = f"{tmp_path}/one:{tmp_path}/none:/usr/lib"
    more = {"LD_LIBRARY_PATH": libraries, "INPUT": f"{tmp_path}/two/file", "N": "2"}
    _, paths = seen_by(tmp_path, "true", OUT=f"{tmp_path}/new", **more)
    assert paths == {f"{tmp_path}/one", f"{tmp_path}/two"}


def test_pods_see_where_libraries_are_looked_for(tmp_path, monkeypatch):
    ours, own = f"{tmp_path}/ours", f"{tmp_path}/own"
    for name in (ours, own):
        Path(name).mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{ours}:{tmp_path}/none::/usr/lib:/tmp")
    assert seen_by(tmp_path, "true")[1] == {ours}
    assert seen_by(tmp_path, "true", LD_LIBRARY_PATH=own)[1] == {own}


@pytest.mark.parametrize("word", ["{}", "--in={}"])
@pytest.mark.parametrize("name", ["/tmp", "/tmp/", "/var/tmp", "/run", "/dev", "/proc", "/sys", "/",
                                  "/tmp/nowhere", "/dev/shm", "/proc/1/maps", "/var"])  # fmt: skip
def test_what_pods_have_for_themselves_is_never_the_machines(tmp_path, word, name):
    spec = protocol.Spec("s", "s", "/usr", 1, (1.0,), ("true", word.format(name)),
                         environment=(("TMPDIR", name), ("PATH", f"/usr/bin:{name}")))  # fmt: skip
    seen = manifests.folders([spec], tmp_path / "out")
    assert not {name.rstrip("/"), "/tmp", "/var", "/dev", "/"} & {*seen.programs, *seen.paths}


@pytest.mark.parametrize("word", ["{}", "--in={}"])
def test_a_file_in_tmp_is_seen_alone_and_a_folder_as_a_whole(tmp_path, word):
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        Path(folder, "file").touch()
        assert seen_by(tmp_path, "true", word.format(folder)) == (set(), {folder})
        with tempfile.NamedTemporaryFile(dir="/tmp") as file:
            assert seen_by(tmp_path, "true", word.format(file.name)) == (set(), {file.name})


def test_nothing_in_the_output_is_mounted_to_be_read_alone(tmp_path):
    (tmp_path / "out/sim").mkdir(parents=True)
    assert seen_by(tmp_path, "true", f"{tmp_path}/out/sim/log", f"{tmp_path}/out/x") == (
        set(),
        set(),
    )


def test_a_store_is_in_no_folder_in_which_nobody_can_make_its_place(tmp_path):
    spec = protocol.Spec(
        "s", "s", "/usr", 1, (1.0,), (str(program(tmp_path / "project/bin/solver")),)
    )
    seen = manifests.folders([spec], tmp_path / "project/out")
    assert str(tmp_path / "project") in seen.paths
    mounts = [one.target for one in seen.staged("/tmp/store").mounts()]
    assert str(tmp_path / "project") not in mounts
    assert {str(tmp_path / "project/bin"), str(tmp_path / "project/out")} <= {*mounts}


def test_a_node_that_comes_later_need_not_have_what_programs_may_read(tmp_path):
    """Pods do without it then: the runtime would make an empty folder, or fail to."""
    data, tools = tmp_path / "data", tmp_path / "tools"
    data.mkdir()
    command = (str(program(tools / "solver")), f"--in={data}/x")
    seen = manifests.folders(
        [protocol.Spec("s", "s", "/usr", 1, (1.0,), command)], tmp_path / "out"
    )
    assert str(data) in seen.paths
    session, looked = Session.__new__(Session), []  # without a cluster
    session.run, session.store, session.news, session._told = "r", "", queue.SimpleQueue(), {}
    session.launcher = SimpleNamespace(seen=seen)
    session._programs, session._paths = (dict.fromkeys(x, "") for x in (seen.programs, seen.paths))
    unseen = {"one": [str(data)]}
    session.hub = SimpleNamespace(
        unseen=lambda: unseen, look=lambda folders, store: looked.append(folders)
    )
    far = [{"metadata": {"name": "one"}, "status": {}}]
    assert session.left_out(far) == frozenset()
    assert {*session.launcher.seen.paths} == {*seen.paths} - {str(data)}
    unseen["one"] = [str(tools)]
    assert session.left_out(far) == {"one"}
    assert session.news.get_nowait().endswith(f"it does not see {tools}")
    unseen["one"] = ["/case"]
    session.left_out(far)
    assert str(data) in looked[0], "it is looked for where cases are copied, too"


def test_pods_have_a_store_in_place_of_folders_that_nodes_do_not_see(tmp_path):
    spec = protocol.Spec("s", "s", "/home/a/case", 1, (1.0,), ("solver",))
    seen = manifests.folders([spec], tmp_path / "out").staged("/tmp/store")
    mounts = {one.target: one for one in seen.mounts()}
    assert "/home/a/case" not in mounts
    store = mounts[str(tmp_path / "out")]
    assert (store.source, store.fixed) == ("/tmp/store", False)


def test_every_manifest_is_in_the_kustomization():
    top = Path(__file__).resolve().parents[2] / "operator-manifests"
    listed = (top / "kustomization.yaml").read_text()
    for file in top.glob("*.yaml"):
        assert file.name == "kustomization.yaml" or f"- {file.name}" in listed


# The operator's schema (June 2026), of the fields that we use; a mapping's values follow `*`.
RESOURCES = {"requests": {"*": str}, "limits": {"*": str}}
MINICLUSTER = {
    "size": int,
    "tasks": int,
    "interactive": bool,
    "jobLabels": {"*": str},
    "containers": [
        {
            "image": str,
            "imagePullPolicy": str,
            "command": str,
            "launcher": bool,
            "commands": {"pre": str, "post": str},
            "environment": {"*": str},
            "resources": RESOURCES,
            "volumes": {"*": {"hostPath": str, "secretName": str, "path": str, "readOnly": bool}},
        }
    ],
    "network": {"disableAffinity": bool, "headlessName": str},
    "flux": {
        "container": {"disable": bool, "image": str, "resources": RESOURCES},
        "completeWorkers": bool,
        "curveCert": str,
        "scheduler": {"simple": bool, "queuePolicy": str},
        "optionFlags": str,
    },
    "pod": {
        "annotations": {"*": str},
        "labels": {"*": str},
        "restartPolicy": str,
        "automountServiceAccountToken": bool,
    },
}


def misfits(value, schema, where="spec"):
    if isinstance(schema, dict):
        for key, item in value.items():
            inner = schema.get(key, schema.get("*"))
            if inner is None:
                yield f"{where}.{key}"
            else:
                yield from misfits(item, inner, f"{where}.{key}")
    elif isinstance(schema, list):
        for item in value:
            yield from misfits(item, schema[0], where)
    elif not isinstance(value, schema):
        yield where


def test_a_simulation_as_a_minicluster_fits_the_operators_schema():
    seen = manifests.Folders(("/usr", "/opt"), ("/dev/shm", "/out"))
    sizes, memory = [2, 1], [GIB, GIB]
    where = "/opt/flux/bin", "/out/kubernetes/brokers"
    thing = minicluster("abc123", SPEC, "sim", sizes, [700, 300], memory, seen, *where)
    assert list(misfits(thing["spec"], MINICLUSTER)) == []
    (container,) = thing["spec"]["containers"]
    assert container["resources"] == {"requests": {"cpu": "500m", "memory": str(GIB)}}
    paths = {one["path"]: one["readOnly"] for one in container["volumes"].values()}
    seen_there = {"/usr": True, "/opt": True, "/dev/shm": False, "/out": False}
    assert paths == {**seen_there, "/run/dovetail/curve": True}
    images = {container["image"], thing["spec"]["flux"]["container"]["image"]}
    assert images == {manifests.IMAGE}, "none of Flux's own is pulled"


# --- devices ---


def offers(name, **there):
    found = node(name)
    resources = {key.replace("_", "/"): number for key, number in there.items()}
    found["status"]["allocatable"].update(resources)
    return found


def holds(on, number, phase="Running"):
    found = pod(on, phase=phase)
    found["spec"]["containers"][0]["resources"]["requests"]["dovetail/gpu"] = str(number)
    return found


ONE_GPU = {"dovetail/gpu": 1}


def test_a_pod_goes_where_a_device_is_free_and_waits_where_none_is():
    nodes = [offers("a", dovetail_gpu="1"), offers("b", dovetail_gpu="2"), node("c", cpu="64")]
    free = placement.rooms(nodes, [holds("a", 1), holds("b", 1), holds("b", 1, "Succeeded")])
    assert placement.placed([100], [0], free, ONE_GPU) == ({0: "b"}, "")
    where, why = placement.placed([100, 100], [0, 0], free, ONE_GPU)
    assert where == {}
    assert why == "a rank group asks for 1 dovetail/gpu, and at most 0 are free on a node"
    assert placement.placed([100] * 2, [0] * 2, free)[1] == ""  # who asks for none takes none


def test_ranks_are_divided_among_nodes_that_have_the_device():
    free = placement.rooms([node("a", cpu="8"), *(offers(n, dovetail_gpu="1") for n in "bc")], [])
    assert placement.groups(6, 0, (1000,) * 6, 0, free, ONE_GPU) == [3, 3]
    assert set(placement.placed([3000] * 2, [0] * 2, free, ONE_GPU)[0].values()) == {"b", "c"}


def test_a_quota_counts_devices():
    hard, used = {"requests.dovetail/gpu": "2"}, {"requests.dovetail/gpu": "1"}
    quota = {"metadata": {"name": "q"}, "status": {"hard": hard, "used": used}}
    assert placement.over_quota([quota], [1], [1], (), ONE_GPU) == ""
    why = "quota q has 1 of 2 requests.dovetail/gpu left, and 2 are needed"
    assert placement.over_quota([quota], [1, 1], [1, 1], (), ONE_GPU) == why


@pytest.mark.parametrize(
    ("name", "offered", "wanted"),
    [
        ("gpu", {}, "dovetail/gpu"),
        ("gpu", {"nvidia.com/gpu": 4}, "nvidia.com/gpu"),
        ("gpu", {"nvidia.com/gpu": 1, "amd.com/gpu": 2}, "amd.com/gpu"),
        ("efa", {"vpc.amazonaws.com/efa": 1, "nvidia.com/gpu": 8}, "vpc.amazonaws.com/efa"),
        ("rdma", {"rdma/hca_shared_devices_a": 63}, "rdma/hca_shared_devices_a"),
        ("rdma", {"dovetail/rdma": 110, "rdma/x": 1}, "dovetail/rdma"),
        ("/dev/fuse", {"github.com/fuse": 1}, "dovetail/dev.fuse"),
        ("github.com/fuse", {"nvidia.com/gpu": 4}, "github.com/fuse"),
    ],
)
def test_a_device_is_found_by_what_clusters_call_it(name, offered, wanted):
    assert devices.resource(name, offered) == wanted


def test_every_pod_asks_for_the_devices_by_its_limits():
    spec = protocol.Spec("s", "s", "/case", 2, (1.0, 1.0), ("run",))
    seen = manifests.Folders((), ())
    job = manifests.job("r", spec, "s", [2], [500], [1], seen, limit=900, devices=ONE_GPU)
    (one,) = job["spec"]["template"]["spec"]["containers"]
    assert one["resources"]["limits"] == {"cpu": "900m", "dovetail/gpu": "1"}
    made = minicluster("r", spec, "s", [2], [500], [1], seen, "/f", "/m", devices=ONE_GPU)
    assert made["spec"]["containers"][0]["resources"]["limits"] == {"dovetail/gpu": "1"}


def test_the_capacity_tells_of_the_devices_that_the_plan_asks_for_whoever_has_them():
    found = Nodes((None, None), ("gpu", "rdma"))
    found.listed([offers("a", dovetail_gpu="1"), offers("b", dovetail_gpu="2")], [holds("a", 1)])
    assert found.capacity.devices == (("gpu", 3), ("rdma", 0))
    assert (found.most("gpu"), found.most("rdma")) == (2, 0)
