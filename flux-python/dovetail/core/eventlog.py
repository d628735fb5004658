# SPDX-License-Identifier: LGPL-3.0-or-later
"""The event log: every event and decision of a run, in order.

Inputs and outputs: core events and actions to and from plain JSON, and the file
`events.jsonl`: a header line, then one record per line
`{"seq": n, "kind": "event"|"action"|"resume", "type": "Sampled", ...fields}`, seq from 1.

Invariants: decode(encode(x)) == x; a record is written whole or not at all; the actions after
an event are the controller's answer to it, so feeding the events to a new controller gives
the same actions. A `resume` record says that the loop died and began again: but for those
`alive`, what ran then is over, and the actions that follow say what is queued again.
Only the last line may be torn (the writer was killed); anything else is refused. A log of
schema 1 is read as if it were of this schema, and not written to.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Callable, Union, get_args

from pydantic import ConfigDict, TypeAdapter, ValidationError

from dovetail import __version__
from dovetail.core import protocol, schema1
from dovetail.core.errors import BadInput

SCHEMA = 2
Record = dict[str, Any]
Json = Any
"""A plain JSON value."""


HELD = 64 << 20
"""Bytes of records kept in memory while they cannot be written."""


BLOCK = 1 << 20
"""Bytes of a log that are read at once."""


class LogStopped(Exception):
    """The log cannot be begun, or gone on with (as on a full disk)."""


# --- values ---

_CONFIG = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


@functools.cache  # made when first wanted, as making all takes longer than many a command
def _reader(kind: type[Any]) -> TypeAdapter[Any]:
    # In a tuple, because a dataclass takes its configuration from what holds it.
    return TypeAdapter(tuple[kind], config=_CONFIG)  # type: ignore[valid-type]


def make_readers() -> None:
    """Make all readers, for a log that is to be read soon."""
    for kind in (Header, *(kind for _, kind in _KINDS.values())):
        _reader(kind)


_EVENTS = get_args(protocol.Event)
_ACTIONS = get_args(protocol.Action)
_KINDS = {
    kind.__name__: ("event" if kind in _EVENTS else "action", kind)
    for kind in (*_EVENTS, *_ACTIONS)
}


def plain(value: Json) -> Json:
    """Any of core's values as plain JSON types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, protocol.Cause):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [plain(item) for item in value]
    return value


def _checked(kind: type[Any], value: Json) -> Json:
    """A value of core from plain JSON. Raises ValueError with the field and the reason."""
    try:
        # By way of text: only there is a list good for a tuple and nothing else converted.
        # To mypy a dataclass that compares cannot be a key; its class can.
        return _reader(kind).validate_json(json.dumps([value]))[0]  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"][1:])
        raise ValueError(f"{where}: {first['msg']}" if where else first["msg"]) from None


def encode(value: protocol.Event | protocol.Action) -> Record:
    """An event or action as a JSON object with `kind` and `type`."""
    name = type(value).__name__
    return {"kind": _KINDS[name][0], "type": name, **plain(value)}


def decode(record: Mapping[str, Any]) -> Json:
    """The event or action that `encode` gave. Raises ValueError with the reason."""
    name = record.get("type")
    kind, of_type = _KINDS.get(name, ("", None)) if isinstance(name, str) else ("", None)
    if of_type is None or record.get("kind") != kind:
        raise ValueError(f"unknown {record.get('kind')!r} of type {name!r}")
    fields = {key: item for key, item in record.items() if key not in ("seq", "kind", "type")}
    return _checked(of_type, fields)


# --- writing ---


def header(
    specs: Iterable[protocol.Spec],
    capacity: protocol.Capacity,
    settings: Mapping[str, Any],
    versions: Mapping[str, str] | None = None,
    **more: Json,
) -> Record:
    """The first line; `settings` is `Settings.plain()`, `more` is kept as it is."""
    return {
        "dovetail": __version__,
        "schema": SCHEMA,
        "specs": [plain(spec) for spec in specs],
        "capacity": plain(capacity),
        "settings": dict(settings),
        "versions": dict(versions or {}),
        **more,
    }


class Log:
    """Writes one record per line, each flushed.

    `failed` holds the reason while it cannot; what was not written is in `held`, and is tried
    again with the next record and in the end, so that the file is at any time a whole beginning
    of the log. With more than `HELD` bytes of it the log ends, as nothing may be left out.
    """

    def __init__(self, path: Path, seq: int, size: int) -> None:
        self.path = path
        self.seq = seq
        self.failed = ""
        self._held: deque[bytes] = deque()  # lines
        self._kept = 0  # bytes of these
        self._ended = False
        self._size = size
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
        if os.path.isfile(path):
            os.ftruncate(self._fd, size)
            os.lseek(self._fd, size, os.SEEK_SET)

    @classmethod
    def create(cls, path: str | os.PathLike[str], head: Mapping[str, Any]) -> Log:
        """A new log, replacing any old one. Raises LogStopped where it cannot be written."""
        try:
            log = cls(Path(path), 0, 0)
        except OSError as error:
            raise LogStopped(f"{path}: {error.strerror}") from error
        log._line(dict(head))
        log._write()
        if log.failed:
            log.close()
            if os.path.isfile(path):
                os.unlink(path)  # without its header it would look like a damaged log
            raise LogStopped(log.failed)
        return log

    @classmethod
    def append(cls, path: str | os.PathLike[str]) -> Log:
        """Go on with a log after a torn end. Raises BadInput if it is damaged, or LogStopped."""
        head, entries = scan(path)
        if head.old:
            raise BadInput(
                f"{path}: written by an earlier version, with schema {head.raw['schema']}: "
                "it can be reported on, and not be gone on with"
            )
        records, size, end = sum(1 for _ in entries), 0, 0
        for block in _blocks(path, b""):
            end = size + block.rfind(b"\n") + 1 if b"\n" in block else end
            size += len(block)
        try:
            return cls(Path(path), records, end)
        except OSError as error:
            raise LogStopped(f"{path}: {error.strerror}") from error

    def write(self, value: protocol.Event | protocol.Action) -> None:
        """Append one record, or hold it."""
        self._record(encode(value))

    def resume(self, t: float, capacity: protocol.Capacity, alive: Iterable[str] = ()) -> None:
        """Append the record, or hold it, that the run was taken up again at run time `t`.

        `alive` are the simulations that went on running meanwhile.
        """
        kept = {"alive": list(alive)} if alive else {}
        self._record({"kind": "resume", "t": t, "capacity": plain(capacity), **kept})

    @property
    def held(self) -> bytes:
        """What could not be written yet."""
        return b"".join(self._held)

    def _record(self, record: Record) -> None:
        self._ended = self._ended or self._kept > HELD
        if not self._ended:
            self.seq += 1
            self._line({"seq": self.seq, **record})
        self._write()

    def _line(self, record: Record) -> None:
        line = json.dumps(record, separators=(",", ":"), allow_nan=False).encode() + b"\n"
        self._held.append(line)
        self._kept += len(line)

    def _write(self) -> None:
        """Write what is held, a line at a time: on a full disk only the first one is tried."""
        try:
            while self._held:
                rest = memoryview(self._held[0])
                while rest:
                    rest = rest[os.write(self._fd, rest) :]
                size = len(self._held.popleft())
                self._size += size
                self._kept -= size
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._fd, self._size)
                os.lseek(self._fd, self._size, os.SEEK_SET)
            self.failed = f"{self.path}: {error.strerror}"
            return
        ended = f"{self.path}: ends before the run, as it could not be written for too long"
        self.failed = ended if self._ended else ""

    def close(self) -> None:
        """Write what is held, if that is possible now, and close the file; safe to call twice."""
        if self._fd >= 0:
            self._write()
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Log:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


# --- reading ---


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The run was taken up again at run time `t` with this capacity; `alive` were still running."""

    t: float
    capacity: protocol.Capacity
    alive: tuple[str, ...] = ()


Entry = Union[protocol.Event, protocol.Action, Resumed]


@dataclasses.dataclass(frozen=True)
class Header:
    """The first line of a log: `raw` is all of it."""

    dovetail: str
    specs: tuple[protocol.Spec, ...]
    capacity: protocol.Capacity
    settings: Mapping[str, Any]
    versions: Mapping[str, Any]
    raw: Mapping[str, Any]

    @property
    def old(self) -> bool:
        """Whether the log has schema 1, and what is not in that was made up from its notes."""
        return bool(self.raw["schema"] == schema1.SCHEMA)


class Reader:
    """Decodes a log that may still be written; `head` is None until its first line is there."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.head: Header | None = None
        self._path = path
        self._number = 0
        self._rest = b""
        self._old: schema1.Records | None = None

    def take(self, data: bytes) -> list[Entry]:
        """What the next bytes of the file complete. Raises BadInput with the line and the reason.

        A last line without its end is kept for the next call.
        """
        *lines, self._rest = (self._rest + data).split(b"\n")
        entries: list[Entry] = []
        for line in lines:
            self._number += 1
            if self.head is None:
                self.head = _line_as(self._path, 1, line, _header)
                assert self.head is not None
                self._old = schema1.Records() if self.head.old else None
                continue
            made = functools.partial(_entry, self._number - 1, self._old)
            entries.append(_line_as(self._path, self._number, line, made))
        return entries


def read(path: str | os.PathLike[str], held: bytes = b"") -> tuple[Header, list[Entry]]:
    """The header and what follows, decoded. Raises BadInput with the line and the reason.

    `held` is `Log.held`: what could not be written to the file.
    """
    head, entries = scan(path, held)
    return head, [*entries]


def scan(path: str | os.PathLike[str], held: bytes = b"") -> tuple[Header, Iterator[Entry]]:
    """The same one entry after the other, as a log may be larger than memory.

    Raises BadInput while they are taken, too.
    """
    reader, blocks = Reader(path), _blocks(path, held)
    begun: list[Entry] = []
    while reader.head is None:
        block = next(blocks, None)
        if block is None:
            raise BadInput(f"{path}: line 1: not an event log, the header is missing")
        begun = reader.take(block)
    head: Header = reader.head
    entries = itertools.chain(begun, itertools.chain.from_iterable(map(reader.take, blocks)))
    return head, iter(schema1.complete(head.specs, [*entries])) if head.old else entries


def _blocks(path: str | os.PathLike[str], held: bytes) -> Iterator[bytes]:
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):  # a pipe would keep us waiting
            raise BadInput(f"{path}: not a file")
        with open(path, "rb") as file:
            while block := file.read(BLOCK):
                yield block
    except OSError as error:
        raise BadInput(f"{path}: {error.strerror}") from error
    yield held


def _line_as(
    path: str | os.PathLike[str], number: int, line: bytes, made: Callable[[Any], Any]
) -> Json:
    try:
        raw = json.loads(line.decode("utf-8"), parse_constant=_no_constant)
        if not isinstance(raw, dict):
            raise ValueError("must be an object")
        return made(raw)
    except (ValueError, RecursionError, OverflowError) as error:
        raise BadInput(f"{path}: line {number}: damaged event log: {error}") from None


def _no_constant(text: str) -> float:
    raise ValueError(f"{text} is no number here")


def _header(raw: dict[str, Any]) -> Header:
    if "dovetail" not in raw or "schema" not in raw:
        raise ValueError("the header lacks 'dovetail' and 'schema'; is this another file?")
    if raw["schema"] not in (schema1.SCHEMA, SCHEMA) or isinstance(raw["schema"], bool):
        known = f"{schema1.SCHEMA} and {SCHEMA}"
        raise ValueError(f"schema {raw['schema']!r}; this version reads schemas {known}")
    new = schema1.header(raw) if raw["schema"] == schema1.SCHEMA else raw
    keys = [field.name for field in dataclasses.fields(Header) if field.name != "raw"]
    head: Header = _checked(Header, {**{k: new[k] for k in keys if k in new}, "raw": raw})
    return head


def _entry(seq: int, old: schema1.Records | None, raw: dict[str, Any]) -> Entry:
    if raw.get("seq") != seq or isinstance(raw.get("seq"), bool):
        raise ValueError(f"seq {raw.get('seq')!r} where {seq} is due: a line is missing or doubled")
    raw = old.converted(raw) if old else raw
    if raw.get("kind") == "resume":
        fields = {key: item for key, item in raw.items() if key not in ("seq", "kind")}
        resumed: Resumed = _checked(Resumed, fields)
        return resumed
    entry: Entry = decode(raw)
    return entry
