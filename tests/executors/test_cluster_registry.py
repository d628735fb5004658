# SPDX-License-Identifier: LGPL-3.0-or-later
"""Simulations from a private registry, which has credentials and a certificate of its own."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from support import images, registries
from support.clusters import own_address

pytestmark = pytest.mark.kube
LOCAL = "localhost/test/openmpi:1"


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    host = own_address()
    if not host:
        pytest.skip("this machine has no address but loopback")
    found = registries.Registry(tmp_path_factory.mktemp("registry"), host)
    yield found
    found.close()


@pytest.fixture(scope="module")
def image(site, registry):
    """An image that is in the registry, and on no node."""
    archive = site.folder / "image.tar"
    shutil.copyfile(images.archive("openmpi"), archive)
    archive.chmod(0o644)
    site.machine.verb("image", "--name", "one", "load", str(archive))
    name = f"{registry.name}/private/solver:1"
    user = f"{registries.USER}:{registries.PASSWORD}"
    socket = f"{site.made['folder']}/run/containerd.sock"
    ctr = [f"{site.machine.binaries}/bin/ctr", "--address", socket, "-n", "k8s.io", "images"]
    push = [*ctr, "push", "--user", user, "--tlscacert", str(registry.certificate), name, LOCAL]
    subprocess.run(push, check=True, capture_output=True)
    site.machine.verb("image", "--name", "one", "remove", LOCAL)
    site.apply("operator-manifests")
    return name


@pytest.fixture
def secret(site, out, image, registry):
    """Makes a Secret with credentials, of this password."""

    def make(password):
        site.kubectl("create", "secret", "docker-registry", "mine", "--docker-server",
                     registry.name, "--docker-username", registries.USER, "--docker-password",
                     password)  # fmt: skip
        return "mine"

    yield make
    site.kubectl("delete", "secret", "mine", "--ignore-not-found")


@pytest.fixture
def trusted(site, registry):
    """Lets the nodes know the registry's certificate, as the guide says."""
    folder = site.machine.folder / ".config/dovetail/registries" / registry.name
    folder.mkdir(parents=True)
    shutil.copyfile(registry.certificate, folder / "registry.crt")  # for the cluster's user to read
    (folder / "hosts.toml").write_text(
        f'server = "https://{registry.name}"\n'
        f'[host."https://{registry.name}"]\n  ca = "{folder}/registry.crt"\n'
    )
    yield
    shutil.rmtree(folder)


def entry(image, **more):
    words = ["busy", "sleep", "3", "20", "20"]
    return {"image": image, "command": words, "prepare": [f"cp {images.MARK} mark"],
            "weights": [1, 1], **more}  # fmt: skip


def test_an_image_is_pulled_with_the_secret_that_the_plan_names(site, out, image, secret, trusted):
    plan = site.plan(entry(image, pull_secret=secret(registries.PASSWORD)))
    assert site.end(site.start(plan, out)) == 0, site.errors(out)
    assert (site.folder / out / "sim/case/mark").read_text() == "openmpi\n"
    listed = json.loads(site.machine.verb("image", "--name", "one", "list", "--json").stdout)
    assert image in {one["image"] for one in listed}
    site.machine.verb("image", "--name", "one", "remove", image)


def test_wrong_credentials_are_told_in_one_line(site, out, image, secret, trusted):
    plan = site.plan(entry(image, pull_secret=secret("wrong")))
    refused(site, out, plan, image, "401 Unauthorized; name a Secret with")


def test_a_certificate_that_nobody_signed_is_told_in_one_line(site, out, image, secret):
    plan = site.plan(entry(image, pull_secret=secret(registries.PASSWORD)))
    refused(site, out, plan, image, "signed by unknown authority; tell the node")


def refused(site, out, plan, image, why):
    assert site.end(site.start(plan, out)) == 2
    (line,) = [line for line in site.errors(out).splitlines() if "image" in line]
    assert f"image {image} cannot be pulled by node {site.made['node']}: " in line
    assert why in line
    assert not site.log(out) or not site.of("Launch", out)
