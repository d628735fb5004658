# SPDX-License-Identifier: LGPL-3.0-or-later
"""Jobs of a guest in an instance that is another user's, as in that of a whole system.

They need a Flux with flux-security, an IMP that is set up for some user, and MUNGE: a system that
has these, or one set up for the test, with `[exec]` in the configuration of its IMP, whose first
of `allowed-users` owns the brokers here.
"""

from __future__ import annotations

import json
import pwd
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from support.clusters import SETUP
from support.flux_batch import LIMIT, Flux, eventually, flux_command
from support.other_users import needs_nobody

pytestmark = [pytest.mark.flux, needs_nobody]
GUEST = pwd.getpwnam("nobody").pw_uid
USERS = re.compile(r'^\[exec\][^[]*?^allowed-users *= *\[ *"([^"]+)"', re.MULTILINE)


def owner_and_imp():
    """Who may start the jobs of others here and by which program, or a skip that says why not."""
    flux = flux_command()
    built = subprocess.check_output([flux, "config", "builtin", "exec_path"], text=True)
    libexec = Path(built.strip().split(":")[-1]).parent
    imp = libexec / "flux-imp"
    if not imp.exists():
        pytest.skip("this Flux starts no jobs of others: it has no flux-imp")
    if not shutil.which("munge") or subprocess.run(["munge", "-n"], capture_output=True).returncode:
        pytest.skip("munged does not run")
    for etc in (libexec.parents[1] / "etc", Path("/etc")):
        for path in sorted(etc.glob("flux/imp/conf.d/*.toml")):
            for name in USERS.findall(path.read_text()):
                return pwd.getpwnam(name).pw_uid, imp
    pytest.skip("the IMP here is not set up for anybody")


@pytest.fixture
def guest(binaries):
    owner, imp = owner_and_imp()
    subprocess.run([SETUP / "delegate", str(GUEST)], check=True)
    options = ["--conf=access.allow-guest-user=true", f"--conf=exec.imp={imp}"]
    made = Flux(2, GUEST, binaries.parents[1], owner=owner, options=options)
    yield made
    made.close()
    subprocess.run([SETUP / "delegate", str(GUEST), "--remove"], check=True)


def test_a_guest_has_kubernetes_in_a_job_and_its_end_leaves_nothing(guest):
    guest.plan()
    job = guest.batch("""
        set -ex
        id -u
        flux dovetail submit --wait-up plan.yaml
        flux dovetail wait --all
        flux dovetail kubectl get nodes -o name | grep -c ^node/
        flux run -n2 echo bare metal
        flux dovetail report""")  # fmt: skip
    output = guest.output(job)
    assert guest.code(job) == 0, output
    assert str(GUEST) in output.splitlines()
    assert output.splitlines().count("bare metal") == 2
    assert "run 1: 2 of 2 simulations done" in output
    guest.nothing_left()


@pytest.mark.parametrize("patience", ["40s", "0.1s"], ids=["is cancelled", "is killed"])
def test_a_job_of_a_guest_leaves_nothing_when_by_the_owner_it(guest, patience):
    """Who gets nothing of it, meanwhile."""
    table = {"exec": {"kill-timeout": patience, "term-timeout": patience}}
    known = json.loads(guest.as_owner("config", "get").stdout)
    known["exec"].update(table["exec"])
    (guest.folder / "config.json").write_text(json.dumps(known))
    assert guest.as_owner("config", "load", str(guest.folder / "config.json")).returncode == 0
    guest.plan("until [ -e go ]; do sleep 0.2; done", count=1)
    job = guest.batch("flux dovetail submit --wait-up plan.yaml; sleep 1000")
    uri = guest.inside(job)
    running = ["running"]
    assert eventually(lambda: [r["state"] for r in guest.status(uri)["runs"]] == running, LIMIT)
    refused = guest.as_owner("dovetail", "status", uri=uri)
    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert guest.as_owner("cancel", job).returncode == 0
    guest.wait(job)
    guest.nothing_left()


def test_outside_of_a_job_a_guest_is_told_where_dovetail_can_be(guest):
    for words in (("status",), ("up",), ("up", "--dovetail=nodes=1"), ("down",)):
        assert "start an instance of your own" in guest.run("dovetail", *words, code=2), words
    assert "type `flux dovetail up" in guest.as_owner("dovetail", "status").stderr
