# SPDX-License-Identifier: LGPL-3.0-or-later
"""Requests to the broker module, from programs without Flux's bindings.

A child process (`relay.py` under `flux python`) carries them; it ends with us, and so the module
learns of our end, however it comes.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.flux import option
from dovetail.host import install_paths

RELAY = install_paths.PACKAGES / "dovetail" / "flux" / "relay.py"
SUBMIT = "submit"
"""Instead of a topic: submit a jobspec, the payload, on the cores of the job that we are in.

The first answer is the `job`; a later one has `cancelled` if that is told to end, or killed.
"""
NO_INSTANCE = 3
"""Exit code of the relay where there is no instance to connect to."""
NOT_LOADED = (
    "Dovetail is not loaded in this Flux instance: start one with --dovetail, "
    "or type `flux dovetail up --dovetail=nodes=N`"
)
NOT_OWNER = (
    "this Flux instance belongs to another user, and Dovetail in it is for its owner alone: "
    "start an instance of your own with `flux batch` or `flux alloc`, and --dovetail=nodes=N"
)


class Refused(Exception):
    """The module declined, or is not there (`code` is errno.ENOSYS)."""

    def __init__(self, code: int, why: str) -> None:
        super().__init__(why)
        self.code = code


class Client:
    """A relay, and what it said so far."""

    def __init__(self) -> None:
        try:
            self.process = subprocess.Popen(
                ["flux", "python", str(RELAY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                start_new_session=True,  # a signal to our group must not take our last words
            )  # fmt: skip
        except OSError as error:
            raise BadInput(f"flux cannot be run: {error.strerror}; is it on PATH?") from None
        self.number = 0

    def send(self, topic: str, payload: Mapping[str, Any], *, stream: bool = False) -> int:
        """Send a request; returns its number.

        What is no text in UTF-8, such as the name of a file in a reason, has a `?` there: Flux's
        bindings would not send it, and the relay would end.
        """
        self.number += 1
        line = {"id": self.number, "topic": topic, "payload": payload, "stream": stream}
        assert self.process.stdin is not None
        try:
            text = json.dumps(line, ensure_ascii=False).encode(errors="replace")
            self.process.stdin.write(text + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise self.gone() from None
        return self.number

    def gone(self) -> BadInput | WorkFailed:
        """Why the relay has ended."""
        if self.process.wait() == NO_INSTANCE:
            return BadInput("there is no Flux instance here: use it in a batch job or `flux alloc`")
        return WorkFailed("no Flux instance answers here")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Everything that comes, until Flux is gone."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            yield json.loads(line)

    def answers(
        self, topic: str, payload: Mapping[str, Any], *, stream: bool = False
    ) -> Iterator[dict[str, Any]]:
        """The answers to one request: one, or with `stream` all until the module ends it."""
        number = self.send(topic, payload, stream=stream)
        for line in self.lines():
            if line.get("id") != number:
                continue
            if "error" in line:
                code, why = line["error"]
                if code == errno.ENODATA and stream:
                    return
                raise Refused(code, why)
            yield line["value"]
            if not stream:
                return
        raise self.gone()

    def close(self) -> None:
        """End the relay."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def not_loaded(client: Client) -> str:
    """Why the module is not there; perhaps the configuration has something wrong for it.

    A guest, who may be the user of a system's instance at a login node, can do nothing about it.
    """
    try:
        found = next(client.answers("config.get", {}))
        owner = int(next(client.answers("attr.get", {"name": "security.owner"}))["value"])
        root = not os.getuid() and found.get("access", {}).get("allow-root-owner", False)
        if owner != os.getuid() and not root:
            return NOT_OWNER
        option.check_instance(found.get("dovetail", {}))
    except BadInput as error:
        return f"Dovetail is not loaded in this Flux instance: {error}"
    except Refused:
        pass
    return NOT_LOADED


@contextlib.contextmanager
def connected() -> Iterator[Client]:
    """A client for a command: failures are one line for the user."""
    client = Client()
    try:
        yield client
    except Refused as error:
        if error.code == errno.ENOSYS:
            raise BadInput(not_loaded(client)) from None
        if error.code == errno.EPERM:
            raise BadInput(NOT_OWNER) from None
        if error.code in (errno.ENOENT, errno.EINVAL):
            raise BadInput(str(error)) from None
        raise WorkFailed(str(error)) from None
    finally:
        client.close()


def call(topic: str, payload: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """One request and its answer, as a command needs it."""
    with connected() as client:
        return next(client.answers(topic, payload or {}))
