#!/usr/bin/env python3
# SPDX-License-Identifier: LGPL-3.0-or-later
"""Makes a wheel of what `make install` has put into a folder; `make wheel` runs it.

    build_wheel.py STAGE PREFIX PACKAGES OUTPUT

Inputs: the folder, and the prefix and the folder for packages that are in it. Output: a wheel for
this kind of machine and each Python that the project allows, in the folder OUTPUT. It holds all:
packages, the libraries to preload, the plugins of Flux if they were built, what Kubernetes is built
from, examples and manual pages. Installed into a virtual environment it lies there as if it had
been made for that.
"""

from __future__ import annotations

import base64
import hashlib
import re
import stat
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "flux-python"


def files(stage: Path, prefix: Path, packages: Path) -> Iterator[tuple[str, Path]]:
    """What goes into the wheel: its name there, and the file."""
    top, inner = stage / prefix.relative_to("/"), stage / packages.relative_to("/")
    for path in sorted(top.rglob("*")):
        if path.is_dir() or path.suffix in (".la", ".pyc") or "modulefiles" in path.parts:
            continue  # a module names the place of this installation
        if inner in path.parents:
            yield str(path.relative_to(inner)), path
        elif path.parent != top / "bin":  # which pip writes for the Python that there is
            yield f"{{}}.data/data/{path.relative_to(top)}", path


def needs(name: str) -> list[str]:
    """What a list of packages asks for, without what it says of each."""
    lines = (SOURCE / name).read_text().splitlines()
    return [words for line in lines if (words := line.partition("#")[0].strip())]


def metadata() -> tuple[str, str, str]:
    """The name with the version, METADATA and entry_points.txt, as of pyproject.toml."""
    text = (SOURCE / "pyproject.toml").read_text()
    told = {key: re.search(rf'^{key} = "(.*)"$', text, re.M)[1] for key in
            ("name", "version", "description", "requires-python")}  # fmt: skip
    scripts = re.search(r"^\[project\.scripts\]\n((?:.+\n)*)", text, re.M)[1].replace('"', "")
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {told['name']}",
        f"Version: {told['version']}",
        f"Summary: {told['description']}",
        "License: LGPL-3.0-or-later",
        f"Requires-Python: {told['requires-python']}",
        *(f"Requires-Dist: {words}" for words in needs("requirements.txt")),
        "Provides-Extra: services",
    ]
    for words in needs("requirements-services.txt"):
        lines.append(f"Requires-Dist: {words}{' and' if ';' in words else ';'} extra == 'services'")
    points = f"[console_scripts]\n{scripts}"
    return f"{told['name']}-{told['version']}", "\n".join(lines) + "\n", points


def main(stage: str, prefix: str, packages: str, output: str) -> None:
    """Make it, and say its name."""
    name, told, points = metadata()
    tag = f"py3-none-{re.sub('[-.]', '_', sysconfig.get_platform())}"
    wheel = f"Wheel-Version: 1.0\nGenerator: dovetail\nRoot-Is-Purelib: true\nTag: {tag}\n"
    Path(output).mkdir(parents=True, exist_ok=True)
    made = Path(output) / f"{name}-{tag}.whl"
    record = []
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:

        def add(path: str, data: bytes, mode: int = 0o644) -> None:
            entry = zipfile.ZipInfo(path)
            entry.external_attr = (stat.S_IFREG | mode) << 16
            entry.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(entry, data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            record.append(f"{path},sha256={digest},{len(data)}")

        for path, file in files(Path(stage), Path(prefix), Path(packages)):
            add(path.format(name), file.read_bytes(), stat.S_IMODE(file.stat().st_mode))
        for path, text in (("METADATA", told), ("WHEEL", wheel), ("entry_points.txt", points)):
            add(f"{name}.dist-info/{path}", text.encode())
        for path in ("COPYING", "COPYING.LESSER"):
            add(f"{name}.dist-info/{path}", (SOURCE.parent / path).read_bytes())
        own = f"{name}.dist-info/RECORD"
        archive.writestr(own, "\n".join([*record, f"{own},,", ""]))
    print(made)


if __name__ == "__main__":
    main(*sys.argv[1:])
