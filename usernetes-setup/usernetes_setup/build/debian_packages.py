# SPDX-License-Identifier: LGPL-3.0-or-later
"""Programs that are not built here: this machine's own if they fit, else Debian's.

Input: what the machine has on PATH, the Debian package service. Output: `bin/`, `cni/` and `lib/`
of a build, and where each program is from. Nothing is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from dovetail.core.errors import WorkFailed

Say = Callable[[str], None]

# Program: Debian package, how it tells its version, the oldest that is known to do.
TOOLS = {
    "containerd": ("containerd", "--version", (1, 6)),
    "containerd-shim-runc-v2": ("containerd", "-v", (1, 6)),
    "ctr": ("containerd", "--version", (1, 6)),
    "runc": ("runc", "--version", (1, 1)),
    "etcd": ("etcd-server", "--version", (3, 4)),
}
PLUGINS = "containernetworking-plugins"
PLACES = [Path("/usr/lib/cni/bridge"), Path("/usr/libexec/cni/bridge")]  # Fedora has the second
CNI = next((path for path in PLACES if path.exists()), PLACES[0])
"""One of these plugins, where they are installed."""
# What kube-proxy calls on a bridge, with the libraries that a bare machine lacks.
NFT = ("nftables", "libnftables1", "libnftnl11", "libmnl0", "libjansson4", "libxtables12",
       "libedit2", "libbsd0", "libmd0")  # fmt: skip

OWN_NFT = ("nft", "--version", (1, 0))
LIBC = re.compile(r"(ld-linux.*|lib(c|dl|m|pthread|resolv|rt))\.so\.\d")
"""Files of the C library."""


def run(
    words: list[str],
    what: str,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> str:
    """The standard output of a command. Raises WorkFailed with the end of what it complained of."""
    done = subprocess.run(words, capture_output=True, text=True, cwd=cwd, env=env)
    if done.returncode:
        tail = done.stderr.strip().splitlines()[-3:]
        raise WorkFailed(f"{what}: {' '.join(tail) or f'exit code {done.returncode}'}")
    return str(done.stdout)


def numbers(text: str) -> tuple[int, ...]:
    """The first version number in a text; () if there is none."""
    found = re.search(r"\bv?(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else ()


def on_path(name: str, option: str, oldest: tuple[int, ...]) -> Path | None:
    """A program that is already on this machine, if it is new enough.

    Not one of a build of ours: these are on PATH too, by `dovetail env`.
    """
    places = [*os.environ.get("PATH", "").split(":"), "/usr/sbin", "/sbin"]
    others = [one for one in places if not os.path.exists(f"{os.path.realpath(one)}/../made.json")]
    found = shutil.which(name, path=":".join(others))
    if not found:
        return None
    done = subprocess.run([found, option], capture_output=True, text=True)
    return Path(found).resolve() if numbers(done.stdout + done.stderr) >= oldest else None


def lacking() -> set[str]:
    """Packages of what this machine itself does not have, or too old."""
    found = {package for name, (package, option, oldest) in TOOLS.items()
             if not on_path(name, option, oldest)}  # fmt: skip
    found |= set() if CNI.exists() else {PLUGINS}
    return found | (set() if on_path(*OWN_NFT) else set(NFT))


def tools(draft: Path, scratch: Path, say: Say) -> dict[str, str]:
    """Runtime, store and network plugins: copies of this machine's, else from Debian packages."""
    origins, packages, wanted = {}, {}, lacking()
    for name, (package, option, oldest) in TOOLS.items():
        found = on_path(name, option, oldest)
        if found:
            shutil.copy2(found, draft / "bin" / name)
            origins[name] = str(found)
        else:
            packages[name] = package
    unpacked = unpack(sorted(wanted), scratch, say) if wanted else Path("/")
    _nft(draft, on_path(*OWN_NFT), unpacked)
    for name, package in packages.items():
        places = [unpacked / "usr" / folder / name for folder in ("sbin", "bin")]
        shutil.copy2(next(place for place in places if place.is_file()), draft / "bin" / name)
        origins[name] = f"Debian package {package}"
    plugins = CNI.parent if CNI.exists() else unpacked / "usr/lib/cni"
    shutil.copytree(plugins, draft / "cni")
    origins.update({path.name: f"Debian package {PLUGINS}" for path in plugins.iterdir()})
    return origins


def _nft(draft: Path, own: Path | None, unpacked: Path) -> None:
    """The machine's nft or the unpacked one, its libraries, and a script that runs it with them.

    As a node that the build is carried to may have none of them.
    """
    (draft / "lib").mkdir()
    for library in _libraries(own) if own else unpacked.rglob("*.so.*"):
        shutil.copy2(library, draft / "lib" / library.name)
    shutil.copy2(own or unpacked / "usr/sbin/nft", draft / "lib/nft")
    script = draft / "bin/nft"
    script.write_text(
        "#!/bin/sh\n"
        'lib=$(dirname "$(dirname "$(readlink -f "$0")")")/lib\n'
        'LD_LIBRARY_PATH=$lib exec "$lib/nft" "$@"\n'
    )
    script.chmod(0o755)


def _libraries(program: Path) -> list[Path]:
    """What a program is linked with, but for the C library, which fits its own machine alone."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True)
    found = [Path(path) for path in re.findall(r"=> (/\S+)", done.stdout)]
    return [path for path in found if not LIBC.match(path.name)]


def unpack(packages: list[str], scratch: Path, say: Say) -> Path:
    """Fetch Debian packages and unpack them, installing nothing; apt checks their signatures."""
    say(f"fetching Debian packages: {' '.join(packages)}")
    if not shutil.which("apt-get"):
        raise WorkFailed(f"no apt-get here; install: {' '.join(packages)}, or use a bundle")
    scratch = Path(tempfile.mkdtemp(dir=scratch))
    folder = scratch / "packages"
    folder.mkdir()
    words = ["apt-get", "-qq", "-o", "APT::Sandbox::User=", "download", *packages]
    try:
        run(words, "apt-get download", cwd=folder)
    except WorkFailed:
        # The machine's package lists may be missing or old, and only root may renew them there.
        state = [f"-oDir::State::lists={scratch}/lists", f"-oDir::Cache={scratch}/apt"]
        (scratch / "lists/partial").mkdir(parents=True)
        (scratch / "apt/archives/partial").mkdir(parents=True)
        run(["apt-get", "-qq", *state, "-o", "APT::Sandbox::User=", "update"], "apt-get update")
        run([words[0], *state, *words[1:]], "apt-get download", cwd=folder)
    target = scratch / "unpacked"
    for package in folder.glob("*.deb"):
        run(["dpkg-deb", "-x", str(package), str(target)], f"unpack {package.name}")
    return target
