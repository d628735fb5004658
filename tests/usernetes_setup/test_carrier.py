# SPDX-License-Identifier: LGPL-3.0-or-later
"""Places of nodes on a bridge: who gets which, and what a join file says of it."""

from __future__ import annotations

import json
import time

import pytest
from dovetail.core.errors import BadInput, WorkFailed
from usernetes_setup.node import carrier, namespaces
from usernetes_setup.node_record import Node, cluster_folder, root

pytestmark = pytest.mark.unit


@pytest.fixture
def control(monkeypatch, tmp_path):
    """A control node's record, with what its carrier needs, and no process."""
    monkeypatch.setenv("DOVETAIL_STATE", str(tmp_path / "state"))
    root(make=True)
    found = Node(
        cluster="default", name="login", address="127.77.1.2", cpus="0", memory=1 << 30,
        network="bridge", user="", group="", binaries="",
    )  # fmt: skip
    found.folder.mkdir(parents=True)
    (cluster_folder("default") / "pki").mkdir()
    found.ports["carrier"] = 4242
    carrier.found(found)
    return found


def peers():
    return json.loads((cluster_folder("default") / "pki/peers.json").read_text())


def test_each_node_has_a_place_of_its_own_and_one_that_comes_again_its_old_one(control):
    first = carrier.invite(control, "n1", 600, [])
    second = carrier.invite(control, "n2", 600, [])
    again = carrier.invite(control, "n1", 600, ["n1", "n2"])
    assert [one["place"] for one in (first, second, again)] == [1, 2, 1]
    assert again["key"] != first["key"]
    assert [(one["node"], one["public"]) for one in peers()] == [
        ("n2", second["public"]), ("n1", again["public"])]  # fmt: skip
    assert peers()[0]["networks"] == ["10.243.0.3/32", "10.244.2.0/24"]
    assert carrier.place({"carrier": second}) == 2
    assert second["ask"] == "10.243.0.1:4242"
    assert second["control"]["endpoint"] == "127.77.1.2:4242"


def test_a_place_is_given_back_once_the_invitation_is_over_and_its_node_away(control):
    carrier.invite(control, "n1", 600, [])
    carrier.invite(control, "late", -1, [])
    assert carrier.invite(control, "n2", -1, [])["place"] == 2, "of the one that never came"
    assert carrier.invite(control, "n3", 600, ["n2"])["place"] == 3, "since n2 is there"
    assert {one["node"]: one["place"] for one in peers()} == {"n1": 1, "n2": 2, "n3": 3}


def test_more_nodes_than_there_are_places_are_refused(control):
    now = time.time()
    full = [{"node": f"n{number}", "place": number, "until": now + 9} for number in range(1, 251)]
    (cluster_folder("default") / "pki/peers.json").write_text(json.dumps(full))
    with pytest.raises(WorkFailed, match="has 250 nodes beside its first"):
        carrier.invite(control, "one-more", 600, [])


def test_where_there_was_no_device_for_tunnels_nobody_is_invited(control):
    (control.folder / "carrier.json").unlink()
    with pytest.raises(BadInput, match=f"on a bridge more nodes need {namespaces.TUNNELS}"):
        carrier.invite(control, "n1", 600, [])


def test_keys_are_in_files_of_their_owner_alone_and_packets_fit_both_machines(control):
    invited = {**carrier.invite(control, "n1", 600, []), "mtu": 1420}
    worker = Node(**{**vars(control), "name": "n1", "joined": "yes", "place": 1})
    worker.folder.mkdir()
    carrier.join(worker, invited)
    for node in (control, worker):
        assert (node.folder / "carrier.json").stat().st_mode & 0o777 == 0o600
    assert json.loads((worker.folder / "carrier.json").read_text())["mtu"] == 1420
    assert json.loads((control.folder / "carrier.json").read_text())["mtu"] == 65000 - 80
    assert "key" not in peers()[0]


@pytest.mark.parametrize(
    "broken",
    [
        5,
        {},
        {"key": "a"},
        {"key": 1, "public": "b", "place": 1, "mtu": 1, "ask": "", "control": {}},
    ],
)
def test_a_join_file_whose_part_is_broken_is_none(broken):
    with pytest.raises((TypeError, KeyError)):
        carrier.place({"carrier": broken})
    assert carrier.place({}) == 0
