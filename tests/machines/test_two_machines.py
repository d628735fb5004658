# SPDX-License-Identifier: LGPL-3.0-or-later
"""Kubernetes, MPI and Flux of an ordinary user across two machines, each with one core for pods."""

from __future__ import annotations

import json
import re

import pytest
from support.machines import flux_of

pytestmark = pytest.mark.machines

PLAN = """
simulations:
  - name: across
    case: /shared/case
    ranks: 2
    command: /shared/busy burn 100 50 100
"""
# Both adapters are the kernel's own, RDMA over Ethernet. One simulation gets them, one does not.
VERBS = """
simulations:
  - name: verbs
    case: /shared/case
    ranks: 2
    ranks_per_pod: 1
    devices: {rdma: 1}
    command: sh /shared/verbs.sh
  - name: without
    case: /shared/case
    ranks: 2
    ranks_per_pod: 1
    command: sh -c "! ls /dev/infiniband 2>/dev/null"
"""
PING_PONG = """
ping() { ibv_rc_pingpong -d rxe0 -g 1 -n 20 "$@"; }
if [ "$OMPI_COMM_WORLD_RANK" = 0 ]; then hostname >at; ping; exit; fi
until [ -s at ] && ping "$(cat at)"; do sleep 2; done
"""
SOFT_ADAPTER = (
    "modprobe rdma_rxe && netdev=$(ip -br addr | awk '/10.77.0/ { print $1 }') && "
    "{ rdma link show rxe0/1 2>/dev/null || rdma link add rxe0 type rxe netdev $netdev; }"
)
BATCH = """#!/bin/bash
#flux: -N2 --dovetail=nodes=2,cores=1 --conf=dovetail.up-timeout=900
flux dovetail submit --wait-up -o /shared/results /shared/plan.yaml
flux dovetail status --json >/shared/status.json
flux run -N2 -n2 hostname
flux dovetail wait --all
"""
CONFIG = "--kubeconfig /tmp/dovetail-kube-1000/default/kubeconfig"


LEFT = (  # folders, control groups, processes, ports and shared memory
    "ls -d /tmp/dovetail-* /dev/shm/dovetail-* 2>/dev/null; "
    "find /sys/fs/cgroup/user.slice -name '*dovetail*'; "
    "ps -u alice -o comm= | grep -E 'kube|etcd|containerd|runc|dovetail|python|mpirun|orted|busy'; "
    "ss -Htln | grep 10.77.0 | grep -v :8050"
)


@pytest.fixture
def two(machines):
    """Both, where alice may have nodes, with a plan for both together."""
    first, second = machines
    for machine in machines:
        if machine.run("dovetail doctor", code=None).returncode:
            told = json.loads(machine.run("dovetail doctor --json", code=1).stdout)
            (error,) = [one for one in told["checks"] if one["level"] == "error"]
            machine.run(error["fix"], user="root")
    first.build("busy", "pmpi/known/busy.c")
    first.run("rm -rf /shared/case /shared/results /shared/verbs && mkdir /shared/case")
    first.write("/shared/plan.yaml", PLAN)
    yield first, second
    for machine in machines:  # of a test that failed
        machine.run("dovetail kube down --all", code=None)


def nothing_left(two):
    """Seconds after it was ended, nothing of a cluster is on either machine."""
    for machine in two:
        machine.until(LEFT, lambda text: text == "", 60)


def test_a_simulations_ranks_are_on_two_machines_and_are_resized_there(two):
    """Its pods meet by the machines' addresses; nothing of the cluster is left on either.

    Those that ask for a verbs device have it, and send through it; others have none.
    """
    first, second = two
    for machine in two:
        machine.run(SOFT_ADAPTER, user="root")
    wide = "--cpus 1 --timeout 900 --json"
    first.run(f"dovetail kube up --address {first.address} {wide}")
    first.run("dovetail kube join --invite /shared/join.json --node m2")
    second.run(f"dovetail kube join /shared/join.json --address {second.address} {wide}")
    both_ready(two)
    run = "dovetail run /shared/plan.yaml -o /shared/results --json"
    first.run(f"{run} {CONFIG} >/tmp/summary.json 2>/tmp/log </dev/null &")
    first.until("cat /tmp/summary.json", lambda text: text.endswith("}"))
    (one,) = json.loads(first.out("cat /tmp/summary.json"))["simulations"]
    assert one["state"] == "done", first.out("tail -n 20 /tmp/log")
    log = [json.loads(line) for line in first.out("cat /shared/results/events.jsonl").splitlines()]
    placed = [event["nodes"] for event in log if event.get("type") == "Placed"]
    assert {*placed[-1]} == {"m1", "m2"}
    assert any(not event["refused"] for event in log if event.get("type") == "Resized")
    verbs_reach_those_that_ask(first, second)
    for machine in two:
        machine.run("dovetail kube down --all")
    nothing_left(two)


def both_ready(two):
    """Wait for it: a slow one is not, now and then, and then has no place for a rank."""
    for machine in two:
        machine.until("dovetail kube status --json", lambda text: json.loads(text)[0]["ready"])


def verbs_reach_those_that_ask(*two):
    both_ready(two)
    first = two[0]
    first.write("/shared/verbs.yaml", VERBS)
    first.write("/shared/verbs.sh", PING_PONG)
    run = "dovetail run /shared/verbs.yaml -o /shared/verbs --json"
    first.run(f"{run} {CONFIG} >/tmp/verbs.json 2>/tmp/log </dev/null &")
    first.until("cat /tmp/verbs.json", lambda text: text.endswith("}"))
    found = json.loads(first.out("cat /tmp/verbs.json"))["simulations"]
    logs = first.out("cat /shared/verbs/*/log; tail -n 20 /tmp/log")
    assert [one["state"] for one in found] == ["done", "done"], logs
    assert logs.count("20 iters in") == 2, logs
    assert {"GID ::ffff:10.77.0.1", "GID ::ffff:10.77.0.2"} <= set(re.findall(r"GID \S+", logs))


def test_a_batch_job_has_kubernetes_on_both_and_leaves_nothing(two):
    """Flux's brokers know the machines by name; a job on bare metal runs beside."""
    first = two[0]
    if first.run("command -v flux", code=None).returncode:
        pytest.skip("no Flux in .flux: run ./bootstrap flux")
    first.write("/shared/batch.sh", BATCH)
    with flux_of(two) as flux:
        job = first.out(f"{flux} flux batch --output=/shared/out.txt /shared/batch.sh")
        code = first.run(f"{flux} flux job status {job}", code=None, limit=1500).returncode
        printed = first.out("cat /shared/out.txt")
        assert code == 0, printed
        status = json.loads(first.out("cat /shared/status.json"))
        assert {one["host"] for one in status["slices"]} == {"m1", "m2"}, status
        assert {"m1", "m2"} <= {*printed.split()}, printed
        (one,) = json.loads(first.out("cat /shared/results/summary.json"))["simulations"]
        assert one["state"] == "done", printed
        nothing_left(two)
