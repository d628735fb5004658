# SPDX-License-Identifier: LGPL-3.0-or-later
"""Gets every program of a node, once for all checkouts and clusters.

Inputs: `usernetes-setup/kube` (module list and checksums, the sources), the Go and Debian package
services. Output: `<cache>/kube/<key>/` with `bin/`, `cni/`, `images.tar` and `made.json`, the
checksum and origin of each file. Invariants: the key is a digest of all that decides the content; a
folder with that name is complete, since it is renamed into place last; one build at a time; a
running cluster keeps what it started with.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import pwd
import re
import shlex
import shutil
import tarfile
import tempfile
import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host import install_paths
from dovetail.host.private_files import check_output
from dovetail.host.progress import Progress

from usernetes_setup.build import debian_packages, go_build, go_toolchain, oci_image

MODULE, DNS = "k8s.io/kubernetes", "github.com/coredns/coredns"
KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-proxy", "kubectl", "kubelet")
PROGRAMS = ("carry-packets", "coredns", "describe-request", "offer-devices")
"""CoreDNS, and small ones of ours, each with a `main.go`."""
SOURCES = ("kube/go.mod", "kube/go.sum", "kube/api_server.go", "kube/controllers.go",
           "kube/main.go", "kube/pause.c",
           *(f"kube/{name}/main.go" for name in PROGRAMS))  # fmt: skip
FORGOTTEN = 86400.0
"""Seconds after which a draft is nobody's any more."""


def setup_folder() -> Path:
    """`usernetes-setup`: what DOVETAIL_SETUP says, or beside this program."""
    wish = Path(os.environ.get("DOVETAIL_SETUP", "/nonexistent"))
    return wish if (wish / "kube/go.mod").exists() else install_paths.shared("usernetes-setup")


def examples() -> Path:
    """The folder of the examples, wherever `usernetes-setup` is."""
    return setup_folder().parent / "examples"


def cache() -> Path:
    """Where all builds of this user are."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    place = os.environ.get("DOVETAIL_CACHE") or f"{home}/dovetail"
    if place.startswith("~/"):  # else a folder of that name would be made in the present one
        raise BadInput(
            f"{place}: this user's home is not known; set DOVETAIL_CACHE to a whole path"
        )
    return Path(place).absolute() / "kube"


def version() -> str:
    """The pinned Kubernetes version, such as v1.36.3."""
    return _pinned(MODULE)


def _pinned(module: str) -> str:
    """The version of a module that ours is built with."""
    path = setup_folder() / "kube/go.mod"
    found = re.search(rf"^\s*(?:require )?{module} (v[\d.]+)$", path.read_text(), re.M)
    if not found:
        raise BadInput(f"{path} names no version of {module}")
    return found[1]


def go_version() -> str:
    """The Go that the pinned Kubernetes is built with, such as 1.26.0."""
    found = re.search(r"^go (\S+)$", (setup_folder() / "kube/go.mod").read_text(), re.M)
    return found[1] if found else ""


def key() -> str:
    """Names what a build would contain."""
    digest = hashlib.sha256(
        repr(
            (
                platform.machine(),
                debian_packages.TOOLS,
                debian_packages.PLUGINS,
                debian_packages.NFT,
            )
        ).encode()
    )
    for path in [setup_folder() / name for name in SOURCES]:
        digest.update(path.read_bytes())
    digest.update(Path(oci_image.__file__).read_bytes())
    return f"{version()}-{digest.hexdigest()[:12]}"


def closed() -> Path | None:
    """What of the build, or above it, this user may not read, if there is such."""
    folder = cache() / key()
    for above in reversed(folder.parents):
        if not above.exists():
            return None
        if not os.access(above, os.X_OK):
            return above
    for path in (folder, *folder.rglob("*")):  # a folder comes before what is in it
        if path.exists():
            wanted = os.R_OK | os.X_OK if path.is_dir() else os.R_OK
            if not os.access(path, wanted):
                return path
    return None


def how_to_open(path: Path) -> tuple[str, str, str]:
    """Of what is closed to this user: that it is, what to type, and who types it."""
    owner = path.stat().st_uid
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = str(owner)
    found = f"{path} is closed to this user; it belongs to {name}"
    place = cache().parent
    if path == place or place in path.parents:
        fix = f"chmod -R a+rX {shlex.quote(str(path))}"
        return found, fix, "user" if owner == os.getuid() else "admin"
    return found, "unset DOVETAIL_CACHE", "user"  # not ours to open: it may be somebody's home


def built() -> Path | None:
    """The finished build, if there is one whose files are all there.

    Raises BadInput if this user may not read it.
    """
    if path := closed():
        found, fix, who = how_to_open(path)
        raise BadInput(f"{found}; {who} types: {fix}")
    folder = cache() / key()
    try:
        made = json.loads((folder / "made.json").read_text())
        fits = all((folder / name).stat().st_size == entry["bytes"] for name, entry in made.items())
    except (OSError, ValueError):
        return None
    return folder if fits else None


def whole() -> Path | None:
    """The finished build, if its files also have the content that was built."""
    found = built()
    return None if found is None or damaged(found) else found


def damaged(folder: Path) -> list[str]:
    """Files whose content is not what was built."""
    made = json.loads((folder / "made.json").read_text())
    return [name for name, entry in made.items() if checksum(folder / name) != entry["sha256"]]


def checksum(path: Path) -> str:
    """SHA-256 of a file, hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def lock(say: debian_packages.Say) -> Iterator[None]:
    """One build at a time; the others say so, wait for it and then find it done."""
    before = os.umask(0o022)  # what is built may be read by all, as installed programs are
    try:
        try:
            _make_cache()
            file = (cache() / "lock").open("w")
        except OSError as error:
            raise BadInput(
                f"{cache()} cannot be written: {error.strerror}; "
                "set DOVETAIL_CACHE to a folder of yours, or unset it"
            ) from None
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"another command builds in {cache()}; waiting for it to end")
                fcntl.flock(file, fcntl.LOCK_EX)
            _remove_drafts()
            yield
    finally:
        os.umask(before)


def _remove_drafts() -> None:
    """Remove what builds left that were killed, long ago: locks of other machines may be unseen."""
    for draft in cache().glob("draft-*"):
        with suppress(OSError):
            if time.time() - draft.stat().st_mtime > FORGOTTEN:
                shutil.rmtree(draft, ignore_errors=True)


def _make_cache() -> None:
    """Make the folder of all builds: for all users if DOVETAIL_CACHE says where.

    Who is to be kept out, the folder above says, as with any program that is installed.
    """
    folder, shared = cache(), bool(os.environ.get("DOVETAIL_CACHE"))
    for path in (*reversed(folder.parents), folder):
        if not path.exists():
            path.mkdir(mode=0o755 if shared else 0o700, exist_ok=True)
    _open_cache()


def _open_cache() -> None:
    """Open a shared cache of ours that an earlier version closed."""
    folder = cache()
    if os.environ.get("DOVETAIL_CACHE") and folder.exists():
        found = folder.stat()
        if found.st_uid == os.getuid() and found.st_mode & 0o055 != 0o055:
            folder.chmod(found.st_mode & 0o777 | 0o055)


def install(draft: Path) -> Path:
    """Move a complete draft into the cache, for all who can get there."""
    target, before = cache() / key(), cache() / f"{draft.parent.name}-before"
    for path in (draft, *draft.rglob("*")):
        if not path.is_symlink():
            mode = path.stat().st_mode & 0o777
            path.chmod(mode | 0o444 | (0o111 if mode & 0o100 else 0))
    with suppress(FileNotFoundError):
        target.rename(before)
    draft.rename(target)
    shutil.rmtree(before, ignore_errors=True)  # what runs from it is kept by some file systems
    return target


def build(say: debian_packages.Say = print) -> Path:
    """Build what is not there yet; returns its folder."""
    _open_cache()
    if found := whole():  # a cache that an administrator filled is not ours to lock
        return found
    with lock(say):
        if found := whole():  # by whoever had the lock
            return found
        with tempfile.TemporaryDirectory(dir=cache(), prefix="draft-") as scratch:
            draft = Path(scratch) / "build"
            (draft / "bin").mkdir(parents=True)
            _pause(draft, Path(scratch))  # first: a cc that cannot is known at once, not in minutes
            origins: dict[str, str] = {}
            origins.update(debian_packages.tools(draft, Path(scratch), say))
            go = go_toolchain.command(go_version(), Path(scratch), say)
            origins.update(_kubernetes(draft, go, say))
            for name in PROGRAMS:
                say(f"building {name}")
                _go_build(go, f"./{name}", draft / f"bin/{name}", say)
            origins["coredns"] = f"Go module {DNS} {_pinned(DNS)}"
            made = {}
            for path in sorted(draft.rglob("*")):
                if path.is_file():
                    name = str(path.relative_to(draft))
                    made[name] = {"bytes": path.stat().st_size, "sha256": checksum(path),
                                  "origin": origins.get(path.name, "built here")}  # fmt: skip
            (draft / "made.json").write_text(json.dumps(made, indent=1) + "\n")
            return install(draft)


def _kubernetes(draft: Path, go: str, say: debian_packages.Say) -> dict[str, str]:
    """The multi-call binary and a link for each component."""
    folder, pinned = draft / "bin", version()
    say(f"building Kubernetes {pinned}, once: 6 to 10 minutes on two cores, 3 GB of disk")
    _, minor, _ = pinned.lstrip("v").split(".")
    stamps = {"gitVersion": pinned, "gitMajor": "1", "gitMinor": minor, "gitTreeState": "clean",
              "gitCommit": "module", "buildDate": "1970-01-01T00:00:00Z"}  # fmt: skip
    flags = []
    for package in ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version"):
        flags += [f"-X {package}.{name}={value}" for name, value in stamps.items()]
    _go_build(go, ".", folder / "kube", say, flags)
    for name in KUBERNETES:
        (folder / name).symlink_to("kube")
    return {"kube": f"Go module {MODULE} {pinned}"}


def _go_build(
    go: str, package: str, target: Path, say: debian_packages.Say, flags: Sequence[str] = ()
) -> None:
    """Build one program of the module in `usernetes-setup/kube`."""
    environment = {**os.environ, "CGO_ENABLED": "0", "GOFLAGS": "-buildvcs=false -mod=readonly",
                   "GOTOOLCHAIN": "auto"}  # fmt: skip
    linker = ["-s", "-w", *flags]
    go_build.build(go, package, target, linker, setup_folder() / "kube", environment, say)


def _pause(draft: Path, scratch: Path) -> None:
    """The pause program and the images made of it."""
    pause = scratch / "pause"
    source = setup_folder() / "kube/pause.c"
    debian_packages.run(["cc", "-static", "-Os", "-s", "-o", str(pause), str(source)], "cc")
    machine = platform.machine()
    names = [oci_image.PAUSE, oci_image.HOST]
    oci_image.pack(
        pause, draft / "images.tar", names, go_toolchain.ARCHITECTURES.get(machine, machine)
    )


def pack(target: Path, say: debian_packages.Say = print) -> None:
    """Write the build as one file, for machines without internet."""
    check_output("-o", target)
    folder = build(say)
    paths = [folder, *sorted(folder.rglob("*"))]
    total = sum(path.lstat().st_size for path in paths)
    draft = target.with_name(f".{target.name}.new")
    try:
        with (
            Progress(say, f"packing {target.name}", total) as progress,
            tarfile.open(draft, "w:gz", compresslevel=1) as archive,
        ):
            for path in paths:
                entry = archive.gettarinfo(path, str(path.relative_to(folder.parent)))
                if entry.isfile():
                    with path.open("rb") as file:
                        archive.addfile(entry, progress.reading(file))
                else:
                    archive.addfile(entry)
        draft.replace(target)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _check_entry(source: Path, entry: tarfile.TarInfo) -> None:
    """Refuse what is no part of the build that is wanted here. Raises BadInput."""
    inside = entry.name == key() or entry.name.startswith(key() + "/")
    link = entry.issym() and "/" not in entry.linkname and entry.linkname != ".."
    if not inside or ".." in entry.name or not (entry.isfile() or entry.isdir() or link):
        raise BadInput(f"{source}: holds {entry.name}, not a build of {key()}")


def _check_bundle(source: Path) -> None:
    """Refuse what is no bundle, or one for another version, by its beginning. Raises BadInput."""
    try:
        with tarfile.open(source) as archive:
            first = archive.next()
    except (OSError, tarfile.TarError, EOFError, zlib.error) as error:
        why = str(error).splitlines()[0].rstrip(":")  # tarfile tells of every compression it tried
        raise BadInput(f"{source}: is not a bundle ({why})") from None
    if first is None:
        raise BadInput(f"{source}: is not a bundle (it is empty)")
    _check_entry(source, first)


def unpack(source: Path, say: debian_packages.Say = print) -> Path:
    """Put a bundle into the cache; refused if it is damaged or for another version."""
    _check_bundle(source)  # nothing is made for what its beginning tells already
    with (
        lock(say),
        tempfile.TemporaryDirectory(dir=cache(), prefix="draft-") as scratch,
        Progress(say, f"unpacking {source.name}", source.stat().st_size) as progress,
    ):
        try:
            with source.open("rb") as file, tarfile.open(fileobj=file) as archive:
                for entry in archive:
                    _check_entry(source, entry)
                    entry.uid, entry.gid = os.getuid(), os.getgid()  # not who packed it
                    entry.uname = entry.gname = ""
                    archive.extract(entry, scratch, set_attrs=not entry.isdir())
                    progress.done = file.tell()
            progress.turn("comparing checksums")
            draft = Path(scratch) / key()
            bad = damaged(draft)
        except FileNotFoundError as error:
            missing = Path(error.filename or "").name
            raise BadInput(f"{source}: is damaged, or not a bundle (it has no {missing})") from None
        except OSError as error:
            if error.errno:
                raise WorkFailed(f"{cache()} cannot be written: {error.strerror}") from None
            raise BadInput(f"{source}: is damaged ({error})") from None
        except (tarfile.TarError, EOFError, ValueError, zlib.error) as error:
            raise BadInput(f"{source}: is damaged, or not a bundle ({error})") from None
        if bad:
            raise BadInput(f"{source}: damaged: {' '.join(bad)}")
        return whole() or install(draft)  # clusters may run from one that is there
