# SPDX-License-Identifier: LGPL-3.0-or-later
"""The agent of a slice without its Kubernetes: says that it is up, and starts nothing.

`python -m dovetail.bench.scale.stub_slice slice --number N --cluster NAME ...` takes the place of
`flux dovetail slice` where `brokers` measures how the broker module, Flux and agents grow with the
number of slices. All that an agent and the module say to each other is said by the real agent, over
the real relay; an invitation is empty, a node ready as soon as it is invited, and there is nothing
to remove at the end, or for a sweep.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from dovetail.flux import command, slice_agent
from dovetail.flux.instance import messages


class StubAgent(slice_agent.Agent):
    """One slice's life, without a node."""

    def begin(self) -> None:
        """The control plane is up at once; a worker waits for its invitation."""
        if self.number == 0:
            self.start()

    def start(self, *_: str) -> None:
        """It is ready."""
        self.node = {"node": f"stub-{self.number}"}
        self.tell(**self.known())

    def known(self) -> dict[str, Any]:
        """What the module needs to know."""
        found = {**self.node, "cpus": self.cpus} if self.node else {}
        return {**found, "kubeconfig": "none"} if self.node and not self.number else found

    def give(self, _: str) -> None:
        """A worker is ready as it is invited."""
        self.start()

    def invite(self) -> None:
        """Nobody joins anything."""
        while self.uninvited:
            number, node = self.uninvited.popitem()
            self.tell(invited=number, join={"stub": node})

    def obey(self, order: messages.Order) -> None:
        """As the module wants; there is no Kubernetes that knew a node."""
        if isinstance(order, messages.Forget):
            self.tell(forgotten=order.forget)
        else:
            super().obey(order)


def main() -> int:
    """Be the agent; a sweep has nothing to do."""
    args = command.parser().parse_args(sys.argv[1:])
    if args.sweep:
        return 0
    os.umask(0o077)
    slice_agent.use_folder(args.number, args.cluster)
    return StubAgent(
        args.number, args.cluster, machine_address=False, timeout=args.timeout,
        stop_before=args.stop_before, devices="none",
    ).live()  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
