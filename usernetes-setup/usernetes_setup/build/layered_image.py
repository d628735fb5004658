# SPDX-License-Identifier: LGPL-3.0-or-later
"""Packs a root file system into an OCI archive, under one name or more, without a container engine.

    layered_image.py LAYER TARGET <IMAGES

Input: a tar with the file system, and JSON on standard input: for each image's full name what is
particular to it (Entrypoint, Cmd, Env, Labels, StopSignal). Output: an archive that `podman load`
and `ctr images import` take. The layer is in it once, as it is: compressed it would be slow to
unpack.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import sys
import tarfile
from pathlib import Path
from typing import IO, Any

_VENDOR = "application/vnd.oci.image"
_GO = {"x86_64": "amd64", "aarch64": "arm64"}


def write(layer: Path, target: Path, images: dict[str, dict[str, Any]]) -> None:
    """Write the archive."""
    with layer.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    blobs: dict[str, bytes] = {}

    def described(data: bytes, kind: str) -> dict[str, Any]:
        name = f"sha256:{hashlib.sha256(data).hexdigest()}"
        blobs[name] = data
        return {"mediaType": f"{_VENDOR}.{kind}+json", "digest": name, "size": len(data)}

    layers = [{"mediaType": f"{_VENDOR}.layer.v1.tar", "size": layer.stat().st_size,
               "digest": f"sha256:{digest.hexdigest()}"}]  # fmt: skip
    machine = platform.machine()
    entries = []
    for name, particular in images.items():
        config = {"architecture": _GO.get(machine, machine), "os": "linux", "config": particular,
                  "rootfs": {"type": "layers", "diff_ids": [layers[0]["digest"]]},
                  "history": [{"created_by": "Dovetail"}]}  # fmt: skip
        manifest = {"schemaVersion": 2, "mediaType": f"{_VENDOR}.manifest.v1+json",
                    "config": described(json.dumps(config).encode(), "config.v1"),
                    "layers": layers}  # fmt: skip
        names = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": name}
        entry = described(json.dumps(manifest).encode(), "manifest.v1")
        entries.append({**entry, "annotations": names})
    index = json.dumps({"schemaVersion": 2, "manifests": entries}).encode()
    with tarfile.open(target, "w") as archive, layer.open("rb") as file:
        _add(archive, "oci-layout", io.BytesIO(b'{"imageLayoutVersion": "1.0.0"}'), 31)
        _add(archive, "index.json", io.BytesIO(index), len(index))
        for blob, data in blobs.items():
            _add(archive, f"blobs/{blob.replace(':', '/')}", io.BytesIO(data), len(data))
        where = f"blobs/sha256/{digest.hexdigest()}"
        _add(archive, where, file, layer.stat().st_size)


def _add(archive: tarfile.TarFile, name: str, file: IO[bytes], size: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    archive.addfile(entry, file)


if __name__ == "__main__":
    write(Path(sys.argv[1]), Path(sys.argv[2]), json.load(sys.stdin))
