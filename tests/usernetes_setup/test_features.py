# SPDX-License-Identifier: LGPL-3.0-or-later
"""What users of kubectl expect of any cluster, on both networks; see dovetail-kubernetes(7).

The table there names, for each of its rows, the test here that holds it. Both clusters are an
ordinary user's where that is possible.
"""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.request
from datetime import datetime, timedelta, timezone

import pytest
from support.clusters import LIMIT, Machine, eventually, modes, pod
from usernetes_setup.control import local_volumes
from usernetes_setup.preflight import report

pytestmark = pytest.mark.kube

FETCH = "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=5).read().decode())"
RESOLVE = """
import socket, sys
print(" ".join(sorted({found[4][0] for found in socket.getaddrinfo(sys.argv[1], 80)})))
"""
REFUSED = """
import socket, sys
refused = 0
for _ in range(20):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect((sys.argv[1], 53))
        asking.settimeout(5)
        try: asking.send(b"?") and asking.recv(9)
        except ConnectionRefusedError: refused += 1
        except OSError as error: print(error)
print(refused)
"""


class Cluster:
    """A cluster on one of the two networks."""

    def __init__(self, machine: Machine, network: str) -> None:
        self.machine, self.network = machine, network
        self.made = machine.up("--name", "one", "--network", network)
        self.bridge = network == "bridge"

    def kubectl(self, *words: str, **more: object) -> str:
        return self.machine.kubectl(self.made, *words, **more)

    def get(self, *words: str) -> dict:
        return self.machine.get(self.made, *words)

    def spec(self, command: str, **more: object) -> dict:
        """The spec of a pod that runs the machine's programs on the cluster's network."""
        made = json.loads(pod("x", command, cpu="20m", hostNetwork=not self.bridge, **more))
        return made["spec"]

    def apply(self, kind: str, name: str, spec: dict, version: str = "v1", **about: object) -> None:
        thing = {"apiVersion": version, "kind": kind, "metadata": {"name": name, **about},
                 "spec": spec}  # fmt: skip
        self.kubectl("apply", "-f", "-", text=json.dumps(thing))

    def pod(self, name: str, command: str = "exec sleep 1000", **more: object) -> None:
        """Make a pod, and wait until it runs."""
        self.apply("Pod", name, self.spec(command, **more), labels={"app": name})
        self.kubectl("wait", "--for=condition=Ready", f"pod/{name}", f"--timeout={LIMIT}s")

    def inside(self, name: str, *words: str, **more: object) -> str:
        return self.kubectl("exec", name, "--", *words, **more)

    def python(self, name: str, program: str, *words: str) -> str:
        """What a program prints in a pod; empty if it fails."""
        return self.inside(name, "/usr/bin/python3", "-c", program, *words, check=False).strip()

    def template(self, name: str, command: str, **more: object) -> dict:
        return {"metadata": {"labels": {"app": name}}, "spec": self.spec(command, **more)}

    def of(self, name: str) -> list[dict]:
        """A workload's pods that are not on their way out."""
        found = self.get("pods", "-l", f"app={name}")["items"]
        return [one for one in found if "deletionTimestamp" not in one["metadata"]]


@pytest.fixture(scope="module", params=["host", "bridge"])
def cluster(request, binaries):
    errors = report.errors()
    if errors:
        pytest.skip(f"cannot run here: {errors[0]}")
    machine = Machine(modes()[-1] == "rootless", binaries)
    try:
        yield Cluster(machine, request.param)
    finally:
        machine.close()


@pytest.fixture(scope="module")
def port():
    """A port of the machine that is free, also for pods on its network."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def serving(port: int, word: str) -> str:
    """A command that serves a file with a word in it."""
    return (f"cd $(mktemp -d) && echo {word} >index.html && "
            f"exec /usr/bin/python3 -m http.server {port}")  # fmt: skip


@pytest.fixture(scope="module")
def server(cluster, port):
    cluster.pod("server", f"echo begins; {serving(port, 'served')}")
    return "server"


@pytest.fixture(scope="module")
def client(cluster):
    cluster.pod("client")
    return "client"


def test_commands_run_in_pods_and_what_pods_say_is_kept(cluster, server):
    assert cluster.inside(server, "echo", "hello") == "hello\n"
    words = ("exec", "-i", server, "--", "cat")
    assert cluster.kubectl(*words, text="to a pod\n") == "to a pod\n"
    failed = cluster.kubectl("exec", server, "--", "sh", "-c", "echo no; exit 3", check=False)
    assert failed == "no\n"
    assert cluster.kubectl("logs", server).startswith("begins\n")


def test_files_are_copied_into_pods_and_out_of_them(cluster, server):
    folder = cluster.machine.folder
    (folder / "there").write_text("x" * 100_000)
    cluster.kubectl("cp", str(folder / "there"), f"{server}:/tmp/there")
    cluster.kubectl("cp", f"{server}:/tmp/there", str(folder / "back"))
    assert (folder / "back").read_text() == "x" * 100_000


def test_a_port_of_a_pod_is_forwarded_to_this_machine(cluster, server, port):
    kubectl = [str(cluster.machine.binaries / "bin/kubectl"), "--kubeconfig",
               cluster.made["kubeconfig"]]  # fmt: skip
    words = [*kubectl, "port-forward", server, f":{port}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as forward:
        try:
            ours = forward.stdout.readline().split(" -> ")[0].rsplit(":", 1)[-1]
            with urllib.request.urlopen(f"http://127.0.0.1:{ours}/", timeout=LIMIT) as answer:
                assert answer.read() == b"served\n"
        finally:
            forward.terminate()


def test_what_pods_and_nodes_use_is_told(cluster, server):
    def used(*words):
        return cluster.kubectl("top", *words, "--no-headers", check=False).split()

    def measured():
        """With the memory of a program that runs: the first look may be at one that begins."""
        row = used("pod", server)
        return len(row) == 3 and int(row[2].removesuffix("Mi")) > 0

    assert eventually(measured), cluster.kubectl("top", "pod", server)
    assert eventually(lambda: used("pod", "-l", "app=server")[:1] == [server])
    node = eventually(lambda: used("node"))
    assert node[0] == cluster.made["node"]
    assert 0 < int(node[3].removesuffix("Mi")) < cluster.made["memory"] >> 20
    assert cluster.kubectl("top", "pod", "-l", "app=nobody") == ""


def test_a_deployment_is_rolled_to_its_next_version_and_back(cluster):
    # On the machine's network the new pod cannot have the port before the old one has left it.
    strategy = {"rollingUpdate": {"maxSurge": 1 if cluster.bridge else 0, "maxUnavailable": 1}}

    def version(number: int) -> None:
        template = cluster.template("rolled", f"echo version {number}; exec sleep 1000")
        template["spec"]["containers"][0]["ports"] = [{"containerPort": 18080}]
        spec = {"replicas": 1, "selector": {"matchLabels": {"app": "rolled"}}, "strategy": strategy}
        cluster.apply("Deployment", "rolled", {**spec, "template": template}, "apps/v1")

    def until(number: int) -> None:
        words = ("rollout", "status", "deployment/rolled", f"--timeout={LIMIT}s")
        assert "successfully rolled out" in cluster.kubectl(*words)
        names = [one["metadata"]["name"] for one in cluster.of("rolled")]
        said = lambda: [cluster.kubectl("logs", name) for name in names]  # noqa: E731
        assert eventually(lambda: said() == [f"version {number}\n"]), said()

    version(1)
    until(1)
    version(2)
    until(2)
    cluster.kubectl("rollout", "undo", "deployment/rolled")
    until(1)
    cluster.kubectl("delete", "deployment", "rolled", "--wait=false")


def job(cluster, name: str, command: str) -> dict:
    return {"backoffLimit": 0, "template": cluster.template(name, command, restartPolicy="Never")}


def test_a_job_runs_to_its_end_once_for_each_completion(cluster):
    spec = job(cluster, "work", "echo did $JOB_COMPLETION_INDEX")
    more = {"completions": 3, "parallelism": 2, "completionMode": "Indexed"}
    cluster.apply("Job", "work", {**spec, **more}, "batch/v1")
    cluster.kubectl("wait", "--for=condition=Complete", "job/work", f"--timeout={LIMIT}s")
    said = sorted(cluster.kubectl("logs", one["metadata"]["name"]) for one in cluster.of("work"))
    assert said == ["did 0\n", "did 1\n", "did 2\n"]
    cluster.apply("Job", "fails", job(cluster, "fails", "exit 3"), "batch/v1")
    cluster.kubectl("wait", "--for=condition=Failed", "job/fails", f"--timeout={LIMIT}s")


def test_a_cron_job_starts_a_job_when_its_time_has_come(cluster):
    spec = {"schedule": "0 * * * *", "jobTemplate": {"spec": job(cluster, "hourly", "echo now")}}
    cluster.apply("CronJob", "hourly", spec, "batch/v1")
    # As if the last one had been two hours ago, so that nobody has to wait for the next hour.
    before = (datetime.now(timezone.utc) - timedelta(hours=2)).strftime("%Y-%m-%dT%H:%M:%SZ")
    cluster.kubectl("patch", "cronjob", "hourly", "--subresource=status", "--type=merge", "--patch",
                    json.dumps({"status": {"lastScheduleTime": before}}))  # fmt: skip
    done = "jsonpath={.items[*].status.succeeded}"
    assert eventually(
        lambda: cluster.kubectl("get", "job", "-l", "app=hourly", "-o", done) == "1"
        or any(one["status"]["phase"] == "Succeeded" for one in cluster.of("hourly"))
    )


def test_a_service_is_reached_by_address_and_name_where_pods_have_addresses(
    cluster, server, client, port
):
    kubectl = [str(cluster.machine.binaries / "bin/kubectl"), "--kubeconfig",
               cluster.made["kubeconfig"], "expose", "pod", server, "--port", "80",
               "--target-port", str(port)]  # fmt: skip

    def warned(*more):
        return subprocess.run([*kubectl, *more], capture_output=True, text=True, check=True).stderr

    if not cluster.bridge:
        why = "nothing serves the address or the name of a service"
        assert eventually(lambda: why in warned("--dry-run=server")), "a policy counts soon"
        assert why in warned()
        url = f"http://{cluster.made['node']}:{port}/"  # a loopback node is named by its address
        assert eventually(lambda: cluster.python(client, FETCH, url) == "served")
        return
    assert warned() == ""
    address = cluster.get("service", server)["spec"]["clusterIP"]
    for host in (address, server, f"{server}.default", f"{server}.default.svc.cluster.local"):
        assert eventually(lambda: cluster.python(client, FETCH, f"http://{host}/") == "served")  # noqa: B023
    assert eventually(lambda: cluster.python(client, RESOLVE, server) == address)


def test_a_headless_service_and_a_stateful_set_name_their_pods(cluster, client):
    if not cluster.bridge:
        pytest.skip("pods on the machine's network have its address and its name service")
    headless = {"clusterIP": "None", "selector": {"app": "db"}, "ports": [{"port": 80}]}
    cluster.apply("Service", "db", headless)
    spec = {"serviceName": "db", "replicas": 2, "selector": {"matchLabels": {"app": "db"}},
            "template": cluster.template("db", "exec sleep 1000")}  # fmt: skip
    cluster.apply("StatefulSet", "db", spec, "apps/v1")
    cluster.kubectl("rollout", "status", "statefulset/db", f"--timeout={LIMIT}s")
    own = {one["metadata"]["name"]: one["status"]["podIP"] for one in cluster.of("db")}
    assert set(own) == {"db-0", "db-1"}
    both = " ".join(sorted(own.values()))
    assert eventually(lambda: cluster.python(client, RESOLVE, "db") == both)
    for name, address in own.items():
        assert eventually(lambda: cluster.python(client, RESOLVE, f"{name}.db") == address)  # noqa: B023
    cluster.kubectl("delete", "statefulset", "db", "--wait=false")


def test_names_outside_the_cluster_are_the_machines_or_are_denied_at_once(cluster, client):
    program = "import socket; print(open('/etc/resolv.conf').read())"
    told = cluster.python(client, program)
    if cluster.bridge:
        assert "cluster.local" in told
        failing = "import socket\ntry: socket.getaddrinfo('example.org', 80)\nexcept OSError as e: print(e.errno)"  # noqa: E501
        assert eventually(lambda: cluster.python(client, failing) == str(socket.EAI_NONAME))
        for server in ("10.255.255.53", "198.51.100.1"):
            assert cluster.python(client, REFUSED, server) == "20", "each time, not once a second"
    else:
        assert "cluster.local" not in told


def test_a_claim_gets_a_folder_on_the_node_which_goes_with_it(cluster):
    claim = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
    cluster.apply("PersistentVolumeClaim", "kept", claim)
    node = cluster.machine.folder / "s/one/nodes" / cluster.made["node"]

    def use(name: str, command: str) -> str:
        spec = cluster.spec(command, restartPolicy="Never")
        spec["volumes"].append({"name": "kept", "persistentVolumeClaim": {"claimName": "kept"}})
        mounts = spec["containers"][0]["volumeMounts"]
        mounts.append({"name": "kept", "mountPath": "/kept"})
        cluster.apply("Pod", name, spec)
        ended = "--for=jsonpath={.status.phase}=Succeeded"
        cluster.kubectl("wait", ended, f"pod/{name}", f"--timeout={LIMIT}s")
        said = cluster.kubectl("logs", name)
        cluster.kubectl("delete", "pod", name)
        return said

    use("writes", "echo remembered >/kept/file")
    assert use("reads", "cat /kept/file") == "remembered\n"
    found = cluster.get("pvc", "kept")
    assert found["spec"]["storageClassName"] == local_volumes.CLASS
    (kept,) = (node / "volumes").iterdir()
    assert kept.name == found["spec"]["volumeName"]
    assert kept.stat().st_mode & 0o777 == 0o777, "as images of databases have users of their own"
    cluster.kubectl("delete", "pvc", "kept")
    assert eventually(lambda: not cluster.get("pv")["items"])
    assert not kept.exists()


def test_a_network_policy_is_refused_in_words(cluster):
    policy = {
        "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy",
        "metadata": {"name": "closed"}, "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
    }  # fmt: skip
    line = [str(cluster.machine.binaries / "bin/kubectl"), "--kubeconfig",
            cluster.made["kubeconfig"], "create", "-f", "-"]  # fmt: skip

    def refused(*more):
        done = subprocess.run([*line, *more], input=json.dumps(policy), capture_output=True,
                              text=True)  # fmt: skip
        return done.stderr if done.returncode == 1 else ""

    why = "nothing in this cluster enforces a NetworkPolicy, so none is taken"
    assert eventually(lambda: why in refused("--dry-run=server")), "a policy counts soon"
    assert why in refused()
