"""From text to batches: which files, which tokens, the cache, and the order of the batches."""

from __future__ import annotations

import functools
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from jaxkernels.core.errors import InputError
from jaxkernels.models import data, tokenizer
from jaxkernels.models.tokenizer import END_OF_TEXT, ByteTokenizer

TEXTS = {
    "a.txt": "All happy families are alike;\neach unhappy family is unhappy in its own way.\n" * 20,
    "b/c.py": "def f(x):\n    return 2 * x\n" * 30,
    "b/d.md": "# Überschrift\n\nGrün ist die Farbe der Hoffnung: ☘.\n" * 25,
}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> pathlib.Path:
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokens"


@pytest.fixture
def folder(tmp_path) -> pathlib.Path:
    root = tmp_path / "texts"
    for name, text in TEXTS.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


load_bytes = functools.partial(data.load, tokenizer="bytes", vocab_size=256, sequence_length=8)
load_bpe = functools.partial(data.load, tokenizer="bpe", vocab_size=300, sequence_length=8)


def reported(load: Callable[..., Any], *args: Any, **options: Any) -> tuple[Any, list[str]]:
    """The result of a call, and the lines that it prints without a terminal."""
    console = Console(file=io.StringIO(), soft_wrap=True, highlight=False, markup=False)
    result = load(*args, **options, console=console)
    return result, console.file.getvalue().splitlines()


# Which files.

NOT_TEXT = "data: {path} is not text: it is not valid UTF-8, or has NUL bytes."


def test_text_files_of_a_folder_are_found_and_others_passed_over(folder):
    (folder / "image.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (folder / "latin1.txt").write_bytes("Grün".encode("latin1"))
    (folder / "empty.txt").touch()
    (folder / ".hidden").write_text("no")
    (folder / ".git").mkdir()
    (folder / ".git" / "config").write_text("no")
    (folder / "link.txt").symlink_to(folder / "a.txt")
    documents = data.find_documents(folder)
    assert {str(document.path.relative_to(folder)) for document in documents} == set(TEXTS)
    assert sum(document.num_bytes for document in documents) == sum(len(text.encode()) for text in TEXTS.values())


def test_files_passed_over_are_counted_and_named(folder):
    assert reported(data.find_documents, folder)[1] == []
    for name in ("b/image.png", "d.bin"):
        (folder / name).write_bytes(b"\x89PNG\0")
    expected = "data: skipped {} of {} files, which are not UTF-8 text: "
    assert reported(data.find_documents, folder)[1] == [expected.format(2, 5) + "d.bin, b/image.png"]
    for number in range(3):
        (folder / f"latin{number}.txt").write_bytes("Grün".encode("latin1"))
    (line,) = reported(data.find_documents, folder)[1]
    assert line == expected.format(5, 8) + "d.bin, latin0.txt, latin1.txt, 2 more"
    assert reported(data.find_documents, None)[1] == []


@pytest.mark.timeout(30)
def test_pipes_and_devices_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", pathlib.Path("/dev/zero")):
        with pytest.raises(InputError) as e:
            data.find_documents(path)
        assert str(e.value) == f"data: {path} must be a regular file or a folder. Write the text to a file."


def test_documents_are_ordered_by_content_whatever_their_names(folder):
    digests = [document.digest for document in data.find_documents(folder)]
    (folder / "a.txt").rename(folder / "zzz.txt")
    assert [document.digest for document in data.find_documents(folder)] == digests == sorted(digests)


def test_without_a_source_it_is_the_standard_librarys_own():
    paths = [document.path for document in data.find_documents(None)]
    stdlib = pathlib.Path(sysconfig.get_path("stdlib"))
    assert stdlib / "json" / "decoder.py" in paths
    assert stdlib / "ast.py" in paths
    assert all(path.suffix == ".py" and path.is_relative_to(stdlib) for path in paths)
    assert not any("site-packages" in path.parts for path in paths)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "data: no such file or folder: {path}."),
        (lambda path: path.touch(), "data: {path} is empty."),
        (lambda path: path.mkdir(), "data: {path} must hold non-empty UTF-8 files; got none among 0 files."),
        (lambda path: path.write_bytes(b"\xff\xfe"), NOT_TEXT),
        (lambda path: path.write_bytes(b"a\0b"), NOT_TEXT),
        (
            lambda path: path.write_text("too short"),
            "data: training and validation text must have at least 9 tokens each (one sequence); got 10 and 0. "
            "Give more text or a smaller --sequence-length.",
        ),
    ],
    ids=["missing", "empty", "empty folder", "not UTF-8", "NUL", "short"],
)
def test_unusable_source_is_refused(tmp_path, make, message):
    path = tmp_path / "source"
    make(path)
    with pytest.raises(InputError) as e:
        load_bytes(path)
    assert str(e.value) == message.format(path=path)


def test_unreadable_file_is_refused(folder, monkeypatch):
    def refuse(path: pathlib.Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(pathlib.Path, "read_bytes", refuse)  # Permissions do not stop root.
    with pytest.raises(InputError) as e:
        load_bytes(folder / "a.txt")
    assert str(e.value) == f"data: cannot read {folder / 'a.txt'}: Permission denied."


def test_text_that_changes_while_it_is_read_is_refused(folder):
    (document,) = data.find_documents(folder / "a.txt")
    (folder / "a.txt").write_text("other")
    with pytest.raises(InputError) as e:
        document.read()
    assert str(e.value) == f"data: {folder / 'a.txt'} changed while it was being read. Start again."


# Which tokens.


def documents_of(stream: np.ndarray) -> list[np.ndarray]:
    *documents, rest = np.split(stream, np.flatnonzero(stream == END_OF_TEXT) + 1)
    return [document[:-1] for document in documents] + ([rest] if rest.size else [])


@pytest.mark.parametrize("load", [load_bytes, load_bpe], ids=["bytes", "bpe"])
def test_splits_together_are_the_text_and_validation_is_a_twentieth(folder, load):
    loaded = load(folder)
    text = loaded.tokenizer.decode
    train = [text(document) for document in documents_of(loaded.train)]
    validation = [text(document) for document in documents_of(loaded.validation)]
    # The split cuts one document in two; its first part ends training without a separator.
    assert loaded.train[-1] != END_OF_TEXT
    assert loaded.validation[-1] == END_OF_TEXT
    whole = [*train[:-1], train[-1] + validation[0], *validation[1:]]
    assert sorted(whole) == sorted(TEXTS.values())
    num_bytes = sum(len(text.encode()) for text in TEXTS.values())
    assert abs(sum(len(part.encode()) for part in validation) - num_bytes / 20) <= 2
    assert (loaded.num_documents, loaded.num_bytes) == (3, num_bytes)


def test_split_does_not_cut_a_character(tmp_path):
    path = tmp_path / "wide.txt"
    path.write_text("☘" * 333)
    loaded = load_bytes(path)
    assert {bytes(stream).decode().strip("\0☘") for stream in (loaded.train, loaded.validation)} == {""}
    assert (len(loaded.train), len(loaded.validation)) == (3 * 316, 3 * 17 + 1)


def test_streams_are_memory_mapped_in_the_smallest_dtype(folder):
    assert isinstance(load_bytes(folder).train, np.memmap)
    assert load_bytes(folder).train.dtype == np.uint8
    assert load_bpe(folder).train.dtype == np.uint16


def test_bpe_restores_every_text_and_takes_the_separators_name_as_text(folder):
    learnt = load_bpe(folder).tokenizer
    assert learnt.vocab_size == 300
    text = "if x: <|endoftext|>\n\tprint('☘', x)  # naïve\r\n"
    (tokens,) = learnt.encode([text])
    assert learnt.decode(tokens) == text
    assert END_OF_TEXT not in tokens
    assert learnt.decode([END_OF_TEXT, *tokens, END_OF_TEXT]) == text


def test_bpe_saved_and_loaded_encodes_alike(folder, tmp_path):
    learnt = load_bpe(folder).tokenizer
    learnt.save(tmp_path)
    text = "unhappy <|endoftext|> families"
    (before,), (after,) = learnt.encode([text]), tokenizer.load("bpe", tmp_path).encode([text])
    np.testing.assert_array_equal(before, after)


def test_bpe_learns_the_same_from_the_same_text(folder, cache, monkeypatch):
    first = load_bpe(folder)
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(cache / "other"))
    second = load_bpe(folder)
    np.testing.assert_array_equal(first.train, second.train)


def test_long_document_is_encoded_in_pieces(tmp_path, monkeypatch):
    text = "".join(f"line {i}\n" for i in range(500))
    path = tmp_path / "long.txt"
    path.write_text(text)
    monkeypatch.setattr(data, "_PIECE_CHARS", 100)
    loaded = load_bpe(path)
    assert loaded.tokenizer.decode(np.concatenate([loaded.train, loaded.validation])) == text


def test_bytes_decode_with_what_is_not_utf8():
    assert ByteTokenizer().decode([0, 65, 0xE2, 66]) == "A\ufffdB"


def test_too_small_bpe_vocabulary_is_refused(folder):
    with pytest.raises(InputError) as e:
        data.load(folder, tokenizer="bpe", vocab_size=200, sequence_length=8)
    assert str(e.value) == (
        "tokenizer: a BPE vocabulary needs at least 258 entries (256 bytes, the separator, a merge); got 200. "
        "Use a larger --vocab-size, or --tokenizer bytes."
    )


def test_too_large_bpe_vocabulary_is_refused_before_anything_is_read(tmp_path):
    with pytest.raises(InputError) as e:
        load_bpe(tmp_path / "absent", vocab_size=10**9)
    assert str(e.value) == (
        "tokenizer: a BPE vocabulary has at most 1,048,576 entries; got 1,000,000,000. Use a smaller --vocab-size."
    )


def test_progress_is_shown_on_a_terminal_and_nowhere_else(folder, cache, monkeypatch):
    shown = []
    for is_terminal in (True, False):
        monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(cache / str(is_terminal)))
        console = Console(file=io.StringIO(), force_terminal=is_terminal, width=100)
        load_bpe(folder, console=console)
        shown.append(console.file.getvalue())
    for text in ("reading 3 files", "learning ", "tokenising ", "checking the token cache"):
        assert text in shown[0]
    assert [line.split()[0] for line in shown[1].splitlines()] == ["learning", "tokenising"]


# The cache.


def test_second_load_reads_the_cache(folder, cache, monkeypatch):
    first, lines = reported(load_bpe, folder)
    assert [line.split()[0] for line in lines] == ["learning", "tokenising"]
    monkeypatch.setattr(data, "_fill_cache", None)
    second = load_bpe(folder)
    assert first.key == second.key
    np.testing.assert_array_equal(first.train, second.train)
    assert [path.name for path in cache.iterdir()] == [first.key]


def test_key_follows_content_and_tokenizer(folder):
    keys = [load_bytes(folder).key, load_bpe(folder).key, load_bpe(folder, vocab_size=280).key]
    (folder / "a.txt").write_text(TEXTS["a.txt"] + "x")
    keys.append(load_bytes(folder).key)
    assert len(set(keys)) == 4
    (folder / "a.txt").write_text(TEXTS["a.txt"])
    assert load_bytes(folder).key == keys[0]


def test_two_processes_may_fill_the_cache_at_once(folder, cache):
    script = (
        "import pathlib, sys; from jaxkernels.models import data;"
        "loaded = data.load(pathlib.Path(sys.argv[1]), tokenizer='bpe', vocab_size=300, sequence_length=8);"
        "print(loaded.key, len(loaded.train), int(loaded.train.sum()))"
    )
    root = pathlib.Path(data.__file__).parent.parent
    env = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu"}
    start = lambda: subprocess.Popen([sys.executable, "-c", script, folder], env=env, stdout=subprocess.PIPE, text=True)
    outputs = [process.communicate()[0] for process in [start() for _ in range(2)]]
    loaded = load_bpe(folder)
    assert outputs == [f"{loaded.key} {len(loaded.train)} {int(loaded.train.sum())}\n"] * 2
    assert [path.name for path in cache.iterdir()] == [loaded.key]


def test_process_that_comes_second_keeps_the_cache_of_the_first(folder, cache):
    first = load_bytes(folder)
    meta = cache / first.key / "meta.json"
    content = json.loads(meta.read_text())
    data._fill_cache(cache / first.key, data.find_documents(folder), "bytes", 256, Console(quiet=True))
    assert json.loads(meta.read_text()) == content
    assert [path.name for path in cache.iterdir()] == [first.key]


def _alter(path: pathlib.Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def _edit_meta(path: pathlib.Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _replace(path: pathlib.Path, make: Callable[[pathlib.Path], Any]) -> None:
    path.unlink()
    make(path)


CHANGED = "{}: size or checksum differs from meta.json"
DAMAGES = {
    "halved": ("train.bin", lambda path: os.truncate(path, path.stat().st_size // 2), CHANGED),
    "altered": ("validation.bin", _alter, CHANGED),
    "longer": ("train.bin", lambda path: path.write_bytes(path.read_bytes() + b"\0\0"), CHANGED),
    "other tokenizer": ("tokenizer.json", _alter, CHANGED),
    "missing stream": ("train.bin", pathlib.Path.unlink, "{}: No such file or directory"),
    "missing tokenizer": ("tokenizer.json", pathlib.Path.unlink, "{}: No such file or directory"),
    "missing meta": ("meta.json", pathlib.Path.unlink, "{}: No such file or directory"),
    "empty meta": ("meta.json", lambda path: path.write_text(""), "{}: it is not JSON"),
    "meta of another form": ("meta.json", lambda path: path.write_text("[1]"), "{}: it has no checksums"),
    "meta without checksums": ("meta.json", lambda path: path.write_text('{"dtype": "uint16"}'),
                               "{}: it has no checksums"),
    "other dtype": ("meta.json", lambda path: _edit_meta(path, dtype="uint8"),
                    "{}: dtype must be uint16 for 300 tokens"),
    "pipe": ("train.bin", lambda path: _replace(path, os.mkfifo), "{}: it is not a regular file"),
    "open to all": ("train.bin", lambda path: path.chmod(0o666), "{}: other users may write to it (mode 0666)"),
}  # fmt: skip


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_cache_is_made_anew_with_one_line(case, folder, cache):
    first = load_bpe(folder)
    train = np.array(first.train)
    name, damage, reason = DAMAGES[case]
    damage(cache / first.key / name)
    second, lines = reported(load_bpe, folder)
    made_again = f"data: making the token cache {cache / first.key} again: {reason.format(name)}"
    assert lines[0] == made_again
    assert [line.split()[0] for line in lines[1:]] == ["learning", "tokenising"]
    np.testing.assert_array_equal(second.train, train)
    assert second.key == first.key
    assert [path.name for path in cache.iterdir()] == [first.key]
    assert reported(load_bpe, folder)[1] == []


@pytest.mark.parametrize("make", [pathlib.Path.touch, lambda path: path.symlink_to("nowhere"), pathlib.Path.mkdir])
def test_what_is_no_folder_in_the_caches_place_is_replaced(make, folder, cache):
    key = load_bytes(folder).key
    shutil.rmtree(cache / key)
    make(cache / key)
    assert load_bytes(folder).key == key
    assert [path.name for path in cache.iterdir()] == [key]
    assert reported(load_bytes, folder)[1] == []


def test_cache_is_the_users_alone_whatever_the_umask(folder, cache):
    before = os.umask(0)
    try:
        key = load_bpe(folder).key
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (cache.parent, cache, *cache.rglob("*"))}
    files = {"train.bin", "validation.bin", "tokenizer.json", "meta.json"}
    assert modes == dict.fromkeys(("cache", "tokens", key), 0o700) | dict.fromkeys(files, 0o600)
    assert reported(load_bpe, folder)[1] == []


def test_interrupted_tokenising_leaves_nothing_behind(folder, cache, monkeypatch):
    def fail(self: ByteTokenizer, texts: list[str]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ByteTokenizer, "encode", fail)
    with pytest.raises(KeyboardInterrupt):
        load_bytes(folder)
    assert list(cache.iterdir()) == []


def test_cache_that_cannot_be_written_is_refused(folder, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / "file"))
    with pytest.raises(InputError) as e:
        load_bytes(folder)
    assert str(e.value) == (
        f"data: cannot write the token cache {tmp_path / 'file' / 'tokens'}: Not a directory. "
        "Set JAXKERNELS_CACHE_DIR to a folder that can be written."
    )


# Batches.

STREAM = np.arange(1000, dtype=np.uint16)


def test_batch_is_a_function_of_seed_and_step():
    batch = functools.partial(data.batch_at, STREAM, batch_size=4, sequence_length=16)
    np.testing.assert_array_equal(batch(seed=1, step=5), batch(seed=1, step=5))
    others = [batch(seed=1, step=6), batch(seed=2, step=5), batch(seed=5, step=1)]
    assert not any(np.array_equal(batch(seed=1, step=5), other) for other in others)


def test_batch_is_windows_of_the_stream_from_all_over_it():
    batch = data.batch_at(STREAM, seed=0, step=1, batch_size=3000, sequence_length=16)
    assert (batch.shape, batch.dtype) == ((3000, 17), np.int32)
    np.testing.assert_array_equal(np.diff(batch, axis=1), 1)
    starts = batch[:, 0]
    assert (starts.min(), starts.max()) == (0, 983)
    assert abs(starts.mean() - 983 / 2) < 4 * 984 / np.sqrt(12 * 3000)


def test_shortest_stream_gives_its_one_window():
    batch = data.batch_at(STREAM[:17], seed=0, step=1, batch_size=2, sequence_length=16)
    np.testing.assert_array_equal(batch, [STREAM[:17]] * 2)


def test_validation_batches_spread_over_the_stream():
    batches = list(data.validation_batches(STREAM, num_batches=3, batch_size=4, sequence_length=16))
    assert [batch.shape for batch in batches] == [(4, 17)] * 3
    starts = np.concatenate(batches)[:, 0]
    assert (starts[0], starts[-1]) == (0, 983)
    assert set(np.diff(starts)) <= {89, 90}


def test_validation_batches_of_a_short_stream_are_as_many_as_its_tokens_fill():
    batches = list(data.validation_batches(STREAM, num_batches=20, batch_size=4, sequence_length=100))
    starts = np.concatenate(batches)[:, 0]
    assert len(starts) == 12  # Two batches have room for 800 of the 1000 tokens.
    assert (starts[0], starts[-1]) == (0, 899)
    assert max(np.diff(starts)) <= 100
