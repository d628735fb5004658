# SPDX-License-Identifier: LGPL-3.0-or-later
"""A machine with systemd and version 2 control groups alone, and its users."""

from __future__ import annotations

import json
import re

import pytest
from support.machines import TOP

pytestmark = pytest.mark.machines

PYTEST = (
    f"cd {TOP} && python -m pytest -c flux-python/pyproject.toml --rootdir . -p no:cacheprovider "
    "-p no:xdist -q"
)
PLAN = """
simulations:
  - name: uneven
    case: /tmp/case
    ranks: 2
    weights: [1, 3]
    command: /shared/busy burn 0 20 60
    environment: {BUSY_UNTIL: /tmp/enough}
"""


def test_machines_share_nothing_but_a_network(machines):
    """What all other tests of this tier take for granted."""
    boots = {machine.out("cat /proc/sys/kernel/random/boot_id") for machine in machines}
    assert len(boots) == len(machines)
    for machine in machines:
        assert machine.out("hostname") == machine.name
        assert machine.out("cat /proc/1/comm") == "systemd"
        assert machine.out("findmnt -no FSTYPE /sys/fs/cgroup") == "cgroup2"
        assert machine.out("ls /tmp | grep made-on || true") == ""
        machine.run(f"touch /tmp/made-on-{machine.name}")
        for other in machines:
            machine.run(f"ping -c 1 -W 60 {other.name}")


def test_what_doctor_tells_an_administrator_to_type_makes_the_machine_fit(machines):
    """Debian's systemd gives users no cpuset."""
    for machine in machines:
        told = json.loads(machine.run("dovetail doctor --json", code=1).stdout)
        (error,) = [one for one in told["checks"] if one["level"] == "error"]
        assert (error["name"], error["who"]) == ("control groups", "admin")
        assert error["found"] == "version 2: controllers not delegated: cpuset"
        machine.run(error["fix"], user="root")
        assert json.loads(machine.out("dovetail doctor --json"))["can_run"]
        left = machine.out("ps -u alice -o comm=").split()
        assert not {"podman", "conmon", "catatonit"} & {*left}, "doctor leaves nothing behind"


@pytest.mark.parametrize("user", ["root", "alice"])
def test_the_tests_of_control_groups_pass_there(machines, user):
    told = machines[0].out(f"{PYTEST} -m unit tests/host", user)
    assert re.search(r"\d+ passed", told), told


def test_a_simulation_has_a_weight_in_proportion_to_its_load(machines):
    """As an ordinary user, in a scope of the user's own service manager, as the run itself says."""
    machine = machines[0]
    machine.build("busy", "pmpi/known/busy.c")
    machine.write("/tmp/plan.yaml", PLAN)
    machine.run("mkdir -p /tmp/case; rm -f /tmp/enough")
    run = "systemd-run --user --scope --quiet -- dovetail run /tmp/plan.yaml -o /tmp/out"
    machine.run(f"{run} >/tmp/run.log 2>&1 </dev/null &")
    weight = "find /sys/fs/cgroup/user.slice -path '*/uneven/cpu.weight' -exec cat {} +"
    asked = f"dovetail top /tmp/out --json; {weight}"

    def follows(text: str) -> bool:
        """What the light rank does not need is in neither the request nor the weight."""
        if not text.endswith("}") and "}" in text:
            top, _, weight = text.rpartition("}")
            (one,) = json.loads(top + "}")["simulations"]
            total = sum(rank["request"] or 0 for rank in one["ranks"])
            return 1000 < total < 1900 and int(weight) == pytest.approx(total / 10, abs=1)
        return False

    machine.until(asked, follows)
    machine.run("touch /tmp/enough")
    machine.until("tail -n 1 /tmp/run.log", lambda text: text.startswith("report: "))
    assert machine.out("find /sys/fs/cgroup/user.slice -name '*dovetail*'") == ""
