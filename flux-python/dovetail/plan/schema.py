# SPDX-License-Identifier: LGPL-3.0-or-later
"""Plan files: what `dovetail run` is asked to do, checked before anything starts.

Input: a YAML file, see dovetail-plan(5). Output: one Spec per simulation, and Limits.

Invariants: a plan is either usable as a whole or refused with one line per error, each with
file, line and key; nothing is written. Every key is in dovetail-plan(5), by a test.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Optional

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import ErrorDetails

from dovetail.core import cpu_requests, programs, units
from dovetail.core.errors import BadInput
from dovetail.core.protocol import PlanPhase, Spec
from dovetail.core.units import show
from dovetail.host import devices
from dovetail.plan import command_line
from dovetail.plan.yaml_lines import Key, YamlFile

MAX_SIMULATIONS = 10_000
MAX_RANKS = 100_000
MAX_DEVICES = 1000
MAX_ERRORS = 20
# What is beside its simulations' directories: in shared memory, in its own, and in control groups.
_TAKEN = ("owner", "kubernetes", "metrics-token", "tasks")
_PART = r"[a-z0-9]+(?:(?:[._]|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(  # a registry may have upper-case letters and a port
    rf"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]+)?/)?{_PART}(?:/{_PART})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?", re.ASCII
)  # fmt: skip
_SECRET = re.compile(r"[a-z0-9](?:[-.a-z0-9]{0,251}[a-z0-9])?", re.ASCII)
_RESOURCE = re.compile(
    r"(?=.{1,120}$)[a-z0-9]([-a-z0-9.]*[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?",
    re.ASCII,
)
_HOW_MANY = ("-np", "-n", "--np", "--n")  # of a program that starts ranks
SMALL_RANGE = 8
"""A range of up to so many numbers of ranks means each of them, a wider one the powers of two."""


@dataclass(frozen=True)
class Limits:
    """What the whole run may use; None where the plan leaves it to the executor.

    `cpus` in millicores, `memory` in bytes, `max_packed` simulations at once.
    """

    cpus: int | None = None
    memory: int | None = None
    max_packed: int | None = None


@dataclass(frozen=True)
class Plan:
    """A checked plan: simulations in the order of the file, and limits."""

    specs: tuple[Spec, ...]
    limits: Limits


def load(path: str | os.PathLike[str], content: bytes | None = None) -> Plan:
    """Read and check the plan file `path`, or its `content` as it was read from there earlier.

    Raises BadInput with a line for each error; the first one comes first in the file.
    """
    file = YamlFile(Path(path), content)
    if not isinstance(file.value, dict):
        raise file.bad(1, "a plan is a mapping with the key `simulations`; see dovetail-plan(5)")
    errors: list[tuple[int, str]] = []
    plan = None
    try:
        base = Path(os.path.abspath(file.path)).parent
        plan = _Plan.model_validate(file.value, context={"base": base})
    except ValidationError as error:
        for detail in error.errors():
            line = file.line(detail["loc"], of_key=detail["type"] == "extra_forbidden")
            errors.append((line, f"{_dotted(detail['loc'])}: {_explain(detail)}"))
    for where, why in _conflicts(file.value, plan):
        errors.append((file.line(where), f"{_dotted(where)}: {why}"))
    if errors or plan is None:
        raise BadInput("\n".join(_listed(file.path, errors)))
    specs = tuple(spec for entry in plan.simulations for spec in entry.specs())
    return Plan(specs, Limits(plan.cpus, plan.memory, plan.max_packed))


def warnings(asked: Plan) -> list[str]:
    """What is allowed, and seldom meant, in words."""
    limits = {
        spec.family: min([one.limit for one in spec.phases] or [spec.limit]) for spec in asked.specs
    }
    return [
        f"{name}: a limit of {limit:g} times the request may slow it down, since ranks that wait "
        f"use it up: {cpu_requests.THROTTLED}; {cpu_requests.LIMIT:g} or more is better, "
        "and no limit is best"
        for name, limit in limits.items()
        if 0 < limit < cpu_requests.LIMIT
    ]


def _runnable(words: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """The words, if the first of them is a program, on whatever ranks.

    What an image has is not known here; the nodes are asked before anything starts.
    """
    environment = info.data.get("environment", {})
    for ranks in info.data.get("ranks") or (1,):
        program = programs.filled(words[0], ranks, (1.0,) * ranks)
        if not info.data.get("image"):
            command_line.check(program, info.data.get("case"), environment)
        if program == words[0]:
            break
    return words


def _runnable_line(line: str, info: ValidationInfo) -> str:
    """A prepare line, if its first word is a program."""
    _runnable(command_line.split(line), info)
    return line


def _widths(value: object) -> tuple[int, ...]:
    """Numbers of ranks, ascending, from a number, a range such as `1-4`, or a list."""
    if isinstance(value, str) and (found := re.fullmatch(r"(\d{1,9})-(\d{1,9})", value, re.ASCII)):
        first, last = _rank_count(int(found[1])), _rank_count(int(found[2]))
        if first > last:
            raise ValueError(f"{show(value)} begins above its end; {last}-{first} would be right")
        if last - first < SMALL_RANGE:
            return tuple(range(first, last + 1))
        powers = (1 << bit for bit in range(MAX_RANKS.bit_length()))
        return tuple(sorted({first, last, *(one for one in powers if first < one < last)}))
    if not isinstance(value, list):
        return (_rank_count(value),)
    counts = [_rank_count(one) for one in value]
    twice = next((one for one in counts if counts.count(one) > 1), None)
    if twice is not None:
        raise ValueError(f"{twice} is twice in the list")
    if not counts:
        raise ValueError("an empty list; give at least one number of ranks")
    return tuple(sorted(counts))


def _rank_count(value: object) -> int:
    """One number of ranks."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(
            f"{show(value)} is not a whole number, a range such as 1-4, or a list such as [1, 2, 4]"
        )
    if not 1 <= value <= MAX_RANKS:
        bound = "at least 1" if value < 1 else f"at most {MAX_RANKS}"
        raise ValueError(f"{show(value)} is not {bound}")
    return value


def _started_by_us(words: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """The words, if they leave the number of ranks to us where there are several.

    Where there is one it has to be that which they give first, if they do, and for one program.
    """
    widths: tuple[int, ...] = info.data.get("ranks") or ()
    several = len(widths) > 1
    given = words[2] if words[2:] and words[1] in _HOW_MANY and ":" not in words else ""
    told = programs.is_starter(words[0]) and given.isdecimal() and widths and not several
    if told and int(given) != widths[0]:
        raise ValueError(
            f"{show(words[0])} would start {_many(int(given), 'rank')}, and `ranks` is "
            f"{widths[0]}; give both the same, or write `{words[0]} {words[1]} {{ranks}}`"
        )
    if several and programs.is_starter(words[0]) and not any(map(programs.has_place, words)):
        raise ValueError(
            f"{show(words[0])} says how many ranks there are, and they are to be chosen; leave it "
            f"out, or write `{words[0]} -np {{ranks}}`"
        )
    return words


def _unparted(words: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """The words, if LAMMPS is not to have partitions of other numbers of ranks than there are."""
    widths: tuple[int, ...] = info.data.get("ranks") or ()
    sizes = programs.partitions(words)
    ranks = sum(math.prod(map(int, size.split("x"))) for size in sizes)
    if sizes and widths and widths != (ranks,):
        raise ValueError(
            f"its partitions {show(' '.join(sizes))} are {_many(ranks, 'rank')}, so `ranks` has to "
            f"be {ranks}"
        )
    return words


@dataclass(frozen=True)
class _Checkpoint:
    """Whether there are checkpoints, and the program's own commands for them."""

    allowed: bool = False
    write: str = ""
    restart: str = ""


def _checkpoint(value: object) -> _Checkpoint:
    """What the key says, a word or two command lines."""
    if value in ("allowed", "never"):
        return _Checkpoint(value == "allowed")
    names = ("write", "restart")
    if not isinstance(value, dict):
        raise ValueError(
            f"{show(value)} is not 'allowed' or 'never', or the program's commands "
            "`{write: ..., restart: ...}`"
        )
    for name in names:
        if not isinstance(value.get(name), str) or not value[name].strip():
            raise ValueError(f"it needs a command line as `{name}`; see dovetail-plan(5)")
    for name in value:
        if name not in names:
            raise ValueError(f"{show(name)} is not known here; there are `write` and `restart`")
    return _Checkpoint(True, value["write"], value["restart"])


# --- The file's schema; the field order matters, since later fields look at earlier ones ---
# ruff: noqa: UP045 (pydantic evaluates the types, and python 3.9 has no `X | None`)


def _devices(asked: dict[str, int]) -> dict[str, int]:
    """Names of devices, and how many of each."""
    for name, number in asked.items():
        known = name in devices.KINDS or devices.is_path(name)
        if not known and (not _RESOURCE.fullmatch(name) or "kubernetes.io" in name):
            raise ValueError(
                f"{show(name)} is not rdma, efa or gpu, nor the path of a device below /dev, nor a "
                "resource that a cluster counts, such as nvidia.com/gpu"
            )
        if not 1 <= number <= MAX_DEVICES:
            raise ValueError(f"{number} of {name} is not from 1 to {MAX_DEVICES}")
    return asked


def _residual(value: object) -> float:
    """A residual that ends a phase."""
    if isinstance(value, str) and re.fullmatch(r"\d+(\.\d*)?[eE][+-]?\d{1,3}", value, re.ASCII):
        value = float(value)  # 1e-3, which is text to YAML
    number = units.number(value)
    if not 0 < number <= 1:
        raise ValueError(f"{show(value)} is not a residual: a number greater than 0, up to 1")
    return number


_Limit = Annotated[float, BeforeValidator(units.number), Field(ge=1, le=1000)]


class _Until(BaseModel):
    """What ends a phase."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    iteration: int = Field(0, ge=1, le=10**12)
    residual: Annotated[float, BeforeValidator(_residual)] = 0.0


class _Phase(BaseModel):
    """One item of an entry's `phases`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    until: Optional[_Until] = None
    requests: list[Annotated[int, BeforeValidator(units.cpus)]] = Field(
        description="the CPU of each rank, e.g. [250m, 750m]"
    )
    limit: Optional[_Limit] = None


class _Entry(BaseModel):
    """One entry of `simulations`. Descriptions are what a user reads when a key is missing."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    name: str = Field(description="a short name, which becomes part of pod names")
    environment: dict[str, str] = {}
    case: str = Field(description="the case directory, relative to the plan file")
    image: str = ""
    pull_policy: Literal["IfNotPresent", "Always", "Never"] = "IfNotPresent"
    pull_secret: str = ""
    ranks: Annotated[tuple[int, ...], BeforeValidator(_widths)] = Field(
        description="the number of MPI ranks, or a range such as 1-4"
    )
    weights: Optional[list[Annotated[float, BeforeValidator(units.weight)]]] = None
    command: Annotated[
        tuple[str, ...],
        BeforeValidator(command_line.split),
        AfterValidator(_started_by_us),
        AfterValidator(_unparted),
        AfterValidator(_runnable),
    ] = Field(description="the program and its arguments, e.g. simpleFoam -parallel")
    application: Optional[Literal["openfoam", "lammps", "generic"]] = None
    prepare: list[Annotated[str, AfterValidator(_runnable_line)]] = []
    count: int = Field(1, ge=1, le=MAX_SIMULATIONS)
    slowdown: Annotated[float, BeforeValidator(units.number)] = Field(2.0, ge=1, le=1000)
    memory: Annotated[int, BeforeValidator(units.memory)] = 0
    deadline: Optional[Annotated[float, BeforeValidator(units.seconds)]] = None
    iterations: int = Field(0, ge=1, le=10**12)
    ranks_per_pod: int = Field(0, ge=1, le=MAX_RANKS)
    devices: Annotated[dict[str, int], AfterValidator(_devices)] = {}
    limit: Annotated[float, BeforeValidator(units.number)] = Field(0.0, ge=1, le=1000)
    phases: list[_Phase] = []
    objective: Literal["throughput", "turnaround"] = "throughput"
    checkpoint: Annotated[_Checkpoint, BeforeValidator(_checkpoint)] = _Checkpoint()
    rebalance: Literal["allowed", "never"] = "allowed"
    stage: Literal["live", "end"] = "live"

    @field_validator("name")
    @classmethod
    def _name(cls, name: str) -> str:
        if not re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name, re.ASCII):
            raise ValueError(
                f"{show(name)} is not up to 40 lower-case letters, digits and hyphens, "
                "from a letter to a letter or digit"
            )
        if name in _TAKEN:
            raise ValueError(f"{name!r} is taken by the run itself; choose another name")
        return name

    @field_validator("environment")
    @classmethod
    def _environment(cls, pairs: dict[str, str]) -> dict[str, str]:
        for key, value in pairs.items():
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key, re.ASCII):
                raise ValueError(f"{show(key)} is not a name of letters, digits and underscores")
            if "\0" in value:
                raise ValueError(f"the value of {key} has a NUL in it")
        return pairs

    @field_validator("image")
    @classmethod
    def _image(cls, image: str) -> str:
        if len(image) > 255 or not _IMAGE.fullmatch(image):
            raise ValueError(
                f"{show(image)} is not the name of an image, such as localhost/solver:1 or "
                "registry.example.org:5000/group/solver:1; see dovetail-kubernetes(7)"
            )
        return image

    @field_validator("pull_policy", "pull_secret")
    @classmethod
    def _pulled(cls, value: str, info: ValidationInfo) -> str:
        if not info.data.get("image"):
            raise ValueError("only of an image; the simulation has none")
        if info.field_name == "pull_secret" and not _SECRET.fullmatch(value):
            raise ValueError(f"{show(value)} is not the name of a Secret")
        return value

    @field_validator("case")
    @classmethod
    def _case(cls, case: str, info: ValidationInfo) -> str:
        command_line.check_name(case)
        path = os.path.normpath(os.path.join((info.context or {})["base"], case))
        try:
            found = bool(case) and os.path.isdir(path)
        except ValueError:
            found = False
        if not found:
            raise ValueError(f"{show(case)} is not a directory (looked for {show(path)})")
        return path

    @field_validator("weights")
    @classmethod
    def _weights(cls, weights: list[float] | None, info: ValidationInfo) -> list[float] | None:
        widths = info.data.get("ranks")
        if weights is None or widths is None:
            return weights
        if len(weights) != widths[-1]:
            most = ", the most that it may run on" if len(widths) > 1 else ""
            raise ValueError(
                f"{_many(len(weights), 'weight')} for {_many(widths[-1], 'rank')}{most}; "
                "give one weight per rank"
            )
        return weights

    @field_validator("ranks_per_pod")
    @classmethod
    def _group(cls, size: int, info: ValidationInfo) -> int:
        widths = info.data.get("ranks", (size,))
        if size > widths[0]:
            fewest = " that it may run on" if len(widths) > 1 else ""
            raise ValueError(f"{size} is more than the {_many(widths[0], 'rank')}{fewest}")
        return size

    @field_validator("phases")
    @classmethod
    def _phases(cls, phases: list[_Phase], info: ValidationInfo) -> list[_Phase]:
        widths, limit = info.data.get("ranks"), info.data.get("limit", 0.0)
        if not phases:
            raise ValueError("an empty list; give at least one phase, or leave the key out")
        if widths is not None and len(widths) > 1:
            raise ValueError("each rank has its request, so `ranks` has to be one number")
        last = 0
        for number, one in enumerate(phases, 1):
            if widths is not None and len(one.requests) != widths[0]:
                raise ValueError(
                    f"{_many(len(one.requests), 'request')} in phase {number} for "
                    f"{_many(widths[0], 'rank')}; give one per rank"
                )
            if number == len(phases):
                if one.until is not None:
                    raise ValueError("the last phase ends with the simulation; it has no `until`")
            elif one.until is None:
                raise ValueError(
                    f"phase {number} does not end; give it `until`, which only the last has not"
                )
            elif not (one.until.iteration or one.until.residual):
                raise ValueError(
                    f"phase {number} needs an `iteration` or a `residual` in its `until`"
                )
            elif 0 < one.until.iteration <= last:
                raise ValueError(
                    f"phase {number} ends at iteration {one.until.iteration}, the one before it at "
                    f"{last}; give them in ascending order"
                )
            else:
                last = max(last, one.until.iteration)
            if bool(one.limit or limit) != bool(phases[0].limit or limit):
                raise ValueError(
                    f"only one of the phases 1 and {number} has a limit, and what a pod has cannot "
                    "be taken from it again; give `limit` to each phase, or to the simulation"
                )
        return phases

    @field_validator("checkpoint")
    @classmethod
    def _commands(cls, asked: _Checkpoint, info: ValidationInfo) -> _Checkpoint:
        command = info.data.get("command")
        if not asked.allowed or command is None:
            return asked
        own = info.data.get("application") or programs.application_of(command)
        if own == "generic" and not asked.write:
            raise ValueError(
                "only of OpenFOAM and LAMMPS it is known how they go on from what they have "
                "written; give this program's commands, `{write: ..., restart: ...}`"
            )
        if own != "generic" and asked.write:
            raise ValueError(f"how {own} does it is known; write `checkpoint: allowed`")
        for line in filter(None, (asked.write, asked.restart)):
            _runnable_line(line, info)
        return asked

    def names(self) -> list[str]:
        """The simulations' names: the entry's own, with a number from 1 if there are several."""
        if self.count == 1:
            return [self.name]
        return [f"{self.name}-{index}" for index in range(1, self.count + 1)]

    def specs(self) -> list[Spec]:
        """The simulations."""
        application = self.application or programs.application_of(self.command)
        # Without `-parallel` each rank of OpenFOAM's solvers would compute the whole case.
        whole = self.ranks[-1] > 1 and application == "openfoam" and "-parallel" not in self.command
        first = Spec(
            name=self.name,
            family=self.name,
            case=self.case,
            ranks=self.ranks[-1],
            weights=tuple(self.weights or [1.0] * self.ranks[-1]),
            command=self.command,
            prepare=tuple(self.prepare),
            slowdown=self.slowdown,
            memory=self.memory,
            deadline=self.deadline,
            iterations=self.iterations,
            ranks_per_pod=self.ranks_per_pod,
            environment=tuple(self.environment.items()),
            limit=self.limit,
            phases=tuple(
                PlanPhase(
                    one.until.iteration if one.until else 0,
                    tuple(one.requests),
                    one.limit or self.limit,
                    one.until.residual if one.until else 0.0,
                )
                for one in self.phases
            ),
            widths=self.ranks if len(self.ranks) > 1 or whole else (),
            application=application,
            objective=self.objective,
            checkpoint=self.checkpoint.allowed,
            write=self.checkpoint.write,
            restart=self.checkpoint.restart,
            rebalance=self.rebalance == "allowed",
            live=self.stage == "live",
            image=self.image,
            pull_policy=self.pull_policy,
            pull_secret=self.pull_secret,
            devices=tuple(self.devices.items()),
        )
        return [dataclasses.replace(first, name=name) for name in self.names()]


class _Plan(BaseModel):
    """The whole file."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    cpus: Optional[Annotated[int, BeforeValidator(units.cpus)]] = None
    memory: Optional[Annotated[int, BeforeValidator(units.memory)]] = None
    max_packed: Optional[int] = Field(None, ge=1, le=MAX_SIMULATIONS)
    simulations: list[_Entry] = Field(min_length=1, description="the list of what to run")


# --- What one field cannot see, and messages ---


def _conflicts(value: dict[str, Any], plan: _Plan | None) -> Iterator[tuple[Sequence[Key], str]]:
    """Names used twice and, once the entries are good, limits that they exceed together."""
    total = sum(entry.count for entry in plan.simulations) if plan else 0
    if total > MAX_SIMULATIONS:
        yield ("simulations",), f"{total} simulations are more than {MAX_SIMULATIONS}"
        return
    entries = value.get("simulations")
    seen: dict[str, int] = {}
    for index, entry in enumerate(entries if isinstance(entries, list) else []):
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str):
            continue
        # The entry's own name too: its simulations are a family of that name.
        names = [name, *(plan.simulations[index].names() if plan else [])]
        again = next((other for other in names if other in seen), None)
        if again is not None:
            where = f"simulations[{seen[again]}]"
            yield ("simulations", index, "name"), f"{show(again)} is also a name in {where}"
        seen.update(dict.fromkeys(names, index))
    if plan is None:
        return
    for index, checked in enumerate(plan.simulations):
        if plan.memory is not None and checked.memory > plan.memory:
            why = f"more than the plan's memory of {plan.memory} bytes, so it could never start"
            yield ("simulations", index, "memory"), why


def _explain(detail: ErrorDetails) -> str:
    """One of pydantic's errors, as what is wrong and what would be right."""
    kind, value, context = detail["type"], show(detail["input"]), detail.get("ctx", {})
    where = detail["loc"]
    model = _model(where)
    if kind == "value_error":
        return str(context["error"])
    if kind == "missing":
        return f"missing; give {model.model_fields[str(where[-1])].description}"
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(where[-1]), model.model_fields, 1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(model.model_fields)}"
        return f"unknown key; {hint}"
    if kind == "too_short":
        return "empty; give at least one simulation"
    if kind in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        return f"{value} is not {bound}"
    if kind == "literal_error":
        return f"{value} is not {context['expected']}"
    wanted = _TYPES.get(kind.partition("_")[0], detail["msg"])
    quote = "; put it in quotes" if kind == "string_type" and _is_scalar(detail["input"]) else ""
    return f"{value} is not {wanted}{quote}"


def _model(where: Sequence[Key]) -> type[BaseModel]:
    """What has the key at this place."""
    if where[0] != "simulations" or len(where) < 3:
        return _Plan
    if where[2] != "phases" or len(where) < 5:
        return _Entry
    return _Until if where[4] == "until" and len(where) > 5 else _Phase


_TYPES = {
    "int": "a whole number",
    "string": "text",
    "list": "a list",
    "dict": "a mapping of keys to values",
    "model": "a mapping of keys to values",
}


def _is_scalar(value: object) -> bool:
    return isinstance(value, (bool, int, float))


def _dotted(where: Sequence[Key]) -> str:
    """A path as `simulations[0].weights`."""
    text = ""
    for step in where:
        text += f"[{step}]" if isinstance(step, int) else f".{show(step)[1:-1]}"
    return text.lstrip(".")


def _listed(path: Path, errors: list[tuple[int, str]]) -> list[str]:
    """The errors by line, not too many of them."""
    lines = [f"{path}:{line}: {' '.join(why.split())}" for line, why in sorted(errors)]
    more = len(lines) - MAX_ERRORS
    return lines if more <= 0 else [*lines[:MAX_ERRORS], f"{path}: and {more} more errors"]


def _many(count: int, thing: str) -> str:
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"
