# SPDX-License-Identifier: LGPL-3.0-or-later
"""Messages to and from plain JSON."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from dovetail.core.messages import MessageError, decode, encode

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Thing:
    name: str
    size: int
    part: float = 0.5
    good: bool = True
    words: list[str] = field(default_factory=list)
    more: dict[str, int] | None = None


@pytest.mark.parametrize("thing", [Thing("a", 1), Thing("", -1, 2, False, ["x"], {"y": 1})])
def test_a_message_survives(thing):
    assert decode(Thing, encode(thing)) == thing


WRONG = [
    (3, "Thing: not an object"),
    ({"size": 1}, "Thing: name is missing"),
    ({"name": 1, "size": 1}, "Thing: name is not a text"),
    ({"name": "a", "size": True}, "Thing: size is not a whole number"),
    ({"name": "a", "size": 1, "good": 1}, "Thing: good is not true or false"),
    ({"name": "a", "size": 1, "part": "1"}, "Thing: part is not a number"),
    ({"name": "a", "size": 1, "more": []}, "Thing: more is not an object or null"),
    ({"name": "a", "size": 1, "x": 1}, "Thing: there is no key x"),
]


@pytest.mark.parametrize(("data", "why"), WRONG, ids=[why for _, why in WRONG])
def test_what_is_wrong_is_named(data, why):
    with pytest.raises(MessageError) as found:
        decode(Thing, data)
    assert str(found.value) == why


def test_keys_for_others_are_left_alone_where_they_may_be():
    assert decode(Thing, {"name": "a", "size": 1, "x": 1}, others=True) == Thing("a", 1)
