# SPDX-License-Identifier: LGPL-3.0-or-later
"""Messages come out of a connection as they went in, and nothing else comes out."""

from __future__ import annotations

import asyncio
import json

import pytest
from dovetail.core.causes import Cause
from dovetail.core.messages import MessageError
from dovetail.executors.pods import connections, messages, rsh_agent
from dovetail.mpi import launcher
from hypothesis import given
from hypothesis import strategies as st

pytestmark = pytest.mark.unit

SAMPLE = messages.Sample(
    1.5, {"sim": {"0": [3, 1.25, 0.5, 0.25, 0.25, 1 << 40]}}, {"sim": [2, 1.0]}
)
TEXTS = [
    (
        messages.Hello("node", "secret"),
        b'{"kind":"Hello","node":"node","token":"secret"}',
    ),
    (
        messages.Transfer("node", "secret", "sim", "out"),
        b'{"kind":"Transfer","node":"node","token":"secret","folder":"sim","way":"out"}',
    ),
    (
        messages.Look({"/home/a/case": "0f"}, "/tmp/store"),
        b'{"kind":"Look","folders":{"/home/a/case":"0f"},"store":"/tmp/store"}',
    ),
    (messages.Seen(["/home/a"]), b'{"kind":"Seen","missing":["/home/a"]}'),
    (
        messages.Stage("sim", 7, "cases.0", "in", 40123),
        b'{"kind":"Stage","simulation":"sim","number":7,"folder":"cases.0","way":"in",'
        b'"port":40123}',
    ),
    (
        messages.Staged("sim", 7, "no space left"),
        b'{"kind":"Staged","simulation":"sim","number":7,"trouble":"no space left"}',
    ),
    (messages.Prepared("sim"), b'{"kind":"Prepared","simulation":"sim"}'),
    (messages.Spread("sim"), b'{"kind":"Spread","simulation":"sim"}'),
    (
        messages.Broker("sim", "192.0.2.7:40123"),
        b'{"kind":"Broker","simulation":"sim","address":"192.0.2.7:40123"}',
    ),
    (
        messages.Met("sim", "192.0.2.7:40123"),
        b'{"kind":"Met","simulation":"sim","address":"192.0.2.7:40123"}',
    ),
    (
        messages.Pod("sim", 1, "0a-1b"),
        b'{"kind":"Pod","simulation":"sim","group":1,"uid":"0a-1b","used":0.0}',
    ),
    (
        messages.Started("sim", "openmpi", 40),
        b'{"kind":"Started","simulation":"sim","mpi":"openmpi","iterations":40}',
    ),
    (
        messages.Result("sim", Cause.LAUNCH_FAILED, 1, "no such case", ""),
        b'{"kind":"Result","simulation":"sim","cause":"launch failed","code":1,'
        b'"reason":"no such case","trouble":""}',
    ),
    (
        messages.Lost("sim", 1, "0a-1b"),
        b'{"kind":"Lost","simulation":"sim","group":1,"uid":"0a-1b"}',
    ),
    (
        SAMPLE,
        b'{"kind":"Sample","now":1.5,'
        b'"ranks":{"sim":{"0":[3,1.25,0.5,0.25,0.25,1099511627776]}},"lines":{"sim":[2,1.0]}}',
    ),
    (
        messages.Used(1.5, {"sim": {"1": [0.5, 4096]}}),
        b'{"kind":"Used","now":1.5,"groups":{"sim":{"1":[0.5,4096]}}}',
    ),
    (
        messages.Weights({"0a-1b": {"cpu.weight": "39"}}),
        b'{"kind":"Weights","values":{"0a-1b":{"cpu.weight":"39"}}}',
    ),
    (
        messages.Run(
            "sim", {"ranks": 2, "command": ["a", "b c"]}, [{"address": "::1", "ranks": 2}]
        ),
        b'{"kind":"Run","simulation":"sim","config":{"ranks":2,"command":["a",'
        b'"b c"]},"hosts":[{"address":"::1","ranks":2}]}',
    ),
    (
        messages.Counts("sim", 2, {"0": [500, 9, 8, 0.5, 0.9, -1.0]}, {"1": [3, 4, 0.25, 1.5]}),
        b'{"kind":"Counts","simulation":"sim","cpus":2,"groups":{"0":[500,9,8,0.5,0.9,-1.0]},'
        b'"ranks":{"1":[3,4,0.25,1.5]}}',
    ),
    (messages.Stop("sim"), b'{"kind":"Stop","simulation":"sim"}'),
    (
        messages.Wait("sim", "doorbell", 20),
        b'{"kind":"Wait","simulation":"sim","mode":"doorbell","yields":20}',
    ),
    (
        messages.Suspend("sim", True),
        b'{"kind":"Suspend","simulation":"sim","suspended":true}',
    ),
    (messages.Checkpoint("sim"), b'{"kind":"Checkpoint","simulation":"sim"}'),
    (messages.End("sim", -15), b'{"kind":"End","simulation":"sim","code":-15,"next":""}'),
    (messages.Check(["0a-1b", "2c"]), b'{"kind":"Check","uids":["0a-1b","2c"]}'),
    (messages.Ping(), b'{"kind":"Ping"}'),
    (messages.Pong(), b'{"kind":"Pong"}'),
    (
        messages.Fence("sim", True),
        b'{"kind":"Fence","simulation":"sim","cut_off":true}',
    ),
    (
        messages.Spawn("sim", 1, 0, 7, "orted", {"A": "\udcff"}, "/dev/shm/x"),
        b'{"kind":"Spawn","simulation":"sim","group":1,"origin":0,"number":7,'
        b'"command":"orted","environment":{"A":"\\udcff"},"session":"/dev/shm/x"}',
    ),
    (
        messages.Spawned("sim", 0, 7, False, 0, "\u00e9\n"),
        b'{"kind":"Spawned","simulation":"sim","group":0,"number":7,"running":false,'
        b'"code":0,"said":"\\u00e9\\n"}',
    ),
    (messages.Joined(), b'{"kind":"Joined"}'),
    (messages.Gone(), b'{"kind":"Gone"}'),
]
MESSAGES = [message for message, _ in TEXTS]


def test_the_bytes_of_a_message_stay_what_they_are():
    assert {type(message) for message in MESSAGES} == set(messages.KINDS.values())
    for message, text in TEXTS:
        assert messages.encode(message) == len(text).to_bytes(4, "big") + text


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100, 10000])
def test_messages_survive_in_whatever_pieces_they_come(size):
    data = b"".join(map(messages.encode, MESSAGES))
    decoder = messages.Decoder()
    found = []
    for start in range(0, len(data), size):
        found += decoder.feed(data[start : start + size])
    assert found == MESSAGES


WRONG = {
    "too long": messages.LENGTH.pack(messages.LONGEST + 1),
    "not JSON": b"{",
    "no object": b"[1]",
    "no kind": b"{}",
    "an unknown kind": b'{"kind":"Format"}',
    "a kind that is none": b'{"kind":["Pod"]}',
    "a field missing": b'{"kind":"Stop"}',
    "a field too many": b'{"kind":"Stop","simulation":"s","x":1}',
    "a wrong type": b'{"kind":"Stop","simulation":1}',
    "a truth for a number": b'{"kind":"End","simulation":"s","code":true}',
    "a cause that nobody knows": b'{"kind":"Result","simulation":"s","cause":"fate","code":1,'
    b'"reason":"","trouble":""}',
    "deep": b"[" * 100000,
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_what_is_no_message_is_refused(text):
    data = text if len(text) == 4 else messages.LENGTH.pack(len(text)) + text
    with pytest.raises(MessageError):
        messages.Decoder().feed(data)


@given(st.binary(max_size=200))
def test_any_bytes_give_messages_or_an_error(text):
    decoder = messages.Decoder()
    try:
        found = decoder.feed(messages.LENGTH.pack(len(text)) + text)
    except MessageError:
        return
    assert all(isinstance(message, tuple(messages.KINDS.values())) for message in found)


@given(st.text(max_size=30), st.integers(), st.dictionaries(st.text(max_size=5), st.text()))
def test_any_content_survives(name, number, environment):
    message = messages.Spawn(name, number, 0, 1, name, environment, "")
    assert messages.Decoder().feed(messages.encode(message)) == [message]
    json.loads(messages.encode(message)[4:])


def test_a_message_that_is_too_long_is_not_sent():
    with pytest.raises(MessageError):
        messages.encode(messages.Result("sim", Cause.DONE, 0, "x" * (messages.LONGEST + 1), ""))


NETWORKS = {
    "one": (["192.0.2.7"], "192.0.2.7/32"),
    "neighbours": (["192.0.2.6", "192.0.2.7"], "192.0.2.6/31"),
    "far apart": (["10.0.1.1", "10.0.200.9"], "10.0.0.0/16"),
    "loopback": (["127.0.0.1", "127.5.6.7"], "127.0.0.0/8"),
    "not of this kind": (["192.0.2.6", "2001:db8::1"], ""),
}


@pytest.mark.parametrize("case", NETWORKS.values(), ids=NETWORKS.keys())
def test_the_network_of_all_nodes_is_the_smallest(case):
    addresses, network = case
    assert launcher.common_network(addresses) == network


def test_ranks_are_in_the_groups_that_their_sizes_say():
    sizes = [2, 0, 3, 1]
    assert [rsh_agent.group_of(rank, sizes) for rank in range(7)] == [0, 0, 2, 2, 2, 3, -1]


def test_host_files_keep_the_order_of_the_ranks():
    hosts = [
        {"address": a, "ranks": n}
        for a, n in (("192.0.2.1", 2), ("192.0.2.2", 1), ("192.0.2.1", 1))
    ]
    files = launcher.host_files(hosts)
    own = files["openmpi"].split()[0]
    assert files["openmpi"].split() == [own, own, "192.0.2.2", own]
    assert files["mpich"].split() == ["localhost:2", "192.0.2.2:1", "localhost:1"]


def test_who_waits_for_an_answer_can_be_cancelled_at_every_moment():
    async def answer(steps):
        for _ in range(steps):
            await asyncio.sleep(0)

    async def forever(steps):
        await connections.within(60, answer(steps))
        await asyncio.Event().wait()

    async def cancelled(steps, moment):
        task = asyncio.ensure_future(forever(steps))
        await answer(moment)
        task.cancel()
        await asyncio.wait([task], timeout=60)
        assert task.cancelled(), f"not when {steps} steps are waited for, and after {moment}"

    async def all_moments():
        for steps in range(4):
            for moment in range(10):
                await cancelled(steps, moment)

    asyncio.run(all_moments())


def test_an_answer_comes_in_time_or_not_at_all():
    async def late(seconds):
        await asyncio.sleep(seconds)
        return "here"

    assert asyncio.run(connections.within(60, late(0))) == "here"
    with pytest.raises(asyncio.TimeoutError):
        asyncio.run(connections.within(0.01, late(60)))
