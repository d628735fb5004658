# SPDX-License-Identifier: LGPL-3.0-or-later
"""Files with container images: read, named, refused in one line, and written for containerd."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import tarfile
from types import SimpleNamespace

import pytest
from dovetail.core.errors import BadInput
from dovetail.host.progress import Progress
from support.images import docker_archive
from usernetes_setup import node_images
from usernetes_setup.build import image_archive
from usernetes_setup.build.image_archive import Source

pytestmark = pytest.mark.unit
ZSTD = b"\x28\xb5\x2f\xfd" + bytes(100)


@pytest.fixture
def docker(tmp_path):
    """An archive of `docker save`."""
    (tmp_path / "root/etc").mkdir(parents=True)
    (tmp_path / "root/etc/mark").write_text("x")
    return docker_archive(tmp_path / "root", tmp_path / "image.tar", "solver:1")


@pytest.fixture
def layout(docker, tmp_path):
    """The same image as a folder with an OCI layout."""
    target = tmp_path / "layout"
    with Source(docker) as source, io.BytesIO() as out:
        (image,) = source.images()
        progress = Progress(print, "loading")
        source.write(image, image.name, out, progress)
        assert 0 < progress.done == progress.total
        out.seek(0)
        with tarfile.open(fileobj=out) as archive:
            archive.extractall(target)
    return target


def changed(layout, **more):
    """The layout with another index entry."""
    index = json.loads((layout / "index.json").read_text())
    index["manifests"][0].update(more)
    (layout / "index.json").write_text(json.dumps(index))
    return layout


def images(path):
    with Source(path) as source:
        return source.images()


def blob(layout, value):
    """A further blob of a layout; its descriptor."""
    data = json.dumps(value).encode()
    digest = hashlib.sha256(data).hexdigest()
    (layout / "blobs/sha256" / digest).write_bytes(data)
    return {"digest": f"sha256:{digest}", "size": len(data)}


NAMES = {
    "solver": "docker.io/library/solver:latest",
    "group/solver:2": "docker.io/group/solver:2",
    "localhost/solver": "localhost/solver:latest",
    "r.example.org:5000/a/b:1": "r.example.org:5000/a/b:1",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_what_the_cluster_makes_of_it(name):
    assert image_archive.full_name(name) == NAMES[name]


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a:", "../x", "a/"])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(BadInput, match="would be right"):
        image_archive.full_name(name)


def test_all_kinds_of_files_have_the_same_image(docker, layout, tmp_path):
    (of_docker,), (of_layout,) = images(docker), images(layout)
    assert of_docker.name == of_layout.name == "docker.io/library/solver:1"
    assert of_docker.config == of_layout.config
    packed = tmp_path / "packed.tar.gz"
    packed.write_bytes(gzip.compress(docker.read_bytes()))
    assert images(packed)[0].config == of_docker.config
    again = tmp_path / "oci.tar"
    with tarfile.open(again, "w") as archive:
        archive.add(layout, ".")
    assert images(again)[0].manifest == of_layout.manifest


def test_an_image_has_all_the_names_that_it_was_saved_with(docker, tmp_path, monkeypatch):
    """`docker save solver:1 solver:latest` has it once."""
    again = tmp_path / "again.tar"
    with tarfile.open(docker) as archive, tarfile.open(again, "w") as changed:
        for entry in archive:
            data = archive.extractfile(entry).read()
            data = data.replace(b'["solver:1"]', b'["solver:1", "solver:latest"]')
            entry.size = len(data)
            changed.addfile(entry, io.BytesIO(data))
    loaded = []
    monkeypatch.setattr(node_images, "_nodes", lambda name: [SimpleNamespace(name="n")])
    monkeypatch.setattr(node_images, "_import", lambda node, write, _: loaded.append(write.args[1]))
    monkeypatch.setattr(node_images, "_elsewhere", lambda name, nodes: [])
    both = ["docker.io/library/solver:1", "docker.io/library/solver:latest"]
    assert node_images.load("c", again, "", print)["images"] == loaded == both
    loaded.clear()
    assert node_images.load("c", again, "own:2", print)["images"] == loaded
    assert loaded == ["docker.io/library/own:2"]


def test_the_layer_arrives_as_it_was(layout):
    (image,) = images(layout)
    digest = json.loads(image.manifest)["layers"][0]["digest"]
    data = (layout / "blobs" / digest.replace(":", "/")).read_bytes()
    assert f"sha256:{hashlib.sha256(data).hexdigest()}" == digest
    with tarfile.open(fileobj=io.BytesIO(data)) as layer:
        assert layer.extractfile("etc/mark").read() == b"x"


def test_a_tag_alone_is_no_name(layout):
    notes = {"org.opencontainers.image.ref.name": "1"}
    assert images(changed(layout, annotations=notes))[0].name == ""


def test_of_an_index_the_image_for_this_machine_is_taken(layout):
    own = json.loads((layout / "index.json").read_text())["manifests"][0]
    config = blob(layout, {"architecture": "s390x", "os": "linux", "rootfs": {}})
    other = blob(layout, {"config": config, "layers": []})
    both = blob(layout, {"manifests": [other, own]})
    (image,) = images(changed(layout, **both))
    assert f"sha256:{hashlib.sha256(image.manifest).hexdigest()}" == own["digest"]


def test_of_an_index_what_was_not_saved_is_passed_over(layout):
    """As `docker save` lists all of an image that was pulled for one machine."""
    own = json.loads((layout / "index.json").read_text())["manifests"][0]
    own = {**own, "platform": {"os": "linux", "architecture": image_archive.architecture()}}
    away = {"digest": f"sha256:{'0' * 64}", "size": 1}
    other = {**away, "platform": {"os": "linux", "architecture": "s390x"}}
    (image,) = images(changed(layout, **blob(layout, {"manifests": [other, own]})))
    assert f"sha256:{hashlib.sha256(image.manifest).hexdigest()}" == own["digest"]
    (image,) = images(changed(layout, **blob(layout, {"manifests": [away, own]})))
    saved = {**blob(layout, {}), "platform": other["platform"]}
    own["digest"] = away["digest"]
    with pytest.raises(BadInput, match="is for linux/s390x, and this machine is linux/"):
        images(changed(layout, **blob(layout, {"manifests": [own, saved]})))


def test_an_image_for_other_machines_is_refused(tmp_path):
    (tmp_path / "root").mkdir()
    path = docker_archive(tmp_path / "root", tmp_path / "i.tar", "a", architecture="s390x")
    own = image_archive.architecture()
    with pytest.raises(BadInput) as told:
        images(path)
    assert str(told.value) == (
        f"{path}: image docker.io/library/a:latest in it is for linux/s390x, and this machine is "
        f"linux/{own}"
    )


def cut(path):
    path.write_bytes(path.read_bytes()[:700])


def test_a_containerfile_is_refused_with_what_makes_an_image_of_it(tmp_path):
    file = tmp_path / "Containerfile"
    file.write_text("# ours\n\nFROM debian:12\nRUN apt-get install openmpi-bin\n")
    with pytest.raises(BadInput, match="is a Containerfile, and nothing here .*buildah build -f"):
        images(file)


def spoilt(path):
    """Packed as no other error of tarfile's tells."""
    with tarfile.open(path, "w") as archive:
        for name in ("a", "b"):
            entry = tarfile.TarInfo(name)
            entry.size = 150_000
            archive.addfile(entry, io.BytesIO(b"".join(b"line %d\n" % n for n in range(20000))))
    data = bytearray(lzma.compress(path.read_bytes()))
    middle = len(data) // 2
    data[middle : middle + 2000] = bytes(one ^ 0x5A for one in data[middle : middle + 2000])
    path.write_bytes(data)


def looped(path):
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("index.json")
        entry.type, entry.linkname = tarfile.SYMTYPE, "index.json"
        archive.addfile(entry)


def piped(path):
    path.unlink()
    os.mkfifo(path)


def deep(path):
    with tarfile.open(path, "w") as archive:
        entry = tarfile.TarInfo("index.json")
        entry.size = 200_000
        archive.addfile(entry, io.BytesIO(b"[" * entry.size))


BAD = {
    "no file": (lambda path: path.unlink(), "no such file or folder"),
    "an empty file": (lambda path: path.write_bytes(b""), "is no archive with container images"),
    "something else": (lambda path: path.write_text("hello\n"), "is no archive with container"),
    "an archive that is cut": (cut, "is damaged|is no archive|no image"),
    "one that is spoilt": (spoilt, "is damaged: "),
    "a pipe": (piped, "is neither file nor folder; write the archive to a file first"),
    "one by zstd": (lambda path: path.write_bytes(ZSTD), "is compressed by zstd, .*`zstd -d "),
    "an index without an end": (deep, "is damaged: index.json is no JSON"),
    "links that lead to each other": (looped, "is damaged, or no image: it has no index.json"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_without_an_image_is_refused_in_one_line(docker, case):
    change, says = BAD[case]
    change(docker)
    with pytest.raises(BadInput, match=says) as told:
        images(docker)
    assert str(told.value).startswith(f"{docker}: ")
    assert "\n" not in str(told.value)


def test_a_file_that_cannot_be_looked_at_is_refused(tmp_path):
    """As one in a folder of another user's."""
    with pytest.raises(BadInput, match="cannot be used: File name too long|no such file"):
        images(tmp_path / ("x" * 300) / "image.tar")


def test_a_folder_without_an_image_is_refused(tmp_path):
    with pytest.raises(BadInput, match="has neither index.json nor manifest.json: no image"):
        images(tmp_path)


def test_a_blob_that_was_changed_is_refused(layout):
    (image,) = images(layout)
    digest = json.loads(image.manifest)["config"]["digest"]
    (layout / "blobs" / digest.replace(":", "/")).write_bytes(b"{}")
    with pytest.raises(BadInput, match="is damaged: sha256:.* has another content"):
        images(layout)


@pytest.mark.parametrize("damage", ["changed", "cut", "gone"])
def test_a_layer_that_is_damaged_is_refused_before_it_is_loaded(layout, tmp_path, damage):
    (image,) = images(layout)
    layer = layout / image.layers[0]
    data = layer.read_bytes()
    layer.write_bytes(data[:-1] if damage == "cut" else b"x" + data[1:])
    if damage == "gone":
        layer.unlink()
    with tarfile.open(tmp_path / "oci.tar", "w") as archive:
        archive.add(layout, ".")
    for source in (layout, tmp_path / "oci.tar"):
        with pytest.raises(BadInput, match="is damaged.*(has another content|it has no blobs/)"):
            images(source)


@pytest.mark.parametrize("text", ["[]", "{}", "null", '{"manifests": [1]}', '{"manifests": []}'])
def test_an_index_of_something_else_is_refused(layout, text):
    (layout / "index.json").write_text(text)
    with pytest.raises(BadInput, match="is damaged, or no image|has no image in it"):
        images(layout)
