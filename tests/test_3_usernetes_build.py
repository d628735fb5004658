# SPDX-License-Identifier: LGPL-3.0-or-later
"""Step 3, the build: images, and bundles for machines without internet."""

from __future__ import annotations

import json
import os
import shutil
import tarfile

import pytest
from dovetail.errors import BadInput
from dovetail.usernetes import build, images

pytestmark = pytest.mark.unit


def test_the_same_program_packs_into_the_same_image(tmp_path):
    pause = tmp_path / "pause"
    pause.write_bytes(b"\x7fELF")
    for name in ("a", "b"):
        images.pack(pause, tmp_path / name, ["localhost/x:1"], "amd64")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    with tarfile.open(tmp_path / "a") as archive:
        index = json.load(archive.extractfile("index.json"))
        digest = index["manifests"][0]["digest"].split(":")[1]
        assert archive.getmember(f"blobs/sha256/{digest}")


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.setenv("DOVETAIL_CACHE", str(tmp_path / "cache"))
    folder = build.cache() / build.key()
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/kube").write_text("program")
    (folder / "bin/kubelet").symlink_to("kube")
    made = {"bin/kube": {"bytes": 7, "sha256": build.checksum(folder / "bin/kube")}}
    (folder / "made.json").write_text(json.dumps(made))
    build.pack(tmp_path / "bundle.tgz")
    return folder, tmp_path / "bundle.tgz"


def test_a_bundle_is_the_same_on_the_other_side(bundle):
    folder, path = bundle
    shutil.rmtree(folder)
    assert build.built() is None
    assert build.unpack(path) == folder
    assert build.built() == folder
    assert os.readlink(folder / "bin/kubelet") == "kube"


def test_a_bundle_with_other_content_than_it_says_is_refused(bundle, tmp_path):
    folder, _ = bundle
    (folder / "bin/kube").write_text("changed")
    with tarfile.open(tmp_path / "bad.tgz", "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    with pytest.raises(BadInput, match="damaged: bin/kube"):
        build.unpack(tmp_path / "bad.tgz")


@pytest.mark.parametrize("name", ["../evil", "other-build/bin/kube", "/etc/evil"])
def test_a_bundle_that_reaches_elsewhere_is_refused(bundle, tmp_path, name):
    with tarfile.open(tmp_path / "evil.tgz", "w:gz") as archive:
        entry = tarfile.TarInfo(name)
        archive.addfile(entry)
    with pytest.raises(BadInput, match="not a build"):
        build.unpack(tmp_path / "evil.tgz")


def test_a_torn_bundle_is_refused(bundle, tmp_path):
    (tmp_path / "torn.tgz").write_bytes(bundle[1].read_bytes()[:100])
    with pytest.raises(BadInput, match="not a bundle"):
        build.unpack(tmp_path / "torn.tgz")
