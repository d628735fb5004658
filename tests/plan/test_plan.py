# SPDX-License-Identifier: LGPL-3.0-or-later
"""Plan files: what a good one means."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from dovetail import __version__
from dovetail.cli import main
from dovetail.core.errors import BadInput
from dovetail.core.protocol import PlanPhase
from dovetail.plan import command_line, schema
from support.plans import GOOD, ONE, entry, load

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parents[2]


def test_every_key_of_a_good_plan_arrives(where):
    loaded = load(GOOD)
    assert loaded.limits == schema.Limits(cpus=2000, memory=8 * 10**9, max_packed=4)
    assert [spec.name for spec in loaded.specs] == ["channel-1", "channel-2"]
    spec = loaded.specs[1]
    assert spec.family == "channel"
    assert spec.case == str(where / "cases" / "channel")
    assert (spec.ranks, spec.weights, spec.ranks_per_pod) == (2, (1.0, 3.0), 1)
    assert spec.limit == 2.5
    assert spec.devices == (("gpu", 1), ("/dev/fuse", 2), ("rdma/hca_shared_devices_a", 1))
    assert spec.command == ("solver", "-parallel")
    assert spec.prepare == ("mesh", "decompose --ranks 2")
    assert (spec.slowdown, spec.memory, spec.deadline) == (1.5, 5 * 10**8, 600.0)
    assert (spec.iterations, spec.environment) == (300, (("KEY", "value"),))


def test_a_minimal_plan_has_the_documented_defaults(where):
    loaded = load("simulations: [{name: a, case: cases/channel, ranks: 3, command: solver}]")
    assert loaded.limits == schema.Limits()
    (spec,) = loaded.specs
    assert (spec.name, spec.family, spec.weights) == ("a", "a", (1.0, 1.0, 1.0))
    assert (spec.prepare, spec.slowdown, spec.memory, spec.deadline) == ((), 2.0, 0, None)
    assert (spec.iterations, spec.environment, spec.ranks_per_pod) == (0, (), 0)
    assert (spec.limit, spec.devices) == (0, ())


ACCEPTED = {
    "cores as a fraction": (f"cpus: 1.5\n{ONE}", lambda p: p.limits.cpus == 1500),
    "millicores": (f"cpus: 2500m\n{ONE}", lambda p: p.limits.cpus == 2500),
    "binary memory": (entry("memory", "1Gi"), lambda p: p.specs[0].memory == 1 << 30),
    "a fraction of memory": (entry("memory", "1.5G"), lambda p: p.specs[0].memory == 15 * 10**8),
    "a deadline in seconds": (entry("deadline", "90"), lambda p: p.specs[0].deadline == 90),
    "a deadline of parts": (entry("deadline", "1h30m"), lambda p: p.specs[0].deadline == 5400),
    "no deadline, said so": (entry("deadline", "null"), lambda p: p.specs[0].deadline is None),
    "a command as a list": (
        ONE.replace("solver", "[solver, 'a b', '>']"),
        lambda p: p.specs[0].command == ("solver", "a b", ">"),
    ),
    "a solver whose ranks nobody told that they are several": (
        ONE + "    application: openfoam\n",
        lambda p: p.specs[0].widths == (2,),
    ),
    "a solver that is told": (
        ONE.replace("solver", "solver -parallel") + "    application: openfoam\n",
        lambda p: p.specs[0].widths == (),
    ),
    "results at the end": (entry("stage", "end"), lambda p: not p.specs[0].live),
    "phases": (
        entry("phases", "[{until: {iteration: 50}, requests: [500m, 0.5]}, {requests: [1, 2]}]"),
        lambda p: p.specs[0].phases == (PlanPhase(50, (500, 500)), PlanPhase(0, (1000, 2000))),
    ),
    "a phase until a residual": (
        entry("phases", "[{until: {residual: 1e-3}, requests: [1, 1]}, {requests: [1, 2]}]"),
        lambda p: p.specs[0].phases[0] == PlanPhase(0, (1000, 1000), 0.0, 1e-3),
    ),
    "phases with the limit of the simulation but where they have their own": (
        entry("limit", "3") + "    phases: [{until: {iteration: 5}, requests: [1, 1], limit: 2}, "
        "{requests: [1, 1]}]\n",
        lambda p: [phase.limit for phase in p.specs[0].phases] == [2.0, 3.0],
    ),
    "a quoted word": (
        ONE.replace("solver", "solver 'a b'"),
        lambda p: p.specs[0].command == ("solver", "a b"),
    ),
    "a program in the case": (
        entry("prepare", "[./Allrun]"),
        lambda p: p.specs[0].prepare == ("./Allrun",),
    ),
    "a date as text": (
        entry("environment", "{WHEN: 2026-01-01, UNTIL: 12:30}"),
        lambda p: p.specs[0].environment == (("WHEN", "2026-01-01"), ("UNTIL", "12:30")),
    ),
    "an anchor, merged and overridden": (
        ONE.replace("- name", "- &a\n    name") + "  - {<<: *a, name: b, ranks: 4}\n",
        lambda p: [(s.name, s.ranks) for s in p.specs] == [("a", 2), ("b", 4)],
    ),
    "a byte order mark": (b"\xef\xbb\xbf" + ONE.encode(), lambda p: len(p.specs) == 1),
    "windows line ends": (ONE.replace("\n", "\r\n"), lambda p: len(p.specs) == 1),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_accepted(name, where):
    text, holds = ACCEPTED[name]
    assert holds(load(text))


def test_a_case_is_found_from_the_plans_own_directory(where, monkeypatch):
    load(GOOD)
    monkeypatch.chdir("/")
    assert schema.load(where / "plan.yaml").specs[0].case == str(where / "cases" / "channel")


def test_a_copy_is_read_as_if_it_were_the_plan_file(where, monkeypatch):
    needs = ("limit", "devices")  # a cluster
    lines = [line for line in GOOD.splitlines() if not line.strip().startswith(needs)]
    submitted = "\n".join(lines).encode()
    (where / "plan.yaml").write_text("edited since")
    (where / "copy").write_bytes(submitted)
    monkeypatch.chdir("/")
    found = schema.load(where / "plan.yaml", submitted)
    assert found.specs[0].case == str(where / "cases" / "channel")
    with pytest.raises(BadInput, match=f"{where}/plan.yaml:1: "):
        schema.load(where / "plan.yaml", b"3")
    words = ["run", "--dry-run", str(where / "plan.yaml"), "-o", str(where / "out")]
    assert main.main(words) == 2
    assert main.main([*words, "--plan-copy", str(where / "copy")]) == 0
    assert main.main([*words, "--plan-copy", str(where / "none")]) == 2


def test_the_entrys_own_path_is_searched(where):
    (where / "own").mkdir()
    (where / "own" / "special").symlink_to(where / "bin" / "solver")
    text = ONE.replace("solver", "special")
    with pytest.raises(BadInput, match="special"):
        load(text)
    assert load(f"{text}    environment: {{PATH: {where / 'own'}}}\n").specs


WIDTHS = {
    "3": (),
    "2-2": (),
    "[4]": (),
    "1-4": (1, 2, 3, 4),
    "3-10": (3, 4, 5, 6, 7, 8, 9, 10),
    "1-9": (1, 2, 4, 8, 9),
    "6-100": (6, 8, 16, 32, 64, 100),
    "[8, 1, 2]": (1, 2, 8),
}


@pytest.mark.parametrize("ranks", WIDTHS)
def test_the_numbers_of_ranks_that_are_allowed(ranks, where):
    (spec,) = load(ONE.replace("ranks: 2", f"ranks: {ranks}")).specs
    assert spec.widths == WIDTHS[ranks]
    assert spec.widths == () or spec.ranks == spec.widths[-1]
    assert spec.weights == (1.0,) * spec.ranks


def test_what_is_said_of_moulding_reaches_the_simulation(where):
    (bare,) = load(ONE).specs
    assert (bare.application, bare.objective, bare.checkpoint) == ("generic", "throughput", False)
    text = entry("application", "openfoam") + "    objective: turnaround\n    checkpoint: allowed\n"
    (spec,) = load(text).specs
    assert (spec.application, spec.objective, spec.checkpoint) == ("openfoam", "turnaround", True)
    commands = "{write: solver stop, restart: solver step}"
    (spec,) = load(entry("checkpoint", commands)).specs
    assert (spec.checkpoint, spec.write, spec.restart) == (True, "solver stop", "solver step")
    (where / "bin" / "solver").rename(where / "bin" / "ownFoam")
    (spec,) = load(ONE.replace("solver", "ownFoam")).specs
    assert spec.application == "openfoam"


def test_the_users_own_starter_may_take_the_ranks(where):
    (where / "bin" / "mpirun").symlink_to(where / "bin" / "solver")
    text = ONE.replace("ranks: 2", "ranks: 1-2").replace(
        "command: ", "command: mpirun -np {ranks} "
    )
    (spec,) = load(text).specs
    assert spec.command == ("mpirun", "-np", "{ranks}", "solver")
    for words in (
        "-np 2 solver",
        "-n {ranks} solver",
        "-np 1 solver : -np 1 solver",
        "solver -n 4",
    ):
        assert load(ONE.replace("command: solver", f'command: "mpirun {words}"')).specs


def test_a_line_of_dovetail_is_run_by_this_one(where):
    done = subprocess.run(
        [*command_line.program("dovetail --version")], capture_output=True, text=True, cwd="/"
    )
    assert done.stdout == f"dovetail {__version__}\n"
    assert command_line.program("mesh 'a b'") == ["mesh", "a b"]


# --- The manual page ---


def test_every_key_is_in_the_manual_page():
    page = (ROOT / "doc" / "dovetail-plan.5").read_text()
    documented = {line.split()[2] for line in page.splitlines() if line.startswith(".It Ic ")}
    models = (schema._Entry, schema._Phase, schema._Plan)
    assert documented == {key for model in models for key in model.model_fields}


def test_every_name_that_is_taken_is_in_the_manual_page():
    page = (ROOT / "doc" / "dovetail-plan.5").read_text()
    listed = page.partition("none the name of what a run itself puts beside")[2]
    assert set(schema._TAKEN) <= {*re.findall(r"[\w-]+", listed.partition(".It Ic case")[0])}


def test_every_example_is_a_good_plan(monkeypatch):
    """But for programs and cases of OpenFOAM, where that is not installed."""
    monkeypatch.setattr(command_line, "check", lambda *_: None)
    monkeypatch.setattr(os.path, "isdir", lambda _: True)
    found = sorted((ROOT / "examples").glob("*.yaml"))
    examples = [example for example in found if "\nsimulations:" in example.read_text()]
    assert examples
    for example in examples:
        assert schema.load(example).specs


def test_a_limit_under_twice_the_request_is_warned_of_with_the_reason(where):
    (line,) = schema.warnings(load(GOOD.replace("limit: 2.5", "limit: 1.5")))
    assert line.startswith("channel: a limit of 1.5 times the request may slow it down, since")
    (line,) = schema.warnings(load(entry("phases", "[{requests: [1, 1], limit: 1.2}]")))
    assert line.startswith("a: a limit of 1.2 times")
    assert "3.7 times slower" in line
    for text in (GOOD, GOOD.replace("limit: 2.5", "limit: 2"), ONE):
        assert schema.warnings(load(text)) == []


IMAGE = entry("image", "registry.example.org:5000/group/solver:1")


def test_an_image_arrives_and_what_is_in_it_is_not_looked_for_here(where):
    more = "    pull_policy: Always\n    pull_secret: mine\n    prepare: [whatever -x]\n"
    (spec,) = load(IMAGE.replace("command: solver", "command: /opt/own/prog") + more).specs
    assert spec.image == "registry.example.org:5000/group/solver:1"
    assert (spec.pull_policy, spec.pull_secret) == ("Always", "mine")
    assert (spec.command, spec.prepare) == (("/opt/own/prog",), ("whatever -x",))
    assert load(ONE).specs[0].image == ""
    for name in ("solver", "localhost/a/b", "a.b/c__d:T-1", "h:5/x@sha256:" + 64 * "0"):
        assert load(entry("image", f"'{name}'")).specs[0].image == name


def test_an_image_without_pods_is_refused(where, capsys):
    (where / "plan.yaml").write_text(IMAGE)
    assert main.main(["run", "plan.yaml", "-o", "out"]) == 2
    said = capsys.readouterr().err
    assert "simulation a has an image, and only pods can run from one; leave the key out" in said
    assert not (where / "out").exists()


def test_a_limit_without_pods_is_refused(where, capsys):
    (where / "plan.yaml").write_text(entry("limit", 3))
    assert main.main(["run", "--dry-run", "plan.yaml", "-o", "out"]) == 2
    assert "simulation a has a limit, and only pods can have one" in capsys.readouterr().err
