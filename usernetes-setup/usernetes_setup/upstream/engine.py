# SPDX-License-Identifier: LGPL-3.0-or-later
"""Upstream's verbs and the container engine, as a node's record says.

Inputs: an upstream checkout, a record. Outputs: a copy of the checkout, as it is, where its `make`
verbs are typed with upstream's own variables; what is added by a second compose file. Invariants:
nothing of upstream's makefiles and compose file is changed; the user's checkout is only read.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from dovetail.core.errors import BadInput
from dovetail.host.private_files import write_private

from usernetes_setup.upstream.record import Record

PARTS = ("Makefile", "Makefile.d/check-preflight.sh", "docker-compose.yaml", "Dockerfile",
         "Dockerfile.d/u7s-entrypoint.sh", "kubeadm-config.yaml")  # fmt: skip
LABEL = "com.docker.compose.project"
SOURCE = "https://github.com/rootless-containers/usernetes"
WAITS = ("controlPlaneComponentHealthCheck", "kubeletHealthCheck", "kubernetesAPICall",
         "etcdAPICall")  # fmt: skip
STATIC = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler")
"""The pods that kubeadm makes, by which kubeadm knows the patches for them."""
PATCHES = "/dovetail-patches"
LIMIT = 60.0  # seconds for any one command of a slow machine
KEPT = re.compile(
    r"(https?|ftp|all|no)_proxy|XDG_(CONFIG|DATA)_HOME|REGISTRY_AUTH_FILE|TMPDIR"
    r"|(CONTAINER[DS]?|DOCKER|NERDCTL)_\w+", re.IGNORECASE,
)  # fmt: skip
"""The user's variables that an engine heeds: which one answers, where it has its things, and how it
gets out."""
DIRECT = ("localhost", "127.0.0.1", "10.96.0.0/16", "10.244.0.0/16", ".svc", ".cluster.local")
"""What no proxy leads to, with upstream's networks of services and pods."""
YEAR = 365 * 86400.0  # seconds
PERIOD, FAILURES = 10, 8  # seconds between two of kubeadm's probes, and how many in a row may fail


def check(checkout: Path) -> None:
    """Refuse what is no checkout of Gen 2. Raises BadInput."""
    for part in PARTS:
        if not (checkout / part).is_file():
            raise BadInput(
                f"--usernetes {checkout}: has no {part}; a checkout of Usernetes (Gen 2) would be "
                f"right, such as `git clone {SOURCE}` makes"
            )


def copy(record: Record, checkout: Path) -> None:
    """Give the node a checkout of its own, and the compose file with what is added."""
    leave = shutil.ignore_patterns(".git", "docs", "kubeconfig", "join-command")
    shutil.copytree(checkout, record.checkout, ignore=leave)
    volumes = [f"{folder}:{folder}" for folder in record.mounts]
    service: dict[str, object] = {}
    if not record.worker:
        write_private(record.folder / "kubeadm-config.yaml", _patient(record))
        volumes.append(f"{record.folder}/kubeadm-config.yaml:/usernetes/kubeadm-config.yaml:ro")
        # An API server that has too much to do for a minute is not to be started anew for it.
        probe = {"failureThreshold": max(FAILURES, int(patience(record) / PERIOD))}
        (record.folder / "patches").mkdir()
        for pod in STATIC:
            patch = {"spec": {"containers": [{"name": pod, "livenessProbe": probe}]}}
            write_private(record.folder / f"patches/{pod}+strategic.json", json.dumps(patch))
        volumes.append(f"{record.folder}/patches:{PATCHES}:ro")
    if record.image:
        # Upstream's Dockerfile but for what it downloads, which is in the image.
        lines = (record.checkout / "Dockerfile").read_text().splitlines()
        kept = [line for line in lines if re.match(r"(ADD Dockerfile\.d/|ENTRYPOINT )", line)]
        (record.folder / "Dockerfile").write_text("\n".join([f"FROM {record.image}", *kept, ""]))
        service["build"] = {"context": ".", "dockerfile": str(record.folder / "Dockerfile")}
        service["image"] = "localhost/dovetail/usernetes:latest"
    added = {"services": {"node": {**service, "volumes": volumes}}}
    write_private(record.folder / "compose.yaml", json.dumps(added, indent=1))  # which is YAML


def patience(record: Record) -> float:
    """Seconds that its user has for the node: who waits for ever has a year."""
    return min(record.timeout, YEAR)


def _patient(record: Record) -> str:
    """Upstream's configuration of kubeadm, with no shorter patience than the user's.

    And with no election among one: on a machine that is slow for a while, who holds the lease loses
    it, and is started anew, as is who does not answer probes for a while, which the patches are
    for. With keys of elliptic curves, which are made, and sign, in a hundredth of the time: a start
    makes a dozen, and every connection begins with one.
    """
    text = (record.checkout / "kubeadm-config.yaml").read_text()
    limit = f"{max(240, int(patience(record)))}s"
    waits = "".join(f"  {name}: {limit}\n" for name in WAITS)
    alone = '    - name: leader-elect\n      value: "false"\n'
    arguments = "controllerManager:\n  extraArgs:\n"
    for before, after in (
        (
            "kind: InitConfiguration\n",
            f"kind: InitConfiguration\npatches: {{directory: {PATCHES}}}\ntimeouts:\n{waits}",
        ),
        (
            "kind: ClusterConfiguration\n",
            "kind: ClusterConfiguration\nencryptionAlgorithm: ECDSA-P256\n",
        ),
        (f"{arguments}    - ", f"scheduler:\n  extraArgs:\n{alone}{arguments}{alone}    - "),
    ):
        text = text.replace(
            before, after, 1
        )  # nothing, where upstream has come to say it otherwise
    return text


def kept() -> dict[str, str]:
    """What this user's environment says to an engine, for the node's record."""
    return {name: value for name, value in os.environ.items() if KEPT.fullmatch(name)}


def settings(record: Record) -> dict[str, str]:
    """Our environment, with what it said to the engine when the node was planned."""
    if record.settings is None:  # an earlier version's
        return dict(os.environ)
    ours = {name: value for name, value in os.environ.items() if not KEPT.fullmatch(name)}
    theirs = dict(record.settings)
    if not os.path.isdir(theirs.get("TMPDIR", "")):  # a batch job's goes with it
        theirs.pop("TMPDIR", None)
    return ours | theirs


def reach(settings: dict[str, str], *hosts: str) -> None:
    """Let hosts be reached without a proxy, where one is used: podman hands it on to the node."""
    if any(name.lower().endswith("_proxy") for name in settings):
        known = settings.get("no_proxy") or settings.get("NO_PROXY")
        listed = ",".join(filter(None, (known, *hosts)))
        settings.update(no_proxy=listed, NO_PROXY=listed)


def environment(record: Record) -> dict[str, str]:
    """Upstream's variables for this node, and none of a make that runs us."""
    files = f"-f docker-compose.yaml -f {record.folder}/compose.yaml"
    own = {
        "CONTAINER_ENGINE": record.engine,
        "COMPOSE": f"{record.compose} -p {record.project} {files}",
        "HOST_IP": record.address,
        "NODE_NAME": record.node,
        "NODE_SUBNET": record.subnet,
        **{f"PORT_{'KUBE_' if name == 'apiserver' else ''}{name.upper()}": str(port)
           for name, port in record.ports.items()},
    }  # fmt: skip
    if record.image:  # what upstream's preflight runs; it need not be pulled
        own["BUSYBOX_IMAGE"] = record.image
    outer = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES")
    ours = {name: text for name, text in settings(record).items() if name not in outer}
    reach(ours, *DIRECT, record.node, record.address, record.subnet)
    return ours | own


def make(record: Record, *verbs: str) -> subprocess.Popen[bytes]:
    """Start upstream's verbs; what they say goes to our own standard error.

    They have a session of their own, by which all that they started can be ended.
    """
    return subprocess.Popen(
        ["make", "--no-print-directory", *verbs], cwd=record.checkout, env=environment(record),
        stdin=subprocess.DEVNULL, stdout=2, start_new_session=True,
    )  # fmt: skip


def inside(record: Record, *words: str) -> list[str]:
    """A command in the node."""
    return [record.engine, "exec", container(record), *words]


def container(record: Record) -> str:
    """The id of the node's container, or its name where it cannot be asked."""
    ids = listed(record, "ps", "-a", "-q")
    return ids[0] if ids else f"{record.project}_node_1"


def listed(record: Record, *words: str) -> list[str] | None:
    """What the engine lists of this node's things; None if it does not answer."""
    told = ask(record, *words, "--filter", f"label={LABEL}={record.project}")
    return None if told is None else told.split()


def ask(record: Record, *words: str) -> str | None:
    """What a command of the node's engine prints; None if it fails."""
    return quiet([record.engine, *words], settings(record))


def quiet(words: Sequence[str], environment: dict[str, str] | None = None) -> str | None:
    """What a command prints that may fail; then None."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT,
                              stdin=subprocess.DEVNULL, env=environment)  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return None
    return str(done.stdout) if done.returncode == 0 else None
