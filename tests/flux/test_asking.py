# SPDX-License-Identifier: LGPL-3.0-or-later
"""The ways to ask for Kubernetes, right and wrong ones."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from pathlib import Path

import pytest
from dovetail import flux as fluxed
from dovetail.core.errors import BadInput
from dovetail.host import install_paths
from support import guides
from support.flux_batch import COMMANDS, LIMIT, Flux, flux_command
from support.other_users import TOP
from usernetes_setup.build import programs
from usernetes_setup.preflight import usernetes as preflight

pytestmark = pytest.mark.flux


@pytest.fixture
def flux(instances):
    with instances.one() as made:
        yield made


@pytest.fixture
def own():
    """An instance that the test may configure."""
    with contextlib.closing(Flux()) as made:
        yield made


def paths_or_skip():
    """Skip where the jobtap plugins are not built."""
    try:
        install_paths.jobtap("gate")
    except BadInput as error:
        pytest.skip(str(error))


def test_a_shell_that_evaluates_env_finds_the_commands_and_kubectl():
    flux_command()
    script = f"""eval "$({COMMANDS}/dovetail env)" && eval "$(dovetail env)" && echo "$PATH"
        dovetail --version && kubectl version --client && command -v flux-dovetail"""
    place = {"PATH": "/usr/bin:/bin", "DOVETAIL_CACHE": str(programs.built().parents[1])}
    done = subprocess.run(["bash", "-c", script], env=place, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Client Version" in done.stdout
    assert done.stdout.splitlines()[0].startswith("/usr/bin:/bin:"), "another Python goes first"
    assert done.stdout.splitlines()[0].count(str(COMMANDS)) == 1


def test_kubernetes_that_cannot_come_up_is_told_in_time(flux):
    paths_or_skip()
    script = """
        id=$(flux submit -n1 --dependency=dovetail:up true)
        flux dovetail up; echo code $?
        flux job wait-event $id clean
        flux job eventlog $id"""
    job = flux.batch(script, "--conf=dovetail.up-timeout=1")
    output = flux.output(job)
    why = "not up after 1 s: "
    assert f"flux dovetail: {why}" in output
    assert f"{why}\n" not in output, "what was missing is said"
    assert f'type="dovetail" severity=0 note="Kubernetes is not up: {why}' in output
    assert "code 1" in output
    assert flux.code(job) == 0


def test_a_plain_job_waits_until_kubernetes_is_up_or_fails_with_the_reason(flux):
    paths_or_skip()
    script = """
        id=$(flux submit -n1 --dependency=dovetail:up flux dovetail status)
        flux job attach $id
        flux dovetail down
        id=$(flux submit -n1 --dependency=dovetail:up true)
        flux job wait-event $id clean
        flux job eventlog $id
        flux job eventlog $(flux jobs -n -o '{id}' -f completed --name=kube-1)"""
    output = flux.output(flux.batch(script))
    assert "Kubernetes is up" in output
    assert "Kubernetes was taken down" in output
    assert 'epilog-finish description="dovetail-release" status=0' in output


def test_a_nested_instance_that_did_not_ask_has_none(flux):
    script = """
        id=$(flux batch -n1 --output=nested.txt --wrap flux dovetail status)
        flux job wait-event $id clean
        cat nested.txt"""
    output = flux.output(flux.batch(script, dovetail="--dovetail=nodes=1,cores=1"))
    assert "Dovetail is not loaded in this Flux instance" in output


def test_a_submitted_command_becomes_the_first_program_of_an_instance(flux):
    words = ("submit", "-N2", "--dovetail=nodes=1,cores=1", "--output=out.txt", "flux", "dovetail")
    output = flux.output(flux.run(*words, "up"))
    assert "Kubernetes is up: 1 node\n" in output
    flux.nothing_left()


def test_a_user_at_a_terminal_gets_an_instance_with_kubernetes(flux):
    words = flux.words("alloc", "-N2", *flux.scheduler, "--dovetail=nodes=2,cores=1")
    ours, theirs = os.openpty()
    place = {**flux.place(""), "stdin": theirs, "stdout": theirs, "stderr": theirs}
    with (
        subprocess.Popen(words, start_new_session=True, **place) as alloc,
        open(ours, "rb", 0) as us,
    ):
        os.close(theirs)
        os.write(ours, b"flux dovetail up; flux dovetail status; exit 0\n")
        said = b""
        with contextlib.suppress(OSError):  # which is how a terminal ends
            while block := us.read(4096):
                said += block
                flux.note()
        assert alloc.wait(LIMIT) == 0, said
    assert b"Kubernetes is up: 2 nodes\r\n" in said
    assert said.count(b" ready ") == 2
    flux.nothing_left()


def test_an_instance_without_it_starts_it_by_hand(flux):
    script = """
        flux dovetail up --dovetail=nodes=1,cores=1
        flux dovetail kubectl get nodes -o name
        flux dovetail up --dovetail=nodes=1"""
    job = flux.batch(script, dovetail="")
    output = flux.output(job)
    assert "Kubernetes is up: 1 node\n" in output
    assert "loaded here already" in output
    assert flux.code(job) == 2
    flux.nothing_left()


def test_starting_it_by_hand_can_be_repeated(flux):
    script = """
        flux jobtap load alloc-bypass.so
        flux dovetail up --dovetail=nodes=1,cores=1
        flux dovetail down
        flux dovetail up
        DOVETAIL_CACHE=$PWD/nothing flux dovetail up --dovetail=nodes=1,cores=1
        flux dovetail up --dovetail=nodes=99 2>&1; echo code $?
        flux dovetail up --dovetail=nodes=2,cores=1
        flux jobtap list"""
    output = flux.output(flux.batch(script, dovetail=""))
    assert "Kubernetes is up: 1 node\n" in output
    assert "Kubernetes was taken down" in output
    assert "Kubernetes is not built for this user" in output, "in the caller's cache"
    room = "does not fit into this instance; nodes=4 would\ncode 2\n"
    assert f"--dovetail=nodes=99: nodes=99 with cores=all {room}" in output
    assert "Kubernetes is up: 2 nodes" in output
    assert output.count("alloc-bypass.so") == output.count("gate.so") == 1
    flux.nothing_left()


REFUSED = {  # what is wrong, and a word of the answer
    "--dovetail=nodes=0": "number from 1",
    "--dovetail=nodes=9": "-N",
    "--dovetail=2": "nodes=N",
    "--dovetail=nodes=1,x=1": "x=1",
    "--dovetail=nodes=1,cores=99": "cores=99, and no node here has more than ",
    "--dovetail=nodes=1 --conf=dovetail.up-timout=3": "no key up-timout (up-timeout?)",
    "--dovetail=nodes=1 --conf=dovetail.executor=remote": "executor is one of kubernetes, local",
    "--conf=dovetail=3 --dovetail=nodes=1": "--conf: dovetail is a table",
    "--dovetail=nodes=1,provider=usernetes": "provider=usernetes needs usernetes=DIR",
    '--dovetail=nodes=1 --conf=dovetail.provider="usernetes" --conf=dovetail.usernetes="/u"'
    " --conf=dovetail.cores=1 --conf=dovetail.executor=kubernetes": "executor=local would be right",
}


def test_a_bad_request_is_refused_before_submission(flux):
    script = flux.work / "script.sh"
    script.write_text("#!/bin/sh\ntrue\n")
    before = flux.run("jobs", "-ano", "{id}")
    for options, word in REFUSED.items():
        said = flux.run("batch", "-N4", *options.split(), str(script), code=1)
        assert word in said
        assert said.count("\n") == 1
    assert flux.run("jobs", "-ano", "{id}") == before


def test_upstream_usernetes_says_why_it_cannot_run_here(flux):
    """Where it can, a test of tests/machines has it run."""
    archive = Path(os.environ.get("DOVETAIL_SOURCES", TOP.parent / "shared/sources"))
    if not (archive := archive / "usernetes.tar.xz").exists():
        pytest.skip(f"no {archive}: DOVETAIL_SOURCES names the folder that has it")
    if not preflight.problems():
        pytest.skip("upstream Usernetes can run here")
    subprocess.run(["tar", "-C", flux.work, "-xf", archive], check=True)
    request = f"--dovetail=nodes=1,provider=usernetes,usernetes={flux.work}/usernetes"
    output = flux.output(flux.batch("flux dovetail up; flux dovetail status", dovetail=request))
    assert f"--provider usernetes cannot run here: {preflight.problems()[0]}" in output
    assert "Kubernetes is failed" in output
    flux.nothing_left()


def test_a_default_duration_ends_no_slice(flux):
    script = "flux dovetail up; flux jobs -no '{name} {duration} {expiration}'"
    default = '--conf=policy.jobspec.defaults.system.duration="5m"'
    job = flux.batch(script, default, dovetail="--dovetail=nodes=1,cores=1")
    assert "\nkube-0 0.0 0.0" in flux.output(job), "as long as the instance, which has no limit"


@pytest.mark.parametrize(
    ("key", "why"),
    [
        ("up-timout=3", "there is no key up-timout (up"),
        ('provider="usernetes"', "provider=usernetes needs usernetes=DIR"),
    ],
)
def test_an_instance_whose_configuration_is_wrong_goes_on_without_it(flux, key, why):
    path = os.path.join(os.path.dirname(fluxed.__file__), "plugins", "modprobe")
    wrong = [f"--conf=dovetail.{key}" for key in ("nodes=1", key)]
    script = "for word in status up; do flux dovetail $word 2>&1; echo code $?; done; echo on"
    job = flux.batch(script, f"--env=FLUX_MODPROBE_PATH_APPEND={path}", *wrong, dovetail="")
    lines = flux.output(job).splitlines()
    whole = f"not loaded in this Flux instance: configuration: dovetail: {why}"
    assert sum(whole in line for line in lines) == 2, lines
    assert lines.count("code 2") == 2
    assert "on" in lines
    assert flux.code(job) == 0


def test_a_python_that_is_too_old_for_it_ends_no_users_script(flux):
    ours = os.path.join(os.path.dirname(fluxed.__file__), "plugins", "modules", "dovetail.py")
    folder = flux.work / "modules"
    folder.mkdir()
    lines = [
        "import os",
        "del os.pidfd_open",
        f"exec(open({ours!r}).read(), {{'__file__': {ours!r}}})",
    ]
    lines.append("from dovetail.flux.module import Dovetail")
    (folder / "dovetail.py").write_text("\n".join(lines) + "\n")
    job = flux.batch("echo on", f"--env=FLUX_MODULE_PATH_PREPEND={folder}")
    assert "on" in flux.output(job).splitlines()
    assert flux.code(job) == 0


def test_a_site_offers_it_to_all_in_the_way_of_the_manual_and_may_grant_less(own):
    paths_or_skip()
    profile, policy, defaults = guides.blocks("dovetail-flux.7", "For all users of a site")
    for name in ("FLUX_EXEC_PATH_PREPEND", "FLUX_CLI_PLUGINPATH"):
        del own.environment[name]  # which is what every other test has instead
    cache, known = own.environment.pop("DOVETAIL_CACHE"), own.environment
    profile = profile.replace("/opt/dovetail/cache", cache)
    profile = profile.replace("/opt/dovetail/current/bin", str(COMMANDS))
    shell = ["bash", "-c", f"set -e\n{profile}\nenv -0"]
    lines = subprocess.run(shell, env=known, capture_output=True, text=True, check=True).stdout
    own.environment = dict(line.split("=", 1) for line in lines.split("\0") if line)
    own.run("config", "load", given=policy + "max-cores = 1\n")
    plugin = install_paths.jobtap("carve")
    assert f'load = "/opt/dovetail/current/lib/dovetail/jobtap/{plugin.name}"' in policy
    own.run("jobtap", "load", str(plugin))  # as at the start of an instance
    named = own.work / "xdg" / "flux" / "config"
    named.mkdir(parents=True)
    (named / "dovetail.toml").write_text(defaults)
    own.environment["XDG_CONFIG_DIRS"] = str(own.work / "xdg")
    script = """
        flux dovetail up
        flux dovetail status --json >status
        flux config get dovetail.up-timeout"""
    job = own.batch(script, "--conf=dovetail", dovetail="--dovetail=nodes=4,cores=all")
    output = own.output(job)
    assert "Kubernetes is up: 2 nodes" in output
    assert "300" in output.split()
    slices = json.loads((own.work / "status").read_text())["slices"]
    assert all(one["cpus"].isdecimal() for one in slices), "a core each"
    shown = own.run("jobs", "-ano", "{annotations.user.dovetail}", job)
    assert json.loads(shown.replace("'", '"')) == {"nodes": 2, "cores": 1}
    own.nothing_left()
