# SPDX-License-Identifier: LGPL-3.0-or-later
"""Stands in for the broker module `dovetail` (steps 3 and 8), for tests: `flux python` runs it.

    stub_service.py            serves until its input ends; prints `ready`
    stub_service.py up         has all requests answered
    stub_service.py fail WHY   has them refused

Requests `wait-up` and `wait-down` wait until one of these is called.
"""

from __future__ import annotations

import errno
import sys

import flux
from _flux._core import lib
from flux.constants import FLUX_MSGTYPE_REQUEST


def serve() -> None:
    """Keep requests, and answer them all when told to."""
    handle = flux.Flux()
    waiting = []

    def request(_handle, _kind, message, _arg):
        verb = message.topic.partition(".")[2]
        if not verb.startswith("now-"):
            if verb.startswith("wait-"):  # not the note that a client has gone
                waiting.append(message)
            return
        for one in [*waiting]:
            if verb == "now-fail":
                why = message.payload["why"].encode()
                lib.flux_respond_error(handle.handle, one.handle, errno.EIO, why)
            else:
                handle.respond(one, {})
        handle.respond(message, {"answered": len(waiting)})
        waiting.clear()

    handle.service_register("dovetail").get()
    watcher = handle.msg_watcher_create(request, FLUX_MSGTYPE_REQUEST, "dovetail.*")
    watcher.start()
    end = handle.fd_watcher_create(0, lambda *_: handle.reactor_stop())
    end.start()
    print("ready", flush=True)
    handle.reactor_run()


if len(sys.argv) == 1:
    serve()
else:
    print(flux.Flux().rpc(f"dovetail.now-{sys.argv[1]}", {"why": " ".join(sys.argv[2:])}).get())
