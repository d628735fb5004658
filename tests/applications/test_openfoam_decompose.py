# SPDX-License-Identifier: LGPL-3.0-or-later
"""Concentric decomposition: exact counts, meshes in every format, and the real decomposePar."""

from __future__ import annotations

import argparse
import gzip
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from dovetail.applications.openfoam import processors
from dovetail.applications.openfoam.bisection import bisection, cut_faces
from dovetail.applications.openfoam.cell_counts import cells_per_processor
from dovetail.applications.openfoam.concentric import concentric, zones
from dovetail.applications.openfoam.cut import Cut
from dovetail.applications.openfoam.mesh import Mesh, read_mesh
from dovetail.cli import decompose
from dovetail.cli.main import main
from dovetail.core.errors import BadInput
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

PITZ = Path("/usr/share/doc/openfoam-examples/examples/incompressible/simpleFoam/pitzDaily")
FOAM = {**os.environ, "WM_PROJECT_DIR": "/usr/share/openfoam"}

unit = pytest.mark.unit
mpi = [
    pytest.mark.mpi,
    pytest.mark.skipif(
        not (PITZ.is_dir() and shutil.which("decomposePar")), reason="OpenFOAM is not installed"
    ),
]


def grid(nx, ny, nz=1):
    """Cell centres of a regular grid of unit cells, shape (nx·ny·nz, 3)."""
    axes = np.meshgrid(*(np.arange(n) + 0.5 for n in (nx, ny, nz)), indexing="ij")
    return np.stack([axis.ravel() for axis in axes], axis=1)


@unit
def test_equal_neighbours_share_a_zone():
    assert zones([15, 5, 1, 1]) == (0, 1, 2, 2)
    assert zones([1, 1, 5, 15, 15, 1]) == (0, 0, 1, 2, 2, 3)


@unit
@given(
    st.lists(st.floats(0.01, 100) | st.sampled_from([1.0, 2.0]), min_size=1, max_size=20),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
    st.tuples(*[st.floats(-20, 20)] * 3),
)
def test_counts_match_weights_within_a_cell_and_zones_do_not_overlap(weights, size, centre):
    centres = grid(*size)
    if len(centres) < len(weights):
        with pytest.raises(BadInput):
            concentric(centres, weights, np.array(centre))
        return
    rank = concentric(centres, weights, np.array(centre))
    cells = np.bincount(rank, minlength=len(weights))
    assert cells.sum() == len(centres)
    assert cells.min() >= 1
    wanted = np.array(weights) / sum(weights) * len(centres)
    if wanted.min() >= 1:
        assert abs(cells - wanted).max() <= 1
    distance = np.linalg.norm(centres - centre, axis=1)
    zone = np.array(zones(weights))[rank]
    for inner in range(zone.max()):
        assert distance[zone == inner].max() <= distance[zone == inner + 1].min()


@unit
def test_as_many_zones_as_ranks_cost_no_more_than_in_proportion():
    weights = 1.0 + np.arange(40_000) / 40_000
    begun = time.process_time()
    rank = concentric(grid(200, 200, 2), weights.tolist(), np.zeros(3))
    assert time.process_time() - begun < 3.0
    assert np.bincount(rank).min() == 1


@unit
def test_weights_of_many_ranks_are_added_up_once(tmp_path, monkeypatch, capsys):
    ranks = 40_000
    weights = (1.0,) * ranks
    monkeypatch.setattr(processors, "cells_per_processor", lambda _: (1,) * ranks)
    (tmp_path / "processor0").mkdir()
    args = argparse.Namespace(ranks=ranks, json=True, apply=False)
    made = Cut("bisection", np.arange(ranks), None, None, (1,) * ranks, 0, 0)
    begun = time.process_time()
    decompose._tell(made, weights, args)
    assert processors.are_cut(tmp_path, weights, copied=False)
    assert time.process_time() - begun < 3.0
    assert json.loads(capsys.readouterr().out)["wanted"][-1] == 1.0


@unit
def test_equal_weights_make_equal_sectors_around_the_centre():
    rank = concentric(grid(10, 10), [1, 1, 1, 1], np.array([5.0, 5.0, 0.5]))
    assert np.bincount(rank).tolist() == [25, 25, 25, 25]
    quadrant = rank.reshape(10, 10)
    assert all(len(np.unique(q)) == 1 for q in (quadrant[:5, :5], quadrant[5:, 5:]))


def box(nx, ny, nz=1):
    """A regular mesh of unit cells: its inner faces alone."""
    number = np.arange(nx * ny * nz).reshape(nx, ny, nz)
    pairs = [
        (number[:-1].ravel(), number[1:].ravel()),
        (number[:, :-1].ravel(), number[:, 1:].ravel()),
        (number[:, :, :-1].ravel(), number[:, :, 1:].ravel()),
    ]
    owner, neighbour = (np.concatenate(side) for side in zip(*pairs))
    return Mesh(grid(nx, ny, nz), owner, neighbour, np.zeros(3), np.array([nx, ny, nz]))


@unit
@given(
    st.lists(st.floats(0.01, 100) | st.sampled_from([1.0, 2.0]), min_size=1, max_size=20),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
)
def test_bisection_matches_weights_within_a_cell(weights, size):
    mesh = box(*size)
    if len(mesh.centres) < len(weights):
        with pytest.raises(BadInput):
            bisection(mesh, weights)
        return
    cells = np.bincount(bisection(mesh, weights), minlength=len(weights))
    assert cells.sum() == len(mesh.centres)
    assert cells.min() >= 1
    wanted = np.array(weights) / sum(weights) * len(mesh.centres)
    if wanted.min() >= 1:
        assert abs(cells - wanted).max() <= 1


BOXES = {
    "halves of a long box": ((10, 4, 2), [1, 1], 8),
    "a long box across, whatever its direction": ((2, 4, 10), [1, 1], 8),
    "quarters of a square": ((8, 8), [1, 1, 1, 1], 16),
    "thirds of a long box": ((9, 2), [1, 1, 1], 4),
    "a quarter and the rest": ((8, 3), [1, 3], 3),
    "an eighth each of a cube": ((4, 4, 4), [1] * 8, 48),
}


@unit
@pytest.mark.parametrize("name", BOXES)
def test_bisection_cuts_the_fewest_faces_of_a_box(name):
    size, weights, faces = BOXES[name]
    mesh = box(*size)
    assert cut_faces(mesh, bisection(mesh, weights)) == faces


# --- Reading meshes: two unit cubes side by side, 12 points, 11 faces ---

POINTS = [(x, y, z) for z in (0.0, 1.0) for y in (0.0, 1.0) for x in (0.0, 1.0, 2.0)]
FACES = [
    (1, 4, 10, 7),
    (0, 6, 9, 3),
    (0, 1, 7, 6),
    (3, 9, 10, 4),
    (0, 3, 4, 1),
    (6, 7, 10, 9),
    (2, 5, 11, 8),
    (1, 2, 8, 7),
    (4, 10, 11, 5),
    (1, 4, 5, 2),
    (7, 8, 11, 10),
]
OWNER = [0] * 6 + [1] * 5
NEIGHBOUR = [1]


def ascii_list(items):
    return f"{len(items)}\n(\n".encode() + "\n".join(items).encode() + b"\n)\n"


def binary_list(values, dtype):
    return b"%d\n(" % len(values) + np.array(values, dtype).tobytes() + b")\n"


def header(kind, name, form, arch):
    return (
        f"/* a comment, with FoamFile in it */\nFoamFile\n{{\n    format {form};\n"
        f'    class {kind};\n    arch "{arch}";\n    object {name};\n}}\n// * * * //\n\n'
    ).encode()


def ascii_mesh():
    face = ["{}({})".format(len(f), " ".join(map(str, f))) for f in FACES]
    point = ["({} {} {})".format(*p) for p in POINTS]
    parts = {
        "points": ("vectorField", ascii_list(point)),
        "faces": ("faceList", b"// a comment between\n" + ascii_list(face)),
        "owner": ("labelList", ascii_list([str(c) for c in OWNER])),
        "neighbour": ("labelList", b"1{1}\n"),
    }
    return {k: header(kind, k, "ascii", "") + body for k, (kind, body) in parts.items()}


def binary_mesh(label, scalar, order="<"):
    i, f = f"{order}i{label // 8}", f"{order}f{scalar // 8}"
    arch = f"{'LSB' if order == '<' else 'MSB'};label={label};scalar={scalar}"
    starts = np.cumsum([0, *(len(face) for face in FACES)])
    corners = [p for face in FACES for p in face]
    parts = {
        "points": ("vectorField", binary_list(POINTS, f)),
        "faces": ("faceCompactList", binary_list(starts, i) + b"\n\n" + binary_list(corners, i)),
        "owner": ("labelList", binary_list(OWNER, i)),
        "neighbour": ("labelList", binary_list(NEIGHBOUR, i)),
    }
    return {k: header(kind, k, "binary", arch) + body for k, (kind, body) in parts.items()}


def put(case, files, suffix=""):
    mesh = case / "constant" / "polyMesh"
    mesh.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (mesh / (name + suffix)).write_bytes(gzip.compress(data) if suffix else data)
    return case


FORMATS = {
    "ascii": ascii_mesh(),
    "binary, 32-bit labels, 64-bit scalars": binary_mesh(32, 64),
    "binary, 64-bit labels, 64-bit scalars": binary_mesh(64, 64),
    "binary, 32-bit labels, 32-bit scalars": binary_mesh(32, 32),
    "binary, big-endian": binary_mesh(32, 64, ">"),
}


@unit
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_mesh_is_read_in_every_format(name, suffix, tmp_path):
    mesh = read_mesh(put(tmp_path, FORMATS[name], suffix))
    assert mesh.centres.tolist() == [[0.5, 0.5, 0.5], [1.5, 0.5, 0.5]]
    assert (mesh.low.tolist(), mesh.high.tolist()) == ([0, 0, 0], [2, 1, 1])
    assert mesh.neighbour.tolist() == [1]


def broken(name, old, new, base=None):
    files = dict(base or ascii_mesh())
    assert old in files[name]
    files[name] = files[name].replace(old, new)
    return files


WRONG_SIZE = binary_mesh(64, 64)["owner"].replace(b"label=64", b"label=32")
WRONG_OFFSETS = (
    header("faceCompactList", "faces", "binary", "LSB;label=32;scalar=64")
    + binary_list([0, 4, 9], "<i4")
    + binary_list([0] * 8, "<i4")
)

DAMAGED = {
    "a file is missing": {k: v for k, v in ascii_mesh().items() if k != "faces"},
    "a point is missing": broken("points", b"(2.0 1.0 1.0)", b""),
    "a point is no number": broken("points", b"(2.0 1.0 1.0)", b"(2.0 one 1.0)"),
    "a point at infinity": broken("points", b"(2.0 1.0 1.0)", b"(2.0 inf 1.0)"),
    "a face names a point that is not there": broken("faces", b"4(7 8 11 10)", b"4(7 8 12 10)"),
    "a face with a negative point": broken("faces", b"4(7 8 11 10)", b"4(7 8 -1 10)"),
    "a face of two points": broken("faces", b"4(7 8 11 10)", b"2(7 8)"),
    "a face too few": broken("faces", b"4(7 8 11 10)", b""),
    "a face with a wrong length": broken("faces", b"4(7 8 11 10)", b"9(7 8 11 10)"),
    "an owner too few": broken("owner", b"11\n(\n0", b"10\n(\n"),
    "a negative owner": broken("owner", b"\n0\n", b"\n-1\n"),
    "an absurd owner": broken("owner", b"1\n)", b"999999999999\n)"),
    "a cell without faces": broken("owner", b"1\n)", b"3\n)"),
    "more neighbours than faces": broken("neighbour", b"1{1}", b"12{1}"),
    "an absurd uniform list": broken("neighbour", b"1{1}", b"99999999999{1}"),
    "no header": broken("owner", b"FoamFile\n{", b"{"),
    "an unknown format": broken("owner", b"format ascii", b"format morse"),
    "binary cut off": broken("points", b")\n", b"", binary_mesh(32, 64)),
    "binary of the wrong label size": {**binary_mesh(32, 64), "owner": WRONG_SIZE},
    "offsets that do not fit": {**binary_mesh(32, 64), "faces": WRONG_OFFSETS},
    "a binary faceList": broken("faces", b"faceCompactList", b"faceList", binary_mesh(32, 64)),
}


@unit
@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_mesh_is_refused_with_the_file(name, tmp_path):
    with pytest.raises(BadInput, match="polyMesh"):
        read_mesh(put(tmp_path, DAMAGED[name]))


@unit
@settings(suppress_health_check=list(HealthCheck))
@given(st.data())
def test_any_bytes_are_a_mesh_or_refused(tmp_path, data):
    files = dict(data.draw(st.sampled_from(list(FORMATS.values()))))
    name = data.draw(st.sampled_from(sorted(files)))
    at = data.draw(st.integers(0, len(files[name])))
    drop = data.draw(st.integers(0, 8))
    files[name] = files[name][:at] + data.draw(st.binary(max_size=8)) + files[name][at + drop :]
    put(tmp_path, files)
    try:
        mesh = read_mesh(tmp_path)
    except BadInput:
        return
    assert len(mesh.centres) >= 1


# --- The command ---


@unit
def test_both_files_are_written_and_ours_are_written_over(tmp_path, capsys):
    put(tmp_path, ascii_mesh())
    for weights, cells in (("2,1", "0\n1"), ("1,2", "0\n1")):
        command = ["decompose", "--ranks", "2", "--weights", weights, "--centre=-1,0,0"]
        assert main([*command, str(tmp_path)]) == 0
        assert f"2\n(\n{cells}\n)" in (tmp_path / "constant" / "cellDecomposition").read_text()
    dictionary = (tmp_path / "system" / "decomposeParDict").read_text()
    assert "numberOfSubdomains 2;" in dictionary
    assert "centre (-1 0 0) m, given" in capsys.readouterr().out
    assert sorted(p.name for p in (tmp_path / "system").iterdir()) == ["decomposeParDict"]


@unit
def test_the_default_centre_is_said(tmp_path, capsys):
    put(tmp_path, ascii_mesh())
    main(["decompose", "--ranks", "1", "--method", "concentric", str(tmp_path)])
    assert "centre (1 0.5 0.5) m, of the mesh's bounding box" in capsys.readouterr().out


@unit
@pytest.mark.parametrize("theirs", ["constant/cellDecomposition", "system/decomposeParDict"])
def test_a_file_of_others_is_kept(theirs, tmp_path, capsys):
    put(tmp_path, ascii_mesh())
    path = tmp_path / theirs
    path.parent.mkdir(exist_ok=True)
    path.write_text("theirs")
    command = ["decompose", "--ranks", "2", str(tmp_path)]
    assert main(command) == 2
    assert path.read_text() == "theirs"
    assert "--force" in capsys.readouterr().err
    assert main([*command, "--force"]) == 0
    assert path.with_name(path.name + ".orig").read_text() == "theirs"
    assert path.read_text() != "theirs"


@unit
@pytest.mark.parametrize("refused", ["cellDecomposition", "decomposeParDict"])
def test_on_a_full_disk_their_files_stay(refused, tmp_path, monkeypatch, capsys):
    put(tmp_path, ascii_mesh())
    paths = [tmp_path / "constant" / "cellDecomposition", tmp_path / "system" / "decomposeParDict"]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"theirs {path.name}")

    def write(path, text):
        if path.name == refused:
            raise OSError(28, "No space left on device")
        path.write_text(text)

    monkeypatch.setattr(sys.modules[read_mesh.__module__], "write_whole", write)
    assert main(["decompose", "--ranks", "2", "--force", str(tmp_path)]) == 2
    assert "cannot be written: No space left on device" in capsys.readouterr().err
    assert [path.read_text() for path in paths] == [f"theirs {path.name}" for path in paths]
    assert not [*tmp_path.rglob("*.orig")]


BAD_OPTIONS = {
    "fewer weights than ranks": (["--ranks", "3", "--weights", "1,2"], "3 ranks"),
    "more weights than ranks": (["--ranks", "1", "--weights", "1,2"], "1 ranks"),
    "no ranks": (["--ranks", "0"], "--ranks"),
    "more ranks than cells": (["--ranks", "3"], "2 cells"),
    "more ranks than fit into memory": (["--ranks", "1" + "0" * 17], "more than 1000000"),
    "more ranks than can be counted": (["--ranks", "1" + "0" * 30], "more than 1000000"),
    "a weight of zero": (["--ranks", "2", "--weights", "1,0"], "rank 1"),
    "a weight nan": (["--ranks", "2", "--weights", "nan,1"], "rank 0"),
    "a negative weight": (["--ranks", "2", "--weights=-1,1"], "rank 0"),
    "a centre for bisection": (
        ["--ranks", "2", "--method", "bisection", "--centre", "1,2,3"],
        "--method concentric",
    ),
    "a centre of two": (["--ranks", "2", "--centre", "1,2"], "--centre"),
    "a centre nan": (["--ranks", "2", "--centre", "1,2,nan"], "--centre"),
    "a centre far away": (["--ranks", "2", "--centre", "1e200,0,0"], "--centre"),
}


@unit
@pytest.mark.parametrize("name", BAD_OPTIONS)
def test_bad_options_are_exit_2_and_write_nothing(name, tmp_path, capsys):
    options, reason = BAD_OPTIONS[name]
    put(tmp_path, ascii_mesh())
    assert main(["decompose", *options, str(tmp_path)]) == 2
    assert reason in capsys.readouterr().err
    assert [p.name for p in tmp_path.iterdir()] == ["constant"]


@unit
def test_without_a_mesh_it_names_blockmesh(tmp_path, capsys):
    assert main(["decompose", "--ranks", "2", str(tmp_path)]) == 2
    assert "blockMesh" in capsys.readouterr().err


@unit
@pytest.mark.parametrize(
    ("options", "method"),
    [
        ([], "bisection"),
        (["--weights", "2,2"], "bisection"),
        (["--weights", "1,2"], "concentric"),
        (["--centre", "0,0,0"], "concentric"),
        (["--weights", "1,2", "--method", "bisection"], "bisection"),
        (["--method", "concentric"], "concentric"),
    ],
)
def test_equal_weights_are_bisected_unless_said_otherwise(options, method, tmp_path, capsys):
    put(tmp_path, ascii_mesh())
    assert main(["decompose", "--ranks", "2", "--json", *options, str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["method"] == method
    assert (found["zones"] is None) == (found["centre"] is None) == (method == "bisection")
    assert found["cut_faces"] == 1


def parted(case, *cells):
    """Processor directories with so many cells each, and a time in them."""
    for rank, count in enumerate(cells):
        mesh = case / f"processor{rank}" / "constant" / "polyMesh"
        mesh.mkdir(parents=True)
        note = header("labelList", "owner", f'ascii; note "nCells:{count}"', "")
        (mesh / "owner").write_bytes(note + b"0()\n")
        (case / f"processor{rank}" / "0").mkdir()
    return case


KEPT = {
    "as asked": (["--weights", "1,1"], (1, 1), True),
    "within a cell": (["--weights", "1,3"], (1, 1), True),
    "of another mesh": (["--weights", "1,1"], (2, 2), False),
    "of other weights": (["--weights", "50,1"], (1, 1), True),  # a rank has no less than a cell
    "on other ranks": (["--weights", "1,1"], (2,), False),
}


@unit
@pytest.mark.parametrize("name", KEPT)
def test_a_cut_that_is_right_is_kept_and_no_other_is_touched_without_force(name, tmp_path, capsys):
    options, cells, kept = KEPT[name]
    (parted(put(tmp_path, ascii_mesh()), *cells) / "0").mkdir()
    command = ["decompose", "--ranks", "2", *options, "--apply", "--json", str(tmp_path)]
    assert main(command) == (0 if kept else 2)
    told = capsys.readouterr()
    if kept:
        assert json.loads(told.out) == {"kept": True}
    else:
        assert "processor0" in told.err
        assert "--force" in told.err
    assert len(list(tmp_path.glob("processor*"))) == len(cells)
    assert not (tmp_path / "system").exists()


@unit
@pytest.mark.parametrize("changed", ["0/U", "constant/polyMesh/points"])
@pytest.mark.parametrize("packed", ["", ".gz"])
def test_a_cut_of_what_has_changed_since_is_not_right(tmp_path, changed, packed):
    case = parted(put(tmp_path, ascii_mesh()), 1, 1)
    part = case / "processor0"
    for path in (case / changed, part / (changed + packed)):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    for later, right in ((90, False), (9, True), (-90, True)):  # who copies may mix them up a bit
        os.utime(case / changed, (1e9 + later, 1e9 + later))
        os.utime(part / (changed + packed), (1e9, 1e9))
        assert processors.are_cut(case, [1.0, 1.0], copied=True) is right
    (part / "500").mkdir()  # from where a run goes on, whatever it began from
    os.utime(case / changed, (2e9, 2e9))
    assert processors.are_cut(case, [1.0, 1.0], copied=True) is (changed == "0/U")


@unit
def test_that_a_cut_is_right_is_seen_at_once_however_large_the_mesh(tmp_path):
    note = header("labelList", "owner", 'ascii; note "nCells:2"', "")
    (parted(put(tmp_path, {**ascii_mesh(), "owner": note}), 1, 1) / "0").mkdir()
    for owner in tmp_path.glob("**/owner"):
        os.truncate(owner, 1 << 40)  # a hole, which no memory would hold
    program = (
        "import sys; from dovetail.cli.main import main; code = main(sys.argv[1:]); "
        "sys.exit(code or 'numpy' in sys.modules)"
    )
    command = ["decompose", "--ranks", "2", "--apply", str(tmp_path)]
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path} is cut so already\n"), done.stderr


@unit
def test_on_one_rank_the_case_is_in_one_piece(tmp_path, capsys):
    (parted(put(tmp_path, ascii_mesh()), 1, 1) / "0").mkdir()
    (tmp_path / "processors2").mkdir()
    command = ["decompose", "--ranks", "1", "--apply", str(tmp_path)]
    assert main(command) == 2
    assert main([*command, "--force"]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "constant"]
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"kept": True}


@unit
def test_several_regions_are_kept_as_they_were_cut_and_not_cut_by_us(tmp_path, capsys):
    (tmp_path / "constant").mkdir()
    (tmp_path / "constant" / "regionProperties").write_text("regions ( fluid (air) );")
    command = ["decompose", "--ranks", "2", "--force", "--apply", "--json", str(tmp_path)]
    assert main(command) == 2
    assert "`decomposePar -allRegions`" in capsys.readouterr().err
    # So is a film's region, which nothing lists.
    (tmp_path / "constant" / "regionProperties").unlink()
    (tmp_path / "constant" / "air" / "polyMesh").mkdir(parents=True)
    (tmp_path / "system" / "air").mkdir(parents=True)
    assert main(command) == 2
    assert "several regions" in capsys.readouterr().err
    for rank in range(2):
        (tmp_path / f"processor{rank}" / "constant" / "air" / "polyMesh").mkdir(parents=True)
    assert main(command) == 0
    assert json.loads(capsys.readouterr().out) == {"kept": True}


@unit
def test_fields_that_are_in_processor_directories_alone_are_not_removed(tmp_path, capsys):
    parted(put(tmp_path, ascii_mesh()), 1, 1)
    assert main(["decompose", "--ranks", "1", "--apply", "--force", str(tmp_path)]) == 2
    assert "reconstructPar" in capsys.readouterr().err
    assert (tmp_path / "processor1").exists()


@unit
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_results_of_ranks_are_not_removed_but_from_a_copy(ranks, tmp_path, monkeypatch, capsys):
    parted(put(tmp_path, ascii_mesh()), 2)
    for name in ("0", "system", "processor0/500"):
        (tmp_path / name).mkdir()
    control = tmp_path / "system" / "controlDict"
    control.write_text("startFrom startTime; startTime 0;")
    monkeypatch.setenv("PATH", str(tmp_path))
    command = ["decompose", "--ranks", ranks, "--apply", "--force", str(tmp_path)]
    assert main(command) == 2
    assert "time 500" in capsys.readouterr().err
    monkeypatch.setenv("DOVETAIL_DIR", "/none")  # as for a prepare step of a run
    control.write_text("startFrom latestTime; startTime 0;")
    assert main(command) == 2
    assert "time 500" in capsys.readouterr().err
    assert (tmp_path / "processor0" / "500").exists()
    assert [path.name for path in (tmp_path / "constant").iterdir()] == ["polyMesh"]
    control.write_text("startFrom startTime; startTime 0;")
    alone = ranks == "1"
    assert main(command) == (0 if alone else 2)  # there is no decomposePar on PATH
    assert (tmp_path / "processor0").exists() == (not alone)


@unit
@pytest.mark.parametrize("weights", ["1", "1,1", "3,1"])
@pytest.mark.parametrize("copied", [True, False])
def test_what_linked_processor_directories_lead_to_stays(weights, copied, tmp_path, monkeypatch):
    elsewhere = parted(tmp_path / "elsewhere", 1, 1)
    case = put(tmp_path / "case", ascii_mesh())
    (case / "0").mkdir()
    for place in elsewhere.iterdir():
        (case / place.name).symlink_to(place)
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "decomposePar"  # what the real one has removed by then is gone
    tool.write_text("#!/bin/sh\n/bin/rm -rf processor*/*\n/bin/mkdir -p processor0 processor1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("DOVETAIL_DIR", "/none") if copied else None
    ranks = str(len(weights.split(",")))
    command = ["decompose", "--ranks", ranks, "--weights", weights, "--apply", str(case)]
    right = weights != "1" and not copied  # shares within a cell
    assert main(command) == (0 if right else 2)
    assert main([*command, "--force"]) == 0
    places = [*case.glob("processor*")]
    assert len(places) == (0 if ranks == "1" else 2)
    assert all(place.is_symlink() == right for place in places)
    assert all((elsewhere / f"processor{rank}" / "0").is_dir() for rank in (0, 1))


@unit
def test_a_copy_does_not_write_where_its_links_lead(tmp_path, monkeypatch, capsys):
    theirs, case = put(tmp_path / "theirs", ascii_mesh()), tmp_path / "case"
    (theirs / "system").mkdir()
    (theirs / "system" / "decomposeParDict").write_text("theirs")
    (theirs / "system" / "controlDict").write_text("endTime 1;")
    before = sorted(theirs.rglob("*"))
    case.mkdir()
    for name in ("constant", "system"):
        (case / name).symlink_to(theirs / name)
    monkeypatch.setenv("DOVETAIL_DIR", "/none")  # as for a prepare step of a run
    for weights in ("1,1", "3,1"):
        command = ["decompose", "--ranks", "2", "--weights", weights, "--force", str(case)]
        assert main(command) == 0
    assert sorted(theirs.rglob("*")) == before
    assert (theirs / "system" / "decomposeParDict").read_text() == "theirs"
    assert "manual" in (case / "system" / "decomposeParDict").read_text()
    assert (case / "system" / "controlDict").read_text() == "endTime 1;"
    assert sorted(path.name for path in case.iterdir()) == ["constant", "system"]
    monkeypatch.delenv("DOVETAIL_DIR")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "constant").symlink_to(theirs / "constant")
    assert main(["decompose", "--ranks", "2", str(tmp_path / "own")]) == 0  # as the user says
    assert (theirs / "constant" / "cellDecomposition").exists()


@unit
@pytest.mark.parametrize("more", [[], ["--apply"]])
def test_a_case_that_is_not_there_is_said(more, tmp_path, capsys):
    assert main(["decompose", "--ranks", "1", *more, str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == f"dovetail: {tmp_path}/none: is not a directory\n"


@unit
def test_without_openfoam_it_is_said_and_nothing_is_changed(tmp_path, monkeypatch, capsys):
    (parted(put(tmp_path, ascii_mesh()), 2) / "0").mkdir()
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["decompose", "--ranks", "2", "--apply", "--force", str(tmp_path)]) == 2
    assert "decomposePar cannot be run" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


# --- The real thing ---


@pytest.fixture(scope="module", params=["ascii", "binary"])
def pitz(request, tmp_path_factory):
    """pitzDaily, meshed."""
    case = tmp_path_factory.mktemp("pitz") / request.param
    shutil.copytree(PITZ, case)
    control = case / "system" / "controlDict"
    text, ascii_format = control.read_text(), "writeFormat     ascii;"
    assert ascii_format in text
    control.write_text(text.replace(ascii_format, f"writeFormat {request.param};"))
    subprocess.run(["blockMesh"], cwd=case, env=FOAM, check=True, capture_output=True)
    header = (case / "constant" / "polyMesh" / "faces").read_bytes()[:2000]
    assert request.param.encode() in header
    return case


class TestRealOpenFoam:
    """Meshes that blockMesh wrote, and decomposePar on what we write."""

    pytestmark = mpi

    @pytest.mark.parametrize("weights", ["1,3", "1,1,5,15", "4,2,2,1,1,1,1,1"])
    def test_decomposepar_gives_each_rank_its_cells(self, pitz, weights, capsys):
        ranks = weights.count(",") + 1
        options = ["--ranks", str(ranks), "--weights", weights, "--json", str(pitz)]
        assert main(["decompose", *options]) == 0
        cells = json.loads(capsys.readouterr().out)["cells"]
        done = subprocess.run(
            ["decomposePar", "-force"], cwd=pitz, env=FOAM, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert list(cells_per_processor(pitz)) == cells
        assert sum(cells) == 12225
        wanted = [float(w) for w in weights.split(",")]
        for count, weight in zip(cells, wanted):
            assert abs(count - 12225 * weight / sum(wanted)) <= 1

    @pytest.mark.parametrize("ranks", [2, 4, 7])
    def test_bisection_cuts_fewer_faces_than_sectors(self, pitz, ranks, capsys):
        cut = {}
        for method in ("bisection", "concentric"):
            options = ["--ranks", str(ranks), "--method", method, "--json", "--force", str(pitz)]
            assert main(["decompose", *options]) == 0
            cut[method] = json.loads(capsys.readouterr().out)["cut_faces"]
        assert cut["bisection"] < cut["concentric"]

    def test_a_case_is_cut_again_for_any_ranks(self, pitz, monkeypatch, capsys):
        monkeypatch.setenv("WM_PROJECT_DIR", FOAM["WM_PROJECT_DIR"])
        for weights in ([1.0, 3.0], [1.0] * 3, [1.0], [1.0, 1.0]):
            words = ["--ranks", str(len(weights)), "--weights", ",".join(map(str, weights))]
            command = ["decompose", *words, "--apply", "--force", "--json", str(pitz)]
            for kept in (False, True):
                assert main(command) == 0
                assert json.loads(capsys.readouterr().out)["kept"] is kept
            if len(weights) > 1:
                cells = cells_per_processor(pitz)
                assert [round(one / sum(cells), 3) for one in cells] == [
                    round(one / sum(weights), 3) for one in weights
                ]
            else:
                assert list(pitz.glob("processor*")) == []

    def test_a_decomposer_that_fails_is_told(self, pitz, tmp_path, monkeypatch, capsys):
        monkeypatch.setenv("WM_PROJECT_DIR", FOAM["WM_PROJECT_DIR"])
        case = shutil.copytree(pitz, tmp_path / "case")
        field = case / "0" / "p"
        field.write_text(field.read_text().replace("uniform 0", "uniform nothing"))
        options = ["--ranks", "2", "--weights", "1,9", "--apply", "--force", str(case)]
        for _ in range(2):
            assert main(["decompose", *options]) == 1
            assert "decomposePar in" in capsys.readouterr().err
        assert not [*case.glob("processor*")], "which would be taken for a case that is cut so"

    def test_collated_files_are_refused(self, pitz, capsys):
        assert main(["decompose", "--ranks", "2", str(pitz)]) == 0
        subprocess.run(
            ["decomposePar", "-force", "-fileHandler", "collated"],
            cwd=pitz,
            env=FOAM,
            check=True,
            capture_output=True,
        )
        assert main(["requests", "--case", str(pitz), "--cpus", "2"]) == 2
        assert "uncollated" in capsys.readouterr().err
