"""Files that are there whole or not at all, and cache entries that no other user can have written."""

import concurrent.futures
import os
import pathlib
import stat
import time

import pytest

from jaxkernels.core import folders
from jaxkernels.core.folders import cache_root, open_entry, part_of, read_entry, write_entry, write_whole


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


@pytest.mark.parametrize("write", [write_whole, write_entry])
@pytest.mark.parametrize("failing", ["write", "replace"])
def test_what_stood_there_stays_when_writing_fails(tmp_path, monkeypatch, failing, write):
    path = tmp_path / "file"
    write(path, "old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    def full(descriptor: int, mode: str) -> object:
        os.close(descriptor)
        return open("/dev/full", mode)

    if failing == "replace":
        monkeypatch.setattr(type(path), "replace", fail)
    else:
        monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(OSError, match="No space left"):
        write(path, "new")
    monkeypatch.undo()
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


# Caches.


@pytest.fixture
def open_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def mode_of(path: pathlib.Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_entries_and_the_folders_made_for_them_are_the_users_alone(tmp_path, open_umask):
    path = tmp_path / "a" / "b" / "entry"
    write_entry(path, "content")
    assert read_entry(path) == b"content"
    assert [oct(mode_of(p)) for p in (path, path.parent, path.parent.parent)] == ["0o600", "0o700", "0o700"]


def test_folders_that_exist_keep_their_rights(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared").chmod(0o755)
    write_entry(tmp_path / "shared" / "entry", "content")
    assert mode_of(tmp_path / "shared") == 0o755


def test_an_entry_whose_folder_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").touch()
    for path in (tmp_path / "file" / "entry", tmp_path / "file" / "a" / "entry"):
        with pytest.raises(OSError, match=r"Not a directory|File exists"):
            write_entry(path, "content")


def belongs_to(uid: int, path: pathlib.Path, monkeypatch) -> int:
    """Every file that is opened from now on looks like `path`, with another owner: only root can give files away."""
    status = path.stat()
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result((*status[:4], uid, *status[5:])))
    return uid


UNTRUSTED = {
    "of another user": (lambda path: None, "it belongs to another user (uid {uid})"),
    "open to its group": (lambda path: path.chmod(0o660), "other users may write to it (mode 0660)"),
    "open to all": (lambda path: path.chmod(0o602), "other users may write to it (mode 0602)"),
    "pipe": (lambda path: (path.unlink(), os.mkfifo(path)), "it is not a regular file"),
    "folder": (lambda path: (path.unlink(), path.mkdir()), "it is not a regular file"),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("case", UNTRUSTED)
def test_entries_that_others_may_have_written_are_refused(case, tmp_path, monkeypatch):
    path = tmp_path / "entry"
    write_entry(path, "content")
    make, reason = UNTRUSTED[case]
    make(path)
    if case == "of another user":
        reason = reason.format(uid=belongs_to(4321, path, monkeypatch))
    with pytest.raises(PermissionError) as e:
        open_entry(path)
    assert e.value.strerror == reason


def test_symbolic_links_are_not_followed(tmp_path):
    write_entry(tmp_path / "entry", "content")
    (tmp_path / "link").symlink_to(tmp_path / "entry")
    with pytest.raises(PermissionError, match="it is a symbolic link"):
        open_entry(tmp_path / "link")


def test_roots_entries_are_taken(tmp_path, monkeypatch):
    path = tmp_path / "entry"
    write_entry(path, "content")
    belongs_to(0, path, monkeypatch)
    monkeypatch.setattr(os, "geteuid", lambda: 1001)
    assert read_entry(path) == b"content"


def test_parts_of_killed_writers_are_deleted_after_a_day(tmp_path):
    stale, fresh, folder = (part_of(tmp_path / name) for name in ("stale", "fresh", "folder"))
    folder.mkdir()
    kept = [tmp_path / "mine.part", tmp_path / f"{'0' * 32}.part", fresh]
    for path in (stale, folder / "train.bin", *kept):
        path.touch()
    old = time.time() - folders._STALE_SECONDS - 60
    for path in (stale, folder / "train.bin", folder, *kept[:2]):
        os.utime(path, (old, old))
    write_whole(tmp_path / "file", "")
    assert set(tmp_path.iterdir()) == {*kept, tmp_path / "file"}


def test_a_part_with_a_file_that_still_grows_is_kept(tmp_path):
    part = part_of(tmp_path / "folder")
    part.mkdir()
    (part / "train.bin").touch()
    os.utime(part, (0, 0))
    write_entry(tmp_path / "file", "")
    assert (part / "train.bin").exists()


def test_cache_folder_may_be_named_with_a_tilde(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", "~/x")
    assert cache_root() == tmp_path / "x"
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", "~nobody-of-that-name/x")
    with pytest.raises(ValueError, match=r"^cache: ") as e:
        cache_root()
    assert str(e.value) == (
        "cache: JAXKERNELS_CACHE_DIR must be a folder; got '~nobody-of-that-name/x', a user without a home folder "
        "here. Write the path in full."
    )
