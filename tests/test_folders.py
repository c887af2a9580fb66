"""Files that are there whole or not at all."""

import concurrent.futures
import os

import pytest

from jaxkernels.folders import write_whole


def test_a_file_and_its_folders(tmp_path):
    path = tmp_path / "a" / "b" / "file.json"
    write_whole(path, "für alle\n")
    assert path.read_bytes() == "für alle\n".encode()
    write_whole(path, b"\x00other")
    assert path.read_bytes() == b"\x00other"
    assert os.listdir(path.parent) == ["file.json"]


def test_rights_are_those_of_any_new_file(tmp_path):
    (tmp_path / "plain").write_text("")
    write_whole(tmp_path / "whole", "")
    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "plain").stat().st_mode


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_what_stood_there_stays_when_writing_fails(tmp_path, monkeypatch, failing):
    path = tmp_path / "file"
    write_whole(path, "old")

    def fail(self, content):
        if failing == "write_bytes":
            with open(self, "wb") as file:
                file.write(content[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(type(path), failing, fail)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_writers_at_once_and_a_reader_that_sees_one_of_them_whole(tmp_path):
    path = tmp_path / "file"
    contents = [str(i) * 100_000 for i in range(8)]
    write_whole(path, contents[0])
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        writing = [pool.submit(write_whole, path, content) for content in contents * 8]
        while not all(done.done() for done in writing):
            assert path.read_text() in contents
    for done in writing:
        done.result()
    assert path.read_text() in contents
    assert os.listdir(tmp_path) == ["file"]
