# SPDX-License-Identifier: LGPL-3.0-or-later
"""The local executor: ranks are processes on this machine.

Inputs: launches, resizes and stops from the controller; the rank pages. Outputs: events; per
simulation `<run_dir>/<name>/case` and `log`, a control group and a supervisor process (see
`dovetail.mpi.supervisor`), which does whatever takes time, so that no call here blocks, and
afterwards has the next simulation, since a Python takes a while to start.

Invariants: nothing outlives the controlling process, however it ends: the supervisors notice; a
Finished is reported only after every trace of the simulation is gone but its output.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail import applications
from dovetail.core import programs, protocol
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.protocol import Cause, Result
from dovetail.executors.local.job import Job, JobState
from dovetail.host import cgroups, cpu_limits, install_paths, processes
from dovetail.host.cores import Cores
from dovetail.host.devices import Gpus
from dovetail.host.memory import free_memory, lost
from dovetail.host.session import (
    create_session,
    remove_session,
    remove_simulation,
    remove_tree,
    start_warden,
    sweep_sessions,
)
from dovetail.mpi import launcher, sampling, supervisor
from dovetail.mpi.control_page import Control
from dovetail.mpi.page import RankPage
from dovetail.plan import command_line

_PATIENCE = 10.0  # seconds for a supervisor to do what it was told before it is ended itself
_SPARES = 2  # supervisors that wait for the first simulations
_COUNT = 5.0  # seconds between looks at what keeps ranks from their cores
_FILES = 1 << 14  # that may be open here,
_EACH, _BESIDE = 3, 64  # of which each simulation has so many, and all else at most these
ROOM = 300.0  # seconds that a disk may be full until cases that find no room there fail
_RUN_SUPERVISOR = "from dovetail.mpi.supervisor import main; main()"


class LocalExecutor:
    """Runs simulations on this machine; implements `protocol.Executor`.

    `run_dir` takes the simulations' directories. `cpus` is how many of the CPUs that this
    process may use are given to simulations (None: all), `memory` how many bytes (None: what
    is free now). `origin` is the CLOCK_MONOTONIC time of the run clock's 0. `launches` is how many
    are to be expected, for which what starts them is made ready beforehand. `log_limit` bounds
    each log, bytes. `place` is the control group to work under, by default what is found;
    `devices` are how many of each simulations may have at once.
    Raises BadInput for absurd numbers, WorkFailed where there is no shared memory.
    """

    def __init__(
        self,
        run_dir: Path,
        cpus: int | None = None,
        memory: int | None = None,
        origin: float | None = None,
        run_id: str = "",
        log_limit: int = 64 << 20,
        place: cgroups.Group | None = None,
        devices: Sequence[tuple[str, int]] = (),
        launches: int = 1 << 30,
    ) -> None:
        allowed = sorted(os.sched_getaffinity(0))
        if cpus is not None and not 1 <= cpus <= len(allowed):
            raise BadInput(
                f"cpus: {cpus} is not possible; this process may use 1 to {len(allowed)}"
            )
        self._cpus = allowed[:cpus]
        self._pin = self._cpus if len(self._cpus) < len(allowed) else []
        self._cores = Cores(self._cpus)
        self._memory = memory or free_memory()
        self._devices = tuple(devices)
        self._gpus = Gpus()
        self._run_dir = Path(run_dir).resolve()
        self._origin = time.monotonic() if origin is None else origin
        self._log_limit = log_limit
        self._full_since: float | None = None  # the disk under `run_dir`, CLOCK_MONOTONIC
        self.results: dict[str, Result] = {}
        self._jobs: dict[str, Job] = {}
        self._events: list[protocol.Event] = []
        self._launches, self._expected = 0, launches
        self._mpi: dict[tuple[str, ...], str] = {}  # by the clues to it
        self._news: dict[str, bool] = {}  # what the user should know, and whether it was told
        self._poll = select.epoll()
        self._spares: list[subprocess.Popen[bytes]] = []
        self.swept = sweep_sessions()
        self._run_id = run_id = run_id or os.urandom(4).hex()
        name = f"dovetail-{os.getuid()}-{run_id}"
        try:
            self._temporary = os.path.join(tempfile.gettempdir(), name)
        except OSError as error:  # before anything is made
            raise WorkFailed(f"cannot make a session: {error.strerror}; set TMPDIR") from error
        self._group = self._make_group(cgroups.find() if place is None else place, name)
        # No group of ours has a limit, but those around may.
        weight = self._group.weight
        self._around = cpu_limits.around(weight) if weight else cgroups.above("cpu")
        try:
            os.mkdir(self._temporary, 0o700)
            self.session, self._lock = create_session(run_id, self._group, self._temporary)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._group.remove()
            remove_tree(self._temporary)
            where = f"{error.filename}: " if error.filename else ""
            raise WorkFailed(f"cannot make a session: {where}{error.strerror}") from error
        self._warden = start_warden(self.session)
        self._limits = _allow_files()
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = 0 if files < 0 else max(1, (files - _BESIDE) // _EACH)
        with contextlib.suppress(OSError):  # a launch then makes its own, or says why not
            for _ in range(min(_SPARES, launches)):
                self._spares.append(self._new_supervisor())

    def _make_group(self, place: cgroups.Group, name: str) -> cgroups.Group:
        """The run's own group, as far as the kernel lets us have one."""
        for wanted in (place, cgroups.Group("", place.control), cgroups.Group(place.weight, "")):
            group = wanted.child(name)
            try:
                group.create()
                group.share_out()
                group.set_weight(1000 * len(self._cpus))
                return group
            except OSError:
                with contextlib.suppress(OSError):
                    group.remove()
        return cgroups.Group("", "")

    def capacity(self) -> protocol.Capacity:
        """This machine; without control groups it has no weights, suspending works always."""
        node = protocol.Node(socket.gethostname(), 1000 * len(self._cpus), self._memory)
        return protocol.Capacity(
            (node,), bool(self._group.weight), suspend=True, checkpoints=True, binds=True,
            devices=self._devices, simulations=self._most,
        )  # fmt: skip

    # --- what the controller asks for ---

    def launch(self, spec: protocol.Spec, share: protocol.Share) -> None:
        """Start a simulation; a failure comes back as Finished. ValueError if it runs already."""
        if spec.name in self._jobs:
            raise ValueError(f"simulation {spec.name} is running")
        self._launches += 1
        job = Job(
            spec,
            share,
            os.path.join(self.session, spec.name),
            os.path.join(self._temporary, str(self._launches)),
            self._group.child(spec.name),
        )
        self._jobs[spec.name] = job
        try:
            self._keep_session()
            os.mkdir(job.directory, 0o700)
            os.mkdir(job.temporary, 0o700)
            job.control = Control.create(Path(job.directory), share.wait)
            job.make_groups()
            job.apply(share)
            self._start_supervisor(job)
        except (OSError, ValueError, BadInput) as error:
            job.end(Result(Cause.LAUNCH_FAILED, 1, f"cannot be started: {error}"))

    def resize(self, shares: Mapping[str, protocol.Share]) -> None:
        """Give new shares, all or none; a Resized follows."""
        done: list[Job] = []
        refused = ""
        for name, share in shares.items():
            job = self._jobs.get(name)
            if job is None or not job.wanted:
                refused = f"{name}: runs no more"
                break
            done.append(job)
            try:
                job.apply(share)
                self._bind(job, share.bound)
            except OSError as error:
                refused = f"{name}: {error}"
                break
        for job in done:
            if refused:
                with contextlib.suppress(OSError):
                    job.apply(job.share)
                    self._bind(job, job.share.bound)
            else:
                job.share = shares[job.spec.name]
        self._events.append(protocol.Resized(self._now(), tuple(shares), refused))

    def stop(self, name: str, why: str, cause: Cause = Cause.CANCELLED) -> None:
        """End a simulation: SIGTERM, a grace of 3 s, SIGKILL; a Finished follows."""
        job = self._jobs.get(name)
        if job is not None:
            job.stop(why or "stopped", cause, supervisor.GRACE + _PATIENCE)
            self._bind(job, False)  # its cores may be given to others from now on

    def _bind(self, job: Job, bound: bool) -> None:
        """Bind its ranks to cores, or let them run anywhere; OSError where that cannot be."""
        name = job.spec.name
        if not bound:
            self._cores.release(name, lambda: processes.members(f"DOVETAIL_DIR={job.directory}"))
            return
        pages = sampling.complete(Path(job.directory), job.spec.ranks, job.spawned)
        if not pages:
            raise OSError("which processes its ranks are is not known, as they do not use MPI")
        self._cores.bind(name, {one.pid: one.start_ticks for one in pages})

    def checkpoint(self, name: str) -> None:
        """Ask a simulation to stop at a checkpoint; a Finished follows once it has."""
        job = self._jobs.get(name)
        if job is not None:
            job.halt()

    def close(self) -> None:
        """End everything and remove every trace, within seconds; may be called twice.

        Afterwards `observe` once more says how they ended.
        """
        if self._poll.closed:
            return
        for job in self._jobs.values():
            job.release(_PATIENCE, "the run ended")
        self._expected = 0  # no supervisor is kept from now on
        for spare in self._spares:
            _dismiss(spare)
        last: list[protocol.Event] = []
        while self._jobs:
            self.wait(_PATIENCE)
            last += self.observe(self._now())
        self._events = last
        self._poll.close()
        remove_session(self.session, os.pread(self._lock, 65536, 0))
        if not os.path.exists(self.session):
            self._warden.kill()  # it would find nothing to do
        os.close(self._lock)
        self._warden.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, self._limits)

    # --- what happens ---

    def fileno(self) -> int:
        """Readable when `observe` has more to say than new samples."""
        return self._poll.fileno()

    def wait(self, timeout: float) -> bool:
        """Sleep until something happens or `timeout` seconds are over; True if it happened."""
        deadlines = [job.deadline for job in self._jobs.values() if job.deadline]
        if self._events or any(job.supervisor is None for job in self._jobs.values()):
            return True
        limit = min([timeout, *(deadline - time.monotonic() for deadline in deadlines)])
        return bool(self._poll.poll(max(0.0, limit)))

    def silent(self) -> bool:
        """Never: nobody else needs to answer."""
        return False

    def hurry(self) -> None:
        """`close` waits for nobody else anyway."""

    def news(self) -> Sequence[str]:
        """Which programs cannot be measured; this machine is there or we are not."""
        lines = [line for line, told in self._news.items() if not told]
        self._news.update(dict.fromkeys(lines, True))
        return lines

    def observe(self, t: float) -> Sequence[protocol.Event]:
        """What happened since the last call, oldest first; `t` is now on the run's clock."""
        events, self._events = self._events, []
        for job in list(self._jobs.values()):
            ended = self._hear(job, t, events)
            job.keep_suspended()
            if job.publishes:
                pages = self._sample(job, t, events)
                if t >= job.count_at or job.state is JobState.ENDED:
                    self._count(job, pages, t, events)
            if job.state is JobState.ENDED:
                job.release(_PATIENCE)
            if ended or job.overdue:
                self._finish(job, t, events)
        return events

    def _hear(self, job: Job, t: float, events: list[protocol.Event]) -> bool:
        """Take in the supervisor's messages; True if it has gone."""
        if job.supervisor is None:
            return True
        assert job.supervisor.stdout is not None
        ended, lines = False, []
        with contextlib.suppress(BlockingIOError):
            while not ended:
                chunk = os.read(job.supervisor.stdout.fileno(), 65536)
                lines += job.splitter.take(chunk)
                ended = not chunk
        for line in lines:
            try:
                message = json.loads(line)
            except ValueError:
                job.last_words = line
                continue
            if message["kind"] == "started":
                self._full_since = None
                job.begun()
                job.begun_at = t
                job.prepared = job.group.cpu_seconds() or 0.0
                job.count_at = t + _COUNT
                job.throttled = cpu_limits.throttling(self._around)
                job.pressure = cpu_limits.pressure(job.group.directories)
                self._mpi[_clues(job.spec)] = message["mpi"]
                if why := install_paths.why_unmeasured(message["mpi"]):
                    self._news.setdefault(why, False)
                case = str(self._run_dir / job.spec.name / "case")
                total = applications.prepared_iterations(job.spec, case)
                events.append(protocol.Started(t, job.spec.name, message["iterations"], total))
            elif message["kind"] == "delayed":
                self._full_since = self._full_since or time.monotonic()
                events.append(protocol.Delayed(t, job.spec.name, message["why"]))
            elif message["kind"] == "removed":
                job.removed = ended = True
            else:
                cause = Cause(message["cause"])
                job.end(Result(cause, message["code"], message["reason"], message["trouble"]))
        return ended

    def _count(
        self, job: Job, pages: Sequence[RankPage], t: float, events: list[protocol.Event]
    ) -> None:
        """Report what has kept its ranks from their cores, as far as that is known."""
        job.count_at = t + _COUNT
        ranks = sum(one.spec.ranks for one in self._jobs.values() if one.publishes)
        stops = cpu_limits.hardest(
            cpu_limits.throttling(self._around), job.throttled, min(ranks, len(self._cpus))
        )
        pressure = cpu_limits.pressure(job.group.directories)
        if pressure is not None and job.pressure is not None:
            pressure = round(pressure - job.pressure, 6)
        rows = [sampling.waits(one.waits, one.elapsed_s) for one in pages]
        seen = sampling.of_waits(rows, stops, pressure)
        if seen != protocol.Contention():
            events.append(protocol.Counted(t, job.spec.name, seen))

    def _sample(self, job: Job, t: float, events: list[protocol.Event]) -> Sequence[RankPage]:
        """Report the ranks if any of them has published something new; their pages."""
        directory = Path(job.directory)
        pages = sampling.complete(directory, job.spec.ranks, job.spawned)
        succeeded = job.result is not None and job.result.code == 0
        ranks = None
        if pages:
            job.place_ranks(pages)
            awaited = self._awaited(job, pages, t)
            ranks = sampling.of_pages(pages, directory, self._origin, succeeded, awaited)
        elif (cpu := job.group.cpu_seconds()) is not None:
            members = job.group.members()
            job.peak_memory = max(job.peak_memory, processes.peak_memory(members))
            used = sampling.Used(
                t, max(0.0, cpu - job.prepared), t - job.begun_at,
                processes.queued(members), job.peak_memory,
            )  # fmt: skip
            ranks = sampling.of_group(used, job.spec.ranks, directory, self._origin, succeeded)
        if ranks is not None and ranks != job.sample:
            job.sample = ranks
            events.append(protocol.Sampled(t, job.spec.name, ranks))
        return pages

    def _awaited(self, job: Job, pages: Sequence[RankPage], t: float) -> Sequence[float]:
        """See sampling.of_pages; empty if its ranks are not quiet."""
        if job.supervisor is None or not sampling.quiet(pages):
            job.awaited, job.awaited_then, job.awaited_at = (), (), t
        elif t >= job.awaited_at:
            job.awaited_at = t + _COUNT
            members = job.group.members() or processes.members(
                f"DOVETAIL_DIR={job.directory}", job.supervisor.pid
            )
            others = set(members) - {one.pid for one in pages}
            used = processes.cpu_seconds(members) - sum(one.cpu_s for one in pages)
            used += processes.queued(others) or 0.0
            now = tuple(used + (processes.queued([one.pid]) or 0.0) for one in pages)
            job.awaited_then = job.awaited_then or now
            since = [new - then for new, then in zip(now, job.awaited_then)]
            before = job.awaited or (0.0,) * len(pages)
            job.awaited = tuple(map(max, before, since))  # some may have ended
        return job.awaited

    def _finish(self, job: Job, t: float, events: list[protocol.Event]) -> None:
        """The supervisor has gone, or is taken for dead: see that nothing is left, and report."""
        code = 1
        if job.supervisor is not None:
            assert job.supervisor.stdout is not None
            self._poll.unregister(job.supervisor.stdout.fileno())
            if job.removed and len(self._spares) < self._expected - self._launches:
                self._spares.append(job.supervisor)
            else:
                code = _dismiss(job.supervisor, at_once=job.removed or job.overdue)
        if os.path.exists(job.directory):
            remove_simulation(job.directory, job.group, job.temporary)
        result = job.result
        if result is None:
            words = job.splitter.rest or job.last_words
            result = Result(Cause.SUPERVISOR_LOST, *lost("its supervisor", code, words, job.kills))
        if job.why_stopped:
            result = result.once_stopped(job.stop_cause, job.why_stopped)
        self._bind(job, False)
        self._gpus.release(job.spec.name)
        del self._jobs[job.spec.name]
        self.results[job.spec.name] = result
        events.append(protocol.Finished(t, job.spec.name, result.cause, result.code, result.reason))

    # --- means ---

    def _now(self) -> float:
        return time.monotonic() - self._origin

    def _keep_session(self) -> None:
        """Make the session anew if somebody has removed it, as systemd does at a user's logout."""
        if os.path.exists(self.session):
            return
        _, lock = create_session(self._run_id, self._group, self._temporary)
        self._warden.kill()
        self._warden.wait()
        os.close(self._lock)
        self._lock, self._warden = lock, start_warden(self.session)

    def _start_supervisor(self, job: Job) -> None:
        spec, group = job.spec, job.group
        inner = group.child("job") if job.parts else group
        environment = {**self._gpus.take(spec.name, spec.takes()), **dict(spec.environment)}
        config: dict[str, Any] = {
            "name": spec.name,
            "directory": job.directory,
            "temporary": job.temporary,
            "case": os.path.abspath(spec.case),
            "home": str(self._run_dir / spec.name),
            "ranks": spec.ranks,
            "alone": programs.is_alone(spec.application, spec.ranks),
            "command": spec.command,
            "prepare": [(line, command_line.program(line)) for line in spec.prepare],
            **{
                step: command_line.program(line) if line else []
                for step, line in (
                    ("go_on", spec.go_on),
                    ("halt", spec.halt),
                    ("halted", spec.halted),
                )
            },
            "environment": {**environment, "PATH": command_line.search_path(environment)},
            "mpi": self._mpi.get(_clues(spec)),
            "libraries": install_paths.libraries(),
            "group": [group.weight, group.control],
            "job": [inner.weight, inner.control],
            "cpus": self._pin,
            "log_limit": self._log_limit,
            "room": ROOM - (time.monotonic() - (self._full_since or time.monotonic())),
        }
        text = json.dumps(config).encode()
        ready = [spare for spare in self._spares if spare.poll() is None]
        supervisor = ready.pop() if ready else self._new_supervisor()
        self._spares = ready
        assert supervisor.stdout is not None
        os.set_blocking(supervisor.stdout.fileno(), False)
        try:
            self._poll.register(supervisor.stdout.fileno(), select.EPOLLIN)
        except OSError:
            _dismiss(supervisor)
            raise
        job.supervisor = supervisor
        job.tell(len(text).to_bytes(4, "little") + text)

    def _new_supervisor(self) -> subprocess.Popen[bytes]:
        """One that waits for its simulation, and ends where this process does."""
        made = subprocess.Popen(
            install_paths.python_command(_RUN_SUPERVISOR),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            bufsize=0,
        )
        resource.prlimit(made.pid, resource.RLIMIT_NOFILE, self._limits)
        return made


def _allow_files() -> tuple[int, int]:
    """Let this process have more files open, as far as it may; the limits before."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < _FILES:  # without a limit it is less than 0
        most = _FILES if hard < 0 else min(_FILES, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return soft, hard


def _clues(spec: protocol.Spec) -> tuple[str, ...]:
    return launcher.clues(spec.command[0], (spec.case, *spec.prepare), spec.environment)


def _dismiss(supervisor: subprocess.Popen[bytes], *, at_once: bool = True) -> int:
    """The end of one that has nothing left to do, or is to end `at_once`; its exit code."""
    if at_once:
        supervisor.kill()
    with supervisor:
        return supervisor.wait()
