# SPDX-License-Identifier: LGPL-3.0-or-later
"""A Flux instance with Dovetail for the tests (tier flux), and a watch on what is left in it."""

from __future__ import annotations

import contextlib
import functools
import glob
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from dovetail.host import processes
from usernetes_setup.build import programs

from support.clusters import SETUP, USER, below, eventually
from support.local_runs import FAKE_MPIRUN
from support.other_users import WHY_NOT

LIMIT = 450  # seconds that anything may take on a slow machine under load
PATIENT = "--conf=dovetail.up-timeout=400"  # instead of 120 s, which are for a user who waits
COMMANDS = Path(sys.executable).parent
OPTION = "--dovetail=nodes=2,cores=1"
# `flux cancel --all; flux queue idle`, which are two programs in Python.
CANCEL_ALL = """
import os, flux
handle = flux.Flux()
active = 62  # all states from DEPEND to CLEANUP
mine = {"userid": os.getuid(), "states": active, "severity": 0, "type": "cancel"}
handle.rpc("job-manager.raiseall", {**mine, "dry_run": False}).get()
handle.rpc("job-manager.idle").get()
"""


def flux_command() -> str:
    """The flux command, or a skip that says what is missing."""
    for place in (os.environ.get("FLUX"), shutil.which("flux"), "/opt/flux/bin/flux"):
        if place and os.access(place, os.X_OK):
            break
    else:
        pytest.skip("no flux here")
    if not (COMMANDS / "flux-dovetail").exists():
        pytest.skip(f"no flux-dovetail in {COMMANDS}: run ./bootstrap")
    if programs.built() is None:
        pytest.skip("Kubernetes is not built: run `dovetail kube build`")
    return place


def installed(scheduler: str) -> bool:
    """Whether Flux has a scheduler of that name."""
    found = subprocess.check_output([flux_command(), "config", "builtin", "module_path"], text=True)
    return any(any(Path(f).glob(f"{scheduler}.*")) for f in found.strip().split(":"))


class Flux:
    """Brokers on this machine, in which jobs of an ordinary user run.

    The brokers are this user's own; or an `owner`'s, and the user is a guest there.
    """

    def __init__(
        self, size=4, uid=None, cache=None, scheduler="sched-simple", owner=None, options=()
    ):
        self.flux = flux_command()
        if not installed(scheduler):
            pytest.skip(f"{scheduler} is not installed")
        self.scheduler = [f"--conf=modules.alternatives.sched={scheduler}"]
        self.size = size
        self.uid = os.getuid() if uid is None else uid
        self.owner = self.uid if owner is None else owner
        self.before = {*self.folders(), *self.groups()}  # another's, maybe of a killed program
        self.clusters = {}  # those that were seen here: the addresses of their slices
        self.folder = Path(tempfile.mkdtemp(prefix="df-", dir="/tmp"))
        self.folder.chmod(0o755)
        self.token = f"DOVETAIL_TEST={self.folder}"
        self.work = self.folder / "work"
        self.environment = {
            "PATH": f"{Path(self.flux).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": str(self.work), "LANG": "C.UTF-8", "DOVETAIL_TEST": str(self.folder),
            "DOVETAIL_CACHE": str(cache or programs.built().parents[1]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        self.furnish()
        found = subprocess.run([COMMANDS / "dovetail", "env", "--json"], capture_output=True,
                               env=self.environment, text=True, check=True)  # fmt: skip
        self.environment.update(json.loads(found.stdout))
        self.usual = dict(self.environment)
        words = ["start", "-s", str(size), *self.scheduler, *options,
                 "sh", "-c", "echo $FLUX_URI; cat >/dev/null"]  # fmt: skip
        self.brokers = subprocess.Popen(
            self.words(*words, uid=self.owner), env=self.environment, cwd=self.folder, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.uri = self.brokers.stdout.readline().strip()
        assert self.uri, "flux start failed"
        if self.owner != self.uid:
            Path(self.uri.removeprefix("local://")).parent.chmod(0o755)
        assert scheduler in self.as_owner("module", "list").stdout
        self.own = self.processes().keys()

    def furnish(self):
        """Make the user's folder."""
        for made in (self.work, self.work / "bin", self.work / "case"):
            made.mkdir()
        (self.work / "bin" / "mpirun").write_text(FAKE_MPIRUN)
        (self.work / "bin" / "mpirun").chmod(0o755)
        (self.work / "case" / "input").write_text("as delivered\n")
        for path in (self.work, *self.work.rglob("*")):
            os.chown(path, self.uid, self.uid)

    def clear(self):
        """Make it for another test what it was at first; nothing of this one may be left."""
        self.environment = dict(self.usual)
        self.run("python", "-c", CANCEL_ALL)
        self.nothing_left()

        def rest():  # but for what checks jobs of some seconds ago
            found = self.processes().items()
            return [line for pid, line in found if pid not in self.own and "validator" not in line]

        assert eventually(lambda: not rest(), 30), rest()
        shutil.rmtree(self.work)
        self.furnish()

    def words(self, *words, uid=None):
        uid = self.uid if uid is None else uid
        user = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups"]
        return [*(user if uid != os.getuid() else []), self.flux, *words]

    def as_owner(self, *words, uri=""):
        """What became of a flux command of whose brokers these are."""
        line = self.words(*words, uid=self.owner)
        return subprocess.run(line, capture_output=True, timeout=LIMIT, **self.place(uri))

    def place(self, uri):
        """Where a flux command runs: in the instance, or in one inside it."""
        environment = {**self.environment, "FLUX_URI": uri or self.uri}
        return {"env": environment, "cwd": self.work, "text": True}

    def start(self, *words, uri=""):
        """A flux command that goes on."""
        return subprocess.Popen(self.words(*words), stdout=subprocess.PIPE, **self.place(uri))

    def run(self, *words, uri="", code=0, given=None):
        """A flux command's output."""
        self.note()
        done = subprocess.run(
            self.words(*words), capture_output=True, timeout=LIMIT, input=given, **self.place(uri)
        )
        self.note()
        assert code in (done.returncode, None), (words, done.stdout, done.stderr)
        return done.stdout.strip() if code == 0 else done.stdout + done.stderr

    def plan(self, script="echo 'Time = 1'", count=2, **more):
        """Write a plan of simulations that are shell scripts."""
        path = f"{self.work}/bin:/usr/bin:/bin"
        entry = {"name": "sim", "case": str(self.work / "case"), "ranks": 1, "count": count,
                 "command": ["sh", "-c", script], "environment": {"PATH": path},
                 **more}  # fmt: skip
        (self.work / "plan.yaml").write_text(json.dumps({"simulations": [entry]}))

    def batch(self, script, *options, size=0, dovetail=OPTION):
        """Submit a batch script; its job id."""
        path = self.work / "script.sh"
        path.write_text(f"#!/bin/bash\n#flux: -N{size or self.size} {dovetail}\n{script}\n")
        options = [*([PATIENT] if dovetail else []), *options]
        return self.run("batch", "--output=out.txt", *self.scheduler, *options, str(path))

    def wait(self, job, event="clean"):
        """Until an event of a job, which must come."""
        with self.start("job", "wait-event", "-t", str(LIMIT), job, event) as waiting:
            for _ in range(LIMIT + 10):
                self.note()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    waiting.wait(1.0)  # to look takes CPU time from the job
                    break
        assert waiting.returncode == 0, (job, event)

    def code(self, job):
        """A job's exit code."""
        self.wait(job)
        return int(self.run("jobs", "-no", "{returncode}", job))

    def output(self, job):
        """What a batch script printed; waits for its end."""
        self.wait(job)
        return (self.work / "out.txt").read_text()

    def inside(self, job):
        """The URI of the instance that a batch job is, once it can be used."""
        self.wait(job, "memo")
        found = eventually(lambda: self.run("uri", "--local", job, code=None).strip())
        assert eventually(lambda: self.works(found)), found
        return found

    def works(self, uri):
        """Whether the module answers there."""
        return "phase" in self.run("dovetail", "status", "--json", uri=uri, code=None)

    def status(self, uri):
        """What the module says."""
        return json.loads(self.run("dovetail", "status", "--json", uri=uri))

    def processes(self):
        """All that was started from here and still runs: pid to command line."""
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                line = (folder / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
                ours = self.token.encode() in (folder / "environ").read_bytes().split(b"\0")
                ours = ours or any(f"-{cluster}" in line for cluster in self.clusters)
                if ours and processes.start_ticks(int(folder.name)):  # else a zombie
                    found[int(folder.name)] = line
        return found

    def pid(self, *parts):
        """The one process whose command line has all the parts."""

        def matching():
            return [p for p, line in self.processes().items() if all(x in line for x in parts)]

        assert eventually(lambda: len(matching()) == 1), (parts, self.processes())
        return matching()[0]

    def kill(self, *parts):
        """Kill that process without warning."""
        os.kill(self.pid(*parts), signal.SIGKILL)

    def note(self):
        """Remember the clusters here, and where they listen: much of them has not our token."""
        running = functools.cache(self.processes)
        for folder in set(self.folders()) - self.before:
            cluster = folder.name.split("-")[2]
            if cluster in self.clusters or any(cluster in s for s in running().values()):
                nodes = glob.glob(f"{folder}/*/nodes/127.*")  # some may just go
                found = [Path(node).name.split(".") for node in nodes]
                known = self.clusters.setdefault(cluster, set())
                known.update(bytes(map(int, reversed(one))).hex().upper() for one in found)

    def left(self):
        """What slices leave: folders, processes, groups, mounts, shared memory, ports, keys."""
        folders = set(self.folders()) - self.before
        found = [str(path) for path in folders if not self.others(path.name.split("-")[2])]
        found += [f"{pid}: {line}" for pid, line in self.processes().items()
                  if "dovetail" in line or "kube" in line or "etcd" in line]  # fmt: skip
        groups = set(self.groups()) - self.before
        found += [str(p) for p in groups if not self.others(p.name.split("f-")[1][:8])]
        for status in below(self.work):
            if status.name == "status.json":
                run = json.loads(status.read_text())["run"]
                found += map(str, Path("/dev/shm").glob(f"dovetail-*-{run}*"))
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        found += [line for line in mounts if f"/tmp/dovetail-{self.uid}-" in line]
        listeners = map(str.split, Path("/proc/net/tcp").read_text().splitlines())
        ours = set().union(*self.clusters.values())  # as they are in that list
        found += [f"port {one[1]}" for one in listeners
                  if one[3] == "0A" and one[1].split(":")[0] in ours]  # fmt: skip
        return found + [str(path) for path in self.files() if holds_a_key(path)]

    def files(self):
        """Those of Flux and of the test's folder, and of a user of our own all in /tmp.

        But for the key of a run that was killed, kept for --resume in a private folder.
        """
        rundir = Path(self.uri.removeprefix("local://")).parent
        for top in ["/tmp"] if self.uid == USER else [self.folder, rundir]:
            for folder, _, names in os.walk(top):
                for path in (Path(folder, name) for name in names):
                    with contextlib.suppress(OSError):
                        ours = path.is_file() and path.stat().st_uid == self.uid
                        if ours and path.match("kubernetes/hub.key"):
                            assert path.parent.stat().st_mode & 0o77 == 0
                        elif ours:
                            yield path

    def folders(self):
        """Those of all slices on this machine."""
        return Path("/tmp").glob(f"dovetail-{self.uid}-????????-*")

    def groups(self):
        """Control groups of all slices on this machine."""
        return map(Path, glob.glob(f"/sys/fs/cgroup/*/dovetail-{self.uid}/*f-????????*"))

    def others(self, cluster):
        """Whether a cluster is another program's, which is no matter of this test."""
        if cluster in self.clusters:
            return False
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                ours = self.token.encode() in (folder / "environ").read_bytes()
                if cluster.encode() in (folder / "cmdline").read_bytes() and not ours:
                    return True
        return False

    def kill_all(self):
        """Kill every process at once, as a batch system ends a job: none can clean up."""
        self.note()
        stopped = {}
        while more := self.processes().keys() - stopped:
            stopped |= dict.fromkeys(more)
            for pid in more:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGSTOP)
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.brokers.wait(LIMIT)
        shutil.rmtree(Path(self.uri.removeprefix("local://")).parent)

    def nothing_left(self):
        """Everything of Dovetail is gone, soon."""
        assert eventually(lambda: not self.left(), 60), self.left()

    def close(self):
        """End the brokers, which must be well."""
        try:
            if self.brokers.poll() is None:
                self.run("cancel", "--all", code=None)
                self.brokers.stdin.close()
                assert self.brokers.wait(LIMIT) == 0
            self.nothing_left()
            assert eventually(lambda: not self.processes(), 30), self.processes()
        finally:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            shutil.rmtree(self.folder, ignore_errors=True)


def holds_a_key(path):
    """Whether a private key is in a file, as it is or in base64, as in a kubeconfig."""
    with contextlib.suppress(OSError):
        content = path.read_bytes()
        return b"PRIVATE KEY-----" in content or b"client-key-data" in content
    return False


class Instances:
    """Instances which a test that leaves them clean leaves to the next one."""

    def __init__(self, request):
        self.request = request
        self.kept = {}

    @contextlib.contextmanager
    def one(self, user=False, scheduler="sched-simple"):
        """One of whoever runs the tests, or of a user who exists only here."""
        kind = (user, scheduler)
        made = self.kept.pop(kind, None) or self.start(*kind)
        yield made
        try:
            made.clear()
        except BaseException:
            self.end(made)
            raise
        self.kept[kind] = made

    def start(self, user, scheduler):
        if not user:
            return Flux(scheduler=scheduler)
        if os.getuid() != 0 or WHY_NOT:
            pytest.skip(WHY_NOT or "this is an ordinary user already")
        flux_command()
        subprocess.run([SETUP / "delegate", str(USER)], check=True)
        cache = self.request.getfixturevalue("binaries").parents[1]
        return Flux(uid=USER, cache=cache, scheduler=scheduler)

    def end(self, made):
        made.close()
        if made.uid != os.getuid():
            subprocess.run([SETUP / "delegate", str(made.uid), "--remove"], check=True)


@pytest.fixture(scope="session")
def instances(request):
    found = Instances(request)
    yield found
    with contextlib.ExitStack() as ends:
        for made in found.kept.values():
            ends.callback(found.end, made)


@pytest.fixture
def user(instances):
    """An instance of an ordinary user."""
    with instances.one(user=True) as made:
        yield made
