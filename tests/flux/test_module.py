# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the broker module does by Flux's own bindings, without an instance."""

from __future__ import annotations

import subprocess

import pytest
from dovetail.host import install_paths
from support.flux_batch import flux_command

pytestmark = pytest.mark.flux

LOGS = """
import sys
sys.path.append(sys.argv[1])
import flux
from _flux._core import ffi, lib
from dovetail.flux.module import Log
handle = flux.Flux("loop://")
Log(handle).notice(sys.argv[2])
request, data, size = handle.recv(), ffi.new("const void **"), ffi.new("size_t *")
assert lib.flux_msg_get_payload(request.handle, data, size) == 0
print(ffi.buffer(data[0], size[0])[:].decode())
"""


def test_what_a_user_gives_as_a_reason_is_in_the_log_as_it_is_and_ends_no_module():
    reason = "slice 1: cancel: 100% of %s%s%s%s, caf\xe9"
    words = [flux_command(), "python", "-c", LOGS, str(install_paths.PACKAGES), reason]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.rstrip("\n").endswith(f" {reason}")
