# SPDX-License-Identifier: LGPL-3.0-or-later
"""The only file that talks to Kubernetes for the executor: requests and watches.

Input: a kubeconfig, for the official client. Objects are plain JSON, and paths are the API's own.
Invariants: every request has a time-out; what a busy or failing server answers (429, 5xx, a
conflict, nothing at all) is tried again with growing pauses for `patience` seconds; a create that
is tried again finds what it made before; no key or token stays in a file that we made.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import ssl
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Callable
from urllib.parse import urlsplit
from urllib.request import getproxies_environment

import kubernetes
import urllib3
import yaml

from dovetail.core.errors import BadInput, WorkFailed
from dovetail.host.line_splitter import LineSplitter
from dovetail.host.self_signed import openssl

Object = dict[str, Any]
LEAST_VERSION = (1, 33)
"""The first server with the pods/resize subresource switched on."""

_OURS = "dovetail"
"""What the kubeconfigs of our own clusters call them, which no proxy leads to."""

_TRIES = (0.05, 3.0)  # first and longest pause between two tries, seconds
_FAILING = (500, 502, 503, 504)
_AGAIN = (429, *_FAILING)
QUIET = 5.0  # seconds without any answer after which the user is told
SILENCE = 15.0  # the same after which nothing that ends waits for one
_WATCH = 60  # seconds after which the server ends a watch; one whose connection hangs ends later
_KINDS = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
}


class Refused(Exception):
    """The server declined; trying again would not help. `reason` is one word of the API's."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message or f"status {status}")
        self.status = status
        self.reason = reason


class Unreachable(Exception):
    """No answer, or none but errors of the server's own, for as long as we were patient."""


class Api:
    """One user's view of one API server. Its methods may be called from any thread."""

    def __init__(self, kubeconfig: Path) -> None:
        """Read the kubeconfig; BadInput where it is not one. Nothing is asked yet."""
        self.path = Path(kubeconfig)
        self._stop = threading.Event()
        self._silent_since = 0.0  # the first of our last tries that got no answer, or an error
        self._heard_instead = ""
        self._ending = False
        configuration = _configuration(self.path)
        self.server = str(configuration.host)
        self._certificate = configuration.cert_file
        self._client = kubernetes.client.ApiClient(configuration)
        led = isinstance(self._client.rest_client.pool_manager, urllib3.ProxyManager)
        self._way = " by https_proxy" if led else ""

    def close(self) -> None:
        """Give up every request that is being tried again, soon."""
        self._stop.set()

    def silent(self) -> bool:
        """Whether nobody has answered for so long that an end need not wait for it."""
        return 0.0 < self._silent_since < time.monotonic() - SILENCE

    def complaint(self) -> str:
        """What the last of our requests got instead of an answer, if that goes on; else empty."""
        quiet = 0.0 < self._silent_since < time.monotonic() - QUIET
        return self._heard_instead if quiet else ""

    def _mute(self, why: str) -> None:
        self._silent_since = self._silent_since or time.monotonic()
        self._heard_instead = why

    def end(self) -> None:
        """From now on a server that is silent is tried once for each request."""
        self._ending = True

    # --- requests ---

    def get(self, path: str, patience: float = 30.0, **query: str) -> Object:
        """Read one object, or a list."""
        return self.call("GET", path, patience=patience, query=query)

    def kinds(self, group: str) -> frozenset[str]:
        """The kinds that the server has in a group and version, such as `/apis/batch/v1`."""
        try:
            found = self.get(group)
        except NotFound:
            return frozenset()
        return frozenset(one["kind"] for one in found.get("resources", []))

    def create(self, path: str, body: Object, patience: float = 30.0, **query: str) -> Object:
        """Create below a collection's `path`. Refused with reason AlreadyExists if it was there."""
        return self.call("POST", path, body, patience=patience, query=query)

    def patch(self, path: str, body: object, kind: str = "merge", patience: float = 30.0) -> Object:
        """Change parts of an object; `kind` is merge, strategic or json."""
        return self.call("PATCH", path, body, patience=patience, content=_KINDS[kind])

    def delete(
        self,
        path: str,
        patience: float = 30.0,
        grace: int | None = None,
        version: str = "",
        **query: str,
    ) -> None:
        """Delete, in the background; what is not there is fine. `version`: that one, no later."""
        body: Object = {"propagationPolicy": "Background"}
        if grace is not None:
            body["gracePeriodSeconds"] = grace
        if version:
            body["preconditions"] = {"resourceVersion": version}
        with contextlib.suppress(NotFound):
            self.call("DELETE", path, body, patience=patience, query=query)

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        patience: float = 30.0,
        query: Mapping[str, str] | None = None,
        content: str = "application/json",
    ) -> Object:
        """One request, tried again while that may help. Raises Refused or Unreachable."""
        deadline = time.monotonic() + patience
        pause, last, tried = _TRIES[0], "", 0
        while True:
            tried += 1
            try:
                found = self._once(method, path, body, query or {}, content)
                self._silent_since = 0.0
                return found
            except Refused as error:
                if error.status in _FAILING:  # it speaks, and does nothing, as without its store
                    self._mute(f"{error.status}: {error}")
                else:
                    self._silent_since = 0.0
                if error.reason == "AlreadyExists" and tried > 1 and isinstance(body, dict):
                    return self.get(f"{path}/{body['metadata']['name']}", patience)
                clash = error.status == 409 and error.reason != "AlreadyExists"
                asked = isinstance(body, dict) and "preconditions" in body  # to be told of that
                again = error.status in _AGAIN or (clash and not asked)
                if not again:
                    raise
                last = f"{error.status}: {error}"
            except (urllib3.exceptions.HTTPError, OSError, ValueError) as error:
                last = _plainly(error)
                self._mute(last)
            left = deadline - time.monotonic()
            given_up = left <= 0 or (self._ending and self.silent())
            if given_up or self._stop.wait(min(left, pause * random.uniform(0.5, 1.0))):
                raise Unreachable(last)
            pause = min(2 * pause, _TRIES[1])

    def _once(
        self, method: str, path: str, body: object, query: Mapping[str, str], content: str
    ) -> Object:
        answer = self._open(method, path, body, query, content, (5.0, 10.0))
        try:
            found = json.loads(answer.data)
        finally:
            answer.release_conn()
        if not isinstance(found, dict):
            raise ValueError("the answer is no JSON object")
        return found

    def _open(
        self, method: str, path: str, body: object, query: Mapping[str, str], content: str,
        limits: tuple[float, float],
    ) -> Any:  # noqa: ANN401 (the client has no types)  # fmt: skip
        try:
            return self._client.call_api(
                path, method, query_params=list(query.items()), body=body,
                header_params={"Accept": "application/json", "Content-Type": content},
                auth_settings=["BearerToken"], _preload_content=False,
                _return_http_data_only=True, _request_timeout=limits,
            )  # fmt: skip
        except kubernetes.client.ApiException as error:
            if error.status == 0:  # how the client wraps a failure of TLS
                raise OSError(str(error.reason)) from None
            raise _refused(error) from None

    def watch(self, path: str, version: str, **query: str) -> Any:  # noqa: ANN401
        """The open answer of a watch from a resource version on, lines of JSON."""
        asked = {**query, "watch": "1", "resourceVersion": version,
                 "timeoutSeconds": str(_WATCH), "allowWatchBookmarks": "true"}  # fmt: skip
        return self._open("GET", path, None, asked, "application/json", (5.0, _WATCH + 10.0))

    # --- before anything starts ---

    def check(self) -> tuple[int, int]:
        """The server's version; BadInput, in one line, where it or the access is of no use."""
        about = f"{self.path}: "
        try:
            found = self.get("/version", patience=2.0)
            self.get("/api/v1/namespaces/default", patience=2.0)
        except Refused as error:
            if error.status == 401:
                why = "its credentials are not valid there"
                end = _expiry(self._certificate)
                if end is not None and end < time.time():
                    day = time.strftime("%Y-%m-%d", time.gmtime(end))
                    why = f"its certificate expired on {day}"
                raise BadInput(
                    f"{about}{self.server} refuses us: {why}; get a new kubeconfig"
                ) from None
            if error.status != 403:
                raise BadInput(f"{about}{self.server} answers: {error}") from None
        except Unreachable as error:
            if "expired" in str(error):
                raise BadInput(
                    f"{about}the certificate of {self.server} has expired; its administrator "
                    "renews it"
                ) from None
            raise BadInput(
                f"{about}{self.server} cannot be reached{self._way} ({error}); is the cluster up?"
            ) from None
        version = (
            int(found.get("major", 0)),
            int(re.sub(r"\D.*", "", str(found.get("minor", "0"))) or 0),
        )
        if version < LEAST_VERSION:
            raise BadInput(
                f"{about}{self.server} is Kubernetes {version[0]}.{version[1]}; "
                f"pods can be resized in place from {LEAST_VERSION[0]}.{LEAST_VERSION[1]} on"
            )
        return version


class NotFound(Refused):
    """There is no such object."""


class Watch(threading.Thread):
    """Follows a collection for ever, in a thread of its own.

    `deliver(kind, thing)` is called with LISTED and a list of all objects whenever the whole is
    read (at first, and after a gap), else with ADDED, MODIFIED or DELETED and one object.
    """

    def __init__(
        self, api: Api, path: str, deliver: Callable[[str, Any], None], **query: str
    ) -> None:
        super().__init__(name=f"watch {path}", daemon=True)
        self._api, self._path, self._deliver, self._query = api, path, deliver, query
        self._ended = threading.Event()
        self._answer: Any = None
        self.start()

    def run(self) -> None:
        """List, then watch until the stream breaks, again and again."""
        while not self._ended.is_set():
            try:
                found = self._api.get(self._path, patience=10.0, **self._query)
                self._deliver("LISTED", found.get("items", []))
                self._follow(found["metadata"]["resourceVersion"])
            except (Refused, Unreachable, urllib3.exceptions.HTTPError, OSError, ValueError,
                    KeyError):  # fmt: skip
                self._ended.wait(0.2)

    def _follow(self, version: str) -> None:
        """Deliver changes; returns when what was missed must be listed."""
        while not self._ended.is_set():
            self._answer = self._api.watch(self._path, version, **self._query)
            try:
                if self._ended.is_set():  # `stop` came before there was an answer to shut down
                    return
                for line in _lines(self._answer):
                    change = json.loads(line)
                    thing = change["object"]
                    if change["type"] == "ERROR":  # 410 mostly: our version is too old
                        return
                    version = thing["metadata"]["resourceVersion"]
                    if change["type"] != "BOOKMARK":
                        self._deliver(change["type"], thing)
            finally:
                self._answer.close()

    def stop(self) -> None:
        """End the thread, waking it if it reads."""
        self._ended.set()
        # Nobody reads it yet, nobody reads it any more, or its connection has broken.
        with contextlib.suppress(AttributeError, ValueError, RuntimeError, OSError):
            self._answer.shutdown()


def _lines(answer: Any) -> Any:  # noqa: ANN401
    splitter = LineSplitter()
    for chunk in answer.stream(amt=None, decode_content=False):
        yield from filter(None, splitter.take(chunk))


def _configuration(path: Path) -> Any:  # noqa: ANN401
    """The client's settings from a kubeconfig, its keys in memory instead of files."""
    try:
        content = yaml.safe_load(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it is empty")
    except (OSError, ValueError, yaml.YAMLError) as error:
        said = error.strerror if isinstance(error, OSError) else "it is not YAML of that kind"
        raise BadInput(f"{path}: is no kubeconfig: {said}") from None
    configuration = kubernetes.client.Configuration()
    scratch = tempfile.mkdtemp(prefix="dovetail-")
    try:
        kubernetes.config.load_kube_config(
            str(path), client_configuration=configuration, persist_config=False,
            temp_file_path=scratch,
        )  # fmt: skip
        for name in ("ssl_ca_cert", "cert_file", "key_file"):
            file = getattr(configuration, name)
            if file and Path(file).parent == Path(scratch):
                setattr(configuration, name, _in_memory(Path(file).read_bytes()))
        ours = any(one.get("name") == _OURS for one in content.get("clusters") or ())
        configuration.proxy = None if ours else _proxy(configuration.host)
    except (kubernetes.config.ConfigException, ValueError, TypeError, OSError) as error:
        raise BadInput(f"{path}: is no usable kubeconfig: {str(error).splitlines()[0]}") from None
    except AttributeError as error:  # the library looks for a mapping where there is none
        raise BadInput(f"{path}: is no usable kubeconfig: {error}") from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    configuration.no_proxy = getproxies_environment().get("no")  # which the client forgets
    configuration.retries = False  # we have our own
    configuration.connection_pool_maxsize = 16
    return configuration


def _proxy(server: str) -> str | None:
    """By whom the environment says that a server is reached; as for kubectl, none on loopback.

    The client would take http_proxy for that too.
    """
    where = urlsplit(server)
    host = where.hostname or ""
    near = host in ("localhost", "::1") or host.startswith("127.")
    return None if near else getproxies_environment().get(where.scheme)


def _in_memory(data: bytes) -> str:
    """A path that this process alone can read for as long as it lives."""
    descriptor = os.memfd_create("dovetail")
    os.write(descriptor, data)
    return f"/proc/self/fd/{descriptor}"


def _expiry(certificate: str | None) -> float | None:
    """When a PEM certificate ends, seconds since the epoch; None if that cannot be told."""
    with contextlib.suppress(OSError, ValueError, WorkFailed):
        text = Path(certificate or "").read_text()
        said = openssl("x509", "-noout", "-enddate", folder=Path("/"), data=text)
        return float(ssl.cert_time_to_seconds(said.strip().partition("=")[2]))
    return None


def _refused(error: Any) -> Refused:  # noqa: ANN401
    body = error.body if error.body is not None else b""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        said = json.loads(body)
        made = NotFound if error.status == 404 else Refused
        return made(error.status, said.get("reason", ""), said["message"])
    made = NotFound if error.status == 404 else Refused
    return made(error.status, "", str(error.reason))


def _plainly(error: BaseException) -> str:
    """A network failure in a few words, without the client's layers around it."""
    while True:
        inner = getattr(error, "reason", None) or error.__cause__ or error.__context__
        if not isinstance(inner, BaseException):
            break
        error = inner
    if isinstance(error, ssl.SSLError):
        said = str(getattr(error, "verify_message", "") or error.reason or error)
        return " ".join(said.partition(" (_ssl")[0].split())
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(str(error).rpartition(": ")[2][:200].split()) or type(error).__name__
