# SPDX-License-Identifier: LGPL-3.0-or-later
"""A batch job of an ordinary user over two hosts that have a network in common and no folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from dovetail.bench.papers import converged, published
from support import hosts, known_programs
from support.flux_batch import COMMANDS, LIMIT, flux_command
from usernetes_setup.node import carrier

pytestmark = [pytest.mark.flux, pytest.mark.first]

HOME = "/home/alice"
BROKER = """
[bootstrap]
curve_cert = "curve.cert"
hosts = [
  { host = "h1", bind = "tcp://10.78.0.1:8050", connect = "tcp://10.78.0.1:8050" },
  { host = "h2" },
]
"""
BATCH = """#!/bin/bash
#flux: -N2 --dovetail=nodes=2,cores=1
flux dovetail submit --wait-up -o results plan.yaml
flux dovetail status --json >status.json
flux run -N2 -n2 hostname
flux dovetail wait --all && flux dovetail report
"""
ROUND = f"""import json, sys
from pathlib import Path
sys.argv[0] = "{COMMANDS}/dovetail"
from dovetail.bench import hosts
from dovetail.bench.papers import converged
from dovetail.bench.papers.findings import Setting
from dovetail.bench.papers.place import Place
from dovetail.bench.papers.scales import SCALES
say = lambda line: print(line, file=sys.stderr)
setting = Setting(Place(Path.home() / "round"), SCALES["small"], 0.0, say, Path.home())
words = ["{HOME}/bin/pairs", "sweep"]
print(json.dumps(converged._between(setting, *hosts.instance(), [words], 0)))
"""
ENVIRONMENT = 'eval "$(dovetail env)"; export FLUX_URI=local:///tmp/flux/local;'


@pytest.fixture
def pair(binaries):
    """Two hosts with a broker on each."""
    flux, cache = Path(flux_command()).resolve(), binaries.parents[1]
    read = [cache, flux.parents[1]]
    with hosts.started(2, read=read) as made:
        first, second = made
        for host in made:
            host.environment["DOVETAIL_CACHE"] = str(cache)
            host.environment["PATH"] = f"{COMMANDS}:{flux.parent}:{host.environment['PATH']}"
            del host.environment["PYTHONPATH"]  # what is installed
            host.out("mkdir -p bin /tmp/flux")
            host.write("broker.toml", BROKER)
        first.out("flux keygen curve.cert")
        second.write("curve.cert", first.out("cat curve.cert") + "\n")
        second.out("chmod 600 curve.cert")
        broker = "flux broker --config-path=broker.toml -Srundir=/tmp/flux"
        leads = "-Slocal-uri=local:///tmp/flux/local sleep inf"
        brokers = [
            host.start(f'eval "$(dovetail env)"; exec {broker} {more} >log 2>&1')
            for host, more in ((second, ""), (first, leads))
        ]
        free = f"{ENVIRONMENT} flux resource list -s free -no '{{nnodes}}'"
        first.until(free, lambda text: text == "2")
        yield made
        first.run(f"{ENVIRONMENT} flux cancel --all; flux shutdown", code=None)
        for broker in brokers:
            broker.wait(150)
        for host in made:
            host.out("rm -rf /tmp/flux")
        hosts.nothing_left(made)


def test_a_batch_job_has_kubernetes_on_both_hosts_and_a_plans_results_on_the_first(pair):
    first, second = pair
    program = known_programs.build("openmpi", "known/busy.c")
    for host in pair:
        shutil.copy(program, f"{host.root}{HOME}/bin/busy")
    entry = {"name": "across", "case": f"{HOME}/case", "ranks": 2,
             "command": ["sh", "-c", 'hostname >rank.$OMPI_COMM_WORLD_RANK; exec "$@"', "say",
                         f"{HOME}/bin/busy", "burn", "40", "30", "60"]}  # fmt: skip
    first.write("case/input", "as delivered")
    first.write("plan.yaml", json.dumps({"simulations": [entry]}))
    first.write("batch.sh", BATCH)
    job = first.out(f"{ENVIRONMENT} flux batch --output=out.txt batch.sh")
    done = first.run(f"{ENVIRONMENT} flux job status {job}", code=None)
    printed = first.out("cat out.txt")
    assert done.returncode == 0, printed
    status = json.loads(first.out("cat status.json"))
    assert {one["host"] for one in status["slices"]} == {"h1", "h2"}, status
    assert {"h1", "h2"} <= {*printed.split()}, printed
    (one,) = json.loads(first.out("cat results/summary.json"))["simulations"]
    assert one["state"] == "done", printed
    assert sorted(first.out("cat results/across/case/rank.*").split()) == ["h1", "h2"]


def test_a_papers_set_ups_are_between_the_hosts(pair):
    program = known_programs.build("openmpi", "bench_pairs.c", "-DBATCHES=1")
    for host in pair:
        shutil.copy(program, f"{host.root}{HOME}/bin/pairs")
    pair[0].write("round.py", ROUND)
    said = pair[0].out(f"{ENVIRONMENT} python round.py", limit=LIMIT)
    found = json.loads(said.splitlines()[-1])
    setups = [one for one in converged.SETUPS if one != converged.BRIDGE or carrier.possible()]
    assert all(found[f"{test}, {setup}"] > 0 for test in published.OSU for setup in setups)
    assert min(found[f"{what}, {converged.PODS}"] for what in ("start-up", "start of pods")) > 0
