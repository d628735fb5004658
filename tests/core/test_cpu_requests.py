# SPDX-License-Identifier: LGPL-3.0-or-later
"""Proportional CPU requests: exact sums, floors, sources."""

from __future__ import annotations

import gzip
import json

import pytest
from dovetail.cli.main import main
from dovetail.core.cpu_requests import parse_cpu, proportional
from dovetail.core.errors import BadInput
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.unit

SHARES = {
    "the papers' weights": ([1, 1, 5, 15], 4000, 10, (182, 182, 909, 2727)),
    "thirds: the lower rank gets what is left": ([1, 1, 1], 1000, 10, (334, 333, 333)),
    "one rank gets all": ([0.3], 2500, 10, (2500,)),
    "a floor is paid by the others in proportion": ([1, 300, 699], 1000, 100, (100, 270, 630)),
    "a floor for all takes everything": ([1, 99], 20, 10, (10, 10)),
    "no floor, and a rank that gets nothing": ([1e-9, 1], 1000, 0, (0, 1000)),
    "the floor drags a second rank to it": ([1, 100, 899], 1000, 100, (100, 100, 800)),
}


@pytest.mark.parametrize("name", SHARES)
def test_shares(name):
    weights, total, floor, expected = SHARES[name]
    assert proportional(weights, total, floor) == expected


@given(
    st.lists(st.floats(1e-12, 1e12), min_size=1, max_size=60),
    st.integers(1, 10**7),
    st.integers(0, 1000),
)
def test_sums_are_exact_floors_hold_and_order_is_kept(weights, total, floor):
    if floor * len(weights) > total:
        with pytest.raises(BadInput):
            proportional(weights, total, floor)
        return
    shares = proportional(weights, total, floor)
    assert sum(shares) == total
    assert min(shares) >= floor
    by_weight = sorted(zip(weights, shares))
    for (light, less), (heavy, more) in zip(by_weight, by_weight[1:]):
        assert less <= more or (light == heavy and abs(less - more) <= 1)


@pytest.mark.parametrize(
    ("text", "millicores"), [("4", 4000), ("2.5", 2500), ("2500m", 2500), ("0.001", 1), ("1m", 1)]
)
def test_cpu_quantities(text, millicores):
    assert parse_cpu(text) == millicores


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "4 cores", "nan", "inf", "1e3", "0.0005", "2.5.5", "m", "1" * 30, "٤"]
)
def test_bad_cpu_quantities(text):
    with pytest.raises(BadInput):
        parse_cpu(text)


def test_the_command_prints_the_requests(capsys):
    assert main(["requests", "--weights", "1,1,5,15", "--cpus", "4"]) == 0
    assert capsys.readouterr().out == "182m 182m 909m 2727m\n"


@pytest.mark.parametrize("zero", ["0", "0m", "0.0", "0.000m", "00"])
def test_a_floor_may_be_none_however_it_is_written(zero, capsys):
    assert main(["requests", "--weights", "1,999", "--cpus", "100m", "--floor", zero]) == 0
    assert capsys.readouterr().out == "0m 100m\n"


def test_json(capsys):
    main(["requests", "--weights", "1,3", "--cpus", "400m", "--json"])
    assert json.loads(capsys.readouterr().out) == {
        "weights": [1.0, 3.0],
        "requests_m": [100, 300],
        "total_m": 400,
    }


BAD_OPTIONS = {
    "no source": ["--cpus", "4"],
    "two sources": ["--weights", "1", "--case", ".", "--cpus", "4"],
    "no cpus": ["--weights", "1,2"],
    "a weight of zero": ["--weights", "1,0", "--cpus", "4"],
    "a negative weight": ["--weights=-1,1", "--cpus", "4"],
    "a weight nan": ["--weights", "nan,1", "--cpus", "4"],
    "a weight inf": ["--weights", "1,inf", "--cpus", "4"],
    "an empty weight": ["--weights", "1,,2", "--cpus", "4"],
    "no weights": ["--weights", "", "--cpus", "4"],
    "a floor that cannot be": ["--weights", "1,1", "--cpus", "1", "--floor", "600m"],
    "a floor that is no number": ["--weights", "1,1", "--cpus", "1", "--floor", "low"],
    "a case that is not there": ["--case", "/nowhere", "--cpus", "1"],
}


@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_exit_2(name, capsys):
    try:
        code = main(["requests", *BAD_OPTIONS[name]])
    except SystemExit as stop:  # argparse
        code = stop.code
    assert code == 2
    assert capsys.readouterr().err.strip()


def test_a_weight_that_is_too_large_is_not_said_to_be_none(capsys):
    assert main(["requests", "--weights", "1e16,1", "--cpus", "4"]) == 2
    why = "weights: 1e+16 for rank 0 is not a number greater than 0, up to 1e15"
    assert why in capsys.readouterr().err


# --- Cells of a decomposed case ---

HEADER = (
    "FoamFile\n{{\n    version 2.0;\n    format {format};\n    class labelList;\n"
    '    arch "LSB;label=32;scalar=64";\n{note}    object owner;\n}}\n// * * //\n\n'
)


def owner(cells, form="ascii", note=True):
    text = f'    note "nPoints:9  nCells:{cells}  nFaces:9";\n' if note else ""
    head = HEADER.format(format=form, note=text).encode()
    if form == "binary":
        return head + b"2\n(" + (0).to_bytes(4, "little") + (cells - 1).to_bytes(4, "little") + b")"
    return head + f"2\n(\n0\n{cells - 1}\n)\n".encode()


def decomposed(case, files, name="owner"):
    for rank, data in files.items():
        mesh = case / f"processor{rank}" / "constant" / "polyMesh"
        mesh.mkdir(parents=True)
        (mesh / name).write_bytes(data)
    return case


GOOD_CASES = {
    "ascii": [owner(100), owner(300)],
    "binary": [owner(100, "binary"), owner(300, "binary")],
    "ascii without a note is counted": [owner(100, note=False), owner(300, note=False)],
    "binary without a note is counted": [owner(100, "binary", False), owner(300, "binary", False)],
}


@pytest.mark.parametrize("name", GOOD_CASES)
def test_cells_of_a_decomposed_case(name, tmp_path, capsys):
    decomposed(tmp_path, dict(enumerate(GOOD_CASES[name])))
    assert main(["requests", "--case", str(tmp_path), "--cpus", "2"]) == 0
    assert capsys.readouterr().out == "500m 1500m\n"


def test_compressed_files_and_more_than_nine_ranks(tmp_path, capsys):
    files = {rank: gzip.compress(owner(rank + 1)) for rank in range(12)}
    decomposed(tmp_path, files, "owner.gz")
    assert main(["requests", "--case", str(tmp_path), "--cpus", "7.8"]) == 0
    assert capsys.readouterr().out.split() == [f"{100 * (rank + 1)}m" for rank in range(12)]


BAD_CASES = {
    "not decomposed": ({}, "decomposePar"),
    "a rank is missing": ({0: owner(5), 2: owner(5)}, "not all there"),
    "a rank without cells": ({0: owner(5), 1: owner(0)}, "without cells"),
    "an empty file": ({0: b""}, "FoamFile"),
    "a file cut off": ({0: owner(5, "binary", note=False)[:-3]}, "complete"),
    "text instead of numbers": ({0: owner(5, note=False).replace(b"\n4\n", b"\nx\n")}, "complete"),
}


@pytest.mark.parametrize("name", BAD_CASES)
def test_bad_cases_are_refused_with_a_reason(name, tmp_path, capsys):
    files, reason = BAD_CASES[name]
    decomposed(tmp_path, files)
    assert main(["requests", "--case", str(tmp_path), "--cpus", "2"]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1


def test_collated_files_are_refused_with_what_to_do(tmp_path, capsys):
    (tmp_path / "processors4").mkdir()
    assert main(["requests", "--case", str(tmp_path), "--cpus", "2"]) == 2
    assert "uncollated" in capsys.readouterr().err


# --- A profile ---

PROFILES = {
    "spinning ranks: time outside MPI per iteration": ("off", (1.0, 3.0), (5.0, 5.0), True),
    "blocking ranks: CPU per iteration": ("doorbell", (5.0, 5.0), (1.0, 3.0), True),
    "spinning ranks without iterations: the whole run": ("off", (1.0, 3.0), (5.0, 5.0), False),
    "blocking ranks without iterations: the whole run": ("doorbell", (5.0, 5.0), (1.0, 3.0), False),
    "ranks that spin all the same: time outside MPI": ("doorbell", (1.0, 3.0), (5.0, 5.0), True),
    "the same without iterations": ("doorbell", (1.0, 3.0), (5.0, 5.0), False),
}


def profiled(path, wait, useful, cpu, counted):
    """A profile file of two ranks with these loads; `counted` says whether per iteration."""
    profile = pytest.importorskip("dovetail.mpi.profile")
    ranks = tuple(
        profile.RankProfile(
            rank=rank,
            world=0,
            pid=rank + 2,
            host="h",
            ended="finalized",
            iterations=9 if counted else 0,
            iteration_source="openfoam" if counted else "none",
            elapsed_s=9.0,
            useful_s=7.0 if counted else useful[rank],
            mpi_s=2.0,
            cpu_s=7.0 if counted else cpu[rank],
            cpu_per_iteration=cpu[rank] if counted else None,
            useful_per_iteration=useful[rank] if counted else None,
            seconds_per_iteration=1.0 if counted else None,
            peak_rss=1,
            calls={},
        )
        for rank in range(2)
    )
    profile.save(profile.Profile(("x",), "openmpi", wait, 0, ranks, "now"), path)


@pytest.mark.parametrize("name", PROFILES)
def test_load_from_a_profile(name, tmp_path, capsys):
    profiled(tmp_path / "p.json", *PROFILES[name])
    assert main(["requests", "--profile", str(tmp_path / "p.json"), "--cpus", "2"]) == 0
    assert capsys.readouterr().out == "500m 1500m\n"


def test_a_profile_of_a_rank_without_work_is_refused(tmp_path, capsys):
    profiled(tmp_path / "p.json", "off", (0.0, 3.0), (1.0, 1.0), True)
    assert main(["requests", "--profile", str(tmp_path / "p.json"), "--cpus", "2"]) == 2
    assert "longer run" in capsys.readouterr().err
