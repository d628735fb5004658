# SPDX-License-Identifier: LGPL-3.0-or-later
"""Devices are counted: who needs one that is taken waits, says so, and runs after."""

from __future__ import annotations

from dataclasses import replace

import pytest
from dovetail.controller.controller import Controller
from dovetail.core import protocol
from dovetail.core.protocol import Capacity, Node, Spec
from dovetail.executors.simulated.executor import Fault, Simulated, Work
from dovetail.run.simulate import run_simulated

pytestmark = pytest.mark.unit
FOUR_CORES = [Node("n0", 4000, 8 << 30)]
WORK = Work((0.03,), 100)


def with_devices(**there: int):
    """An executor whose nodes have so many of each device."""

    class WithDevices(Simulated):
        def capacity(self) -> Capacity:
            return replace(super().capacity(), devices=tuple(there.items()))

    return WithDevices


def spec(name: str, family: str = "a", **more) -> Spec:
    return Spec(name, family, "case", 1, (1.0,), ("run",), **more)


def run(specs: list[Spec], works: dict[str, Work], **there: int):
    result = run_simulated(specs, works, FOUR_CORES, executor=with_devices(**there))
    assert [view.state for view in result.controller.views()] == ["done"] * len(specs)
    assert sum(view.restarts for view in result.controller.views()) == 0
    return result


def held(result, specs: list[Spec], device: str) -> int:
    """The most of a device that simulations had at one moment."""
    takes = {one.name: one.takes().get(device, 0) for one in specs}
    most = now = 0
    for _, action in result.actions:
        if isinstance(action, protocol.Launch):
            now += takes[action.name]
        elif isinstance(action, protocol.Ended) and action.state == "done":
            now -= takes[action.name]
        most = max(most, now)
    return most


def test_two_that_need_the_one_gpu_run_one_after_the_other_and_others_beside_them():
    specs = [spec(f"a-{i}", devices=(("gpu", 1),)) for i in range(3)]
    specs += [spec(f"b-{i}", "b") for i in range(3)]
    result = run(specs, {"a": WORK, "b": WORK}, gpu=1)
    assert held(result, specs, "gpu") == 1
    assert max(n for _, n in result.running) > 1
    (note,) = [n for n in result.notes("hold") if "a-1 waits for" in n.why]
    assert note.why == "a-1 waits for 1 of gpu, of which 0 of 1 are free"


def test_who_waits_for_a_device_keeps_nobody_from_the_cores():
    specs = [spec(f"a-{i}", devices=(("gpu", 1),)) for i in range(2)]
    specs += [spec(f"b-{i}", "b") for i in range(24)]
    works = {"a": Work((0.03,), 500), "b": Work((0.03,), 30)}
    result = run(specs, works, gpu=1)
    before = launches(result)[: launches(result).index("a-1")]
    assert len(before) == 25


def launches(result) -> list[str]:
    return [one.name for _, one in result.actions if isinstance(one, protocol.Launch)]


def test_where_ranks_are_chosen_it_keeps_nobody_from_them_either():
    either = Spec("x", "a", "case", 2, (1.0,) * 2, ("run",), widths=(1, 2))
    specs = [replace(either, name=f"a-{i}", devices=(("gpu", 1),)) for i in range(5)]
    specs += [replace(either, name=f"b-{i}", family="b") for i in range(8)]
    works = {
        "a": Work((0.03,) * 2, 150, cuts={1: (0.06,)}),
        "b": Work((0.03,) * 2, 100, cuts={1: (0.06,)}),
    }
    order = launches(run(specs, works, gpu=1))
    assert order.index("a-1") == 7  # after six that are as long as a-0 took on three cores


def test_as_many_run_at_once_as_there_are_devices_for():
    specs = [spec(f"a-{i}", devices=(("gpu", 1), ("rdma", 1))) for i in range(4)]
    result = run(specs, {"a": WORK}, gpu=2, rdma=110)
    assert held(result, specs, "gpu") == 2


def test_a_simulation_of_several_pods_takes_what_all_of_them_get():
    two = Spec("a", "a", "case", 4, (1.0,) * 4, ("run",), ranks_per_pod=2, devices=(("gpu", 1),))
    assert two.takes() == {"gpu": 2}
    assert two.takes(1) == {"gpu": 1}
    assert replace(two, ranks_per_pod=0).takes() == {"gpu": 1}


@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_where_ranks_are_chosen_cores_that_cannot_be_used_side_by_side_are_given_to_one(gpus):
    moldable = Spec("s-0", "a", "case", 4, (1.0,) * 4, ("run",), widths=(1, 2, 4), iterations=100)
    specs = [replace(moldable, name=f"s-{i}", devices=(("gpu", 1),)) for i in range(4)]
    capacity = Capacity((Node("n0", 4000, 0),), devices=(("gpu", gpus),))
    chosen = Controller(specs, capacity).outlook()
    assert len(chosen.starts_now) == gpus
    assert max(width for _, width in chosen.starts_now) == 4 // gpus
    work = Work((0.03,) * 4, 100, cuts={1: (0.12,), 2: (0.06,) * 2})
    result = run(specs, {"a": work}, gpu=gpus)
    assert held(result, specs, "gpu") <= gpus


@pytest.mark.parametrize("faults", [[], [Fault(10.0, "fail", "s-1")]], ids=["taken", "free"])
def test_who_is_stopped_to_go_on_on_more_ranks_gets_devices_for_them(faults):
    one = Spec("", "a", "case", 4, (1.0,) * 4, ("run",), widths=(1, 2, 4), iterations=1000,
               devices=(("gpu", 1),), ranks_per_pod=1, checkpoint=True)  # fmt: skip
    specs = [replace(one, name=f"s-{i}") for i in range(2)]
    works = {"a": Work((0.01,) * 4, 1000, cuts={1: (0.04,), 2: (0.02,) * 2})}
    nodes = [Node("n0", 8000, 0)]
    result = run_simulated(specs, works, nodes, faults=faults, executor=with_devices(gpu=2))
    asked = [a.name for _, a in result.actions if isinstance(a, protocol.Checkpoint)]
    assert asked == ["s-0"] * len(faults)
    starts = [a for _, a in result.actions if isinstance(a, protocol.Launch)]
    assert [len(a.share.requests) for a in starts] == [1, 1] + [2] * len(faults)


def test_a_device_that_a_node_had_a_moment_ago_is_waited_for_but_not_for_ever():
    one = spec("a", devices=(("gpu", 1),))
    controller = Controller([one], Capacity((Node("n0", 0, 0),)))
    node = (Node("n0", 2000, 0),)
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.CapacityChanged(1.0, Capacity(node)))  # its kubelet starts again
    for second in range(2, 50):
        assert not launched(controller, second)
    later = Capacity(node, devices=(("gpu", 1),))
    (launch,) = launched(controller, 50, protocol.CapacityChanged(50.0, later))
    assert launch.name == "a"

    controller = Controller([one], Capacity((Node("n0", 0, 0),)))
    controller.handle(protocol.Tick(0.0))
    controller.handle(protocol.CapacityChanged(1.0, Capacity(node)))
    ends = [
        action
        for second in range(2, 70)
        for action in controller.handle(protocol.Tick(float(second)))
        if isinstance(action, protocol.Ended)
    ]
    assert [end.reason for end in ends] == ["needs 1 of gpu, of which 0 of 0 are free"]
    assert controller.finished


def launched(controller, second, event=None):
    actions = controller.handle(event or protocol.Tick(float(second)))
    return [action for action in actions if isinstance(action, protocol.Launch)]
