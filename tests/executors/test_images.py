# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations from images: what their pods are, and what is said of an image that is of no use."""

from __future__ import annotations

import json
import shutil
import struct
import sys
from pathlib import Path

import pytest
from dovetail.core import protocol
from dovetail.core.errors import BadInput
from dovetail.executors.kubernetes import images, manifests
from dovetail.executors.pods import image_check
from dovetail.host import borrowed_python, install_paths

pytestmark = pytest.mark.unit

IMAGE = "localhost/solver:1"


def spec(**more):
    given = {"image": IMAGE, **more}
    return protocol.Spec("sim", "sim", "/case", 2, (1.0, 1.0), ("solver",), **given)


def pod_of(one, tmp_path):
    seen = manifests.folders_of_image([one], tmp_path)
    job = manifests.job("abc123", one, "sim", [2], [500], [1], seen)
    return job["spec"]["template"]["spec"]


def test_a_pod_runs_from_the_image_with_the_machines_python_and_the_images_path(tmp_path):
    pod = pod_of(spec(pull_policy="Always", pull_secret="mine"), tmp_path)
    (container,) = pod["containers"]
    assert (container["image"], container["imagePullPolicy"]) == (IMAGE, "Always")
    assert pod["imagePullSecrets"] == [{"name": "mine"}]
    assert container["command"][:4] == borrowed_python.words()
    assert "PATH" not in {one["name"] for one in container["env"]}
    assert container["securityContext"] == {"runAsUser": 0, "runAsGroup": 0}


def test_a_pod_sees_nothing_of_the_machine_where_the_image_has_its_own(tmp_path):
    pod = pod_of(spec(), tmp_path)
    volumes = {one["name"]: one["hostPath"]["path"] for one in pod["volumes"]}
    mounts = pod["containers"][0]["volumeMounts"]
    seen = {one["mountPath"]: volumes[one["name"]] for one in mounts}
    assert seen[f"{borrowed_python.ROOT}/usr"] == "/usr"
    for name in ("/usr", "/bin", "/lib", "/lib64", "/etc", "/opt"):
        assert name not in seen
    assert seen["/case"] == "/case"
    ours = Path(install_paths.PACKAGES, "dovetail")
    assert any(Path(name) in (ours, *ours.parents) for name in seen)
    assert {one["mountPath"] for one in mounts if not one.get("readOnly")} == {
        "/dev/shm", str(tmp_path)
    }  # fmt: skip


def test_a_pod_without_an_image_is_as_it_was(tmp_path):
    pod = pod_of(spec(image=""), tmp_path)
    (container,) = pod["containers"]
    assert (container["image"], container["command"][0]) == (manifests.IMAGE, "/usr/bin/python3")
    assert "securityContext" not in container
    assert "imagePullSecrets" not in pod


def test_lines_for_our_python_are_for_the_machines_in_an_image():
    assert images.words("blockMesh -x") == ["blockMesh", "-x"]
    words = images.words("dovetail decompose --ranks 2 .")
    assert words[:4] == borrowed_python.words(sys.executable)
    assert words[-4:] == ["decompose", "--ranks", "2", "."]


def test_each_image_is_asked_for_the_programs_that_the_plan_names():
    steps = ("mesh -a", "dovetail decompose .", "mesh -b")
    more = {"write": "touch stop", "restart": "go-on {ranks}", "environment": (("PATH", "/p"),)}
    two = spec(prepare=steps, **more)
    asked = images.asked([spec(), two, spec(image=""), spec(image="other")])
    assert set(asked) == {IMAGE, "other"}
    programs = json.loads(asked[IMAGE])["programs"]
    others = [[name, "/p"] for name in ("solver", "mesh", "touch", "go-on")]
    assert programs == [["solver", ""], *others]


# --- what nodes say ---


def tried(state, policy="IfNotPresent", **more):
    one = {"name": "image-0", "state": state, **more}
    container = {"name": "image-0", "image": IMAGE, "imagePullPolicy": policy}
    return {
        "metadata": {"name": "p"},
        "spec": {"nodeName": "n1", "initContainers": [container]},
        "status": {"initContainerStatuses": [one]},
    }


def waiting(reason, message=""):
    return {"waiting": {"reason": reason, "message": message}}


ENDED = {"terminated": {"exitCode": 1, "reason": "Error", "message": "x\nit has no program sh\n"}}
PULLED = (
    'Back-off pulling image "a": ErrImagePull: rpc error: code = NotFound desc = failed to pull '
    'and unpack image "r/a:1": failed to resolve reference "r/a:1": r/a:1: not found'
)
DENIED = "pulling from host r failed with status code [manifests 1]: 401 Unauthorized"
UNKNOWN = "tls: failed to verify certificate: x509: certificate signed by unknown authority"
SAID = {
    "not there yet": (waiting("PodInitializing"), {}, ""),
    "still pulled": ({"running": {}}, {}, ""),
    "of no use": (ENDED, {}, f"image {IMAGE} is of no use on node n1: it has no program sh"),
    "of no use, tried again": (
        waiting("CrashLoopBackOff"),
        {"lastState": ENDED},
        f"image {IMAGE} is of no use on node n1: it has no program sh",
    ),
    "never pulled": (
        waiting("ErrImageNeverPull"),
        {"policy": "Never"},
        f"image {IMAGE} is not on node n1, and pull_policy is Never; load it there with `dovetail",
    ),
    "not in the registry": (
        waiting("ImagePullBackOff", PULLED),
        {},
        f"image {IMAGE} cannot be pulled by node n1: r/a:1: not found; or load it",
    ),
    "of a registry that wants other credentials": (
        waiting("ImagePullBackOff", PULLED.replace("r/a:1: not found", DENIED)),
        {},
        f"image {IMAGE} cannot be pulled by node n1: {DENIED}; name a Secret with the registry's",
    ),
    "of a registry that nobody vouches for": (
        waiting("ErrImagePull", PULLED.replace("r/a:1: not found", UNKNOWN)),
        {},
        f"image {IMAGE} cannot be pulled by node n1: {UNKNOWN}; tell the node of the registry's",
    ),
    "for other machines": (
        waiting("ErrImagePull", "x: no match for platform in manifest: not found"),
        {},
        f"image {IMAGE} has nothing for the architecture of node n1",
    ),
}


@pytest.mark.parametrize("case", SAID)
def test_what_is_wrong_with_an_image_is_one_line(case):
    state, more, begins = SAID[case]
    said = images.trouble(tried(state, **more))
    assert said.startswith(begins)
    assert bool(said) == bool(begins)
    assert "\n" not in said
    assert not images.whole(tried(state))


def test_an_image_is_tried_once_its_container_has_ended_well():
    assert images.whole(tried({"terminated": {"exitCode": 0}}))
    assert not images.whole({"spec": {}, "status": {}})


class Cluster:
    """An API whose one node tries images, after some looks; `pod` is what it has until then."""

    server = "https://c"

    def __init__(self, pod, looks):
        self.pod, self.looks = pod, looks

    def create(self, path, body):
        pass

    def delete(self, path):
        pass

    def get(self, path, **query):
        if path == manifests.path("Node"):
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            return {"items": [{"metadata": {"name": "n1"}, "spec": {}, "status": ready}]}
        self.looks -= 1
        done = tried({"terminated": {"exitCode": 0}})
        return {"items": [self.pod if self.looks >= 0 else done]}


FULL = "0/1 nodes are available: 1 Insufficient cpu."
NOWHERE = {
    "metadata": {"name": "p"}, "spec": {},
    "status": {"conditions": [{"type": "PodScheduled", "status": "False", "message": FULL}]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("pod", "says"),
    [(NOWHERE, f"images cannot be tried on node n1 yet: {FULL}"),
     (tried(waiting("PodInitializing")), "images are got, and tried, by node n1")],
)  # fmt: skip
def test_what_a_wait_for_images_is_for_is_told(tmp_path, monkeypatch, pod, says):
    monkeypatch.setattr(images, "TELL", 0.0)
    monkeypatch.setattr(images, "_LOOK", 0.001)
    told, one = [], spec()
    seen = manifests.folders_of_image([one], tmp_path)
    assert images.check(Cluster(pod, 3), "abc123", [one], seen, told.append) == {"n1"}
    assert told == [f"{says}, since 0 s"], "once, while nothing changes"
    monkeypatch.setattr(images, "PATIENCE", -1.0)
    with pytest.raises(BadInput, match=f"^{says}; that took more than"):
        images.check(Cluster(pod, 3), "abc123", [one], seen, told.append)


BUSY = "unexpected status from HEAD request to https://r/v2/a/manifests/1: 503 Service Unavailable"


def test_a_registry_that_is_too_busy_is_asked_again(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "TELL", 0.0)
    monkeypatch.setattr(images, "_LOOK", 0.001)
    told, one = [], spec()
    seen = manifests.folders_of_image([one], tmp_path)
    pod = tried(waiting("ErrImagePull", PULLED.replace("r/a:1: not found", BUSY)))
    images.check(Cluster(pod, 3), "abc123", [one], seen, told.append)
    (line,) = told
    assert line.startswith(f"image {IMAGE} cannot be pulled by node n1: {BUSY}; or load it")
    monkeypatch.setattr(images, "RETRIES", -1.0)
    with pytest.raises(BadInput, match="503 Service Unavailable"):
        images.check(Cluster(pod, 3), "abc123", [one], seen, told.append)
    monkeypatch.setattr(images, "RETRIES", 60.0)
    gone = tried(waiting("ErrImagePull", PULLED))
    with pytest.raises(BadInput, match="not found"):
        images.check(Cluster(gone, 3), "abc123", [one], seen, told.append)


# --- what a container of the image finds ---


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A folder of programs, the only one on PATH: a shell and an MPI's starter."""
    for name in ("sh", "mpirun", "solver"):
        shutil.copy("/bin/true" if name != "sh" else "/bin/sh", tmp_path / name)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def found(*programs, libraries=()):
    return image_check.trouble([[name, ""] for name in programs], dict(libraries))


def test_an_image_with_all_that_is_asked_for_is_of_use(root):
    assert found("solver", "./Allrun", str(root / "solver")) == ""


@pytest.mark.parametrize("name", ["sh", "mpirun", "solver"])
def test_a_program_that_an_image_lacks_is_named(root, name):
    (root / name).unlink()
    assert found("solver") == f"it has no program {name} on its PATH, {root}"


def test_a_path_that_an_image_lacks_is_named(root):
    assert found("/opt/solver") == "it has no program /opt/solver"


def test_programs_for_other_machines_are_told(root):
    file = root / "sh"
    data = bytearray(Path("/bin/sh").read_bytes())
    here = image_check.machine_of("/bin/sh")
    data[18:20] = struct.pack("<H", 243)
    file.unlink()
    file.write_bytes(data)
    file.chmod(0o755)
    assert found("solver") == f"it is for riscv64, and the node is {here}"


def test_a_library_that_its_loader_does_not_take_is_told(root, tmp_path):
    assert image_check._loads("/bin/sh", str(tmp_path / "no.so")) != ""
    assert image_check._loads("/bin/sh", "") == ""
