# SPDX-License-Identifier: LGPL-3.0-or-later
"""The devices of a machine that simulations may ask for: which there are, and what they are called.

Input: a name, `rdma`, `efa`, `gpu` or the path of a device. Output: its units, each a list of
device files: what one pod gets. Invariants: a GPU is a unit of its own, and so is a path; all
network adapters of a kind are one unit, which many may have at once. Nothing is opened: opening
some devices does something.

    units("gpu")        [["/dev/nvidia0", "/dev/nvidiactl"], ["/dev/nvidia1", "/dev/nvidiactl"]]
    units("/dev/fuse")  [["/dev/fuse"]]
    resource("/dev/net/tun")  "dovetail/dev.net.tun", what Kubernetes counts
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

DEV, SYS = Path("/dev"), Path("/sys")
KINDS = ("rdma", "efa", "gpu")
SHARED = ("rdma", "efa")
"""Kinds of which all who ask get every adapter: the adapter itself keeps its users apart."""
MOST_SHARED = 110
"""Pods that may have a node's adapters at once: as many as a kubelet runs."""
PATH = re.compile(r"/dev(?:/[A-Za-z0-9][A-Za-z0-9_.-]*)+", re.ASCII)
LONGEST = 60
"""Characters of a path: with them a resource has the longest name that Kubernetes takes."""
_BESIDE_NVIDIA = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")


def is_path(name: str) -> bool:
    """Whether this is what a device file can be called here."""
    return len(name) <= LONGEST and bool(PATH.fullmatch(name)) and name[-1].isalnum()


def resource(name: str) -> str:
    """What nodes of `dovetail kube` call a device, for Kubernetes to count."""
    return f"dovetail/{name.strip('/').replace('/', '.')}"


def units(name: str, dev: Path = DEV, sys: Path = SYS) -> list[list[str]]:
    """What there is of a device; empty if there is none."""
    if name == "gpu":
        return _gpus(dev)
    if name in SHARED:
        found = [f"{path}" for path in _verbs(dev, sys, efa=name == "efa")]
        manager = [f"{path}" for path in (dev / "infiniband/rdma_cm",) if path.exists()]
        return [found + (manager if name == "rdma" else [])] if found else []
    return [[name]] if name.startswith("/") and _is_device(name) else []


def closed(unit: list[str]) -> list[str]:
    """Device files of a unit that this user may not open."""
    return [path for path in unit if not os.access(path, os.R_OK | os.W_OK)]


def here(name: str) -> int:
    """How many simulations on this machine may have a device at once, outside of any cluster.

    Those that this user may not open do not count.
    """
    visible = visible_gpus()
    if name == "gpu" and visible is not None:
        return len(visible)
    mine = [unit for unit in units(name) if not closed(unit)]
    return len(mine) * (MOST_SHARED if name in SHARED else 1)


def visible_gpus() -> list[str] | None:
    """The GPUs that a batch job left to this process, by CUDA's own variable; None for all."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    return [one for one in given.split(",") if one and not one.startswith(("-", "No"))]


def _is_device(path: str) -> bool:
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)


def _numbered(folder: Path, name: str) -> list[Path]:
    """Files such as nvidia0, nvidia1, by their number."""
    found = {path: re.fullmatch(rf"{name}(\d+)", path.name) for path in folder.glob(f"{name}*")}
    return sorted((path for path in found if found[path]), key=lambda p: (len(p.name), p.name))


def _gpus(dev: Path) -> list[list[str]]:
    """NVIDIA's each with the driver's common files, AMD's each with the one of the compute driver.

    Without that a rendering node may be any display.
    """
    beside = [f"{dev / name}" for name in _BESIDE_NVIDIA if (dev / name).exists()]
    found = [[f"{path}", *beside] for path in _numbered(dev, "nvidia")]
    if (dev / "kfd").exists():
        found += [[f"{path}", f"{dev / 'kfd'}"] for path in _numbered(dev / "dri", "renderD")]
    return found


def _verbs(dev: Path, sys: Path, *, efa: bool) -> list[Path]:
    """The files by which programs use InfiniBand and its kin, those of EFA or all others."""
    found = []
    for path in _numbered(dev / "infiniband", "uverbs"):
        about = sys / "class/infiniband_verbs" / path.name
        try:
            adapter = (about / "ibdev").read_text().strip()
        except OSError:
            adapter = ""
        driver = Path(os.path.realpath(about / "device/driver")).name
        if efa == (driver == "efa" or adapter.startswith("efa")):
            found.append(path)
    return found


class Gpus:
    """Which simulation on this machine has which GPUs, where nothing hides those of the others.

    They are told by the variables by which CUDA and ROCm choose what a program sees. On AMD's the
    first of them counts among those that the second leaves.
    """

    def __init__(self, dev: Path = DEV) -> None:
        self._amd = (dev / "kfd").exists() and not _numbered(dev, "nvidia")
        given = visible_gpus()
        self._free = [str(n) for n in range(here("gpu"))] if given is None else given
        self._taken: dict[str, list[str]] = {}

    def take(self, name: str, devices: Mapping[str, int]) -> dict[str, str]:
        """The variables of a simulation with these devices; its GPUs are its own until released."""
        number = devices.get("gpu", 0)
        if not number:
            return {}
        self._taken[name], self._free = self._free[:number], self._free[number:]
        shown = ",".join(self._taken[name])
        counted = ",".join(map(str, range(len(self._taken[name])))) if self._amd else shown
        return {"CUDA_VISIBLE_DEVICES": counted, "ROCR_VISIBLE_DEVICES": shown}

    def release(self, name: str) -> None:
        """It has ended."""
        self._free += self._taken.pop(name, [])
