# SPDX-License-Identifier: LGPL-3.0-or-later
"""Nodes that were removed as lost are asked whether they are back, all at once."""

from __future__ import annotations

import threading

import pytest
from usernetes_setup.control import lost_nodes

pytestmark = pytest.mark.unit


def test_a_node_that_is_switched_off_keeps_no_other_waiting(monkeypatch):
    """A stand-in for kubelets: each answers once all are asked, else none does within 10 s."""
    names = [f"n{i}" for i in range(lost_nodes.AT_ONCE)]
    asked = threading.Barrier(len(names))

    def answers(node, pki):
        asked.wait(10)
        return node["metadata"]["name"] != "n3"

    monkeypatch.setattr(lost_nodes, "answers", answers)
    nodes = {name: {"metadata": {"name": name}} for name in names}
    assert lost_nodes.answering(nodes, None) == [name for name in names if name != "n3"]
