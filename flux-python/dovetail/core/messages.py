# SPDX-License-Identifier: LGPL-3.0-or-later
"""Messages as frozen dataclasses, to and from plain JSON.

Inputs and outputs: dataclasses whose fields are numbers, texts, booleans, lists and mappings, and
JSON objects.
Invariant: whatever the object is, `decode` gives a message whose fields have the right types, or a
`MessageError` that names what is wrong; `decode(kind, encode(message)) == message`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

T = TypeVar("T")
_TYPES: dict[str, tuple[Any, str]] = {
    "str": (str, "a text"),
    "int": (int, "a whole number"),
    "float": ((int, float), "a number"),
    "bool": (bool, "true or false"),
    "dict": (dict, "an object"),
    "list": (list, "a list"),
    "None": (type(None), "null"),
}


class MessageError(ValueError):
    """Not the message that is due."""


def encode(message: object) -> dict[str, Any]:
    """A message as a JSON object, without what is null."""
    return {key: value for key, value in vars(message).items() if value is not None}


def decode(kind: type[T], data: object, *, others: bool = False) -> T:
    """The message of a JSON object, which may have `others` among its keys, for nobody."""
    name = kind.__name__
    if not isinstance(data, Mapping):
        raise MessageError(f"{name}: not an object")
    known: dict[str, Field[Any]] = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for key in data:
        if key not in known and not others:
            raise MessageError(f"{name}: there is no key {key}")
    found = {}
    for key, field in known.items():
        if key in data:
            found[key] = _checked(name, field, data[key])
        elif field.default is MISSING and field.default_factory is MISSING:
            raise MessageError(f"{name}: {key} is missing")
    return kind(**found)


def _checked(name: str, field: Field[Any], value: object) -> object:
    """A field's value, if it is of one of the types that the field may have."""
    wanted = [_TYPES[one.partition("[")[0]] for one in str(field.type).split(" | ")]
    for right, _ in wanted:
        if isinstance(value, right) and (right is bool or not isinstance(value, bool)):
            return value
    raise MessageError(f"{name}: {field.name} is not {' or '.join(word for _, word in wanted)}")
