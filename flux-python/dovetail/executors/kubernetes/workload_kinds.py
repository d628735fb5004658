# SPDX-License-Identifier: LGPL-3.0-or-later
"""What simulations become on a cluster: Jobs, or MiniClusters of the Flux Operator.

Inputs: the API; this machine's Flux, which pods see at the same place. Outputs: the objects, and
what they need: the run's CURVE certificate as a Secret. All but `body` waits for the API.

Invariants: unless the user chooses, MiniClusters are made where the operator answers, the server
has admission policies and Flux is here. A run which is resumed goes on as it began.
"""

from __future__ import annotations

import base64
import functools
import os
import shutil
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dovetail.core.errors import BadInput
from dovetail.core.protocol import Spec
from dovetail.executors.kubernetes import manifests, minicluster
from dovetail.executors.kubernetes.api import Api, Object, Refused, Unreachable
from dovetail.executors.kubernetes.manifests import path
from dovetail.host import install_paths
from dovetail.host.self_signed import openssl

ANSWER = 15.0  # seconds in which the operator must have made something of a MiniCluster
_PATIENCE = 100  # looks for the policy, 0.1 s apart; it takes a second from its creation
_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


class Launcher:
    """One run's way to make pods.

    `kind` is that of the objects; `kinds` are those that may be there, in the order in which they
    are to be deleted: what makes others first. `needs` is the access that it takes besides.
    `network` is where the pods are, `choice` the kind that it must be, if any. BadInput if there
    can be no such pods.
    """

    def __init__(
        self, api: Api, run: str, specs: Iterable[Spec], directory: Path, network: str,
        choice: str = "",
    ) -> None:  # fmt: skip
        self._api, self._run, self._network, self._choice = api, run, network, choice
        self._deaf = False  # the operator, to our probe
        try:
            self._there = minicluster.KIND in api.kinds(minicluster.GROUP)
            self._admits = api.kinds(manifests.ADMISSION) >= manifests.POLICIES
        except (Refused, Unreachable) as error:
            raise BadInput(f"{api.path}: cannot be asked what it knows: {error}") from None
        self._flux = _flux()
        specs = list(specs)
        self._images = any(spec.image for spec in specs)
        lacks = [
            what
            for what, there in (
                ("those of the plan that have images run as Jobs alone", not self._images),
                ("the Flux Operator is not installed there", self._there),
                ("there is no flux on this machine", self._flux),
                ("the server is too old for admission policies", self._admits),
            )
            if not there
        ]
        if choice == minicluster.KIND and lacks:
            raise BadInput(f"{api.path}: simulations cannot become MiniClusters: {lacks[0]}")
        self.kind = "Job" if lacks or choice == "Job" else minicluster.KIND
        self.kinds = (minicluster.KIND, "Job") if self._there else ("Job",)
        ours = ("create", "flux-framework.org", "miniclusters", "")
        self.needs = [ours] if self.kind == minicluster.KIND else []
        self._folders = functools.partial(manifests.folders, specs, directory)
        self.seen = self._folders(self.flux)
        self.seen_in_images = manifests.folders_of_image(specs, directory)

    @property
    def flux(self) -> str:
        """The folder of the `flux` that pods need on their nodes; empty if they need none."""
        return self._flux if self.kind == minicluster.KIND else ""

    def __str__(self) -> str:
        """What simulations become, in words."""
        if self.kind == minicluster.KIND:
            return f"MiniClusters of the Flux Operator, with the Flux in {self._flux}"
        said = "Jobs"
        if self._deaf:
            said += "; the Flux Operator is there, but nobody makes pods of its MiniClusters"
        elif self._choice == "Job":
            said += ", as asked"
        elif self._there and self._images:
            said += "; the Flux Operator is there, but the plan has images"
        elif self._there and not self._flux:
            said += "; the Flux Operator is there, but there is no flux on this machine"
        if not self._admits:
            said += "; pods get their requests after birth, since the server is too old for "
            said += "admission policies" + (", as MiniClusters need them" if self._there else "")
        return said

    def body(
        self, spec: Spec, key: str, sizes: Sequence[int], cpu: Sequence[int],
        memory: Sequence[int], limit: int, devices: Mapping[str, int], store: str = "",
    ) -> Object:  # fmt: skip
        """What to create for one launch of a simulation; as for `manifests.job`.

        With a `store` of the nodes in which there are copies of the run's folders.
        """
        seen = self.seen_in_images if spec.image else self.seen
        seen = seen.staged(store) if store else seen
        given = self._run, spec, key, sizes, cpu, memory, seen
        if self.kind == "Job":
            return manifests.job(*given, network=self._network, limit=limit, devices=devices)
        return minicluster.minicluster(
            *given, self._flux, self._network, limit=limit, devices=devices
        )

    def settle(self) -> None:
        """See that the operator answers, where it is to make pods of this run.

        Where it does not, and nobody asked for it, simulations become Jobs.
        """
        if self.kind == "Job":
            return
        for one in self._api.get(path(minicluster.KIND), labelSelector=minicluster.PROBES)["items"]:
            self._api.delete(path(minicluster.KIND, one["metadata"]["name"]))  # of one that died
        made = self._api.create(path(minicluster.KIND), minicluster.to_be_seen(self._run))
        try:
            self._deaf = not self._answered(made["metadata"]["uid"])
        finally:
            self._api.delete(path(minicluster.KIND, made["metadata"]["name"]))
        if not self._deaf:
            return
        if self._choice:
            raise BadInput(
                f"{self._api.path}: nobody makes pods of MiniClusters there; start the Flux "
                "Operator's manager, or choose --launcher job"
            )
        self.kind = "Job"
        self.seen = self._folders()

    def _answered(self, uid: str) -> bool:
        """Whether the operator makes something of a MiniCluster; a ConfigMap comes first."""
        until = time.monotonic() + ANSWER
        while time.monotonic() < until:
            for one in self._api.get(path("ConfigMap"))["items"]:
                owners = one["metadata"].get("ownerReferences", [])
                if any(owner["uid"] == uid for owner in owners):
                    return True
            threading.Event().wait(0.2)
        return False

    def prepare(self) -> list[Object]:
        """Make the run's certificate, if an earlier controller has not; and wait for the policy.

        Returns what was made, should it be deleted.
        """
        if self.kind == "Job":
            return []
        made = minicluster.secret(self._run, certificate())
        try:
            self._api.create(path("Secret"), made)
        except Refused as error:
            if error.reason != "AlreadyExists":
                raise
        for _ in range(_PATIENCE):
            answer = self._api.create(path("Job"), minicluster.probe(), dryRun="All")
            if minicluster.in_force(answer):
                return [made]
            threading.Event().wait(0.1)
        raise BadInput(
            f"{self._api.path}: the admission policy dovetail-minicluster has no effect there, or "
            "is an earlier version's; an administrator renews it with: kubectl apply -k "
            f"{install_paths.shared('operator-manifests')}"
        )


def _flux() -> str:
    """The folder of this machine's `flux`; empty if there is none."""
    found = shutil.which("flux") or shutil.which("/opt/flux/bin/flux")
    return os.path.dirname(os.path.realpath(found)) if found else ""


def certificate() -> str:
    """A CURVE certificate as `flux keygen` writes it, made in memory alone."""
    here = Path("/")
    private = openssl("genpkey", "-algorithm", "X25519", folder=here)
    keys = openssl("pkey", "-pubout", folder=here, data=private), private
    # The key is at the end of what openssl writes around it.
    public, secret = (z85(base64.b64decode(pem.split("-----")[2])[-32:]) for pem in keys)
    lines = f'    public-key = "{public}"\n    secret-key = "{secret}"\n'
    return f'metadata\n    name = "dovetail"\ncurve\n{lines}'


def z85(data: bytes) -> str:
    """Bytes, four at a time, in ZeroMQ's base 85."""
    text = ""
    for start in range(0, len(data), 4):
        number = int.from_bytes(data[start : start + 4], "big")
        text += "".join(_Z85[number // 85**power % 85] for power in (4, 3, 2, 1, 0))
    return text
