"""How tests ask compute-sanitizer, with scripts in its place."""

from __future__ import annotations

import pathlib

import pytest
import sanitizer

_CLEAN = "echo '========= COMPUTE-SANITIZER'; echo step end; echo '========= ERROR SUMMARY: 0 errors'"
_FAILURES = {"crash": "kill -SEGV $$", "hang": "sleep 60 & wait"}


def _replace_tool(monkeypatch: pytest.MonkeyPatch, folder: pathlib.Path, first: str, then: str) -> None:
    tool, was_here = folder / "compute-sanitizer", folder / "was_here"
    tool.write_text(f"#!/bin/sh\nif test -e {was_here}; then {then}; else touch {was_here}; {first}; fi\n")
    tool.chmod(0o755)
    monkeypatch.setattr(sanitizer.shutil, "which", lambda *_, **__: str(tool))
    monkeypatch.setattr(sanitizer, "_LONGEST", 1)


@pytest.mark.parametrize("failure", _FAILURES.values(), ids=_FAILURES.keys())
def test_a_tool_that_fails_once_is_asked_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, failure: str
) -> None:
    _replace_tool(monkeypatch, tmp_path, failure, _CLEAN)
    sanitizer.assert_finds_nothing_else("memcheck", "steps = {}", ())


@pytest.mark.parametrize("failure", _FAILURES.values(), ids=_FAILURES.keys())
def test_a_tool_that_fails_each_time_fails_the_test(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path, failure: str
) -> None:
    _replace_tool(monkeypatch, tmp_path, failure, failure)
    with pytest.raises(AssertionError, match="memcheck crashed, or took longer than 1 s, in 3 runs: \\('forward',\\)"):
        sanitizer.assert_finds_nothing_else("memcheck", "steps = {}", ("forward",))


def test_findings_fail_the_test(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    _replace_tool(monkeypatch, tmp_path, _CLEAN.replace("0 errors", "1 error"), "exit 1")
    with pytest.raises(AssertionError, match="1 error"):
        sanitizer.assert_finds_nothing_else("memcheck", "steps = {}", ("forward",))
