# SPDX-License-Identifier: LGPL-3.0-or-later
"""How long a node takes to pull an image with LAMMPS and its MPI, and to start a pod of it.

Inputs: a folder to pack the image in, a cluster on the host's network that has not pulled it.
Outputs: seconds, and the image's MB. The image is one packed layer of this machine's files. It is
given away by a registry in this process that only answers pulls, at an address of this machine
alone, with which containerd speaks plain HTTP. The node's copy goes with its cluster.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.server
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from usernetes_setup.build import image_archive, programs

from dovetail.bench import kube
from dovetail.core.errors import WorkFailed

NAME = "lammps"
ALONE = ("OMPI_MCA_ess_singleton_isolated=1",)  # one rank, which nothing else has started
_VENDOR = "application/vnd.oci.image"
_LIBRARY = re.compile(r"(/\S+) \(0x")
_TOOK = re.compile(r"^Successfully pulled image .*? in ([\d.hms]+)")
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}
_PATIENCE, _LOOK = 600.0, 0.02  # seconds for a pod, and between looks at it


@dataclass(frozen=True)
class Image:
    """Files by what a registry calls them, with the kind of each, and the packed layer's MB."""

    files: dict[str, tuple[Path, str]]
    megabytes: float


def lammps(folder: Path) -> Image:
    """LAMMPS and an input of it, with the plugins of its MPI."""
    program = str(shutil.which("lmp"))
    libraries = _libraries([program])
    plugins = [str(path) for library in libraries if "/libmpi.so" in library
               for path in Path(library).resolve().parent.glob("openmpi/**/*.so")]  # fmt: skip
    settings = [path for path in ("/etc/openmpi", "/usr/share/openmpi") if os.path.isdir(path)]
    return packed(folder, [program, *plugins], [*settings, str(programs.examples() / "in.lj")])


def packed(folder: Path, binaries: Sequence[str], more: Sequence[str] = ()) -> Image:
    """An image of programs with all libraries that they need, and of other files."""
    folder.mkdir(parents=True)
    layer, small = folder / "layer.tar", folder / "layer.tar.gz"
    cache = [path for path in ("/etc/ld.so.cache",) if os.path.exists(path)]
    with tarfile.open(layer, "w", dereference=True) as archive:
        for path in sorted({*binaries, *_libraries(binaries), *cache, *more}):
            archive.add(path, filter=_of_root)
        archive.add(folder, "/tmp", recursive=False, filter=_of_root)
    with layer.open("rb") as plain, gzip.open(small, "wb", compresslevel=6) as file:
        shutil.copyfileobj(plain, file, 1 << 20)
    files: dict[str, tuple[Path, str]] = {}

    def described(path: Path, kind: str) -> dict[str, object]:
        files[_digest(path)] = path, f"{_VENDOR}.{kind}"
        return {"mediaType": f"{_VENDOR}.{kind}", "digest": _digest(path),
                "size": path.stat().st_size}  # fmt: skip

    config = {"architecture": image_archive.architecture(), "os": "linux",
              "config": {"Env": [*ALONE]},
              "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]}}  # fmt: skip
    layer.unlink()
    (folder / "config.json").write_text(json.dumps(config))
    kind = "manifest.v1+json"
    manifest = {"schemaVersion": 2, "mediaType": f"{_VENDOR}.{kind}",
                "config": described(folder / "config.json", "config.v1+json"),
                "layers": [described(small, "layer.v1.tar+gzip")]}  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    described(folder / "manifest.json", kind)
    files["1"] = folder / "manifest.json", f"{_VENDOR}.{kind}"
    return Image(files, small.stat().st_size / 1e6)


def _of_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """A file as root's, who is the only user that a node of an ordinary user may have."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = "root"
    return entry


def _libraries(binaries: Sequence[str]) -> set[str]:
    """Files of the libraries that these need."""
    done = subprocess.run(["ldd", *binaries], capture_output=True, text=True)
    return set(_LIBRARY.findall(done.stdout))


def _digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return f"sha256:{found.hexdigest()}"


@contextlib.contextmanager
def registry(image: Image) -> Iterator[str]:
    """The name by which nodes of this machine can pull the image meanwhile."""

    class Pulls(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._answer(whole=True)

        def do_HEAD(self) -> None:
            self._answer(whole=False)

        def _answer(self, whole: bool) -> None:
            found = image.files.get(self.path.rpartition("/")[2])
            self.send_response(200 if found or self.path == "/v2/" else 404)
            if found:
                self.send_header("Content-Type", found[1])
            self.send_header("Content-Length", str(found[0].stat().st_size if found else 0))
            self.end_headers()
            if found and whole:
                with found[0].open("rb") as file:
                    shutil.copyfileobj(file, self.wfile, 1 << 20)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pulls) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}/{NAME}:1"
        finally:
            server.shutdown()


def measure(kubeconfig: Path, image: Image, command: Sequence[str]) -> dict[str, float]:
    """Pull it for a pod that runs the command, and start another pod where it is then."""
    from dovetail.executors.kubernetes.api import Api  # takes most of a second to import

    api = Api(kubeconfig)
    with registry(image) as name:
        cold = _pod(api, name, command, "cold")
        return {"pull": _pulled(api, "cold"), "pull, MB": image.megabytes,
                "start of a pod, pulled": cold,
                "start of a pod, image there": _pod(api, name, command, "warm")}  # fmt: skip


def _pulled(api: Any, pod: str) -> float:  # noqa: ANN401
    """Seconds of the pull for a pod, as its node tells."""
    end = time.monotonic() + _PATIENCE
    asked = f"involvedObject.name={pod},reason=Pulled"
    while time.monotonic() < end:
        events = api.get("/api/v1/namespaces/default/events", fieldSelector=asked)["items"]
        for event in events:
            if took := _TOOK.match(event.get("message", "")):
                return seconds(took[1])
        time.sleep(_LOOK)
    raise WorkFailed(f"no pull of an image was told for pod {pod}")


def seconds(duration: str) -> float:
    """What Go writes as 1m2.5s."""
    return sum(float(number) * _SECONDS[unit]
               for number, unit in re.findall(r"([\d.]+)(h|ms|m|s)", duration))  # fmt: skip


def _pod(api: Any, image: str, command: Sequence[str], name: str) -> float:  # noqa: ANN401
    """Seconds from the creation of a pod until it ran; returns when it has ended well."""
    pod = kube.pod()
    pod["metadata"]["name"] = name
    pod["spec"]["restartPolicy"] = "Never"
    container = pod["spec"]["containers"][0]
    container.update(image=image, imagePullPolicy="IfNotPresent", command=[*command],
                     terminationMessagePolicy="FallbackToLogsOnError")  # fmt: skip
    began, ran = time.monotonic(), 0.0
    api.create(kube.PODS, pod)
    while time.monotonic() < began + _PATIENCE:
        status = api.get(f"{kube.PODS}/{name}").get("status", {})
        states = [one["state"] for one in status.get("containerStatuses", [])]
        if not ran and any("running" in one or "terminated" in one for one in states):
            ran = time.monotonic() - began
        if status.get("phase") == "Succeeded":
            return ran
        ends = [one for state in states for one in state.values() if "Err" in one.get("reason", "")]
        if status.get("phase") == "Failed" or ends:
            said = " ".join(" ".join(one.get("message", "").split()[-50:]) for one in ends)
            raise WorkFailed(f"a pod of {image} failed: {said or status}")
        time.sleep(_LOOK)
    raise WorkFailed(f"a pod of {image} did not end in {_PATIENCE:.0f} s")
