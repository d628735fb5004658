# SPDX-License-Identifier: LGPL-3.0-or-later
"""What is prepared for the brokers of a MiniCluster, without a cluster."""

from __future__ import annotations

import re
import shlex
import subprocess
import threading

import pytest
from dovetail.core import protocol
from dovetail.executors import pods
from dovetail.executors.kubernetes import manifests, minicluster, pod_status, workload_kinds
from dovetail.executors.kubernetes.lifecycle import new_key
from dovetail.executors.pods import flux_broker, messages
from support.local_runs import LIMIT, wait_for
from support.pod_processes import cluster  # noqa: F401

pytestmark = pytest.mark.unit
tomllib = pytest.importorskip("tomllib")  # Python 3.11
SPEC = protocol.Spec("sim", "family", "/case", 3, (1.0, 1.0, 1.0), ("solve",))


def test_z85_is_as_its_specification_has_it():
    assert workload_kinds.z85(bytes.fromhex("864fd26fb559f75b")) == "HelloWorld"
    assert workload_kinds.z85(bytes(32)) == "0" * 40
    assert workload_kinds.z85(b"\xff" * 32) == "%nSc0" * 8


def test_a_certificate_has_two_keys_and_is_new_each_time():
    pattern = r'public-key = "(\S{40})"\n    secret-key = "(\S{40})"\n'
    found = [re.search(pattern, workload_kinds.certificate()).groups() for _ in range(2)]
    assert len({key for pair in found for key in pair}) == 4


@pytest.mark.parametrize("size", [1, 2, 5])
def test_every_broker_finds_itself_and_the_first_in_the_configuration(size):
    made = tomllib.loads(flux_broker.configuration("sim-abc", size, "127.0.0.1:5"))["bootstrap"]
    hosts = made["hosts"]
    assert hosts[0]["host"] == "sim-abc-0"
    assert hosts[0]["bind"] == hosts[0]["connect"] == "tcp://127.0.0.1:5"
    assert [one["host"] for one in hosts[1:]] == ([f"sim-abc-[1-{size - 1}]"] if size > 1 else [])


def meet(cluster, node, simulation="sim", address="", patience=LIMIT):  # noqa: F811
    asked = messages.Broker(simulation, address)
    return flux_broker.meet(str(cluster.session(node)), asked, patience)


def test_the_first_address_is_told_to_those_who_came_before_it_and_after_on_other_nodes(
    cluster,  # noqa: F811
):
    early: list[str] = []
    waiting = threading.Thread(target=lambda: early.append(meet(cluster, "one")))
    waiting.start()
    for _ in range(2):  # before there is an agent, and again when that was another one
        cluster.agent("one")
        cluster.until(messages.Joined)
        wait_for(lambda: "sim" in cluster.hub._asking)
        cluster.agents["one"].kill()
        cluster.agents["one"].wait()
        cluster.until(messages.Gone)
    for node in ("one", "two"):
        cluster.agent(node)
    own = flux_broker.free("127.0.0.1")
    assert re.fullmatch(r"127\.0\.0\.1:\d+", own)
    assert meet(cluster, "two", address=own) == own
    waiting.join()
    assert early == [own] == [meet(cluster, "one")]


def test_a_first_pod_that_never_says_where_it_is_is_not_waited_for_for_ever(
    cluster,  # noqa: F811
):
    cluster.agent("one")
    assert meet(cluster, "one", "other", "127.0.0.1:5") == "127.0.0.1:5"
    with pytest.raises(TimeoutError, match="nobody has said in 0.5 s where the first one listens"):
        meet(cluster, "one", patience=0.5)
    cluster.hub.tell(messages.End("other", 0))
    with pytest.raises(TimeoutError):  # what is over has no brokers
        meet(cluster, "one", "other", patience=0.5)


def test_an_entry_has_its_own_pods_environment_and_nothing_of_flux_or_the_first_pod(tmp_path):
    given = {"A": "a b'c", "PATH": "/opt/flux/bin", "FLUX_URI": "x", "JOB_COMPLETION_INDEX": "1"}
    script = tmp_path / "entry"
    script.write_text(flux_broker.entrypoint(["/usr/bin/env"], given))
    done = subprocess.run(["sh", str(script)], env={"FLUX_JOB_ID": "1", "PMI_RANK": "0"},
                          capture_output=True, text=True, check=True)  # fmt: skip
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    found.pop("PWD", None)
    assert found == {"A": "a b'c", "PATH": pods.PATH}


def test_the_shell_that_prepares_a_broker_is_one_word_for_each_word():
    seen = manifests.Folders(("/usr",), ("/out dir",))
    made = minicluster.minicluster(
        "abc", SPEC, "sim x", [2, 1], [1, 1], [1, 1], seen, "/opt/flux/bin"
    )
    pre = made["spec"]["containers"][0]["commands"]["pre"]
    words = shlex.split(pre.splitlines()[0].removesuffix(" || exit 1"))
    assert words[words.index("--simulation") + 1] == "sim x"
    assert words[words.index("--size") + 1] == "2"
    checked = subprocess.run(["bash", "-n"], input=pre, text=True, capture_output=True)
    assert checked.stderr == ""


@pytest.mark.parametrize("longest", ["a" * 40, "1" + "a" * 80])
def test_names_that_the_operator_makes_longer_stay_short_enough(longest):
    key = new_key(longest, again=True)
    spec = protocol.Spec(longest, "f", "/case", 1, (1.0,), ("solve",))
    seen = manifests.Folders((), ())
    made = minicluster.minicluster("abcdef", spec, key, [1], [1], [1], seen, "/f")
    name = made["metadata"]["name"]
    assert len(name + "-entrypoint") <= 63, "which is the name of a volume"
    service = made["spec"]["network"]["headlessName"]
    assert re.fullmatch(r"[a-z][a-z0-9-]{0,62}", service)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"waiting": {"reason": "CreateContainerError", "message": "no bash"}}, "no bash"),
        ({"terminated": {"exitCode": 0}}, ""),
        ({"waiting": {"reason": "CreateContainerConfigError", "message":
            "services have not yet been read at least once, cannot construct envvars"}}, ""),
    ],
)  # fmt: skip
def test_a_container_of_preparation_is_hopeless_when_it_can_never_start(state, said):
    pod = {
        "metadata": {"name": "p"},
        "spec": {"containers": [{"image": "i"}]},
        "status": {"initContainerStatuses": [{"state": state}], "containerStatuses": []},
    }
    assert said in pod_status.hopeless(pod)
    assert bool(pod_status.hopeless(pod)) == bool(said)
