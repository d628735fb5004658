# SPDX-License-Identifier: LGPL-3.0-or-later
"""Which devices a machine has, what they are called, and who has which GPU."""

from __future__ import annotations

import pytest
from dovetail.host import devices

pytestmark = pytest.mark.unit


@pytest.fixture
def machine(tmp_path):
    """Makes files of a machine that is only written down; returns its /dev and /sys."""

    def make(*files: str) -> dict:
        for name in files:
            path, _, text = name.partition("=")
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        return {"dev": tmp_path / "dev", "sys": tmp_path / "sys"}

    return make


def names(found):
    return [[path.rsplit("dev/", 1)[1] for path in unit] for unit in found]


def test_each_gpu_comes_with_the_files_that_its_driver_shares(machine):
    where = machine(*(f"dev/nvidia{n}" for n in (10, 0, 2)), "dev/nvidiactl", "dev/nvidia-uvm")
    assert names(devices.units("gpu", **where)) == [
        ["nvidia0", "nvidiactl", "nvidia-uvm"],
        ["nvidia2", "nvidiactl", "nvidia-uvm"],
        ["nvidia10", "nvidiactl", "nvidia-uvm"],
    ]


def test_a_display_is_no_gpu_without_the_driver_that_computes(machine):
    assert devices.units("gpu", **machine("dev/dri/renderD128", "dev/dri/card0")) == []
    assert names(devices.units("gpu", **machine("dev/kfd"))) == [["dri/renderD128", "kfd"]]


def test_adapters_of_a_kind_come_together_and_efa_is_not_rdma(machine):
    verbs = "sys/class/infiniband_verbs"
    where = machine(
        *(f"dev/infiniband/uverbs{n}" for n in range(3)), "dev/infiniband/rdma_cm",
        f"{verbs}/uverbs0/ibdev=mlx5_0\n", f"{verbs}/uverbs1/ibdev=efa_0\n",
    )  # fmt: skip
    (where["sys"] / "bus/drivers/efa").mkdir(parents=True)
    (where["sys"] / "class/infiniband_verbs/uverbs2/device").mkdir(parents=True)
    (where["sys"] / "class/infiniband_verbs/uverbs2/device/driver").symlink_to(
        where["sys"] / "bus/drivers/efa"
    )
    assert names(devices.units("rdma", **where)) == [["infiniband/uverbs0", "infiniband/rdma_cm"]]
    assert names(devices.units("efa", **where)) == [["infiniband/uverbs1", "infiniband/uverbs2"]]


def test_a_path_is_a_device_of_this_machine_or_none():
    assert devices.units("/dev/null") == [["/dev/null"]]
    assert devices.units("/dev/shm") == devices.units("/dev/no/such") == []
    assert devices.here("/dev/null") == 1
    assert devices.here("nvidia.com/gpu") == 0


@pytest.mark.parametrize("name", ["/dev", "/dev/", "/dev//a", "/dev/../etc", "/dev/a b", "dev/a",
                                  "/dev/.a", f"/dev/{'a' * 60}", "/dev/a-", "/devil"])  # fmt: skip
def test_what_kubernetes_could_not_name_is_no_path(name):
    assert not devices.is_path(name)


def test_resources_have_names_that_kubernetes_takes():
    found = map(devices.resource, ("gpu", "/dev/fuse", "/dev/net/tun"))
    assert [*found] == ["dovetail/gpu", "dovetail/dev.fuse", "dovetail/dev.net.tun"]


def test_no_two_simulations_get_one_gpu(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")  # what a batch job left to us
    assert devices.here("gpu") == 3
    gpus = devices.Gpus()
    assert gpus.take("a", {"gpu": 2})["CUDA_VISIBLE_DEVICES"] == "5,7"
    assert gpus.take("b", {"gpu": 1})["ROCR_VISIBLE_DEVICES"] == "9"
    assert gpus.take("c", {"rdma": 1}) == {}
    gpus.release("a")
    gpus.release("c")
    assert gpus.take("d", {"gpu": 1})["CUDA_VISIBLE_DEVICES"] == "5"


def test_on_amds_what_cuda_counts_is_what_rocm_leaves(monkeypatch, machine):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,9")
    amd = devices.Gpus(machine("dev/kfd", "dev/dri/renderD128")["dev"])
    both = [(*amd.take(name, {"gpu": number}).values(),) for name, number in (("a", 2), ("b", 1))]
    assert both == [("0,1", "5,7"), ("0", "9")]
    mixed = devices.Gpus(machine("dev/nvidia0")["dev"])
    assert {*mixed.take("a", {"gpu": 2}).values()} == {"5,7"}


@pytest.mark.parametrize("nothing", ["", "-1", "NoDevFiles"])
def test_a_job_may_leave_no_gpu_to_us(monkeypatch, nothing):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", nothing)
    assert devices.here("gpu") == 0
