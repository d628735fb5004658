# SPDX-License-Identifier: LGPL-3.0-or-later
"""Lines out of a stream that comes in pieces."""

from __future__ import annotations

import pytest
from dovetail.host.line_splitter import LineSplitter
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.unit


@given(st.lists(st.sampled_from([b"a", b"\n", b"bc\n", b"\n\nd", b""])))
def test_lines_are_the_same_whatever_pieces_they_come_in(blocks):
    splitter = LineSplitter()
    lines = [line for block in blocks for line in splitter.take(block)]
    assert [*lines, splitter.rest] == b"".join(blocks).split(b"\n")
