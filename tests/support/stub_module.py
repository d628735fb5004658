# SPDX-License-Identifier: LGPL-3.0-or-later
"""Stands in for the broker module `dovetail` in tests.

`flux module load --name dovetail stub_module.py` loads it. Its requests `wait-up` and `wait-down`
wait until `flux python stub_module.py up` has them answered, or `fail WHY` refused.
"""

from __future__ import annotations

import errno
import sys

import flux
from _flux._core import lib
from flux.brokermod import BrokerModule, request_handler


class Stub(BrokerModule):
    """Keeps requests, and answers them all when told to."""

    def __init__(self, handle, *args):
        super().__init__(handle, *args)
        self.waiting = []

    @request_handler("wait-up")
    def wait_up(self, message):
        self.waiting.append(message)

    @request_handler("wait-down")
    def wait_down(self, message):
        self.waiting.append(message)

    @request_handler("now-up")
    def now_up(self, message):
        for one in self.waiting:
            self.handle.respond(one, {})
        self.handle.respond(message, {"answered": len(self.waiting)})
        self.waiting.clear()

    @request_handler("now-fail")
    def now_fail(self, message):
        why = message.payload["why"].encode()
        for one in self.waiting:
            lib.flux_respond_error(self.handle.handle, one.handle, errno.EIO, why)
        self.waiting.clear()
        self.handle.respond(message, {})


def mod_main(handle, *args):
    Stub(handle, *args).run()


if __name__ == "__main__":
    print(flux.Flux().rpc(f"dovetail.now-{sys.argv[1]}", {"why": " ".join(sys.argv[2:])}).get())
