# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations from container images on the real cluster: loaded, run, measured, refused, removed.

The images have Debian's MPIs and no Python. As root both users are tried, as a user only that one.
"""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from dovetail.executors.pods import image_check
from support import cluster_runs, images
from support.clusters import modes

pytestmark = pytest.mark.kube
MPIS = ("openmpi", "mpich")


@pytest.fixture(scope="module", params=modes())
def site(request, binaries):
    found = cluster_runs.made(binaries, request.param == "rootless")
    yield found
    found.close()


def verb(site, *words, code=0):
    return site.machine.verb("image", "--name", "one", *words, code=code)


def given(site, path):
    """The file where the cluster's user can read it."""
    target = site.folder / path.name
    if not target.exists():
        shutil.copyfile(path, target)
        target.chmod(0o644)
    return str(target)


@pytest.fixture(scope="module")
def loaded(site):
    """The images' names."""
    for mpi in MPIS:
        verb(site, "load", given(site, images.archive(mpi)))
    return {mpi: f"localhost/test/{mpi}:1" for mpi in MPIS}


def entry(image, **more):
    words = ["busy", "sleep", "20", "20", "60"]
    prepare = [f"cp {images.MARK} mark", "dovetail --version"]
    return {"image": image, "command": words, "prepare": prepare, "weights": [1, 3], **more}


def measured(site, out, name):
    """Whether the ranks did all iterations, and were seen to, with time outside and inside MPI."""
    last = site.of("Sampled", out, name)[-1]["ranks"]
    return last["iterations"] == [20, 20] and min(last["useful"]) > 0 and min(last["mpi"]) > 0


def test_every_node_has_what_was_loaded(site, loaded):
    found = json.loads(verb(site, "list", "--json").stdout)
    nodes = {one["image"]: one["nodes"] for one in found}
    assert all(nodes[image] == [site.made["node"]] for image in loaded.values())


@pytest.mark.parametrize("mpi", MPIS)
def test_a_simulation_runs_from_an_image_with_its_own_mpi_and_is_measured(site, loaded, out, mpi):
    run = site.start(site.plan(entry(loaded[mpi], pull_policy="Never")), out)
    assert site.end(run) == 0, site.errors(out)
    home = site.folder / out / "sim"
    assert (home / "case/mark").read_text() == f"{mpi}\n"
    assert "dovetail 0." in (home / "log").read_text(), "the plan's own dovetail"
    assert measured(site, out, "sim")
    assert (home / "case/mark").stat().st_uid == site.machine.uid


@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_of_an_image_in_pods_of_their_own_find_each_other(site, loaded, out, mpi):
    both = entry(loaded[mpi], name="inside", ranks_per_pod=1)
    run = site.start(site.plan(both, site.busy(20, 60, iterations=20, name="beside")), out)
    assert site.end(run) == 0, site.errors(out)
    assert set(site.states(out).values()) == {"done"}
    assert measured(site, out, "inside")
    assert measured(site, out, "beside"), "a simulation without an image, in the same plan"


def test_an_image_comes_to_all_nodes_and_goes_from_them(site, loaded, worker, out):
    small = given(site, tiny(site, {}, "localhost/test/small:1"))
    told = json.loads(verb(site, "load", small, "--json").stdout)
    both = sorted([site.made["node"], worker["node"]])
    assert (told["images"], sorted(told["nodes"])) == (["localhost/test/small:1"], both)
    told = json.loads(verb(site, "remove", "localhost/test/small:1", "--json").stdout)
    assert sorted(told["nodes"]) == both
    said = verb(site, "remove", "localhost/test/small:1", code=2).stderr
    assert "image localhost/test/small:1: is on no node of cluster one here" in said
    left = json.loads(verb(site, "list", "--json").stdout)
    assert "localhost/test/small:1" not in {one["image"] for one in left}
    # The new node has none of those that were loaded before.
    run = site.start(site.plan(entry(loaded["openmpi"], pull_policy="Never")), out)
    assert site.end(run) == 2
    assert f"image {loaded['openmpi']} is not on node {worker['node']}" in site.errors(out)


# --- what is of no use ---


def tiny(site, programs, name, **more):
    """An archive of an image with a few files, of which content or a program to copy is given."""
    root = site.folder / f"root-{len(list(site.folder.glob('root-*')))}"
    for path, content in programs.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        target.chmod(0o755)
    root.mkdir(exist_ok=True)
    target = site.folder / f"{name.rpartition('/')[2].replace(':', '-')}.tar"
    made = images.docker_archive(root, target, name, **more)
    made.chmod(0o644)
    return made


def foreign():
    """A shell for another machine."""
    data = bytearray(Path("/bin/sh").read_bytes())
    data[18:20] = struct.pack("<H", 243)
    return bytes(data)


USELESS = {
    "missing": (None, "Never", "is not on node NODE, and pull_policy is Never; load it there with"),
    "not to be pulled": (None, "IfNotPresent", "cannot be pulled by node NODE: "),
    "empty": ({}, "Never", "is of no use on node NODE: it has no program sh on its PATH, /usr/"),
    "for another machine": (
        {"bin/sh": foreign},
        "Never",
        f"is of no use on node NODE: it is for riscv64, and the node is {image_check.machine_of('/bin/sh')}",  # noqa: E501
    ),
}


@pytest.mark.parametrize("case", USELESS)
def test_an_image_of_no_use_is_told_in_one_line_before_anything_starts(site, out, case):
    programs, policy, says = USELESS[case]
    name = f"localhost:1/test/{case.replace(' ', '-')}:1"
    if programs is not None:
        files = {path: make() for path, make in programs.items()}
        verb(site, "load", str(tiny(site, files, name)))
    run = site.start(site.plan(entry(name, pull_policy=policy)), out)
    assert site.end(run) == 2
    (line,) = [line for line in site.errors(out).splitlines() if "image" in line]
    assert f"image {name} {says.replace('NODE', site.made['node'])}" in line
    assert not site.log(out) or not site.of("Launch", out)
    site.nothing_left()


def test_a_program_that_the_image_lacks_is_told(site, loaded, out):
    run = site.start(site.plan(entry(loaded["openmpi"], command="simpleFoam -x")), out)
    assert site.end(run) == 2
    assert "it has no program simpleFoam on its PATH, " in site.errors(out)


def test_a_file_for_other_machines_is_refused_before_any_node_is_touched(site):
    path = tiny(site, {}, "localhost/test/far:1", architecture="s390x")
    said = verb(site, "load", str(path), code=2).stderr
    assert "image localhost/test/far:1 in it is for linux/s390x, and this machine is" in said
    assert "far" not in verb(site, "list").stdout


def test_a_cluster_that_is_not_there_has_no_images(site):
    said = site.machine.verb("image", "--name", "two", "list", code=2).stderr
    assert "cluster two: has no node that runs here" in said


def test_the_clusters_own_images_stay(site):
    said = verb(site, "remove", "localhost/dovetail/host:1", code=2).stderr
    assert "is a part of the cluster itself" in said
