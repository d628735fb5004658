# SPDX-License-Identifier: LGPL-3.0-or-later
"""The user's side of Flux: the option --dovetail, and the way to the broker module.

Flux loads this file, since its folder is on FLUX_CLI_PLUGINPATH, into `flux batch`, `alloc`
and `submit`: the option is checked before submission, and the pieces go into the new
instance's configuration and environment, nowhere else.

As a program (`flux python dovetail_cli.py`) it is the one client of the module's requests, for
commands and slice agents, which need no Flux bindings then: requests are lines of JSON on
standard input, {"id", "topic", "payload", "stream"}, where the topic `submit` has a jobspec
submitted on the cores of the job that we are in, and answers again if that is told to end; on
standard output are answers, as lines {"id", "value"} or {"id", "error": [number, text]}, and
events: first {"event": "connected", "rank"}, and {"event": "loaded"} whenever the module was
loaded. It ends with its input, or with the broker; then the module sees a disconnect.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import flux
import flux.constants
import flux.job
from flux.cli.plugin import CLIPlugin

Namespace = Any  # these four are of Flux, which has no types
Jobspec = Any
Handle = Any
Future = Any
PACKAGE = Path(__file__).resolve().parents[3]
SIGNALLED = 128  # plus the signal: the exit code that a job shell gives a killed task
sys.path.append(str(PACKAGE.parent))

from dovetail.core.errors import BadInput  # noqa: E402
from dovetail.flux import option  # noqa: E402
from dovetail.flux.client import SUBMIT  # noqa: E402
from dovetail.host.line_splitter import LineSplitter  # noqa: E402

KILL_TIMEOUT = "40s"  # Flux's own 5 s are too short for a slice to end well
SILENCE = "1m"  # of the leading broker; the slices of a dead one stay for Flux's own 5 minutes
INSTANCES = ("batch", "alloc")
WRAPS = "submit"  # where the command becomes the first program of a new instance


class DovetailPlugin(CLIPlugin):
    """User-space Kubernetes in a part of the allocation.

    --dovetail=nodes=N,cores=K carves N slices of K cores each out of the new instance (cores=all,
    which is the default: whole nodes) and starts Kubernetes on them. See dovetail-flux(7).
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, prefix="")
        if self.prog in INSTANCES or self.prog == WRAPS:
            self.add_option(
                "--dovetail", metavar="nodes=N[,cores=K|all]",
                help="Run user-space Kubernetes on N nodes of the new instance",
            )  # fmt: skip

    def preinit(self, args: Namespace) -> None:
        """Check, and put the pieces into the configuration."""
        text = getattr(args, "dovetail", None)
        if not text:
            return
        try:
            wanted = option.parse(text)
            option.fits(wanted, args.nodes, f"--dovetail={text}")
            known = {} if self.prog == WRAPS else args.conf.config or {}  # it has no --conf
            option.check(known.get("dovetail", {}), "--conf: dovetail")
        except BadInput as error:
            raise ValueError(str(error)) from None
        command = shutil.which("flux-dovetail", path=os.environ.get("FLUX_EXEC_PATH", ""))
        if not command:
            raise ValueError("--dovetail: flux-dovetail is not on FLUX_EXEC_PATH; "
                             'type eval "$(dovetail env)" first')  # fmt: skip
        if self.prog != WRAPS:
            found = pieces(known, wanted, command)
            args.conf.update(json.dumps(found, indent=1))

    def modify_jobspec(self, args: Namespace, jobspec: Jobspec) -> None:
        """Name what was asked for to the site's policy; let the instance find the module."""
        text = getattr(args, "dovetail", None)
        if not text:
            return
        jobspec.setattr("attributes.user.dovetail", option.parse(text).plain())
        environment = jobspec.environment
        for name, folder in option.FOLDERS.items():
            found = environment.get(name, "")
            environment[name] = ":".join(filter(None, (found, str(PACKAGE / folder))))
        jobspec.environment = environment
        if self.prog == WRAPS:
            task = jobspec.tasks[0]
            task["command"] = ["flux", "broker", "-c{{tmpdir}}/conf.json", *task["command"]]
            command = shutil.which("flux-dovetail", path=os.environ["FLUX_EXEC_PATH"])
            jobspec.add_file("conf.json", pieces({}, option.parse(text), str(command)))
            options = {"per-resource.type": "node", "mpi": "none", "exit-timeout": "none"}
            for name, value in options.items():  # as `flux batch` has them
                jobspec.setattr_shell_option(name, value)


def pieces(known: dict[str, Any], wanted: option.Asked, command: str) -> dict[str, Any]:
    """What is added to the `known` configuration of the new instance."""
    table = {**known.get("dovetail", {}), **wanted.plain(), "command": command}
    found: dict[str, Any] = {"dovetail": table}
    if "kill-timeout" not in known.get("exec", {}):
        found["exec"] = {"kill-timeout": KILL_TIMEOUT}
    if "heartbeat" not in known:  # else a longer period might be taken for silence
        found["heartbeat"] = {"timeout": SILENCE}
    loaded = [*known.get("job-manager", {}).get("plugins", [])]
    loaded += [{"load": path} for path in option.plugins()]
    if loaded:
        found["job-manager"] = {"plugins": loaded}
    return found


class Relay:
    """Carries requests from standard input to Flux, and answers back."""

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
        self.splitter = LineSplitter()
        handle.event_subscribe("dovetail.loaded")
        self.events = handle.msg_watcher_create(
            self.loaded, flux.constants.FLUX_MSGTYPE_EVENT, "dovetail.loaded"
        )
        self.events.start()
        self.say({"event": "connected", "rank": handle.get_rank()})
        os.set_blocking(0, False)
        self.input = handle.fd_watcher_create(0, self.readable)
        self.input.start()

    def say(self, line: dict[str, Any]) -> None:
        """One line of output; when nobody reads it any more, this ends."""
        try:
            os.write(1, json.dumps(line).encode() + b"\n")
        except OSError:
            self.handle.reactor_stop()

    def loaded(self, *_: object) -> None:
        """The module was loaded, perhaps anew."""
        self.say({"event": "loaded"})

    def readable(self, *_: object) -> None:
        """Requests, or the end of them."""
        try:
            block = os.read(0, 1 << 16)
        except BlockingIOError:
            return
        if not block:
            self.handle.reactor_stop()
            return
        for line in self.splitter.take(block):
            self.request(json.loads(line))

    def request(self, asked_: dict[str, Any]) -> None:
        """Send one request."""
        if asked_["topic"] == SUBMIT:
            self.submit(asked_)
            return
        flags = flux.constants.FLUX_RPC_STREAMING if asked_.get("stream") else 0
        future = self.handle.rpc(asked_["topic"], asked_.get("payload", {}), nodeid=0, flags=flags)
        future.then(self.answered, asked_)

    def submit(self, asked_: dict[str, Any]) -> None:
        """Submit a job on cores that ours has."""
        query = {"id": flux.job.JobID(os.environ["FLUX_JOB_ID"]), "keys": ["R"], "flags": 0}
        try:
            held = self.handle.rpc("job-info.lookup", query, nodeid=0).get()["R"]
        except OSError as error:
            self.say({"id": asked_["id"], "error": [error.errno, str(error)]})
            return
        spec = asked_["payload"]
        spec["attributes"]["system"]["alloc-bypass"] = {"R": json.loads(held)}
        flux.job.submit_async(self.handle, json.dumps(spec)).then(self.submitted, asked_)

    def submitted(self, future: Future, asked_: dict[str, Any]) -> None:
        """Pass on which job it is, or why there is none."""
        try:
            job = future.get_id()
        except OSError as error:
            self.say({"id": asked_["id"], "error": [error.errno, str(error)]})
            return
        self.say({"id": asked_["id"], "value": {"job": int(job)}})
        flux.job.event_watch_async(self.handle, job).then(self.happened, asked_)

    def happened(self, future: Future, asked_: dict[str, Any]) -> None:
        """Pass on that a job which we submitted was told to end, or was killed."""
        try:
            event = future.get_event()
        except OSError:  # it has ended and is forgotten
            return
        told = event.context if event is not None else {}
        fatal = told.get("severity") == 0
        killed = told.get("status", 0) >> 8 > SIGNALLED
        if fatal and told["type"] == "exec":
            asked_["lost"] = True  # by Flux, and not for the user's wish: one without may go on
        elif fatal or (killed and "lost" not in asked_):
            self.say({"id": asked_["id"], "value": {"cancelled": True}})

    def answered(self, future: Future, asked_: dict[str, Any]) -> None:
        """Pass an answer on."""
        try:
            value = future.get()
        except OSError as error:
            text = future.error_string() or os.strerror(error.errno or 0)
            self.say({"id": asked_["id"], "error": [error.errno, text]})
            return
        self.say({"id": asked_["id"], "value": value})
        if asked_.get("stream"):
            future.reset()


def main() -> int:
    """Relay until the input ends."""
    try:
        handle = flux.Flux()
        relay = Relay(handle)
        handle.reactor_run()
        del relay  # which had to live so long
    except OSError as error:
        print(f"no Flux instance: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
