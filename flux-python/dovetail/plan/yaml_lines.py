# SPDX-License-Identifier: LGPL-3.0-or-later
"""Reads a YAML file for checking: plain values, and the line of each.

Input: a file that a user wrote. Output: dicts, lists, strings, numbers, booleans, None; and
for each path into them the line to name in an error.

Invariants: a file that is too large, not text, not YAML, has a key twice, an alias within
itself or aliases that multiply into absurd sizes ends in BadInput with file and line, never
in another exception; time and memory are bounded.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Union

import yaml

from dovetail.core.errors import BadInput
from dovetail.core.units import show

Key = Union[str, int]

MAX_BYTES = 1 << 20
MAX_NODES = 100_000
MAX_DEPTH = 50

_TAG = "tag:yaml.org,2002:"
_MERGE = _TAG + "merge"
# What else a plain word can look like to YAML 1.1 is just text here: a date, or a lone `=`.
_TEXT = (_TAG + "str", _TAG + "timestamp", _TAG + "value")
_SCALARS = (_TAG + "int", _TAG + "float", _TAG + "bool", _TAG + "null")


def read(path: Path) -> bytes:
    """What is in a file, or so much of it that it is too large. Raises BadInput."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise BadInput(f"{path}: not a file")
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{str(path)!r}: not a file name: {error}") from None


class YamlFile:
    """A YAML file's `value`, and the line of any path into it."""

    def __init__(self, path: Path, content: bytes | None = None) -> None:
        """Read and convert `path`, or what was read from there earlier. Raises BadInput."""
        self.path = path
        text = self._text(read(path) if content is None else content)
        try:
            root = yaml.compose(text, Loader=yaml.SafeLoader)
        except yaml.MarkedYAMLError as error:
            line = error.problem_mark.line + 1 if error.problem_mark else 1
            context = f" {error.context}" if error.context else ""
            if error.context_mark and error.context_mark.line + 1 != line:
                context += f" that begins in line {error.context_mark.line + 1}"
            raise self.bad(line, f"{error.problem}{context}") from None
        except yaml.reader.ReaderError as error:
            line = text.count("\n", 0, error.position) + 1
            raise self.bad(line, f"a character that YAML does not allow: {error.reason}") from None
        except RecursionError:
            raise self.bad(1, f"nested deeper than {MAX_DEPTH} levels") from None
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            raise self.bad(1, f"not YAML: {error}") from None
        if root is None:
            raise self.bad(1, "the file is empty")
        self._root = root
        self._done: dict[int, tuple[object, int]] = {}
        self._open: set[int] = set()
        self.value = self._convert(root)[0]

    def bad(self, line: int, why: str) -> BadInput:
        """An error at a line."""
        return BadInput(f"{self.path}:{line}: {' '.join(why.split())}")

    def line(self, where: Sequence[Key], of_key: bool = False) -> int:
        """The line of the value at path `where`, or of its key.

        Where the path leads nowhere, the line of the last node on it that is there.
        """
        node, line = self._root, self._root.start_mark.line
        for step in where:
            if isinstance(node, yaml.MappingNode):
                pair = self._find(node, str(step))
                if pair is None:
                    break
                node = pair[1]
                line = pair[0].start_mark.line if of_key else node.start_mark.line
            elif isinstance(node, yaml.SequenceNode) and isinstance(step, int):
                if not 0 <= step < len(node.value):
                    break
                node = node.value[step]
                line = node.start_mark.line
            else:
                break
        return int(line) + 1

    def _text(self, data: bytes) -> str:
        """The file as text."""
        if len(data) > MAX_BYTES:
            raise BadInput(f"{self.path}: larger than {MAX_BYTES >> 20} MiB")
        try:
            return data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = data.count(b"\n", 0, error.start) + 1
            raise self.bad(line, "not UTF-8 text; save the file as UTF-8") from None

    def _convert(self, node: yaml.Node) -> tuple[object, int]:
        """The node's value and how many nodes it expands to; each node is converted once."""
        line = node.start_mark.line + 1
        if id(node) in self._open:
            raise self.bad(line, "an alias to something that contains the alias itself")
        if id(node) not in self._done:
            if len(self._open) >= MAX_DEPTH:
                raise self.bad(line, f"nested deeper than {MAX_DEPTH} levels")
            self._open.add(id(node))
            done: tuple[object, int]
            if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
                done = self._mapping(node)
            elif isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
                items = [self._convert(item) for item in node.value]
                done = [value for value, _ in items], 1 + sum(size for _, size in items)
            else:
                done = self._scalar(node), 1
            self._open.remove(id(node))
            if done[1] > MAX_NODES:
                raise self.bad(line, f"expands to more than {MAX_NODES} values")
            self._done[id(node)] = done
        return self._done[id(node)]

    def _mapping(self, node: yaml.MappingNode) -> tuple[dict[str, object], int]:
        """A mapping with `<<` merged in, and its size."""
        value: dict[str, object] = {}
        own: dict[str, int] = {}
        size = 1
        for key, item in node.value:
            line = key.start_mark.line + 1
            if not isinstance(key, yaml.ScalarNode) or key.tag not in (*_TEXT, _MERGE):
                raise self.bad(line, "a key that is not text; put it in quotes")
            if key.value in own:
                raise self.bad(line, f"{key.value!r} again; it is already in line {own[key.value]}")
            own[key.value] = line
            converted, count = self._convert(item)
            size += count
            if key.tag != _MERGE:
                value[key.value] = converted
                continue
            for base in converted if isinstance(converted, list) else [converted]:
                if not isinstance(base, dict):
                    raise self.bad(line, "<< takes an alias of a mapping, or a list of them")
                # What the mapping itself says wins, wherever the << stands; then the first base.
                value = {**base, **value}
        return value, size

    def _find(self, node: yaml.MappingNode, name: str) -> tuple[yaml.Node, yaml.Node] | None:
        """The key and value nodes of `name`, looked up through `<<` too."""
        bases: list[yaml.Node] = []
        for key, item in node.value:
            if key.tag == _MERGE:
                bases += item.value if isinstance(item, yaml.SequenceNode) else [item]
            elif key.value == name:
                return key, item
        for base in bases:
            found = self._find(base, name) if isinstance(base, yaml.MappingNode) else None
            if found:
                return found
        return None

    def _scalar(self, node: yaml.Node) -> object:
        """A scalar's value."""
        if isinstance(node, yaml.ScalarNode):
            # To YAML 1.1 `12:30` is a whole number too, of sixtieths: 750.
            if node.tag in _TEXT or (node.tag in _SCALARS and ":" in node.value):
                return self._word(node)
            if node.tag == _TAG + "int" and re.fullmatch(r"[-+]?0[0-7_]+", node.value):
                why = "is octal to YAML; leave out the 0 in front, or put it in quotes"
                raise self.bad(node.start_mark.line + 1, f"{node.value} {why}")
            if node.tag in _SCALARS:
                try:
                    return yaml.SafeLoader("").construct_object(node)  # type: ignore[no-untyped-call]
                except (ValueError, KeyError, IndexError, OverflowError, yaml.YAMLError):
                    pass
        tag = node.tag.replace(_TAG, "!!")
        raise self.bad(node.start_mark.line + 1, f"{tag} is not supported here; use plain YAML")

    def _word(self, node: yaml.ScalarNode) -> str:
        """A scalar's text; an escape can write what UTF-8, and so an event log, does not have."""
        text = str(node.value)
        try:
            text.encode()
        except UnicodeEncodeError:
            raise self.bad(node.start_mark.line + 1, f"{show(text)} is no text in UTF-8") from None
        return text
