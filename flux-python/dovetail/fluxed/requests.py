# SPDX-License-Identifier: LGPL-3.0-or-later
"""The requests that the broker module answers (steps 2, 3 and 8), see dovetail-flux(7). Pure.

`REQUESTS` has a function for each topic: (state, key of the request, payload) to effects.
`STREAMS` has those that are asked for as a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dovetail.fluxed.asked import MOST
from dovetail.fluxed.effects import FAILED, INVALID, NOENT, Answer, Effect, Key, Refuse
from dovetail.fluxed.instance import Instance
from dovetail.fluxed.waiting import DOWN

Payload = Mapping[str, Any]
Effects = Iterator[Effect]


def status(state: Instance, key: Key, _: Payload) -> Effects:
    """The state, now."""
    yield Answer(key, state.status())


def watch(state: Instance, key: Key, _: Payload) -> Effects:
    """The state, now and at every change."""
    state.waiting.watching[key] = {}
    yield from state.settle()


def wait_up(state: Instance, key: Key, _: Payload) -> Effects:
    """Answered when Kubernetes is up; refused, with the reason, when it can no longer be."""
    state.waiting.up.append(key)
    yield from state.settle()


def submit(state: Instance, key: Key, order: Payload) -> Effects:
    """Queue a plan."""
    if state.failure or state.ending:
        yield Refuse(key, FAILED, state.failure or DOWN)
        return
    yield from state.runs.submit(key, order)
    yield from state.settle()


def wait(state: Instance, key: Key, asked: Payload) -> Effects:
    """Answered when runs have ended."""
    yield from state.runs.wait(key, asked)


def cancel(state: Instance, key: Key, asked: Payload) -> Effects:
    """End runs."""
    numbers, wrong = state.runs.chosen(asked)
    if wrong:
        yield Refuse(key, NOENT, wrong)
        return
    for number in state.runs.cancel(numbers):
        yield from state.tell({"cancel": number})
    yield Answer(key, {"runs": list(numbers)})
    yield from state.runs.settle()
    yield from state.settle()


def resize(state: Instance, key: Key, asked: Payload) -> Effects:
    """Answered when there are so many slices, and all are ready."""
    nodes = asked.get("nodes")
    if not isinstance(nodes, int) or isinstance(nodes, bool) or not 1 <= nodes <= MOST:
        yield Refuse(key, INVALID, f"nodes is a number from 1 to {MOST}, not {nodes!r}")
    elif state.failure or state.ending:
        yield Refuse(key, FAILED, state.failure or DOWN)
    else:
        yield from state.resize(nodes)
        state.waiting.resizing.append(key)
        yield from state.settle()


def kubeconfig(state: Instance, key: Key, _: Payload) -> Effects:
    """The administrator's kubeconfig; requests reach us from the instance's owner alone."""
    if state.kubeconfig and not state.failure and not state.ending:
        yield Answer(key, {"kubeconfig": state.kubeconfig})
    else:
        yield Refuse(key, FAILED, state.failure or "Kubernetes is not up")


def url(state: Instance, key: Key, asked: Payload) -> Effects:
    """Where a service can be reached; the control slice knows."""
    control = state.slices.get(0)
    if control is None or control.state != "ready":
        yield Refuse(key, FAILED, state.failure or "Kubernetes is not up")
    else:
        question = state.waiting.ask(key)
        yield from state.tell({"url": str(asked["service"]), "question": question})


def down(state: Instance, key: Key, _: Payload) -> Effects:
    """Answered when nothing is left."""
    state.waiting.down.append(key)
    if not state.ending:
        state.ending = True
        yield from state.end_slices(DOWN)
    yield from state.settle()


def follow(state: Instance, key: Key, asked: Payload) -> Effects:
    """The job of a simulation: told where its log is, and its end."""
    yield from state.mirrors.follow(key, int(asked["run"]), str(asked["name"]))


def stop(state: Instance, key: Key, asked: Payload) -> Effects:
    """End one simulation; its run goes on."""
    yield from state.tell({"stop": str(asked["name"]), "of": int(asked["run"])})
    yield Answer(key, {})


def wait_down(state: Instance, key: Key, asked: Payload) -> Effects:
    """Answered when nothing of one slice is left on its machine."""
    one = state.slices.get(int(asked["slice"]))
    if one is None or one.confirmed:
        yield Answer(key, {})
    else:
        state.waiting.ending[key] = one.number
        if one.agent is None:  # a job that was cancelled before it started has no other end
            yield from state.sweep(one)


def attach(state: Instance, key: Key, news: Payload) -> Effects:
    """An agent listens for orders; its disconnect tells that it is lost."""
    yield from state.attached(key, news)


def join(state: Instance, key: Key, asked: Payload) -> Effects:
    """Answered with what a node needs to join, as soon as there is a cluster."""
    number = int(asked["number"])
    if number not in state.slices:
        yield Refuse(key, INVALID, f"there is no slice {number}")
        return
    state.waiting.joining[number] = key
    state.slices[number].called = str(asked.get("node", ""))
    if 0 in state.slices and state.slices[0].state == "ready":
        yield from state.invite(number)


def tell(state: Instance, key: Key, news: Payload) -> Effects:
    """News from an agent."""
    yield from state.news(int(news["number"]), news)
    yield Answer(key, {})


REQUESTS: dict[str, Callable[[Instance, Key, Payload], Effects]] = {
    "status": status,
    "wait-up": wait_up,
    "submit": submit,
    "wait": wait,
    "cancel": cancel,
    "resize": resize,
    "kubeconfig": kubeconfig,
    "url": url,
    "down": down,
    "wait-down": wait_down,
    "stop": stop,
    "join": join,
    "tell": tell,
}
STREAMS = {"status": watch, "attach": attach, "follow": follow}
