# SPDX-License-Identifier: LGPL-3.0-or-later
"""What is told while Go builds for minutes. The go command is a script, which takes none."""

from __future__ import annotations

import os
import time

import pytest
from dovetail.core.errors import WorkFailed
from dovetail.host import processes
from support.clusters import eventually
from usernetes_setup.build import go_build

pytestmark = pytest.mark.unit

GO = """#!/bin/sh
[ "$1" = list ] && { printf 'a/b\\nc\\nd\\ne\\n'; exit; }
printf 'a/b\\nc\\n' >&2
%s
printf 'd\\n' >&2
exit %d
"""


@pytest.fixture
def build(tmp_path, monkeypatch):
    """Builds with a go that does this besides; what was told."""
    monkeypatch.setattr(go_build, "EVERY", 0.0)

    def run(script: str, code: int) -> list[str]:
        go = tmp_path / "go"
        go.write_text(GO % (script, code))
        go.chmod(0o755)
        said: list[str] = []
        target = tmp_path / "program"
        go_build.build(str(go), ".", target, ["-s"], tmp_path, os.environ, said.append)
        return said

    return run


def test_it_tells_how_far_it_is(build):
    assert build("true", 0) == [
        f"{n} of 4 packages compiled, at most a minute left" for n in (1, 2, 3)
    ]


def test_of_one_that_fails_it_tells_why_and_not_what_was_compiled_meanwhile(build):
    with pytest.raises(WorkFailed, match=r"^go build: # d d.go:1: wrong$"):
        build("printf '# d\\nd.go:1: wrong\\n' >&2", 1)
    with pytest.raises(WorkFailed, match=r"^go build: exit code 2$"):
        build("true", 2)


@pytest.mark.parametrize("end", [KeyboardInterrupt, SystemExit])
def test_one_that_is_interrupted_ends_at_once_with_all_that_it_began(tmp_path, monkeypatch, end):
    monkeypatch.setattr(go_build, "EVERY", 0.0)
    go, pid = tmp_path / "go", tmp_path / "pid"
    go.write_text(f"#!/bin/sh\n[ $1 = build ] && echo $$ >{pid}\necho a | tee /dev/stderr\n"
                  "[ $1 = list ] || exec sleep 60\n")  # fmt: skip
    go.chmod(0o755)

    def interrupted(line: str) -> None:
        raise end

    begun = time.monotonic()
    with pytest.raises(end):
        go_build.build(str(go), ".", tmp_path / "made", [], tmp_path, os.environ, interrupted)
    assert time.monotonic() - begun < 50
    assert eventually(lambda: not processes.start_ticks(int(pid.read_text())), 10)
