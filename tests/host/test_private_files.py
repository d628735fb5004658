# SPDX-License-Identifier: LGPL-3.0-or-later
"""Files that are replaced as a whole."""

from __future__ import annotations

import os

import pytest
from dovetail.core.errors import BadInput
from dovetail.host.private_files import check_output, write_private, write_whole

pytestmark = pytest.mark.unit


@pytest.fixture
def no_umask():
    """What is private then is so by the call alone."""
    before = os.umask(0)
    yield
    os.umask(before)


def test_secrets_are_private_and_other_files_as_the_umask_has_them(tmp_path, no_umask):
    write_private(tmp_path / "secret", "x")
    write_whole(tmp_path / "public", "x")
    assert (tmp_path / "secret").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "public").stat().st_mode & 0o777 == 0o666


def test_a_reader_keeps_the_old_file_and_a_draft_of_a_dead_writer_is_no_hindrance(tmp_path):
    path = tmp_path / "file"
    write_whole(path, "old")
    (tmp_path / f".file.{os.getpid()}.new").write_text("half")
    with path.open() as reader:
        write_whole(path, "new")
        assert reader.read() == "old"
    assert path.read_text() == "new"
    assert [one.name for one in tmp_path.iterdir()] == ["file"]


def test_of_a_write_that_fails_nothing_is_left(tmp_path):
    (tmp_path / "folder").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_whole(tmp_path / "folder", "x")
    assert [one.name for one in tmp_path.iterdir()] == ["folder"]


@pytest.mark.parametrize("name", ["/dev/null", "pipe", "link"])
def test_an_option_does_not_name_a_device_or_a_pipe(tmp_path, name):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/null")
    with pytest.raises(BadInput, match=rf"-o .*{name}: a file in an existing directory would be"):
        check_output("-o", tmp_path / name)
    (tmp_path / "gone").symlink_to("nowhere")
    check_output("-o", tmp_path / "gone")


def test_two_processes_may_write_at_once(tmp_path):
    path = tmp_path / "file"
    texts = ["a" * 100_000, "b" * 100_000]
    pids = []
    for text in texts:
        pids.append(os.fork())
        if pids[-1] == 0:
            try:
                for _ in range(50):
                    write_whole(path, text)
                os._exit(0)
            finally:
                os._exit(1)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0, 0]
    assert path.read_text() in texts
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
