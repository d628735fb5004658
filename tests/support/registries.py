# SPDX-License-Identifier: LGPL-3.0-or-later
"""A private registry for the tests: the real one of the distribution project, with its own
certificate and one user.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

from dovetail.host.self_signed import self_signed
from usernetes_setup.build import debian_packages

from support.clusters import eventually

USER, PASSWORD = "me", "right"
HASHED = "$2b$04$5dp0eqjRr1BRhHFYR.fL1eikdvhC93h3mHStYIAK1/vP9idfRf1KS"  # of that password


def program(scratch: Path) -> Path:
    """The registry's program, from Debian's package; nothing is installed."""
    say = lambda line: print(line, file=sys.stderr)  # noqa: E731
    return debian_packages.unpack(["docker-registry"], scratch, say) / "usr/bin/docker-registry"


class Registry:
    """A registry on one of this machine's addresses, until it is closed."""

    def __init__(self, folder: Path, host: str) -> None:
        words = [str(program(folder)), "serve", str(folder / "registry.json")]
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
