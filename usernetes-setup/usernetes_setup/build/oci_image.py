# SPDX-License-Identifier: LGPL-3.0-or-later
"""Packs the pause program into a tar of OCI images, without a container engine.

Input: a static binary. Output: a tar that `ctr images import` takes, with two names for one
image of one layer. The same input makes the same bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

PAUSE = "localhost/dovetail/pause:1"
HOST = "localhost/dovetail/host:1"
"""An image with nothing in it but the pause program; programs come by hostPath mounts."""

FOLDERS = ("dev", "etc", "proc", "root", "sys", "tmp", "usr", "var")


def _add(archive: tarfile.TarFile, name: str, data: bytes | None, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.mode = mode
    if data is None:
        entry.type = tarfile.DIRTYPE
        archive.addfile(entry)
    else:
        entry.size = len(data)
        archive.addfile(entry, io.BytesIO(data))


def pack(pause: Path, target: Path, names: list[str], architecture: str) -> None:
    """Write the tar; `architecture` is Go's word for it, such as amd64."""
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as archive:
        for folder in FOLDERS:
            _add(archive, folder, None, 0o1777 if folder == "tmp" else 0o755)
        _add(archive, "pause", pause.read_bytes(), 0o755)
    plain = layer.getvalue()
    blobs: dict[str, bytes] = {}

    def blob(data: bytes, kind: str) -> dict[str, object]:
        digest = hashlib.sha256(data).hexdigest()
        blobs[digest] = data
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)}

    vendor = "application/vnd.oci.image"
    packed = blob(gzip.compress(plain, mtime=0), f"{vendor}.layer.v1.tar+gzip")
    settings = {
        "architecture": architecture,
        "os": "linux",
        "config": {"Entrypoint": ["/pause"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(plain).hexdigest()}"]},
    }
    config = blob(json.dumps(settings).encode(), f"{vendor}.config.v1+json")
    manifest = {"schemaVersion": 2, "mediaType": f"{vendor}.manifest.v1+json",
                "config": config, "layers": [packed]}  # fmt: skip
    described = blob(json.dumps(manifest).encode(), f"{vendor}.manifest.v1+json")
    index = {"schemaVersion": 2, "manifests": [
        {**described, "annotations": {"io.containerd.image.name": name}} for name in names
    ]}  # fmt: skip
    with tarfile.open(target, "w") as archive:
        _add(archive, "oci-layout", b'{"imageLayoutVersion": "1.0.0"}', 0o644)
        _add(archive, "index.json", json.dumps(index).encode(), 0o644)
        for digest, data in sorted(blobs.items()):
            _add(archive, f"blobs/sha256/{digest}", data, 0o644)
