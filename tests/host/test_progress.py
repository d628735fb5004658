# SPDX-License-Identifier: LGPL-3.0-or-later
"""How far something is that takes long, and silence where it does not."""

from __future__ import annotations

import io
import threading

import pytest
from dovetail.host import progress
from dovetail.host.progress import Progress

pytestmark = pytest.mark.unit


def test_what_takes_long_says_how_far_it_is_until_it_is_over(monkeypatch):
    monkeypatch.setattr(progress, "FIRST", 0.01)
    monkeypatch.setattr(progress, "EVERY", 0.01)
    said, heard = [], threading.Event()

    def say(line):
        said.append(line)
        heard.set()

    with Progress(say, "packing it", 4_000_000) as step:
        assert heard.wait(10)
        assert said[0] == "packing it, 0 s so far"
        file = step.reading(io.BytesIO(b"x" * 1_000_000))
        assert len(file.read(600_000)) + len(file.read()) == 1_000_000
        said.clear()
        heard.clear()
        assert heard.wait(10)
        assert said[-1] == "packing it: 1 of 4 MB, about 0 s more"
        step.turn("comparing checksums")
        assert step.line == "comparing checksums, 0 s so far"
    assert step._teller.is_alive() is False


def test_what_is_quick_says_nothing():
    said = []
    with Progress(said.append, "a moment"):
        pass
    assert said == []
