# SPDX-License-Identifier: LGPL-3.0-or-later
"""The runs in the control slice: each plan is one `dovetail run`, a child process.

Inputs: orders of the broker module. Outputs: the run's directory, and news of its end.
Invariants: no run outlives the slice's agent, however that dies; what was queued outlives the
module.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from usernetes_setup.node import namespaces

from dovetail.core.causes import Cause
from dovetail.flux.instance.messages import QueuedPlan
from dovetail.flux.instance.run import Run, RunState
from dovetail.host.file_tail import Tail
from dovetail.host.install_paths import dovetail_command, package_environment
from dovetail.host.line_splitter import LineSplitter
from dovetail.host.private_files import written

LOG = "dovetail.log"  # in a run's directory: what `dovetail run` says
EVENTS = "events.jsonl"  # likewise: its event log
SUMMARY = "summary.json"  # likewise: what it gained
COPY = "submitted-plan.yaml"  # likewise: the plan as it was submitted, for the user
PRIVATE = 0o077  # umask
GRACE = 10  # seconds for a child to end, once told
SOON = 8.0  # seconds for a run to end, until it is told not to wait for what takes long,
LAST = 8.0  # and more to say how it ended
INTERRUPTED = 130  # exit code of `dovetail run`
STOPPED = 143  # exit code of a simulation that shall end while it does not run
TIMEOUT = "timeout: the job's time is over"


class PlanRunner:
    """Runs of this slice, past, present and to come; the arguments are its agent's."""

    def __init__(
        self,
        tell: Callable[..., None],
        watch: Callable[[subprocess.Popen[Any], Callable[[], None]], None],
        selector: selectors.BaseSelector,
        launched: Callable[[dict[str, Any], Sequence[str]], None],
    ) -> None:
        self.tell, self.watch, self.selector, self.launched = tell, watch, selector, launched
        self.all: dict[int, Run] = {}
        self.pending: dict[int, QueuedPlan] = {}
        self.simulations: dict[str, dict[str, Any]] = {}  # by what names them for Flux
        self.going: dict[str, dict[str, Any]] = {}  # those of the present run, by their own names
        self.unplaced: set[str] = set()  # of these, those whose pods are not there yet
        self.in_pods = False  # those of the present run
        self.series = secrets.token_hex(4)  # of another control slice there may still be jobs
        self.running: subprocess.Popen[bytes] | None = None
        self.number = 0  # of the one that runs
        self.told = 0  # how often that was told to end; the third time it would say no more
        self.out_of_time = False  # the job's time is nearly over, and nothing starts any more
        self.early = False  # the present run stops at checkpoints, before that
        self.summary: Path | None = None  # that it will write; None: it will not, there is one
        self.events: Tail | None = None
        self.splitter = LineSplitter()

    def queue(self, plan: QueuedPlan) -> None:
        """Keep a plan until it is its turn."""
        self.all[plan.number] = Run(plan.number, plan.plan, plan.output, plan.cwd)
        self.pending[plan.number] = plan

    def start(self, number: int, kubeconfig: str) -> None:
        """Start a pending plan, on the cluster or on this slice's cores."""
        plan = self.pending.pop(number)
        output = Path(plan.output)
        self.all[number].start()
        if self.out_of_time:
            self.ended(number, 1, TIMEOUT)
            return
        command = [*dovetail_command((sys.executable,)), "run", plan.plan, "-o", str(output)]
        command += ["--orders", "--checkpoint"]
        if plan.executor == "kubernetes":
            command += ["--kubeconfig", kubeconfig]
        if plan.metrics is not None:
            command += ["--metrics", plan.metrics]
        ours = {"FLUX_URI": os.environ.get("FLUX_URI", "")}  # for the end of the job's time
        environment = {**package_environment(plan.environment), **ours}
        before = os.umask(PRIVATE if plan.umask is None else plan.umask)  # for what we write too
        try:
            output.mkdir(parents=True, exist_ok=True)
            self.number, self.splitter, self.early = number, LineSplitter(), False
            self.told = 0
            self.going.clear()
            self.unplaced.clear()
            self.in_pods = plan.executor == "kubernetes"
            taken = written(output / EVENTS)  # then `dovetail run` will refuse
            self.summary = None if taken else output / SUMMARY
            with contextlib.ExitStack() as files:
                copies = []
                if plan.content is not None:
                    copies = [files.enter_context(copy(plan.content, output)).fileno()]
                    command += ["--plan-copy", f"/proc/self/fd/{copies[0]}"]
                self.events = Tail(output / EVENTS)
                self.events.read()  # an earlier run's are not ours to tell
                self.selector.register(self.events, selectors.EVENT_READ, self.read)
                log = files.enter_context(open(output / LOG, "ab"))
                self.running = subprocess.Popen(
                    command, cwd=plan.cwd, stdin=subprocess.PIPE, stdout=log, stderr=log,
                    env=environment, preexec_fn=apart, pass_fds=copies,
                )  # fmt: skip
        except OSError as error:
            self.forget()
            self.ended(number, 2, str(error))
            return
        finally:
            os.umask(before)
        self.watch(self.running, lambda: self.over(number))

    def over(self, number: int) -> None:
        """A plan's process has ended."""
        assert self.running is not None
        self.read()
        self.forget()
        code, self.running = self.running.returncode, None
        why = ""
        output = Path(self.all[number].output)
        reported = self.reported()
        done = bool(code) and reported and self.all_done()
        if code == INTERRUPTED and done:  # by a signal that came while it wrote its report
            code = 0
        elif code and (self.out_of_time or self.early):
            why = TIMEOUT
        elif code < 0:
            why = f"killed by signal {-code}"
        elif code and reported and not done:
            why = "not all of its simulations are done"
        elif code:
            with contextlib.suppress(OSError):
                log = output / LOG
                why = (log.read_text(errors="replace").strip().splitlines() or [""])[-1][:500]
        self.ended(number, code if code >= 0 else 128 - code, why, reported=reported)

    def reported(self) -> bool:
        """Whether the present run has written its report."""
        with contextlib.suppress(OSError):  # its folder may be unreadable by now
            return self.summary is not None and self.summary.exists()
        return False

    def all_done(self) -> bool:
        """Whether all simulations of the present run are done, as its report says."""
        assert self.summary is not None
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(self.summary.read_text())["simulations"]
            return all(one["state"] == "done" for one in found)
        return False

    def ended(self, number: int, code: int, why: str, *, reported: bool = False) -> None:
        """Remember and tell."""
        self.all[number].end(code, why, reported=reported)
        self.tell(run=number, code=code, why=why, reported=reported)

    def read(self) -> None:
        """Tell which simulations were launched, on which nodes, and which have ended.

        One that stops at a checkpoint has ended only if the run says so: else it goes on, perhaps
        on other ranks, and its next launch is the same one for Flux.
        """
        if self.events is None:
            return
        lines = self.splitter.take(self.events.read())
        for entry in map(json.loads, filter(None, lines)):
            name = entry.get("name", "")
            if entry.get("type") == "Launch" and name not in self.going:
                key = f"{self.series}-{len(self.simulations) + 1}"
                log = str(Path(self.all[self.number].output) / name / "log")
                launch = {"launch": key, "run": self.number, "name": name, "log": log}
                self.simulations[key] = self.going[name] = launch
                self.tell(simulation=launch)
                self.unplaced.add(name)
                if not self.in_pods:
                    self.placed(name)
            elif entry.get("type") == "Placed":
                self.placed(name, entry["nodes"])
            elif entry.get("type") == "Interrupted":
                self.early = entry.get("within", 0.0) > 0.0  # by a signal it stops at once
            elif entry.get("type") == "Finished" and entry["cause"] != Cause.CHECKPOINTED.value:
                self.simulation_over(entry, entry["code"])
            elif entry.get("type") == "Ended":
                self.simulation_over(entry, 0 if entry["state"] == "checkpointed" else STOPPED)

    def placed(self, name: str, nodes: Sequence[str] = ()) -> None:
        """A simulation has nodes, or needs none but ours, and so it is a job from now on."""
        if name in self.unplaced:
            self.unplaced.remove(name)
            self.launched(self.going[name], nodes)

    def simulation_over(self, entry: Mapping[str, Any], code: int) -> None:
        """Tell how a simulation ended, if that is not known yet."""
        self.placed(entry["name"])  # one that never had pods has a job all the same
        launch = self.going.pop(entry["name"], None)
        if launch is not None:
            launch.update(code=code, reason=entry["reason"], cause=entry["cause"])
            self.tell(simulation=launch)

    def forget(self) -> None:
        """Follow no events any more."""
        if self.events is not None:
            with contextlib.suppress(KeyError):
                self.selector.unregister(self.events)
            self.events.close()
            self.events = None

    def stop(self, launch: Mapping[str, Any]) -> None:
        """Let one simulation of the present run end, if it still is that launch of it."""
        if self.running is None or launch["run"] != self.number or "code" in launch:
            return
        assert self.running.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.running.stdin.write(f"stop {launch['name']}\n".encode())
            self.running.stdin.flush()

    def time_is_over(self) -> None:
        """Let the present run end, while there is time for its summary."""
        self.out_of_time = True
        if self.running is not None:
            self.tell_end(signal.SIGALRM)

    def time_is_left(self) -> None:
        """The job's time may have been extended: what is started from now on has some."""
        if self.running is None:
            self.out_of_time = False

    def cancel(self, number: int) -> None:
        """Let the present run end, or never start one that is pending.

        Who says so again changes nothing: a third signal would end it without its summary.
        """
        again = self.all[number].state is RunState.CANCELLING
        self.all[number].cancel()
        self.pending.pop(number, None)
        if self.running is not None and number == self.number and not again:
            self.tell_end(signal.SIGINT)

    def tell_end(self, number: int) -> None:
        """Tell the present run to end."""
        assert self.running is not None
        self.told += 1
        self.running.send_signal(number)

    def end(self) -> None:
        """End the present run, which shall have the time to write its summary.

        It may wait for pods on nodes that have just ended as we do; told again, it does not.
        """
        run = self.running
        if run is None or run.poll() is not None:
            return
        for patience in (SOON, LAST)[self.told :] or (LAST,):
            if self.told < 2:
                self.tell_end(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(patience)
                return
        run.kill()
        run.wait()

    def last_news(self) -> None:
        """Tell what the run that ended with us did; not its end, of which ours is the cause."""
        self.read()
        if self.running is not None and self.reported():
            self.tell(report=self.number)


def copy(content: str, output: Path) -> BinaryIO:
    """A plan as it was submitted, in memory, where nobody edits it.

    The user finds the same in the run's directory, unless that is an earlier run's, which
    `dovetail run` will refuse.
    """
    data = content.encode()
    if not written(output / EVENTS):
        (output / COPY).write_bytes(data)
    held = open(os.memfd_create("plan"), "w+b", buffering=0)  # noqa: SIM115 (the caller closes it)
    held.write(data)
    return held


def end(child: subprocess.Popen[Any] | None) -> None:
    """End a child, with grace if it takes it."""
    if child is None or child.poll() is not None:
        return
    child.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(GRACE)
    if child.poll() is None:
        child.kill()
        child.wait()


def apart() -> None:
    """In a child: not reached by signals to our group, but never outliving us."""
    os.setsid()
    namespaces.set_process(namespaces.PR_SET_PDEATHSIG, signal.SIGTERM)
