# SPDX-License-Identifier: LGPL-3.0-or-later
"""What an instance needs so that the broker module is loaded, from its start or later.

Outputs: the configuration and the folders of an instance that is started with --dovetail; and in
one that was started without, the table `dovetail`, the module, and the variables by which it is
found again: by flux-modprobe(1), to remove it when the instance ends, since a module that nobody
removes makes the broker fail, and by the broker, when the user has it loaded anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from typing import Any

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.flux import client, option
from dovetail.host import install_paths

VARIABLE = "FLUX_MODPROBE_PATH_APPEND"
FOLDERS = {  # of our plugins for Flux, that an instance needs on its paths
    VARIABLE: "modprobe",
    "FLUX_MODULE_PATH_PREPEND": "modules",
}
MODULES = "FLUX_MODULE_PATH"  # of the broker: where `flux module reload` has it look
DEFAULTS = "dovetail-defaults"  # the table `dovetail` as it was before the first request
KILL_TIMEOUT = "40s"  # Flux's own 5 s are too short for a slice to end well
SILENCE = "1m"  # of the leading broker; the slices of a dead one stay for Flux's own 5 minutes


def command() -> str:
    """Absolute path of `flux-dovetail`, where Flux finds it; empty if it does not."""
    return shutil.which("flux-dovetail", path=os.environ.get("FLUX_EXEC_PATH", "")) or ""


def plugins() -> list[str]:
    """The jobtap plugins of an instance with Kubernetes; of ours there is none without Lua."""
    found = ["alloc-bypass.so"]  # Flux's own: lets a simulation's job have its slice's cores
    for name in ("gate", "release"):
        with contextlib.suppress(BadInput):
            found.append(str(install_paths.jobtap(name)))
    return found


def whole(known: dict[str, Any], wanted: option.Request, command: str) -> dict[str, Any]:
    """The table `dovetail`, of what is known and what is wanted, which wins. Raises BadInput."""
    said = {"network": wanted.network, **wanted.plain()}
    table = {**known.get("dovetail", {}), **said, "command": command}
    if table.get("usernetes"):  # slices are not where we are
        table["usernetes"] = os.path.abspath(table["usernetes"])
    option.check_provider(table, "--dovetail")
    return table


def configuration(known: dict[str, Any], wanted: option.Request, command: str) -> dict[str, Any]:
    """What is added to the `known` configuration of the new instance."""
    for key in ("exec", "job-manager"):
        if not isinstance(known.get(key, {}), dict):
            raise BadInput(f"--conf: {key} is a table, not {known[key]!r}")
    if not isinstance(known.get("job-manager", {}).get("plugins", []), list):
        raise BadInput("--conf: job-manager.plugins is a list of tables")
    table = whole(known, wanted, command)
    found: dict[str, Any] = {"dovetail": table, DEFAULTS: {**known.get("dovetail", {})}}
    if "kill-timeout" not in known.get("exec", {}):
        found["exec"] = {"kill-timeout": KILL_TIMEOUT}
    if "heartbeat" not in known:  # else a longer period might be taken for silence
        found["heartbeat"] = {"timeout": SILENCE}
    loaded = [*known.get("job-manager", {}).get("plugins", [])]
    there = {os.path.basename(str(one.get("load"))) for one in loaded if isinstance(one, dict)}
    loaded += [{"load": path} for path in plugins() if os.path.basename(path) not in there]
    if loaded:
        found["job-manager"] = {"plugins": loaded}
    return found


def flux(*words: str) -> str:
    """Run one of Flux's own commands."""
    done = subprocess.run(["flux", *words], capture_output=True, text=True)
    if done.returncode:
        raise WorkFailed(f"flux {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def control_slice_runs() -> bool:
    """Whether there is a control slice, which a module that is loaded would take over as it is."""
    named = {"and": [{"states": ["pending", "running"]}, {"name": ["kube-0"]}]}
    query = {"max_entries": 0, "since": 0.0, "attrs": ["name"], "constraint": named}
    for job in client.call("job-list.list", query)["jobs"]:
        query = {"id": job["id"], "keys": ["jobspec"], "flags": 0}
        spec = json.loads(client.call("job-info.lookup", query)["jobspec"])
        ours = spec["attributes"].get("user", {}).get("dovetail")
        if isinstance(ours, dict) and ours.get("slice") == 0:
            return True
    return False


def cores_of_nodes() -> list[int]:
    """How many cores each node of the instance has, free or not; nothing where Flux cannot say."""
    from usernetes_setup.node import components  # not where Flux's own commands load this file

    with contextlib.suppress(BadInput, WorkFailed):
        known = client.call("resource.sched-status")["all"]["execution"]["R_lite"]
        cores = [(one["rank"], components.count(one["children"]["core"])) for one in known]
        return [count for ranks, count in cores for _ in components.numbers(ranks)]
    return []


@contextlib.contextmanager
def one_at_a_time() -> Iterator[None]:
    """Wait for whoever else loads the module from this broker: one would undo what the other did.

    The folder of the broker's socket is locked meanwhile.
    """
    where, _, socket = os.environ.get("FLUX_URI", "").partition("://")
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # it is elsewhere, or gone, as is said soon
            if where == "local":
                folder = os.open(os.path.dirname(socket), os.O_RDONLY)
                stack.callback(os.close, folder)
                fcntl.flock(folder, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def without_interrupts() -> Iterator[None]:
    """Have Ctrl-C wait: it reaches the commands of Flux that we run as well.

    One that loads the module would end, and the module be loaded all the same.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@one_at_a_time()
def load(text: str) -> None:
    """Start what --dovetail=TEXT asks for, unless something is there already."""
    option.parse(text)  # complains first
    try:
        found = client.call("dovetail.status")
    except BadInput as error:
        if str(error) != client.NOT_LOADED:
            raise
        found = None
    if found is None and control_slice_runs():
        raise BadInput("--dovetail: slices of an earlier request run here, without their module; "
                       "`flux module load dovetail` has it take them over")  # fmt: skip
    if found and found["phase"] not in ("down", "failed", "ending"):
        raise BadInput("--dovetail: Dovetail is loaded here already; see `flux dovetail resize`")
    executable = command()
    if not executable:
        raise BadInput('flux-dovetail is not on FLUX_EXEC_PATH; type eval "$(dovetail env)" first')
    before = client.call("config.get")
    usual = before.get(DEFAULTS, before.get("dovetail", {}))  # nothing of an earlier request
    request = option.parse(text, usual)
    option.check_room(request, cores_of_nodes(), f"--dovetail={text}")
    table = whole({"dovetail": usual}, request, executable)
    if os.environ.get("DOVETAIL_CACHE"):  # ours, which the instance may not have
        table["cache"] = os.path.abspath(os.environ["DOVETAIL_CACHE"])
    if found:
        client.call("dovetail.down")  # the last of it may still be ending
    # What is done before something fails is taken back.
    with without_interrupts(), contextlib.ExitStack() as undo:
        if found:
            flux("module", "remove", "dovetail")
        client.call("config.load", {**before, "dovetail": table, DEFAULTS: usual})
        undo.callback(client.call, "config.load", before)
        there = flux("jobtap", "list", "--all").split()
        for plugin in plugins():
            if os.path.basename(plugin) not in there:
                flux("jobtap", "load", plugin)
                undo.callback(flux, "jobtap", "remove", os.path.basename(plugin))
        folders = {MODULES: "modules", VARIABLE: FOLDERS[VARIABLE]}
        known = client.call("broker.getenv", {"names": [*folders]})["env"]
        paths = {}
        for name, folder in folders.items():
            others = install_paths.beside(known.get(name, ""), folder)
            paths[name] = ":".join([*others, str(install_paths.flux_plugin(folder))])
        client.call("broker.setenv", {"env": paths})
        flux("module", "load", str(install_paths.flux_plugin("modules/dovetail.py")))
        undo.pop_all()
