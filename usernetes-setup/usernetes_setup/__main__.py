# SPDX-License-Identifier: LGPL-3.0-or-later
"""The verbs of user-space Kubernetes, as `dovetail kube VERB` and `usernetes-setup/VERB`.

Each may be repeated: it ends in the same state whether it was there already or not. Exit
codes: 0 done, 1 the work failed, 2 bad input, 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host.exit_codes import guarded

from usernetes_setup import cluster, node_images, node_record
from usernetes_setup.build import programs
from usernetes_setup.preflight import machine, report
from usernetes_setup.upstream import verbs as upstream

VERBS = {
    "preflight": "say whether user-space Kubernetes can run here, and how to fix what is missing",
    "build": "get every program, once for all checkouts and clusters",
    "up": "start a cluster with one node here",
    "join": "add a node here to a cluster, or invite one",
    "status": "show clusters and nodes of this user on this machine",
    "down": "end a cluster, or one node, and remove every trace",
    "image": "load, list or remove container images of a cluster's nodes here",
    "bundle": "pack a build for machines without internet, or unpack one",
}

INVITES = ["name", "node", "valid"]
"""Options of `join --invite`; `join FILE` has the first two from its file."""
STARTS = ["cpus", "memory", "devices", "address", "owner", "timeout",
          "usernetes", "node_image", "mount"]  # fmt: skip
"""Options of `join FILE`, which starts a node."""


def configure(parser: argparse.ArgumentParser, verb: str) -> None:
    """Add one verb's options."""
    add = parser.add_argument
    add("--json", action="store_true", default=argparse.SUPPRESS, help="print JSON, not text")
    if verb in ("up", "join", "down", "image"):
        add("--name", default="default", help="the cluster (default: %(default)s)")
    if verb in ("up", "join"):
        add("--cpus", default="", metavar="N|LIST",
            help="cores to offer: a number, or a list such as 0-1,4 (default: all)")  # fmt: skip
        add("--memory", default="", metavar="SIZE",
            help="memory to offer, such as 8Gi (default: three quarters)")  # fmt: skip
        add("--devices", default="auto", metavar="LIST",
            help="devices to offer: rdma, efa, gpu, paths below /dev, each with =N for N pods at "
            "once; none (default: auto, the adapters and GPUs that there are)")  # fmt: skip
        add("--address", default="", metavar="IP",
            help="this machine's address for nodes on others (default: loopback only)")  # fmt: skip
        add("--owner", type=int, default=0, metavar="PID", help="end when this process ends")
        add("--timeout", type=float, default=120.0, metavar="SECONDS", help="wait so long at most")
        add("--node", default="", metavar="NAME", help="the node's name (default: its address)")
        add("--usernetes", default="", metavar="DIR",
            help="provider usernetes: an upstream checkout, which is only read")  # fmt: skip
        add("--node-image", default="", metavar="IMAGE",
            help="provider usernetes: an image with all that upstream's Dockerfile would download, "
            "such as usernetes-setup/node-image/make makes (default: kindest/node)")  # fmt: skip
        add("--mount", action="append", default=[], metavar="DIR",
            help="provider usernetes: a folder that the node has too; may be repeated")  # fmt: skip
    if verb == "up":
        add(
            "--provider",
            choices=("dovetail", "usernetes"),
            default="dovetail",
            help="what makes the cluster: Dovetail, or upstream Usernetes (default: dovetail)",
        )
        add("--network", choices=("host", "bridge"), default="",
            help="the pods' network: the host's, or a private bridge (default: host)")  # fmt: skip
    if verb == "join":
        add("--invite", metavar="FILE", help="write a join file for one node, and start nothing")
        add(
            "--valid", type=int, default=600, metavar="SECONDS", help="how long an invitation lasts"
        )
        add("file", nargs="?", metavar="FILE", help="the join file; - for standard input")
    if verb == "status":
        add("name", nargs="?", default="", metavar="NAME", help="one cluster only")
    if verb == "down":
        add("--node", default="", metavar="NAME", help="only this node")
        add("--all", action="store_true", help="all clusters of this user on this machine")
    if verb == "image":
        add("action", choices=("load", "list", "remove"), metavar="load|list|remove",
            help="what to do")  # fmt: skip
        add("what", nargs="?", default="", metavar="FILE|IMAGE",
            help="load: an archive or a folder with an image; remove: its name")  # fmt: skip
        add("--image", default="", metavar="NAME", help="load: the image's name on the cluster")
    if verb == "bundle":
        add("-o", "--output", metavar="FILE", help="write the bundle here")
        add("--unpack", metavar="FILE", help="put this bundle's content into the cache")


def say(line: str) -> None:
    """Progress, for people."""
    print(f"dovetail kube: {line}", file=sys.stderr, flush=True)


def show(args: argparse.Namespace, value: object, text: str) -> None:
    """The result, as JSON or as text."""
    print(json.dumps(value, indent=1) if args.json else text)


def table(found: list[dict[str, Any]]) -> str:
    """Status for people."""
    lines = [f"{'CLUSTER':<20} {'NODE':<20} {'STATE':<10} {'CPUS':<10} {'MEMORY':>8} SERVER"]
    for entry in found:
        if not entry["node"]:
            lines.append(f"{entry['cluster']:<20} {'-':<20} {entry['state']}")
            continue
        size = f"{entry['memory'] >> 20}Mi"
        lines.append(f"{entry['cluster']:<20} {entry['node']:<20} {entry['state']:<10} "
                     f"{entry['cpus']:<10} {size:>8} {entry['server']}")  # fmt: skip
    return "\n".join(lines)


def run(verb: str, args: argparse.Namespace) -> int:
    """Do one verb; returns its exit code."""
    os.umask(0o077)
    if verb == "preflight":
        return report.main(args.json)
    if verb == "build":
        machine.check_buildable()
        folder = programs.build(say)
        show(args, json.loads((folder / "made.json").read_text()), str(folder))
    elif verb == "bundle":
        if bool(args.output) == bool(args.unpack):
            raise BadInput("bundle: give either -o FILE or --unpack FILE")
        if args.output:
            machine.check_buildable()
            programs.pack(Path(args.output), say)
        done = Path(args.output) if args.output else programs.unpack(Path(args.unpack), say)
        show(args, str(done), str(done))
    elif verb == "up":
        made = (upstream if args.provider == "usernetes" else cluster).up(args, say)
        show(args, made, f"export KUBECONFIG={shlex.quote(made['kubeconfig'])}")
    elif verb == "join":
        if bool(args.invite) == bool(args.file):
            raise BadInput("join: give a join file, or --invite FILE to write one")
        refuse_ignored(args)
        if args.invite:
            made = cluster.invite(args)
            show(args, made, f"{args.invite}: for node {made['node']}, {args.valid} s")
        else:
            made = cluster.join(args, say)
            show(args, made, f"node {made['node']} is ready")
    elif verb == "status":
        found = cluster.status(args.name)
        show(args, found, table(found))
        return 0 if all(entry["ready"] for entry in found) else 1
    elif verb == "image":
        image(args)
    elif verb == "down":
        names = node_record.clusters() if args.all else [args.name]
        down(names, args.node)
        show(args, names, "")
    return 0


def refuse_ignored(args: argparse.Namespace) -> None:
    """Refuse options of `join` that its other form takes. Raises BadInput."""
    known = argparse.ArgumentParser()
    configure(known, "join")
    others, why = INVITES, f"only with --invite; {args.file} says for which node it is"
    if args.invite:
        others, why = STARTS, "not with --invite; it is for where the node is started"
    for option in others:
        if getattr(args, option) != known.get_default(option):
            raise BadInput(f"--{option.replace('_', '-')}: {why}")


def down(names: list[str], node: str) -> None:
    """End each of these clusters, or its node. Raises what went wrong when all were tried."""
    failed: list[Exception] = []
    for name in names:
        try:
            cluster.down(name, node)
        except (BadInput, WorkFailed, OSError) as error:
            failed.append(error)
    for one in failed[:-1]:
        say(str(one))
    if failed:
        raise failed[-1]


def image(args: argparse.Namespace) -> None:
    """Load, list or remove images."""
    if bool(args.what) == (args.action == "list"):
        needs = {"load": "a file", "remove": "an image's name"}.get(args.action, "nothing")
        raise BadInput(f"image {args.action}: takes {needs}")
    if args.image and args.action != "load":
        raise BadInput("--image: only of an image that is loaded")
    if args.action == "load":
        made = node_images.load(args.name, Path(args.what), args.image, say)
        show(args, made, "\n".join(made["images"]))
    elif args.action == "remove":
        show(args, node_images.remove(args.name, args.what), "")
    else:
        found = node_images.listed(args.name)
        lines = [f"{'IMAGE':<50} {'SIZE':>10} NODES"]
        lines += [f"{e['image']:<50} {e['size']:>10} {','.join(e['nodes'])}" for e in found]
        show(args, found, "\n".join(lines))


def add_verbs(parser: argparse.ArgumentParser) -> None:
    """Add every verb as a subcommand."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, line in VERBS.items():
        configure(verbs.add_parser(name, help=line, description=line), name)


def main(words: list[str]) -> int:
    """The `kube` command: its words begin with the verb."""
    top = argparse.ArgumentParser(prog="dovetail kube", description="User-space Kubernetes.")
    top.add_argument("--json", action="store_true", help="print JSON instead of text")
    add_verbs(top)
    args = top.parse_args(words)
    return run(args.verb, args)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(guarded("dovetail kube", lambda: main(sys.argv[1:])))
