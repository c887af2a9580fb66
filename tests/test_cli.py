"""The command line: what it says, what it refuses in one line, and the commands from end to end."""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import types

import jax
import pytest
from typer.testing import CliRunner, Result

from jaxkernels import cli
from jaxkernels.cli import doctor
from jaxkernels.core import dispatch, hardware, winners
from jaxkernels.ffi import assembler
from jaxkernels.models.config import PRESETS
from jaxkernels.ops.matmul import tuning as matmul_tuning
from jaxkernels.triton import calls

ROOT = pathlib.Path(cli.__file__).parent.parent
TEXT = "".join(f"line {i}: the quick brown fox jumps over the lazy dog\n" for i in range(200))

#: A run of a few seconds.
SHORT = ["--steps=4", "--batch-size=2", "--sequence-length=16", "--devices=1"]


@pytest.fixture(autouse=True)
def _own_folders(tmp_path, monkeypatch) -> None:
    """Each test works in an empty folder, with a cache of its own, beside text.txt."""
    (tmp_path / "work").mkdir()
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / "cache"))


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli.app, [str(arg) for arg in args])


def refusal(*args: object) -> str:
    """The standard error of a command that fails. It must exit with 1, without a traceback."""
    result = invoke(*args)
    assert result.exit_code == 1
    assert isinstance(result.exception, SystemExit)
    return result.stderr


def python(*args: object) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "COLUMNS": "200"}
    env.pop("XLA_FLAGS", None)
    return subprocess.run([sys.executable, *map(str, args)], env=env, capture_output=True, text=True)


# Help.


def test_module_prints_help_and_lists_the_commands():
    result = python("-m", "jaxkernels", "--help")
    assert result.returncode == 0
    assert "Usage: jaxkernels [OPTIONS] COMMAND" in result.stdout
    for command in ("train", "sample", "doctor"):
        assert re.search(rf"^│ {command} +\w", result.stdout, re.MULTILINE)


def test_help_of_train_explains_every_option(monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    text = invoke("train", "--help").stdout
    for option in (
        "preset", "backend", "dtype", "remat", "scan", "no-scan", "chunked-loss", "no-chunked-loss", "data",
        "tokenizer", "vocab-size",
        "steps", "batch-size", "sequence-length", "learning-rate", "optimizer", "seed", "deterministic",
        "no-deterministic", "out", "resume", "init-from", "checkpoint-every", "eval-every", "devices",
    ):  # fmt: skip
        assert f"--{option} " in text
    for name, preset in PRESETS.items():
        assert f"{name} ({preset.model.num_params / 1e6:,.1f} M parameters)" in text
    for backend in dispatch.backend_names():
        assert backend in text


def test_command_line_starts_without_what_only_training_needs():
    script = "import sys, jaxkernels.cli; print(sorted({'flax', 'optax', 'orbax', 'matplotlib'} & sys.modules.keys()))"
    assert python("-c", script).stdout == "[]\n"


# Refusals.


def test_unknown_preset():
    assert refusal("train", "--preset", "huge") == (
        "error: preset: unknown preset 'huge'; use one of tiny, 124m, 350m, 1b, 8b.\n"
    )


def test_unknown_backend():
    assert refusal("train", "--backend", "cutlass") == (
        f"error: train: unknown backend 'cutlass'; use one of {', '.join(dispatch.backend_names())}, "
        "or leave --backend out for the fastest.\n"
    )


@pytest.mark.parametrize("more", [[], ["--dtype=bfloat16"]])
def test_backend_that_cannot_run_here(more):
    """The platform is the first reason, even if there are others, and nothing is tokenised."""
    result = invoke("train", *SHORT, "--backend=pallas", *more)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: train: --backend pallas does not run on cpu, the devices here. "
        "Leave --backend out, or use --backend xla.\n"
    )
    assert not pathlib.Path("runs").exists()


def test_what_a_backend_refuses_names_the_option(monkeypatch):
    def refuse() -> None:
        raise NotImplementedError(f"matmul[pallas]: takes no float32. {dispatch.WAY_OUT}")

    monkeypatch.setattr(doctor, "examine", refuse)
    assert refusal("doctor") == (
        "error: matmul[pallas]: takes no float32. Leave --backend out, or use --backend xla.\n"
    )


def test_output_that_cannot_be_written_is_found_first(tmp_path):
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "run"
    assert refusal("train", "--out", out) == (
        f"error: run: cannot write {out}: Not a directory. Name another folder with --out.\n"
    )
    assert refusal("bench", "gemm", "--json", out) == f"error: bench: cannot write --json {out}: Not a directory.\n"
    assert refusal("bench", "gemm", "--json", tmp_path) == (
        f"error: bench: cannot write --json {tmp_path}: Is a directory.\n"
    )
    assert refusal("bench", "gemm", "--plot", out) == f"error: bench: cannot write --plot {out}: Not a directory.\n"


def test_batch_that_cannot_fit_is_refused_at_once():
    assert refusal("train", "--batch-size", 10**10) == (
        "error: TrainingConfig: batch_size must be below 2**31; got 10000000000.\n"
    )
    message = refusal("train", "--batch-size", 16_000_000, "--devices=1")
    assert message.startswith("error: train: out of memory: a step needs at least 6,291.5 GB on each device, ")
    assert re.search(r"Use --batch-size \d+ or less or a smaller --sequence-length\.\n$", message)
    assert not pathlib.Path("runs").exists()


def test_missing_data():
    path = pathlib.Path("missing.txt").absolute()
    assert refusal("train", "--data", "missing.txt") == f"error: data: no such file or folder: {path}.\n"


def test_empty_data():
    path = pathlib.Path("empty.txt").absolute()
    path.touch()
    assert refusal("train", "--data", "empty.txt") == f"error: data: {path} is empty.\n"


def test_text_too_short_for_a_sequence(tmp_path):
    train = round(0.95 * len(TEXT))
    assert refusal("train", "--data", tmp_path / "text.txt", "--sequence-length", 4096) == (
        "error: data: training and validation text must have at least 4097 tokens each (one sequence); "
        f"got {train} and {len(TEXT) - train + 1}. Give more text or a smaller --sequence-length.\n"
    )


def test_impossible_options():
    assert refusal("train", "--steps", 0) == "error: TrainingConfig: steps must be a positive int; got 0.\n"
    number = len(jax.devices())
    assert refusal("train", "--devices", 0) == (
        f"error: train: --devices must be from 1 to {number}, the devices here; got 0.\n"
    )
    assert refusal("train", "--vocab-size", 512) == (
        "error: train: --vocab-size needs --tokenizer bpe, as a byte vocabulary has 256 entries; got 512.\n"
    )


def test_option_that_is_no_number_is_a_usage_error():
    result = invoke("train", "--steps", "many")
    assert result.exit_code == 2
    assert "Invalid value for '--steps'" in result.stderr


def test_no_run_to_resume_or_to_sample_from():
    expected = "error: run: there is no run under ./runs. Start one with `jaxkernels train`.\n"
    assert refusal("train", "--resume") == expected
    assert refusal("sample") == expected
    assert refusal("sample", "nowhere") == "error: run: nowhere is not a run's folder: it has no config.json.\n"
    assert refusal("train", "--resume", "--out", "nowhere") == (
        "error: run: nowhere is not a run's folder: it has no config.json.\n"
    )


def test_bug_is_not_dressed_up_as_bad_input(monkeypatch):
    def fail() -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(doctor, "examine", fail)
    assert isinstance(invoke("doctor").exception, ZeroDivisionError)


# From end to end.


def test_train_resume_and_sample(tmp_path):
    data = tmp_path / "text.txt"
    result = invoke("train", *SHORT, "--data", data, "--tokenizer=bpe", "--vocab-size=300", "--seed=3", "--scan")
    assert result.exit_code == 0, result.output
    run = pathlib.Path("runs/tiny")
    for part in ("validation loss", "tokens/s", "everything is in runs/tiny"):
        assert part in result.stdout
    config = json.loads((run / "config.json").read_text())
    assert config["model"] | dict(vocab_size=300, scan=True) == config["model"]
    assert config | dict(preset="tiny", steps=4, seed=3, tokenizer="bpe", data=str(data)) == config
    assert {path.name for path in run.iterdir()} == {
        ".lock", "checkpoints", "config.json", "loss.png", "metrics.jsonl", "sample.txt", "tokenizer.json",
    }  # fmt: skip

    assert refusal("train", *SHORT, "--out", run) == (
        "error: run: runs/tiny already holds a run. Continue it with --resume, or name another folder with --out.\n"
    )
    assert refusal("train", "--resume", "--steps=9", "--preset=124m", "--remat=full", "--devices=1") == (
        "error: train: runs/tiny was started with other options: preset='tiny' there, '124m' here; "
        "remat='none' there, 'full' here. "
        "Leave them out to resume it, or start a new run.\n"
    )
    resumed = invoke("train", "--resume", "--devices=1", "--steps=5", "--seed=3")
    assert resumed.exit_code == 0, resumed.output
    assert "runs/tiny: resumed after step 4\n" in resumed.stdout
    assert json.loads((run / "config.json").read_text())["steps"] == 5

    sampled = [invoke("sample", "--prompt=line 7", "--tokens=8", *more) for more in ([], [run], ["--seed=1"])]
    assert [sample.exit_code for sample in sampled] == [0, 0, 0]
    assert sampled[0].stdout.startswith("line 7")
    assert sampled[0].stdout == sampled[1].stdout != sampled[2].stdout
    assert refusal("sample", "--tokens=0") == "error: sample: --tokens must be from 1 to 1,000,000; got 0.\n"
    assert refusal("sample", "--seed=99999999999999999999") == (
        "error: sample: --seed must be from 0 to 2**32 - 1; got 99999999999999999999.\n"
    )

    assert refusal("train", "--init-from", run, "--tokenizer=bytes", "--devices=1") == (
        "error: train: the weights of runs/tiny are of another model: tokenizer='bpe' there, 'bytes' here. "
        "Leave these options out, or start without --init-from.\n"
    )
    (tmp_path / "other.txt").write_text(TEXT.replace("fox", "xylophone"))
    assert refusal("train", "--init-from", run, "--devices=1", "--data", tmp_path / "other.txt") == (
        "error: train: --init-from needs a run with the same tokens; the byte pairs of this text differ from those of "
        f"{run.absolute()}. Use that run's text, or a run with --tokenizer bytes.\n"
    )
    warm = invoke("train", "--init-from", run, "--steps=1", "--out=warm", "--devices=1")
    assert warm.exit_code == 0, warm.output
    assert f"warm: starting from the weights of {run.absolute()}\n" in warm.stdout

    (run / "tokenizer.json").write_text("{}")
    assert refusal("sample", run).startswith("error: run: cannot read runs/tiny/tokenizer.json: ")
    (run / "config.json").write_text(json.dumps(config | {"model": config["model"] | {"mlp_dim": 99}}))
    assert refusal("sample", run).startswith(
        "error: run: runs/tiny/config.json was changed by hand: it differs from its checksum (steps=5 in the "
        f"checkpoint, 4 now; mlp_dim={config['model']['mlp_dim']} in the checkpoint, 99 now). Undo the change. "
    )


def test_sigterm_saves_and_ends_with_its_own_status(tmp_path):
    options = [*SHORT, "--steps=1000000", "--data", tmp_path / "text.txt", "--out=run"]
    command = [sys.executable, "-m", "jaxkernels", "train", *map(str, options)]
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    env.pop("XLA_FLAGS", None)
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            if "before the first step" in line:
                process.send_signal(signal.SIGTERM)
                break
        rest, errors = process.communicate(timeout=240)
    assert process.returncode == 128 + signal.SIGTERM, errors
    assert re.fullmatch(
        r"run: saved after step \d+\ninterrupted; to continue: jaxkernels train --resume --out run\n", rest
    ), rest
    assert "Traceback" not in errors
    assert len(list(pathlib.Path("run/checkpoints").iterdir())) == 1


# Doctor.


def test_doctor_runs_in_a_process_of_its_own():
    result = python("-m", "jaxkernels", "doctor")
    assert result.returncode == 0, result.stderr
    for line in (rf"jax +{re.escape(jax.__version__)}", r"cpu:0 +cpu", r"xla +available"):
        assert re.search(rf"^  {line}$", result.stdout, re.MULTILINE), result.stdout
    for title in ("versions", "devices", "driver", "backends", "caches"):
        assert f"{title}\n" in result.stdout


def test_doctor_prints_json(tmp_path):
    (tmp_path / "cache" / "tokens").mkdir(parents=True)
    (tmp_path / "cache" / "tokens" / "x.bin").write_bytes(b"12345")
    report = json.loads(invoke("doctor", "--json").stdout)
    assert list(report["backends"]) == list(dispatch.backend_names())
    assert report["backends"]["xla"] == {"available": True, "reasons": [], "note": ""}
    assert report["versions"]["jax"] == jax.__version__
    assert report["versions"]["flax"] is not None
    assert report["caches"] == {str(tmp_path / "cache" / "tokens"): 5}


def of_chip(monkeypatch: pytest.MonkeyPatch, chip: hardware.Chip) -> dict[str, doctor.Availability]:
    """The backends in doctor's report if the first device is `chip`."""
    monkeypatch.setattr(hardware, "chip_of", lambda device: chip)
    return {backend.name: backend for backend in doctor.examine().backends}


def test_doctor_says_why_a_backend_is_not_available(monkeypatch):
    found = of_chip(monkeypatch, hardware.host("cpu"))
    assert found["xla"].available
    assert found["pallas"].reasons == ("needs a GPU of compute capability 9.0 (Hopper), the target is cpu",)
    assert "needs a GPU of compute capability 9.0 (Hopper), this machine has cpu" in found["cuda"].reasons


def test_doctor_finds_the_kernels_available_on_a_hopper_gpu(monkeypatch):
    found = of_chip(monkeypatch, hardware.lookup("NVIDIA H200"))
    assert found["pallas"].available
    assert not any("Hopper" in reason for reason in found["cuda"].reasons)


@pytest.fixture
def with_triton(registry, monkeypatch) -> types.ModuleType:
    """A backend triton of one kernel, with Triton installed."""
    for op, backend in [*registry]:
        if backend == "triton":
            del registry[op, backend]
    design = types.ModuleType("backend_triton")
    design.unsupported = lambda spec: calls.unsupported_chip(spec.target)
    monkeypatch.setitem(sys.modules, design.__name__, design)
    registry["matmul", "triton"] = dispatch.Entry((design.__name__,), ("cuda",))
    monkeypatch.setattr(calls, "missing", lambda: None)
    monkeypatch.setattr(calls, "version", lambda: "3.9.0")
    monkeypatch.setattr(assembler, "version", lambda: (13, 0))
    return design


A10 = hardware.lookup("NVIDIA A10")
VERSIONS = "triton 3.9.0, nvJitLink 13.0"


def test_doctor_says_that_configurations_for_triton_were_not_measured(with_triton, monkeypatch):
    found = of_chip(monkeypatch, A10)["triton"]
    unmeasured = "no configuration was measured on NVIDIA A10: a cost model chooses, `jaxkernels tune` measures"
    assert (found.reasons, found.note) == ((), f"{VERSIONS}, {unmeasured}")
    assert f"  triton    available ({VERSIONS}, {unmeasured})\n" in doctor.as_text(doctor.examine())
    # A measurement of another backend says nothing of this one's.
    for backend, note in (("pallas", f"{VERSIONS}, {unmeasured}"), ("triton", VERSIONS)):
        spec = matmul_tuning.probe(A10)
        winners.store(winners.Key(A10, "matmul", spec, backend, 1), None, {}, 1e-6)
        assert of_chip(monkeypatch, A10)["triton"].note == note


def test_doctor_reads_measurements_from_the_packages_table(with_triton, monkeypatch, tmp_path):
    spec = matmul_tuning.probe(A10)
    entry = {"key": winners.Key(A10, "matmul", spec, "triton", 1).describe(), "winner": {}, "seconds": 1e-6}
    (tmp_path / "nvidia_a10.json").write_text(json.dumps([entry]))
    monkeypatch.setattr(winners, "_TABLES", tmp_path)
    assert of_chip(monkeypatch, A10)["triton"].note == VERSIONS


def _no_assembler() -> tuple[int, int]:
    raise ImportError("nvJitLink: the library cannot be loaded")


def test_doctor_says_why_triton_is_not_available(with_triton, monkeypatch):
    found = of_chip(monkeypatch, hardware.host("cpu"))["triton"]
    on_cpu = "needs a CUDA GPU of compute capability 8.0 or newer, the target is cpu"
    assert (found.reasons, found.note) == ((on_cpu,), VERSIONS)
    unfit = "needs triton 3.6 or newer, found 3.5.1: pip install -U 'jaxkernels[triton]'"
    monkeypatch.setattr(calls, "missing", lambda: unfit)
    monkeypatch.setattr(calls, "version", lambda: "3.5.1")
    monkeypatch.setattr(assembler, "version", _no_assembler)
    found = of_chip(monkeypatch, A10)["triton"]
    assert found.reasons == (unfit,)
    assert found.note.startswith("triton 3.5.1, no configuration")
    # The kernels have the same reason: it is given once.
    with_triton.unsupported = lambda spec: unfit
    assert of_chip(monkeypatch, A10)["triton"].reasons == (unfit,)


def test_doctor_reports_a_backend_that_does_not_load(registry, monkeypatch):
    registry["matmul", "broken"] = dispatch.Entry(("jaxkernels.no_such_module",))
    found = of_chip(monkeypatch, hardware.host("cpu"))
    assert found["broken"].reasons == (
        "matmul[broken]: the backend failed to load (jaxkernels.no_such_module): "
        "No module named 'jaxkernels.no_such_module'",
    )


def test_doctor_reports_a_cuda_plugin_that_does_not_start(monkeypatch):
    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", fail)
    report = doctor.examine()
    assert report.devices == ("none: Unable to initialize backend 'cuda'",)
    assert "Unable to initialize backend 'cuda'" in doctor.as_text(report)


def test_doctor_reports_the_driver(monkeypatch):
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert doctor.examine().driver == "none: libcuda.so.1: cannot open shared object file"

    class Driver:
        def __init__(self, name: str):
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, number: object) -> int:  # noqa: N802
            number._obj.value = 13000
            return 0

    monkeypatch.setattr(ctypes, "CDLL", Driver)
    assert doctor.examine().driver.endswith("supports up to CUDA 13.0")
