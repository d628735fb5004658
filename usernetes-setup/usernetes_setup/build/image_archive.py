# SPDX-License-Identifier: LGPL-3.0-or-later
"""Reads container images from files, for containerd to import.

Input: a folder or archive with an OCI layout (podman, buildah, skopeo), or an archive of `docker
save`. Output: the images in it with their names and architectures, and a stream with one of them,
as an OCI archive of one manifest under its full name. Invariants: an image for another machine is
refused, and nothing is unpacked or run.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from dovetail.core.errors import BadInput
from dovetail.host.private_files import looking
from dovetail.host.progress import Counted, Progress

from usernetes_setup.build import go_toolchain

Object = dict[str, Any]

NAME = "io.containerd.image.name"
_TAG = "org.opencontainers.image.ref.name"
_VENDOR = "application/vnd.oci.image"
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_REFERENCE = re.compile(
    rf"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_CONTAINERFILE = re.compile(rb"(?:[ \t]*(?:#[^\n]*)?\n)*[ \t]*(?:FROM|ARG)[ \t]", re.IGNORECASE)

_ZSTD = b"\x28\xb5\x2f\xfd"


@dataclass(frozen=True)
class Image:
    """One image of a source: its full name, empty for none, and what it is made of.

    `manifest` and `config` are as bytes, `layers` the source's own names for its layers' files.
    """

    name: str
    manifest: bytes
    config: bytes
    layers: tuple[str, ...]


def architecture() -> str:
    """This machine's, in Go's word for it."""
    return go_toolchain.ARCHITECTURES.get(platform.machine(), platform.machine())


def full_name(name: str) -> str:
    """The name by which a cluster knows an image that users call so. Raises BadInput."""
    if not _REFERENCE.fullmatch(name):
        raise BadInput(f"image {name}: a name such as localhost/solver:1 would be right")
    first, slash, _ = name.partition("/")
    if not slash:
        name = f"docker.io/library/{name}"
    elif not (set(".:") & set(first) or first == "localhost"):
        name = f"docker.io/{name}"
    last = name.rpartition("/")[2]
    return name if ":" in last or "@" in last else f"{name}:latest"


class Source:
    """A file or folder with images; see the module. Raises BadInput for anything else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive: tarfile.TarFile | None = None
        self._members: dict[str, tarfile.TarInfo] = {}
        self._layers: dict[str, Object] = {}
        with looking(path):
            there, folder, file = path.exists(), path.is_dir(), path.is_file()
        if not there:
            raise BadInput(f"{path}: no such file or folder")
        if not (folder or file):  # a pipe, which can be read once
            raise BadInput(f"{path}: is neither file nor folder; write the archive to a file first")
        if not folder:
            self._archive = self._open()
            try:
                self._members = {os.path.normpath(one.name): one for one in self._archive}
            except Exception as error:  # each compression has errors of its own
                raise BadInput(f"{path}: is damaged: {error}") from None

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        if self._archive is not None:
            self._archive.close()

    def _open(self) -> tarfile.TarFile:
        first = b""
        try:
            with self.path.open("rb") as file:
                first = file.read(4096)
            if _CONTAINERFILE.match(first):
                raise BadInput(
                    f"{self.path}: is a Containerfile, and nothing here builds images; "
                    f"`buildah build -f {self.path} -t oci-archive:image.tar`, or podman, makes a "
                    "file that can be loaded"
                )
            return tarfile.open(self.path)
        except (OSError, tarfile.TarError, EOFError) as error:
            if first.startswith(_ZSTD):
                raise BadInput(
                    f"{self.path}: is compressed by zstd, which nothing here reads; "
                    f"`zstd -d {self.path}` makes a file that can be loaded"
                ) from None
            why = str(error).splitlines()[0].rstrip(":")
            raise BadInput(f"{self.path}: is no archive with container images ({why})") from None

    # --- files ---

    def file(self, name: str) -> IO[bytes]:
        """An open file of the source. Raises BadInput where it is not there or cannot be read."""
        try:
            if self._archive is None:
                return (self.path / name).open("rb")
            found = self._archive.extractfile(self._members[os.path.normpath(name)])
        except (OSError, KeyError, tarfile.TarError, EOFError, RecursionError):
            found = None  # or links lead to each other
        if found is None:
            raise BadInput(f"{self.path}: is damaged, or no image: it has no {name}")
        return found

    def _json(self, name: str) -> Any:  # noqa: ANN401
        with self.file(name) as file:
            return self._parsed(name, file.read())

    def _parsed(self, name: str, data: bytes) -> Any:  # noqa: ANN401
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise BadInput(f"{self.path}: is damaged: {name} is no JSON") from None

    def _has(self, name: str) -> bool:
        return name in self._members or (self._archive is None and (self.path / name).is_file())

    # --- images ---

    def images(self) -> list[Image]:
        """All for this machine. Raises BadInput if one is for others alone, or there is none."""
        try:
            if self._has("index.json"):
                found = [self._of_layout(one) for one in self._json("index.json")["manifests"]]
            elif self._has("manifest.json"):
                found = [*self._of_docker()]
            else:
                raise BadInput(f"{self.path}: has neither index.json nor manifest.json: no image")
        except (KeyError, TypeError, AttributeError):
            raise BadInput(f"{self.path}: is damaged, or no image") from None
        if not found:
            raise BadInput(f"{self.path}: has no image in it")
        return found

    def _of_layout(self, entry: Object) -> Image:
        """The image of an entry of an index, or of the one for this machine in an index below."""
        notes = entry.get("annotations") or {}
        name = str(notes.get(NAME) or notes.get(_TAG) or "")
        name = full_name(name) if "/" in name or ":" in name else ""
        own = f"linux/{architecture()}"
        offered = []
        todo = [entry]
        while todo:
            one = todo.pop(0)
            its = _platform(one["platform"]) if one.get("platform") else own
            if its != own:
                offered.append(its)
                continue
            data = self._blob(one["digest"])
            manifest = self._parsed("a manifest", data)
            if "manifests" in manifest:
                # `docker save` lists all that a registry has, and writes what was pulled.
                todo += [m for m in manifest["manifests"] if self._has(_blob_name(m["digest"]))]
                continue
            config = self._blob(manifest["config"]["digest"])
            its = self._parsed("a configuration", config)
            if "rootfs" not in its:
                continue  # what builders add: where an image is from
            offered.append(_platform(its))
            if offered[-1] == own:
                for layer in sorted(manifest["layers"], key=self._position):
                    self._check_layer(layer)
                layers = tuple(_blob_name(one["digest"]) for one in manifest["layers"])
                return Image(name, data, config, layers)
        raise self._foreign(name, offered)

    def _of_docker(self) -> Iterator[Image]:
        for entry in self._json("manifest.json"):
            names = [full_name(name) for name in entry.get("RepoTags") or ()] or [""]
            with self.file(entry["Config"]) as file:
                config = file.read()
            its = _platform(self._parsed("a configuration", config))
            if its != f"linux/{architecture()}":
                raise self._foreign(names[0], [its])
            layers = [self._described(one) for one in entry["Layers"]]
            manifest = {
                "schemaVersion": 2,
                "mediaType": f"{_VENDOR}.manifest.v1+json",
                "config": {"mediaType": f"{_VENDOR}.config.v1+json", "size": len(config),
                           "digest": f"sha256:{hashlib.sha256(config).hexdigest()}"},
                "layers": layers,
            }  # fmt: skip
            for name in names:
                yield Image(name, json.dumps(manifest).encode(), config, tuple(entry["Layers"]))

    def _described(self, layer: str) -> Object:
        """What a manifest says of a layer, which several images may have."""
        if layer in self._layers:
            return self._layers[layer]
        digest, size = hashlib.sha256(), 0
        with self.file(layer) as file:
            packed = file.read(2) == b"\x1f\x8b"
            file.seek(0)
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
        kind = f"{_VENDOR}.layer.v1.tar" + ("+gzip" if packed else "")
        found = {"mediaType": kind, "size": size, "digest": f"sha256:{digest.hexdigest()}"}
        return self._layers.setdefault(layer, found)

    def _position(self, described: Object) -> int:
        """Of a layer in the archive: one that is compressed is quick to read from front to back."""
        entry = self._members.get(_blob_name(described["digest"]))
        return entry.offset if entry else 0

    def _check_layer(self, described: Object) -> None:
        """BadInput where a layer's file is not what its manifest says."""
        digest = described["digest"]
        found = self._described(_blob_name(digest))
        if (found["digest"], found["size"]) != (digest, described["size"]):
            raise BadInput(f"{self.path}: is damaged: {digest[:19]} has another content")

    def _blob(self, digest: str) -> bytes:
        with self.file(_blob_name(digest)) as file:
            data = file.read()
        if hashlib.sha256(data).hexdigest() != digest.partition(":")[2]:
            raise BadInput(f"{self.path}: is damaged: {digest[:19]} has another content")
        return data

    def _foreign(self, name: str, offered: list[str]) -> BadInput:
        what = f"image {name} in it" if name else "the image in it"
        known = dict.fromkeys(
            one for one in offered if one != "unknown/unknown"
        )  # where it is from
        its = " and ".join(known) or "no machine"
        return BadInput(
            f"{self.path}: {what} is for {its}, and this machine is linux/{architecture()}"
        )

    def write(self, image: Image, name: str, out: IO[bytes], progress: Progress) -> None:
        """Write one image under a full name, as an OCI archive; `progress` is of its layers."""
        digest = hashlib.sha256(image.manifest).hexdigest()
        manifest = json.loads(image.manifest)
        kind = manifest.get("mediaType", f"{_VENDOR}.manifest.v1+json")
        entry = {"mediaType": kind, "size": len(image.manifest), "digest": f"sha256:{digest}",
                 "annotations": {NAME: name}}  # fmt: skip
        index = {"schemaVersion": 2, "manifests": [entry]}
        with tarfile.open(fileobj=out, mode="w|") as archive:
            _add(archive, "oci-layout", io.BytesIO(b'{"imageLayoutVersion": "1.0.0"}'), 31)
            text = json.dumps(index).encode()
            _add(archive, "index.json", io.BytesIO(text), len(text))
            _add(
                archive,
                _blob_name(f"sha256:{digest}"),
                io.BytesIO(image.manifest),
                len(image.manifest),
            )
            config = manifest["config"]["digest"]
            _add(archive, _blob_name(config), io.BytesIO(image.config), len(image.config))
            sizes = {one["digest"]: one["size"] for one in manifest["layers"]}
            progress.turn(progress.what, sum(sizes.values()))
            done = set()
            for layer, described in zip(image.layers, manifest["layers"]):
                if described["digest"] not in done:
                    done.add(described["digest"])
                    with self.file(layer) as opened:
                        file = progress.reading(opened)
                        _add(archive, _blob_name(described["digest"]), file, described["size"])


def _platform(config: Object) -> str:
    return f"{config.get('os') or 'linux'}/{config.get('architecture') or 'unknown'}"


def _blob_name(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/")


def _add(archive: tarfile.TarFile, name: str, file: IO[bytes] | Counted, size: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = size, 0o644
    archive.addfile(entry, file)
