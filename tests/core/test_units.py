# SPDX-License-Identifier: LGPL-3.0-or-later
"""Numbers as words of a sentence or a table."""

from __future__ import annotations

import math

import pytest
from dovetail.core import units

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (1.0, "1"), (80.249, "80.2"), (0.0123456, "0.0123"), (-2.5, "-2.5"),
        (1373.6, "1374"), (72000.0, "72000"), (1e-6 / 3, "0.000000333"), (999.7, "1000"),
        (math.inf, "inf"),
    ],
)  # fmt: skip
def test_a_number_is_rounded_and_has_no_exponent(value, text):
    assert units.rounded(value) == text


def test_one_of_something_is_no_plural():
    assert [units.counted(n, "node") for n in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]


def test_as_many_digits_count_as_are_asked_for():
    assert [units.rounded(12.3456, n) for n in (2, 4)] == ["12", "12.35"]
