# SPDX-License-Identifier: LGPL-3.0-or-later
"""Runs an unmodified MPI program with the library preloaded, and reads the pages of its ranks.

Inputs: the command, its MPI, how ranks wait. Outputs: a `Profile`, and how the program ended; its
own output stays its own, and what is typed is its input. Invariants: the session directory in
shared memory and every process of the run are gone when this returns, whatever ended it, and soon
after we are killed; signals for us are passed on to it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.protocol import WaitPolicy
from dovetail.host import cgroups, cpu_limits, install_paths, processes
from dovetail.host.session import start_warden, temporary_session
from dovetail.mpi import detect, launcher, page
from dovetail.mpi.control_page import Control
from dovetail.mpi.profile import Profile, from_pages

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
"""To the command alone, which may be waiting for one: they end nothing by themselves."""
GRACE = 10.0  # seconds from a forwarded signal to SIGKILL
AGAIN = 0.5  # seconds until it is looked again whether what is typed is for us


@dataclass(frozen=True)
class ProfiledRun:
    """What a program's ranks did. `failure` says how it ended if that was not well, else empty.

    `unseen` says that there were further ranks, of the program or of others, else it is empty.
    """

    profile: Profile
    failure: str
    interrupted: bool
    unseen: str = ""


def run(command: Sequence[str], mpi: str, wait: WaitPolicy, *, quiet: bool) -> ProfiledRun:
    """Run it to its end; with `quiet` its output goes to standard error.

    Raises BadInput without a command or where it cannot be started, WorkFailed where no rank was in
    MPI, and KeyboardInterrupt if that is because of a signal.
    """
    if not command:
        raise BadInput(detect.NO_COMMAND)
    library = install_paths.library(mpi)
    with _session(wait) as directory:
        environment = _environment(os.environ, directory, library, wait)
        limits, group = cgroups.above("cpu"), cgroups.above("")[:1]
        stopped, pressed = cpu_limits.throttling(limits), cpu_limits.pressure(group)
        code, caught = _execute(command, environment, quiet)
        every = page.read_all(directory)
    pages = page.of_each_world(every)
    if not pages:
        _no_pages(command, mpi, code, caught)
    failure = f"{command[0]} ended with {_ending(code)}" if code else ""
    cores = min(len(pages), len(os.sched_getaffinity(0)))
    stops = cpu_limits.hardest(cpu_limits.throttling(limits), stopped, cores)
    pressure = cpu_limits.pressure(group)
    if pressure is not None and pressed is not None:
        pressure -= pressed
    profile = from_pages(pages, command, wait.mode, code, stops, pressure)
    return ProfiledRun(profile, failure, caught, _at_once(every, pages) or _unseen(profile))


@contextlib.contextmanager
def _session(policy: WaitPolicy) -> Iterator[Path]:
    """The run's directory, in a session of its own; gone afterwards, even if we are killed."""
    warden = None
    try:
        with temporary_session(f"profile-{os.getpid()}-{secrets.token_hex(4)}") as session:
            directory = Path(session, "profile")
            try:
                directory.mkdir(mode=0o700)
                Control.create(directory, policy).close()
            except OSError as error:  # a write names no file
                raise BadInput(f"{directory}: {error.strerror}") from None
            if policy.mode == "off":  # without one, ranks give way if the user has MPI do so
                (directory / "control").unlink()
            warden = start_warden(session)
            yield directory
    finally:
        if warden is not None and not os.path.exists(session):  # else there is work for it left
            warden.kill()
            warden.wait()


def _environment(
    base: Mapping[str, str], directory: Path, library: Path, policy: WaitPolicy
) -> dict[str, str]:
    environment = {**launcher.preload(base, str(library)), "DOVETAIL_DIR": str(directory)}
    if policy.mode != "off":
        # Without it a waiting rank never calls the sched_yield that the wait modes replace.
        environment["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return environment


def _execute(
    command: Sequence[str], environment: Mapping[str, str], quiet: bool
) -> tuple[int, bool]:
    """Run to the end; its exit code (negative: signal), and whether we were asked to stop.

    The command gets a session of its own: a Ctrl-C in the terminal then reaches it once, from
    here, and not twice, which launchers take for impatience.
    """
    signals: list[int] = []
    stopping = threading.Timer(GRACE, lambda: None)

    def forward(number: int, _frame: object) -> None:
        if number in PASSED_ON:
            process.send_signal(number)
            return
        signals.append(number)
        if len(signals) == 1:
            _tell_group(process.pid, number)
            stopping.start()
        else:
            _tell_group(process.pid, signal.SIGKILL)

    with _typed(command) as typed:
        try:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                start_new_session=True,
                stdin=typed,
                stdout=sys.stderr.fileno() if quiet else None,
                close_fds=False,  # one may be that by which a job's starter tells a rank its place
            )
        except OSError as error:
            raise BadInput(f"{command[0]}: {error.strerror}") from error
        stopping = threading.Timer(GRACE, _tell_group, [process.pid, signal.SIGKILL])
        stopping.daemon = True
        heeded = [s for s in (*FORWARDED, *PASSED_ON) if signal.getsignal(s) != signal.SIG_IGN]
        before = {number: signal.signal(number, forward) for number in heeded}  # not under nohup
        try:
            code = process.wait()
        finally:
            stopping.cancel()
            _tell_group(process.pid, signal.SIGKILL)
            processes.restore_handlers(before.items())
    return code, bool(signals)


@contextlib.contextmanager
def _typed(command: Sequence[str]) -> Iterator[int | None]:
    """What is typed, as a pipe, for ranks that a starter runs; None if they can have our own input.

    Open MPI's reads from no terminal that is not its session's, and its ranks would wait for ever.
    """
    if not (os.isatty(0) and detect.by_starter(command)):
        yield None
        return
    reading, writing = os.pipe()
    over, end = os.pipe()
    feeder = threading.Thread(target=_feed, args=(writing, over), daemon=True)
    feeder.start()
    try:
        yield reading
    finally:
        os.close(end)
        feeder.join()
        os.close(over)
        os.close(reading)


def _feed(writing: int, over: int) -> None:
    """Pass on what is typed while we are in the foreground, until its end, or that of `over`."""
    # A signal must wake the thread that waits for the command.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with contextlib.suppress(OSError):  # the terminal is gone
        while over not in select.select([0, over], [], [])[0]:
            if not processes.in_front(0):  # it is for another one
                select.select([over], [], [], AGAIN)
                continue
            said = os.read(0, select.PIPE_BUF)
            if not said or over in select.select([over], [writing], [])[0]:
                break
            os.write(writing, said)
    os.close(writing)


def _tell_group(pid: int, number: int) -> None:
    """Send a signal to what there is of the command's process group, as a terminal does.

    A shell with a script keeps it for when the program that it waits for has ended.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _ending(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # of those for real time only the first and the last have a name
        return f"signal {-code}"


def _at_once(every: Sequence[page.RankPage], pages: Sequence[page.RankPage]) -> str:
    """Say how many ranks of other programs ran beside those whose `pages` are shown, if any."""
    shown, began = {one.pid for one in pages}, min(one.init_s for one in pages)
    others = sum(one.pid not in shown and one.stamp >= began for one in every)
    if not others:
        return ""
    return (
        f"several MPI programs ran at once, and {others} of their ranks are not shown; those that "
        "are may belong to different programs: profile one program at a time"
    )


def _unseen(profile: Profile) -> str:
    """Say which share of the ranks the figures are of, if not of all."""
    if not profile.unseen:
        return ""
    ranks = len(profile.ranks) + profile.unseen
    reasons = "are on another machine, are statically linked, or clear LD_PRELOAD"
    if profile.exit_code:  # one that fails takes the others with it
        reasons = f"ended before MPI_Init had, {reasons}"
    return (
        f"{profile.unseen} of {ranks} ranks were not seen, so that all figures are of the "
        f"others: they {reasons}"
    )


def _no_pages(command: Sequence[str], mpi: str, code: int, caught: bool) -> None:
    """Say why there is nothing to show."""
    if caught:
        raise KeyboardInterrupt
    if code:
        raise WorkFailed(f"{command[0]} ended with {_ending(code)} before any rank was in MPI")
    sessions = "opens sessions of MPI 4 alone, " if mpi == "openmpi" else ""
    raise WorkFailed(
        f"nothing to show: no process of {' '.join(command)} called MPI_Init of {mpi}; "
        f"it is no MPI program, {sessions}is statically linked, or clears LD_PRELOAD"
    )
