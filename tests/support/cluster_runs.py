# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the tests of runs on a cluster share: a cluster, `dovetail run` on it, and their traces."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from dovetail.executors.kubernetes import manifests, placement
from dovetail.mpi import page
from usernetes_setup.preflight import report

from support import known_programs
from support.clusters import LIMIT, Machine, as_user, eventually
from support.other_users import WHY_NOT

TOP = Path(__file__).resolve().parents[2]
ROOT = os.getuid() == 0
KINDS = ("jobs", "daemonsets", "pods", "secrets", "leases", "services", "configmaps")
LASTING = (manifests.REQUESTS, "kube-root-ca.crt")


class Site:
    """A cluster, and a folder to run plans in, both of the same user."""

    kinds = KINDS

    def __init__(self, machine: Machine, *words: str) -> None:
        self.machine = machine
        self.made = machine.up("--name", "one", *words)
        self.kubeconfig = self.made["kubeconfig"]
        self.folder = Path(tempfile.mkdtemp(prefix="dk-run-", dir="/tmp"))
        self.case = self.folder / "case"
        self.case.mkdir()
        self.runs: list[subprocess.Popen[str]] = []
        self.count = 0
        if machine.uid != os.getuid():
            for path in (self.folder, self.case):
                os.chown(path, machine.uid, machine.uid)

    # --- plans ---

    def plan(self, *entries: dict, **limits: object) -> Path:
        """Write a plan; entries get a case and a name."""
        usual = {"case": str(self.case), "ranks": 2}
        simulations = [{"name": "sim", **usual, **entry} for entry in entries]
        self.count += 1
        path = self.folder / f"plan-{self.count}.yaml"
        path.write_text(json.dumps({"simulations": simulations, **limits}))
        path.chmod(0o644)
        return path

    def busy(self, *milliseconds: int, iterations: int = 10**6, mpi: str = "openmpi", **more):
        """An entry of ranks that sleep so long per iteration, and meet; see known/busy.c."""
        program = known_programs.build(mpi, "known/busy.c")
        for path in (Path(program), Path(program).parent):
            path.chmod(0o755)
        words = ["sleep", str(iterations), *map(str, milliseconds)]
        return {
            "ranks": len(milliseconds), "weights": list(milliseconds), "command": [program, *words],
            **more,
        }  # fmt: skip

    # --- runs ---

    def start(
        self, plan: Path, out: str = "out", *words: str,
        program: tuple[str, ...] = ("-m", "dovetail"), **environment: str,
    ):  # fmt: skip
        """Start `dovetail run` on the cluster, in a process group of its own."""
        line = [sys.executable, *program, "run", "--kubeconfig", self.kubeconfig,
                str(plan), "-o", str(self.folder / out), "--json", *words]  # fmt: skip
        if self.machine.uid != os.getuid():
            line = as_user(self.machine.uid, *line)
        run = subprocess.Popen(
            line,
            env={**self.machine.environment, "PYTHONPATH": str(TOP / "flux-python"),
                 "PYTHONDONTWRITEBYTECODE": "1", **environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{out}.stderr").open("a"),
            start_new_session=True,
            text=True,
        )  # fmt: skip
        self.runs.append(run)
        return run

    def end(self, run, number: int = 0, limit: float = 2 * LIMIT) -> int:
        """Wait for a run's end, after a signal if one is given; its exit code."""
        if number:
            run.send_signal(number)
        run.communicate(timeout=limit)
        return run.returncode

    def errors(self, out: str = "out") -> str:
        """What a run said on standard error."""
        return (self.folder / f"{out}.stderr").read_text()

    def log(self, out: str = "out") -> list[dict]:
        """Its event log so far."""
        with contextlib.suppress(OSError):
            text = (self.folder / out / "events.jsonl").read_text()
            return [json.loads(line) for line in text.split("\n")[1:-1]]
        return []

    def of(self, kind: str, out: str = "out", name: str = "") -> list[dict]:
        """Its records of a type, of one simulation if one is named."""
        return [r for r in self.log(out) if r.get("type") == kind and name in ("", r.get("name"))]

    def until(self, question, out: str = "out", limit: float = 2 * LIMIT):
        """Wait for an answer; fails with what the run said."""
        answer = eventually(question, limit)
        assert answer, f"{self.errors(out)}\n{self.log(out)[-8:]}\n{self.pods()}"
        return answer

    def until_iterating(self, *names: str, out: str = "out", more: int = 3) -> None:
        """Wait until these simulations have gone on by some iterations from now."""
        have = {name: self.iterations(name, out) for name in names}
        self.until(lambda: all(self.iterations(n, out) >= have[n] + more for n in names), out)

    def iterations(self, name: str, out: str = "out") -> int:
        seen = self.of("Sampled", out, name)
        return min(seen[-1]["ranks"]["iterations"]) if seen else 0

    def began_with(self, out: str = "out") -> int:
        """How many nodes a run began with, which has an event log."""
        with (self.folder / out / "events.jsonl").open() as log:
            return len(json.loads(log.readline())["capacity"]["nodes"])

    def over(self, out: str = "out") -> bool:
        """Whether every rank of a run has finalized MPI, by its page, whoever is alive."""
        run = json.loads((self.folder / out / "status.json").read_text())["run"]
        found = [*map(page.read_page, Path("/dev/shm").glob(f"dovetail-*-{run}.*/*/rank.*"))]
        return bool(found) and all(one.state == "finalized" for one in found)

    def summary(self, out: str = "out") -> dict:
        return json.loads((self.folder / out / "summary.json").read_text())

    def states(self, out: str = "out") -> dict[str, str]:
        return {one["name"]: one["state"] for one in self.summary(out)["simulations"]}

    # --- the cluster ---

    def get(self, *words: str) -> dict:
        return self.machine.get(self.made, "-n", manifests.NAMESPACE, *words)

    def kubectl(self, *words: str, **options: object) -> str:
        return self.machine.kubectl(self.made, "-n", manifests.NAMESPACE, *words, **options)

    def apply(self, folder: str, *words: str) -> str:
        """Apply manifests of this checkout with kustomize, as an administrator does."""
        top = Path(__file__).resolve().parents[2] / folder
        kubectl = [str(self.machine.binaries / "bin/kubectl"), "--kubeconfig", self.kubeconfig]
        return subprocess.run(
            [*kubectl, "apply", "-k", str(top), *words], capture_output=True, text=True, check=True
        ).stdout

    def nodes(self) -> list[dict]:
        """Nodes that take pods: one that is ready may not yet."""
        return [*filter(placement.usable, self.get("nodes")["items"])]

    def pods(self, name: str = "") -> list[dict]:
        """Rank groups that are there, of one simulation if one is named."""
        label = f"{manifests.PART}={manifests.RANK_GROUP}"
        label += f",{manifests.SIMULATION}={name}" if name else ""
        return self.get("pods", "-l", label)["items"]

    def left(self) -> list[str]:
        """What runs have left on the cluster and on the machine."""
        found = []
        # At once: each kubectl takes a sixth of a second of CPU time.
        for one in self.get(",".join(self.kinds))["items"]:
            name = one["metadata"]["name"]
            if name not in LASTING:
                found.append(f"{one['kind']} {name}")
            elif (one["kind"], name) == ("ConfigMap", manifests.REQUESTS):
                found += [f"request {key}" for key in one.get("data", {})]
        for file in self.folder.glob("*/status.json"):
            run = json.loads(file.read_text())["run"]
            found += [str(path) for path in Path("/dev/shm").glob(f"dovetail-*-{run}.*")]
        return found

    def nothing_left(self) -> None:
        assert eventually(lambda: not self.left()), self.left()

    def close(self) -> None:
        for run in self.runs:
            if run.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(run.pid, signal.SIGKILL)
            run.communicate()
        self.machine.end("--name", "one")
        self.machine.close()
        shutil.rmtree(self.folder)


def made(binaries: Path, rootless: bool, *words: str) -> Site:
    """A site; skips where there can be none."""
    errors = report.errors()
    if errors:
        pytest.skip(f"cannot run here: {errors[0]}")
    if rootless and ROOT and WHY_NOT:
        pytest.skip(WHY_NOT)
    return Site(Machine(rootless, binaries), *words)


def of_a_user(binaries):
    """A site, as an ordinary user where that is possible."""
    found = made(binaries, os.getuid() != 0 or not WHY_NOT)
    yield found
    found.close()


site = pytest.fixture(of_a_user, scope="module", name="site")
doomed = pytest.fixture(of_a_user, name="doomed")  # of one test alone, which breaks it


@pytest.fixture
def worker(site):
    """A second node; what is left of it is removed afterwards."""
    file = str(site.machine.folder / "join.json")
    site.machine.verb("join", "--name", "one", "--invite", file)
    words = ("--cpus", "1", "--json", "--owner", str(os.getpid()), file)
    made = json.loads(site.machine.verb("join", *words).stdout)
    site.until(lambda: len(site.nodes()) == 2)
    yield made
    site.machine.end("--name", "one", "--node", made["node"])
    site.until(lambda: len(site.get("nodes")["items"]) == 1)


@pytest.fixture
def out(site, request):
    """A name for a run's directory; afterwards nothing of the run is left."""
    yield f"{request.node.name.split('[')[0][5:35]}-{len(site.runs)}"
    for run in site.runs:
        if run.poll() is None:
            site.end(run, signal.SIGTERM)
    site.nothing_left()


def containers(site):
    """The identity of each container of rank groups, and how often it was restarted."""

    def known():  # ranks iterate before the kubelet has told of their containers
        states = [state for one in site.pods() for state in one["status"]["containerStatuses"]]
        return all("containerID" in state for state in states) and states

    return sorted((one["containerID"], one["restartCount"]) for one in site.until(known))


def two(site, **more):
    """A plan of two simulations that never end by themselves, and that it clearly pays to pack."""
    return site.plan(site.busy(10, 30, count=2, **more))


def ends(site, out):
    """A file that ends simulations once it is there, and what makes them wait for it."""
    file = site.folder / out / "enough"
    return file, {"iterations": 0, "environment": {"BUSY_UNTIL": str(file)}}


def running(site, out, plan, *words, **more):
    run = site.start(plan, out, *words, **more)
    site.until(lambda: run.poll() is not None or len(site.of("Started", out)) == 2, out)
    assert run.poll() is None, site.errors(out)
    site.until_iterating("sim-1", "sim-2", out=out)
    return run
