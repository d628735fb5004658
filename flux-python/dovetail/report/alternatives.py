# SPDX-License-Identifier: LGPL-3.0-or-later
"""What else could have been done with the same queue, as measured.

In and out: `alternatives.json` in a run's output directory. `dovetail bench demo` runs the
alternatives and writes them here; the summary and the report show them beside Dovetail.

    {"schema": 1, "cores": 2, "alternatives": [
      {"family": "pitz", "name": "one after the other", "makespan_s": [39.1, 38.7, 39.4],
       "ranks": 2, "at_once": 1}]}

Invariants: every time in the file was measured, over the family's whole queue, in seconds;
one entry for each family and name.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterable
from typing import Annotated, Final, Literal, Optional

import pydantic

from dovetail.core.errors import BadInput
from dovetail.host.private_files import write_whole

FILE = "alternatives.json"
SEQUENTIAL: Final = "one after the other"
NAIVE: Final = "plain mpirun at once"
FEWER: Final = "fewer ranks side by side"
DOVETAIL: Final = "dovetail"

Name = Literal[
    "one after the other", "plain mpirun at once", "fewer ranks side by side", "dovetail"
]
Seconds = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]


class Alternative(pydantic.BaseModel):
    """One way to run a family's queue.

    `makespan_s` holds one time per repeat, `ranks` each simulation's ranks and `at_once` how
    many simulations ran side by side (None if not fixed). All had as many `cores` as the file
    says (None: as the run).
    """

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", strict=True)

    family: str
    name: Name
    makespan_s: Annotated[list[Seconds], pydantic.Field(min_length=1)]
    ranks: Annotated[int, pydantic.Field(gt=0)]
    at_once: Optional[Annotated[int, pydantic.Field(gt=0)]] = None  # noqa: UP045 (python 3.9)
    cores: Optional[float] = pydantic.Field(default=None, exclude=True)  # noqa: UP045 (python 3.9)

    @property
    def median(self) -> float:
        """The middle repeat, seconds; the mean of the middle two of an even number."""
        times = sorted(self.makespan_s)
        half = len(times) // 2
        return times[half] if len(times) % 2 else (times[half - 1] + times[half]) / 2

    @property
    def spread(self) -> tuple[float, float]:
        """The fastest and the slowest repeat, seconds."""
        return min(self.makespan_s), max(self.makespan_s)


class _File(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=True)

    schema_: Literal[1] = pydantic.Field(alias="schema")
    cores: Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)]
    alternatives: list[Alternative]


def read(directory: pathlib.Path) -> list[Alternative]:
    """The alternatives measured for the run in `directory`; none if it has no such file.

    Raises BadInput where the file is damaged, with the key at fault.
    """
    path = directory / FILE
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from error
    try:
        file = _File.model_validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "file"
        raise BadInput(f"{path}: {where}: {first['msg']}") from error
    keys = [(one.family, one.name) for one in file.alternatives]
    for key in keys:
        if keys.count(key) > 1:
            raise BadInput(
                f"{path}: {key[0]!r}, {key[1]!r} is there twice; one entry holds all repeats"
            )
    return [one.model_copy(update={"cores": file.cores}) for one in file.alternatives]


def write(directory: pathlib.Path, cores: float, alternatives: Iterable[Alternative]) -> None:
    """Put the alternatives beside the event log, replacing the file in one step."""
    data = {
        "schema": 1,
        "cores": cores,
        "alternatives": [one.model_dump() for one in alternatives],
    }
    write_whole(directory / FILE, json.dumps(data, indent=1) + "\n")
