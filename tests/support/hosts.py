# SPDX-License-Identifier: LGPL-3.0-or-later
"""Hosts that share nothing but a network, in namespaces of this kernel (tiers kube and flux).

Each has a name, an address on a network that is theirs alone, process ids, folders in memory
(/tmp, /run, /dev/shm, /home, /var/tmp) and an ordinary user, alice, who has a number and no name.
The system, this checkout and the programs are those of this machine, and cannot be written to.
What else they share is the kernel: cores, the clock, which no namespace has of its own, and the
version 1 control groups, where alice has one on all. `shared` is a folder that all see, if any.

    with hosts.started(2) as (first, second):
        first.out(f"ping -c 1 {second.name}")

Only root can make them. Invariant: when the process that made them ends, however it does, the
kernel ends all that runs on them, and with it mounts and network go; a process that waits for this
removes the control groups.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from usernetes_setup.build import programs

from support.clusters import SETUP, eventually
from support.other_users import WHY_NOT
from support.remote import Remote

TOP = Path(__file__).resolve().parents[2]
ALICE = 20_000_000 + os.getpid()
HOME = "/home/alice"
NETWORK = "10.78.0"
# Holds the network, and removes what alice has of control groups, once its standard input ends.
SWITCH = """
ip link add switch type bridge && ip link set switch up && echo ready && cat >/dev/null
for _ in $(seq 50); do
  [ -n "$("$0" "$1" --remove 2>&1)" ] || break
  sleep 0.2
done
"""
# What a user may leave: processes, files, listeners.
LEFT = r"""
for status in /proc/[0-9]*/status; do
  [ "$(sed -n 's/^Uid:\t\([0-9]*\).*/\1/p' $status 2>/dev/null)" != "$0" ] ||
    tr '\0' ' ' <${status%status}cmdline
done
find /tmp /run /dev/shm /var/tmp -xdev -mindepth 1 -user "$0"
cat /proc/net/tcp /proc/net/tcp6 | awk '$4 == "0A" { print "listener " $2 }'
"""


def why_not() -> str:
    """Why there can be none here; empty if they can."""
    if WHY_NOT:
        return WHY_NOT
    script = "ip link add v0 type veth && ip link add b0 type bridge"
    words = ["unshare", "--net", "sh", "-c", script]
    done = subprocess.run(words, capture_output=True, text=True)
    return f"no network for hosts: {done.stderr.strip()}" if done.returncode else ""


class Host(Remote):
    """One host: asked by `run`, `out`, `until` and `write`, as alice or root.

    `environment` is what commands there have; `root` is where its files are for this process.
    """

    def __init__(self, number: int, names: str, read: Sequence[Path], shared: Sequence[Path]):
        self.number, self.name, self.address = number, f"h{number}", f"{NETWORK}.{number}"
        self.environment = {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
            "HOME": HOME, "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup",
        }  # fmt: skip
        asked = {"name": self.name, "names": names, "home": HOME, "uid": ALICE,
                 "read": [*map(str, read)], "shared": [*map(str, shared)]}  # fmt: skip
        self._asked = json.dumps(asked)
        self._starters: list[subprocess.Popen[str]] = []
        self._maker: subprocess.Popen[str] | None = None
        self._init = 0
        self.switch = 0  # a process in the network that all are connected to

    # --- life ---

    def boot(self) -> None:
        """Start it, with nothing in its folders, and connect it."""
        new = ["--mount", "--uts", "--ipc", "--net", "--pid", "--fork", "--kill-child",
               "--mount-proc"]  # fmt: skip
        init = [sys.executable, str(TOP / "tests/support/host_init.py"), self._asked]
        self._maker = subprocess.Popen(
            ["unshare", *new, *init], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **self.environment}, preexec_fn=end_with_me,
        )  # fmt: skip
        assert self._maker.stdout
        assert self._maker.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._maker.pid}/task/{self._maker.pid}/children")
        self._init = int(children.read_text())
        port = f"port{self.number}"
        for where, words in (
            (self.switch, f"ip link add {port} type veth peer name eth0 netns {self._init}"),
            (self.switch, f"ip link set {port} master switch up"),
            (self._init, f"ip addr add {self.address}/24 dev eth0"),
            (self._init, "ip link set eth0 up"),
        ):
            _in_network(where, words)

    def end(self) -> None:
        """Cut its power: every process on it is killed at once, and its folders are empty."""
        if self._maker is not None:
            self._maker.kill()  # its child, the first process, is killed for it
            self._maker.wait()
            self._maker = None
            assert eventually(lambda: not self.root.parent.exists())
            for starter in self._starters:
                starter.kill()  # or it would wait for what hung
                starter.wait()
            self._starters.clear()

    def hang(self) -> None:
        """Stop every process on it, until `go_on`."""
        self._all(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it go on."""
        self._all(signal.SIGCONT)
        for starter in self._starters:  # which stopped as what they started did
            starter.send_signal(signal.SIGCONT)

    def _all(self, number: int) -> None:
        """Send a signal to all but the first process, which ignores it."""
        script = f"import os; os.kill(-1, {int(number)})"
        subprocess.run([*self._enter("root"), "/usr/bin/python3", "-c", script], check=True)

    def cut(self) -> None:
        """Let nothing pass between it and the others; it does not see that its link is cut."""
        self._port(0)

    def drop(self, way: str = "from to", percent: int = 100) -> None:
        """Lose so many of the packets that come "from" it, or go "to" it, where the others are."""
        sides = {"from": "iifname", "to": "oifname"}
        some = f"numgen random mod 100 < {percent}" if percent < 100 else ""
        rules = [f"{sides[one]} port{self.number} {some} drop\n" for one in way.split()]
        chain = f"type filter hook forward priority 0;\n{''.join(rules)}"
        self._filter(f"table bridge {self.name} {{\nchain lost {{\n{chain}}}\n}}\n")

    def slow(self, rate: str) -> None:
        """Let no more pass to it than so much, as `500kbit`; the rest waits, and then is lost."""
        shape = f"root tbf rate {rate} burst 16kb latency 2s"
        _in_network(self.switch, f"tc qdisc replace dev port{self.number} {shape}")

    def heal(self) -> None:
        """Let everything pass again."""
        self._port(3)
        self._filter("")
        script = f"tc qdisc del dev port{self.number} root 2>&1 || true"
        subprocess.run(["nsenter", "-t", str(self.switch), "-n", "sh", "-c", script],
                       stdout=subprocess.DEVNULL, check=True)  # fmt: skip

    def _filter(self, table: str) -> None:
        """Have this table of filters, and no other."""
        empty = f"table bridge {self.name}\ndelete table bridge {self.name}\n"
        words = ["nsenter", "-t", str(self.switch), "-n", nft(), "-f", "-"]
        subprocess.run(words, input=empty + table, text=True, check=True)

    def _port(self, state: int) -> None:
        _in_network(self.switch, f"bridge link set dev port{self.number} state {state}")

    def fill(self, folder: str) -> None:
        """Leave no room in one of its own folders, until `empty`."""
        # Once more where something was written meanwhile: what is used must still fit. Of size 0 it
        # would have no limit, and could then get none.
        self.out(
            f"""for _ in $(seq 50); do
                used=$(df -B4096 --output=used {folder} | tail -n 1)
                mount -o remount,size=$((used ? used * 4 : 4))k {folder} && exit
            done; exit 1""",
            "root",
        )

    def empty(self, folder: str) -> None:
        """Let there be room again."""
        self.out(f"mount -o remount,size=50% {folder}", "root")

    # --- work ---

    @property
    def root(self) -> Path:
        """Its root folder, as this process can see it."""
        return Path(f"/proc/{self._init}/root")

    def line(self, script: str, user: str = "alice") -> list[str]:
        """In its namespaces, in the user's folder."""
        return [*self._enter(user), "sh", "-c", f"cd; {script}", str(ALICE)]

    def _enter(self, user: str) -> list[str]:
        enter = ["nsenter", "-t", str(self._init), "-m", "-u", "-i", "-n", "-p"]
        uid = ALICE if user == "alice" else 0
        become = [f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--pdeathsig", "KILL"]
        have = {**self.environment, **({} if uid else {"HOME": "/root"})}
        variables = [f"{name}={value}" for name, value in have.items()]
        return [*enter, "setpriv", *become, "env", "-i", *variables]

    def start(self, script: str, user: str = "alice") -> subprocess.Popen[str]:
        """A script that goes on there; it ends with the host."""
        started = subprocess.Popen(
            self.line(script, user), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, preexec_fn=end_with_me,
        )  # fmt: skip
        self._starters.append(started)
        return started

    def left(self) -> list[str]:
        """What alice has there: processes, files but for those at home, listeners, groups."""
        found = self.out(LEFT, "root").splitlines()
        return found + glob.glob(f"/sys/fs/cgroup/*/dovetail-{ALICE}/*/")


@functools.cache
def nft() -> str:
    """The program that sets filters of packets: that of clusters, so that no other is needed."""
    return str(programs.build(print) / "bin/nft")


def _in_network(process: int, words: str) -> None:
    """Run a command in a process's network."""
    subprocess.run(["nsenter", "-t", str(process), "-n", *words.split()], check=True)


def nothing_left(made: Sequence[Host], limit: float = 120) -> None:
    """Nothing of alice's is on any host, soon."""
    for host in made:
        assert eventually(lambda host=host: not host.left(), limit), (host.name, host.left())


def end_with_me() -> None:
    """In a child: be killed when the one that started it has ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


@contextlib.contextmanager
def started(
    count: int, read: Sequence[Path] = (), shared: Path | None = None
) -> Iterator[list[Host]]:
    """So many hosts, running; they see the folders `read` besides, and may write to `shared`."""
    if shared:
        shared.chmod(0o777)
    if why := why_not():
        pytest.skip(why)
    addresses = "".join(f"{NETWORK}.{n} h{n}\n" for n in range(1, count + 1))
    own = [TOP, Path(sys.prefix), Path(sys.base_prefix)]
    seen = [path for path in dict.fromkeys([*own, *read]) if not path.is_relative_to("/usr")]
    made = [
        Host(n, f"127.0.0.1 localhost\n{addresses}", seen, [shared] if shared else [])
        for n in range(1, count + 1)
    ]
    subprocess.run([SETUP / "delegate", str(ALICE)], check=True)
    switch = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", SWITCH, SETUP / "delegate", str(ALICE)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert switch.stdout
        assert switch.stdout.readline() == "ready\n"
        for host in made:
            host.switch = switch.pid
            host.boot()
        yield made
    finally:
        for host in made:
            host.end()
        switch.communicate()
    assert not glob.glob(f"/sys/fs/cgroup/*/dovetail-{ALICE}")
