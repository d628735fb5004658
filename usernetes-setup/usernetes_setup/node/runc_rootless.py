# SPDX-License-Identifier: LGPL-3.0-or-later
"""Changes a container's configuration to what an ordinary user may do.

Called by the runtime wrapper before `runc create`, as `runc_rootless.py one|many ARGUMENTS…`: the
arguments are runc's, and `one` says that the user namespace has a single id. Needs nothing
but the standard library and starts in milliseconds. Invariant: a pod sees what it would see
with root, but for /sys, which is the host's where the pod has the host's network.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def change(config: dict[str, Any], one_id: bool) -> dict[str, Any]:
    """The configuration that runc gets instead; changed in place."""
    namespaces = config["linux"]["namespaces"]
    # Joining the namespaces that we are in needs rights over them that only their owner has.
    namespaces[:] = [space for space in namespaces if not ours(space)]
    private = {space["type"] for space in namespaces}
    mounts = []
    for mount in config["mounts"]:
        kind = mount.get("type")
        if kind == "mqueue" and "ipc" not in private:
            continue
        if kind == "sysfs" and "network" not in private:
            mount = {
                "destination": mount["destination"],
                "type": "bind",
                "source": "/sys",
                "options": ["rbind", "nosuid", "noexec", "nodev", "ro"],
            }
        elif kind == "devpts" and one_id:
            options = [word for word in mount["options"] if not word.startswith("gid=")]
            mount = {**mount, "options": options}
        elif kind == "bind" and "ro" in mount.get("options", ()):
            mount = {**mount, "options": [*mount["options"], *kept(mount["source"])]}
        mounts.append(mount)
    config["mounts"] = mounts
    return config


def kept(source: str) -> list[str]:
    """Options of a file system that who is not its owner may not take away.

    runc 1.1 would when it makes a mount one to read alone, and be refused.
    """
    try:
        flags = os.statvfs(source).f_flag
    except OSError:
        return []  # it says itself what is wrong
    known = {"nosuid": os.ST_NOSUID, "nodev": os.ST_NODEV, "noexec": os.ST_NOEXEC}
    return [name for name, flag in known.items() if flags & flag]


def ours(space: dict[str, str]) -> bool:
    """Whether an entry names a namespace that this process is in already."""
    if not space.get("path"):
        return False
    name = {"network": "net", "mount": "mnt"}.get(space["type"], space["type"])
    here = os.stat("/proc/self/ns/" + name)
    there = os.stat(space["path"])
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)


def main(words: list[str]) -> None:
    """Find the bundle among runc's arguments and rewrite its config.json."""
    bundle = words[words.index("--bundle") + 1] if "--bundle" in words else "."
    path = os.path.join(bundle, "config.json")
    with open(path) as file:
        config = json.load(file)
    with open(path, "w") as file:
        json.dump(change(config, words[0] == "one"), file)


if __name__ == "__main__":
    main(sys.argv[1:])
