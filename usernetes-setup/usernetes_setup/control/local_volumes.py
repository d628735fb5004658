# SPDX-License-Identifier: LGPL-3.0-or-later
"""Local volumes: what a PersistentVolumeClaim gets, a folder on the node of its first pod.

Inputs: claims, once the scheduler has found a node for their pod, and volumes that were given back.
Outputs: for each such claim a volume, which binds its pods to that node; after the claim, neither
volume nor folder. Invariants: a volume's folder, which the kubelet makes, is in its node's own (see
`node.volumes`) and so ends with that at the latest; nothing keeps to the size that was asked for.
"""

from __future__ import annotations

import shutil

from usernetes_setup.control import api_client
from usernetes_setup.node_record import SHOWN, cluster_folder

CLASS = "dovetail-local"
CLASSES = "/apis/storage.k8s.io/v1/storageclasses"
_PROVISIONER = "dovetail/local"
_CLAIMS = "/api/v1/persistentvolumeclaims"
_VOLUMES = "/api/v1/persistentvolumes"
_BY = "volume.kubernetes.io/storage-provisioner"  # whom the controller manager leaves a claim to
_FROM = "pv.kubernetes.io/provisioned-by"
_NODE = "volume.kubernetes.io/selected-node"  # where the scheduler will put the claim's first pod


def storage_class() -> api_client.Object:
    """The class of every claim that names none."""
    return {
        "metadata": {
            "name": CLASS,
            "annotations": {"storageclass.kubernetes.io/is-default-class": "true"},
        },
        "provisioner": _PROVISIONER,
        "reclaimPolicy": "Delete",
        "volumeBindingMode": "WaitForFirstConsumer",
    }


def volume(claim: api_client.Object) -> api_client.Object | None:
    """What a claim gets, or None if it is not for us, has a volume, or has no node yet."""
    about, spec = claim["metadata"], claim["spec"]
    notes = about.get("annotations", {})
    ours = spec.get("storageClassName") == CLASS and notes.get(_BY) == _PROVISIONER
    # A folder is no block device: such a claim waits, and says for whom.
    if not ours or _NODE not in notes or "volumeName" in spec or spec.get("volumeMode") == "Block":
        return None
    name = f"pvc-{about['uid']}"
    host = {"key": "kubernetes.io/hostname", "operator": "In", "values": [notes[_NODE]]}
    return {
        "metadata": {"name": name, "annotations": {_FROM: _PROVISIONER}},
        "spec": {
            "capacity": {"storage": spec["resources"]["requests"]["storage"]},
            "accessModes": spec["accessModes"],
            "persistentVolumeReclaimPolicy": "Delete",
            "storageClassName": CLASS,
            "claimRef": {
                "apiVersion": "v1",
                "kind": "PersistentVolumeClaim",
                **{key: about[key] for key in ("namespace", "name", "uid")},
            },
            "hostPath": {"path": f"{SHOWN}/volumes/{name}", "type": "DirectoryOrCreate"},
            "nodeAffinity": {"required": {"nodeSelectorTerms": [{"matchExpressions": [host]}]}},
        },
    }


def serve(client: api_client.Client) -> None:
    """Give each claim its volume, for ever."""
    while True:
        for kind, claim in client.watch(_CLAIMS):
            made = volume(claim) if kind in ("ADDED", "MODIFIED") else None
            if made is None:
                continue
            try:
                client.call("POST", _VOLUMES, made)
            except api_client.Refused as error:
                if error.status != 409:
                    raise
            else:
                told = f"{made['metadata']['name']}: for {claim['metadata']['namespace']}"
                print(told, flush=True)


def reclaim(client: api_client.Client, cluster: str) -> None:
    """Remove each volume that was given back, for ever; on another machine its folder stays."""
    while True:
        for kind, thing in client.watch(_VOLUMES):
            about, spec = thing["metadata"], thing.get("spec", {})
            by = about.get("annotations", {}).get(_FROM)
            released = thing.get("status", {}).get("phase") == "Released"
            gone = kind not in ("ADDED", "MODIFIED") or "deletionTimestamp" in about
            kept = spec.get("persistentVolumeReclaimPolicy") != "Delete"
            if by != _PROVISIONER or not released or kept:
                continue
            for folder in cluster_folder(cluster).glob(f"nodes/*/volumes/{about['name']}"):
                shutil.rmtree(folder, ignore_errors=True)
            if gone:  # the volume was deleted by hand, which leaves its folder to us
                continue
            client.call("DELETE", f"{_VOLUMES}/{about['name']}")
            print(f"{about['name']}: removed", flush=True)
