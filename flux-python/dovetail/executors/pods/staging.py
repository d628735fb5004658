# SPDX-License-Identifier: LGPL-3.0-or-later
"""Folders that nodes do not see: whether they do, and how what is in them comes and goes.

Inputs: folders, and a connection between agent and hub. Outputs: a folder that is like another.
What has changed is sent, and that alone: a file is compared by its SHA-256, and checked by it when
it has arrived. Owners and extended attributes are not kept; links are, wherever they lead; what is
neither file, link nor folder is left out.

    sender                      receiver
    listing ------------------>
            <------------------ names that are wanted
    contents ----------------->
            <------------------ what went wrong, if anything

Invariants: nothing is written or removed outside the folder, whatever the other side says; a file
has its name only once it is whole; what the folder's user writes meanwhile into other files is not
touched.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import itertools
import json
import os
import re
import secrets
import stat
import struct
from concurrent.futures import ThreadPoolExecutor

from dovetail.host.session import SESSION_ROOT, remove_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any, Callable, Protocol

    class Link(Protocol):
        """A connection; where it ends before all has come there is an EOFError."""

        ended: bool  # from here, by another thread

        def fill(self, place: memoryview) -> None:
            """Take as much as this has room for."""

        def write(self, data: bytes) -> object:
            """Send all of it."""

    Listing = dict[str, list[Any]]
    Trouble = tuple[str, bool]  # what went wrong, or "", and whether it is that a disk is full
    Progress = Callable[[int, int], None]  # bytes that have come or gone, of so many

FILE, LINK, FOLDER = "file", "link", "folder"
_LENGTH = struct.Struct("!Q")
_BLOCK = 1 << 20  # bytes; each is written, and its digest taken, while the next one comes
_LONGEST = 1 << 30  # bytes of a listing, some millions of files
_LONGEST_NAME = 255  # bytes of a file's name
_MARKED = 2000  # files that are enough to know a folder by
_PART = re.compile(r".+\.[0-9a-f]{8}\.part", re.DOTALL)


STORES = "/tmp/dovetail-staged-"
"""Where nodes keep what is copied to them; the run's id follows."""
ROOM = 300.0
"""Seconds that a copy waits for room on a disk that is full."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSES = (errno.EMFILE, errno.ENFILE)  # as other copies end
_NONE = ("", False)


def _part_of(path: str) -> str:
    """Another name for a file that is not whole yet, beside its own, which may be long already."""
    folder, name = os.path.split(path)
    end = f".{secrets.token_hex(4)}.part"
    return os.path.join(folder, os.fsdecode(os.fsencode(name)[: _LONGEST_NAME - len(end)]) + end)


def remove_parts(folder: str) -> None:
    """Remove what killed processes left of files that did not become whole."""
    for top, _, files in os.walk(folder):
        for name in filter(_PART.fullmatch, files):
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(top, name))


def own_store(path: str) -> str:
    """Make a store that nobody else can look into; empty if that cannot be."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700)
        state = os.lstat(path)
        if stat.S_ISDIR(state.st_mode) and state.st_uid == os.getuid():
            os.chmod(path, 0o700)
            return path
    return ""


def records(store: str, folder: str) -> tuple[str, str]:
    """Files beside a folder of the store: what it had in common with ours, and a lock."""
    return f"{store}/.{folder}.json", f"{store}/.{folder}.lock"


def sweep_stores(machine: str) -> None:
    """Remove this user's stores on a node where nothing of their runs is left."""
    for path in glob.glob(f"{machine}{STORES}*"):
        run = path.rpartition("-")[2]
        with contextlib.suppress(OSError):
            ours = os.lstat(path).st_uid == os.getuid()
            if ours and not glob.glob(f"{SESSION_ROOT}/dovetail-*-{run}.*"):
                remove_tree(path)


class StagingError(Exception):
    """Why a folder cannot be copied, in words; trying again would not help.

    But where a disk is `full`, here or there, it may have room again.
    """

    def __init__(self, words: str, full: bool = False) -> None:
        # A name of other bytes than UTF-8 would make an event log that nobody can read.
        super().__init__(words.encode(errors="replace").decode())
        self.full = full


def is_full(error: StagingError | OSError) -> bool:
    """Whether a disk, or what the user may have of it, is full."""
    return error.full if isinstance(error, StagingError) else error.errno in _FULL


def of_store(error: OSError, path: str) -> StagingError | OSError:
    """What to raise where our own disk does not do something: most of it no second try would."""
    return error if error.errno in _PASSES else StagingError(*_words(error, path))


def mark(folder: str) -> str:
    """What tells a folder from another of the same name, on any machine that sees it; or empty.

    The names, sizes and times of its first files, and of its folders'. A copy that has all of them
    in common is taken for the same.
    """
    digest, count = hashlib.sha256(), 0
    try:
        os.listdir(folder)
        for top, folders, files in os.walk(folder):
            folders.sort()
            for name in sorted(files):
                state = os.lstat(os.path.join(top, name))
                known = top[len(folder) :], name, state.st_size, state.st_mtime_ns // 10**9
                digest.update(repr(known).encode())
            count += len(files)
            if count > _MARKED:
                break
    except OSError:
        return ""
    return digest.hexdigest()


def listing(folder: str, known: Mapping[str, Any] | None = None) -> Listing:
    """All in a folder by its name there: kind, mode, size, time, and digest or where it leads.

    `known` is an earlier one: of what has the same stamp since, the digest is not taken anew.
    What goes away meanwhile may be left out. StagingError where something else cannot be read.
    """
    found: Listing = {}
    try:
        for name in _names(folder):
            with contextlib.suppress(FileNotFoundError):
                entry = _entry(os.path.join(folder, name), (known or {}).get(name))
                if entry:
                    found[name] = entry
        os.stat(folder)  # as a whole it is not gone, which would tell nothing of what was in it
    except OSError as error:
        raise StagingError(f"{error.filename}: {error.strerror}") from None
    return found


def _names(folder: str) -> Iterator[str]:
    """All in a folder; OSError where that cannot be told."""

    def unless_gone(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError) or error.filename == folder:
            raise error

    for top, folders, files in os.walk(folder, onerror=unless_gone):
        for name in (*folders, *files):
            yield os.path.relpath(os.path.join(top, name), folder)


def _entry(path: str, known: list[Any] | None) -> list[Any]:
    state = os.lstat(path)
    mode, stamp = stat.S_IMODE(state.st_mode), [state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
    if stat.S_ISLNK(state.st_mode):
        return [LINK, mode, 0, stamp, os.readlink(path)]
    if stat.S_ISDIR(state.st_mode):
        return [FOLDER, mode, 0, [0, 0, 0], ""]
    if not stat.S_ISREG(state.st_mode):
        return []
    if known and known[:4] == [FILE, mode, state.st_size, stamp]:
        return known
    return [FILE, mode, state.st_size, stamp, digest_of(path)]


def by_digest(folder: str, found: Listing) -> dict[str, str]:
    """The files of a listed folder, by their digests."""
    files = (name for name, entry in found.items() if entry[0] == FILE)
    return {found[name][4]: os.path.join(folder, name) for name in files}


def digest_of(path: str) -> str:
    """A file's SHA-256."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def send(
    folder: str,
    base: Mapping[str, Any] | None,
    link: Link,
    known: Mapping[str, Any] | None = None,
    progress: Progress = lambda done, total: None,
) -> Listing:
    """Send a folder; returns its listing.

    With the listing `base` of when both were alike: what has changed since. Without one the other
    becomes as this one is, whatever it was. `known` is an earlier listing, if not `base`.
    """
    trouble, now = "", {}
    try:
        now = listing(folder, known or base)
    except StagingError as error:
        trouble = str(error)
    changed = {name: entry for name, entry in now.items() if entry != (base or {}).get(name)}
    gone = [name for name in base or {} if name not in now]
    _put(link, {"there": changed, "gone": gone, "whole": base is None, "trouble": trouble})
    _raise_if(trouble)
    answer = _get(link)
    _raise_if(*answer["trouble"])
    done, total = 0, sum(changed[name][2] for name in answer["wanted"])
    for name in answer["wanted"]:
        left, blocks = changed[name][2], _blocks(os.path.join(folder, name))
        while left:
            block = (next(blocks, b"") or bytes(_BLOCK))[:left]
            left -= len(block)
            link.write(block)
            progress(done := done + len(block), total)
    _raise_if(*_get(link))
    return now


def _blocks(path: str) -> Iterator[bytes]:
    """A file's content; it ends early where that cannot be read, which its digest tells."""
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
        while block := file.read(_BLOCK):
            yield block


def receive(
    folder: str,
    link: Link,
    progress: Progress = lambda done, total: None,
    held: Mapping[str, str] | None = None,
) -> Listing:
    """Make a folder what the other side sends; returns its listing if that was all of it.

    `held` are files here by their digests, from which the same is copied instead of being sent.
    Where something cannot be written the rest is still read, so that the other side hears why.
    """
    said = _get(link)
    _raise_if(said["trouble"])
    there, wanted, trouble = said["there"], [], _NONE
    try:
        wanted = _prepare(folder, said, held or {}, link)
    except (StagingError, OSError) as error:
        trouble = _words(error, folder)
    _put(link, {"wanted": wanted, "trouble": trouble})
    _raise_if(*trouble)
    done, total = 0, sum(there[name][2] for name in wanted)
    real = os.path.realpath(folder)
    blocks = itertools.cycle([memoryview(bytearray(_BLOCK)), memoryview(bytearray(_BLOCK))])
    with ThreadPoolExecutor(1) as writer:
        for name in wanted:
            with _Incoming(os.path.join(real, name), there[name]) as file:
                left, taken = there[name][2], writer.submit(file.take, b"")
                try:
                    while left:
                        block = next(blocks)[:left]
                        link.fill(block)
                        left -= len(block)
                        taken.result()
                        taken = writer.submit(file.take, block)  # while the next one comes
                        progress(done := done + len(block), total)
                finally:
                    taken.result()
                finished = file.finish()
                trouble = trouble if trouble[0] else finished
    if not trouble[0]:
        try:
            for name, entry in there.items():
                path = os.path.join(real, name)
                if entry[0] == FOLDER and os.path.realpath(path) == path:
                    os.chmod(path, entry[1])  # last, as one may be there to be read alone
        except OSError as error:
            trouble = _words(error, folder)
    _put(link, trouble)
    _raise_if(*trouble)
    return listing(folder, _as_written(folder, there)) if said["whole"] else {}


def _as_written(folder: str, there: Mapping[str, Any]) -> Listing:
    """The files that have come, whose digests are known, with the stamps that they have here."""
    found: Listing = {}
    for name, entry in there.items():
        if entry[0] == FILE:
            state = os.lstat(os.path.join(folder, name))
            stamp = [state.st_mtime_ns, state.st_ctime_ns, state.st_ino]
            found[name] = [FILE, stat.S_IMODE(state.st_mode), state.st_size, stamp, entry[4]]
    return found


class _Incoming:
    """A file that comes in blocks, under another name until it is whole."""

    def __init__(self, path: str, entry: list[Any]) -> None:
        self._path, self._entry = path, entry
        self._part = _part_of(path)
        self._digest, self._trouble = hashlib.sha256(), _NONE
        self._file = -1
        try:
            if not _is_inside(path):  # as it was when we began
                raise StagingError(f"{path}: would be written where a link leads")
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            self._file = os.open(self._part, flags, 0o600)
        except (StagingError, OSError) as error:
            self._part, self._trouble = "", _words(error, path)

    def __enter__(self) -> _Incoming:
        return self

    def take(self, block: bytes | memoryview) -> None:
        """Write it, unless that has failed before."""
        self._digest.update(block)
        left = memoryview(block)
        try:
            while left and not self._trouble[0]:
                left = left[os.write(self._file, left) :]
        except OSError as error:
            self._trouble = _words(error, self._path)

    def finish(self) -> Trouble:
        """Give the file its name; or why it cannot have it."""
        _, mode, _, (modified, _, _), wanted = self._entry
        if not self._trouble[0] and self._digest.hexdigest() != wanted:
            self._trouble = f"{self._path}: changed while it was copied", False
        if not self._trouble[0]:
            try:
                os.fchmod(self._file, mode)
                os.utime(self._file, ns=(modified, modified))
                self._close()
                os.replace(self._part, self._path)
                self._part = ""
            except OSError as error:
                self._trouble = _words(error, self._path)
        return self._trouble

    def _close(self) -> None:
        """OSError where the disk of another machine tells only now that it is full."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    def __exit__(self, *_: object) -> None:
        """Leave nothing of a file that did not become whole."""
        with contextlib.suppress(OSError):
            self._close()
        if self._part:
            with contextlib.suppress(OSError):
                os.unlink(self._part)


def _words(error: StagingError | OSError, path: str) -> Trouble:
    words = f"{path}: {error.strerror}" if isinstance(error, OSError) else str(error)
    return words, is_full(error)


def _raise_if(trouble: str, full: bool = False) -> None:
    if trouble:
        raise StagingError(trouble, full)


def _is_inside(path: str) -> bool:
    """Whether it is where its name says: no folder on the way is a link."""
    return os.path.realpath(os.path.dirname(path)) == os.path.dirname(path)


def _prepare(
    folder: str, said: Mapping[str, Any], held: Mapping[str, str], link: Link
) -> list[str]:
    """Remove what is to go, make folders, links and copies, and tell which files are wanted."""
    there, gone = said["there"], said["gone"]
    for name in (*there, *gone):
        if {"", ".", ".."} & {*name.split("/")}:
            raise StagingError(f"{name!r} is no name in a folder")
    os.makedirs(folder, mode=0o700, exist_ok=True)
    if said["whole"]:
        gone = [name for name in _names(folder) if name not in there]
    wanted, real = [], os.path.realpath(folder)
    for name in sorted(gone, reverse=True):
        path = os.path.join(real, name)
        if _is_inside(path):  # else our user has moved it elsewhere
            remove_tree(path)
    for name, entry in sorted(there.items()):
        if link.ended:
            raise EOFError
        kind, path = entry[0], os.path.join(real, name)
        if not _is_inside(path):
            raise StagingError(f"{path}: would be written where a link leads")
        is_folder = os.path.isdir(path) and not os.path.islink(path)
        if os.path.lexists(path) and is_folder != (kind == FOLDER):
            remove_tree(path)
        if kind == FOLDER:
            os.makedirs(path, mode=0o700, exist_ok=True)
            os.chmod(path, 0o700)
        elif kind == LINK:
            _make_link(path, entry[4])
        elif not _kept(path, entry) and not _copied(path, entry, held.get(entry[4]), link):
            wanted.append(name)
    return wanted


def _make_link(path: str, target: str) -> None:
    """Unless it is there already."""
    if os.path.islink(path) and os.readlink(path) == target:
        return
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    os.symlink(target, path)


def _copied(path: str, entry: list[Any], source: str | None, link: Link) -> bool:
    """Whether the file could be made from one that is here, if that is still what it was."""
    if source is None:
        return False
    with _Incoming(path, entry) as file:
        for block in _blocks(source):
            if link.ended:
                raise EOFError
            file.take(block)
        return not file.finish()[0]


def _kept(path: str, entry: list[Any]) -> bool:
    """Whether a file is there already; it has the mode and the time of the other one then."""
    _, mode, size, (modified, _, _), digest = entry
    with contextlib.suppress(OSError):  # as where it is another user's
        state = os.lstat(path)
        if not stat.S_ISREG(state.st_mode) or state.st_size != size or digest_of(path) != digest:
            return False
        if stat.S_IMODE(state.st_mode) != mode:
            os.chmod(path, mode)
        if state.st_mtime_ns != modified:
            os.utime(path, ns=(modified, modified))
        return True
    return False


def packed(value: object) -> bytes:
    """JSON as it travels, its length before it."""
    text = json.dumps(value, separators=(",", ":")).encode()
    return _LENGTH.pack(len(text)) + text


def _put(link: Link, value: object) -> None:
    link.write(packed(value))


def _get(link: Link) -> Any:  # noqa: ANN401 (JSON)
    link.fill(memoryview(head := bytearray(_LENGTH.size)))
    (size,) = _LENGTH.unpack(head)
    if size > _LONGEST:
        raise StagingError(f"a listing of {size} bytes")
    link.fill(memoryview(text := bytearray(size)))
    return json.loads(text)
