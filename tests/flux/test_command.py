# SPDX-License-Identifier: LGPL-3.0-or-later
"""What `flux dovetail` says before it asks an instance for anything."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from dovetail.flux import command, entry

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("where", "lines"), [("/dev/full", 1), ("a pipe without a reader", 0)])
def test_help_that_cannot_be_printed_is_no_traceback(where, lines):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe, open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", "import sys; from dovetail.flux.command import main; "
             "sys.exit(main(['--help']))"],
            stdout=full if where == "/dev/full" else pipe, stderr=subprocess.PIPE,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == lines


def test_a_plan_is_not_submitted_from_a_folder_that_is_gone(tmp_path, monkeypatch, capsys):
    plan = tmp_path / "plan.yaml"
    plan.write_text(f"simulations: [{{name: a, case: {tmp_path}, ranks: 1, command: 'true'}}]")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert command.main(["submit", str(plan)]) == 2
    said = "flux dovetail: the current folder: cannot be used: No such file or directory\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("words", ["logs 1 --slice 0", "report 1 --all", "wait 1 --all"])
def test_of_two_things_that_are_asked_for_none_is_left_out(monkeypatch, capsys, words):
    monkeypatch.setattr(command.client, "call", lambda *_: pytest.fail("it asks for one of them"))
    assert command.main(words.split()) == 2
    assert capsys.readouterr().err.startswith(f"flux dovetail: {words.split()[0]}: ")


def test_an_interrupt_while_the_command_is_loaded_is_no_traceback(monkeypatch, capsys):
    def interrupted(name):
        assert name == "dovetail.flux.command"
        raise KeyboardInterrupt

    monkeypatch.setattr(entry.importlib, "import_module", interrupted)
    assert entry.main() == 130
    assert capsys.readouterr().err == "flux dovetail: interrupted\n"
    words = (
        "import sys; from dovetail.flux import entry; print('dovetail.flux.client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", words], capture_output=True, text=True)
    assert done.stdout == "False\n", "which is what takes a while"
