# SPDX-License-Identifier: LGPL-3.0-or-later
"""A private registry for the tests: the real one of the distribution project, with its own
certificate and one user. It is built once from its Go module and kept in the user's cache.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from dovetail.host.self_signed import self_signed
from usernetes_setup.build import go_toolchain, programs

from support.clusters import eventually

SOURCES = Path(__file__).parent / "registry"
USER, PASSWORD = "me", "right"
HASHED = "$2b$04$5dp0eqjRr1BRhHFYR.fL1eikdvhC93h3mHStYIAK1/vP9idfRf1KS"  # of that password


def program() -> Path:
    """The registry's program."""
    digest = hashlib.sha256()
    for name in ("go.mod", "go.sum", "main.go"):
        digest.update((SOURCES / name).read_bytes())
    made = programs.cache().parent / "test-images" / f"registry-{digest.hexdigest()[:12]}"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        for old in made.parent.glob("registry-*"):
            if old != made:  # which another worker may just have made
                old.unlink(missing_ok=True)
        with tempfile.TemporaryDirectory(dir=made.parent) as scratch:
            say = lambda line: print(line, file=sys.stderr)  # noqa: E731
            go = go_toolchain.command(programs.go_version(), Path(scratch), say)
            draft = Path(scratch) / "registry"
            words = ["nice", go, "build", "-trimpath", "-ldflags", "-s -w", "-o", str(draft), "."]
            environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false"}
            subprocess.run(words, cwd=SOURCES, env=environment, check=True)
            draft.rename(made)
    return made


class Registry:
    """A registry on one of this machine's addresses, until it is closed."""

    def __init__(self, folder: Path, host: str) -> None:
        words = [str(program()), "serve", str(folder / "registry.json")]  # before a port is found
        with socket.create_server((host, 0)) as probe:
            self.name = f"{host}:{probe.getsockname()[1]}"
        self_signed(folder, "registry", host)
        self.certificate = folder / "registry.crt"
        (folder / "users").write_text(f"{USER}:{HASHED}\n")
        settings = {
            "version": 0.1,
            "log": {"level": "error"},
            "storage": {"filesystem": {"rootdirectory": str(folder / "images")}},
            "http": {
                "addr": self.name,
                "tls": {"certificate": str(self.certificate), "key": str(folder / "registry.key")},
            },
            "auth": {"htpasswd": {"realm": "tests", "path": str(folder / "users")}},
        }
        (folder / "registry.json").write_text(json.dumps(settings))  # which is YAML too
        self.log = folder / "registry.log"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log)
        assert eventually(self._answers), self.log.read_text()

    def _answers(self) -> bool:
        host, port = self.name.split(":")
        with socket.socket() as probe:
            return self.process.poll() is None and probe.connect_ex((host, int(port))) == 0

    def close(self) -> None:
        self.process.terminate()
        self.process.wait()
