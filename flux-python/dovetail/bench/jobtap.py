# SPDX-License-Identifier: LGPL-3.0-or-later
"""What Lua in the job manager costs: plugins that do nothing, and a gated dependency.

Inputs: Flux, and the jobtap plugins built for it. Throughput is what Flux's own test of it
measures: jobs that run for a simulated millisecond, from the first submission to the last job's
end; each time in a new instance, since they get slower as they get older. The processor time is
that of the job manager, a thread of the broker.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from dovetail.bench.harness import Claim, Progress, Row, interleave, ratios
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import install_paths

QUICK = "--setattr=system.exec.test.run_duration=0.001s"
IDLE = {"all": "job.*", "validate": "job.validate"}  # topics to which plugins listen, by name
FIRST, THROUGHPUT, GATED = 50, 500, 1000  # jobs
# Stands in for the broker module: keeps what it is asked, and answers all when its input ends.
SERVICE = """
import sys, flux
from flux.constants import FLUX_MSGTYPE_REQUEST
h, kept = flux.Flux(), []
h.service_register("dovetail").get()
keep = lambda h, t, m, a: kept.append(m)
w = h.msg_watcher_create(keep, FLUX_MSGTYPE_REQUEST, "dovetail.wait-up")
w.start()
def answer(*_):
    for message in kept:
        h.respond(message, {})
    h.reactor_stop()
e = h.fd_watcher_create(0, answer)
e.start()
print("ready", flush=True)
h.reactor_run()
"""


class Flux:
    """The flux command, in an instance."""

    def __init__(
        self,
        flux: str,
        uri: str,
        more: Mapping[str, str] | None = None,
        become: Sequence[str] = (),
    ) -> None:
        """With `more` in its environment; the words of `become` make it another user's."""
        self.command = flux
        self.become = become
        self.environment = {**os.environ, **(more or {}), "FLUX_URI": uri}

    def run(self, *words: str, uri: str = "") -> str:
        """What a flux command prints; in the instance, or in one inside it."""
        done = subprocess.run(
            [*self.become, self.command, *words],
            env={**self.environment, **({"FLUX_URI": uri} if uri else {})},
            cwd="/" if self.become else None,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            said = (done.stderr + done.stdout).strip()[-1000:]
            raise WorkFailed(f"flux {' '.join(words)}: {said}")
        return done.stdout.strip()


class Instance(Flux):
    """A Flux instance, by its leading broker."""

    @functools.cached_property
    def thread(self) -> Path:
        """The job manager's."""
        threads = Path("/proc", self.run("getattr", "broker.pid"), "task").iterdir()
        return next(t for t in threads if (t / "comm").read_text() == "job-manager\n")

    def cpu(self) -> float:
        """Microseconds of processor time that the job manager has used."""
        return int((self.thread / "schedstat").read_text().split()[0]) / 1e3

    def jobs(self, number: int) -> None:
        """Run so many."""
        self.run("submit", "--quiet", f"--cc=1-{number}", QUICK, "true")
        self.run("queue", "idle", "--quiet")

    def throughput(self) -> tuple[float, float]:
        """Jobs per second, and microseconds of processor time for each."""
        self.jobs(FIRST)
        self.run("job", "purge", "--force", "--num-limit=0")
        before = self.cpu()
        self.jobs(THROUGHPUT)
        spent = self.cpu() - before
        lines = self.run("jobs", "-a", "-n", "-c0", "-o", "{t_submit} {t_inactive}").splitlines()
        times = [tuple(map(float, line.split())) for line in lines]
        seconds = max(end for _, end in times) - min(begin for begin, _ in times)
        return len(times) / seconds, spent / THROUGHPUT

    def gated(self) -> float:
        """Seconds from the first submission until all jobs behind our dependency have ended."""
        process = subprocess.Popen(
            [self.command, "python", "-c", SERVICE], env=self.environment,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert process.stdout
        if process.stdout.readline() != "ready\n":
            raise WorkFailed("the stand-in for the service dovetail did not start")
        begin = time.monotonic()
        self.run("submit", "--quiet", f"--cc=1-{GATED}", "--dependency=dovetail:up", QUICK, "true")
        process.communicate()
        self.run("queue", "idle", "--quiet")
        return time.monotonic() - begin

    def after(self) -> float:
        """The same with a dependency of Flux's own."""
        first = self.run("submit", "--urgency=hold", QUICK, "true")
        begin = time.monotonic()
        dependency = f"--dependency=after:{first}"
        self.run("submit", "--quiet", f"--cc=1-{GATED}", dependency, QUICK, "true")
        self.run("job", "urgency", first, "default")
        self.run("queue", "idle", "--quiet")
        return time.monotonic() - begin


def command() -> str | None:
    """The flux command, if there is one."""
    return shutil.which(os.environ.get("FLUX", "flux")) or shutil.which("/opt/flux/bin/flux")


@contextlib.contextmanager
def instance(
    size: int = 1, more: Mapping[str, str] | None = None, become: Sequence[str] = ()
) -> Iterator[Instance]:
    """Start so many brokers, and end them; see `Flux` of the rest."""
    flux = command()
    if not flux:
        raise BadInput("no flux: put it on PATH, or set FLUX to its command")
    process = subprocess.Popen(
        [*become, flux, "start", f"-s{size}", "sh", "-c", "echo $FLUX_URI; cat >/dev/null"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **(more or {})}, cwd="/" if become else None,
        start_new_session=True,  # an interrupt from the terminal is for us, who end it well
    )  # fmt: skip
    assert process.stdin
    assert process.stdout
    try:
        yield Instance(flux, process.stdout.readline().strip(), more, become)
    finally:
        process.stdin.close()
        process.wait()


def jobtap(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """The job manager with and without plugins in Lua."""
    spent: dict[str, list[float]] = {"without": [], **{name: [] for name in IDLE}}
    for name, topic in IDLE.items():
        (scratch / f"{name}.so").symlink_to(install_paths.jobtap("gate").resolve())
        (scratch / f"{name}.lua").write_text(f"jobtap.on('{topic}', function() end)\n")

    def measure(name: str) -> float:
        with instance() as flux:
            if name in IDLE:
                flux.run("jobtap", "load", str(scratch / f"{name}.so"))
            rate, cost = flux.throughput()
        spent[name].append(cost)
        return rate

    rates = interleave(
        {name: functools.partial(measure, name) for name in spent},
        3 * repeat,  # throughput scatters
        progress,
    )
    with instance() as flux:
        flux.run("jobtap", "load", str(install_paths.jobtap("gate")))
        waits = interleave({"after": flux.after, "gate": flux.gated}, repeat, progress)
    claims = [Claim(rates["without"], "jobs/s")]
    for name, topic in IDLE.items():
        what = f"an idle plugin for {topic}"
        share = ratios(rates[name], rates["without"], f"job throughput, with {what} / without")
        cost = tuple(a - b for a, b in zip(spent[name], spent["without"]))
        claims.append(Claim(share, "x", ">=", 0.97))
        claims.append(Claim(Row(f"processor time of {what}, per job", cost), "us", "<=", 50.0))
    gate = ratios(waits["gate"], waits["after"], f"{GATED} jobs behind dovetail:up / behind after:")
    return [*claims, Claim(gate, "x", "<=", 1.10)]
