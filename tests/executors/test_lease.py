# SPDX-License-Identifier: LGPL-3.0-or-later
"""A controller's lease, by an API in memory that counts versions as the real one does."""

from __future__ import annotations

import copy
import time

import pytest
from dovetail.executors.kubernetes.api import NotFound, Refused, Unreachable
from dovetail.executors.kubernetes.lease import DURATION, Lease

pytestmark = pytest.mark.unit


class Store:
    """One lease; `then` runs once after the next read, as somebody else might come between."""

    path = "kubeconfig"

    def __init__(self):
        self.lease, self.version, self.then = None, 0, lambda: None

    def keep(self, body):
        self.version += 1
        self.lease = copy.deepcopy(body)
        self.lease["metadata"]["resourceVersion"] = str(self.version)
        return copy.deepcopy(self.lease)

    def get(self, path, patience=30.0):
        if self.lease is None:
            raise NotFound(404, "NotFound", "")
        found, then, self.then = copy.deepcopy(self.lease), self.then, lambda: None
        then()
        return found

    def create(self, path, body, patience=30.0):
        if self.lease is not None:
            raise Refused(409, "AlreadyExists", "")
        return self.keep(body)

    def call(self, method, path, body, patience=30.0):
        if self.lease is None:
            raise NotFound(404, "NotFound", "")
        if body["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"]:
            raise Unreachable("409: conflict")
        return self.keep(body)

    def delete(self, path, patience=30.0, version=""):
        if version not in ("", str(self.version)):
            raise Refused(409, "Conflict", "")
        self.lease = None

    def taken_over(self):
        self.lease["spec"]["holderIdentity"] = "other host 1"
        self.keep(self.lease)


def test_a_lease_that_is_given_back_is_there_for_the_next_one():
    store = Store()
    Lease(store, "one").release()
    assert store.lease is None


def test_a_lease_that_another_took_in_a_suspension_is_not_deleted():
    store = Store()
    lease = Lease(store, "one")
    store.taken_over()
    lease.release()  # before it looked again
    assert store.lease["spec"]["holderIdentity"] == "other host 1"


def test_a_lease_that_another_takes_while_it_is_given_back_is_not_deleted():
    store = Store()
    lease = Lease(store, "one")
    store.then = store.taken_over
    lease.release()
    assert store.lease["spec"]["holderIdentity"] == "other host 1"


def test_a_lease_is_given_back_though_a_renewal_comes_late():
    store = Store()
    lease = Lease(store, "one")
    store.then = lambda: store.keep(store.lease)
    lease.release()
    assert store.lease is None


def test_a_lease_that_is_given_back_while_another_waits_is_the_others_at_once():
    store = Store()
    first = Lease(store, "one")
    store.then = first.release
    began = time.monotonic()
    second = Lease(store, "two")
    assert time.monotonic() - began < DURATION / 2
    assert not second.left  # nobody died
    second.release()
    assert store.lease is None
