# SPDX-License-Identifier: LGPL-3.0-or-later
"""carve.lua decides who may have which slices, here without Flux around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from support import lua_core

pytestmark = pytest.mark.unit

# What the host would offer. `main` gives a job and a configuration to the plugin, and returns
# what the plugin did to the job.
HOST = """
    local handlers, done = {}, {}
    jobtap = { on = function(topic, handler) handlers[topic] = handler end }

    local actions = {}
    function actions.reject(_, why) error("rejected: " .. why, 0) end
    function actions.posted(job, event) return event == "memo" and job.noted end
    function actions.annotate(_, what) done.annotated = what end
    function actions.update(_, what) done.updated = what return true end

    function main(case)
        if case.conf then handlers["conf.update"](case.conf) end
        local job = {
            userid = case.userid, jobspec = case.jobspec, state = case.state, noted = case.noted,
        }
        for name, action in pairs(actions) do job[name] = action end
        handlers["job.validate"](job)
        handlers["job.new"](job)
        return done
    end
"""
PLUGIN = str(lua_core.TOP / "jobtap" / "carve.lua")


def jobspec(asked: object, nodes: int | None = 4, queue: str | None = None) -> dict[str, Any]:
    """A job as Flux would describe it."""
    slot = {"type": "slot", "count": 1, "with": [{"type": "core", "count": 1}]}
    resource = {"type": "node", "count": nodes, "with": [slot]} if nodes else slot
    system = {"duration": 0, **({"queue": queue} if queue else {})}
    attributes: dict[str, Any] = {"system": system}
    if asked is not None:
        attributes["user"] = {"dovetail": asked}
    return {"version": 1, "resources": [resource], "attributes": attributes}


def in_slots(spec: dict[str, Any], count: int) -> dict[str, Any]:
    """The same with so many slots around its nodes, as `--resources-shape` makes them."""
    return {**spec, "resources": [{"type": "slot", "count": count, "with": spec["resources"]}]}


@pytest.fixture(params=lua_core.VERSIONS)
def judge(request: pytest.FixtureRequest) -> Callable[..., str]:
    """What is printed for a job: what was done to it, or why it was rejected."""

    def judged(
        spec: dict[str, Any], *, state: str = "NEW", noted: bool = False, **policy: object
    ) -> str:
        conf = {"dovetail-policy": policy} if policy else {}
        case = {"conf": conf, "userid": 1000, "jobspec": spec, "state": state, "noted": noted}
        return lua_core.run([lua_core.build(request.param)], json.dumps(case), HOST, PLUGIN)

    return judged


ACCEPTED = {
    "no slices": (jobspec(None), {}, "{}"),
    "all cores of two nodes": (jobspec({"nodes": 2, "cores": "all"}), {}, ("all", 2)),
    "two cores of each node": (jobspec({"nodes": 4, "cores": 2}), {}, (2, 4)),
    "cores unsaid": (jobspec({"nodes": 1}), {}, ("all", 1)),
    "more slices of few cores than nodes": (jobspec({"nodes": 8, "cores": 1}), {}, (1, 8)),
    "a job of cores, its nodes unknown": (jobspec({"nodes": 2}, nodes=None), {}, ("all", 2)),
    "as many as allowed": (jobspec({"nodes": 2}), {"max-nodes": 2}, ("all", 2)),
    "the share allowed": (jobspec({"nodes": 2}), {"max-share": 0.5}, ("all", 2)),
    "a share that is no binary fraction": (
        jobspec({"nodes": 29}, nodes=100), {"max-share": 0.29}, ("all", 29),
    ),
    "a user on the list": (jobspec({"nodes": 1}), {"users": [7, 1000]}, ("all", 1)),
    "a queue on the list": (jobspec({"nodes": 1}, queue="a"), {"queues": ["a"]}, ("all", 1)),
    "a slice, judged already": (jobspec({"slice": 1}), {"users": [7]}, "{}"),
}  # fmt: skip
CUT = {  # what is left of a request where policy reduces, as (nodes, cores)
    "to the nodes allowed": (jobspec({"nodes": 4}), {"max-nodes": 2}, (2, "all")),
    "to the cores allowed, from all": (jobspec({"nodes": 1}), {"max-cores": 8}, (1, 8)),
    "to the cores allowed, from more": (
        jobspec({"nodes": 1, "cores": 9}), {"max-cores": 8}, (1, 8),
    ),
    "to the share allowed": (jobspec({"nodes": 4, "cores": 1}), {"max-share": 0.5}, (2, 1)),
    "to a share in whole nodes": (jobspec({"nodes": 3}, nodes=3), {"max-share": 0.5}, (1, "all")),
    "to a share that is no binary fraction": (
        jobspec({"nodes": 90}, nodes=90), {"max-share": 0.7}, (63, "all"),
    ),
    "to all of it at once": (
        jobspec({"nodes": 4}), {"max-share": 0.9, "max-nodes": 2, "max-cores": 1}, (2, 1),
    ),
}  # fmt: skip
UNCUT = {
    "less than policy allows": (
        jobspec({"nodes": 1, "cores": 2}),
        {"max-nodes": 2, "max-cores": 8},
    ),
    "nodes that are unknown, where all are allowed": (
        jobspec({"nodes": 2}, nodes=None), {"max-share": 1.0},
    ),
    "nothing asked for": (jobspec(None), {"max-nodes": 1}),
    "a slice, judged already": (jobspec({"slice": 1}), {"max-nodes": 1}),
    "a slice, judged already, by a share": (jobspec({"slice": 1}, nodes=None), {"max-share": 0.5}),
}  # fmt: skip
REJECTED = {
    "no nodes": (jobspec({}), {}, "nodes is a whole number from 1 on"),
    "nodes in words": (jobspec({"nodes": "two"}), {}, "nodes is a whole number from 1 on"),
    "half a node": (jobspec({"nodes": 0.5}), {}, "nodes is a whole number from 1 on"),
    "something else": (jobspec("nodes=2"), {}, "nodes=N is missing"),
    "no cores": (jobspec({"nodes": 1, "cores": 0}), {}, "cores is a whole number from 1 on"),
    "more nodes than the job has": (
        jobspec({"nodes": 5}), {}, "nodes=5 does not fit into the job's 4 nodes",
    ),
    "another user": (jobspec({"nodes": 1}), {"users": [7]}, "user 1000 may not use it here"),
    "nobody at all": (jobspec({"nodes": 1}), {"users": []}, "user 1000 may not use it here"),
    "another queue": (
        jobspec({"nodes": 1}, queue="b"), {"queues": ["a"]}, "not allowed in queue b",
    ),
    "no queue": (jobspec({"nodes": 1}), {"queues": ["a"]}, "not allowed in queue (none)"),
    "too many nodes": (
        jobspec({"nodes": 3}), {"max-nodes": 2}, "nodes=3 is more than the 2 allowed here",
    ),
    "too many cores": (
        jobspec({"nodes": 1, "cores": 9}), {"max-cores": 8}, "cores=9 is more than the 8 allowed",
    ),
    "all cores where some are allowed": (
        jobspec({"nodes": 1}), {"max-cores": 8}, "cores=all is more than the 8 allowed",
    ),
    "too large a share": (
        jobspec({"nodes": 3}), {"max-share": 0.5}, "nodes=3 is more than 50 % of the job's 4 nodes",
    ),
    "too large a share, in smaller pieces": (
        jobspec({"nodes": 3, "cores": 1}), {"max-share": 0.5}, "nodes=3 is more than 50 %",
    ),
    "a share of nodes that are unknown": (
        jobspec({"nodes": 1, "cores": 1}, nodes=None), {"max-share": 0.5},
        "50 % of the job's nodes are allowed; ask for them with -N",
    ),
    "too large a share of nodes in slots": (
        in_slots(jobspec({"nodes": 3}, nodes=2), 2), {"max-share": 0.5},
        "nodes=3 is more than 50 % of the job's 4 nodes",
    ),
    "more nodes than the job has in slots": (
        in_slots(jobspec({"nodes": 5}, nodes=2), 2), {},
        "nodes=5 does not fit into the job's 4 nodes",
    ),
    "the site's own words": (
        jobspec({"nodes": 9}), {"contact": "ask hpc@example.org"}, "; ask hpc@example.org",
    ),
    "a user who is not on the list, though others are reduced": (
        jobspec({"nodes": 1}), {"users": [7], "reduce": True}, "user 1000 may not use it here",
    ),
    "a share of less than a node": (
        jobspec({"nodes": 1}, nodes=1), {"max-share": 0.5, "reduce": True}, "more than 50 %",
    ),
    "half a core, to be reduced": (
        jobspec({"nodes": 1, "cores": 0.5}), {"max-cores": 1, "reduce": True}, "cores is a whole",
    ),
    "a word for a switch": (jobspec(None), {"reduce": "yes"}, "reduce is not a boolean"),
    "a policy that is not known": (jobspec(None), {"max-node": 1}, "max-node is not known"),
    "users by their names": (jobspec(None), {"users": ["alice"]}, "users is not a list of"),
    "users that are no list": (jobspec(None), {"users": {"a": 1}}, "users is not a list of"),
    "queues by numbers": (jobspec(None), {"queues": [1]}, "queues is not a list of names"),
    "a share of 50": (jobspec(None), {"max-share": 50}, "max-share is not a number above 0 and up"),
    "no node at all": (jobspec(None), {"max-nodes": 0}, "max-nodes is not a number, whole and"),
    "a policy of the wrong kind": (jobspec(None), {"max-nodes": "1"}, "max-nodes is not a number"),
}  # fmt: skip


@pytest.mark.parametrize("what", ACCEPTED)
def test_a_job_with_this_is_accepted_and_annotated(judge, what):
    spec, policy, outcome = ACCEPTED[what]
    if isinstance(outcome, tuple):
        cores, nodes = outcome
        outcome = json.dumps({"annotated": {"dovetail": {"cores": cores, "nodes": nodes}}})
    assert judge(spec, **policy) == outcome.replace(" ", "")


@pytest.mark.parametrize("what", CUT)
def test_a_request_beyond_policy_is_cut_where_policy_reduces(judge, what):
    spec, policy, (nodes, cores) = CUT[what]
    share = {"cores": cores, "nodes": nodes}
    wanted = {"annotated": {"dovetail": share}, "updated": {"attributes.user.dovetail": share}}
    assert json.loads(judge(spec, **policy, reduce=True)) == wanted
    assert judge(spec, **policy).startswith("error: rejected: dovetail: ")


def test_a_request_is_cut_though_another_plugin_annotated_the_job_before(judge):
    spec, policy, _ = CUT["to the nodes allowed"]
    assert judge(spec, **policy, noted=True, reduce=True) == judge(spec, **policy, reduce=True)


def test_a_job_that_was_annotated_in_an_earlier_life_is_left_as_it_is(judge):
    spec, policy, _ = CUT["to the nodes allowed"]
    assert judge(spec, **policy, state="RUN", noted=True, reduce=True) == "{}"


@pytest.mark.parametrize("what", UNCUT)
def test_a_request_within_policy_is_left_as_it_is(judge, what):
    spec, policy = UNCUT[what]
    found = judge(spec, **policy, reduce=True)
    assert "updated" not in found
    assert found == judge(spec, **policy)


@pytest.mark.parametrize("what", REJECTED)
def test_a_job_with_this_is_rejected_with_the_reason(judge, what):
    spec, policy, why = REJECTED[what]
    printed = judge(spec, **policy)
    assert printed.startswith("error: ")
    assert why in printed


@pytest.mark.parametrize("lua", lua_core.VERSIONS)
@pytest.mark.parametrize("policy", [3, "all", [1], True])
def test_a_policy_that_is_no_table_is_refused_in_plain_words(lua, policy):
    case = {"conf": {"dovetail-policy": policy}, "userid": 1, "jobspec": jobspec(None)}
    printed = lua_core.run([lua_core.build(lua)], json.dumps(case), HOST, PLUGIN)
    assert printed == "error: dovetail-policy is not a table"


@pytest.mark.parametrize("lua", lua_core.VERSIONS)
def test_a_policy_that_is_refused_is_not_in_force(lua):
    script = """
        local judge, refused = main, false
        again = true
        function main(case)
            if not refused then
                refused = true
                judge { conf = case.conf }
            end
            return judge { userid = case.userid, jobspec = case.jobspec }
        end"""
    policy = {"max-nodes": 1, "max-node": 1}
    case = {"conf": {"dovetail-policy": policy}, "userid": 1, "jobspec": jobspec({"nodes": 2})}
    printed = lua_core.run([lua_core.build(lua)], json.dumps(case), HOST, PLUGIN, script)
    refused, judged = printed.splitlines()
    assert refused == "error: dovetail-policy.max-node is not known"
    assert json.loads(judged) == {"annotated": {"dovetail": {"cores": "all", "nodes": 2}}}
