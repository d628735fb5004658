# SPDX-License-Identifier: LGPL-3.0-or-later
"""The machine's Python runs where there is none, and starts itself again there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from dovetail.host import borrowed_python, install_paths

pytestmark = pytest.mark.unit

TELL = "import os, sys, ssl, json; print(os.__file__, sys.prefix, *own())"


@pytest.fixture
def image(tmp_path):
    """A folder with the machine's programs where an image has them, as far as a user can."""
    for source, target in borrowed_python.mounts():
        place = tmp_path / target[1:]
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(source)
    return tmp_path


def test_here_it_is_started_as_it_was():
    assert borrowed_python.own() == [sys.executable]


def test_from_elsewhere_it_has_its_own_loader_and_library_and_knows_itself(image):
    words = [word.replace("/run/", f"{image}/run/", 1) for word in borrowed_python.words()]
    assert words[0].startswith(f"{image}{borrowed_python.ROOT}/")
    statement = f"from dovetail.host.borrowed_python import own; {TELL}"
    line = install_paths.python_command(statement, words)
    done = subprocess.run(line, capture_output=True, text=True, env={"PATH": "/nowhere"})
    assert done.returncode == 0, done.stderr
    module, prefix, *own = done.stdout.split()
    assert module.startswith(f"{image}{borrowed_python.ROOT}/")
    assert prefix.startswith(f"{image}{borrowed_python.ROOT}/")
    # The loader's own place is told by the kernel, which does not know our link.
    assert own[0] == os.path.realpath(words[0])
    assert own[1:] == ["--library-path", os.path.dirname(own[0]), words[-1]]


def test_what_is_no_program_has_no_loader(tmp_path):
    script = tmp_path / "python3"
    script.write_text("#!/bin/sh\n" + 64 * "#")
    with pytest.raises(ValueError, match="is no 64-bit program"):
        borrowed_python.words(str(script))
