# SPDX-License-Identifier: LGPL-3.0-or-later
"""What --dovetail and the configuration ask for, and what a site grants."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.flux import client, command, load, option
from usernetes_setup.build import programs

pytestmark = pytest.mark.unit
PLUGINS = Path(option.__file__).parent / "plugins" / "cli"


@pytest.fixture
def flux(tmp_path):
    """A command of Flux's own with our option, which submits nothing; there is no instance."""
    found = os.environ.get("FLUX") or shutil.which("flux") or pytest.skip("no flux here")
    (tmp_path / "flux-dovetail").touch(mode=0o755)
    environment = {"PATH": "/usr/bin:/bin", "FLUX_CLI_PLUGINPATH": str(PLUGINS),
                   "FLUX_EXEC_PATH_PREPEND": str(tmp_path)}  # fmt: skip

    def run(name, *words, **more):
        line = [found, name, *words, "--dry-run", "true"]
        return subprocess.run(
            line, env={**environment, **more}, capture_output=True, text=True, cwd=tmp_path
        )

    return run


@pytest.mark.parametrize(
    ("text", "nodes", "cores"),
    [("nodes=2,cores=all", 2, 0), ("nodes=1", 1, 0), ("cores=3,nodes=4", 4, 3)],
)
def test_the_option_says_how_many_slices_of_which_size(text, nodes, cores):
    found = option.parse(text)
    assert (found.nodes, found.cores) == (nodes, cores)
    assert option.from_table(found.plain()) == found


BAD = {
    "": "nodes=N",
    "2": "nodes=N",
    "nodes": "nodes=N",
    "nodes=": "number from 1",
    "nodes=0": "number from 1",
    "nodes=-1": "number from 1",
    "nodes=1.5": "number from 1",
    "nodes=99999": "number from 1",
    "nodes=²": "number from 1",
    "nodes=all": "number from 1",
    "nodes=2,": "nodes=N",
    "nodes=2,nodes=3": "twice",
    "nodes=2,cores=some": "or all",
    "nodes=2,cores=0": "or all",
    "cores=all": "nodes=N is missing",
    "nodes=2,share=0.5": "is not nodes=N, cores=N",
    "nodes=2,provider=docker": "provider is one of dovetail, usernetes, not 'docker'",
    "nodes=2,network=flannel": "network is one of host, bridge, not 'flannel'",
    "nodes=2,usernetes=/opt/usernetes": "usernetes is for provider=usernetes alone",
}


@pytest.mark.parametrize("text", BAD)
def test_a_request_that_makes_no_sense_is_refused_in_one_line(text):
    with pytest.raises(BadInput, match=BAD[text]) as found:
        option.parse(text)
    assert "\n" not in str(found.value)


@pytest.mark.parametrize(
    ("table", "word"),
    [
        ({"nodes": True}, "nodes"),
        ({"nodes": 1, "executor": "remote"}, "executor"),
        ({"nodes": 1, "up-timeout": 0}, "up-timeout"),
        ({"nodes": 1, "down-timeout": "long"}, "down-timeout"),
        ({"nodes": 1, "node": 2}, r"no key node \(nodes\?\); known are nodes, cores"),
        ({"nodes": 1, "cache": 3}, "cache is a text, not 3"),
        ({"nodes": 1, "command": ["flux-dovetail"]}, "command is a text, not"),
        ({"nodes": 1, "what": 2}, "no key what; known are nodes, cores"),
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(table, word):
    with pytest.raises(BadInput, match=word):
        option.from_table(table)
    with pytest.raises(BadInput, match=word):
        option.check(table)


def test_a_job_inside_one_of_another_version_has_the_module_of_its_own(flux):
    """The job around it has left its folders in the environment."""
    folders = ("modprobe", "modules")
    old = [f"/opt/old/site-packages/dovetail/flux/plugins/{folder}" for folder in folders]
    names = ("FLUX_MODPROBE_PATH_APPEND", "FLUX_MODULE_PATH_PREPEND")
    done = flux("batch", "-N1", "--dovetail=nodes=1", "--wrap", **dict(zip(names, old)))
    environment = json.loads(done.stdout)["attributes"]["system"]["environment"]
    assert [environment[name] for name in names] == [
        str(PLUGINS.with_name(folder)) for folder in folders
    ]


def test_a_configuration_may_have_defaults_alone():
    option.check({"up-timeout": 300})
    option.check({})
    with pytest.raises(BadInput, match="is a table"):
        option.check(3)


def test_pods_have_addresses_of_their_own_where_that_is_asked_for():
    found = option.parse("nodes=2,cores=1,network=bridge")
    assert found.network == "bridge"
    assert found.plain() == {"nodes": 2, "cores": 1, "network": "bridge"}
    assert option.from_table(found.plain()) == found
    assert "network" not in option.parse("nodes=2,network=host").plain()
    assert option.granted(found, {"nodes": 2}, {"nodes": 1, "cores": 1}).network == "bridge"


UPSTREAM = {"nodes": 2, "provider": "usernetes", "usernetes": "/opt/usernetes"}


def test_upstream_usernetes_makes_the_nodes_where_it_is_asked_for():
    found = option.parse("nodes=2,provider=usernetes,usernetes=/opt/usernetes,node-image=u:1")
    assert (found.upstream, found.usernetes, found.node_image) == (True, "/opt/usernetes", "u:1")
    assert option.from_table(found.plain()) == found
    assert (found.executor, found.up_timeout) == ("local", 600.0)
    option.check_provider(UPSTREAM)
    option.check_provider({**UPSTREAM, "provider": "dovetail", "cores": 3})  # a site's default
    assert not option.from_table({**UPSTREAM, **option.parse("nodes=1").plain()}).cores


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"usernetes": ""}, "needs usernetes=DIR"),
        ({"cores": 2}, "cores=2 is not for provider=usernetes, .*; cores=all would be right"),
        ({"executor": "kubernetes"}, "executor=local would be right"),
        ({"address": "loopback"}, "address=machine would be right"),
        ({"devices": "gpu"}, "devices=auto would be right"),
        ({"network": "bridge"}, "network=bridge is not for .*; network=host would be right"),
        ({"node-image": 3}, "node-image is a text, not 3"),
    ],
)
def test_what_nodes_of_upstream_usernetes_cannot_be_is_refused(more, word):
    for check in option.check_provider, option.check_instance:
        with pytest.raises(BadInput, match=word):
            check({**UPSTREAM, **more})


def test_an_instance_that_asks_for_no_nodes_may_have_any_defaults():
    option.check_instance({"provider": "usernetes"})


def test_a_site_that_grants_a_few_cores_grants_no_node_of_upstream_usernetes():
    """Its container has the whole machine."""
    asked = option.parse("nodes=2,provider=usernetes,usernetes=/opt/usernetes")
    assert option.granted(asked, asked.plain(), {"nodes": 1, "cores": "all"}).nodes == 1
    with pytest.raises(BadInput, match="grants 3 cores of a node"):
        option.granted(asked, asked.plain(), {"nodes": 2, "cores": 3})


def test_whole_nodes_must_fit_into_the_allocation():
    option.check_fits(option.parse("nodes=4"), 4, "x")
    option.check_fits(option.parse("nodes=5,cores=1"), 4, "x")  # several may share a node
    option.check_fits(option.parse("nodes=5"), None, "x")
    with pytest.raises(BadInput, match="-N"):
        option.check_fits(option.parse("nodes=5"), 4, "x")


GRANTED = {  # a request, what the job has, and what comes of both
    "less of both": ("nodes=4,cores=8", {"nodes": 2, "cores": 3}, (2, 3)),
    "cores instead of all": ("nodes=2", {"nodes": 2, "cores": 3}, (2, 3)),
    "the same": ("nodes=2,cores=3", {"nodes": 2, "cores": 3}, (2, 3)),
    "all, of some cores": ("nodes=2,cores=3", {"nodes": 2, "cores": "all"}, (2, 3)),
    "more, which nobody asked for": ("nodes=1,cores=1", {"nodes": 9, "cores": 9}, (1, 1)),
    "nothing said": ("nodes=2", None, (2, 0)),
    "a slice's": ("nodes=2", {"slice": 1, "cluster": "f-1"}, (2, 0)),
    "nonsense": ("nodes=2", {"nodes": "x"}, (2, 0)),
}


@pytest.mark.parametrize("what", GRANTED)
def test_a_site_grants_what_was_asked_for_or_less(what):
    text, granted, (nodes, cores) = GRANTED[what]
    wanted = option.parse(text)
    found = option.granted(wanted, wanted.plain(), granted)
    assert (found.nodes, found.cores) == (nodes, cores)


def test_what_was_asked_for_first_is_no_limit_to_a_later_request_unless_a_site_left_less():
    later, first = option.parse("nodes=3"), {"nodes": 2, "cores": 1}
    assert option.granted(later, first, first) == later
    found = option.granted(later, {"nodes": 9, "cores": 1}, first)
    assert (found.nodes, found.cores) == (2, 1)


def test_more_cores_than_a_node_has_are_refused():
    asked = option.parse("nodes=1,cores=99")
    option.check_cores(asked, 99, "here")
    with pytest.raises(BadInput, match="here: cores=99, and no node here has more than 98"):
        option.check_cores(asked, 98, "here")
    option.check_cores(option.parse("nodes=1"), 4, "here")


@pytest.mark.parametrize(
    ("text", "room"), [("nodes=3", 2), ("nodes=6,cores=1", 5), ("nodes=3,cores=2", 2)]
)
def test_more_nodes_than_an_instance_has_cores_for_are_refused(text, room):
    nodes = [2, 3]  # cores of each
    option.check_room(replace(option.parse(text), nodes=room), nodes)
    option.check_room(option.parse(text), [])  # nobody knows
    with pytest.raises(BadInput, match=f"does not fit into this instance; nodes={room} would"):
        option.check_room(option.parse(text), nodes)
    with pytest.raises(BadInput, match="cores=4, and no node here has more than 3"):
        option.check_room(option.parse("nodes=1,cores=4"), nodes)


@pytest.mark.parametrize(
    "line", ["exec -it pod -- sh -c ls", "run p --image=i -- x -h", "-n a get"]
)
def test_all_arguments_of_kubectl_are_its_own(line):
    assert command.parser().parse_args(["kubectl", *line.split()]).words == line.split()


def test_without_a_build_kubectl_is_the_one_on_the_path(monkeypatch, tmp_path, capsys):
    """Nodes of upstream Usernetes need no build of ours."""
    started = []
    monkeypatch.setattr(programs, "built", lambda: None)
    monkeypatch.setattr(command.client, "call", lambda topic: {"kubeconfig": "k"})
    monkeypatch.setattr(os, "execv", lambda *words: started.append(words))
    monkeypatch.setenv("KUBECONFIG", "")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert command.main(["kubectl", "get", "nodes"]) == 2
    assert "kubectl is neither on PATH nor built for this user" in capsys.readouterr().err
    (tmp_path / "kubectl").touch(0o755)
    command.main(["kubectl", "get", "nodes"])
    assert started == [(f"{tmp_path}/kubectl", ["kubectl", "get", "nodes"])]


@pytest.mark.parametrize(
    "server", ['"server": "https://10.0.0.7:6443"', "server: https://10.0.0.7:6443\n  name: x"]
)
def test_no_proxy_leads_kubectl_to_our_own_cluster(monkeypatch, tmp_path, server):
    """As at most sites, where https_proxy is set for all that is outside."""
    (tmp_path / "kubectl").touch(0o755)
    monkeypatch.setattr(programs, "built", lambda: None)
    monkeypatch.setattr(command.client, "call", lambda topic: {"kubeconfig": server})
    monkeypatch.setattr(os, "execv", lambda *words: None)
    for name, value in {"KUBECONFIG": "", "PATH": str(tmp_path), "no_proxy": ".site"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("NO_PROXY", "")
    command.main(["kubectl", "get", "nodes"])
    assert os.environ["NO_PROXY"] == ".site,10.0.0.7"


def test_logs_says_in_plain_words_what_is_not_there_yet(monkeypatch, capsys):
    waits = {"number": 7, "job": 99, "state": "submitted"}
    status = {"slices": [waits, {**waits, "number": 8, "job": 0}], "runs": []}
    monkeypatch.setattr(client, "call", lambda _: status)

    def flux(*_):
        raise WorkFailed("flux-job: eventlog path guest.output not found")

    monkeypatch.setattr(load, "flux", flux)
    for words, why in {
        (): "no run was submitted yet",
        ("0",): "there is no run 0; see",
        ("--slice", "7"): "slice 7 waits for cores, and has not started yet",
        ("--slice", "8"): "slice 8 waits for cores, and has not started yet",
        ("--slice", "9"): "there is no slice 9; see",
    }.items():
        assert command.main(["logs", *words]) == 2
        assert capsys.readouterr().err.startswith(f"flux dovetail: logs: {why}")


def test_every_copy_of_a_submitted_command_gets_an_instance_of_its_own(flux):
    words = ["-n1", "--env=HOME", "--dovetail=nodes=1"]
    for copies in [], ["--cc=0-1"], ["--bcc=0-1"]:
        done = flux("submit", *words, *copies)
        spec = json.loads(done.stdout)
        assert spec["attributes"]["user"] == {"dovetail": {"nodes": 1, "cores": "all"}}, copies
        assert spec["tasks"][0]["command"][:2] == ["flux", "broker"]
        assert "dovetail-conf.json" in spec["attributes"]["system"]["files"]


def test_whole_nodes_of_a_submitted_command_must_fit_into_its_own(flux):
    done = flux("submit", "-N2", "--dovetail=nodes=2")
    assert json.loads(done.stdout)["resources"][0]["count"] == 2
    assert "nodes=3 with all cores" in flux("submit", "-N2", "--dovetail=nodes=3").stderr
    assert "--nodes: invalid int value 'x'" in flux("submit", "-Nx", "--dovetail=nodes=3").stderr


def test_a_submitted_command_has_one_broker_on_each_node_however_tasks_are_counted(flux):
    for count in "--tasks-per-node=3", "--tasks-per-core=2", "--cores=2":
        done = flux("submit", "-N2", count, "--dovetail=nodes=1")
        options = json.loads(done.stdout)["attributes"]["system"]["shell"]["options"]
        assert options["per-resource"] == {"type": "node"}, count


def test_a_file_of_the_users_stays_beside_the_configuration(flux):
    done = flux("submit", "-n1", "--dovetail=nodes=1", "--add-file=conf.json=the\\nuser's")
    files = json.loads(done.stdout)["attributes"]["system"]["files"]
    assert files["conf.json"]["data"] == "the\nuser's"
    assert files["dovetail-conf.json"]["data"]["dovetail"]["nodes"] == 1


def test_a_request_that_is_empty_is_refused(flux, capsys):
    for name, *words in ["batch", "--wrap"], ["submit"]:
        done = flux(name, "-N1", *words, "--dovetail=")
        assert (done.returncode, done.stdout) == (1, ""), name
        assert "--dovetail=: '' is not nodes=N" in done.stderr
    assert command.main(["up", "--dovetail="]) == 2
    assert "--dovetail=: '' is not nodes=N" in capsys.readouterr().err


def test_a_flux_that_is_too_old_is_named_before_submission(flux, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("""
import importlib.util
usual = importlib.util.find_spec
importlib.util.find_spec = lambda *one: None if one == ("flux.brokermod",) else usual(*one)
""")
    for name, *words in ["batch", "--wrap"], ["submit"]:
        done = flux(name, "-N1", *words, "--dovetail=nodes=1", PYTHONPATH=str(tmp_path))
        assert (done.returncode, done.stdout) == (1, ""), name
        assert "--dovetail needs Flux 0.84 or newer" in done.stderr
        assert done.stderr.count("\n") == 1


def test_what_is_said_on_the_command_line_wins_over_defaults_of_a_configuration(flux):
    usual = ["network=bridge", "usernetes=/opt/usernetes"]
    words = ["batch", "-N2", "--wrap", *(f"--conf=dovetail.{one}" for one in usual)]
    theirs = {"provider": "usernetes", "usernetes": "/opt/usernetes"}
    for said, found in {
        "": {"network": "bridge", "usernetes": "/opt/usernetes"},
        ",network=host": {"usernetes": "/opt/usernetes"},
        ",network=host,provider=usernetes,node-image=u:2": {**theirs, "node-image": "u:2"},
    }.items():
        spec = json.loads(flux(*words, f"--dovetail=nodes=2{said}").stdout)["attributes"]
        table = spec["system"]["files"]["conf.json"]["data"]["dovetail"]
        assert spec["user"]["dovetail"] == {"nodes": 2, "cores": "all", **found}, said
        network = found.get("network", "host")
        command = {"command": table["command"]}
        assert {**spec["user"]["dovetail"], "network": network, **command} == table, said
    done = flux(*words, '--conf=dovetail.provider="usernetes"', "--conf=dovetail.network=host",
                "--dovetail=nodes=1,node-image=u:2")  # fmt: skip
    assert '"node-image": "u:2"' in done.stdout, done.stderr


PYTHON = """
import sys
from flux.job import JobspecV1 as Made
more = eval(sys.argv[2])
args = {"from_submit": [["true"]]}.get(sys.argv[1], [])
try:
    print(getattr(Made, sys.argv[1])(*args, **more).dumps())
except ValueError as error:
    print(error)
"""


def test_pythons_interface_makes_the_same_instance_as_a_command(flux, tmp_path):
    (tmp_path / "made.py").write_text(PYTHON)

    def made(name, **more):
        return flux("python", "made.py", name, repr(more)).stdout

    batch = {"content": "#!/bin/sh\n", "nodes": 2}
    for name, more in ("from_batch", batch), ("from_alloc", {"nodes": 2}):
        for conf in {}, {"conf": {"dovetail": {"up-timeout": 7}, "exec": {"a": 1}}}:
            spec = json.loads(made(name, dovetail="nodes=2", **more, **conf))["attributes"]
            data = spec["system"]["files"]["conf.json"]["data"]
            assert data["dovetail"]["nodes"] == spec["user"]["dovetail"]["nodes"] == 2
            assert data["dovetail"].get("up-timeout") == (7 if conf else None)
            assert data["exec"] == {**({"a": 1} if conf else {}), "kill-timeout": "40s"}
        command = json.loads(made(name, dovetail="nodes=2", **more))["tasks"][0]["command"]
        assert command[:3] == ["flux", "broker", "-c{{tmpdir}}/conf.json"]
        assert "nodes=3 with all cores" in made(name, dovetail="nodes=3", **more)
    spec = json.loads(made("from_submit", dovetail="nodes=2"))
    assert spec["attributes"]["system"]["files"]["dovetail-conf.json"]


@pytest.mark.parametrize("key", ["exec", "job-manager", "job-manager.plugins"])
def test_a_configuration_to_which_nothing_can_be_added_is_refused(flux, key):
    done = flux("batch", "-N1", "--wrap", "--dovetail=nodes=1", f"--conf={key}=3")
    assert done.returncode == 1
    assert f"--conf: {key} is a " in done.stderr


def test_a_plugin_that_a_configuration_has_already_is_loaded_once(flux):
    theirs = [{"load": "perilog.so"}, {"load": "/usr/lib/flux/alloc-bypass.so"}]
    conf = f"--conf=job-manager.plugins={json.dumps(theirs)}"
    done = flux("batch", "-N1", "--wrap", "--dovetail=nodes=1", conf)
    files = json.loads(done.stdout)["attributes"]["system"]["files"]
    found = files["conf.json"]["data"]["job-manager"]["plugins"]
    assert found[:2] == theirs
    assert not any("bypass" in one["load"] for one in found[2:])


@pytest.fixture
def instance(monkeypatch):
    """The configuration of an instance in which `up --dovetail` loads the module, and no more."""
    config = {"dovetail": {"usernetes": "/opt/usernetes", "up-timeout": 300}}
    asked = []
    nodes = {"execution": {"R_lite": [{"rank": "0-1", "children": {"core": "0-3"}},
                                      {"rank": "2,4", "children": {"core": "0,2"}}]}}  # fmt: skip

    def call(topic, payload=None):
        if topic == "dovetail.status" and not asked:
            raise BadInput(client.NOT_LOADED)
        if topic == "config.load":
            config.clear()
            config.update(payload)
        asked.append((topic, payload))
        return {"dovetail.status": {"phase": "failed"}, "config.get": dict(config),
                "job-list.list": {"jobs": []}, "resource.sched-status": {"all": nodes},
                "broker.getenv": {"env": {"FLUX_MODULE_PATH": "/flux"}}}.get(topic, {})  # fmt: skip

    monkeypatch.setattr(client, "call", call)
    monkeypatch.setattr(load, "flux", lambda *_: "")
    monkeypatch.setattr(load, "plugins", list)
    monkeypatch.setattr(load, "command", lambda: "/bin/flux-dovetail")
    monkeypatch.delenv("DOVETAIL_CACHE", raising=False)
    return config, asked


def test_a_request_by_hand_has_nothing_of_an_earlier_one(instance, monkeypatch):
    config, _ = instance
    monkeypatch.setenv("DOVETAIL_CACHE", "/another")
    load.load("nodes=2,cores=1,provider=dovetail,network=bridge")
    assert config["dovetail"]["cache"] == "/another"
    assert config["dovetail"]["network"] == "bridge"
    monkeypatch.delenv("DOVETAIL_CACHE")
    load.load("nodes=1,provider=usernetes")
    assert config["dovetail"]["usernetes"] == "/opt/usernetes", "which was there before"
    load.load("nodes=1")
    usual = {"usernetes": "/opt/usernetes", "up-timeout": 300, "network": "host"}
    found = {"nodes": 1, "cores": "all", "command": "/bin/flux-dovetail", **usual}
    assert config["dovetail"] == found


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        ("nodes=5", "nodes=5 with cores=all does not fit into this instance; nodes=4 would"),
        ("nodes=4,cores=3", "nodes=4 with cores=3 does not fit into this instance; nodes=2 would"),
        ("nodes=1,cores=5", "cores=5, and no node here has more than 4"),
    ],
)
def test_a_request_by_hand_for_which_there_is_no_room_is_bad_input_and_starts_nothing(
    instance, capsys, request_, why
):
    config, _ = instance
    before = dict(config)
    assert command.main(["up", f"--dovetail={request_}"]) == 2
    assert capsys.readouterr().err == f"flux dovetail: --dovetail={request_}: {why}\n"
    assert config == before


def test_a_request_by_hand_for_all_that_there_is_fits(instance):
    config, _ = instance
    load.load("nodes=6,cores=2")
    assert config["dovetail"]["nodes"] == 6


@pytest.mark.parametrize("at", ["module", "jobtap"])
def test_a_start_by_hand_that_is_interrupted_is_done_whole(instance, monkeypatch, at):
    config, _ = instance
    done = []

    def flux(*words):
        done.append(words[:2])
        if words[:2] == (at, "load"):
            signal.raise_signal(signal.SIGINT)  # to this thread, as a command has no other
        return ""

    monkeypatch.setattr(load, "plugins", lambda: ["gate.so"])
    monkeypatch.setattr(load, "flux", flux)
    with pytest.raises(KeyboardInterrupt):
        load.load("nodes=1")
    assert config["dovetail"]["nodes"] == 1
    assert done == [("jobtap", "list"), ("jobtap", "load"), ("module", "load")]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_a_module_that_was_loaded_by_hand_can_be_reloaded_by_its_name(instance):
    _, asked = instance
    load.load("nodes=1")
    ((_, told),) = [one for one in asked if one[0] == "broker.setenv"]
    assert told["env"]["FLUX_MODULE_PATH"] == f"/flux:{PLUGINS.parent / 'modules'}"


@pytest.mark.parametrize(("user", "ours"), [({"dovetail": {"slice": 0}}, True), ({}, False)])
def test_slices_of_a_module_that_was_removed_are_not_taken_for_what_is_asked(
    instance, monkeypatch, user, ours
):
    config, _ = instance
    spec = json.dumps({"attributes": {"system": {}, "user": user}})
    others, found = client.call, {"job-list.list": {"jobs": [{"id": 5, "name": "kube-0"}]},
                                  "job-info.lookup": {"jobspec": spec}}  # fmt: skip
    monkeypatch.setattr(
        client, "call", lambda topic, what=None: found.get(topic) or others(topic, what)
    )
    if ours:
        with pytest.raises(BadInput, match="flux module load dovetail"):
            load.load("nodes=2")
    else:
        load.load("nodes=2")
    assert ("nodes" in config["dovetail"]) is not ours


def test_of_two_that_load_the_module_at_once_one_waits_for_the_other(
    instance, monkeypatch, tmp_path
):
    config, _ = instance
    monkeypatch.setenv("FLUX_URI", f"local://{tmp_path}/local-0")
    there = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(there, fcntl.LOCK_EX)
    late = threading.Thread(target=load.load, args=("nodes=1",))
    late.start()
    late.join(0.3)
    assert late.is_alive()
    assert "nodes" not in config["dovetail"]
    os.close(there)
    late.join(10)
    assert config["dovetail"]["nodes"] == 1


def test_a_cache_is_the_submitters_wherever_slices_are(flux, tmp_path):
    done = flux("submit", "-n1", "--dovetail=nodes=1", DOVETAIL_CACHE="cache")
    found = json.loads(done.stdout)["attributes"]["system"]["environment"]
    assert found["DOVETAIL_CACHE"] == str(tmp_path / "cache")
