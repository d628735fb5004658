# SPDX-License-Identifier: LGPL-3.0-or-later
"""Messages as frozen dataclasses, to and from plain JSON.

Inputs and outputs: dataclasses and JSON objects. A field has a number, a text, a boolean, a member
of an enumeration, another message, a tuple of one of those (`tuple[X, ...]`), or a JSON list or
object, whose content is not looked at; `X | None` may be null. Where a JSON object does not tell by
itself which message it is, it is tagged: its key `kind` has the name of the class.
Invariant: whatever the object is, `decode` gives a message whose fields have the right types, or a
`MessageError` that names what is wrong; `decode(kind, encode(message)) == message`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from enum import Enum
from typing import Any, TypeVar

T = TypeVar("T")


class MessageError(ValueError):
    """Not the message that is due."""


def encode(message: object) -> dict[str, Any]:
    """A message as a JSON object, without what is null."""
    return _encode(message, dict(vars(message)))


def encode_tagged(message: object) -> dict[str, Any]:
    """A message as a JSON object that begins with its kind."""
    return _encode(message, {"kind": type(message).__name__, **vars(message)})


def decode(kind: type[T], data: object, *, others: bool = False) -> T:
    """The message of a JSON object, which may have `others` among its keys, for nobody."""
    if not isinstance(data, Mapping):
        raise MessageError(f"{kind.__name__}: not an object")
    forms = _shape(kind).forms
    if not others and not data.keys() <= forms.keys():
        key = next(key for key in data if key not in forms)
        raise MessageError(f"{kind.__name__}: there is no key {key}")
    found = {}
    for key, form in forms.items():
        if key in data:
            value = data[key]
            found[key] = value if type(value) in form.plain else _read(kind, key, form, value)
        elif form.needed:
            raise MessageError(f"{kind.__name__}: {key} is missing")
    return kind(**found)


def decode_tagged(kinds: Mapping[str, type[T]], data: object) -> T:
    """The message of a tagged JSON object, which is of one of these kinds."""
    if not isinstance(data, Mapping):
        raise MessageError("not a message")
    rest = dict(data)
    name = rest.pop("kind", None)
    if not isinstance(name, str) or name not in kinds:
        raise MessageError("not a message")
    return decode(kinds[name], rest)


# --- What a field may have ---


@dataclass(frozen=True)
class _Form:
    """Values of the `plain` JSON types as they are, and, of other JSON, what `read` makes of it.

    `read` raises a ValueError for what is not what `words` say.
    """

    words: str
    plain: frozenset[type] = frozenset()
    read: Callable[[object], object] | None = None
    needed: bool = True


_JSON = {
    "str": _Form("a text", frozenset({str})),
    "int": _Form("a whole number", frozenset({int})),
    "float": _Form("a number", frozenset({int, float})),
    "bool": _Form("true or false", frozenset({bool})),
    "dict": _Form("an object", frozenset({dict})),
    "list": _Form("a list", frozenset({list})),
    "None": _Form("null", frozenset({type(None)})),
}


@dataclass(frozen=True)
class _Shape:
    """What each field of a message may have, and those that are not always JSON as they are."""

    forms: dict[str, _Form]
    others: tuple[str, ...]


_SHAPES: dict[type, _Shape] = {}
"""Of the messages that there were; each is found once, as messages come by the second."""


def _shape(kind: type) -> _Shape:
    if kind not in _SHAPES:
        # Types are texts, which Python 3.9 cannot evaluate where they have a `|`. A dataclass's
        # `__init__` was made in the module of its class, and so knows what the names in them mean.
        names = vars(kind)["__init__"].__globals__
        forms = {}
        for field in fields(kind):
            form = _form(ast.parse(str(field.type), mode="eval").body, names)
            needed = field.default is MISSING and field.default_factory is MISSING
            forms[field.name] = _Form(form.words, form.plain, form.read, needed)
        others = (key for key, form in forms.items() if form.read or type(None) in form.plain)
        _SHAPES[kind] = _Shape(forms, tuple(others))
    return _SHAPES[kind]


def _form(node: ast.expr, names: Mapping[str, Any]) -> _Form:
    """What a field of this type may have."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        left, right = _form(node.left, names), _form(node.right, names)
        if left.read is None or right.read is None:
            words = f"{left.words} or {right.words}"
            return _Form(words, left.plain | right.plain, left.read or right.read)
    elif isinstance(node, ast.Subscript) and ast.unparse(node.value) == "tuple":
        if isinstance(node.slice, ast.Tuple) and ast.unparse(node.slice.elts[1]) == "...":
            one = _form(node.slice.elts[0], names)
            return _Form(f"a list, each of it {one.words}", read=_tuple(one))
    else:
        name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
        if name in _JSON:
            return _JSON[name]
        named = names.get(name)
        if isinstance(named, type) and is_dataclass(named):
            return _Form("an object", read=_message(named))
        if isinstance(named, type) and issubclass(named, Enum):
            return _Form(f"a {name}", read=_member(named))
    raise TypeError(f"no message has a field of type {ast.unparse(node)}")


def _message(kind: type) -> Callable[[object], object]:
    return lambda value: decode(kind, value)


def _member(kind: type[Enum]) -> Callable[[object], object]:
    members = {(type(one.value), one.value): one for one in kind}  # true is not 1

    def read(value: object) -> object:
        try:
            return members[type(value), value]
        except (KeyError, TypeError):
            raise ValueError from None

    return read


def _tuple(form: _Form) -> Callable[[object], object]:
    def read(value: object) -> object:
        if not isinstance(value, list):
            raise ValueError
        return tuple(one if type(one) in form.plain else _value(form, one) for one in value)

    return read


def _value(form: _Form, value: object) -> object:
    """What is not plain, read."""
    if form.read is None:
        raise ValueError
    return form.read(value)


def _read(kind: type, key: str, form: _Form, value: object) -> object:
    """What is not plain, read for this field of a message."""
    try:
        return _value(form, value)
    except MessageError as error:
        raise MessageError(f"{kind.__name__}: {key}: {error}") from None
    except ValueError:
        raise MessageError(f"{kind.__name__}: {key} is not {form.words}") from None


def _encode(message: object, found: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message as JSON, where they are not, and without what is null."""
    for key in _shape(type(message)).others:
        value = found[key]
        if value is None:
            del found[key]
        else:
            found[key] = _plain(value)
    return found


def _plain(value: object) -> object:
    """A value of a message as JSON."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    return encode(value) if is_dataclass(value) else value
