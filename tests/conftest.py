# SPDX-License-Identifier: LGPL-3.0-or-later
"""What all tests share: nothing is written beside the sources; the fixtures of clusters."""

from __future__ import annotations

import signal
import tempfile

from hypothesis.configuration import set_hypothesis_home_dir

_HOME = tempfile.TemporaryDirectory(prefix="dovetail-hypothesis-")  # removed when pytest exits
set_hypothesis_home_dir(_HOME.name)

# In the background of a script it is ignored, and so it would be by all that tests start and end.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest_plugins = ["clusters"]
