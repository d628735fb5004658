# SPDX-License-Identifier: LGPL-3.0-or-later
"""Prepares the Flux broker of a pod in a MiniCluster, and what runs under it.

Called by the operator's script in every pod before it starts the broker. Inputs: the pod's
environment, of which the admission policy sets a part; the certificate; from the node's agent the
address at which the first pod's broker listens, which that pod has told the agent of its own node.
Outputs: files below `HOME`, which no other pod sees: the broker's configuration, the script that
the first broker runs, and the pod's entrypoint, which that script starts in each pod.

So nodes need no folder in common, and nothing asks for the names of pods, which need not mean
anything to anybody. Invariant: the certificate is nowhere but in files that their owner alone can
read.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import socket
import sys
import time
from pathlib import Path

from dovetail.core.messages import MessageError
from dovetail.executors.pods import CURVE, HOME, PATH, START, command, messages
from dovetail.host.private_files import write_whole
from dovetail.host.session import shared_session

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

_CONFIG = f"{HOME}/config/etc/flux/config/broker.toml"  # where the operator's script has them
_COPY = f"{HOME}/config/curve/curve.cert"
_ENTRY = f"{HOME}/dovetail-entrypoint"
_PATIENCE = 120.0  # seconds for the first pod to say where it is
_AGAIN = 0.1  # seconds until an agent that was not there is asked once more
# What the operator's script and we ourselves need of the environment, and simulations do not.
_OURS = ("PATH", "STATE_DIR", "POD_ADDRESS", "JOB_COMPLETION_INDEX", "_", "PWD", "SHLVL")


def free(address: str) -> str:
    """An address, with a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((address, 0))
        return f"{address}:{probe.getsockname()[1]}"


def meet(session: str, asked: messages.Broker, patience: float = _PATIENCE) -> str:
    """The address of the first broker, from the agent of this session; TimeoutError without one."""
    deadline = time.monotonic() + patience
    while (left := deadline - time.monotonic()) > 0.0:
        with contextlib.suppress(OSError, MessageError), socket.socket(socket.AF_UNIX) as agent:
            agent.settimeout(left)
            agent.connect(session + "/agent.sock")
            agent.sendall(messages.encode(asked))
            decoder = messages.Decoder()
            while data := agent.recv(1 << 16):
                for message in decoder.feed(data):
                    if isinstance(message, messages.Met):
                        return message.address
        time.sleep(min(_AGAIN, left))
    raise TimeoutError(f"nobody has said in {patience:g} s where the first one listens")


def configuration(name: str, size: int, address: str) -> str:
    """The configuration of all brokers, TOML: the first is everybody's parent."""
    hosts = f'{{ host = "{name}-0", bind = "tcp://{address}", connect = "tcp://{address}" }},\n'
    if size > 1:
        hosts += f'{{ host = "{name}-[1-{size - 1}]" }},\n'
    return f'[bootstrap]\ncurve_cert = "{_COPY}"\nhosts = [\n{hosts}]\n'


def start(size: int) -> str:
    """What the first broker runs: one task in each pod, on whatever cores the pod may use."""
    options = "--tasks-per-node=1 -o cpu-affinity=off -o pmi=off -o exit-timeout=none"
    return f"#!/bin/sh\nexec flux run -N{size} {options} sh {_ENTRY} </dev/null\n"


def entrypoint(words: list[str], environment: Mapping[str, str]) -> str:
    """The pod's entrypoint, with this pod's environment, for a task has the first pod's."""
    kept = {name: value for name, value in environment.items() if name not in _OURS}
    kept["PATH"] = PATH
    pairs = [f"{name}={value}" for name, value in kept.items() if not name.startswith("FLUX_")]
    return f"#!/bin/sh\ncd /\nexec env -i {shlex.join([*pairs, *words])}\n"


def _write(path: str, text: str, mode: int) -> None:
    """As a new file, so that a mode that was more generous does not stay."""
    os.makedirs(os.path.dirname(path), exist_ok=True)
    write_whole(Path(path), text, mode)


def main() -> None:
    """Write the pod's files."""
    parser = argparse.ArgumentParser(prog="dovetail-broker")
    parser.add_argument("--run", required=True, help="id of the run")
    parser.add_argument("--simulation", required=True, help="its name, one for each launch")
    parser.add_argument("--name", required=True, help="name of the MiniCluster")
    parser.add_argument("--size", required=True, type=int, help="number of pods")
    args = parser.parse_args()
    given = os.environ
    group = given["JOB_COMPLETION_INDEX"]
    try:
        own = free(given["POD_ADDRESS"]) if group == "0" else ""
        session = shared_session(args.run, given["NODE_NAME"])
        address = meet(session, messages.Broker(args.simulation, own))
        _write(_COPY, Path(CURVE, "curve").read_text(), 0o600)
        _write(_CONFIG, configuration(args.name, args.size, address), 0o644)
        _write(START, start(args.size), 0o755)
        words = [*command("executors.pods.entrypoint"), "--run", args.run,
                 "--node", given["NODE_NAME"], "--simulation", args.simulation, "--group", group,
                 "--uid", given["POD_UID"]]  # fmt: skip
        _write(_ENTRY, entrypoint(words, given), 0o644)
    except OSError as error:
        sys.exit(f"the broker cannot be prepared: {error}")
