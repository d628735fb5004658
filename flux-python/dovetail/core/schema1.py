# SPDX-License-Identifier: LGPL-3.0-or-later
"""Event logs of schema 1, as this version reads them.

Inputs: a header or a record of schema 1, as plain JSON. Outputs: the same in schema 2.

Schema 1 called a suspended simulation frozen.

Invariants: pure; a record that is damaged stays so, for the reader to refuse.
"""

from __future__ import annotations

from typing import Any

SCHEMA = 1
Record = dict[str, Any]


def header(old: Record) -> Record:
    """The first line."""
    return {**old, "capacity": _capacity(old.get("capacity"))}


def record(old: Record) -> Record:
    """Any other line."""
    new = dict(old)
    if "capacity" in old:
        new["capacity"] = _capacity(old["capacity"])
    if "share" in old:
        new["share"] = _share(old["share"])
    if isinstance(old.get("shares"), dict):
        new["shares"] = {name: _share(share) for name, share in old["shares"].items()}
    return new


def _capacity(old: Any) -> Any:  # noqa: ANN401
    return _renamed(old, "freeze", "suspend")


def _share(old: Any) -> Any:  # noqa: ANN401
    return _renamed(old, "frozen", "suspended")


def _renamed(old: Any, before: str, after: str) -> Any:  # noqa: ANN401
    if not isinstance(old, dict):
        return old
    return {after if key == before else key: value for key, value in old.items()}
