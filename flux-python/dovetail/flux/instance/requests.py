# SPDX-License-Identifier: LGPL-3.0-or-later
"""The requests that the broker module answers, see dovetail-flux(7). Pure.

`REQUESTS` has a function for each topic: (state, key of the request, payload) to effects.
`STREAMS` has those that are asked for as a stream.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dovetail.core.messages import MessageError, decode
from dovetail.flux.instance import messages
from dovetail.flux.instance.effects import FAILED, INVALID, NOENT, Answer, Effect, Key, Refuse
from dovetail.flux.instance.pending import DOWN
from dovetail.flux.instance.simulations import Simulation
from dovetail.flux.instance.slices import SliceState
from dovetail.flux.instance.state import Instance

OVER = "its run is over"

Payload = Mapping[str, Any]
Effects = Iterator[Effect]
Request = Callable[[Instance, Key, Payload], Effects]


def informed(request: Request) -> Request:
    """A request that is held until the state knows what was before it, after a reload."""

    def answer(state: Instance, key: Key, payload: Payload) -> Effects:
        try:
            yield from request(state, key, payload)
        except MessageError as error:
            yield Refuse(key, INVALID, str(error))
        except (KeyError, TypeError, ValueError) as error:  # no matter of whoever let it go on
            yield Refuse(key, INVALID, f"{type(error).__name__}: {error}")

    @functools.wraps(request)
    def held(state: Instance, key: Key, payload: Payload) -> Effects:
        state.held[key] = functools.partial(answer, state, key, payload)
        yield from state.settle()

    return held


@informed
def status(state: Instance, key: Key, _: Payload) -> Effects:
    """The state, now."""
    yield Answer(key, state.status())


def watch(state: Instance, key: Key, _: Payload) -> Effects:
    """The state, now and at every change."""
    state.pending.watching[key] = {}
    yield from state.settle()


def wait_up(state: Instance, key: Key, _: Payload) -> Effects:
    """Answered when Kubernetes is up; refused, with the reason, when it can no longer be."""
    state.pending.up.append(key)
    yield from state.settle()


@informed
def submit(state: Instance, key: Key, payload: Payload) -> Effects:
    """Queue a plan."""
    if state.failure or state.ending:
        yield Refuse(key, FAILED, state.failure or DOWN)
        return
    yield from state.runs.submit(key, decode(messages.SubmitPlan, payload, others=True))
    yield from state.settle()


@informed
def wait(state: Instance, key: Key, payload: Payload) -> Effects:
    """Answered when runs have ended."""
    yield from state.runs.wait(key, decode(messages.ChooseRuns, payload, others=True))


@informed
def cancel(state: Instance, key: Key, payload: Payload) -> Effects:
    """End runs."""
    numbers, wrong = state.runs.chosen(decode(messages.ChooseRuns, payload, others=True))
    if wrong:
        yield Refuse(key, NOENT, wrong)
        return
    for number in state.runs.cancel(numbers):
        yield from state.tell(messages.CancelRun(number))
    yield Answer(key, {"runs": list(numbers)})
    yield from state.runs.settle()
    yield from state.settle()


@informed
def resize(state: Instance, key: Key, payload: Payload) -> Effects:
    """Answered when there are so many slices, and all are ready."""
    nodes = decode(messages.Resize, payload, others=True).nodes
    if state.failure or state.ending:
        yield Refuse(key, FAILED, state.failure or DOWN)
    elif state.room and nodes > max(state.room, state.wanted):  # it would wait for ever
        some = "1 does" if state.room == 1 else f"{state.room} do"
        yield Refuse(key, INVALID, f"{nodes} nodes do not fit into this instance; {some}")
    else:
        yield from state.resize(nodes)
        state.pending.resizing[key] = nodes, state.lost[-1:]
        yield from state.settle()


@informed
def kubeconfig(state: Instance, key: Key, _: Payload) -> Effects:
    """The administrator's kubeconfig; requests reach us from the instance's owner alone."""
    if state.kubeconfig and not state.failure and not state.ending:
        yield Answer(key, {"kubeconfig": state.kubeconfig})
    else:
        yield Refuse(key, FAILED, not_up(state))


def not_up(state: Instance) -> str:
    """Why nothing can be asked of Kubernetes."""
    return state.failure or (DOWN if state.ending else "Kubernetes is not up")


@informed
def url(state: Instance, key: Key, payload: Payload) -> Effects:
    """Where a service can be reached; the control slice knows."""
    service = decode(messages.FindUrl, payload, others=True).service
    control = state.slices.get(0)
    if control is None or control.state is not SliceState.READY:
        yield Refuse(key, FAILED, not_up(state))
    else:
        question = state.pending.ask(key)
        yield from state.tell(messages.FindService(service, question))


def down(state: Instance, key: Key, _: Payload) -> Effects:
    """Answered when nothing is left."""
    state.pending.down.append(key)
    if not state.ending:
        state.ending = True
        yield from state.end_slices()
    yield from state.settle()


def follow(state: Instance, key: Key, payload: Payload) -> Effects:
    """The job of a simulation: told where its log is, and its end."""
    yield from state.simulations.follow(key, decode(messages.Follow, payload, others=True).launch)
    yield from state.end_work()


@informed
def wait_down(state: Instance, key: Key, payload: Payload) -> Effects:
    """Answered when nothing of one slice is left on its machine."""
    one = state.slices.get(decode(messages.WaitDown, payload, others=True).slice)
    if one is None or one.machine_clean:
        yield Answer(key, {})
    else:
        state.pending.ending[key] = one.number
        if one.agent is None:  # a job that was cancelled before it started has no other end
            yield from state.sweep(one)


def attach(state: Instance, key: Key, payload: Payload) -> Effects:
    """An agent listens for orders, and says what it knows; its disconnect tells that it is lost."""
    news = decode(messages.Attach, payload)
    number = news.number
    one = state.slices.get(number)
    if one is None or one.agent is not None:
        yield Refuse(key, INVALID, f"slice {number} is not expected")
        return
    one.attached(key, news.host, news.rank)
    state.agents[key] = number
    if number == 0:
        yield from adopt(state, news)
        for worker in state.pending.joining:
            yield from state.invite(worker)
    if one.state is SliceState.ENDING:
        yield from state.end(one)
    elif news.node:
        ready = messages.NodeReady(news.node, news.cpus, news.kubeconfig)
        yield from state.ready(number, ready)
    yield from state.settle()


def adopt(state: Instance, news: messages.Attach) -> Effects:
    """Take over what the control slice knows, which may be more than we do."""
    state.runs.adopt(news.runs)
    for one in news.simulations:
        yield from state.simulations.known(one)
    yield from state.simulations.end_unknown(OVER)
    for run in state.runs.all.values():
        if run.state.ended:
            yield from state.simulations.end_all(run.number, OVER)
    yield from state.end_work()
    if not state.restored:
        yield from state.learn(news.kept)
        yield from state.resize(state.wanted)


def join(state: Instance, key: Key, payload: Payload) -> Effects:
    """Answered with what a node needs to join, as soon as the control slice can say it."""
    wanted = decode(messages.Join, payload)
    number = wanted.number
    if number not in state.slices:
        yield Refuse(key, INVALID, f"there is no slice {number}")
        return
    state.pending.joining[number] = key
    state.slices[number].wanted_node = wanted.node
    yield from state.invite(number)


def tell(state: Instance, key: Key, payload: Payload) -> Effects:
    """News from an agent."""
    yield from heard(state, *messages.news(payload))
    yield Answer(key, {})


def heard(state: Instance, number: int, news: messages.News) -> Effects:
    """What follows from the news of a slice's agent."""
    if isinstance(news, messages.NodeReady):
        yield from state.ready(number, news)
    elif isinstance(news, messages.StartFailed):
        if number in state.slices:
            state.slices[number].reason = news.failed
    elif isinstance(news, messages.SliceEnded):
        if number in state.slices:
            yield from state.confirm(state.slices[number], news.ended)
    elif isinstance(news, messages.Invited):
        yield from state.pending.invited(news.invited, news.join, news.why)
    elif isinstance(news, messages.Forgotten):
        state.leaving.discard(news.forgotten)
        yield from state.settle()
    elif isinstance(news, messages.Answered):
        yield from state.pending.answered(news.answer, news.value, news.why)
    elif isinstance(news, messages.SimulationNews):
        yield from simulation(state, news.simulation)
    elif isinstance(news, messages.ReportWritten):
        state.runs.report_written(news.report)
        yield from state.settle()
    else:
        yield from state.simulations.end_all(news.run, OVER)
        yield from state.runs.ended(news.run, news.code, news.why, reported=news.reported)
        yield from state.settle()


def simulation(state: Instance, news: Simulation) -> Effects:
    """A simulation was launched, or has ended."""
    if news.code is not None:
        yield from state.simulations.ended(news.launch, news.code, news.reason, news.cause)
    else:
        yield from state.simulations.known(news)
        yield from state.end_work()


REQUESTS: dict[str, Request] = {
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
    "join": join,
    "tell": tell,
}
STREAMS = {"status": watch, "attach": attach, "follow": follow}
