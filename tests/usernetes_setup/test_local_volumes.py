# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which claims get a volume, and which; on a cluster in test_features.py."""

from __future__ import annotations

import json
import select

import pytest
from usernetes_setup import node_record
from usernetes_setup.control import local_volumes
from usernetes_setup.node.volumes import Volumes

pytestmark = [pytest.mark.unit, pytest.mark.usefixtures("private_state")]
NOTES = {
    "volume.kubernetes.io/selected-node": "127.77.1.2",
    "volume.kubernetes.io/storage-provisioner": "dovetail/local",
}


def claim(notes=NOTES, **spec):
    usual = {"storageClassName": local_volumes.CLASS, "accessModes": ["ReadWriteOnce"],
             "volumeMode": "Filesystem", "resources": {"requests": {"storage": "1Gi"}}}  # fmt: skip
    about = {"uid": "1-2", "name": "kept", "namespace": "default", "annotations": notes}
    return {"metadata": about, "spec": {**usual, **spec}}


def test_a_claim_gets_a_folder_that_binds_its_pods_to_the_node_of_the_first():
    made = local_volumes.volume(claim())["spec"]
    assert made["hostPath"]["path"] == "/run/dovetail/volumes/pvc-1-2"
    assert "127.77.1.2" in json.dumps(made["nodeAffinity"])
    assert (made["claimRef"]["uid"], made["capacity"]) == ("1-2", {"storage": "1Gi"})


@pytest.mark.parametrize(
    "other",
    [
        claim(volumeName="pvc-1-2"),
        claim(volumeMode="Block"),
        claim(storageClassName="theirs"),
        claim(notes={}),
        claim(notes={name: NOTES[name] for name in NOTES if "node" not in name}),
    ],
)
def test_other_claims_get_none(other):
    assert local_volumes.volume(other) is None


def test_every_user_of_a_pod_can_write_to_a_new_folder_which_then_is_as_its_pods_make_it(tmp_path):
    def mode(path):
        return path.stat().st_mode & 0o777

    made, elsewhere = Volumes(tmp_path / "volumes"), tmp_path / "elsewhere"
    first, second, link = (made.folder / name for name in ("pvc-1", "pvc-2", "pvc-3"))
    assert not select.select([made.notes], [], [], 0)[0]
    first.mkdir(mode=0o755)
    assert select.select([made.notes], [], [], 0)[0]
    made.open_new()
    assert mode(first) == 0o777
    assert not select.select([made.notes], [], [], 0)[0]

    first.chmod(0o700)
    second.mkdir(mode=0o755)
    elsewhere.mkdir(mode=0o700)
    link.symlink_to(elsewhere)
    made.open_new()
    assert [mode(path) for path in (first, second, elsewhere)] == [0o700, 0o777, 0o700]


@pytest.mark.parametrize(
    ("kind", "more", "deleted"),
    [("MODIFIED", {}, 1), ("MODIFIED", {"deletionTimestamp": "2026"}, 0), ("DELETED", {}, 0)],
)
def test_the_folder_of_a_volume_goes_though_somebody_deletes_the_volume_itself(
    private_state, kind, more, deleted
):
    notes = {"pv.kubernetes.io/provisioned-by": "dovetail/local"}
    thing = {"metadata": {"name": "pvc-1", "annotations": notes, **more},
             "spec": {"persistentVolumeReclaimPolicy": "Delete"},
             "status": {"phase": "Released"}}  # fmt: skip
    calls, changes = [], [[(kind, thing)]]

    class Client:
        def watch(self, path):
            return changes.pop()  # IndexError at the second call

        def call(self, *words):
            calls.append(words)

    node_record.root(make=True)
    folder = node_record.cluster_folder("c") / "nodes/n/volumes/pvc-1"
    folder.mkdir(parents=True)
    (folder / "data").touch()
    with pytest.raises(IndexError):
        local_volumes.reclaim(Client(), "c")
    assert not folder.exists()
    assert len(calls) == deleted
