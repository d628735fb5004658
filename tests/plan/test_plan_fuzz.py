# SPDX-License-Identifier: LGPL-3.0-or-later
"""Fuzz of plan files: never anything but a plan, or BadInput that names the file."""

from __future__ import annotations

import pytest
import yaml
from dovetail.core.errors import BadInput
from dovetail.plan import schema
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.plans import GOOD, load

pytestmark = pytest.mark.unit

SCALAR = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(sorted({*schema._Entry.model_fields, *schema._Plan.model_fields})) | st.text(
    max_size=4
)
VALUE = st.recursive(
    SCALAR,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6),
    max_leaves=10,
)
FUZZ = settings(suppress_health_check=list(HealthCheck), max_examples=100)


def refuse_or_load(text):
    try:
        assert load(text).specs
        refusal = "plan.yaml"
    except BadInput as error:
        refusal = str(error)
    assert all(line.startswith("plan.yaml") for line in refusal.split("\n"))


@FUZZ
@given(st.lists(st.dictionaries(KEYS, VALUE, max_size=8), max_size=3))
def test_any_values_are_a_plan_or_refused(where, simulations):
    refuse_or_load(yaml.safe_dump({"simulations": simulations}))


@FUZZ
@given(st.sampled_from(["cpus", "memory", "max_packed", "simulations"]), VALUE)
def test_any_top_level_value_is_a_plan_or_refused(where, key, value):
    refuse_or_load(yaml.safe_dump({**yaml.safe_load(GOOD), key: value}))


@FUZZ
@given(st.integers(0, len(GOOD)), st.integers(0, 9), st.text(max_size=9) | st.binary(max_size=9))
def test_any_edit_is_a_plan_or_refused(where, at, drop, put):
    insert = put if isinstance(put, bytes) else put.encode("utf-8", "replace")
    refuse_or_load(GOOD.encode()[:at] + insert + GOOD.encode()[at + drop :])


@FUZZ
@given(st.text(alphabet="&*!<>[]{}:-?|,#%@`'\"\\ \n\tab01.~=xnU", max_size=60))
def test_any_punctuation_is_a_plan_or_refused(where, text):
    refuse_or_load(text)
