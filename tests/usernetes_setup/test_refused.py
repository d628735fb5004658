# SPDX-License-Identifier: LGPL-3.0-or-later
"""What a verb refuses, it refuses first: nothing was fetched, built or made."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest
from support.other_users import TOP

pytestmark = pytest.mark.unit

# What fetches and builds; here they only tell that they were called.
BUILDERS = ("apt-cache", "apt-get", "cc", "dpkg-deb", "go")
NOWHERE = {"cluster": "c", "node": "127.77.9.9", "server": "https://127.77.255.254:1",
           "authority": "a", "token": "t"}  # fmt: skip


class Bare:
    """A user without a build, on a machine that seems to have all that makes one."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.bin = folder, folder / "bin"
        self.bin.mkdir()
        for top in ("/sbin", "/usr/sbin", "/bin", "/usr/bin"):
            for name in os.listdir(top):
                link = self.bin / name
                link.unlink(missing_ok=True)
                link.symlink_to(f"{top}/{name}")
        for name in BUILDERS:
            (self.bin / name).unlink(missing_ok=True)
            (self.bin / name).write_text(f"#!/bin/sh\necho {name} >>{folder}/called\nexit 1\n")
            (self.bin / name).chmod(0o755)
        (folder / "here").mkdir()
        files = {
            "join.json": json.dumps(NOWHERE),
            "name.json": json.dumps({**NOWHERE, "cluster": "Bad/"}),
            "lock.json": json.dumps({**NOWHERE, "cluster": "default.lock"}),
            "numbers.json": json.dumps({**NOWHERE, "server": 5}),
            "far.json": json.dumps({**NOWHERE, "node": "n1"}),
            "garbage": "no archive",
        }
        for name, content in files.items():
            (folder / "here" / name).write_text(content)
        with tarfile.open(folder / "here/other.tgz", "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("v1.0.0-other/made.json"))

    def verb(self, *words: str) -> subprocess.CompletedProcess[str]:
        environment = {
            "PATH": str(self.bin), "HOME": str(self.folder / "home"),
            "DOVETAIL_CACHE": str(self.folder / "cache"),
            "DOVETAIL_STATE": str(self.folder / "state"),
            "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup",
            "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        return subprocess.run(
            [sys.executable, "-m", "usernetes_setup", *words], env=environment,
            cwd=self.folder / "here", capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def refuses(self, words: list[str], reason: str) -> None:
        before = sorted(os.listdir(self.folder / "here"))
        done = self.verb(*words)
        made = {path.name for path in self.folder.iterdir()} - {"bin", "here"}
        assert (done.returncode, made) == (2, set()), done.stderr
        assert reason in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert sorted(os.listdir(self.folder / "here")) == before


@pytest.fixture
def bare():
    with tempfile.TemporaryDirectory() as folder:  # of a short name, with room for a node's sockets
        yield Bare(Path(folder))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("up --cpus 5000", "--cpus 5000: 1 to"),
        ("up --cpus 4000-4001", "--cpus 4000-4001: only"),
        ("up --cpus many", "--cpus many: neither"),
        ("up --memory 1", "--memory 1: a size"),
        ("up --memory much", "--memory much: a size"),
        ("up --devices fuse", "--devices fuse: 'fuse' is not rdma, efa or gpu, or the path"),
        (
            "up --devices /dev/no/such",
            "--devices /dev/no/such: '/dev/no/such' is not on this machine",
        ),
        ("up --devices /dev/null=0", "is for a number of pods at once, 1 to 110"),
        ("up --devices gpu=2", "takes no number"),
        ("up --devices /dev/null,/dev/null", "is there twice"),
        ("join join.json --devices fuse", "--devices fuse: 'fuse' is not"),
        ("up --address 192.0.2.1", "--address 192.0.2.1: not an"),
        ("up --address 127.0.0.1", "--address 127.0.0.1: leave it out"),
        ("up --owner 2147483647", "--owner 2147483647: no such"),
        ("up --node one", "--node: only with --address"),
        ("up --node One --network bridge", "node name 'One'"),
        ("up --name Bad/", "cluster name 'Bad/'"),
        ("up --name default.lock", "give a --name that does not end in .lock"),
        ("join lock.json", "give a --name that does not end in .lock"),
        ("up --usernetes /usr", "--usernetes: for provider usernetes alone"),
        ("up --node-image one", "--node-image: for provider usernetes alone"),
        ("up --mount /usr", "--mount: for provider usernetes alone"),
        ("join join.json --mount /usr", "--mount: for provider usernetes alone"),
        ("up --timeout 0", "--timeout 0: more than"),
        ("up --timeout nan", "--timeout nan: more than"),
        ("join missing", "missing: not a join file"),
        ("join numbers.json", "numbers.json: not a join file"),
        ("join name.json", "cluster name 'Bad/'"),
        ("join join.json --cpus 5000", "--cpus 5000: 1 to"),
        ("join join.json --timeout -1", "--timeout -1: more than"),
        ("join far.json", "is for a node that others reach; give this machine's"),
        ("join join.json", "cannot be reached from here"),
        ("join join.json --invite file", "join: give"),
        ("join --invite file --name Bad/", "cluster name 'Bad/'"),
        ("join --invite file", "cluster default: is not running here"),
        ("join --invite no/file", "no/file: a file in an existing directory"),
        ("join --invite file --valid 0", "--valid 0: more than"),
        ("join --invite file --valid 300000000000", "would end after the year 9999"),
        ("bundle", "bundle: give either"),
        ("bundle -o no/file", "no/file: a file in an existing directory"),
        ("bundle -o .", "-o .: a file in an existing directory"),
        ("bundle --unpack missing", "missing: is not a bundle"),
        ("bundle --unpack garbage", "garbage: is not a bundle"),
        ("bundle --unpack other.tgz", "other.tgz: holds v1.0.0-other/made.json"),
        ("status Bad/", "cluster name 'Bad/'"),
        ("down --name Bad/", "cluster name 'Bad/'"),
    ],
)
def test_input_is_refused_before_anything_is_built_or_made(bare, words, reason):
    bare.refuses(words.split(), reason)


@pytest.mark.parametrize("words", ["build", "bundle -o file", "up"])
def test_where_nothing_can_be_built_nothing_is_begun(bare, words):
    (bare.bin / "cc").unlink()
    bare.refuses(words.split(), "no cc" if words != "up" else "cannot run here: ")


def test_a_build_is_begun_where_nothing_is_refused(bare):
    advice = json.loads(bare.verb("preflight", "--json").stdout)["checks"]
    program, kube, *words = next(one["fix"] for one in advice if one["name"] == "programs").split()
    assert (program, kube) == ("dovetail", "kube")
    done = bare.verb(*words)
    assert done.returncode == 1, done.stderr
    assert (bare.folder / "called").read_text() == "cc\n", "what is quick comes first"


def test_a_verb_runs_nothing_of_the_folder_that_it_is_typed_in(tmp_path):
    """Python would take a user's queue.py there for the standard library's."""
    (tmp_path / "queue.py").write_text("raise SystemExit('the user ran')")
    done = subprocess.run(
        [f"{TOP}/usernetes-setup/status", "--json"], cwd=tmp_path, capture_output=True, text=True,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path),
             "DOVETAIL_STATE": str(tmp_path / "state"), "PYTHONDONTWRITEBYTECODE": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_a_verb_whose_words_go_nowhere_says_so_in_a_line():
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "usernetes_setup", "status"], stdout=full, text=True,
            env={**os.environ, "PYTHONPATH": f"{TOP}/flux-python:{TOP}/usernetes-setup"},
            stderr=subprocess.PIPE,
        )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr == "dovetail kube: [Errno 28] No space left on device\n"


@pytest.mark.parametrize("words", ["alice", "1000 --remvoe", "1000 1001"])
def test_delegate_gives_nothing_where_it_is_told_what_it_does_not_know(tmp_path, words):
    """Of an epilog, that would give a group to who had been to lose it."""
    (tmp_path / "mkdir").write_text(f"#!/bin/sh\necho $* >>{tmp_path}/made\nexit 1\n")
    (tmp_path / "mkdir").chmod(0o755)
    done = subprocess.run(
        [f"{TOP}/usernetes-setup/delegate", *words.split()], capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
    )  # fmt: skip
    assert not (tmp_path / "made").exists()
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
