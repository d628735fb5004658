# SPDX-License-Identifier: LGPL-3.0-or-later
"""A log of schema 1, recorded by the demo: replayed, reported on, not gone on with."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from dovetail.core import eventlog
from dovetail.core.errors import BadInput
from dovetail.report import summary
from dovetail.report.html import page
from dovetail.run.resume import replay

pytestmark = pytest.mark.unit

DEMO = Path(__file__).with_name("demo-events-schema1.jsonl.gz")


@pytest.fixture
def demo(tmp_path):
    with gzip.open(DEMO) as file:
        (tmp_path / "events.jsonl").write_bytes(file.read())
    return tmp_path


def test_it_replays_to_the_same_decisions(demo):
    assert replay(demo / "events.jsonl") is None


def test_a_decision_that_was_another_is_found(demo):
    path = demo / "events.jsonl"
    lines = path.read_text().splitlines()
    at = next(i for i, line in enumerate(lines) if '"type":"Resize"' in line)
    lines[at] = lines[at].replace('"frozen":false', '"frozen":true', 1)
    path.write_text("\n".join(lines) + "\n")
    found = replay(path)
    assert found is not None
    assert found.seq == at


def test_a_report_is_made_of_it(demo):
    found, history = summary.load(demo)
    assert found.counts == {"done": 6}
    assert found.admissions > 0
    assert "imbalanced-4" in page(found, history)


def test_nothing_is_appended_to_it(demo):
    path = demo / "events.jsonl"
    before = path.read_bytes()
    with pytest.raises(BadInput, match="written by an earlier version"):
        eventlog.Log.append(path)
    assert path.read_bytes() == before
    assert json.loads(before.split(b"\n")[0])["schema"] == 1
