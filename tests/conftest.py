# SPDX-License-Identifier: LGPL-3.0-or-later
"""What all tests share: nothing is written beside the sources; the modules with fixtures."""

from __future__ import annotations

import signal
import tempfile

from hypothesis import HealthCheck, settings
from hypothesis.configuration import set_hypothesis_home_dir

_HOME = tempfile.TemporaryDirectory(prefix="dovetail-hypothesis-")  # removed when pytest exits
set_hypothesis_home_dir(_HOME.name)
settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# A script's background and nohup ignore these, and so would all that tests start and end; what
# is handled here is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, lambda number, frame: None)

pytest_plugins = [
    "support.clusters",
    "support.cluster_runs",
    "support.driven_executor",
    "support.flux_batch",
    "support.flux_lua",
    "support.machines",
    "support.plans",
    "support.side_by_side",
]
