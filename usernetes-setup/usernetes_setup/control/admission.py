# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a cluster of ours refuses, because it could not keep what it took, or warns of.

Inputs: the network of the cluster's pods; whether its user has one id. Output: admission policies,
as objects. Pure.

Invariant: whoever is refused is told the cure; of a pod that a Job or another controller makes, in
that one's events. Nothing is changed silently: a pod on the machine's network is seen by its users.
"""

from __future__ import annotations

from typing import Any

Object = dict[str, Any]

POLICIES = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies"
BINDINGS = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings"
_GROUP = "admissionregistration.k8s.io/v1"


def policies(network: str, one_id: bool = False) -> list[tuple[str, Object]]:
    """What to create, and where: for each policy itself, and that it is in force everywhere."""
    found = _refusal(
        "dovetail-no-network-policy",
        ("networking.k8s.io", "networkpolicies"),
        "false",
        "nothing in this cluster enforces a NetworkPolicy, so none is taken; whoever may not reach "
        "a pod is kept away by what listens in it",
    )
    if network == "host":
        found += _refusal(
            "dovetail-host-network",
            ("", "pods"),
            "has(object.spec.hostNetwork) && object.spec.hostNetwork",
            "the pods of this cluster have no network but the machine's: put `hostNetwork: true` "
            "into the pod's spec, or start a cluster with `dovetail kube up --network bridge`",
        )
        # Taken all the same: controllers make services for what they run, and do not need them.
        found += _refusal(
            "dovetail-host-services",
            ("", "services"),
            "false",
            "pods of this cluster are on the machine's network, where nothing serves the address "
            "or the name of a service: connect to the node's address and the pod's port, or start "
            "a cluster with `dovetail kube up --network bridge`",
            action="Warn",
        )
    if one_id:
        found += _refusal(
            "dovetail-one-user",
            ("", "pods"),
            "object.spec.?securityContext.?runAsUser.orValue(0) == 0 && "
            "(object.spec.containers + object.spec.?initContainers.orValue([])).all(one, "
            "one.?securityContext.?runAsUser.orValue(0) == 0)",
            "the user of this cluster has a single id, which pods have as that of root: leave "
            "runAsUser out, or get subordinate ids, as `dovetail doctor` says, and start the "
            "cluster again",
        )
    return found


def _refusal(
    name: str, resource: tuple[str, str], holds: str, message: str, action: str = "Deny"
) -> list[tuple[str, Object]]:
    """A policy that new objects must satisfy, and its binding."""
    rule = {"apiGroups": [resource[0]], "apiVersions": ["v1"], "operations": ["CREATE"],
            "resources": [resource[1]]}  # fmt: skip
    policy = {
        "apiVersion": _GROUP,
        "kind": "ValidatingAdmissionPolicy",
        "metadata": {"name": name},
        "spec": {
            "failurePolicy": "Fail",
            "matchConstraints": {"resourceRules": [rule]},
            "validations": [{"expression": holds, "message": message, "reason": "Forbidden"}],
        },
    }
    binding = {
        "apiVersion": _GROUP,
        "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": {"name": name},
        "spec": {"policyName": name, "validationActions": [action]},
    }
    return [(POLICIES, policy), (BINDINGS, binding)]
