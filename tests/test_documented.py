# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a user can type or set is in a manual page, and the packaging leaves nothing out."""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shlex
import signal
import subprocess
from pathlib import Path

import pytest
from dovetail import __version__
from dovetail.cli import main
from dovetail.flux import command
from dovetail.flux import option as asked
from dovetail.flux.instance import requests
from usernetes_setup.__main__ import VERBS

pytestmark = pytest.mark.unit

TOP = Path(__file__).resolve().parents[1]


def commands() -> dict[str, argparse.ArgumentParser]:
    """Each subcommand's parser."""
    action = next(a for a in main.parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """A parser's options, and those of the verbs below it."""
    found = list(parser._actions)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [option for verb in action.choices.values() for option in options(verb)]
    return found


@pytest.mark.parametrize("command", main.COMMANDS)
def test_every_option_of_a_command_is_in_its_manual_page(command):
    page = (TOP / "doc" / f"dovetail-{command}.1").read_text()
    common = (TOP / "doc" / "dovetail.1").read_text()
    flags = set(re.findall(r"\bFl (-?[\w-]+)", page)) | set(re.findall(r"\bFl (-[\w-]+)", common))
    for option in options(commands()[command]):
        for word in option.option_strings:
            if word != "-h":
                assert word[1:] in flags, f"{word} is not in dovetail-{command}(1)"


def test_every_command_and_option_of_flux_dovetail_is_in_its_manual_page():
    page = (TOP / "doc" / "flux-dovetail.1").read_text()
    flags = set(re.findall(r"\bFl (-?[\w-]+)", page))
    action = command.parser()._subparsers._group_actions[0]
    assert re.findall(r"^\.It Cm (\w+)", page, re.MULTILINE) == list(command.HELP)
    for name in command.HELP:
        for option in options(action.choices[name]):
            for word in option.option_strings:
                assert word == "-h" or word[1:] in flags, f"{word} of flux dovetail {name}"


def test_every_option_of_flux_dovetail_is_completed():
    text = (TOP / "flux-python/dovetail/flux/plugins/completion.bash").read_text()
    script = (
        text[: text.index("\nif ! declare")]
        + """
for command in "$@"; do
  COMP_WORDS=(flux dovetail "$command" --) COMP_CWORD=3 COMPREPLY=()
  _flux_dovetail; echo "$command ${COMPREPLY[*]}"
done
COMP_WORDS=(flux dovetail "") COMP_CWORD=2; _flux_dovetail; echo "${COMPREPLY[*]}"
"""
    )
    done = subprocess.run(
        ["bash", "-c", script, "bash", *command.HELP], capture_output=True, text=True, check=True
    )
    *lines, first = done.stdout.splitlines()
    assert first.split() == [*command.HELP, "--help"]
    action = command.parser()._subparsers._group_actions[0]
    for line in lines:
        name, *words = line.split()
        known = {w for o in options(action.choices[name]) for w in o.option_strings if w[1] == "-"}
        assert set(words) == (set() if name == "kubectl" else known), name


@pytest.mark.parametrize(
    ("typed", "there"),
    [
        ("flux dovetail rep", "flux dovetail report "),
        ("flux dovetail submit rep", "flux dovetail submit report/"),
        ("flux dovetail submit a", r"flux dovetail submit a\ plan.yaml "),
        ("flux dovetail submit", "flux dovetail submit "),
        ("flux dovetail kubectl apply -f a", r"flux dovetail kubectl apply -f a\ plan.yaml "),
        ("flux batch a", r"flux batch a\ plan.yaml "),
    ],
)
def test_only_names_of_files_are_completed_as_such(tmp_path, typed, there):
    """Beside a folder of its name a command is no path; Flux's own completion is not here."""
    script = TOP / "flux-python/dovetail/flux/plugins/completion.bash"
    for name in ("report", "submit"):
        (tmp_path / name).mkdir()
    (tmp_path / "a plan.yaml").touch()
    child, terminal = pty.fork()
    if child == 0:
        os.chdir(tmp_path)
        more = {"TERM": "dumb", "PS1": "> ", "HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], {**os.environ, **more})
    seen = b""

    def until(words):
        nonlocal seen
        while words not in seen:
            assert select.select([terminal], [], [], 30)[0], seen
            seen += os.read(terminal, 4096)

    try:
        os.write(terminal, f". {shlex.quote(str(script))}; echo re''ady\n".encode())
        until(b"ready\r\n")
        os.write(terminal, f"{typed}\t".encode())
        until(there.encode())
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(terminal)
        os.waitpid(child, 0)


def test_every_request_to_the_broker_module_is_in_the_manual():
    page = (TOP / "doc" / "dovetail-flux.7").read_text()
    documented = set(re.findall(r"dovetail\.([\w-]+)", " ".join(re.findall(r"It Ic (.*)", page))))
    assert documented == {*requests.REQUESTS, *requests.STREAMS}


def test_every_key_of_the_configuration_is_in_the_manual():
    page = (TOP / "doc" / "dovetail-flux.7").read_text()
    keys = re.findall(r"[\w-]+", " ".join(re.findall(r"It Va (.*)", page)))
    assert sorted(keys) == sorted(asked.TABLE)


def test_every_command_is_in_the_overview():
    page = (TOP / "doc" / "dovetail.1").read_text()
    assert re.findall(r"^\.It Cm (\w+)", page, re.MULTILINE) == list(main.COMMANDS)


def test_every_environment_variable_is_in_a_manual_page():
    sources = [*TOP.glob("flux-python/**/*.py"), *TOP.glob("pmpi/*.[ch]")]
    read = set()
    for source in sources:
        read |= set(re.findall(r"\"(DOVETAIL_[A-Z_]+)\"", source.read_text()))
    pages = "".join(page.read_text() for page in TOP.glob("doc/*.[1-8]"))
    assert {"DOVETAIL_CLOCK", "DOVETAIL_LIBDIR", "DOVETAIL_ORPHAN_S"} <= read
    assert [name for name in sorted(read) if f"Ev {name}" not in pages] == []


def test_every_source_file_names_its_licence():
    listed = subprocess.run(["git", "ls-files"], cwd=TOP, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    plain = {"COPYING", "COPYING.LESSER", ".gitignore", "flux-python/dovetail/py.typed"}
    modules = ("usernetes-setup/kube", "usernetes-setup/node-image")
    plain |= {f"{module}/go.sum" for module in modules}  # these have no comments
    plain |= {f"packaging/debian/{name}" for name in ("source/format", "changelog")}
    plain.add("tests/run/demo-events-schema1.jsonl.gz")  # a record, compressed
    bare = [
        name
        for name in listed.stdout.split()
        if name not in plain and "SPDX-License-Identifier" not in (TOP / name).read_text()[:400]
    ]
    assert bare == []


def test_every_file_of_the_package_is_installed():
    for package in (TOP / "flux-python", TOP / "usernetes-setup"):
        made = set((package / "Makefile.am").read_text().split())
        files = [*package.rglob("*.py"), *package.rglob("*.html"), *package.rglob("py.typed")]
        assert len(files) > 10
        names = [str(file.relative_to(package)) for file in files]
        assert [name for name in names if name not in made] == []


def test_what_a_text_imports_is_there():
    """In manual pages, scripts, and programs that tests have as texts, no linter looks."""
    found = set()
    for name in ("doc", "examples", "flux-python", "tests", "usernetes-setup"):
        for path in (TOP / name).rglob("*.*"):
            if path.suffix in {".am", ".py", ".sh"} or path.parent.name == "doc":
                text = path.read_text()
                found |= set(
                    re.findall(r"from ((?:dovetail|usernetes_setup)[\w.]*) import (\w+)", text)
                )
    assert len(found) > 200
    assert [one for one in sorted(found) if not is_there(*one)] == []


def is_there(module: str, name: str) -> bool:
    """Whether a module has a module or a name."""
    first, _, rest = module.partition(".")
    base = TOP / {"dovetail": "flux-python"}.get(first, "usernetes-setup") / first
    place = base.joinpath(*filter(None, rest.split(".")))
    if place.is_dir():
        inside = [place / f"{name}.py", place / name]
        return any(path.exists() for path in inside) or name in (place / "__init__.py").read_text()
    return place.with_suffix(".py").exists() and name in place.with_suffix(".py").read_text()


def test_every_manual_page_is_installed():
    made = (TOP / "Makefile.am").read_text().split()
    assert [page.name for page in TOP.glob("doc/*.[1-8]") if f"doc/{page.name}" not in made] == []


def test_every_verb_has_a_manual_page_by_its_name():
    made = (TOP / "Makefile.am").read_text().split()
    assert [verb for verb in VERBS if f"doc/dovetail-kube-{verb}.1" not in made] == []


def test_what_a_script_takes_from_beside_it_is_installed_with_it():
    made = (TOP / "Makefile.am").read_text().split("\n# --- usernetes-setup ---\n")[1].split()
    script = TOP / "usernetes-setup/node-image/make"
    found = set(re.findall(r"\$here/([\w./-]+\.\w+)", script.read_text()))
    assert len(found) > 1
    places = [os.path.relpath(script.parent / name, TOP) for name in found]
    assert [place for place in places if place not in made] == []


def test_every_example_is_installed_where_pods_see_it():
    made = (TOP / "Makefile.am").read_text().split()
    names = [f"examples/{path.name}" for path in TOP.glob("examples/*.*")]
    assert len(names) > 2
    assert [name for name in names if name not in made] == []


def test_the_package_and_the_build_have_the_same_version():
    assert f"AC_INIT([dovetail], [{__version__}])" in (TOP / "configure.ac").read_text()
