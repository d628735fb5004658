# SPDX-License-Identifier: LGPL-3.0-or-later
"""What user-space Kubernetes costs on this machine: time to start, memory, resizes.

Input: the number of rounds. Output: `Claim`s, as root and rootless where both can be tried: root
plays a user that exists only here. Every round takes a cluster through its whole life, and users
take turns. Invariant: a cluster ends with this process, however that ends.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from usernetes_setup.build import oci_image
from usernetes_setup.build import programs as build
from usernetes_setup.control import api_client
from usernetes_setup.node import cgroups
from usernetes_setup.preflight import report

from dovetail.bench.harness import Claim, Progress, Row, ratios
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host.install_paths import package_environment

FIGURES = {
    "up, to node ready": ("s", 8.0),
    "first pod running after that": ("s", 4.0),
    "second node ready": ("s", 4.0),
    "PATCH to changed control group": ("ms", 50.0),
    "idle memory": ("MB", 450.0),
    "down": ("s", 10.0),
}
PODS = "/api/v1/namespaces/default/pods"
RESIZES = 10  # in each round; the round's figure is their median
SETTLED = 0.01  # memory that changed by less than this share in `LOOK` seconds is idle
LOOK, PATIENCE = 3.0, 24.0
IDLE = 25.0  # seconds until memory is looked at: components have given back what they can by then


def kube(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """From `up` to `down`, again and again, for each user in turn."""
    errors = report.errors()
    if errors:
        raise BadInput(f"user-space Kubernetes cannot run here: {errors[0]}; see `dovetail doctor`")
    with _users(scratch, progress) as users:
        for number in range(repeat):
            for user in users[number % len(users) :] + users[: number % len(users)]:
                user.life()
                seen = ", ".join(f"{name} {user.values[name][-1]:.3g}" for name in FIGURES)
                progress(f"round {number + 1}/{repeat}  {user.name}: {seen}")
    claims = [
        Claim(Row(f"{user.name}: {name}", tuple(user.values[name])), unit, "<=", bound)
        for user in users
        for name, (unit, bound) in FIGURES.items()
    ]
    if len(users) == 2:
        root, other = (Row(u.name, tuple(u.values["up, to node ready"])) for u in users)
        claims.append(Claim(ratios(other, root, "up, rootless / root"), "x"))
    return claims


@dataclass
class User:
    """Somebody who starts clusters: this process's user, or one that root plays."""

    name: str
    uid: int
    folder: Path
    programs: Path
    values: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in FIGURES})

    def become(self) -> list[str]:
        """What goes before a command that this user shall run."""
        if self.uid == os.getuid():
            return []
        return ["setpriv", f"--reuid={self.uid}", f"--regid={self.uid}", "--clear-groups"]

    def verb(self, *words: str) -> Any:  # noqa: ANN401
        """One verb's JSON. Raises WorkFailed."""
        line = [*self.become(), sys.executable, "-m", "usernetes_setup", *words, "--json"]
        environment = {
            **package_environment(),
            "HOME": str(self.folder),
            "DOVETAIL_STATE": str(self.folder / "s"),
            "DOVETAIL_CACHE": str(self.programs),
            "DOVETAIL_SETUP": str(build.setup_folder()),
        }
        done = subprocess.run(line, env=environment, capture_output=True, text=True, cwd="/")
        if done.returncode:
            raise WorkFailed(f"{self.name}: {words[0]}: {done.stderr.strip()}")
        return json.loads(done.stdout)

    def timed(self, figure: str, *words: str) -> Any:  # noqa: ANN401
        """A verb whose duration is a figure."""
        started = time.monotonic()
        answer = self.verb(*words)
        self.values[figure].append(time.monotonic() - started)
        return answer

    def life(self) -> None:
        """One cluster from `up` to `down`."""
        made = self.timed("up, to node ready", "up", "--name", "bench", "--owner", str(os.getpid()))
        try:
            folder = Path(made["folder"]).parents[1]
            authority = (folder / "pki/ca.crt").read_text()
            client = api_client.Client(made["server"], authority, folder / "pki/admin.crt")
            started = time.monotonic()
            client.call("POST", PODS, pod())
            identity = running(client)
            self.values["first pod running after that"].append(time.monotonic() - started)
            waits = sorted(resizes(client, made["group"], identity))
            self.values["PATCH to changed control group"].append(1e3 * waits[len(waits) // 2])
            file = str(self.folder / "join.json")
            self.verb("join", "--name", "bench", "--invite", file)
            worker = self.timed("second node ready", "join", "--owner", str(os.getpid()), file)
            self.verb("down", "--name", "bench", "--node", worker["node"])
            client.call("DELETE", f"{PODS}/bench", {"gracePeriodSeconds": 0})
            monitor = json.loads((Path(made["folder"]) / "node.json").read_text())["monitor"]
            self.values["idle memory"].append(idle_memory(made["group"], monitor) / 1e6)
        finally:
            self.timed("down", "down", "--name", "bench")


@contextmanager
def _users(scratch: Path, progress: Progress) -> Iterator[list[User]]:
    """Who can be tried here; what they need is made, and removed after."""
    with another(scratch, progress) as other:
        users = [other] if other else []
        if os.getuid() == 0:
            folder = scratch / "root"
            folder.mkdir(mode=0o700)
            users.insert(0, User("root", 0, folder, build.cache().parent))
        yield users


@contextmanager
def another(scratch: Path, progress: Progress) -> Iterator[User | None]:
    """An ordinary user: this one, or one that root plays, who is removed after.

    None if others cannot read this installation. The scratch folder must be of its own.
    """
    built = build.built() or build.build(progress)
    folder = scratch / "rootless"
    folder.mkdir(mode=0o700)
    if os.getuid() != 0:
        yield User("rootless", os.getuid(), folder, build.cache().parent)
        return
    scratch.chmod(0o711)  # so that the other user gets to its own folder in it
    uid = 200_000 + os.getpid()
    programs = scratch / "programs"
    shutil.copytree(built, programs / "kube" / built.name, symlinks=True)
    os.chown(folder, uid, uid)
    _delegate(uid)
    try:
        other = User("rootless", uid, folder, programs)
        try:
            other.verb("status")
            found = True
        except WorkFailed:
            progress("only as root: other users cannot read this installation or its Python")
            found = False
        yield other if found else None
    finally:
        end = time.monotonic() + PATIENCE
        while _runs(uid) and time.monotonic() < end:  # what was interrupted ends by itself
            time.sleep(0.2)
        _delegate(uid, "--remove")


def _delegate(uid: int, *words: str) -> None:
    """Give a user control groups, or with --remove take them away. Raises WorkFailed."""
    line = [str(build.setup_folder() / "delegate"), str(uid), *words]
    done = subprocess.run(line, capture_output=True, text=True)
    if done.returncode:
        raise WorkFailed(f"{' '.join(line)}: {done.stderr.strip()}")


def _runs(uid: int) -> bool:
    """Whether a user has processes."""
    for entry in os.scandir("/proc"):
        with suppress(FileNotFoundError):
            if entry.name.isdigit() and entry.stat().st_uid == uid:
                return True
    return False


def pod() -> api_client.Object:
    """A pod that only waits."""
    container = {
        "name": "main", "image": oci_image.HOST, "imagePullPolicy": "Never",
        "resources": {"requests": {"cpu": "100m", "memory": "32Mi"}},
    }  # fmt: skip
    return {
        "metadata": {"name": "bench"},
        "spec": {"hostNetwork": True, "terminationGracePeriodSeconds": 0,
                 "containers": [container]},
    }  # fmt: skip


def running(client: api_client.Client) -> str:
    """Wait until the pod's container runs; returns the container's id."""
    for _, thing in client.watch(PODS, "fieldSelector=metadata.name=bench&timeoutSeconds=60"):
        for status in thing.get("status", {}).get("containerStatuses", []):
            if "running" in status["state"]:
                return str(status["containerID"].split("//")[1])
    raise WorkFailed("the pod did not run within a minute")


def resizes(client: api_client.Client, group: str, identity: str) -> Iterator[float]:
    """Seconds from the PATCH to the changed value on disk, again and again."""
    value = weight(group, identity)
    for number in range(RESIZES):
        cpu = ("500m", "100m")[number % 2]
        change = {"containers": [{"name": "main", "resources": {"requests": {"cpu": cpu}}}]}
        before, started = value.read_text(), time.monotonic()
        client.call("PATCH", f"{PODS}/bench/resize", {"spec": change},
                    kind="application/strategic-merge-patch+json")  # fmt: skip
        while value.read_text() == before:
            if time.monotonic() - started > 60:
                raise WorkFailed("a resize did not reach the control group within a minute")
            select.select([], [], [], 0.0005)  # the kernel tells nobody of such a change
        yield time.monotonic() - started


def weight(group: str, identity: str) -> Path:
    """The file with a container's CPU weight."""
    for folder in cgroups.folders(group):
        for path in folder.rglob(f"*{identity}*"):
            for name in ("cpu.shares", "cpu.weight"):
                if (path / name).exists():
                    return path / name
    raise WorkFailed(f"{group}: no CPU weight of container {identity}")


def idle_memory(group: str, monitor: int) -> float:
    """Bytes that the node's processes take, pages in common counted once, when nothing changes."""
    select.select([], [], [], IDLE)
    deadline, last = time.monotonic() + PATIENCE, 0.0
    while True:
        now = sum(map(_proportional, {monitor, *cgroups.processes(group)}))
        if abs(now - last) < SETTLED * now or time.monotonic() > deadline:
            return now
        last = now
        select.select([], [], [], LOOK)


def _proportional(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0  # it ended meanwhile
    return 1024.0 * next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
