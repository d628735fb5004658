# SPDX-License-Identifier: LGPL-3.0-or-later
"""Emulated Debian machines that share nothing but a network (tier machines).

Each has its own kernel, systemd, version 2 control groups, disk, clock and users, and QEMU emulates
it without help of this machine's processor. They see each other on a switch that is a socket, and
nothing else: no internet. The disk comes from machine-image, once for all; what this checkout has
installed, and its build of Kubernetes, are on a second disk, where they are here. /shared is one
folder on all, as a cluster's file system is; a test that wants none does without it. What is
written is gone when the machines are.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from usernetes_setup.build import programs

from support.remote import Remote

TOP = Path(__file__).resolve().parents[2]
STORE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "dovetail/test-machines"
LIMIT = 600  # seconds that anything may take on a machine that is ten times slower than this one
CORES = 2
# Kernel options: without isolation of page tables, which makes each system call a change of them;
# and adapters keep their names, as one that was in use too early to get another got no address.
QUICKER = "mitigations=off no_timer_check apparmor=0 audit=0 nowatchdog net.ifnames=0"
USERS = ("root", "alice", "bob")
PREPARE = f"""set -e
mkdir -p {TOP} /shared
modprobe 9pnet_virtio
mountpoint -q {TOP} || mount LABEL=product {TOP}
mountpoint -q /shared ||
  mount -t 9p -o trans=virtio,version=9p2000.L,cache=mmap,msize=262144 shared /shared
chown -R alice {TOP}/cache /shared
for home in /root /home/alice /home/bob; do
  mkdir -p $home/.cache && ln -sfn {TOP}/cache $home/.cache/dovetail
  chown --reference=$home $home/.cache
done
"""


def image() -> Path:
    """The folder with the disk that machines start from; made if there is none of this recipe."""
    recipe = TOP / "tests/support/machine-image"
    folder = STORE / hashlib.sha256(recipe.read_bytes()).hexdigest()[:12]
    if not (folder / "disk.raw").exists():
        shutil.rmtree(STORE, ignore_errors=True)  # of earlier recipes
        folder.mkdir(parents=True)
        subprocess.run([recipe, folder], check=True)
    return folder


def product(folder: Path) -> Path:
    """A disk with what users have: the installed project, Flux, Kubernetes; and the tests."""
    content, disk = folder / "product", folder / "product.raw"
    content.mkdir()
    for name in (".venv", ".flux", "tests", "examples", "flux-python", "usernetes-setup"):
        if (TOP / name).exists():
            subprocess.run(["cp", "-a", TOP / name, content], check=True)
    built = programs.built()
    assert built, "Kubernetes is not built: run `dovetail kube build`"
    kube = content / "cache/kube"
    kube.mkdir(parents=True)
    shutil.copytree(built, kube / built.name, symlinks=True)
    disk.touch()
    os.truncate(disk, 6 << 30)
    make = ["mke2fs", "-q", "-t", "ext4", "-L", "product", "-d", content, disk]
    subprocess.run(make, check=True)
    shutil.rmtree(content)
    return disk


class Machine(Remote):
    """One machine: started, asked by ssh, and stopped."""

    limit = LIMIT

    def __init__(self, number: int, image: Path, product: Path, folder: Path) -> None:
        self.number, self.name, self.address = number, f"m{number}", f"10.77.0.{number}"
        self.image, self.folder = image, folder / self.name
        self.folder.mkdir()
        self.disks = []
        for base in (image / "disk.raw", product):
            disk = self.folder / base.with_suffix(".qcow2").name
            make = ["qemu-img", "create", "-q", "-f", "qcow2", "-F", "raw", "-b", base, disk]
            subprocess.run(make, check=True)
            self.disks += ["-drive", f"file={disk},if=virtio,cache=unsafe"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.switch, self.shared = folder / "switch", folder / "shared"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Switch it on; `ready` waits for it."""
        adapter = "virtio-net-pci,netdev={},mac=52:54:00:77:{}"
        kernel = f"{QUICKER} root=/dev/vda rw console=ttyS0 systemd.hostname={self.name}"
        words = ["setpriv", "--pdeathsig", "KILL",
                 "qemu-system-x86_64", "-nodefaults", "-no-user-config", "-display", "none",
                 "-accel", "tcg,thread=multi", "-cpu", "Nehalem", "-smp", str(CORES), "-m", "4G",
                 "-kernel", self.image / "vmlinuz", "-initrd", self.image / "initrd.img",
                 "-append", kernel, *self.disks, "-device", "virtio-rng-pci",
                 "-virtfs", f"local,path={self.shared},mount_tag=shared,security_model=passthrough",
                 "-serial", f"file:{self.folder}/console.log",
                 "-netdev", f"user,id=host,restrict=on,hostfwd=tcp:127.0.0.1:{self.port}-:22",
                 "-device", adapter.format("host", "01:00"),
                 "-netdev", f"vde,id=between,sock={self.switch}",
                 "-device", adapter.format("between", f"00:0{self.number}")]  # fmt: skip
        self.process = subprocess.Popen(words, stdin=subprocess.DEVNULL)

    def ready(self) -> None:
        """Wait until it can be worked with."""
        assert self.process
        deadline = time.monotonic() + LIMIT
        while not self.answers():
            assert self.process.poll() is None, self.console()
            assert time.monotonic() < deadline, self.console()
        self.run(PREPARE, user="root")

    def answers(self) -> bool:
        """Whether it lets root in; QEMU takes connections also before anybody can answer."""
        try:
            return self.open("root", 20)
        except subprocess.TimeoutExpired:
            return False
        finally:
            time.sleep(1)

    def open(self, user: str, limit: float = LIMIT) -> bool:
        """Have a connection that this user's commands share; it would keep their pipes open."""
        if (self.folder / user).exists():
            return True
        line = self.words(user, "-fN", "-oControlMaster=yes", "-oControlPersist=yes")
        none = subprocess.DEVNULL
        done = subprocess.run(line, stdin=none, stdout=none, stderr=none, timeout=limit)
        return done.returncode == 0

    def console(self) -> str:
        """The last that it printed."""
        return (self.folder / "console.log").read_text(errors="replace")[-3000:]

    def words(self, user: str, *more: str) -> list[str]:
        """An ssh command."""
        options = {"ControlPath": self.folder / user, "StrictHostKeyChecking": "no",
                   "UserKnownHostsFile": "/dev/null", "LogLevel": "ERROR",
                   "ConnectTimeout": 60, "ServerAliveInterval": 60}  # fmt: skip
        line = ["ssh", "-F", "none", "-i", str(self.image / "key"), "-p", str(self.port), *more]
        return [
            *line,
            *(f"-o{name}={value}" for name, value in options.items()),
            f"{user}@127.0.0.1",
        ]

    def line(self, script: str, user: str) -> list[str]:
        """By ssh, with this project's commands on PATH."""
        self.open(user)
        return [*self.words(user), f"export PATH={TOP}/.venv/bin:{TOP}/.flux/bin:$PATH; {script}"]

    def build(self, name: str, source: str) -> None:
        """Compile one of this project's MPI programs as /shared/name."""
        words = ["mpicc.openmpi", "-O2", "-o", self.shared / name, TOP / source]
        subprocess.run(words, check=True)

    def stop(self) -> None:
        """Cut the power."""
        if self.process:
            for user in USERS:
                subprocess.run(self.words(user, "-Oexit"), capture_output=True)
            self.process.kill()
            self.process.wait()
            self.process = None


@pytest.fixture(scope="session")
def machines() -> Iterator[list[Machine]]:
    """Two machines, for all tests."""
    with started(2) as made:
        yield made


@contextlib.contextmanager
def flux_of(machines: list[Machine], before: str = ":") -> Iterator[str]:
    """A Flux instance of alice's on all machines: what comes before a command of its user's there.

    Both begin with `before`, such as what sets variables. Asked on the first machine.
    """
    first = machines[0]
    first.run("[ -e /shared/curve.cert ] || flux keygen /shared/curve.cert")
    hosts = "".join(
        f'  {{ host = "{one.name}", bind = "tcp://{one.address}:8050",'
        f' connect = "tcp://{one.address}:8050" }},\n'
        for one in machines
    )
    table = f'[bootstrap]\ncurve_cert = "/shared/curve.cert"\nhosts = [\n{hosts}]\n'
    try:
        for machine in reversed(machines):
            machine.write("/home/alice/flux/broker.toml", table)
            words = ""
            if machine is first:
                words = "-Slocal-uri=local:///home/alice/flux/local sleep inf"
            machine.run(
                f'{before}; cd ~/flux; eval "$(dovetail env)"; setsid flux broker '
                f"--config-path=broker.toml {words} >log 2>&1 </dev/null & echo $! >~/flux/pid"
            )
        flux = f'{before}; export FLUX_URI=local:///home/alice/flux/local; eval "$(dovetail env)"; '
        flux += "cd /shared;"
        count = str(len(machines))
        first.until(f"{flux} flux resource list -s free -no '{{nnodes}}'", lambda n: n == count)
        yield flux
    finally:
        for machine in machines:
            machine.run("[ ! -e ~/flux/pid ] || kill $(cat ~/flux/pid); rm -f ~/flux/pid",
                        code=None)  # fmt: skip


@contextlib.contextmanager
def started(count: int) -> Iterator[list[Machine]]:
    """That many machines, running."""
    folder = Path(
        tempfile.mkdtemp(prefix="dovetail-machines-", dir=os.environ.get("TMPDIR", "/var/tmp"))
    )
    made: list[Machine] = []
    switch = None
    try:
        disks = image(), product(folder)
        made += [Machine(number + 1, *disks, folder) for number in range(count)]
        (folder / "shared").mkdir()
        words = ["vde_switch", "--sock", folder / "switch"]  # until nobody writes to it any more
        switch = subprocess.Popen(words, stdin=subprocess.PIPE)
        while not (folder / "switch/ctl").exists():
            assert switch.poll() is None
            time.sleep(0.1)
        for machine in made:
            machine.start()
        for machine in made:
            machine.ready()
        yield made
    finally:
        for machine in made:
            machine.stop()
        if switch:
            switch.terminate()
            switch.wait()
        shutil.rmtree(folder)
