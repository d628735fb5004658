# SPDX-License-Identifier: LGPL-3.0-or-later
"""Images, and bundles for machines without internet."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import subprocess
import tarfile
import zlib

import pytest
from dovetail.core.errors import BadInput, WorkFailed
from usernetes_setup.build import debian_packages, go_build, oci_image, programs

pytestmark = pytest.mark.unit


def test_the_same_program_packs_into_the_same_image(tmp_path):
    pause = tmp_path / "pause"
    pause.write_bytes(b"\x7fELF")
    for name in ("a", "b"):
        oci_image.pack(pause, tmp_path / name, ["localhost/x:1"], "amd64")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with tarfile.open(tmp_path / "a") as archive:
        index = json.load(archive.extractfile("index.json"))
        digest = index["manifests"][0]["digest"].split(":")[1]
        assert archive.getmember(f"blobs/sha256/{digest}")


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    folder = programs.cache() / programs.key()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/kube").write_text("program")
    (folder / "bin/kubelet").symlink_to("kube")
    made = {"bin/kube": {"bytes": 7, "sha256": programs.checksum(folder / "bin/kube")}}
    (folder / "made.json").write_text(json.dumps(made))
    programs.pack(tmp_path / "bundle.tgz")
    return folder, tmp_path / "bundle.tgz"


def test_a_bundle_is_the_same_on_the_other_side(bundle):
    folder, path = bundle
    shutil.rmtree(folder)
    assert programs.built() is None
    assert programs.unpack(path) == folder
    assert programs.built() == folder
    assert os.readlink(folder / "bin/kubelet") == "kube"


def test_a_bundle_with_other_content_than_it_says_is_refused(bundle, tmp_path):
    folder, _ = bundle
    (folder / "bin/kube").write_text("changed")
    with tarfile.open(tmp_path / "bad.tgz", "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    with pytest.raises(BadInput, match="damaged: bin/kube"):
        programs.unpack(tmp_path / "bad.tgz")


def test_packing_that_is_interrupted_leaves_the_bundle_of_before(bundle, tmp_path, monkeypatch):
    def interrupted(progress, file):
        raise KeyboardInterrupt

    before = bundle[1].read_bytes()
    monkeypatch.setattr(programs.Progress, "reading", interrupted)
    with pytest.raises(KeyboardInterrupt):
        programs.pack(bundle[1])
    assert bundle[1].read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"bundle.tgz", "cache"}


@pytest.mark.parametrize("name", ["../evil", "other-build/bin/kube", "/etc/evil"])
def test_a_bundle_that_reaches_elsewhere_is_refused(bundle, tmp_path, name):
    with tarfile.open(tmp_path / "evil.tgz", "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        archive.addfile(entry)
    with pytest.raises(BadInput, match="not a build"):
        programs.unpack(tmp_path / "evil.tgz")


def test_a_bundle_whose_links_lead_upwards_is_refused(bundle, tmp_path):
    folder, _ = bundle
    with tarfile.open(tmp_path / "evil.tgz", "w:gz") as archive:
        for name in ("a", "a/b", "a/b/c"):
            entry = tarfile.TarInfo(f"{folder.name}/{name}")
            entry.type, entry.linkname = tarfile.SYMTYPE, ".."
            archive.addfile(entry)
        archive.addfile(tarfile.TarInfo(f"{folder.name}/a/b/c/evil"))
    with pytest.raises(BadInput, match="holds .*/a, not a build"):
        programs.unpack(tmp_path / "evil.tgz")
    assert not [*tmp_path.rglob("evil")]


def test_a_torn_bundle_is_refused(bundle, tmp_path):
    (tmp_path / "torn.tgz").write_bytes(bundle[1].read_bytes()[:100])
    with pytest.raises(BadInput, match="not a bundle"):
        programs.unpack(tmp_path / "torn.tgz")


@pytest.mark.parametrize(
    ("error", "kind", "says"),
    [
        (zlib.error("invalid distance"), BadInput, "is damaged, or not a bundle .invalid distance"),
        (OSError(errno.ENOSPC, "no space"), WorkFailed, "cache/kube cannot be written: no space"),
    ],
)
def test_what_keeps_a_bundle_from_being_unpacked_is_told(bundle, monkeypatch, error, kind, says):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(tarfile.TarFile, "extract", fails)
    with pytest.raises(kind, match=says):
        programs.unpack(bundle[1])


def test_a_bundle_without_its_list_is_refused(bundle, tmp_path):
    folder, _ = bundle
    (folder / "made.json").unlink()
    with tarfile.open(tmp_path / "bad.tgz", "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    with pytest.raises(BadInput, match="bad.tgz: is damaged, or not a bundle .it has no made.json"):
        programs.unpack(tmp_path / "bad.tgz")


def test_unpacking_again_changes_nothing(bundle):
    folder, path = bundle
    before = os.stat(folder / "bin/kube")
    assert programs.unpack(path) == programs.unpack(path) == folder
    assert os.stat(folder / "bin/kube").st_ino == before.st_ino, "clusters may run it"
    (folder / "bin/kube").write_text("changed")
    assert programs.unpack(path) == folder
    assert programs.damaged(folder) == []
    assert {one.name for one in programs.cache().iterdir()} == {folder.name, "lock"}


@pytest.mark.skipif(os.getuid() != 0, reason="only root could give files to another user")
def test_what_is_unpacked_belongs_to_who_unpacks_it(bundle):
    folder, path = bundle
    for one in folder.rglob("*"):
        os.lchown(one, 12345, 12345)
    programs.pack(path)
    shutil.rmtree(folder)
    programs.unpack(path)
    assert {one.lstat().st_uid for one in (folder, *folder.rglob("*"))} == {0}


def test_what_a_killed_build_left_goes_with_the_next_one(bundle):
    _, path = bundle
    old, new = programs.cache() / "draft-old", programs.cache() / "draft-new"
    for draft in (old, new):
        (draft / "build/bin").mkdir(parents=True)
    os.utime(old, (0, 0))
    programs.unpack(path)
    assert not old.exists()
    assert new.exists(), "it may be another machine's, whose locks are not seen here"


def test_whoever_waits_for_another_build_says_so(bundle):
    said = []
    with (programs.cache() / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)

        def say(line):
            said.append(line)
            fcntl.flock(held, fcntl.LOCK_UN)  # the other one ends

        with programs.lock(say):
            pass
    assert said == [f"another command builds in {programs.cache()}; waiting for it to end"]


def test_a_build_that_is_whole_is_used_where_nobody_may_write(bundle, monkeypatch):
    folder, _ = bundle

    def refused(say):
        raise AssertionError("the cache was locked")

    monkeypatch.setattr(programs, "lock", refused)
    assert programs.build(print) == folder
    (folder / "bin/kube").write_text("changed")
    with pytest.raises(AssertionError, match="locked"):
        programs.build(print)


def program(folder, name, says):
    (folder / name).write_text(f"#!/bin/sh\necho '{says}'\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("says", "fits"),
    [("runc version 1.0.3", False), ("runc version 1.1.5+ds1", True), ("runc v2.0.0", True),
     ("runc version unknown", False)],
)  # fmt: skip
def test_a_program_of_the_machines_is_used_if_it_is_new_enough(tmp_path, monkeypatch, says, fits):
    program(tmp_path, "runc", says)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    found = debian_packages.on_path("runc", "--version", (1, 1))
    assert (found == tmp_path / "runc") is fits


def test_a_program_of_an_earlier_build_is_not_the_machines(tmp_path, monkeypatch):
    (tmp_path / "old/bin").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    for folder in (tmp_path / "old/bin", tmp_path / "bin"):
        program(folder, "runc", "runc version 1.1.5")
    (tmp_path / "old/made.json").touch()
    monkeypatch.setenv("PATH", f"{tmp_path}/old/bin:{tmp_path}/bin:/bin")
    assert debian_packages.on_path("runc", "--version", (1, 1)) == tmp_path / "bin/runc"


def test_an_nft_of_the_machines_is_carried_with_its_libraries(tmp_path):
    """As a node without internet may have none."""
    (tmp_path / "machine").mkdir()
    (tmp_path / "draft/bin").mkdir(parents=True)
    own = tmp_path / "machine/nft"
    shutil.copy2(shutil.which("openssl"), own)  # nodes need it, and it has libraries
    debian_packages._nft(tmp_path / "draft", own, tmp_path)
    own.unlink()
    moved = (tmp_path / "draft").rename(tmp_path / "elsewhere")
    assert subprocess.run([moved / "bin/nft", "version"]).returncode == 0
    names = {path.name.split(".so")[0] for path in (moved / "lib").iterdir()}
    assert "libcrypto" in names
    assert not names & {"libc", "ld-linux-x86-64", "ld-linux-aarch64"}


def test_kubernetes_is_built_whatever_there_is(tmp_path, monkeypatch):
    """As a part of it is ours."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "draft/bin").mkdir(parents=True)
    for name in programs.KUBERNETES:
        program(tmp_path / "bin", name, f"Kubernetes {programs.version()}")
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/bin")
    monkeypatch.setattr(go_build, "build", lambda *_: pytest.fail("it was built"))
    with pytest.raises(pytest.fail.Exception, match="it was built"):
        programs._kubernetes(tmp_path / "draft", "go", print)


def test_a_user_without_a_home_gets_no_folder_by_the_name_of_one(monkeypatch, tmp_path):
    """Which is removed by `rm -r ~`, as the shell reads it."""
    for name in ("HOME", "XDG_CACHE_HOME", "DOVETAIL_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 2)  # who is in no list of users
    monkeypatch.chdir(tmp_path)
    with (
        pytest.raises(BadInput, match=r"~/.cache/dovetail: .* set DOVETAIL_CACHE"),
        programs.lock(print),
    ):
        pass
    assert list(tmp_path.iterdir()) == []
