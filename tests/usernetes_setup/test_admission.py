# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a cluster could not keep it does not take, and says what would be right."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from support.clusters import LIMIT, eventually, pod, record

pytestmark = pytest.mark.kube

POLICY = {
    "apiVersion": "networking.k8s.io/v1", "kind": "NetworkPolicy", "metadata": {"name": "closed"},
    "spec": {"podSelector": {}, "policyTypes": ["Ingress"]},
}  # fmt: skip


def refused(machine, made, text, cure):
    """Wait until an object is refused with these words: a policy takes a second to be in force."""
    kubectl = [str(machine.binaries / "bin/kubectl"), "--kubeconfig", made["kubeconfig"]]
    line = [*kubectl, "apply", "--dry-run=server", "-f", "-"]

    def said():
        done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=LIMIT)
        return cure in done.stderr

    assert eventually(said)


def test_pods_without_a_network_and_network_policies_are_refused_with_the_cure(any_machine):
    made = any_machine.up("--name", "one")
    refused(any_machine, made, pod("lone", "true", hostNetwork=False), "put `hostNetwork: true`")
    refused(any_machine, made, json.dumps(POLICY), "nothing in this cluster enforces a")
    other = pod("other", "true", securityContext={"runAsUser": 999})
    if Path(f"/proc/{record(made)['supervisor']}/uid_map").read_text().split()[2:] == ["1"]:
        refused(any_machine, made, other, "has a single id, which pods have as that of root")
    else:
        any_machine.kubectl(made, "apply", "--dry-run=server", "-f", "-", text=other)
    any_machine.kubectl(made, "create", "job", "lone", "--image=none", "--", "true")
    events = ("get", "events", "-o", "json")
    assert eventually(lambda: "put `hostNetwork: true`" in any_machine.kubectl(made, *events))
    any_machine.kubectl(made, "apply", "--dry-run=server", "-f", "-", text=pod("fine", "true"))
