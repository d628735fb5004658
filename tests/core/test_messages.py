# SPDX-License-Identifier: LGPL-3.0-or-later
"""Messages to and from plain JSON."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import Enum, IntEnum

import pytest
from dovetail.core.messages import MessageError, decode, decode_tagged, encode, encode_tagged

pytestmark = pytest.mark.unit


@dataclass(frozen=True)
class Thing:
    name: str
    size: int
    part: float = 0.5
    good: bool = True
    words: list[str] = field(default_factory=list)
    more: dict[str, int] | None = None


class Colour(str, Enum):
    RED = "red"


class Size(IntEnum):
    LARGE = 1


@dataclass(frozen=True)
class Box:
    things: tuple[Thing, ...] = ()
    colour: Colour | None = None
    size: Size = Size.LARGE
    best: Thing | None = None
    rows: tuple[tuple[int, ...], ...] = ()


THINGS = [Thing("a", 1), Thing("", -1, 2, False, ["x"], {"y": 1})]
BOXES = [Box(), Box(tuple(THINGS), Colour.RED, best=THINGS[1], rows=((1, 2), ()))]


@pytest.mark.parametrize("message", THINGS + BOXES)
def test_a_message_survives(message):
    assert decode(type(message), json.loads(json.dumps(encode(message)))) == message


def test_a_message_is_plain_json():
    assert encode(Thing("a", 1)) == {
        "name": "a", "size": 1, "part": 0.5, "good": True, "words": []
    }  # fmt: skip
    box = encode(Box((Thing("a", 1),), Colour.RED, rows=((1,),)))
    assert box == {"things": [encode(Thing("a", 1))], "colour": "red", "size": 1, "rows": [[1]]}
    assert (type(box["colour"]), type(box["size"])) == (str, int)


def test_to_encode_a_message_changes_nothing_in_it():
    box = Box(colour=Colour.RED)
    encode(box)
    assert box == Box(colour=Colour.RED)


KINDS = {"Thing": Thing, "Box": Box}


@pytest.mark.parametrize("message", THINGS + BOXES)
def test_a_tagged_message_says_what_it_is(message):
    data = encode_tagged(message)
    assert next(iter(data)) == "kind"
    assert data == {"kind": type(message).__name__, **encode(message)}
    assert decode_tagged(KINDS, data) == message


@pytest.mark.parametrize("data", [None, [], {}, {"kind": []}, {"kind": "str"}, {"kind": "Other"}])
def test_a_tag_that_names_no_kind_is_refused(data):
    with pytest.raises(MessageError, match="^not a message$"):
        decode_tagged(KINDS, data)


def test_a_tagged_message_is_checked():
    with pytest.raises(MessageError, match="^Thing: size is missing$"):
        decode_tagged(KINDS, {"kind": "Thing", "name": "a"})


WRONG_BOXES = [
    ({"things": {}}, "Box: things is not a list, each of it an object"),
    ({"things": [{"name": "a"}]}, "Box: things: Thing: size is missing"),
    ({"things": [None]}, "Box: things: Thing: not an object"),
    ({"colour": "blue"}, "Box: colour is not a Colour or null"),
    ({"colour": ["red"]}, "Box: colour is not a Colour or null"),
    ({"size": True}, "Box: size is not a Size"),
    ({"best": 1}, "Box: best: Thing: not an object"),
    ({"rows": [1]}, "Box: rows is not a list, each of it a list, each of it a whole number"),
    ({"rows": [[True]]}, "Box: rows is not a list, each of it a list, each of it a whole number"),
]


@pytest.mark.parametrize(("data", "why"), WRONG_BOXES, ids=[str(data) for data, _ in WRONG_BOXES])
def test_what_is_wrong_inside_is_named(data, why):
    with pytest.raises(MessageError) as found:
        decode(Box, data)
    assert str(found.value) == why


@dataclass(frozen=True)
class Strange:
    things: set[int] = field(default_factory=set)


def test_a_field_that_no_message_can_have_is_a_mistake_in_the_code():
    with pytest.raises(TypeError, match="set"):
        encode(Strange())


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
