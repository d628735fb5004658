# SPDX-License-Identifier: LGPL-3.0-or-later
"""Where memory is short, the kernel kills; the run says so, and the others go on."""

from __future__ import annotations

import shlex
import sys

import pytest
from support.memory_limits import EAT, LIMIT_MIB, limited, within  # noqa: F401
from support.run_command import COMMAND, site  # noqa: F401

pytestmark = pytest.mark.unit

LIMIT = f"the limit of its control group is {LIMIT_MIB} MiB"


def test_what_the_kernel_killed_for_memory_is_said_so(site, limited):  # noqa: F811
    eat = shlex.join((sys.executable, "-c", EAT))
    blame = "echo 1000 > /proc/$PPID/oom_score_adj; " + eat  # the supervisor is taken for it
    plan = site.plan(
        site.shell(eat, name="own"),
        site.shell("true", f"exec {eat}", name="prepare"),
        site.shell("true", blame, name="supervisor"),
        site.shell("kill -9 $$", name="other"),
        site.shell("true", name="after"),
        cpus=1,  # so that each is killed alone
    )
    code, _, _ = site.run(plan, "-o", "out", command=(*within(limited), *COMMAND))
    reasons = {one["name"]: one["reason"] for one in site.summary()["simulations"]}
    assert reasons.pop("other").startswith("killed by signal 9")
    step = shlex.join(("sh", "-c", f"exec {eat}"))
    assert reasons == {
        "own": f"out of memory: it was killed by the kernel; {LIMIT}",
        "prepare": f"out of memory: prepare step '{step}' was killed by the kernel; {LIMIT}",
        "supervisor": f"out of memory: its supervisor was killed by the kernel; {LIMIT}",
        "after": "",
    }
    assert code == 1
    site.states()  # each is accounted for; and the fixture looks for what is left
