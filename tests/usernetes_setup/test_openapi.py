# SPDX-License-Identifier: LGPL-3.0-or-later
"""The API is described to whoever asks, though the server makes that only then."""

from __future__ import annotations

import json

import pytest
from support.clusters import eventually

pytestmark = pytest.mark.kube

VERSION = "admissionregistration.k8s.io/v1"
LABELLED = 'Object{metadata: Object.metadata{labels: {"seen": "yes"}}}'
LONGEST = 30.0
"""Seconds: the server looks every five whether there are policies to read descriptions for."""


def crd() -> dict:
    """A type of the user's own: a whale, which has a weight."""
    schema = {"type": "object", "properties": {"spec": {
        "type": "object", "properties": {"weight": {
            "type": "integer", "description": "in tonnes"}}}}}  # fmt: skip
    return {
        "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
        "metadata": {"name": "whales.sea.example"},
        "spec": {"group": "sea.example", "scope": "Namespaced",
                 "names": {"kind": "Whale", "plural": "whales", "singular": "whale"},
                 "versions": [{"name": "v1", "served": True, "storage": True,
                               "schema": {"openAPIV3Schema": schema}}]},
    }  # fmt: skip


def post(machine, made, path: str, thing: dict, **more: bool) -> dict:
    """Make it without a look at what describes it; returns what is kept, or nothing."""
    words = ("create", "--raw", path, "-f", "-")
    return json.loads(machine.kubectl(made, *words, text=json.dumps(thing), **more) or "{}")


def test_a_policy_that_changes_what_is_admitted_works_although_nobody_has_asked(any_machine):
    made = any_machine.up("--name", "one")
    rules = [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"],
              "resources": ["configmaps"]}]  # fmt: skip
    policy = {
        "apiVersion": VERSION, "kind": "MutatingAdmissionPolicy", "metadata": {"name": "label"},
        "spec": {"matchConstraints": {"resourceRules": rules}, "failurePolicy": "Ignore",
                 "reinvocationPolicy": "Never",
                 "mutations": [{"patchType": "ApplyConfiguration",
                                "applyConfiguration": {"expression": LABELLED}}]},
    }  # fmt: skip
    bound = {"apiVersion": VERSION, "kind": "MutatingAdmissionPolicyBinding",
             "metadata": {"name": "label"}, "spec": {"policyName": "label"}}  # fmt: skip
    post(any_machine, made, f"/apis/{VERSION}/mutatingadmissionpolicies", policy)
    post(any_machine, made, f"/apis/{VERSION}/mutatingadmissionpolicybindings", bound)
    path = "/api/v1/namespaces/default/configmaps"

    def labelled() -> bool:
        # It is refused, to be asked again, while the server knows the policy and not the type.
        kept = post(any_machine, made, path, {"metadata": {"generateName": "x-"}}, check=False)
        return bool(kept) and kept["metadata"].get("labels") == {"seen": "yes"}

    assert eventually(labelled, LONGEST)


def test_kubectl_explains_and_checks_own_types_and_those_of_users(any_machine):
    made = any_machine.up("--name", "one")
    kubectl = lambda *words, **more: any_machine.kubectl(made, *words, **more)  # noqa: E731
    assert "<[]Container>" in kubectl("explain", "pod.spec.containers")
    kubectl("apply", "-f", "-", text=json.dumps(crd()))
    about = ("explain", "whale.spec.weight")
    assert eventually(lambda: "in tonnes" in kubectl(*about, check=False), LONGEST)
    listed = json.loads(kubectl("get", "--raw", "/openapi/v3"))["paths"]
    assert {"api/v1", "apis/apps/v1", "apis/apiregistration.k8s.io/v1", "apis/sea.example/v1",
            "apis/apiextensions.k8s.io/v1"} <= set(listed)  # fmt: skip
    second = json.loads(kubectl("get", "--raw", "/openapi/v2"))["definitions"]
    assert {"io.k8s.api.core.v1.Pod", "example.sea.v1.Whale"} <= set(second)
    wrong = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}, "dada": {}}
    with pytest.raises(AssertionError, match='unknown field "dada"'):
        kubectl("apply", "-f", "-", text=json.dumps(wrong))
    whale = {"apiVersion": "sea.example/v1", "kind": "Whale", "metadata": {"name": "x"},
             "spec": {"weigth": 3}}  # fmt: skip
    with pytest.raises(AssertionError, match='unknown field "spec.weigth"'):
        kubectl("apply", "-f", "-", text=json.dumps(whale))
