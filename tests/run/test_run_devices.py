# SPDX-License-Identifier: LGPL-3.0-or-later
"""`dovetail run` on one machine with devices, which are all visible there: the run counts them."""

from __future__ import annotations

import json

import pytest
from support.run_command import site  # noqa: F401

pytestmark = pytest.mark.unit

ALONE = "mkdir ../../taken && sleep 0.3 && rmdir ../../taken"
"""Fails where another one does the same at that moment."""


def test_two_that_need_the_one_device_run_one_after_the_other(site):  # noqa: F811
    entry = {**site.shell(ALONE), "devices": {"/dev/full": 1}, "count": 3}
    code, _, _ = site.run(site.plan(entry), "-o", "out")
    assert code == 0
    assert {one["restarts"] for one in site.summary()["simulations"]} == {0}
    site.states()


def test_each_has_gpus_of_its_own(site, monkeypatch):  # noqa: F811
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")  # as a batch job leaves them; none is opened
    script = 'mkdir "../../gpu-$CUDA_VISIBLE_DEVICES" && sleep 0.5 && '
    script += 'rmdir "../../gpu-$CUDA_VISIBLE_DEVICES" && echo "$CUDA_VISIBLE_DEVICES" >>../../had'
    code, _, _ = site.run(
        site.plan({**site.shell(script), "devices": {"gpu": 1}, "count": 4}), "-o", "out"
    )
    assert code == 0
    assert set((site.out / "had").read_text().split()) <= {"3", "5"}
    site.states()


def test_a_device_that_is_not_here_is_refused_before_anything_starts(site):  # noqa: F811
    plan = site.plan({"devices": {"/dev/no/such": 1}})
    code, _, errors = site.run(plan, "-o", "out")
    assert code == 2
    assert errors.strip() == (
        "dovetail: simulation sim asks for 1 of the device /dev/no/such, of which 0 can be used "
        "here; `dovetail doctor` says what there is"
    )
    assert not site.out.exists()


def test_a_dry_run_shows_devices(site):  # noqa: F811
    plan = site.plan({"devices": {"/dev/full": 1}})
    code, told, _ = site.run(plan, "-o", "out", "--dry-run", "--json")
    assert code == 0
    found = json.loads(told)
    assert found["devices"] == {"/dev/full": 1}
    assert found["simulations"][0]["devices"] == [["/dev/full", 1]]
    code, told, _ = site.run(plan, "-o", "out", "--dry-run")
    assert "1 /dev/full" in told
    assert "/dev/full: 1 there" in told
