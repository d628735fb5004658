# SPDX-License-Identifier: LGPL-3.0-or-later
"""What things cost against how many there are: ranks, slices, pods, brokers.

Inputs: which of these, the number of rounds. Outputs: `Claim`s; where something is to grow no
faster than its number, one with what it costs for each of the most against each of fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dovetail.bench.harness import Claim, Progress
from dovetail.bench.scale import brokers, ranks, slices
from dovetail.core.errors import BadInput


def _pods(scratch: Path, repeat: int, progress: Progress) -> list[Claim]:
    """See `pods`, whose client of Kubernetes is slow to load: every --help loads this."""
    from dovetail.bench.scale import pods

    return pods.pods(scratch, repeat, progress)


PARTS: dict[str, Callable[[Path, int, Progress], list[Claim]]] = {
    "ranks": ranks.ranks,
    "slices": slices.slices,
    "pods": _pods,
    "brokers": brokers.brokers,
}


def check(names: Sequence[str]) -> None:
    """Raise BadInput where one of the names is none of a part."""
    for name in names:
        if name not in PARTS:
            raise BadInput(f"scale: there is nothing called {name!r}; there are {', '.join(PARTS)}")


def scale(scratch: Path, repeat: int, progress: Progress, names: Sequence[str] = ()) -> list[Claim]:
    """All of `PARTS`, or those of these names."""
    claims: list[Claim] = []
    for name in dict.fromkeys(names) or PARTS:
        progress(f"scale of {name}")
        place = scratch / name
        place.mkdir()
        claims += PARTS[name](place, repeat, progress)
    return claims
