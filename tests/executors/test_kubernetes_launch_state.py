# SPDX-License-Identifier: LGPL-3.0-or-later
"""What the executor keeps of a launch, without a cluster."""

from __future__ import annotations

import queue
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from dovetail.core import protocol
from dovetail.core.errors import BadInput, WorkFailed
from dovetail.core.protocol import Cause, Result
from dovetail.executors.kubernetes import identity, images, manifests, session
from dovetail.executors.kubernetes.agent_hub import Hub
from dovetail.executors.kubernetes.api import Refused
from dovetail.executors.kubernetes.executor import KubernetesExecutor
from dovetail.executors.kubernetes.lifecycle import (
    FAILURES,
    STOP,
    Creating,
    Gathering,
    Launched,
    Lifecycle,
    Over,
    Pending,
    Running,
    Terminating,
    case_folder,
)
from dovetail.executors.kubernetes.session import Session, takes
from dovetail.executors.pods import messages
from support.local_runs import wait_for

pytestmark = pytest.mark.unit
JOBS = SimpleNamespace(kind="Job", kinds=("Job",))


def launched(connected, addresses):
    """A simulation of two rank groups, and as much of them as has been seen."""
    spec = protocol.Spec("sim", "sim", "/case", 3, (1.0,) * 3, ("program",))
    job = Launched(spec, protocol.Share((1, 1, 1)), "sim", Gathering(60.0, 3.0), [1, 2])
    job.connected.update(dict.fromkeys(connected, "node"))
    for group, address in addresses.items():
        job.pods[group] = {"status": {"podIP": address} if address else {}}
    return job


@pytest.mark.parametrize(
    ("connected", "addresses"),
    [
        pytest.param((), {}, id="nothing is there"),
        pytest.param((0, 1), {0: "10.0.0.1"}, id="a pod has called that the API has not shown"),
        pytest.param((0,), {0: "10.0.0.1", 1: "10.0.0.2"}, id="a pod is there and has not called"),
        pytest.param((0, 1), {0: "", 1: "10.0.0.2"}, id="the first pod's address is not known yet"),
        pytest.param((0, 1), {0: "10.0.0.1", 1: ""}, id="another pod's address is not known yet"),
    ],
)
def test_ranks_do_not_start_before_all_is_known_of_their_pods(connected, addresses):
    assert launched(connected, addresses).hosts() == []


def test_ranks_start_where_their_pods_are():
    job = launched((1, 0), {1: "10.0.0.2", 0: "10.0.0.1"})
    assert job.hosts() == [{"address": "10.0.0.1", "ranks": 1}, {"address": "10.0.0.2", "ranks": 2}]


def pending():
    spec = protocol.Spec("sim", "sim", "/case", 3, (1.0,) * 3, ("program",))
    return Launched(spec, protocol.Share((1, 1, 1)), "sim", Pending(0.0))


def test_a_launch_goes_from_state_to_state_and_starts_again_under_another_name():
    job = pending()
    job.create()
    assert not job.expected
    job.gather(10.0)
    assert isinstance(job.state, Gathering)
    assert job.state.deadline > job.state.ask_at > 10.0
    assert job.expected
    job.connected[0] = "node"
    job.terminate(None, 20.0)
    assert (job.expected, job.result) == (False, None)
    job.start_over(30.0)
    assert isinstance(job.state, Pending)
    assert job.key.startswith("sim.")
    assert not job.connected, "its pods are others"


def test_only_the_last_state_is_left_by_nothing_and_how_it_ended_stays():
    job = pending()
    job.create()
    job.gather(0.0)
    job.run()
    assert not job.ended_well
    assert isinstance(job.state, Running)
    job.state.doubted = Result(0)
    assert (job.ended_well, job.result) == (True, None), "what its ranks said is not known to be so"
    job.terminate(job.state.doubted, 1.0)
    job.finish()
    assert (job.ended_well, job.result) == (True, Result(0))
    assert isinstance(job.state, Over)


@pytest.mark.parametrize("step", ["gather", "run", "terminate", "start over"])
def test_what_waits_for_room_has_no_pods_to_start_or_to_end(step):
    job = pending()
    steps = {
        "gather": lambda: job.gather(0.0), "run": job.run,
        "terminate": lambda: job.terminate(None, 0.0), "start over": lambda: job.start_over(0.0),
    }  # fmt: skip
    with pytest.raises(AssertionError):
        steps[step]()


def running(**how):
    job = launched((0, 1), {})
    job.connected.update({0: "one", 1: "two"})
    job.state = Running(**how)
    return job


def test_only_nodes_that_may_have_written_are_asked_for_what_was_written():
    assert launched((0, 1), {}).writers == []
    assert running().writers == [], "its case is still coming"
    assert running(begun=True).writers == ["one"]
    assert running(begun=True, prepared=True, spreading=True).writers == ["one"]
    assert running(begun=True, spread=True).writers == ["one", "two"]


def test_the_last_iteration_counts_while_the_output_is_still_coming():
    assert running(ended=Result(0)).ended_well
    assert not running(ended=Result(Cause.FAILED, 1)).ended_well
    assert not running(ended=Result(0), doubted=Result(Cause.POD_LOST, 1)).ended_well


@pytest.mark.parametrize(
    ("ended", "cause", "stopped"),
    [
        (Cause.FAILED, Cause.HUNG, ""),
        (Cause.FAILED, Cause.SHORT_OF_MEMORY, ""),
        (Cause.FAILED, Cause.CANCELLED, "why"),
        (Cause.DONE, Cause.HUNG, ""),
        (Cause.DONE, Cause.TAKEN_BACK, ""),
        (Cause.DONE, Cause.CANCELLED, ""),
        (Cause.CHECKPOINTED, Cause.INTERRUPTED, ""),
    ],
)
def test_what_was_written_is_not_given_up_for_a_stop_once_the_ranks_have_ended(
    ended, cause, stopped
):
    job = running(ended=Result(ended))
    assert not job.stop("why", cause, 5.0)
    assert (job.stopped, job.state.deadline) == (stopped, 0.0)


def test_a_run_that_ends_interrupts_all_of_which_the_end_is_not_known():
    over, coming = running(), running(ended=Result(Cause.DONE))
    over.terminate(Result(Cause.DONE), 5.0)
    for job, stopped in ((over, ""), (coming, "the run ended")):
        job.outlived()
        assert job.stopped == stopped


def test_ranks_that_are_told_to_end_have_some_seconds():
    job = running()
    assert job.stop("", Cause.HUNG, 5.0)
    assert (job.stopped, job.stop_cause) == ("stopped", Cause.HUNG)
    assert job.state.deadline == 5.0 + STOP
    waiting = pending()
    assert not waiting.stop("why", Cause.CANCELLED, 5.0)
    assert waiting.stopped == "why"


class Empty:
    """An API without anything in it."""

    server = "https://nowhere"
    path = Path("/kubeconfig")

    pods = ()

    def get(self, path, patience=0.0, **query):
        return {
            "items": self.pods if path.endswith("/pods") else [],
            "metadata": {"resourceVersion": "1"},
        }

    def watch(self, path, version, **query):
        time.sleep(0.2)
        raise OSError

    def __getattr__(self, name):
        return lambda *words, **more: ""


@pytest.fixture
def resumed(tmp_path):
    """An executor that finds the pod of a simulation, and what its session has heard of an end."""
    spec = protocol.Spec("sim", "sim", "/case", 1, (1.0,), ("program",))
    job = manifests.job("r", spec, "sim", [1], [500], [0], manifests.Folders((), ()))
    pod = {
        "metadata": {
            "name": "p",
            "uid": "u",
            "namespace": "dovetail",
            "labels": {
                **job["metadata"]["labels"],
                manifests.INDEX: "0",
                manifests.JOB: job["metadata"]["name"],
            },
        },
        "spec": {**job["spec"]["template"]["spec"], "nodeName": "n"},
        "status": {"phase": "Running"},
    }
    ends = []
    session = SimpleNamespace(
        api=Empty(), hub=Hub("127.0.0.1", tmp_path / "hub"), run="r", store="", lost="",
        left_out=lambda nodes: frozenset(), launcher=JOBS,
        jobs=[job], pods=[pod], alive=lambda: {"sim": job}, discard=lambda keep: None,
        close=lambda leave: ends.append(leave) or [], resumed=True, news=queue.SimpleQueue(),
    )  # fmt: skip
    executor = KubernetesExecutor(session, tmp_path)
    yield executor, session, {"sim": (spec, protocol.Share((500,)))}, ends
    session.api.pods = ()
    executor.close()
    session.hub.close()


def test_a_pod_that_goes_as_its_simulation_is_adopted_is_missed(resumed):
    """As a node is lost: with it goes the agent that would tell."""
    executor, _, wanted, ends = resumed
    assert executor.adopt(wanted) == ("sim",)
    (end,) = wait_for(
        lambda: [e for e in executor.observe(1.0) if isinstance(e, protocol.Finished)]
    )
    assert (end.cause, end.reason) == (
        Cause.POD_LOST,
        "pod lost: pod p was deleted: its node n left the cluster",
    )
    executor.close()
    assert ends == [False]


@pytest.mark.parametrize("error", [WorkFailed("gone"), KeyboardInterrupt()])
def test_what_runs_is_not_ended_by_a_resume_that_fails(resumed, monkeypatch, error):
    executor, session, wanted, ends = resumed
    told = []
    monkeypatch.setattr(session.hub, "tell", told.append)

    def discard(keep):
        raise error

    session.discard = discard
    with pytest.raises(type(error)):
        executor.adopt(wanted)
    executor.close()
    assert ends == [True], "left as it is"
    assert not [one for one in told if isinstance(one, messages.End)]


def test_a_node_is_answered_once_it_was_told_what_is_over(resumed, monkeypatch):
    """What it had before may run elsewhere: answered first, it would have that go on."""
    executor, session, _, _ = resumed
    said = []
    monkeypatch.setattr(session.hub, "tell", said.append)
    monkeypatch.setattr(session.hub, "answer", said.append)
    for message in (messages.Pod("sim.0123", 0, "v"), messages.Ping()):
        session.hub._post("n", message)
    executor.observe(1.0)
    assert said == [messages.End("sim.0123", 1), "n"]


def test_what_a_pod_was_not_given_at_birth_is_given_by_the_next_resize(resumed):
    """As its node had no room for it then."""
    executor, session, wanted, _ = resumed
    sent = []

    def patch(where, body, *more, **how):
        if where.endswith("/resize"):
            sent.append(body["spec"]["containers"][0]["resources"]["requests"]["cpu"])
            raise Refused(422, "Invalid", "no room")

    def seen(*cpu):
        executor.observe(1.0)
        return sent == [*cpu]

    session.api.patch, session.api.pods = patch, session.pods
    wait_for(lambda: executor.wait(0.1))
    executor.observe(0.0)  # there were none
    executor.adopt({name: (spec, protocol.Share((300,))) for name, (spec, _) in wanted.items()})
    wait_for(lambda: seen("300m", "500m"), lambda: sent)
    (told,) = executor.news()
    assert told.startswith("sim runs with less than it is to ask for: p: no room")
    executor.resize({"sim": protocol.Share((300,))})
    wait_for(lambda: seen("300m", "500m", "300m", "500m"), lambda: sent, 5)


def test_an_mpi_whose_library_is_not_there_is_told_once(resumed, monkeypatch, tmp_path):
    """Else its programs in pods would seem to tell nothing."""
    executor, session, wanted, _ = resumed
    monkeypatch.setenv("DOVETAIL_LIBDIR", str(tmp_path))
    executor.adopt(wanted)
    for mpi in ("", "openmpi", "openmpi"):
        session.hub._post("n", messages.Started("sim", mpi, 0))
    executor.observe(1.0)
    (told,) = executor.news()
    assert told.startswith("programs of openmpi are not measured: no libdovetail-openmpi.so in ")
    assert [*executor.news()] == []


class Deaf:
    """Takes all that is asked of it, and does nothing."""

    def __getattr__(self, name):
        return Deaf()

    def __call__(self, *words, **more):
        return None


def alone(told):
    """What leads on on a cluster that says nothing; what delays a simulation is `told`."""
    session = SimpleNamespace(api=Deaf(), hub=Deaf(), run="r", launcher=JOBS, tried={"old"})
    return Lifecycle(
        session, Deaf(), Deaf(), Deaf(), Deaf(), "/out", 0, lambda job: None,
        lambda job, why: told.append(why), lambda job: None,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("image", "nodes", "waits"),
    [("i", ("old", "new"), True), ("i", ("old", "old"), False), ("", ("old", "new"), False),
     ("i", ("new", ""), False)],
    ids=["a new node", "nodes that have it", "no image", "no room for the second pod"],
)  # fmt: skip
def test_an_image_is_waited_for_on_a_node_that_joined_after_images_were_tried(image, nodes, waits):
    told, job = [], launched((), {})
    life, job.spec = alone(told), replace(job.spec, image=image)
    for group, node in enumerate(nodes):
        spec = {"nodeName": node, "containers": [{"name": "main"}]}
        job.pods[group] = {"metadata": {"name": "p"}, "spec": spec, "status": {"phase": "Pending"}}
    life.advance(job, job.state.deadline + 1)
    assert isinstance(job.state, Gathering) is waits
    if waits:
        assert told == ["node new is new, and may be getting image i"]
        assert job.state.deadline > images.PATIENCE
        life.advance(job, job.state.deadline + 1)
    assert told[-1].startswith("0 of 2 rank groups were there in time: ")
    assert not isinstance(job.state, Gathering)


def test_a_node_that_has_run_an_image_is_new_to_it_no_more():
    told, job = [], launched((0, 1), {0: "10.0.0.1", 1: "10.0.0.2"})
    life, job.spec = alone(told), replace(job.spec, image="i")
    job.connected.update({0: "old", 1: "new"})
    spec = {"nodeName": "new", "containers": [{"name": "main"}]}
    for pod in job.pods.values():
        pod.update(metadata={"name": "p"}, spec=spec)
    life.advance(job, 0.0)
    assert isinstance(job.state, Running)
    for image, waits in (("i", False), ("other", True)):
        job = launched((), {})
        job.spec = replace(job.spec, image=image)
        pod = {"metadata": {"name": "p"}, "spec": spec, "status": {"phase": "Pending"}}
        job.pods.update({0: pod, 1: pod})
        life.advance(job, job.state.deadline + 1)
        assert isinstance(job.state, Gathering) is waits


def test_a_pod_that_cannot_start_is_tried_again_before_its_simulation_fails():
    """As a registry answers once that it is too busy."""
    told = []
    life = alone(told)
    waits = {"name": "main", "image": "i", "state": {"waiting": {"reason": "ErrImagePull"}}}
    pod = {
        "metadata": {"name": "p"}, "spec": {"nodeName": "n", "containers": [{"name": "main"}]},
        "status": {"phase": "Pending", "containerStatuses": [waits]},
    }  # fmt: skip
    why = "image i is not on node n: ErrImagePull"
    job = launched((), {})
    for start in range(FAILURES + 1):
        job.state, job.pods = Gathering(60.0, 3.0), {0: pod}
        life.advance(job, 0.0)
        assert told == [why] * min(start + 1, FAILURES)
        assert job.result == (Result(Cause.LAUNCH_FAILED, 1, why) if start == FAILURES else None)


@pytest.mark.parametrize("image", ["", "i"])
def test_programs_of_the_machine_find_their_libraries_as_in_the_users_shell(monkeypatch, image):
    monkeypatch.setenv("LD_LIBRARY_PATH", "/ours")
    life = SimpleNamespace(_home="/out", _log_limit=0, mpi={})

    def found(**plan):
        spec = replace(running().spec, image=image, environment=tuple(plan.items()))
        config = Lifecycle._config(life, replace(running(), spec=spec))
        return config["environment"].get("LD_LIBRARY_PATH")

    assert found() == (None if image else "/ours")
    assert found(LD_LIBRARY_PATH="/own") == "/own"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    assert found() is None


def test_an_answer_to_who_has_not_waited_for_it_changes_nothing():
    """The API is silent as it is asked whether all pods are gone, and answers a while later."""
    asked, ended, silent = [], [], []
    calls = SimpleNamespace(submit=lambda work, then: asked.append(then))
    api = SimpleNamespace(silent=lambda: bool(silent))
    hub = SimpleNamespace(nodes=set, tell=Deaf(), copies=Deaf())
    life = Lifecycle(
        SimpleNamespace(api=api, hub=hub, run="r", launcher=JOBS), calls, Deaf(), Deaf(), Deaf(),
        "/out", 0, ended.append, Deaf(), Deaf(),
    )  # fmt: skip
    job = running()
    job.pods.clear()
    life.jobs["sim"] = job
    life.heard(job, Result(Cause.DONE))
    asked.pop()(None)
    life.advance(job, time.monotonic())
    (answer,) = asked
    silent.append(True)
    life.advance(job, time.monotonic())
    assert ended == [job]
    answer([])
    assert ended == [job]


def killed(name):
    """A pod that the kernel has ended for want of memory."""
    end = {"reason": "OOMKilled", "exitCode": 137}
    labels = {manifests.INDEX: "0"}
    return {
        "metadata": {"name": name, "labels": labels},
        "spec": {"nodeName": "one", "containers": [{"name": "main"}]},
        "status": {
            "phase": "Failed",
            "containerStatuses": [{"name": "main", "state": {"terminated": end}}],
        },
    }  # fmt: skip


def copying(there):
    """A simulation whose folders are copied, and what is fetched from nodes that are `there`."""
    asked, told = [], []
    hub = SimpleNamespace(nodes=lambda: there, tell=told.append, copies=Deaf())
    transfers = SimpleNamespace(begin=lambda *of: asked.append(of), forget=Deaf())
    life = Lifecycle(
        SimpleNamespace(api=Deaf(), hub=hub, run="r", launcher=JOBS), Deaf(), Deaf(), Deaf(),
        transfers, "/out", 0, Deaf(), Deaf(), Deaf(),
    )  # fmt: skip
    job = running(begun=True, spread=True)
    job.store, job.started = "/tmp/dovetail-staged-r", True
    job.pods = {group: {**killed(f"p{group}"), "status": {"phase": "Running"}} for group in (0, 1)}
    return life, job, asked, told


def test_what_a_simulation_wrote_is_fetched_after_the_kernel_has_killed_its_pod():
    life, job, asked, told = copying({"one", "two"})
    life.vanished(job, 0, "one")  # its agent is the first to know
    life.pod(job, "MODIFIED", killed("p0"))
    ((key, wanted, then, _),) = asked
    assert (key, wanted) == ("sim", [("one", "sim", "out"), ("two", "sim", "out")])
    assert messages.Stop("sim") in told, "no other pod goes on writing"
    # What comes of the others now is no other cause.
    life.heard(job, Result(Cause.POD_LOST, 1, "pod lost: its node told it to end"))
    life.vanished(job, 1, "two")
    life.pod(job, "DELETED", {**killed("p1"), "metadata": {**killed("p1")["metadata"]}})
    life.advance(job, time.monotonic() + 1000)
    assert isinstance(job.state, Running)
    then("")
    assert (job.result.cause, job.result.code, job.result.trouble) == (Cause.FAILED, 137, "")
    assert job.result.reason.startswith("out of memory: pod p0")


def test_of_what_its_ranks_and_the_kernel_say_of_an_end_the_kernel_is_believed():
    life, job, asked, _ = copying({"one", "two"})
    life.heard(job, Result(Cause.FAILED, 1, "a rank has gone"))
    asked[0][2]("")  # what it wrote is there
    life.pod(job, "MODIFIED", killed("p0"))
    assert len(asked) == 2, "and what came since"
    asked[1][2]("")
    assert job.result.reason.startswith("out of memory: pod p0")


def test_what_other_pods_write_as_it_is_fetched_is_fetched_again_until_they_have_ended():
    life, job, asked, _ = copying({"one", "two"})
    life.pod(job, "MODIFIED", killed("p0"))
    asked[0][2]("node two: log: changed while it was copied")
    assert isinstance(job.state, Running)
    life.advance(job, time.monotonic())
    assert len(asked) == 1, "not at once"
    job.state.collect_at = time.monotonic()
    life.advance(job, time.monotonic())
    assert len(asked) == 2
    asked[1][2]("")
    assert (job.result.cause, job.result.code, job.result.trouble) == (Cause.FAILED, 137, "")


def test_of_a_killed_simulation_that_cannot_be_fetched_the_cause_is_told_all_the_same():
    life, job, asked, _ = copying({"one", "two"})
    life.pod(job, "MODIFIED", killed("p0"))
    job.state.starved = time.monotonic()  # its other pods have ended
    asked[0][2]("node two: no")
    assert job.result.reason.startswith("out of memory: pod p0")
    assert job.result.trouble == "what it wrote cannot be fetched: node two: no"


@pytest.mark.parametrize("later", [False, True])
def test_nobody_waits_for_what_a_killed_simulation_wrote_on_a_node_without_an_agent(later):
    there = {"one", "two"} if later else {"one"}
    life, job, asked, _ = copying(there)
    life.pod(job, "MODIFIED", killed("p0"))
    assert len(asked) == later
    there.discard("two")
    life.advance(job, time.monotonic())
    assert job.result.reason.startswith("out of memory: pod p0")


@pytest.mark.parametrize("state", [Creating, lambda: Gathering(60.0, 3.0)])
@pytest.mark.parametrize(
    "news",
    [
        lambda life, job: life.vanished(job, 0, "one"),
        lambda life, job: life.heard(job, Result(Cause.FAILED, 1, "why")),
    ],
    ids=["its pod has gone", "it ends"],
)
def test_what_fails_before_it_ran_starts_again_also_if_the_api_has_not_said_it_is_there(
    state, news
):
    life, job = alone([]), launched((), {})
    job.state = state()
    news(life, job)
    assert isinstance(job.state, Terminating)
    assert (job.result, job.failures) == (None, 1)
    job.start_over(0.0)
    assert not job.heard, "what was said of an earlier start"


def test_cases_that_are_copied_have_folders_of_their_own():
    """These two have the same CRC 32."""
    one, other = (
        protocol.Spec("sim", "sim", case, 1, (1.0,), ("program",))
        for case in ("/v/9bf7v", "/study/3c7study")
    )
    assert case_folder(one) != case_folder(other)
    assert case_folder(one) == case_folder(one)


class Leased:
    """The right to control simulations."""

    lost, left = "", False

    def __init__(self, *of):
        pass

    def release(self):
        pass


@pytest.mark.parametrize("step", ["Launcher", "install", "Lease", "takes", "Hub"])
def test_of_a_run_that_is_refused_nothing_is_kept_unless_it_is_to_be_resumed(
    tmp_path, monkeypatch, step
):
    api, own = Empty(), tmp_path / identity.FOLDER
    made = SimpleNamespace(
        needs=(), kind="Job", kinds=(), settle=Deaf(), body=Deaf(), seen_in_images=()
    )
    found = {"Launcher": lambda *of: made, "install": Deaf(), "Lease": Leased, "takes": Deaf(),
             "Hub": Deaf()}  # fmt: skip

    def refuses(*of):
        raise BadInput("no")

    for name, one in {**found, step: refuses}.items():
        monkeypatch.setattr(session, name, one)
    spec = pending().spec
    for resume in (False, True):
        if resume:
            identity.begin(own, False, "")
        with pytest.raises(BadInput, match="no"):
            Session(api, tmp_path, [replace(spec, image="")], resume)
        assert own.exists() is resume


def test_a_run_keeps_the_cluster_that_it_was_set_up_on(tmp_path, monkeypatch):
    """Whoever resumes it elsewhere is told of that one, also if a resume on another has failed."""
    own = tmp_path / identity.FOLDER
    found = identity.begin(own, False, "", "/one")
    assert identity.begin(own, True, "", "/two") == found
    assert identity.begin(own, True, "bridge", "/two").kubeconfig == "/one"
    with pytest.raises(BadInput, match="--kubeconfig /one, or"):
        identity.check_over(tmp_path)


def test_a_folder_of_the_users_is_not_taken_for_one_of_a_run_and_removed(tmp_path):
    own = tmp_path / identity.FOLDER
    own.mkdir()
    (own / "service.yaml").touch()
    with pytest.raises(BadInput, match=f"{own}: is of no run, and would be replaced"):
        Session(Empty(), tmp_path, [pending().spec], False)
    assert (own / "service.yaml").exists()


@pytest.mark.parametrize(
    "why",
    [
        "ValidatingAdmissionPolicy 'p' with binding 'p' denied request: no",
        "failed quota: site: must specify limits.memory for: main",
    ],
)
def test_pods_that_no_wait_would_help_are_refused_before_anything_starts(why):
    class Site:
        path = "kubeconfig"

        def create(self, where, thing, **more):
            if where.endswith("reviews"):
                return {"status": {"allowed": True}}
            raise Refused(403, "Forbidden", f'pods "dovetail-x" is forbidden: {why}')

    job = {"spec": {"template": {"metadata": {}, "spec": {}}}}
    with pytest.raises(BadInput, match=f"kubeconfig: takes no pods of simulations: .*: {why}$"):
        takes(Site(), job)


def test_all_pods_of_a_lost_node_are_given_up_however_long_an_answer_takes(monkeypatch):
    """Their node tells nobody that they have ended; an answer comes as it is time to give up."""
    there, clock = {"a", "b"}, [0.0]

    def get(where, labelSelector, limit):
        clock[0] += 20.5
        return {"items": [{"metadata": {"name": n}} for n in sorted(there)[: int(limit) or None]]}

    api = SimpleNamespace(get=get, delete=lambda where, grace: there.discard(where[-1]))
    monkeypatch.setattr(session, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    assert Session._await_gone(SimpleNamespace(api=api), "label") == []
