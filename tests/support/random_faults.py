# SPDX-License-Identifier: LGPL-3.0-or-later
"""Faults that nobody has chosen, on hosts that have a cluster, and what became of simulations.

Inputs: hosts; a seed. Outputs: the same faults for the same seed, done and healed; runs of short
simulations meanwhile, and what is wrong with their end. What really ran is known by a witness, not
by what Dovetail says: each rank says by a pipe that all hosts have, whatever is cut, when it begins
and ends, with a word that its simulation got at this start. A host's clock is that of all.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from support import hosts, known_programs
from support.clusters import LIMIT, SETUP, eventually

HOME = hosts.HOME
KUBECONFIG = f"/tmp/dovetail-kube-{hosts.ALICE}/default/kubeconfig"
FULL = ("/tmp", "/home", "/dev/shm")
# Processes that are killed: ours in pods, or programs.
PARTS = ("agent", "entrypoint", "kubelet", "containerd", "busy")
CONTROL_PARTS = (*PARTS, "etcd", "kube-apiserver", "kube-controller-manager")
WITNESS = r"""#!/bin/sh
# witness NAME COMMAND...: a rank of a simulation; says when it begins, and when it ends well.
name=$1 rank=${OMPI_COMM_WORLD_RANK:-0} token=$(cat token) || exit
shift
say() { echo "$1 $name $token $rank" >"${0%/*}/pipe"; }
say begin
"$@" || exit
echo "$token" >"ended.$rank" || exit # the disk may be full
say end
"""
STEPS = r"""#!/bin/sh
# steps COUNT: goes on from what is written, until the count, or until it is asked to stop.
last=$(tail -n 1 steps 2>/dev/null)
last=${last:-0}
while [ "$last" -lt "$1" ] && [ ! -e stop ]; do
  sleep 0.2
  last=$((last + 1))
  echo "$last" >>steps || exit
done
[ "$last" -eq "$1" ]
"""
BEGIN = "#!/bin/sh\ncat /proc/sys/kernel/random/uuid >token\n"
GO_ON = "#!/bin/sh\nrm -f stop\ntail -n 1 steps 2>/dev/null || echo 0\n"
# What a run may not leave on a host: processes and files of pods, and copies.
LEFT = r"""
for folder in /proc/[0-9]*; do
  line=$(tr '\0' ' ' <$folder/cmdline 2>/dev/null) || continue
  case $line in *[d]ovetail.executors.pods*|*/busy\ *|*/witness\ *) echo "$line";; esac
done
ls -d /tmp/dovetail-staged-* /dev/shm/dovetail-* 2>/dev/null
true
"""


@dataclass(frozen=True)
class Fault:
    """One fault: what, where, for how long, and how long all is well afterwards; seconds."""

    kind: str
    host: int
    seconds: float
    more: str
    rest: float


def drawn(seed: int, count: int, number: int) -> list[Fault]:
    """So many faults of so many hosts; the first has the run, and is not ended."""
    draw = random.Random(seed)
    found = []
    for _ in range(count):
        host = draw.randrange(number)
        kinds = ["cut", "from", "to", "lossy", "slow", "hang", "full", "kill", "kill"]
        kind = draw.choice([*kinds, "end" if host else "controller"])
        more = ""
        if kind == "full":
            more = draw.choice(FULL)
        elif kind == "kill":
            more = draw.choice(PARTS if host else CONTROL_PARTS)
        elif kind == "lossy":
            more = draw.choice(["5", "20", "50"])
        elif kind == "slow":
            more = draw.choice(["100kbit", "1mbit"])
        seconds = 40.0 ** draw.random()
        found.append(Fault(kind, host, seconds, more, draw.uniform(1.0, 8.0)))
    return found


class Witness:
    """What ranks say: `lines` of when (CLOCK_MONOTONIC), what, simulation, word and rank."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        path.chmod(0o666)
        self._pipe = os.open(path, os.O_RDWR)
        self.lines: list[tuple[float, str, str, str, int]] = []
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        with os.fdopen(self._pipe) as pipe:
            for line in pipe:
                what, name, token, rank = line.split()
                self.lines.append((time.monotonic(), what, name, token, int(rank)))

    def of(self, name: str, what: str) -> Counter[tuple[str, int]]:
        """How often each rank of each start said something."""
        return Counter((one[3], one[4]) for one in self.lines if one[1:3] == (what, name))


class Site:
    """Hosts with a cluster, whose first has runs; `shared` is a folder of programs on all."""

    def __init__(self, made: Sequence[hosts.Host], shared: Path) -> None:
        self.made, self.first = made, made[0]
        self.programs = shared / "bin"
        self.programs.mkdir()
        self.witness = Witness(self.programs / "pipe")
        for name, text in (("witness", WITNESS), ("steps", STEPS), ("begin", BEGIN),
                           ("go-on", GO_ON)):  # fmt: skip
            (self.programs / name).write_text(text)
        shutil.copy(known_programs.build("openmpi", "known/busy.c"), self.programs / "busy")
        for path in self.programs.iterdir():
            if path.name != "pipe":
                path.chmod(0o755)
        self.programs.chmod(0o755)
        self.draw = random.Random(0)
        self.run: subprocess.Popen[str] | None = None
        self.count = self.tries = 0
        self.wrong: list[str] = []
        self.reasons: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.first.out("mkdir case")
        words = f"--cpus 0-0 --json --timeout {2 * LIMIT}"
        self.first.out(f"{SETUP}/up --address {self.first.address} {words}", limit=3 * LIMIT)
        for host in made[1:]:
            self.join(host)

    def join(self, host: hosts.Host) -> None:
        """Have a host in the cluster; as often as it takes, which is said."""
        until = time.monotonic() + LIMIT
        while True:
            words = f"{SETUP}/join --invite {host.name}.json --node {host.name}"
            done = self.first.run(f"{words} && cat {host.name}.json", code=None)
            if done.returncode == 0:
                text = "{" + done.stdout.partition("{")[2]
                host.write("join.json", text)
                words = f"{SETUP}/join --address {host.address} --cpus 1-1 --json join.json"
                done = host.run(words, code=None)
                if done.returncode == 0:
                    return
            say(f"join of {host.name}: {done.returncode} {done.stderr.strip()[-600:]}")
            assert time.monotonic() < until, (host.name, done.stderr)
            time.sleep(2)

    # --- runs ---

    def plan(self, size: int) -> dict[str, object]:
        """Of so many simulations: of one rank and of several, in one pod and across hosts."""
        entries = []
        for number in range(size):
            name, kind = f"s{number}", number % 4
            ranks = (1, 2, 3, 1)[kind]
            begin = f"{self.programs}/begin"
            work = [f"{self.programs}/witness", name]
            entry: dict[str, object] = {
                "name": name, "case": f"{HOME}/case", "ranks": ranks, "prepare": [begin],
                "stage": self.draw.choice(["live", "end"]),
            }  # fmt: skip
            steps = self.draw.randrange(20, 100)
            if kind == 3:
                work += [f"{self.programs}/steps", str(steps)]
                entry["checkpoint"] = {
                    "write": "touch stop", "restart": f"{self.programs}/go-on",
                }  # fmt: skip
                entry["iterations"] = steps
            else:
                times = ["100"] * ranks
                work += [f"{self.programs}/busy", "sleep", str(steps), *times]
            if kind in (1, 2):
                entry["ranks_per_pod"] = 1
            entries.append({**entry, "command": work})
        return {"simulations": entries}

    def start(self, size: int) -> None:
        """Start a run of such a plan."""
        self.count, self.tries = self.count + 1, 0
        self.planned = self.plan(size)
        self.out = f"{HOME}/out-{self.count}"
        self.first.write(f"{self.out}.yaml", json.dumps(self.planned))
        self.began = len(self.witness.lines)
        self._go()

    def _go(self, more: str = "") -> None:
        words = f"python -m dovetail run {self.out}.yaml -o {self.out} --json {more}"
        script = f"exec {words} --kubeconfig {KUBECONFIG} >{self.out}.json 2>>{self.out}.log"
        self.run = self.first.start(f"echo $$ >run.pid; {script}")

    def resume(self) -> None:
        """Go on with it after it was killed, or begin where it had not."""
        assert self.run
        self.run.wait(LIMIT)
        begun = self.first.run(f"ls {self.out}/events.jsonl", code=None).returncode == 0
        self._go("--resume" if begun else "")

    def over(self) -> None:
        """Look at the end of a run, which has ended; what is wrong with it is in `wrong`."""
        assert self.run
        code, out = self.run.wait(), self.out
        log = self.first.out(f"cat {out}.log")
        say(f"run {self.count} ended with {code}: {log[-300:] if code else ''}")
        wrong = []
        found = self.first.run(f"cat {out}/summary.json", code=None).stdout
        if not found:
            wrong.append(f"no summary, code {code}: {log[-600:]}")
            ended = {}
        else:
            ended = {one["name"]: one for one in json.loads(found)["simulations"]}
        if code not in (0, 1) or "Traceback" in log:
            wrong.append(f"code {code}: {log[-1500:]}")
        for entry in self.planned["simulations"] if found else ():  # type: ignore[attr-defined]
            one = ended.get(entry["name"])
            wrong += [f"{entry['name']}: {text}" for text in self._wrong(entry, one)]
        for text in wrong:
            say(f"WRONG in {out}: {text}")
        self.wrong += [f"{out}: {text}" for text in wrong]
        self.first.out(f"rm -rf {out}/*/case" if not wrong else "true")
        self.run = None

    def _wrong(self, entry: dict[str, object], one: dict[str, object] | None) -> Iterator[str]:
        """What is wrong with what became of a simulation."""
        if one is None:
            yield "it is not in the summary"
            return
        self.states[str(one["state"])] += 1
        name, ranks = str(entry["name"]), int(str(entry["ranks"]))
        mine = self.witness.lines[self.began :]
        begun = Counter((token, rank) for _, what, of, token, rank in mine
                        if (what, of) == ("begin", name))  # fmt: skip
        ended = Counter((token, rank) for _, what, of, token, rank in mine
                        if (what, of) == ("end", name))  # fmt: skip
        starts = {token for token, _ in begun}
        most = 1 + int(str(one["restarts"]))
        if len(starts) > most:
            yield f"began {len(starts)} times, with {most - 1} restarts: {begun}"
        if "checkpoint" not in entry and begun and max(begun.values()) > 1:
            yield f"a rank began twice in one start: {begun}"
        if ended and max(ended.values()) > 1:
            yield f"a rank ended twice in one start: {ended}"
        if one["state"] != "done":
            reason = str(one.get("reason") or "")
            self.reasons[re.sub(r"\d+", "N", reason)[:160]] += 1
            say(f"{self.out} {name} {one['state']}: {reason}")
            if not reason:
                yield f"{one['state']}, and no reason is given: {one}"
            return
        case = f"{self.out}/{name}/case"
        token = self.first.run(f"cat {case}/token", code=None).stdout.strip()
        wanted = {(token, rank): 1 for rank in range(ranks)}
        if {key: times for key, times in ended.items() if key[0] == token} != wanted:
            yield f"done, and the ranks of {token!r} did not all end once: {ended}"
        files = self.first.run(f"cd {case} && grep -H '' ended.*", code=None).stdout.split()
        if sorted(files) != [f"ended.{rank}:{token}" for rank in range(ranks)]:
            log = self.first.run(f"tail -c 500 {self.out}/{name}/log", code=None).stdout
            yield f"done, and its result is not that of {token!r}: {files}: {log}"
        if "checkpoint" in entry:
            count = int(entry["command"][-1])  # type: ignore[index]
            steps = self.first.run(f"cat {case}/steps", code=None).stdout.split()
            if steps != [str(step) for step in range(1, count + 1)]:
                yield f"done, and its steps are {' '.join(steps)}"

    def tidy(self) -> None:
        """See that a run has left nothing on any host."""
        for host in self.made:
            if not eventually(lambda host=host: not host.out(LEFT), LIMIT):
                self.wrong.append(f"{self.out}: left on {host.name}: {host.out(LEFT)}")
                say(f"WRONG {self.wrong[-1]}")

    # --- faults ---

    def suffer(self, fault: Fault) -> None:
        """Do a fault, and heal it."""
        host = self.made[fault.host]
        if fault.kind in ("kill", "controller"):
            self._kill(fault, host)
        elif fault.kind == "end":
            host.end()
            time.sleep(fault.seconds)
            host.boot()
            self.join(host)
        else:
            do, undo = {
                "cut": (host.cut, host.heal),
                "from": (lambda: host.drop("from"), host.heal),
                "to": (lambda: host.drop("to"), host.heal),
                "lossy": (lambda: host.drop(percent=int(fault.more)), host.heal),
                "slow": (lambda: host.slow(fault.more), host.heal),
                "hang": (host.hang, host.go_on),
                "full": (lambda: host.fill(fault.more), lambda: host.empty(fault.more)),
            }[fault.kind]
            do()
            time.sleep(fault.seconds)
            undo()

    def _kill(self, fault: Fault, host: hosts.Host) -> None:
        if fault.kind == "controller":
            if self.run and self.run.poll() is None:
                self.first.out("kill -9 $(cat run.pid)")
                time.sleep(fault.seconds / 4)
                self.resume()
            return
        there = host.out("""for one in /proc/[0-9]*; do
            echo "${one#/proc/} $(tr '\\0' ' ' 2>/dev/null <$one/cmdline)"; done""")
        pids = []
        for line in there.splitlines():
            pid, *words = line.split()
            if not words:
                continue
            ours = re.search(r"from dovetail\.executors\.pods\.(\w+) import", line)
            if fault.more == (ours[1] if ours else words[0].rsplit("/", 1)[-1]):
                pids.append(pid)
        say(f"{fault.more}: {pids}")
        if pids:
            host.run(f"kill -9 {self.draw.choice(pids)}", code=None)

    def ended(self) -> bool:
        """Whether the run is over. One that ended before it could say so goes on.

        With a disk that is full no run can begin, nor be resumed.
        """
        if self.run is None or self.run.poll() is None:
            return False
        if self.first.run(f"ls {self.out}/summary.json", code=None).returncode == 0:
            return True
        log = self.first.out(f"tail -n 3 {self.out}.log")
        say(f"run {self.count} ended with {self.run.poll()}, and goes on: {log}")
        self.tries += 1
        if self.tries > 5:
            return True
        self.resume()
        return False

    def through(self, faults: Sequence[Fault], size: int) -> None:
        """Have all these faults while runs of so many simulations go on."""
        for number, fault in enumerate(faults):
            if self.run is None:
                self.start(size)
            say(f"{number}: {fault}")
            self.suffer(fault)
            time.sleep(fault.rest)
            if self.ended():
                self.over()
                self.tidy()
        if self.run is not None:
            assert eventually(self.ended, 5 * LIMIT), self.first.out(f"tail {self.out}.log")
            self.over()
            self.tidy()

    def end(self) -> None:
        """Take the cluster down."""
        if self.run is not None and self.run.poll() is None:
            self.first.run("kill $(cat run.pid)", code=None)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.run.wait(LIMIT)
        for host in self.made:
            host.out(f"{SETUP}/down --all")


def say(line: str) -> None:
    """Progress, for who reads the test's output."""
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)
