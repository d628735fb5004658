# SPDX-License-Identifier: LGPL-3.0-or-later
"""Another user of the machine, who tries what somebody else's cluster or job has."""

from __future__ import annotations

import json
import subprocess

from support.clusters import LIMIT, STRANGER, as_user

ATTEMPTS = """
import json, os, signal, socket, ssl, sys, urllib.error, urllib.request
made = json.load(sys.stdin)
got, gone = [], []
context = ssl._create_unverified_context()
for url in made["urls"]:
    try:
        urllib.request.urlopen(url, context=context, timeout=20).read()
        got.append(url)
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403, 404):
            got.append(f"{url} {error.code}")
    except OSError:
        pass
for path in made["files"]:
    for mode in ("rb", "r+b"):
        try:
            os.listdir(path) if os.path.isdir(path) else open(path, mode).read()
            got.append(path)
        except OSError:
            pass
for path in made["sockets"]:
    try:
        socket.socket(socket.AF_UNIX).connect(path)
        got.append(path)
    except OSError:
        pass
for pid in made["pids"]:
    for number in (0, signal.SIGTERM, signal.SIGCONT, signal.SIGKILL):
        try:
            os.kill(pid, number)
            got.append(pid)
        except PermissionError:
            pass
        except ProcessLookupError:
            gone.append(pid)
            break
    for name in ("environ", "root", "fd", "mem"):
        try:
            path = f"/proc/{pid}/{name}"
            os.listdir(path) if os.path.isdir(path) else open(path).read(1)
            got.append(path)
        except OSError:
            pass
print(json.dumps([got, gone]))
"""


def attempt(**wanted):
    """What a stranger gets of these, and which processes were gone before it could try.

    It has a session of its own, as after a login: within one, SIGCONT is free to all.
    """
    nothing = {"urls": [], "files": [], "sockets": [], "pids": []}
    done = subprocess.run(as_user(STRANGER, "/usr/bin/python3", "-c", ATTEMPTS),
                          input=json.dumps({**nothing, **wanted}), capture_output=True, text=True,
                          timeout=LIMIT, start_new_session=True)  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
