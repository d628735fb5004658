# SPDX-License-Identifier: LGPL-3.0-or-later
"""What `./bootstrap flux` and `tests/check` refuse before they install, build or test anything."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

BOOTSTRAP = Path(__file__).resolve().parents[1] / "bootstrap"


def refused(folder: Path, *words: str, typed_in: Path | None = None) -> str:
    """What it says of such a command, run in a folder with nothing else, that it must refuse."""
    shutil.copy(BOOTSTRAP, folder)
    done = subprocess.run(
        [folder / "bootstrap", "flux", *words], env={"PATH": "/usr/bin:/bin"},
        capture_output=True, text=True, cwd=typed_in,
    )  # fmt: skip
    assert done.returncode == 2
    assert not (folder / ".flux").exists()
    assert not done.stdout
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("words", [["--sources"], ["--prefix"], ["-x"], ["flux-security"]])
def test_what_it_does_not_know_is_named(tmp_path, words):
    assert words[0] in refused(tmp_path, *words)


def test_a_folder_of_archives_must_hold_one_of_each(tmp_path):
    sources = tmp_path / "sources"
    assert f"no folder {sources}" in refused(tmp_path, "--sources", str(sources))
    sources.mkdir()
    assert "has no flux-core*.tar.*" in refused(tmp_path, "--sources", str(sources))
    for name in ("flux-core-0.86.0.tar.gz", "flux-core.tar.xz"):
        (sources / name).touch()
    both = refused(tmp_path, "--sources", str(sources))
    assert "more than one flux-core*.tar.*: flux-core-0.86.0.tar.gz flux-core.tar.xz" in both


def test_a_folder_of_archives_is_looked_for_where_it_was_typed(tmp_path):
    checkout, sources = tmp_path / "checkout", tmp_path / "archives"
    checkout.mkdir()
    sources.mkdir()
    line = refused(checkout, "--sources", "archives", typed_in=tmp_path)
    assert f"{sources} has no flux-core*.tar.*" in line


def test_a_folder_with_a_space_is_refused_before_anything_is_installed(tmp_path):
    place = tmp_path / "my work"
    place.mkdir()
    shutil.copy(BOOTSTRAP, place)
    done = subprocess.run([place / "bootstrap", "flux", "-x"], capture_output=True, text=True)
    assert done.returncode == 2
    assert [path.name for path in place.iterdir()] == ["bootstrap"]
    (line,) = done.stderr.splitlines()
    assert f"'{place}' has a space" in line


def test_two_in_one_folder_work_one_after_the_other(tmp_path):
    (tmp_path / "build").mkdir()
    shutil.copy(BOOTSTRAP, tmp_path)
    with open(tmp_path / "build/lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = subprocess.Popen([tmp_path / "bootstrap", "flux", "-x"],
                                  stderr=subprocess.PIPE, text=True)  # fmt: skip
        with second:
            assert second.stderr is not None
            assert "another ./bootstrap is at work in this folder" in second.stderr.readline()
            fcntl.flock(held, fcntl.LOCK_UN)
            assert "unknown option '-x'" in second.stderr.read()
    assert second.returncode == 2


def test_a_wrong_command_and_a_question_wait_for_nobody_and_make_nothing(tmp_path):
    """Another one is at work in the folder for minutes; and they are typed from outside of it."""
    (tmp_path / "project/build").mkdir(parents=True)
    shutil.copy(BOOTSTRAP, tmp_path / "project")
    with open(tmp_path / "project/build/lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        told = {}
        for words in (["-h"], ["fluxx"], ["services", "--help"], ["demo", "--pods"]):
            done = subprocess.run(
                ["project/bootstrap", *words], cwd=tmp_path, capture_output=True, text=True,
                timeout=30,
            )  # fmt: skip
            told[words[0]] = (done.returncode, done.stdout, done.stderr)
    code, text, wrong = told["-h"]
    assert (code, wrong) == (0, "")
    for word in ("services", "demo", "flux", "check"):
        assert f"./bootstrap {word} " in text
        assert f" {word}," in told["fluxx"][2]
    assert "services takes no option, and there is '--help'" in told["services"][2]
    assert "demo: unknown option '--pods'" in told["demo"][2]
    assert [told[name][0] for name in ("fluxx", "services", "demo")] == [2, 2, 2]
    assert [told[name][2].count("\n") for name in ("fluxx", "services", "demo")] == [1, 1, 1]
    assert [path.name for path in (tmp_path / "project/build").iterdir()] == ["lock"]


def test_without_internet_it_is_said_where_packages_may_be(tmp_path):
    """After what pip itself has said."""
    shutil.copy(BOOTSTRAP, tmp_path)
    (tmp_path / "flux-python").mkdir()
    (tmp_path / "flux-python/requirements.txt").touch()
    make = 'mkdir -p .venv/bin && cp "$0" .venv/bin/python'
    for name, text in {
        "dpkg-query": "echo installed",
        "python": f'case "$2" in venv) {make} ;; *) echo no route >&2; exit 1 ;; esac',
    }.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHON": str(tmp_path / "python")}
    done = subprocess.run([tmp_path / "bootstrap"], env=environment, capture_output=True, text=True)
    assert done.returncode == 1
    *_, pip, line = done.stderr.splitlines()
    assert pip == "no route"
    assert "PIP_INDEX_URL names a mirror" in line


def test_flux_is_built_into_no_folder_with_a_space(tmp_path):
    """Its libtool would say so at `make install`, after many minutes."""
    line = refused(tmp_path, "--prefix", "my flux", "flux-operator", typed_in=tmp_path)
    assert f"--prefix '{tmp_path}/my flux' has a space" in line


def test_where_go_gets_no_operator_it_is_said_what_to_give(tmp_path):
    """As without a way to the internet: Go tells its error as JSON, which nobody sees."""
    shutil.copy(BOOTSTRAP, tmp_path)
    (tmp_path / "go").write_text('#!/bin/sh\necho \'{ "Error": "no route" }\'\nexit 1\n')
    (tmp_path / "go").chmod(0o755)
    done = subprocess.run(
        [tmp_path / "bootstrap", "flux", "flux-operator"], capture_output=True, text=True,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )  # fmt: skip
    assert done.returncode == 1
    assert re.fullmatch(r"bootstrap: Go cannot fetch flux-operator \w+; .*\n", done.stderr)


def test_a_build_that_takes_long_says_how_far_it_is(tmp_path):
    """Of a part whose compiler waits until that was said."""
    shutil.copy(BOOTSTRAP, tmp_path)
    source, said = tmp_path / "flux-operator", tmp_path / "said"
    (source / "config/crd").mkdir(parents=True)
    (tmp_path / ".flux/bin").mkdir(parents=True)
    (tmp_path / ".flux/bin/flux").touch(0o755)
    subprocess.run(
        ["tar", "-czf", "flux-operator.tar.gz", "flux-operator"], cwd=tmp_path, check=True
    )
    (tmp_path / "go").write_text(
        f"#!/bin/sh\necho half of it >&2; mkdir bin; echo >bin/manager\n"
        f"for n in $(seq 300); do grep -q 'so far' {said} && exit; sleep 0.1; done; exit 1\n"
    )
    (tmp_path / "go").chmod(0o755)
    with said.open("w") as file:
        done = subprocess.run(
            [tmp_path / "bootstrap", "flux", "--sources", tmp_path, "flux-operator"],
            env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, stderr=file,
        )  # fmt: skip
    lines = said.read_text().splitlines()
    assert done.returncode == 0, lines
    assert re.fullmatch(r"bootstrap: flux-operator, [1-9]\d* s so far: half of it", lines[1])
    assert (tmp_path / ".flux/flux-operator/bin/manager").exists()
    assert [line for line in lines if "erminated" in line] == []
    assert ".flux/bin first on PATH, and type ./bootstrap," in lines[-1]


def test_who_tells_how_far_a_build_is_ends_with_it_when_it_is_killed(tmp_path):
    script, _ = BOOTSTRAP.read_text().split("\nmkdir -p build\n")
    script = script.replace('cd "$(dirname "$0")"', "")
    script = re.sub(r"pause=\d+", "pause=0.1", script)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/part.log").touch()
    child = subprocess.Popen(
        ["bash", "-c", f"{script}\ntell_far part & echo $!; kill -9 $$"], cwd=tmp_path,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    teller = int(child.stdout.readline())
    child.wait()
    try:
        child.communicate(timeout=10)  # until nobody has its output, which the teller shares
    except subprocess.TimeoutExpired:
        os.kill(teller, signal.SIGKILL)
        raise


FAKE = """#!/bin/sh
echo "$(basename "$0") $*" >>called
case "$0" in
  */python) env >>environment ;;
  */go) printf '\\t"Dir": "/operator",\\n' ;;
  */tar) echo half >"$2"; exit 1 ;; # as one that is interrupted
  */autoreconf) exit 1 ;;
esac
"""
"""Programs that the steps call; each notes that it was."""


def step(folder: Path, name: str, *words: str, **variables: str) -> str:
    """Take one step of the script in a folder, by programs that do nothing; what it called."""
    for program in ("autoreconf", "go", "python", "tar"):
        (folder / "bin").mkdir(exist_ok=True)
        (folder / "bin" / program).write_text(FAKE)
        (folder / "bin" / program).chmod(0o755)
    for place in ("build", "flux-python", "usernetes-setup"):
        (folder / place).mkdir(exist_ok=True)
    (folder / "flux-python/requirements.txt").touch()
    (folder / "called").unlink(missing_ok=True)
    script, _ = BOOTSTRAP.read_text().split("\nmkdir -p build\n")
    script = script.replace('cd "$(dirname "$0")"', "sources=")
    subprocess.run(
        ["bash", "-c", f"{script}\n{name} {' '.join(words)}"], cwd=folder, capture_output=True,
        env={**variables, "PATH": f"{folder}/bin:/usr/bin:/bin", "PYTHON": f"{folder}/bin/python"},
    )  # fmt: skip
    return (folder / "called").read_text()


def test_a_step_that_was_interrupted_is_taken_again(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("../../bin/python")  # and no pip yet
    assert step(tmp_path, "install_python").startswith("python -m venv --clear .venv\n")
    for name in ("configure", "Makefile.in"):  # and no usernetes-setup/Makefile.in
        (tmp_path / name).touch(0o755)
    assert step(tmp_path, "build") == "autoreconf --install\n"
    for _ in range(2):  # the operator's archive is half an archive
        assert "\ntar -cf " in step(tmp_path, "find_archive", "flux-operator", "0d75cef8")


def test_packages_come_into_the_environment_whatever_is_set_for_other_pythons(tmp_path):
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("../../bin/python")
    others = ("PYTHONHOME", "PYTHONPATH", "PIP_PREFIX", "PIP_ROOT", "PIP_TARGET", "PIP_USER")
    called = step(tmp_path, "install_python", **dict.fromkeys(others, "1"), PIP_INDEX_URL="site")
    assert "\npython -m pip install" in called
    lines = (tmp_path / "environment").read_text().splitlines()
    found = {line for line in lines if line.startswith((*others, "PIP_"))}
    assert found == {"PIP_USER=0", "PIP_INDEX_URL=site"}


CONFIGURE = """#!/bin/sh
echo "configure $*" >>../called
printf 'all install:\\n\\t@echo %s >>../called\\n' "$2" >Makefile
"""


@pytest.mark.parametrize("start", ["#!{}/.venv/bin/python3", "#!/bin/sh\n'''exec' {}/.venv/bin/x"])
def test_a_copy_of_the_folder_installs_into_itself(tmp_path, start):
    """Of one that was built: its environment and its makefiles name the place of the original."""
    original, copy = tmp_path / "original", tmp_path / "copy"
    for place in (".venv/bin", "flux-python", "usernetes-setup"):
        (original / place).mkdir(parents=True)
        (original / place / "Makefile.in").touch()
    (original / "Makefile.in").touch()
    (original / "configure").write_text(CONFIGURE)
    (original / ".venv/bin/pip").write_text(start.format(original))
    (original / ".venv/bin/python").symlink_to("../../bin/python")
    for file in (original / "configure", original / ".venv/bin/pip"):
        file.chmod(0o755)
    both = "install_python; build"
    assert f"configure --quiet --prefix={original}/.venv" in step(original, both)
    again = step(original, both)
    assert "configure --quiet" not in again
    assert "-m venv" not in again
    shutil.copytree(original, copy, symlinks=True)
    called = step(copy, both)
    assert called.startswith("python -m venv --clear .venv\npython -m pip install")
    assert f"configure --quiet --prefix={copy}/.venv" in called
    assert f"{original}/" not in called


def test_where_another_python_has_come_its_environment_and_makefiles_are_made_anew(tmp_path):
    """As after an upgrade of the system, whose new Python looks for packages elsewhere."""
    for place in (".venv/bin", "flux-python", "usernetes-setup"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "Makefile.in").touch()
    (tmp_path / "Makefile.in").touch()
    (tmp_path / "configure").write_text(CONFIGURE)
    (tmp_path / ".venv/bin/pip").write_text(f"#!{tmp_path}/.venv/bin/python3")
    python = tmp_path / ".venv/bin/python"
    python.symlink_to("../../bin/python")
    for file in (tmp_path / "configure", tmp_path / ".venv/bin/pip"):
        file.chmod(0o755)
    step(tmp_path, "install_python; build")
    again = step(tmp_path, "install_python; build")
    assert "-m venv" not in again
    assert "configure" not in again
    python.unlink()
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    assert step(tmp_path, "install_python").startswith("python -m venv --clear .venv\n")
    assert "configure --quiet" in step(tmp_path, "build")


@pytest.mark.parametrize(
    "words", [["--repeat"], ["--repeat", "0", "unit"], ["--repeat", "2", "lint"], ["slow"]]
)
def test_what_the_check_cannot_do_is_named_before_anything_is_made(tmp_path, words):
    (tmp_path / "tests").mkdir()
    shutil.copy(BOOTSTRAP.parent / "tests" / "check", tmp_path / "tests")
    shutil.copy(BOOTSTRAP, tmp_path)
    for command in (["tests/check"], ["./bootstrap", "check"]):
        done = subprocess.run(
            [*command, *words], cwd=tmp_path, env={"PATH": "/usr/bin:/bin"},
            capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 2
        (line,) = done.stderr.splitlines()
        assert words[0] in line
    assert not (tmp_path / "build").exists()


def test_flux_without_the_plugins_for_it_is_no_tier_that_is_skipped(tmp_path):
    (tmp_path / "tests").mkdir()
    check = shutil.copy(BOOTSTRAP.parent / "tests" / "check", tmp_path / "tests")
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    words = [check, "flux"]
    done = subprocess.run(
        words, env={"PATH": path, "FLUX": "/bin/true"}, capture_output=True, text=True
    )
    assert "flux       failed: the jobtap plugins were not built for /bin/true" in done.stdout
    assert done.returncode == 1
    done = subprocess.run(
        words, env={"PATH": path, "FLUX": "/none"}, capture_output=True, text=True
    )
    assert "flux       skipped: not installed" in done.stdout
    assert done.returncode == 0


def test_the_flux_of_the_check_is_the_one_that_was_built_for(tmp_path):
    """As bootstrap takes it: what it has built, whatever else is on PATH."""
    for place in ("tests", ".flux/bin", "site"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "flux").touch(0o755)
    check = shutil.copy(BOOTSTRAP.parent / "tests" / "check", tmp_path / "tests")
    path = f"{tmp_path}/site:{Path(sys.executable).parent}:/usr/bin:/bin"
    done = subprocess.run([check, "flux"], env={"PATH": path}, capture_output=True, text=True)
    assert f"plugins were not built for {tmp_path}/.flux/bin/flux" in done.stdout


PYTEST = """#!/bin/sh
[ "$2" = pytest ] || exec {python} "$@"
case " $* " in
  *" -n 0 "*) ran="one two" failed="{again}" ;;
  *) ran="one two three" failed="one two" ;;
esac
while [ "$1" != --junitxml ]; do shift; done
for name in $ran; do
  case " $failed " in *" $name "*) why="<failure message='no'/>" ;; *) why= ;; esac
  echo "<testcase classname='tests.test_it' name='$name' time='1'>$why</testcase>"
done | sed '1i<testsuite>
$a</testsuite>' >"$2"
[ -z "$failed" ]
"""
"""A Python whose tests `one` and `two` fail, `three` passes, and of the two some fail again."""


@pytest.mark.parametrize(
    ("again", "line"),
    [
        ("", "passed: 3 tests, 2 of them only alone, when run again: one two"),
        ("two", "failed: 1 of 3 tests: two; passed only alone, when run again: one"),
        ("one two", "failed: 2 of 3 tests: one two"),
    ],
)
def test_what_passes_alone_is_named_also_where_another_fails_again(tmp_path, again, line):
    (tmp_path / "tests").mkdir()
    check = shutil.copy(BOOTSTRAP.parent / "tests" / "check", tmp_path / "tests")
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text(PYTEST.format(python=sys.executable, again=again))
    python.chmod(0o755)
    done = subprocess.run([check, "unit"], capture_output=True, text=True)
    assert f"unit       {line}" in done.stdout.splitlines()
    assert done.returncode == bool(again)


def test_a_check_that_has_no_folder_for_its_records_ends_at_once(tmp_path):
    """Else it would write them into the root of the file system."""
    (tmp_path / "tests").mkdir()
    check = shutil.copy(BOOTSTRAP.parent / "tests" / "check", tmp_path / "tests")
    there = {**os.environ, "TMPDIR": str(tmp_path / "none")}
    done = subprocess.run([check, "flux"], env={**there, "FLUX": "/none"}, capture_output=True)
    assert done.returncode == 1
    assert done.stdout == b""
    assert str(tmp_path / "none") in done.stderr.decode()


def test_scripts_go_where_they_are_whatever_cdpath_says(tmp_path):
    for place in ("project", "other/project"):
        (tmp_path / place).mkdir(parents=True)
    shutil.copy(BOOTSTRAP, tmp_path / "project")
    there = {**os.environ, "CDPATH": str(tmp_path / "other")}
    words = ["project/bootstrap", "flux", "-x"]
    subprocess.run(words, cwd=tmp_path, env=there, stderr=subprocess.DEVNULL)
    assert (tmp_path / "project/build").exists()
    assert not (tmp_path / "other/project/build").exists()
