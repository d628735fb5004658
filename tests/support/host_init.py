# SPDX-License-Identifier: LGPL-3.0-or-later
"""The first process of a host in namespaces; see hosts.py, which starts it in new ones.

Input: one argument, JSON: `name`; `names`, the text of /etc/hosts; `read` and `shared`, folders of
the maker's that it sees besides, the latter to write to; `home`, the user's folder, and `uid`.
Output: a line once all is mounted. Invariant: what it writes, but for `shared`, is in memory, and
gone with its last process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
from pathlib import Path

from usernetes_setup.node.namespaces import (
    BIND,
    PRIVATE,
    RDONLY,
    REC,
    REMOUNT,
    TUNNELS,
    interface_up,
    mount,
)

OWN = {"/tmp": "1777", "/run": "755", "/dev/shm": "1777", "/home": "755", "/var/tmp": "1777"}
GROUPS = "/sys/fs/cgroup"


def main() -> None:
    """Make the host, and stay until it ends."""
    asked = json.loads(sys.argv[1])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # so that orphans are no zombies
    socket.sethostname(asked["name"])
    interface_up("lo")
    # What the host's own folders will hide is kept by handles.
    kept = {path: os.open(path, os.O_PATH) for path in (*asked["read"], *asked["shared"], GROUPS)}
    mount("none", "/", "", REC | PRIVATE)
    for folder, mode in OWN.items():
        mount("host", folder, "tmpfs", 0, f"mode={mode}")
    mount("sysfs", "/sys", "sysfs")
    if os.path.exists(TUNNELS):  # for all, as udev has it
        os.mknod("/run/tun", stat.S_IFCHR, os.makedev(10, 200))
        os.chmod("/run/tun", 0o666)
        mount("/run/tun", TUNNELS, "", BIND)
    for path, handle in kept.items():
        if path != GROUPS:
            Path(path).mkdir(parents=True, exist_ok=True)
        mount(f"/proc/self/fd/{handle}", path, "", BIND | REC)
        if path in asked["read"]:
            mount("none", path, "", REMOUNT | BIND | RDONLY)
        os.close(handle)
    for name, text in (("hosts", asked["names"]), ("resolv.conf", "")):
        Path(f"/run/{name}").write_text(text)
        mount(f"/run/{name}", f"/etc/{name}", "", BIND)
    Path(asked["home"]).mkdir()
    os.chown(asked["home"], asked["uid"], asked["uid"])
    mount("none", "/", "", REMOUNT | BIND | RDONLY)  # the system's folders, and the checkout
    print("ready", flush=True)
    while True:
        signal.pause()


if __name__ == "__main__":
    main()
