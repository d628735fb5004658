# SPDX-License-Identifier: LGPL-3.0-or-later
"""Plan files: the line that each bad one is refused with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from dovetail.core.errors import BadInput
from dovetail.host import install_paths
from dovetail.plan import schema
from support.plans import GOOD, ONE, entry, load

pytestmark = pytest.mark.unit


def changed(old, new):
    assert old in GOOD
    return GOOD.replace(old, new)


# Name of the case: the plan, and the beginning of the line it is refused with.
REFUSED = {
    "a name that the run takes itself": (
        ONE.replace("name: a", "name: tasks"),
        "2: simulations[0].name: 'tasks' is taken by the run itself",
    ),
    "an empty file": ("", "1: the file is empty"),
    "only a comment": ("# later\n", "1: the file is empty"),
    "a list": ("- a\n", "1: a plan is a mapping"),
    "a word": ("hello", "1: a plan is a mapping"),
    "not YAML": ("a: [1,\nb: 2\n", "3: expected ',' or ']'"),
    "a tab for indentation": ("simulations:\n\t- name: a\n", "2: found character '\\t'"),
    "two documents": (f"{ONE}---\n{ONE}", "6: "),
    "not UTF-8": (b"cpus: 2\nmemory: \xff\n", "2: not UTF-8"),
    "UTF-16": (ONE.encode("utf-16"), "1: not UTF-8"),
    "a control character": ("cpus: 2\nmemory: \x01\n", "2: a character that YAML"),
    "a key twice": (f"{ONE}    ranks: 3\n", "6: 'ranks' again; it is already in line 4"),
    "a top-level key twice": ("cpus: 1\ncpus: 2\n", "2: 'cpus' again"),
    "a key that is a number": ("1: 2\n", "1: a key that is not text"),
    "a key that is a list": ("? [a]\n: 2\n", "1: a key that is not text"),
    "a python object": ("cpus: !!python/object/apply:os.system [ls]\n", "1: !!python"),
    "a tag that does not fit": ("cpus: !!int two\n", "1: !!int is not supported"),
    "a number that is octal to YAML": (
        ONE.replace("ranks: ", "ranks: 01"),
        "4: 012 is octal to YAML; leave out the 0 in front",
    ),
    "text that is octal to YAML": (
        entry("environment", "{TILE: 07}"),
        "6: 07 is octal to YAML; leave out the 0 in front, or put it in quotes",
    ),
    "an alias of itself": ("simulations: &a [*a]\n", "1: an alias to something that contains"),
    "an alias that is not there": ("simulations: *a\n", "1: found undefined alias"),
    "a merge of a number": ("a: &a 1\nb: {<<: *a}\n", "2: << takes an alias of a mapping"),
    "an unknown key": (f"memroy: 8G\n{ONE}", "1: memroy: unknown key; did you mean memory?"),
    "an unknown key of a simulation": (
        entry("nodes", "4"),
        "6: simulations[0].nodes: unknown key; known: name, environment, case",
    ),
    "no simulations": ("cpus: 2\n", "1: simulations: missing; give the list"),
    "an empty list": ("simulations: []\n", "1: simulations: empty; give at least one"),
    "simulations that are a mapping": (
        "simulations: {a: 1}\n",
        "1: simulations: a mapping is not a list",
    ),
    "a simulation that is a word": (
        "simulations:\n  - channel\n",
        "2: simulations[0]: 'channel' is not a mapping",
    ),
    "a device that is none": (
        entry("devices", "{gpus: 1}"),
        "6: simulations[0].devices: 'gpus' is not rdma, efa or gpu, nor the path of a device",
    ),
    "a device outside of /dev": (
        entry("devices", "{/etc/passwd: 1}"),
        "6: simulations[0].devices: '/etc/passwd' is not rdma, efa or gpu",
    ),
    "a resource of Kubernetes itself": (
        entry("devices", "{kubernetes.io/cpu: 1}"),
        "6: simulations[0].devices: 'kubernetes.io/cpu' is not rdma",
    ),
    "no device at all": (
        entry("devices", "{gpu: 0}"),
        "6: simulations[0].devices: 0 of gpu is not from 1 to 1000",
    ),
    "half a device": (
        entry("devices", "{gpu: 0.5}"),
        "6: simulations[0].devices.gpu: 0.5 is not a whole number",
    ),
    "devices as a list": (
        entry("devices", "[gpu]"),
        "6: simulations[0].devices: a list is not a mapping",
    ),
    "no cpus at all": (changed("cpus: 2", "cpus: 0"), "1: cpus: '0' is not whole millicores"),
    "negative cpus": (changed("cpus: 2", "cpus: -2"), "1: cpus: '-2' is not a CPU quantity"),
    "cpus nan": (changed("cpus: 2", "cpus: .nan"), "1: cpus: 'nan' is not a CPU"),
    "cpus true": (changed("cpus: 2", "cpus: true"), "1: cpus: true is not a CPU"),
    "memory without a unit": (changed("8G", "8"), "2: memory: 8 is not an amount of memory"),
    "memory with a wrong unit": (changed("8G", "8GB"), "2: memory: '8GB' is not an amount"),
    "absurd memory": (changed("8G", "8000000T"), "2: memory: '8000000T' is not from 1M"),
    "a simulation larger than the memory": (
        changed("memory: 8G", "memory: 400M"),
        "13: simulations[0].memory: more than the plan's memory",
    ),
    "zero packed": (changed("max_packed: 4", "max_packed: 0"), "3: max_packed: 0 is not at least"),
    "half packed": (changed("max_packed: 4", "max_packed: 1.5"), "3: max_packed: 1.5 is not a wh"),
    "no name": (changed("- name: channel\n", "-\n"), "6: simulations[0].name: missing; give"),
    "an upper-case name": (
        changed("name: channel", "name: Channel"),
        "5: simulations[0].name: 'Channel' is not",
    ),
    "a name with a space": (changed("name: channel", "name: my channel"), "5: simulations[0].name"),
    "a name that ends in a hyphen": (
        changed("name: channel", "name: a-"),
        "5: simulations[0].name",
    ),
    "a name of a line end": (changed("name: channel", 'name: "a\\n"'), "5: simulations[0].name"),
    "a long name": (changed("name: channel", f"name: {'a' * 41}"), "5: simulations[0].name"),
    "a name that YAML takes for a truth value": (
        changed("name: channel", "name: no"),
        "5: simulations[0].name: false is not text; put it in quotes",
    ),
    "a name twice": (
        f"{ONE}{ONE.partition(chr(10))[2]}",
        "6: simulations[1].name: 'a' is also a name in simulations[0]",
    ),
    "a name that numbering makes twice": (
        entry("count", "2") + ONE.partition("\n")[2].replace("name: a", "name: a-2"),
        "7: simulations[1].name: 'a-2' is also a name in simulations[0]",
    ),
    "a name that numbering hides": (
        entry("count", "2") + ONE.partition("\n")[2],
        "7: simulations[1].name: 'a' is also a name in simulations[0]",
    ),
    "a case that is not there": (
        changed("cases/channel", "cases/chanel"),
        "6: simulations[0].case: 'cases/chanel' is not a directory",
    ),
    "a case that is a file": (
        changed("cases/channel", "bin/solver"),
        "6: simulations[0].case: 'bin/solver' is not a directory",
    ),
    "an empty case": (changed("cases/channel", "''"), "6: simulations[0].case: '' is not a dir"),
    "a case with a NUL": (changed("cases/channel", '"a\\0"'), "6: simulations[0].case: 'a\\x00'"),
    "a case that no file can be": (
        changed("cases/channel", '"\\ud800"'),
        "6: '\\ud800' is no text in UTF-8",
    ),
    "a word that is no text in UTF-8": (
        changed("solver -parallel", '[solver, "don\\udce9es.dat"]'),
        "9: 'don\\udce9es.dat' is no text in UTF-8",
    ),
    "half of a character in the environment": (
        changed("KEY: value", 'KEY: "\\ud83d"'),
        "18: '\\ud83d' is no text in UTF-8",
    ),
    "no ranks": (changed("ranks: 2", "ranks: 0"), "7: simulations[0].ranks: 0 is not at least 1"),
    "negative ranks": (changed("ranks: 2", "ranks: -2"), "7: simulations[0].ranks: -2 is not at"),
    "absurd ranks": (changed("ranks: 2", "ranks: 1000000"), "7: simulations[0].ranks: 1000000 is"),
    "ranks as text": (
        changed("ranks: 2", "ranks: '2'"),
        "7: simulations[0].ranks: '2' is not a wh",
    ),
    "ranks true": (changed("ranks: 2", "ranks: yes"), "7: simulations[0].ranks: true is not a wh"),
    "ranks of a million digits": (
        changed("ranks: 2", f"ranks: 0x{'f' * 100000}"),
        "7: simulations[0].ranks: a number of thousands of digits",
    ),
    "a range that begins above its end": (
        changed("ranks: 2", "ranks: 4-2"),
        "7: simulations[0].ranks: '4-2' begins above its end; 2-4 would be right",
    ),
    "a range from none": (
        changed("ranks: 2", "ranks: 0-2"),
        "7: simulations[0].ranks: 0 is not at",
    ),
    "a range that is endless": (changed("ranks: 2", "ranks: 2-"), "7: simulations[0].ranks: '2-'"),
    "an empty list of ranks": (
        changed("ranks: 2", "ranks: []"),
        "7: simulations[0].ranks: an empty list; give at least one",
    ),
    "a number of ranks twice": (
        changed("ranks: 2", "ranks: [1, 2, 1]"),
        "7: simulations[0].ranks: 1 is twice in the list",
    ),
    "ranks of half a number": (
        changed("ranks: 2", "ranks: [1, 2.5]"),
        "7: simulations[0].ranks: 2.5 is not a whole number, a range such as 1-4, or a list",
    ),
    "weights of some of several ranks": (
        changed("ranks: 2", "ranks: 1-3"),
        "8: simulations[0].weights: 2 weights for 3 ranks, the most that it may run on; give one",
    ),
    "a group larger than the fewest ranks": (
        changed("ranks: 2", "ranks: 1-2").replace("ranks_per_pod: 1", "ranks_per_pod: 2"),
        "16: simulations[0].ranks_per_pod: 2 is more than the 1 rank that it may run on",
    ),
    "a starter that says another number of ranks": (
        ONE.replace("ranks: 2", "ranks: 1-2").replace("command: solver", "command: mpirun solver"),
        "5: simulations[0].command: 'mpirun' says how many ranks there are, and they are to be "
        "chosen; leave it out, or write `mpirun -np {ranks}`",
    ),
    "a starter of another number of ranks": (
        ONE.replace("command: solver", "command: mpirun -np 4 solver"),
        "5: simulations[0].command: 'mpirun' would start 4 ranks, and `ranks` is 2; give both the "
        "same, or write `mpirun -np {ranks}`",
    ),
    "partitions for other ranks": (
        ONE.replace("ranks: 2", "ranks: 1-4").replace(
            "command: solver", "command: mpirun -np {ranks} lmp -p 2x1 2"
        ),
        "5: simulations[0].command: its partitions '2x1 2' are 4 ranks, so `ranks` has to be 4",
    ),
    "a program that is not there on some ranks": (
        ONE.replace("ranks: 2", "ranks: 1-2").replace("solver", '"./Allrun-{ranks}"'),
        "5: simulations[0].command: './Allrun-1' is not a program",
    ),
    "an unknown application": (
        entry("application", "openfaom"),
        "6: simulations[0].application: 'openfaom' is not 'openfoam', 'lammps' or 'generic'",
    ),
    "checkpoints of what has none": (
        entry("checkpoint", "allowed"),
        "6: simulations[0].checkpoint: only of OpenFOAM and LAMMPS it is known how they go on from "
        "what they have written; give this program's commands, `{write: ..., restart: ...}`",
    ),
    "commands for checkpoints that are known": (
        entry("checkpoint", "{write: solver stop, restart: solver step}")
        + "    application: lammps\n",
        "6: simulations[0].checkpoint: how lammps does it is known; write `checkpoint: allowed`",
    ),
    "half of what checkpoints need": (
        entry("checkpoint", "{write: solver stop}"),
        "6: simulations[0].checkpoint: it needs a command line as `restart`; see dovetail-plan(5)",
    ),
    "an unknown command for checkpoints": (
        entry("checkpoint", "{write: solver stop, restart: solver step, read: solver step}"),
        "6: simulations[0].checkpoint: 'read' is not known here; there are `write` and `restart`",
    ),
    "a command for checkpoints that is not there": (
        entry("checkpoint", "{write: slover stop, restart: solver step}"),
        "6: simulations[0].checkpoint: 'slover' is not found on PATH; install it or give its path",
    ),
    "an unknown objective": (
        entry("objective", "money"),
        "6: simulations[0].objective: 'money' is not 'throughput' or 'turnaround'",
    ),
    "a checkpoint that is a truth value": (
        entry("checkpoint", "yes"),
        "6: simulations[0].checkpoint: true is not 'allowed' or 'never', or the program's "
        "commands `{write: ..., restart: ...}`",
    ),
    "weights that do not match ranks": (
        changed("[1, 3]", "[1, 3, 5]"),
        "8: simulations[0].weights: 3 weights for 2 ranks; give one weight per rank",
    ),
    "a weight of zero": (changed("[1, 3]", "[1, 0]"), "8: simulations[0].weights[1]: 0 is not a w"),
    "a negative weight": (changed("[1, 3]", "[-1, 3]"), "8: simulations[0].weights[0]: -1 is not"),
    "a weight nan": (changed("[1, 3]", "[1, .nan]"), "8: simulations[0].weights[1]: nan is not"),
    "a weight inf": (changed("[1, 3]", "[.inf, 3]"), "8: simulations[0].weights[0]: inf is not"),
    "weights as text": (changed("[1, 3]", "1,3"), "8: simulations[0].weights: '1,3' is not a list"),
    "a weight that YAML takes for a text": (
        changed("[1, 3]", "[1e-5, 3]"),
        "8: simulations[0].weights[0]: '1e-5' is not a finite number; YAML takes it for a text: a",
    ),
    "weights on several lines": (
        changed("[1, 3]", "\n    - 1\n    - big"),
        "10: simulations[0].weights[1]: 'big' is not a finite number",
    ),
    "no command": (
        changed("    command: solver -parallel\n", ""),
        "5: simulations[0].command: missing; give the program",
    ),
    "an empty command": (changed("solver -parallel", "''"), "9: simulations[0].command: an empty"),
    "a command that is a number": (
        changed("solver -parallel", "5"),
        "9: simulations[0].command: 5",
    ),
    "a command with an open quote": (
        changed("solver -parallel", "solver 'a"),
        '9: simulations[0].command: "solver \'a": no closing quotation',
    ),
    "a command that is not installed": (
        changed("solver -parallel", "solvre -parallel"),
        "9: simulations[0].command: 'solvre' is not found on PATH",
    ),
    "a program that is not in the case": (
        changed("solver -parallel", "./Allclean"),
        "9: simulations[0].command: './Allclean' is not a program",
    ),
    "a redirection": (
        changed("solver -parallel", "solver > log"),
        "9: simulations[0].command: > in 'solver > log' needs a shell",
    ),
    "a pipe": (changed("solver -parallel", "solver | tee log"), "9: simulations[0].command: | in"),
    "a prepare step that is not installed": (
        changed("[mesh, ", "[mesh, mush, "),
        "10: simulations[0].prepare[1]: 'mush' is not found on PATH",
    ),
    "prepare as one line": (
        changed('[mesh, "decompose --ranks 2"]', "mesh"),
        "10: simulations[0].p",
    ),
    "prepare steps joined": (
        changed("[mesh, ", '["mesh && mesh", '),
        "10: simulations[0].prepare[0]: && in 'mesh && mesh' needs a shell",
    ),
    "no copies": (changed("count: 2", "count: 0"), "11: simulations[0].count: 0 is not at least 1"),
    "too many copies": (changed("count: 2", "count: 10001"), "11: simulations[0].count: 10001 is"),
    "too many copies in all": (
        entry("count", "9999") + ONE.partition("\n")[2].replace("name: a", "name: b\n    count: 2"),
        "2: simulations: 10001 simulations are more than 10000",
    ),
    "a slowdown below 1": (
        changed("slowdown: 1.5", "slowdown: 0.5"),
        "12: simulations[0].slowdown",
    ),
    "an infinite slowdown": (changed("slowdown: 1.5", "slowdown: .inf"), "12: simulations[0].slow"),
    "a slowdown as text": (
        changed("slowdown: 1.5", "slowdown: low"),
        "12: simulations[0].slowdown",
    ),
    "a deadline in words": (changed("10m", "tomorrow"), "14: simulations[0].deadline: 'tomorrow'"),
    "a deadline as on a clock": (changed("10m", "12:00"), "14: simulations[0].deadline: '12:00'"),
    "a deadline of zero": (changed("10m", "0s"), "14: simulations[0].deadline: '0s' is not a time"),
    "a deadline in a century": (changed("10m", "36500d"), "14: simulations[0].deadline: '36500d'"),
    "negative iterations": (
        changed("300", "-300"),
        "15: simulations[0].iterations: -300 is not at",
    ),
    "a group larger than the ranks": (
        changed("ranks_per_pod: 1", "ranks_per_pod: 3"),
        "16: simulations[0].ranks_per_pod: 3 is more than the 2 ranks",
    ),
    "an image with a blank": (
        entry("image", "'a solver'"),
        "6: simulations[0].image: 'a solver' is not the name of an image, such as localhost/",
    ),
    "an image in capitals": (entry("image", "Solver"), "6: simulations[0].image: 'Solver' is not"),
    "an image without a name": (entry("image", "''"), "6: simulations[0].image: '' is not the"),
    "how to pull no image": (
        entry("pull_policy", "Always"),
        "6: simulations[0].pull_policy: only of an image; the simulation has none",
    ),
    "an unknown way to pull": (
        entry("image", "solver") + "    pull_policy: Sometimes\n",
        "7: simulations[0].pull_policy: 'Sometimes' is not",
    ),
    "a secret that cannot be one": (
        entry("image", "solver") + "    pull_secret: My_Secret\n",
        "7: simulations[0].pull_secret: 'My_Secret' is not the name of a Secret",
    ),
    "a limit below what is asked for": (
        changed("limit: 2.5", "limit: 0.9"),
        "17: simulations[0].limit: 0.9 is not at least 1",
    ),
    "a limit in millicores": (
        changed("limit: 2.5", "limit: 500m"),
        "17: simulations[0].limit: '500m' is not a finite number",
    ),
    "no phase": (entry("phases", "[]"), "6: simulations[0].phases: an empty list; give at least"),
    "a phase without requests": (
        entry("phases", "[{until: {iteration: 5}}]"),
        "6: simulations[0].phases[0].requests: missing; give the CPU of each rank, e.g. [250m,",
    ),
    "a phase of other ranks": (
        entry("phases", "[{requests: [250m]}]"),
        "6: simulations[0].phases: 1 request in phase 1 for 2 ranks; give one per rank",
    ),
    "a phase that ends by nothing that is known": (
        entry("phases", "[{until: {time: 1}, requests: [1, 1]}, {requests: [1, 1]}]"),
        "6: simulations[0].phases[0].until.time: unknown key; known: iteration, residual",
    ),
    "a phase whose end is empty": (
        entry("phases", "[{until: {}, requests: [1, 1]}, {requests: [1, 1]}]"),
        "6: simulations[0].phases: phase 1 needs an `iteration` or a `residual` in its `until`",
    ),
    "a residual that no step ends with": (
        entry("phases", "[{until: {residual: 1.5}, requests: [1, 1]}, {requests: [1, 1]}]"),
        "6: simulations[0].phases[0].until.residual: 1.5 is not a residual: a number greater",
    ),
    "a phase that does not end": (
        entry("phases", "[{requests: [1, 1]}, {requests: [1, 1]}]"),
        "6: simulations[0].phases: phase 1 does not end; give it `until`, which only the last",
    ),
    "a last phase that ends": (
        entry("phases", "[{until: {iteration: 5}, requests: [1, 1]}]"),
        "6: simulations[0].phases: the last phase ends with the simulation; it has no `until`",
    ),
    "phases that go backwards": (
        entry(
            "phases",
            "[{until: {iteration: 5}, requests: [1, 1]}, {until: {iteration: 5}, requests: "
            "[1, 1]}, {requests: [1, 1]}]",
        ),
        "6: simulations[0].phases: phase 2 ends at iteration 5, the one before it at 5; give",
    ),
    "a limit in one phase alone": (
        entry(
            "phases", "[{until: {iteration: 5}, requests: [1, 1], limit: 2}, {requests: [1, 1]}]"
        ),
        "6: simulations[0].phases: only one of the phases 1 and 2 has a limit, and what a pod",
    ),
    "phases for ranks that are open": (
        entry("phases", "[{requests: [1, 1]}]").replace("ranks: 2", "ranks: 1-2"),
        "6: simulations[0].phases: each rank has its request, so `ranks` has to be one number",
    ),
    "a number in the environment": (
        changed("KEY: value", "KEY: 1"),
        "18: simulations[0].environment.KEY: 1 is not text; put it in quotes",
    ),
    "an environment that is a list": (
        changed("{KEY: value}", "[KEY=value]"),
        "18: simulations[0].environment: a list is not a mapping",
    ),
    "a bad name in the environment": (
        changed("KEY: value", "'A=B': value"),
        "18: simulations[0].environment: 'A=B' is not",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_file_line_and_key(name, where):
    text, begins = REFUSED[name]
    with pytest.raises(BadInput) as refused:
        load(text)
    lines = str(refused.value).split("\n")
    assert lines[0].startswith(f"plan.yaml:{begins}")
    assert len(lines) == 1
    assert len(lines[0]) < 300


def test_all_errors_are_told_one_line_each_in_the_order_of_the_file(where):
    text = changed("cpus: 2", "cpus: two").replace("ranks: 2", "ranks: x").replace("count", "cuont")
    with pytest.raises(BadInput) as refused:
        load(text)
    lines = str(refused.value).split("\n")
    assert [line.split(":")[1] for line in lines] == ["1", "7", "11"]


def test_hundreds_of_errors_are_cut_short(where):
    with pytest.raises(BadInput, match="and 380 more errors"):
        load("simulations: [{}" + ", {}" * 99 + "]")


@pytest.mark.parametrize(("case", "command"), [("cäse", "'true'"), (".", "./rün"), (".", "rün")])
def test_a_path_that_is_none_in_the_locale_is_told_so(case, command, tmp_path):
    """It is there, but has no name that could be asked for."""
    (tmp_path / "cäse").mkdir()
    (tmp_path / "rün").write_text("")
    (tmp_path / "rün").chmod(0o755)
    plan = f"simulations: [{{name: a, case: {case}, ranks: 1, command: {command}}}]"
    (tmp_path / "plan.yaml").write_text(plan, encoding="utf-8")
    words = [sys.executable, "-m", "dovetail", "run", "--dry-run", "plan.yaml"]
    ours = install_paths.package_environment({**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0"})
    done = subprocess.run(
        words, cwd=tmp_path, env=ours, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 2
    what = ascii(command if case == "." else case)
    assert f"{what} is no path in this locale; use a UTF-8 one\n" in done.stderr
    assert len(done.stderr.splitlines()) == 1


FILES = {
    "a directory": (lambda path: path.mkdir(), "not a file"),
    "a file that is not there": (lambda path: None, "No such file"),
    "a pipe": (lambda path: os.mkfifo(path), "not a file"),
    "a huge file": (lambda path: path.write_bytes(b"#" * (2 << 20)), "larger than"),
    "a bomb of copies": (
        lambda path: path.write_text(
            "simulations:\n"
            "  - &a {name: a, case: ., ranks: 100000, command: 'true', count: 10000}\n"
            + "  - *a\n"
            * 5000
        ),
        "50010000 simulations are more than",
    ),
    "a bomb of aliases": (
        lambda path: path.write_text(
            "a0: &a0 [x, x]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 20))
        ),
        "expands to more than",
    ),
    "a bomb of merges": (
        lambda path: path.write_text(
            "a0: &a0 {x: 1}\n"
            + "".join(
                f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}]}}\n" for i in range(1, 20)
            )
        ),
        "expands to more than",
    ),
    "a thousand brackets": (lambda path: path.write_text("[" * 1000), "nested deeper"),
    "brackets that close": (lambda path: path.write_text("[" * 60 + "]" * 60), "nested deeper"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_no_plans(name, tmp_path):
    make, reason = FILES[name]
    path = tmp_path / "plan.yaml"
    make(path)
    with pytest.raises(BadInput, match=reason):
        schema.load(path)
