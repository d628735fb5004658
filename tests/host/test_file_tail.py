# SPDX-License-Identifier: LGPL-3.0-or-later
"""A file is followed as it grows, also by who may have no more of inotify."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = pytest.mark.unit

FOLLOW = """
import select, sys
from pathlib import Path
from dovetail.host.file_tail import Tail
path = Path(sys.argv[1])
tail = Tail(path)
for text in ("one", "two"):
    with open(path, "a") as file:
        file.write(text)
    assert select.select([tail], [], [], 10)[0], "nothing woke us"
    print(tail.read().decode())
assert tail.read() == b""
"""


@pytest.mark.parametrize("more", ["", "instances", "watches"])
def test_what_is_appended_wakes_and_is_read_once(more, tmp_path):
    limit = f"echo 0 > /proc/sys/user/max_inotify_{more}; " if more else ""
    words = ["unshare", "-Ur", "sh", "-c", limit + 'exec "$@"', "sh", sys.executable]
    done = subprocess.run(
        [*words, "-c", FOLLOW, str(tmp_path / "log")], capture_output=True, text=True
    )
    if "unshare: " in done.stderr:
        pytest.skip("no user namespaces here")
    assert (done.stdout, done.stderr) == ("one\ntwo\n", "")
