# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the broker module decides."""

from __future__ import annotations

import pytest
from dovetail.core.errors import BadInput
from dovetail.core.messages import MessageError
from dovetail.flux import jobspec, option
from dovetail.flux.instance.effects import FAILED, INVALID, NOENT, TIMEOUT, Cancel, Sweep
from dovetail.flux.instance.requests import STREAMS
from support.broker_states import Play

pytestmark = pytest.mark.unit


def test_a_job_that_waits_is_let_go_when_every_node_is_ready():
    play = Play().begin().ask("wait-up", "gate")
    play.ready(0)
    assert play.told("gate") == []
    play.ready(1)
    assert play.told("gate") == [{"nodes": 2}]
    assert play.ask("wait-up", "later").told("later") == [{"nodes": 2}]


def test_join_data_go_to_the_one_agent_that_asked():
    play = Play(3).begin().attach(1).ask("join", "j1", number=1)
    assert play.told("j1") == []
    play.attach(0)  # whose node need not be ready: it takes others before
    play.attach(2).ask("join", "j2", number=2)
    assert play.told("agent0") == [
        {"invite": 1, "node": ""},
        {"invite": 2, "node": ""},
    ]
    play.ask("tell", "t", number=0, invited=2, join={"token": "two"})
    play.ask("tell", "t", number=0, invited=1, why="the API is gone")
    assert (play.told("j1"), play.told("j2")) == (
        [(FAILED, "the API is gone")],
        [{"token": "two"}],
    )


def test_a_start_that_fails_ends_everything_and_tells_why():
    play = Play().begin().ask("wait-up", "gate").ready(0).attach(1)
    play.ask("tell", "t", number=1, failed="no cgroup")
    play.over(1, 256)
    assert play.told("gate") == [(FAILED, "slice 1 did not come up: no cgroup")]
    assert play.told("agent0")[-1] == {"end": True}
    assert play.state.phase == "failed"
    assert play.ask("wait-up", "late").told("late")[0][0] == FAILED
    assert play.ask("submit", "s", plan="p", output="o", cwd="/").told("s")[0][0] == FAILED


def test_a_start_that_takes_too_long_names_what_is_missing():
    play = Play().begin().ask("wait-up", "gate").ready(0)
    play.do(play.state.late())
    [(code, why)] = play.told("gate")
    assert code == FAILED
    assert "slice 1 is submitted" in why
    assert Cancel(101, "no longer wanted") in play.done


def test_a_start_that_ends_before_anything_was_submitted_says_so():
    play = Play().ask("wait-up", "gate")
    play.do(play.state.late())
    [(_, why)] = play.told("gate")
    assert why.endswith("s: no slice was submitted yet")
    assert play.begin().submits() == [], "nor is any later"


def test_the_time_to_come_up_is_no_matter_once_it_was_up():
    play = Play(1).begin().ready(0)
    play.do(play.state.late())
    assert play.state.phase == "up"


ENDS = {  # how a proven worker's job ended: is it replaced, how many nodes are wanted then
    "its agent was killed": (lambda p: p.over(1, 9), True, 2),
    "its broker died": (
        lambda p: p.do(p.state.excepted(1, "node-failure", "rank 3")).over(1, 15),
        True,
        2,
    ),
    "the user cancelled it": (
        lambda p: p.do(p.state.excepted(1, "cancel", "")).over(1, 15),
        False,
        1,
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_a_slice_that_is_lost_is_replaced_unless_the_user_ended_it(how):
    end, replaced, wanted = ENDS[how]
    play = Play().begin().ready(0, 1)
    play.do(play.state.drop({"agent1"}))
    end(play)
    assert (play.submits() == [0, 1, 2]) is replaced
    assert play.state.wanted == wanted
    assert {"forget": "n1", "ended": True} in play.told("agent0")
    assert play.state.phase == ("degraded" if replaced else "up")


def test_of_a_slice_whose_machine_cannot_be_reached_nobody_says_that_its_pods_have_ended():
    """They may run on there, and write to the files of those that run in their stead."""
    play = Play().begin().ready(0, 1)
    play.do(play.state.drop({"agent1"}))
    play.do(play.state.finished(1, 9)).do(play.state.swept(1, "rank 1: No route to host"))
    play.do(play.state.cleaned(1))
    assert {"forget": "n1", "ended": False} in play.told("agent0")


@pytest.mark.parametrize(
    ("said", "numbers", "wanted"),
    [
        (("exec", "node failure on vm (rank 1)"), [0, 1, 2, 3], 2),
        (("node-failure", "rank 1"), [0, 1, 2, 3], 2),
        (("exec", "no such program"), [0, 1, 2], 1),
    ],
)
def test_a_replacement_on_the_node_that_was_just_lost_is_replaced(said, numbers, wanted):
    play = Play().begin().ready(0, 1)
    play.do(play.state.drop({"agent1"}))
    play.over(1, 9)
    play.do(play.state.excepted(2, *said))
    play.do(play.state.cleaned(2))
    assert play.submits() == numbers
    assert play.state.wanted == wanted


def test_a_machine_that_nobody_cleaned_is_swept_before_its_cores_are_given_away():
    play = Play().begin().ready(0, 1).ask("wait-down", "epilog", slice=1)
    play.do(play.state.drop({"agent1"}))
    play.do(play.state.finished(1, 9))
    assert Sweep(1, 1) in play.done
    assert play.told("epilog") == []
    play.do(play.state.swept(1, ""))
    assert play.told("epilog") == [{}]
    play.do(play.state.cleaned(1))
    assert 1 not in play.state.slices


def test_the_end_is_confirmed_only_when_every_slice_is_gone():
    play = Play().begin().ready(0, 1).ask("down", "down")
    assert (play.told("agent0")[-1], play.told("agent1")[-1]) == ({"end": True}, {"end": True})
    play.left(1)
    assert play.told("down") == []
    play.left(0)
    assert play.told("down") == [{}]
    assert not [effect for effect in play.done if isinstance(effect, Sweep)]
    assert play.state.phase == "down"


def test_an_end_that_takes_too_long_cancels_and_then_says_what_is_left():
    play = Play().begin().ready(0, 1).ask("down", "down")
    play.left(1)
    play.do(play.state.late_down(last=False))
    assert Cancel(100, "did not end in time") in play.done
    play.do(play.state.late_down(last=True))
    assert "slice 0" in play.told("down")[0][1]


def test_who_asks_for_the_end_once_it_took_too_long_is_told_so_too():
    failed, down = Play().begin(), Play().begin().ready(0, 1).ask("down", "first")
    failed.do(failed.state.late())
    for play in (failed, down):
        play.do(play.state.late_down(last=False))
        play.do(play.state.late_down(last=True))
        play.ask("down", "again")
        assert play.told("again") == [(TIMEOUT, "not ended in time: slice 0, slice 1")]
        play.left(1).left(0)
        assert play.ask("down", "third").told("third") == [{}]


def test_runs_wait_for_kubernetes_and_for_each_other():
    play = Play(1).begin()
    for number in (1, 2):
        play.ask("submit", f"s{number}", plan=f"p{number}", output=f"o{number}", cwd="/")
    play.ask("wait", "all")
    play.ready(0)
    assert [one["queue"]["plan"] for one in play.told("agent0") if "queue" in one] == ["p1", "p2"]
    assert [one["run"] for one in play.told("agent0") if "run" in one] == [1]
    play.ask("tell", "t", number=0, run=1, code=0)
    play.ask("tell", "t", number=0, run=2, code=1, why="bad")
    [answer] = play.told("all")
    assert [(run["state"], run["reason"]) for run in answer["runs"]] == [
        ("done", ""),
        ("failed", "bad"),
    ]


def test_the_content_of_a_plan_goes_to_the_control_slice_and_is_not_for_status():
    play = Play(1).begin().ready(0)
    play.ask("submit", "s", plan="p", output="o", cwd="/", content="simulations: []")
    [order] = [one["queue"] for one in play.told("agent0") if "queue" in one]
    assert (order["plan"], order["content"]) == ("p", "simulations: []")
    assert "content" not in play.ask("status", "now").told("now")[0]["runs"][0]
    [(code, why)] = play.ask("submit", "x", plan="p", output="o", cwd="/", content=3).told("x")
    assert (code, "content" in why) == (INVALID, True)


def test_a_cancelled_run_is_told_and_a_waiting_one_never_starts():
    play = Play(1).begin().ready(0)
    for number in (1, 2):
        play.ask("submit", f"s{number}", plan="p", output=f"o{number}", cwd="/")
    play.ask("cancel", "c").ask("wait", "w")
    assert {"cancel": 1} in play.told("agent0")
    play.ask("tell", "t", number=0, run=1, code=130)
    assert [run["state"] for run in play.told("w")[0]["runs"]] == ["cancelled", "cancelled"]
    why = "there is no run 7; see `flux dovetail status`"
    assert play.ask("wait", "x", runs=[1, 7]).told("x")[0] == (NOENT, why)


def test_a_simulation_is_a_job_that_is_told_its_end():
    play = Play(1).begin().ready(0).ask("follow", "f", launch="a-1")
    launch = {"launch": "a-1", "run": 1, "name": "sim", "log": "o/sim/log"}
    play.ask("tell", "t", number=0, simulation=launch)
    play.ask("follow", "g", launch="a-1")
    assert play.told("f") == play.told("g") == [{"log": "o/sim/log"}]
    play.ask(
        "tell", "t", number=0, simulation={**launch, "code": 3, "reason": "bad", "cause": "failed"}
    )
    [_, told] = play.told("f")
    assert (told["code"], told["reason"], told["exception"]) == (3, "bad", "")
    assert play.ask("follow", "late", launch="a-1").told("late") == [told]


def test_a_simulations_job_ends_with_its_run_whatever_was_said():
    play = Play(1).begin().ready(0).ask("submit", "s", plan="p", output="o", cwd="/")
    play.ask(
        "tell", "t", number=0, simulation={"launch": "a-1", "run": 1, "name": "sim", "log": "l"}
    )
    play.ask("follow", "f", launch="a-1").ask("tell", "t", number=0, run=1, code=1)
    assert play.told("f")[-1]["reason"] == "its run is over"
    assert play.told("f")[-1]["exception"] == "dovetail"


@pytest.mark.parametrize(
    ("cause", "exception"),
    [("done", ""), ("failed", ""), ("launch failed", ""), ("supervisor lost", ""),
     ("pod lost", "dovetail"), ("node lost", "dovetail"), ("cancelled", "cancel"),
     ("interrupted", "cancel"), ("hung", "cancel"), ("taken back", "cancel")],
)  # fmt: skip
def test_a_simulations_job_has_an_exception_unless_its_program_ended_so(cause, exception):
    play = Play(1).begin().ready(0)
    launch = {"launch": "a-1", "run": 1, "name": "s", "log": "l"}
    for more in ({}, {"code": 3, "reason": "pod lost: it says", "cause": cause}):
        play.ask("tell", "t", number=0, simulation={**launch, **more})
    assert play.ask("follow", "f", launch="a-1").told("f")[0]["exception"] == exception


def test_more_nodes_are_answered_when_ready_and_fewer_when_gone():
    play = Play(1).begin().ready(0).ask("resize", "grow", nodes=3)
    play.ready(1, 2)
    assert play.told("grow") == [{"nodes": 3}]
    play.ask("resize", "shrink", nodes=1)
    assert play.told("shrink") == []
    play.left(1).left(2)
    assert play.told("shrink") == [], "Kubernetes has their nodes still"
    for node in ("n1", "n2"):
        play.ask("tell", "t", number=0, forgotten=node)
    assert play.told("shrink") == [{"nodes": 1}]
    assert play.state.phase == "up"
    for nodes in (0, "many", None, True):
        assert play.ask("resize", f"r{nodes}", nodes=nodes).told(f"r{nodes}")[0][0] == INVALID


def test_a_resize_that_comes_out_with_fewer_nodes_is_refused():
    play = Play(1).begin().ready(0).ask("resize", "grow", nodes=3).ready(1).attach(2)
    play.ask("tell", "t", number=2, failed="no cgroup").over(2, 256)
    (refused,) = play.told("grow")
    assert refused == (FAILED, "2 nodes are wanted by now, not 3: slice 2: no cgroup")
    assert play.state.phase == "up"


def test_a_resize_that_another_overtakes_names_no_loss_of_before():
    play = Play(2).begin().ready(0, 1).over(1, 9).ready(2)
    assert play.state.lost == ["slice 1: killed by signal 9"]
    play.ask("resize", "more", nodes=4).ask("resize", "less", nodes=2)
    assert play.told("more") == [(FAILED, "2 nodes are wanted by now, not 4")]


def test_a_resize_before_the_first_submission_counts_then():
    play = Play(1).ask("resize", "grow", nodes=3)
    assert play.submits() == []
    assert play.begin().submits() == [0, 1, 2]
    play.ready(0, 1, 2)
    assert play.told("grow") == [{"nodes": 3}]


def test_the_end_before_the_beginning_starts_nothing():
    play = Play().ask("down", "down")
    assert play.told("down") == []
    play.begin()
    assert play.submits() == []
    assert play.told("down") == [{}]


def test_a_start_for_which_there_is_no_room_starts_nothing_and_says_why():
    play = Play(3).ask("wait-up", "up")
    play.do(play.state.fail("there is no room"))
    play.begin()
    assert play.submits() == []
    assert play.told("up") == [(FAILED, "there is no room")]
    assert play.state.phase == "failed"


def test_whoever_watches_is_told_of_changes_and_of_nothing_else():
    play = Play(1).begin()
    play.do(STREAMS["status"](play.state, "top", {}))
    play.ready(0)
    play.do(play.state.settle())
    phases = [told["phase"] for told in play.told("top")]
    assert phases == ["starting", "starting", "up"]


def test_the_loss_of_the_control_plane_is_told_to_everybody():
    play = Play().begin().ready(0, 1).ask("submit", "s", plan="p", output="o", cwd="/")
    play.ask("wait", "w").ask("url", "u", service="x")
    play.do(play.state.drop({"agent0"})).over(0, 9)
    assert play.told("w")[0]["runs"][0]["state"] == "failed"
    assert play.told("u")[0][0] == FAILED
    assert play.state.status()["reason"] == "the control slice ended: killed by signal 9"
    assert {"end": True} in play.told("agent1")


ENDS_OF_ALL = {  # and what the run's reason is
    "it is taken down": (lambda p: p.ask("down", "d"), "Kubernetes was taken down"),
    "its control slice fails": (
        lambda p: p.ask("tell", "t", number=0, failed="its node ended"),
        "the control slice ended: its node ended",
    ),
}


@pytest.mark.parametrize("told", [{"report": 1}, {"run": 1, "code": 1, "reported": True}])
@pytest.mark.parametrize("how", ENDS_OF_ALL)
def test_a_report_that_is_written_as_all_ends_is_there_and_the_cause_stays(how, told):
    end, why = ENDS_OF_ALL[how]
    play = Play(1).begin().ready(0).ask("submit", "s", plan="p", output="o", cwd="/")
    end(play)
    if "run" in told:  # which is told after the cause
        play.do(play.state.drop({"agent0"})).over(0, 256)
    play.ask("tell", "t", number=0, **told)
    play.left(0)
    [run] = play.ask("wait", "w").told("w")[0]["runs"]
    assert (run["state"], run["reason"], run["reported"]) == ("failed", why, True)
    play.ask("tell", "t", number=0, report=7)  # of an earlier control slice: no matter


def test_requests_of_a_client_that_is_gone_are_forgotten():
    play = Play().begin()
    for topic in ("wait-up", "wait", "down"):
        play.ask(topic, "dead", runs=[])
    play.do(play.state.drop({"dead"}))
    play.done.clear()
    play.ready(0, 1)
    assert play.told("dead") == []


WRONG = {  # a request, and what it is refused with
    "submit": ({"plan": "p", "cwd": "/"}, "SubmitPlan: output is missing"),
    "url": ({"service": 3}, "FindUrl: service is not a text"),
    "wait": ({"runs": [True]}, "ChooseRuns: runs is not a list, each of it a whole number or null"),
    "cancel": ({"runs": 1}, "ChooseRuns: runs is not a list, each of it a whole number or null"),
    "resize": ({"nodes": 10001}, "nodes is a number from 1 to 10000, not 10001"),
}


@pytest.mark.parametrize("topic", WRONG)
def test_a_request_that_makes_no_sense_is_refused_by_the_name_of_what_is_wrong(topic):
    payload, why = WRONG[topic]
    play = Play(1).begin().ready(0).ask(topic, "x", **payload)
    assert play.told("x") == [(INVALID, why)]


@pytest.mark.parametrize("news", [{}, {"number": True, "node": "n"}, {"number": 0, "run": 1}])
def test_news_that_make_no_sense_change_nothing(news):
    play = Play(1).begin().ready(0)
    before = play.state.status()
    with pytest.raises(MessageError):
        play.ask("tell", "t", **news)
    assert play.state.status() == before


def test_slices_ask_for_exactly_their_cores():
    spec = jobspec.slice_job(option.Request(2, 3, "/bin/flux-dovetail"), 1, "f-1", {"A": "b"})
    [node] = spec["resources"]
    assert (node["count"], node["with"][0]["with"][0]["count"]) == (1, 3)
    whole = jobspec.slice_job(option.Request(2), 0, "f-1", {})["resources"][0]
    assert whole["exclusive"] is True
    assert spec["attributes"]["user"]["dovetail"] == {"slice": 1, "cluster": "f-1"}


def test_a_slice_has_as_long_to_come_up_as_the_configuration_says():
    """Not the verb's own limit, which a slow machine does not keep."""
    table = {"nodes": 2, "up-timeout": 900}
    (task,) = jobspec.slice_job(option.from_table(table), 1, "f-1", {})["tasks"]
    words = task["command"]
    assert words[words.index("--timeout") + 1] == "900"


def test_slices_are_told_of_upstream_usernetes():
    table = {"nodes": 2, "provider": "usernetes", "usernetes": "/opt/u", "node-image": "u:1"}
    spec = jobspec.slice_job(option.from_table(table), 1, "f-1", {})
    assert spec["tasks"][0]["command"][-4:] == ["--usernetes", "/opt/u", "--node-image", "u:1"]
    assert spec["resources"][0]["exclusive"] is True


def test_slices_are_told_of_a_network_that_is_not_the_usual_one():
    spec = jobspec.slice_job(option.from_table({"nodes": 2, "network": "bridge"}), 0, "f-1", {})
    assert spec["tasks"][0]["command"][-2:] == ["--network", "bridge"]
    assert (
        "--network" not in jobspec.slice_job(option.Request(2), 0, "f-1", {})["tasks"][0]["command"]
    )


def test_the_nodes_of_slices_offer_the_devices_of_the_configuration():
    table = {"nodes": 2, "devices": "gpu,/dev/fuse=8"}
    (task,) = jobspec.slice_job(option.from_table(table), 1, "f-1", {})["tasks"]
    assert task["command"][-2:] == ["--devices", "gpu,/dev/fuse=8"]
    (task,) = jobspec.slice_job(option.Request(2), 1, "f-1", {})["tasks"]
    assert "--devices" not in task["command"]
    with pytest.raises(BadInput, match='devices is a text such as "gpu,/dev/fuse=8"'):
        option.from_table({**table, "devices": ["gpu"]})


def test_a_default_for_the_time_of_jobs_is_found_wherever_it_is():
    default = {"policy": {"jobspec": {"defaults": {"system": {"duration": "30m"}}}}}
    other = {"policy": {"jobspec": {"defaults": {"system": {"queue": "a"}}}}}
    assert jobspec.has_default_duration(default)
    assert jobspec.has_default_duration({**other, "queues": {"a": {}, "b": default}})
    for none in {}, other, {"queues": {"a": {}, "b": other}}, {"policy": {"limits": {}}}:
        assert not jobspec.has_default_duration(none)


def test_the_names_of_jobs_differ_where_flux_jobs_shows_them():
    simulations = [(1, "channel-imbalanced-1"), (1, "channel-imbalanced-2"), (2, "channel"),
                   (1, "case-0"), (1, "case"), (12, "channel-imbalanced-10000")]  # fmt: skip
    names = [jobspec.proxy_name(*one) for one in simulations]
    assert names[:3] == ["1.1:channel-imbalanced", "1.2:channel-imbalanced", "2:channel"]
    specs = [jobspec.slice_job(option.Request(2), n, "f-1", {}) for n in (0, 1, 10000)]
    names += [spec["attributes"]["system"]["job"]["name"] for spec in specs]
    assert len({name[:9] for name in names}) == len(names)
    assert [jobspec.slice_number(spec, "f-1") for spec in specs] == [0, 1, 10000]


@pytest.mark.parametrize("user", [{}, {"dovetail": 7}, {"dovetail": {"nodes": 1}}])
def test_a_job_that_has_only_the_name_of_a_slice_is_none(user):
    assert jobspec.slice_number({"attributes": {"system": {}, "user": user}}, "f-1") is None
    other = jobspec.slice_job(option.Request(2), 1, "f-2", {})
    assert jobspec.slice_number(other, "f-1") is None


def test_what_is_up_is_used_where_more_nodes_are_wanted_than_there_are_cores():
    play = Play(1).begin().ready(0).ask("resize", "r", nodes=12)
    assert play.state.phase == "degraded"
    assert play.state.status()["ready"] == 1
    assert play.ask("wait-up", "up").told("up") == [{"nodes": 1, "wanted": 12}]
    play.ask("submit", "s", plan="/p", output="/o", cwd="/")
    assert play.told("agent0")[-1] == {"run": 1}, "the plan starts"
    assert play.told("r") == [], "it is not so yet"
    play.ask("resize", "less", nodes=1)
    assert play.told("r") == [(FAILED, "1 node is wanted by now, not 12")]


def test_a_resize_for_which_there_is_no_room_even_when_all_is_idle_is_refused():
    play = Play(2).begin().ready(0, 1)
    play.state.room = 4
    play.ask("resize", "r", nodes=5)
    assert play.told("r") == [(INVALID, "5 nodes do not fit into this instance; 4 do")]
    play.state.room = 1
    play.ask("resize", "one", nodes=3)
    assert play.told("one") == [(INVALID, "3 nodes do not fit into this instance; 1 does")]
    play.state.room = 4
    assert (play.state.phase, play.state.wanted) == ("up", 2)
    assert play.ask("resize", "fits", nodes=4).submits() == [0, 1, 2, 3]


def test_a_slice_that_is_lost_and_finds_no_core_holds_nobody_up():
    play = Play().begin().ready(0, 1).over(1, 9)
    assert play.state.phase == "degraded"
    assert play.ask("wait-up", "up").told("up") == [{"nodes": 1, "wanted": 2}]
    play.ask("submit", "s", plan="/p", output="/o", cwd="/")
    assert play.told("agent0")[-1] == {"run": 1}


def test_a_cancelled_control_slice_is_the_end_at_once():
    play = Play().begin().ready(0, 1)
    play.do(play.state.excepted(0, "cancel", ""))
    assert (play.state.phase, play.state.failure) == ("failed", "the control slice ended: cancel")
    assert play.ask("submit", "s", plan="/p", output="/o", cwd="/").told("s")[0][0] == FAILED
    play.left(1).over(0, 15)
    assert play.state.lost == ["slice 0: cancel"], "and is told once"


def test_no_two_runs_write_to_one_directory():
    play = Play().begin().ready(0, 1)
    play.ask("submit", "first", plan="/p", output="/o", cwd="/")
    play.ask("submit", "second", plan="/p", output="/o", cwd="/")
    assert play.told("second") == [(INVALID, "run 1 writes to /o")]
    play.ask("tell", "t", number=0, run=1, code=2, why="no such case")
    assert play.ask("submit", "third", plan="/p", output="/o", cwd="/").told("third") == [
        {"run": 2}
    ]
