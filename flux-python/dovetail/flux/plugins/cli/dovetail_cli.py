# SPDX-License-Identifier: LGPL-3.0-or-later
"""The option --dovetail of `flux batch`, `flux alloc` and `flux submit`.

Flux loads this file into them, since its folder is on FLUX_CLI_PLUGINPATH. Inputs: the command
line. Outputs: the new instance's configuration and environment, and `attributes.user.dovetail`
of its job. Invariant: what is wrong is refused before anything is submitted.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import flux
import flux.resource
from flux.cli.plugin import CLIPlugin
from flux.util import dict_merge

Namespace = Any  # these two are of Flux, which has no types
Jobspec = Any
sys.path.append(str(Path(__file__).resolve().parents[4]))

from dovetail.core.errors import BadInput  # noqa: E402
from dovetail.flux import load, option  # noqa: E402
from dovetail.host.install_paths import beside, flux_plugin  # noqa: E402

INSTANCES = ("batch", "alloc")
WRAPS = "submit"  # where the command becomes the first program of a new instance

CONF = "dovetail-conf.json"  # there; the user may add files by more usual names


def largest_node() -> int:
    """Cores of the largest node of the instance that gets the job; 0 if it does not say."""
    try:
        nodes = flux.resource.resource_list(flux.Flux()).get().all
        return max((nodes.copy_ranks([rank]).ncores for rank in nodes.ranks), default=0)
    except OSError:
        return 0


class DovetailPlugin(CLIPlugin):
    """User-space Kubernetes in a part of the allocation.

    --dovetail=nodes=N,cores=K carves N slices of K cores each out of the new instance (cores=all,
    which is the default: whole nodes) and starts Kubernetes on them; provider=usernetes has
    upstream Usernetes do so. See dovetail-flux(7).
    """

    def __init__(self, prog: str) -> None:
        super().__init__(prog, prefix="")
        if self.prog in INSTANCES or self.prog == WRAPS:
            self.add_option(
                "--dovetail", metavar="nodes=N[,cores=K|all][,provider=P]",
                help="Run user-space Kubernetes on N nodes of the new instance",
            )  # fmt: skip

    def preinit(self, args: Namespace) -> None:
        """Check, and put the pieces into the configuration."""
        text = getattr(args, "dovetail", None)
        if text is None:
            return
        args.dovetail = text  # of each copy that `--cc` makes, Flux hands on what was set on itself
        said = str(getattr(args, "nodes", ""))  # text in `flux submit`; Flux refuses what is none
        nodes = int(said) if said.isdecimal() else None
        if self.prog == WRAPS:  # which has no --conf
            self.added(text, {}, nodes)
        elif hasattr(args, "conf"):  # else Python's interface has put it into the jobspec already
            args.conf.update(self.added(text, args.conf.config or {}, nodes))

    def added(self, text: str, known: dict[str, Any], nodes: int | None) -> str:
        """What is added to the `known` configuration, as JSON. Raises ValueError."""
        try:
            if importlib.util.find_spec("flux.brokermod") is None:
                raise BadInput("--dovetail needs Flux 0.84 or newer")
            option.check(known.get("dovetail", {}), "--conf: dovetail")
            wanted = option.parse(text, known.get("dovetail"))
            option.check_fits(wanted, nodes, f"--dovetail={text}")
            option.check_cores(wanted, largest_node() or wanted.cores, f"--dovetail={text}")
            command = load.command()
            if not command:
                raise BadInput("--dovetail: flux-dovetail is not on FLUX_EXEC_PATH; "
                               'type eval "$(dovetail env)" first')  # fmt: skip
            return json.dumps(load.configuration(known, wanted, command), indent=1)
        except BadInput as error:
            raise ValueError(str(error)) from None

    def modify_jobspec(self, args: Namespace, jobspec: Jobspec) -> None:
        """Name what was asked for to the site's policy; let the instance find the module."""
        text = getattr(args, "dovetail", None)
        if text is None:
            return
        if self.prog == WRAPS:
            known = {}
        elif hasattr(args, "conf"):
            known = args.conf.config["dovetail"]
        else:
            known = self.configure(jobspec, text)
        jobspec.setattr("attributes.user.dovetail", option.parse(text, known).plain())
        environment = jobspec.environment
        for name, folder in load.FOLDERS.items():
            found = beside(environment.get(name, ""), folder)  # of the job around us, maybe
            environment[name] = ":".join([*found, str(flux_plugin(folder))])
        if environment.get("DOVETAIL_CACHE"):  # slices are not where we are
            environment["DOVETAIL_CACHE"] = str(Path(environment["DOVETAIL_CACHE"]).absolute())
        jobspec.environment = environment
        if self.prog == WRAPS:
            task = jobspec.tasks[0]
            task["command"] = ["flux", "broker", f"-c{{{{tmpdir}}}}/{CONF}", *task["command"]]
            jobspec.add_file(CONF, load.configuration({}, option.parse(text), load.command()))
            options = {"per-resource": {"type": "node"}, "mpi": "none", "exit-timeout": "none"}
            for name, value in options.items():  # as `flux batch` has them
                jobspec.setattr_shell_option(name, value)

    def configure(self, jobspec: Jobspec, text: str) -> Any:  # noqa: ANN401
        """Configure what Python's from_batch() or from_alloc() made; returns its `dovetail`."""
        files = jobspec.attributes["system"].get("files", {})
        conf = files["conf.json"]["data"] if "conf.json" in files else {}
        nodes = next((one["count"] for one in jobspec.resources if one["type"] == "node"), None)
        conf = dict_merge(conf, json.loads(self.added(text, conf, nodes)))
        if "conf.json" not in files:
            jobspec.tasks[0]["command"].insert(2, "-c{{tmpdir}}/conf.json")
        jobspec.add_file("conf.json", conf)
        return conf["dovetail"]
