# SPDX-License-Identifier: LGPL-3.0-or-later
"""What users and their scripts may rely on, as sorted lines, found in the tree itself.

In: the parsers and models, the JSON that commands print where they can run here, and the sources
where they cannot. Out: lines such as `option dovetail run --resume`. Each begins with its kind:
command, option, argument, choice, exit, variable, plan, configuration, json, request, lua.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import importlib
import inspect
import io
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from unittest import mock

from dovetail.cli import bench, main
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.executors.kubernetes import share_report
from dovetail.flux import command, option
from dovetail.flux.instance import messages, requests
from dovetail.mpi import profile
from dovetail.plan import schema
from dovetail.report import alternatives, html, summary
from usernetes_setup import cluster
from usernetes_setup.build import programs
from usernetes_setup.preflight import finding, report

from support import made_up_runs
from support.broker_states import Play

TOP = Path(__file__).resolve().parents[2]
NAMED_BY_DATA = ("calls", "versions")
"""Objects whose keys are names of functions or programs, not of ours."""


def surface(scratch: Path) -> list[str]:
    """All lines, sorted; files that commands need are made in `scratch`."""
    return sorted(
        {
            *parsed("dovetail", main.parser()),
            *parsed("flux dovetail", command.parser()),
            *exits(),
            *variables(),
            *plan_keys(),
            *printed(scratch),
            *not_run_here(),
            *in_flux(),
            *lua(),
        }
    )


def missing(before: Iterable[str], now: Iterable[str]) -> list[str]:
    """The lines of before that are gone."""
    return sorted({line for line in before if line} - set(now))


# --- what a user types ---


def parsed(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    """A parser's commands, options, arguments and what may be chosen, and those below it."""
    yield f"command {name}"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for shown_to_users in action._choices_actions:
                word = shown_to_users.dest
                yield from parsed(f"{name} {word}", action.choices[word])
            continue
        for word in action.option_strings:
            yield f"option {name} {word}"
        called = action.option_strings[-1] if action.option_strings else action.metavar
        if not action.option_strings:
            yield f"argument {name} {called}"
        for choice in action.choices or ():
            yield f"choice {name} {called} {choice}"


def exits() -> Iterator[str]:
    """What `guarded`, under which every command runs, gives for each way to end."""

    def ending(error: BaseException) -> int:
        def work() -> int:
            raise error

        with contextlib.redirect_stderr(io.StringIO()):
            return main.guarded("dovetail", work)

    yield f"exit done {main.guarded('dovetail', lambda: 0)}"
    yield f"exit work-failed {ending(WorkFailed('x'))}"
    yield f"exit bad-input {ending(BadInput('x'))}"
    yield f"exit interrupted {ending(KeyboardInterrupt())}"


def variables() -> Iterator[str]:
    """Environment variables that Python, C or shell code names."""
    patterns = ("flux-python/**/*.py", "usernetes-setup/**/*.py", "pmpi/*.[ch]", "jobtap/*.[ch]")
    for pattern in patterns:
        for path in TOP.glob(pattern):
            for name in re.findall(r"\"(DOVETAIL_[A-Z_]+)\"", path.read_text()):
                yield f"variable {name}"


def plan_keys() -> Iterator[str]:
    """Keys of a plan, of its entries, of the option of `flux batch`, and of the configuration."""
    for name in schema._Plan.model_fields:
        yield f"plan {name}"
    for name in schema._Entry.model_fields:
        yield f"plan simulations[].{name}"
    for name in option.KEYS:
        yield f"option flux batch --dovetail {name}"
    for name in option.TABLE:
        yield f"configuration dovetail.{name}"


# --- JSON ---


def keys(value: object, where: str = "") -> Iterator[str]:
    """The path of each key in a JSON value."""
    if isinstance(value, Mapping):
        for name, one in value.items():
            path = f"{where}.{name}".lstrip(".")
            yield path
            if name not in NAMED_BY_DATA:
                yield from keys(one, path)
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from keys(one, f"{where}[]")


def shown(*words: str) -> Iterator[str]:
    """The keys that a command prints with --json."""
    name = " ".join(word for word in words[:2] if word.isalpha() and word != "run")
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(io.StringIO()):
        main.main([words[0], "--json", *words[1:]])
    assert output.getvalue(), f"dovetail {words} printed nothing"
    for path in keys(json.loads(output.getvalue())):
        yield f"json dovetail {name or words[0]}: {path}"


def printed(scratch: Path) -> Iterator[str]:
    """Keys of commands that can run here, and of the files that they write."""
    yield from shown("requests", "--weights", "1,3", "--cpus", "2")
    yield from shown("predict", "--t1", "10", "--ranks", "2", "--vcpus", "2", "--beta", "0.1")
    yield from shown("predict", "--t1", "10", "--ranks", "2", "--vcpus", "2",
                     "--measured", "2:12", "3:15")  # fmt: skip
    (scratch / "case").mkdir()
    plan = scratch / "plan.yaml"
    plan.write_text("simulations: [{name: a, case: case, ranks: 1, command: 'true'}]\n")
    yield from shown("run", "--dry-run", "-o", str(scratch / "out"), str(plan))
    yield from shown("doctor")
    (scratch / "flux-dovetail").touch()
    with mock.patch.object(sys, "argv", [str(scratch / "dovetail")]):  # it looks beside itself
        yield from shown("env")

    # A run in which simulations of a plan were packed, with every alternative measured.
    names = (alternatives.SEQUENTIAL, alternatives.NAIVE, alternatives.FEWER, alternatives.DOVETAIL)
    measured = [
        alternatives.Alternative(family="pitz", name=name, makespan_s=[40.0], ranks=2, at_once=1)
        for name in names
    ]
    folder = made_up_runs.packed().save(scratch / "made-up", measured)
    yield from shown("report", str(folder))
    yield from shown("advise", str(folder))
    html.publish(folder, *summary.load(folder))
    for name in ("summary.json", "alternatives.json"):
        for path in keys(json.loads((folder / name).read_text())):
            yield f"json {name}: {path}"
    for name in names:
        yield f"json alternatives.json: alternatives[].name {name}"

    values = {"host": "h", "ended": "finalized", "iteration_source": "openfoam",
              "calls": {"MPI_Send": (1, 1.0)}}  # fmt: skip
    fields = {
        field.name: values.get(field.name, 1) for field in dataclasses.fields(profile.RankProfile)
    }
    made = profile.Profile(("true",), "openmpi", "off", 0, (profile.RankProfile(**fields),))
    for path in keys(profile.to_json(made)):
        yield f"json dovetail profile: {path}"


def written(code: object) -> list[str]:
    """The keys of all objects that the source of a function or module spells out or sets.

    Those of the broker module's messages are the names of their fields.
    """
    found: list[ast.expr | None] = []
    for one in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(code)))):
        if isinstance(one, ast.Dict):
            found += one.keys
        elif isinstance(one, ast.Subscript) and isinstance(one.ctx, ast.Store):
            found.append(one.slice)
        elif isinstance(one, ast.Call) and ast.unparse(one.func).startswith("messages."):
            kind = getattr(messages, ast.unparse(one.func).partition(".")[2], None)
            if dataclasses.is_dataclass(kind):
                found += [ast.Constant(field.name) for field in dataclasses.fields(kind)]
    texts = [one.value for one in found if isinstance(one, ast.Constant)]
    return [text for text in texts if isinstance(text, str)]


def not_run_here() -> Iterator[str]:
    """Keys of commands that need a cluster, a mesh, or minutes, from their sources."""
    decompose = importlib.import_module("dovetail.cli.decompose")
    places = {
        "dovetail bench": (bench.plain,),
        "dovetail decompose": (decompose,),
        "dovetail kube build": (programs.build,),
        "dovetail kube preflight": (report.main,),
        "dovetail kube up": (cluster.described,),
        "dovetail kube join": (cluster.described, cluster.invite),
        "dovetail kube status": (cluster.described, cluster.status),
        "dovetail status": (share_report,),
    }
    for name, codes in places.items():
        for code in codes:
            for key in written(code):
                yield f"json {name}: {key}"
    for field in dataclasses.fields(finding.Check):
        yield f"json dovetail kube preflight: checks[].{field.name}"


# --- in Flux ---


def in_flux() -> Iterator[str]:
    """The broker module's requests, and what the commands print of their answers."""
    for name in (*requests.REQUESTS, *requests.STREAMS):
        yield f"request dovetail.{name}"
    play = Play().begin().ready(0, 1)
    play.ask("submit", "s", plan="p.yaml", output="out", cwd="/")
    for path in keys(play.state.status()):
        yield f"json flux dovetail status: {path}"
    for name in [name for name in command.HELP if name != "kubectl"]:  # whose output is its own
        for key in written(getattr(command, f"do_{name}")):
            yield f"json flux dovetail {name}: {key}"
        if name.replace("-", "_") in dir(requests):
            for key in written(getattr(requests, name)):
                yield f"json flux dovetail {name}: {key}"


def lua() -> Iterator[str]:
    """What a jobtap plugin in Lua may call."""
    for source, table in (("api.c", "jobtap."), ("action.c", "job:")):
        text = (TOP / "jobtap" / source).read_text()
        for name in re.findall(r'\{"(\w+)",\s*\w+\}', text):
            yield f"lua {table}{name}"
    text = (TOP / "jobtap" / "libraries.c").read_text()
    for table, names in re.findall(r"\*const (\w+)\[\] = \{(.*?)NULL", text, re.DOTALL):
        for name in re.findall(r'"(\w+)"', names):
            yield f"lua {'' if table == 'base' else table + '.'}{name}"
