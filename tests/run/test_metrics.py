# SPDX-License-Identifier: LGPL-3.0-or-later
"""A run's metrics: what Prometheus gets, who may have them, and what is left of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import signal
import socket
import stat
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from dovetail.controller.controller import Controller
from dovetail.core import protocol
from dovetail.core.protocol import Capacity, Cause, Node, Note, Share
from dovetail.run.metrics import METRICS, Metrics
from dovetail.run.metrics_server import Server
from prometheus_client.parser import text_string_to_metric_families
from support import made_up_runs
from support.local_runs import wait_for
from support.run_command import site  # noqa: F401

pytestmark = pytest.mark.unit

TOP = Path(__file__).resolve().parents[2]
STEPS = """
n=0; until [ -e {stop} ]; do n=$((n+1)); echo "Time = $n"; sleep 0.05; done"""


@pytest.fixture
def start(site):  # noqa: F811
    """Starts a run of three simulations, which iterate until a file is there, on two cores."""
    stop = site.directory / "stop"

    def begin(where, *words):
        entry = site.shell(STEPS.format(stop=stop), count=3, iterations=10**6)
        plan = site.plan(entry, cpus=2)
        run = site.start(plan, "-o", "out", "--metrics", where, *words)
        iterates = lambda log: any(max(e.get("ranks", {}).get("iterations", [0])) > 3 for e in log)  # noqa: E731
        site.until(iterates)
        return run

    yield begin
    stop.touch()
    for run in site.started:
        if run.poll() is None:
            site.end(run)


def ask(where, path="/metrics", **headers):
    """Status and body of a request to a socket's path, or to a port of this machine."""
    link = http.client.HTTPConnection("127.0.0.1", where if isinstance(where, int) else 80)
    if isinstance(where, Path):
        link.sock = socket.socket(socket.AF_UNIX)
        link.sock.connect(str(where))
    link.request("GET", path, headers=headers)
    answer = link.getresponse()
    return answer.status, answer.read().decode()


def parsed(text):
    """Value by name and labels, as Prometheus' own parser reads it; names and kinds are ours."""
    known = {metric.name: metric for metric in METRICS}
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            assert known[sample.name].kind == family.type
            assert set(known[sample.name].labels) == set(sample.labels)
            labels = [sample.labels[name] for name in known[sample.name].labels]
            found[(sample.name, *labels)] = sample.value
    return found


def until(path, condition):
    """What there is, once the condition holds."""

    def told():
        try:
            found = parsed(ask(path)[1])
        except OSError as error:  # nobody listens yet
            return {"error": error}
        return found if condition(found) else None

    return wait_for(lambda: (found := told()) and "error" not in found and found, told)


def test_a_run_on_a_socket_of_its_user_alone(site, start):  # noqa: F811
    path = site.directory / "metrics.sock"
    run = start("unix:metrics.sock")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not (site.out / "metrics-token").exists()
    name = "dovetail_simulation_iterations_total"
    found = until(
        path, lambda told: sum(told.get((name, f"sim-{n}", "sim"), 0) > 3 for n in (1, 2)) == 2
    )
    assert found[("dovetail_simulations", "running")] == 2
    assert found[("dovetail_simulations", "queued")] == 1
    assert found[("dovetail_launches_total",)] == 2
    assert found[("dovetail_simulation_requested_cores", "sim-1", "sim")] == 1.0
    assert ("dovetail_simulation_ranks", "sim-3", "sim") not in found, "it waits"
    assert sum(v for k, v in found.items() if k[0] == "dovetail_decisions_total") > 0
    assert found[("dovetail_run_time_seconds",)] > 0
    assert [v for k, v in found.items() if k[0] == "dovetail_node_cores"] == [2.0]
    assert ask(path, "/")[0] == 404
    (site.directory / "stop").touch()
    code, _, said = site.end(run)
    assert code == 0
    assert "metrics: unix:metrics.sock" in said
    assert not path.exists()


def test_on_an_address_for_who_has_the_token(site, start):  # noqa: F811
    run = start("127.0.0.1:0")
    port = int(re.search(r"http://127.0.0.1:(\d+)/metrics", site.errors())[1])
    file = site.out / "metrics-token"
    assert f"the token in {file.relative_to(site.directory)}" in site.errors()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text().strip()
    for given in ({}, {"Authorization": "Bearer x"}, {"Authorization": token}):
        assert ask(port, **given)[0] == 401
        assert ask(port, "/", **given)[0] == 401
    status, text = ask(port, Authorization=f"Bearer {token}")
    assert status == 200
    assert ("dovetail_launches_total",) in parsed(text)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        silent.send(b"GET")
        assert ask(port, Authorization=f"Bearer {token}")[0] == 200, "one that dawdles ends"
    (site.directory / "stop").touch()
    assert site.end(run)[0] == 0
    assert not file.exists()
    with pytest.raises(ConnectionRefusedError):
        ask(port)


def test_what_a_killed_run_has_left_is_replaced(site, start):  # noqa: F811
    run = start("unix:metrics.sock")
    run.send_signal(signal.SIGKILL)
    run.wait()
    path = site.directory / "metrics.sock"
    assert path.exists()
    start("unix:metrics.sock", "--resume")
    found = until(path, lambda told: told.get(("dovetail_launches_total",)) == 2)
    assert found[("dovetail_requeues_total", "interrupted")] == 2


@pytest.mark.parametrize(
    ("where", "why"),
    [
        ("", "unix:PATH or ADDRESS:PORT would be right"),
        ("unix:", "unix:PATH or ADDRESS:PORT would be right"),
        ("9464", "unix:PATH or ADDRESS:PORT would be right"),
        (":9464", "unix:PATH or ADDRESS:PORT would be right"),
        ("127.0.0.1:" + 5000 * "1", "unix:PATH or ADDRESS:PORT would be right"),
        ("127.0.0.1:65536", "unix:PATH or ADDRESS:PORT would be right"),
        ("192.0.2.1:0", "cannot listen there: "),
        ("unix:none/socket", "cannot listen there: No such file or directory"),
        ("unix:plan.yaml", "cannot listen there: Address already in use"),
        ("unix:" + 200 * "x", "cannot listen there: AF_UNIX path too long"),
    ],
)
def test_where_it_cannot_be_nothing_is_started(site, where, why):  # noqa: F811
    code, _, said = site.run(site.plan({}), "-o", "out", "--metrics", where)
    assert code == 2
    (line,) = said.splitlines()
    assert line.startswith(f"dovetail: --metrics {where}: {why}")
    assert not site.out.exists()


def test_where_the_token_cannot_be_there_is_no_run(site):  # noqa: F811
    (site.out / "metrics-token").mkdir(parents=True)
    code, _, said = site.run(site.plan({}), "-o", "out", "--metrics", "127.0.0.1:0")
    assert (code, said) == (2, "dovetail: out/metrics-token: cannot be written: Is a directory\n")
    assert [path.name for path in site.out.iterdir()] == ["metrics-token"]


def test_a_client_that_sends_byte_by_byte_keeps_nobody_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr("dovetail.run.metrics_server.PATIENCE", 0.5)
    path = f"{tmp_path}/socket"
    with Server(f"unix:{path}") as server, socket.socket(socket.AF_UNIX) as slow:
        server.start(lambda: b"done 1\n")
        slow.connect(path)

        def drip() -> None:
            with contextlib.suppress(OSError):
                for _ in range(100):
                    slow.sendall(b"G")
                    time.sleep(0.1)

        threading.Thread(target=drip, daemon=True).start()
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(8.0)
            client.connect(path)
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.0 200")


def test_where_somebody_listens_already(tmp_path):
    with Server(f"unix:{tmp_path}/socket"):
        with pytest.raises(Exception, match="Address already in use"):
            Server(f"unix:{tmp_path}/socket")
        assert (tmp_path / "socket").is_socket()


BROKEN = """
import sys
from dovetail.cli.main import main
from dovetail.run.metrics import Metrics
Metrics._take = lambda *_: {}["before"]
sys.exit(main(["run", *sys.argv[1:]]))
"""


def test_a_run_goes_on_though_its_metrics_fail(site):  # noqa: F811
    words = (site.plan({}), "-o", "out", "--metrics", "unix:metrics.sock")
    code, _, said = site.run(*words, command=(sys.executable, "-c", BROKEN))
    assert (code, site.states()) == (0, {"sim": "done"})
    assert said.count("metrics are not all right from now on: KeyError('before')") == 1


def test_resizes_are_those_of_the_summary(tmp_path):
    first = Share((1000,))
    run = made_up_runs.Run([made_up_runs.spec("a", "f", (1.0,))], {"f": 0.1})
    run.add(protocol.Launch("a", first), protocol.Started(0.0, "a"))
    for share, refused in (
        (replace(first, bound=True), "a: it has cores of its own choice"),
        (replace(first, bound=True), ""),
        (Share((500,)), ""),
        (Share((500,), suspended=True), ""),
        (Share((500,)), ""),
        (Share((600,)), "no room"),
    ):
        run.add(protocol.Resize({"a": share}, "because"), protocol.Resized(1.0, ("a",), refused))
    metrics = Metrics(tmp_path, Capacity((Node("n1", 2000, 0),)))
    for entry in run.log:
        metrics.take(entry)
    found = parsed(metrics.render().decode())
    history = run.history()
    assert (history.resizes, history.refused) == (1, 1)
    assert found["dovetail_resizes_total", "applied"] == history.resizes
    assert found["dovetail_resizes_total", "refused"] == history.refused


def test_what_is_measured_by_work_has_no_iterations(tmp_path):
    """A rate of 0 would look as if it hung."""
    specs = [made_up_runs.spec(name, name, (1.0,)) for name in ("counts", "works")]
    metrics = Metrics(tmp_path, made_up_runs.CAPACITY)
    controller = Controller(specs, made_up_runs.CAPACITY)
    some = ((2.0,), (2.0,), (2.0,), (0.0,), (0,))
    events = [protocol.Tick(0.0)]
    for name, measure, done in (("counts", "iterations", (7,)), ("works", "work", (0,))):
        ranks = protocol.Ranks(done, *some, measure)
        events += [protocol.Started(1.0, name), protocol.Sampled(2.0, name, ranks)]
    for event in events:
        for entry in (event, *controller.handle(event)):
            metrics.take(entry)
    metrics.look(controller, 2.0)
    found = parsed(metrics.render().decode())
    name = "dovetail_simulation_iterations_total"
    assert [key[1:] for key in found if key[0] == name] == [("counts", "counts")]
    assert found[name, "counts", "counts"] == 7
    assert found["dovetail_simulation_useful_seconds_total", "works", "works"] == 2


def test_nodes_shares_resizes_and_trials(tmp_path):
    both = (Node("n1", 2000, 1 << 30), Node("n2", 4000, 0))
    metrics = Metrics(tmp_path, Capacity(both), "job")
    metrics.take(protocol.CapacityChanged(1.0, Capacity(both[:1])))
    metrics.take(protocol.Resized(1.0, ("a",), "no room"))
    metrics.take(protocol.Finished(1.0, "a", Cause.NODE_LOST))
    metrics.take(protocol.Delayed(1.0, "a", "no room"))
    metrics.take(Note("keep", "it pays", {"throughput": 1.4, "before": 1.0}))
    metrics.take(Note("rollback", "it pays no more", {"throughput": 0.8, "error": 0.1}))
    group = {"simulation": "a", "node": "n1", "ranks": [0, 3], "wanted": 0.75, "real": 0.7}
    starting = {**group, "simulation": 'b"\n', "real": None}
    (tmp_path / "status.json").write_text(json.dumps({"groups": [group, starting]}))
    found = parsed(metrics.render().decode())
    expected = {
        ("dovetail_node_up", "n1"): 1,
        ("dovetail_node_up", "n2"): 0,
        ("dovetail_node_cores", "n1"): 2,
        ("dovetail_node_memory_bytes", "n1"): 1 << 30,
        ("dovetail_resizes_total", "refused"): 1,
        ("dovetail_resizes_total", "applied"): 0,
        ("dovetail_ends_total", "node lost"): 1,
        ("dovetail_ends_total", "done"): 0,
        ("dovetail_delays_total",): 1,
        ("dovetail_decisions_total", "keep"): 1,
        ("dovetail_decisions_total", "rollback"): 1,
        ("dovetail_trial_throughput_ratio",): 1.4,
        ("dovetail_trial_before_ratio",): 1.0,
        ("dovetail_share_wanted_ratio", "a", "n1", "0-3"): 0.75,
        ("dovetail_share_wanted_ratio", 'b"\n', "n1", "0-3"): 0.75,
        ("dovetail_share_real_ratio", "a", "n1", "0-3"): 0.7,
    }
    assert expected.items() <= found.items()
    assert ("dovetail_node_cores", "n2") not in found
    assert ("dovetail_share_real_ratio", 'b"\n', "n1", "0-3") not in found
    assert "dovetail_throughput_ratio" not in {name for name, *_ in found}, "it is not known"


def test_the_manual_has_every_metric():
    page = (TOP / "doc" / "dovetail-metrics.5").read_text()
    rows = re.findall(r"^\.It Va (\w+) Pq (\w+)(?:, by (.*))?\n(.*)\.$", page, re.MULTILINE)
    told = [
        (name, kind, tuple(filter(None, by.split(", "))), what) for name, kind, by, what in rows
    ]
    assert told == [(one.name, one.kind, one.labels, one.help) for one in METRICS]


def test_names_are_as_prometheus_wants_them():
    for one in METRICS:
        assert one.name.startswith("dovetail_")
        assert one.name.endswith("_total") == (one.kind == "counter"), one.name
    assert len({one.name for one in METRICS}) == len(METRICS)


def test_the_dashboard_asks_for_metrics_that_there_are():
    board = json.loads((TOP / "examples" / "grafana-dashboard.json").read_text())
    known = {one.name: {*one.labels, "instance"} for one in METRICS}
    taken = set()
    asked = [v["query"]["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not taken & cells, panel["title"]
        taken |= cells
        for target in panel["targets"]:
            asked.append(target["expr"])
            (name, *_) = re.findall(r"dovetail_\w+", target["expr"])
            assert set(re.findall(r"{{(\w+)}}", target["legendFormat"])) <= known[name]
    assert max(x for x, _ in taken) < 24
    for name, labels in re.findall(r"(dovetail_\w+)(?:{(.*?)})?", " ".join(asked)):
        assert set(re.findall(r"(\w+)=", labels)) <= known[name]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
