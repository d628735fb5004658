# SPDX-License-Identifier: LGPL-3.0-or-later
"""Nodes that are removed as lost, asked whether they are back, and made again."""

from __future__ import annotations

import threading

import pytest
from usernetes_setup.control import api_client, lost_nodes

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


class Api:
    """A stand-in for the API: knows a silent node until it is deleted, and refuses a new one."""

    def __init__(self):
        self.refused = 0
        unknown = {"type": "Ready", "status": "Unknown"}
        self.nodes = [{"metadata": {"name": "n1"}, "status": {"conditions": [unknown]}}]

    def call(self, method, path, body=None):
        if method == "DELETE":
            self.nodes = []
        if method == "POST":
            self.refused += 1
            raise api_client.Refused(409, "it is there already")
        return {"items": self.nodes}


def look_until(over, api, monkeypatch, kept, back=True):
    """Have nodes looked at, each of which is lost at once and, if `back`, is back at once."""
    monkeypatch.setattr(lost_nodes, "LOST_AFTER", -1.0)
    monkeypatch.setattr(lost_nodes, "answers", lambda node, pki: back)

    def wait(seconds):
        if over():
            raise InterruptedError

    with pytest.raises(InterruptedError):
        lost_nodes.run(api, "control", None, kept / "removed.json", wait)


def test_a_node_that_cannot_be_made_again_is_tried_again(monkeypatch, tmp_path):
    api = Api()
    look_until(lambda: api.refused == 2, api, monkeypatch, tmp_path)


class FaultyApi(Api):
    """One whose answer to the first request of each kind does not come, though it obeys."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def call(self, method, path, body=None):
        if method != "GET":
            self.nodes = [] if method == "DELETE" else [body]
        self.asked.append(method)
        if self.asked.count(method) == 1:
            raise TimeoutError("timed out")
        return {"items": self.nodes}


def test_what_is_removed_is_made_again_though_the_api_fails_meanwhile(monkeypatch, tmp_path):
    api = FaultyApi()
    look_until(lambda: len(api.asked) == 6, api, monkeypatch, tmp_path)
    assert api.asked == ["GET", "GET", "DELETE", "GET", "POST", "GET"]
    assert [node["metadata"]["name"] for node in api.nodes] == ["n1"]


def test_what_is_removed_is_made_again_by_the_next_process(monkeypatch, tmp_path):
    api = FaultyApi()
    look_until(lambda: not api.nodes, api, monkeypatch, tmp_path, back=False)
    look_until(lambda: api.nodes, api, monkeypatch, tmp_path)
    assert [node["metadata"]["name"] for node in api.nodes] == ["n1"]
    look_until(lambda: True, api, monkeypatch, tmp_path)
    assert (tmp_path / "removed.json").read_text() == "{}", "another may have the name next"
