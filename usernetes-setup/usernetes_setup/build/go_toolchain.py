# SPDX-License-Identifier: LGPL-3.0-or-later
"""Gets a Go that can build Kubernetes: this machine's own, else from packages.

Input: what the machine has on PATH, the Go and Debian package services. Output: a go command.
Nothing is installed; what is fetched lies in Go's own module cache, whose checksums Go compares.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from pathlib import Path

from dovetail.core.errors import WorkFailed

from usernetes_setup.build import debian_packages

ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64", "ppc64le": "ppc64le"}
LEAST = (1, 21)  # from here on Go fetches the Go that a go.mod asks for by itself


def installed() -> str | None:
    """The go command of this machine, of whatever age."""
    return shutil.which(
        "go", path=f"{os.environ.get('PATH', '')}:/usr/local/go/bin:/usr/lib/go/bin"
    )


def obtainable() -> bool:
    """Whether `command` can do its work here."""
    return bool(installed() or shutil.which("apt-get"))


def command(wanted: str, scratch: Path, say: debian_packages.Say) -> str:
    """A go command that can build what asks for Go `wanted`, such as 1.26.0. Raises WorkFailed."""
    found, environment = installed(), dict(os.environ)
    if (
        found
        and debian_packages.numbers(debian_packages.run([found, "env", "GOVERSION"], "go")[2:])
        >= LEAST
    ):
        return found
    if not found:
        root = _from_debian(scratch, say)
        found, environment["GOROOT"] = f"{root}/bin/go", str(root)
    say(f"fetching Go {wanted}")
    machine = ARCHITECTURES.get(platform.machine(), platform.machine())
    module = f"golang.org/toolchain@v0.0.1-go{wanted}.linux-{machine}"
    words = [found, "mod", "download", "-json", module]
    told = debian_packages.run(words, "go mod download", cwd=scratch, env=environment)
    folder = Path(json.loads(told)["Dir"])
    # A module's files are no programs; Go sets these bits itself, but only from 1.21 on.
    for program in [*folder.glob("bin/*"), *folder.glob("pkg/tool/*/*")]:
        program.chmod(0o755)
    return str(folder / "bin/go")


def _from_debian(scratch: Path, say: debian_packages.Say) -> Path:
    """Unpack the Go of this Debian; old as it is, it can fetch another. Returns its GOROOT."""
    if not shutil.which("apt-get"):
        raise WorkFailed("there is neither go nor apt-get; see `dovetail doctor`")
    listed = debian_packages.run(
        ["apt-cache", "depends", "--recurse", "golang-go"], "apt-cache depends"
    )
    names = sorted(set(re.findall(r"^golang-[\d.]+-(?:go|src)$", listed, re.M)))
    if not names:
        raise WorkFailed("apt-get knows no golang-go; see `dovetail doctor`")
    unpacked = debian_packages.unpack(names, scratch, say)
    return next(unpacked.glob("usr/lib/go-*"))
