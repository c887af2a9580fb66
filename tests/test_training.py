"""Training: the step, the loop and its files, several devices, and a run that is killed and resumed."""

from __future__ import annotations

import copy
import dataclasses
import functools
import io
import itertools
import json
import math
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ahead_of_time import h200, needs_aot
from flax import nnx
from numerics import assert_close, assert_same_bits, compile_quickly
from PIL import Image
from rich.console import Console

from jaxkernels.core import dispatch, hardware
from jaxkernels.core.errors import InputError
from jaxkernels.models import memory, progress, sampling, training
from jaxkernels.models.checkpoints import Checkpoints, complete_steps
from jaxkernels.models.config import ModelConfig, TrainingConfig, training_config
from jaxkernels.models.interrupts import Interrupted
from jaxkernels.models.run import Metrics, Run, latest_run
from jaxkernels.models.tokenizer import ByteTokenizer
from jaxkernels.models.training import Trainer, TrainState, cross_entropy
from jaxkernels.models.transformer import Transformer
from jaxkernels.triton import calls

MODEL = ModelConfig(
    vocab_size=256, num_layers=1, embed_dim=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_dim=48, dtype="float32"
)
CONFIG = TrainingConfig(
    preset="tiny",
    model=MODEL,
    tokenizer="bytes",
    data=None,
    steps=12,
    batch_size=8,
    sequence_length=16,
    learning_rate=1e-2,
    eval_every=6,
    eval_batches=2,
    checkpoint_every=4,
    log_every=3,
)
TEXT = "".join(f"{i} plus {i} is {2 * i}, and {i} times {i} is {i * i}.\n" for i in range(400))
ROOT = pathlib.Path(training.__file__).parent.parent


@functools.cache
def trainer(config: TrainingConfig = CONFIG, num_devices: int = 1) -> Trainer:
    return Trainer(config, jax.devices("cpu")[:num_devices])


@pytest.fixture(autouse=True, scope="module")
def _shared() -> Iterator[None]:
    """Shared by the runs of this module: the token cache, and the trainers, which take long to compile."""
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        patch.setenv("JAXKERNELS_CACHE_DIR", folder)
        compiled = lambda config, devices: trainer(dataclasses.replace(config, data=None, init_from=None), len(devices))
        patch.setattr(training, "Trainer", compiled)
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> pathlib.Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


def batch(config: TrainingConfig = CONFIG, seed: int = 0) -> np.ndarray:
    shape = (config.batch_size, config.sequence_length + 1)
    return np.random.default_rng(seed).integers(256, size=shape).astype(np.int32)


def quiet() -> Console:
    return Console(file=io.StringIO(), soft_wrap=True)


def train(config: TrainingConfig, out: pathlib.Path, console: Console | None = None) -> Run:
    return training.train(config, out=out, devices=jax.devices("cpu")[:1], console=console or quiet())


def losses(run: Run) -> dict[tuple[int, str], float]:
    """Every loss of metrics.jsonl by its step and name; no line may repeat another."""
    found = {}
    for row in run.metrics().read():
        name = "loss" if "loss" in row else "validation_loss"
        assert (row["step"], name) not in found
        found[row["step"], name] = row[name]
    return found


# The step.


def test_step_lowers_the_loss_of_a_batch_it_sees_again_and_again():
    t = trainer()
    state, seen = t.init_state(), []
    for _ in range(12):
        state, metrics = t.step(state, t.put(batch()))
        seen.append(float(metrics["loss"]))
    assert abs(seen[0] - math.log(256)) < 0.1
    assert seen[-1] < 0.75 * seen[0]
    assert int(state.step) == 12


def test_step_donates_its_state():
    t = trainer()
    old = t.init_state()
    new, _ = t.step(old, t.put(batch()))
    assert all(x.is_deleted() for x in jax.tree.leaves((old.params, old.opt_state)))
    assert not any(x.is_deleted() for x in jax.tree.leaves(new))


def test_step_is_adamw_on_clipped_gradients():
    config = dataclasses.replace(CONFIG, clip_norm=0.1, weight_decay=0.3, learning_rate=1e-3)
    t = trainer(config)
    state = t.init_state()
    grads = compile_quickly(jax.grad(t._loss))(state.params, batch())
    norm = math.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)))
    rate = 1e-3  # one step of warm-up: the first step has the peak already

    def updated(path: Any, p: jax.Array, g: jax.Array) -> jax.Array:
        g = g * 0.1 / norm
        decay = 0.0 if path[-1].key == "scale" else 0.3 * p
        return p - rate * (g / (jnp.abs(g) + 1e-8) + decay)  # Adam's first step is the gradient's sign

    expected = jax.tree.map_with_path(updated, state.params, grads)
    new, metrics = t.step(state, t.put(batch()))
    assert norm > 0.1
    np.testing.assert_allclose(float(metrics["grad_norm"]), norm, rtol=1e-5)
    np.testing.assert_allclose(float(metrics["learning_rate"]), rate, rtol=1e-6)
    assert_close(new.params, expected)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("scan", [False, True])
def test_adafactor_factors_the_second_moment(scan):
    """The first step, in the formulas of the paper: the second moment is the product of its row and column means."""
    model = dataclasses.replace(CONFIG.model, embed_dim=128, mlp_dim=160, scan=scan)
    config = dataclasses.replace(CONFIG, model=model, optimizer="adafactor", weight_decay=0.3, learning_rate=1e-3)
    t = trainer(config)
    state = t.init_state()
    grads = compile_quickly(jax.grad(t._loss))(state.params, batch())
    norm = math.sqrt(sum(float(jnp.sum(g * g)) for g in jax.tree.leaves(grads)))

    def updated(path: Any, p: jax.Array, g: jax.Array) -> jax.Array:
        g = g * min(1.0, config.clip_norm / norm)
        is_matrix = path[-1].key != "scale"
        squares = g * g
        if is_matrix and min(g.shape[-2:]) >= 128:
            row, column = jnp.mean(squares, axis=-1, keepdims=True), jnp.mean(squares, axis=-2, keepdims=True)
            squares = row * column / jnp.mean(squares, axis=(-2, -1), keepdims=True)
        moment = (0.1 * g / jnp.sqrt(squares)).astype(jnp.float32)
        return p - 1e-3 * (moment + (0.3 * p if is_matrix else 0.0))

    expected = jax.tree.map_with_path(updated, state.params, grads)
    new, _ = t.step(state, t.put(batch()))
    assert_close(new.params, expected, rtol=1e-4)
    matrices = [x.nbytes for x in jax.tree.leaves(new.opt_state) if x.dtype == jnp.bfloat16]
    assert sum(matrices) == 2 * config.model.num_params


def test_learning_rate_warms_up_and_decays():
    config = dataclasses.replace(CONFIG, steps=400)
    schedule = training.learning_rate(config)
    assert config.warmup_steps == 20
    rates = [float(schedule(step)) for step in (0, 9, 20, 210, 400)]
    np.testing.assert_allclose(rates, [0.0005, 0.004775, 0.01, 0.0055, 0.001], rtol=1e-4)


def test_cross_entropy_is_computed_in_float32():
    logits = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 7)), jnp.bfloat16)
    targets = np.array([[0, 6, 3], [1, 1, 2]])
    exact = optax.softmax_cross_entropy_with_integer_labels(np.asarray(logits, np.float64), targets).mean()
    assert cross_entropy(logits, targets).dtype == jnp.float32
    np.testing.assert_allclose(cross_entropy(logits, targets), exact, rtol=1e-6)


def test_initial_state_is_a_function_of_the_seed():
    seeded = lambda seed: nnx.Rngs(params=seed)
    params = trainer().init_state().params
    for seed, same in ((0, True), (1, False)):
        model = jax.jit(lambda seed=seed: nnx.state(Transformer(MODEL, rngs=seeded(seed)), nnx.Param))()
        assert np.array_equal(params["embedding"], nnx.to_pure_dict(model)["embedding"]) == same


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("kernels", ["opaque", "xla"])
def test_eight_devices_compute_what_one_does(kernels, opaque):
    config = dataclasses.replace(CONFIG, model=dataclasses.replace(MODEL, backend=kernels))
    results = []
    for num_devices in (1, 8):
        t = trainer(config, num_devices)
        state, metrics = t.step(t.init_state(), t.put(batch()))
        gradients = state.opt_state[1][0].mu  # Adam's first moment is a tenth of them; the step is but their sign.
        assert {len(x.sharding.device_set) for x in jax.tree.leaves(state)} == {num_devices}
        results.append((metrics, jax.tree.map(lambda x: 10 * x, gradients)))
    assert_close(*results)


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize("num_devices", [1, 8])
@pytest.mark.parametrize("tied", [True, False])
def test_chunked_loss_and_its_gradients_are_those_of_stored_logits(num_devices, tied):
    """Up to rounding."""
    model = dataclasses.replace(MODEL, tied_embedding=tied)
    results = []
    for chunked in (False, True):
        t = trainer(dataclasses.replace(CONFIG, model=model, chunked_loss=chunked), num_devices)
        state, metrics = t.step(t.init_state(), t.put(batch()))
        results.append((metrics, jax.tree.map(lambda x: 10 * x, state.opt_state[1][0].mu)))
        np.testing.assert_allclose(t.loss(t.init_state().params, t.put(batch())), metrics["loss"], rtol=1e-5)
    assert_close(*results)


@pytest.mark.parametrize(
    ("target", "chunked", "named", "stored"),
    [
        ("NVIDIA H200", None, None, calls.missing() is not None),
        ("NVIDIA H200", None, "cuda", True),
        ("NVIDIA H200", True, "cuda", False),
        ("NVIDIA H200", False, None, True),
        ("NVIDIA A100-SXM4-80GB", None, None, True),
    ],
)
def test_logits_are_stored_unless_a_kernel_computes_the_loss(target, chunked, named, stored, monkeypatch):
    monkeypatch.setenv("JAXKERNELS_TARGET", target)
    config = training_config("124m", platform="gpu", chunked_loss=chunked, backend=named)
    assert memory.stores_logits(config, types.SimpleNamespace(platform="gpu")) == stored
    assert memory.stores_logits(config, jax.devices("cpu")[0]) == (not chunked)


@pytest.mark.gpu
def test_steps_on_a_gpu_are_repeatable_bit_for_bit():
    model = dict(embed_dim=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=512, dtype="bfloat16")
    config = dataclasses.replace(CONFIG, sequence_length=256, model=dataclasses.replace(MODEL, **model))
    results = []
    for _ in range(2):
        t = Trainer(config, jax.devices()[:1])
        state = t.init_state()
        for seed in range(5):
            state, metrics = t.step(state, t.put(batch(config, seed)))
        results.append((state, metrics))
    assert_same_bits(*results)


def test_batch_that_cannot_be_split_over_the_devices_is_refused():
    with pytest.raises(InputError) as e:
        Trainer(dataclasses.replace(CONFIG, batch_size=12), jax.devices("cpu")[:8])
    assert str(e.value) == (
        "train: --batch-size must be a multiple of the number of devices (8); got 12. "
        "Change it, or use fewer devices with --devices."
    )


# A run.


def test_run_leaves_its_files_and_its_losses_fall(tmp_path, text):
    console = Console(file=io.StringIO(), width=200)
    config = dataclasses.replace(CONFIG, data=str(text), steps=60, eval_every=20, checkpoint_every=30, log_every=7)
    run = train(config, tmp_path / "run", console)
    names = {path.name for path in run.folder.iterdir()}
    assert names == {".lock", "checkpoints", "config.json", "loss.png", "metrics.jsonl", "sample.txt"}
    assert {path.name for path in (run.folder / "checkpoints").iterdir()} == {"30", "60"}
    assert Run.open(run.folder) == run

    found = losses(run)
    assert sorted(step for step, name in found if name == "loss") == list(range(1, 61))
    assert sorted(step for step, name in found if name == "validation_loss") == [0, 20, 40, 60]
    assert abs(found[0, "validation_loss"] - math.log(256)) < 0.1
    assert found[60, "validation_loss"] < 3.2
    rows = [row for row in run.metrics().read() if "loss" in row]
    assert list(rows[0]) == [
        "step",
        "loss",
        "grad_norm",
        "learning_rate",
        "tokens_per_s",
    ]  # The peak of a CPU, and so its MFU, is not known.

    with Image.open(run.folder / "loss.png") as image:
        assert image.size == (1200, 675)
        assert len(image.convert("RGB").getcolors(1 << 20)) > 50
    sample = (run.folder / "sample.txt").read_text()
    output = console.file.getvalue()
    assert sample in output
    for expected in ("step 20/60  validation loss", "tokens/s", "ETA 0:00"):
        assert expected in output


def test_progress_shows_mfu_where_the_peak_is_known(tmp_path, text, monkeypatch):
    monkeypatch.setattr(training, "peak_flops_per_s", lambda device, dtype: 1e12)
    console = Console(file=io.StringIO(), width=200)
    run = train(dataclasses.replace(CONFIG, data=str(text)), tmp_path / "run", console)
    for row in run.metrics().read():
        if "loss" in row:
            assert math.isclose(row["mfu"], row["tokens_per_s"] * MODEL.flops_per_token(16) / 1e12)
    assert "MFU 0." in console.file.getvalue()


def test_peak_is_that_of_the_compute_dtype(monkeypatch):
    monkeypatch.setattr(hardware, "chip_of", lambda device: hardware.lookup("NVIDIA H200"))
    assert training.peak_flops_per_s(None, "bfloat16") == 989.4e12
    assert training.peak_flops_per_s(None, "float32") == 494.7e12


def test_losses_are_a_function_of_the_seed(tmp_path, text):
    config = dataclasses.replace(CONFIG, data=str(text))
    first, second = (losses(train(config, tmp_path / name)) for name in ("first", "second"))
    assert first == second
    other = losses(train(dataclasses.replace(config, seed=1), tmp_path / "other"))
    assert other.keys() == first.keys()
    assert not set(other.values()) & set(first.values())


def test_sample_from_a_run_continues_the_prompt_the_same_way_each_time(finished):
    options = dict(num_tokens=24, temperature=1.0, top_k=None)
    sample = functools.partial(sampling.text_from_run, finished, **options)
    assert sample(prompt="7 plus", seed=3) == sample(prompt="7 plus", seed=3)
    assert len({sample(prompt="7 plus", seed=3), sample(prompt="7 plus", seed=4), sample(prompt="", seed=3)}) == 3
    long = TEXT[:500]  # longer than the model's context
    assert sample(prompt=long, seed=3) == sample(prompt=long[-16:], seed=3)


def test_sample_ends_with_the_document(monkeypatch):
    _, params = sampling.abstract_params(MODEL)
    new = np.array([[72, 105, 0, 33]])
    monkeypatch.setattr(sampling, "generate", lambda *args, **options: new)
    options = dict(prompt="", num_tokens=4, num_slots=8, temperature=1.0, top_k=None, seed=0)
    assert sampling.sample_text(MODEL, params, ByteTokenizer(), **options) == "Hi"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_tokens=0), "sample: --tokens must be from 1 to 1,000,000; got 0."),
        (dict(num_tokens=10**12), "sample: --tokens must be from 1 to 1,000,000; got 1000000000000."),
        (dict(temperature=-1.0), "sample: --temperature must be 0, or finite and at least 1e-06; got -1.0."),
        (dict(temperature=math.nan), "sample: --temperature must be 0, or finite and at least 1e-06; got nan."),
        (dict(temperature=1e-40), "sample: --temperature must be 0, or finite and at least 1e-06; got 1e-40."),
        (dict(seed=-1), "sample: --seed must be from 0 to 2**32 - 1; got -1."),
        (dict(seed=10**20 - 1), "sample: --seed must be from 0 to 2**32 - 1; got 99999999999999999999."),
        (dict(prompt="\udcff"), "sample: --prompt must be UTF-8 text; got '\\udcff'."),
        (dict(top_k=0), "sample: --top-k must be at least 1; got 0."),
    ],
)
def test_impossible_sample_is_refused(change, message):
    options = dict(prompt="", num_tokens=4, num_slots=8, temperature=1.0, top_k=None, seed=0) | change
    with pytest.raises(InputError) as e:
        sampling.sample_text(MODEL, {}, ByteTokenizer(), **options)
    assert str(e.value) == message


# Killing and resuming.

LONG = dataclasses.replace(CONFIG, steps=120, checkpoint_every=20, eval_every=25)


def test_killed_and_resumed_run_logs_the_losses_of_one_that_was_not(tmp_path, text):
    config = dataclasses.replace(LONG, data=str(text))
    script = (
        "import json, pathlib, sys\n"
        "import jax\n"
        "from jaxkernels.models import training\n"
        "from jaxkernels.models.config import TrainingConfig\n"
        "from jaxkernels.models.run import Run\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "devices = jax.devices()[:1]\n"
        "if sys.argv[2] == 'train':\n"
        "    config = TrainingConfig.from_json(json.loads(sys.argv[3]))\n"
        "    training.train(config, out=folder, devices=devices)\n"
        "else:\n"
        "    training.resume(Run.open(folder), devices=devices)\n"
    )
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", script]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    settings = json.dumps(config.to_json())
    subprocess.run([*command, whole, "train", settings], env=env, check=True, stdout=subprocess.DEVNULL)

    process = subprocess.Popen([*command, killed, "train", settings], env=env, stdout=subprocess.DEVNULL)
    log, checkpoint = killed / "metrics.jsonl", killed / "checkpoints" / "20"
    deadline = time.monotonic() + 240
    while process.poll() is None and not (checkpoint.exists() and log.read_text().count("\n") > 40):
        assert time.monotonic() < deadline, "the run did not get to its 40th step and its first checkpoint"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    before = losses(Run.open(killed))
    assert not (killed / "checkpoints" / "120").exists()

    resumed = subprocess.run([*command, killed, "resume"], env=env, check=True, capture_output=True, text=True)
    first = next(line for line in resumed.stdout.splitlines() if "resumed after step" in line)
    step = int(first.split()[-1])
    assert 20 <= step < 120
    assert step % 20 == 0
    expected, actual = losses(Run.open(whole)), losses(Run.open(killed))
    assert actual == expected
    assert before.items() <= expected.items()
    assert len(before) > 40
    assert_same_bits(*(restored_params(Run.open(folder)) for folder in (whole, killed)))


def restored_params(run: Run) -> Any:
    t = trainer(dataclasses.replace(CONFIG, model=run.config.model))
    with run.checkpoints(read_only=True) as checkpoints:
        return checkpoints.restore(run.config, t.replicated, t.abstract_state().params)[0]


def test_adafactors_state_is_saved_and_resumed(tmp_path, text):
    config = dataclasses.replace(CONFIG, data=str(text), steps=4, checkpoint_every=2, optimizer="adafactor")
    run = train(config, tmp_path / "run")
    whole = losses(run)
    shutil.rmtree(run.folder / "checkpoints" / "4")
    console = quiet()
    assert losses(training.resume(run, devices=jax.devices("cpu")[:1], console=console)) == whole
    assert "resumed after step 2" in console.file.getvalue()


def test_line_cut_off_by_a_kill_is_dropped(tmp_path):
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.append([{"step": step, "loss": 1.0} for step in range(1, 6)])
    with open(metrics.path, "a") as file:
        file.write('{"step": 6, "lo')
    assert [row["step"] for row in metrics.read()] == [1, 2, 3, 4, 5]
    metrics.truncate(3)
    metrics.append([{"step": 4, "loss": 2.0}])
    assert [row["step"] for row in metrics.read()] == [1, 2, 3, 4]


@pytest.fixture(scope="module")
def finished_once(tmp_path_factory, text) -> Run:
    return train(dataclasses.replace(CONFIG, data=str(text)), tmp_path_factory.mktemp("runs") / "run")


@pytest.fixture
def finished(finished_once, tmp_path) -> Run:
    """A finished run that the test may damage."""
    return Run.open(pathlib.Path(shutil.copytree(finished_once.folder, tmp_path / "run")))


def refusal_to_resume(folder: pathlib.Path) -> str:
    with pytest.raises(InputError) as e:
        training.resume(Run.open(folder), devices=jax.devices("cpu")[:1], console=quiet())
    return str(e.value)


def reconfigure(run: Run, **changes: Any) -> Run:
    """Gives a run another configuration, as the program would write it."""
    run = dataclasses.replace(run, config=dataclasses.replace(run.config, **changes))
    run.save_config()
    return run


def sample(run: Run, **options: Any) -> str:
    defaults = dict(prompt="", num_tokens=4, temperature=1.0, top_k=None, seed=0)
    return sampling.text_from_run(Run.open(run.folder), **defaults | options)


def test_run_without_a_checkpoint_starts_again(finished):
    before = losses(finished)
    shutil.rmtree(finished.folder / "checkpoints")
    with pytest.raises(InputError) as e:
        sample(finished)
    assert str(e.value) == (
        f"run: {finished.folder} holds no checkpoint yet. Train it with `jaxkernels train --resume "
        f"--out {finished.folder}`."
    )
    console = quiet()
    training.resume(finished, devices=jax.devices("cpu")[:1], console=console)
    assert f"{finished.folder}: has no checkpoint yet; starting again from the first step\n" in console.file.getvalue()
    assert losses(finished) == before


def test_checkpoint_of_another_model_is_refused(finished):
    reconfigure(finished, model=dataclasses.replace(MODEL, embed_dim=64, num_kv_heads=4))
    message = (
        f"run: the checkpoint of step 12 in {finished.folder} is of another model: embed_dim=32 in the checkpoint, "
        "64 in config.json; num_kv_heads=2 in the checkpoint, 4 in config.json."
    )
    assert refusal_to_resume(finished.folder) == message
    with pytest.raises(InputError) as e:
        sample(finished)
    assert str(e.value) == message


def test_run_is_not_resumed_on_another_text(finished, tmp_path):
    (tmp_path / "other.txt").write_text(TEXT + "more\n")
    reconfigure(finished, data=str(tmp_path / "other.txt"))
    assert refusal_to_resume(finished.folder) == (
        f"data: the text differs from the text that {finished.folder} was started with. Restore it, or start a new run."
    )


def test_resuming_a_finished_run_changes_no_loss(finished):
    before = losses(finished)
    training.resume(finished, devices=jax.devices("cpu")[:1], console=quiet())
    assert losses(finished) == before


def test_damaged_config_is_refused(finished):
    path = finished.folder / "config.json"
    path.write_text('{"data_key": "x", "model": {}}')
    with pytest.raises(InputError, match=f"run: {path} is not a run's configuration: "):
        Run.open(finished.folder)
    path.write_text("[]")
    with pytest.raises(InputError, match=f"run: {path} is not a run's configuration: "):
        Run.open(finished.folder)


# Interrupts.


def change_steps(monkeypatch: pytest.MonkeyPatch, change: Callable[[int, TrainState, dict], tuple]) -> None:
    """Every trainer's step passes what it returns through `change(number of the step, state, metrics)`."""
    compiled = training.Trainer

    def changed(config: TrainingConfig, devices: Any) -> Trainer:
        t = copy.copy(compiled(config, devices))
        step = t.step

        def run(state: TrainState, batch: jax.Array) -> tuple:
            number = int(state.step) + 1
            return change(number, *step(state, batch))

        t.step = run
        return t

    monkeypatch.setattr(training, "Trainer", changed)


@pytest.fixture
def sigint() -> Iterator[None]:
    """SIGINT as at a terminal; a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("sigint")
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_saves_and_the_advice_continues_to_the_same_losses(signum, finished, tmp_path, monkeypatch):
    before = signal.getsignal(signum)

    def interrupt(number: int, *result: Any) -> tuple:
        if number == 2:  # The first checkpoint is due after step 4.
            signal.raise_signal(signum)
        return result

    console = quiet()
    with monkeypatch.context() as patch:
        change_steps(patch, interrupt)
        with pytest.raises(Interrupted) as e:
            train(finished.config, tmp_path / "stopped", console)
    assert e.value.signum == signum
    assert signal.getsignal(signum) == before
    folder = tmp_path / "stopped"
    assert console.file.getvalue().endswith(
        f"{folder}: saved after step 2\ninterrupted; to continue: jaxkernels train --resume --out {folder}\n"
    )
    assert sample(Run.open(folder))
    training.resume(Run.open(folder), devices=jax.devices("cpu")[:1], console=quiet())
    assert losses(Run.open(folder)) == losses(finished)


@pytest.mark.usefixtures("sigint")
def test_second_interrupt_stops_at_once_and_the_advice_still_works(finished, tmp_path, monkeypatch):
    def interrupt(number: int, *result: Any) -> tuple:
        if number == 2:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return result

    folder = tmp_path / "stopped"
    with monkeypatch.context() as patch:
        change_steps(patch, interrupt)
        with pytest.raises(Interrupted):
            train(finished.config, folder)
    assert not list((folder / "checkpoints").iterdir())
    training.resume(Run.open(folder), devices=jax.devices("cpu")[:1], console=quiet())
    assert losses(Run.open(folder)) == losses(finished)


# Losses that are not finite.


@pytest.mark.parametrize(
    ("first_bad", "message"),
    [
        (6, "train: the loss is nan at step 7."),
        (8, "train: the loss after the step is nan at step 8."),  # A checkpoint is due after step 8.
    ],
)
def test_training_stops_at_the_first_loss_that_is_not_finite(first_bad, message, finished, tmp_path, monkeypatch):
    def spoil(number: int, state: TrainState, metrics: dict) -> tuple:
        if number == first_bad:
            state = dataclasses.replace(state, params=jax.tree.map(lambda x: x * jnp.nan, state.params))
        return state, metrics

    change_steps(monkeypatch, spoil)
    config = dataclasses.replace(finished.config, eval_every=12)
    with pytest.raises(InputError) as e:
        train(config, tmp_path / "new")
    assert str(e.value) == (
        f"{message} Start again with a smaller --learning-rate than 0.01. The newest checkpoint is of step 4; "
        f"--init-from {tmp_path / 'new'} starts a run from its weights."
    )
    run = Run.open(tmp_path / "new")
    assert [path.name for path in (run.folder / "checkpoints").iterdir()] == ["4"]
    assert [step for step, _ in losses(run)] == [*range({6: 7, 8: 9}[first_bad])]
    assert all(map(math.isfinite, losses(run).values()))


# Damage.


def checkpoint_of(step: int) -> tuple[Any, dict[str, Any]]:
    """A state that differs from the states of other steps."""
    state = trainer().abstract_state()
    rng = np.random.default_rng(step)
    full = lambda x: jnp.asarray(rng.standard_normal(x.shape) * 100, x.dtype)
    state = jax.tree.map(full, state)
    return state.params, dict(opt_state=state.opt_state, step=jnp.int32(step))


DAMAGES = dict(
    truncated=lambda path: os.truncate(path, path.stat().st_size // 2),
    flipped=lambda path: path.write_bytes(
        (b := path.read_bytes())[: len(b) // 2] + bytes([b[len(b) // 2] ^ 0x10]) + b[len(b) // 2 + 1 :]
    ),
    deleted=os.unlink,
)


def test_damaged_newest_checkpoint_is_passed_over(tmp_path, capfd):
    """Each file of it is damaged in one of three ways: its state is right, or the one before is taken."""
    states = {step: checkpoint_of(step) for step in (8, 12)}
    sound = tmp_path / "sound" / "checkpoints"
    with Checkpoints(sound) as checkpoints:
        for step, state in states.items():
            checkpoints.save(step, CONFIG, *state)
    files = [path.relative_to(sound) for path in sorted(sound.glob("12/**/*")) if path.is_file()]
    shapes = jax.eval_shape(lambda: states[12])
    num_passed_over = 0
    for (name, damage), file in zip(itertools.cycle(DAMAGES.items()), files):
        folder = tmp_path / "damaged" / "checkpoints"
        shutil.copytree(sound, folder)
        damage(folder / file)
        lines = []
        with Checkpoints(folder, log=lines.append) as checkpoints:
            restored = checkpoints.restore(CONFIG, trainer().replicated, *shapes)
        step = int(restored[1]["step"])
        assert_same_bits(restored, states[step])
        assert len(lines) == (step == 8), (name, file, lines)
        if step == 8:
            num_passed_over += 1
            assert lines[0].startswith("the checkpoint of step 12 is damaged ("), (name, file)
            assert lines[0].endswith("); using the one of step 8")
            assert (folder.parent / "damaged" / "12").exists()
            assert not (folder / "12").exists()
        shutil.rmtree(folder.parent)
    assert num_passed_over > 5
    assert capfd.readouterr() == ("", "")


def test_damaged_run_is_resumed_and_sampled(finished):
    """A checkpoint whose arrays are gone, one that is an empty folder, and metrics with garbage."""
    before = losses(finished)
    checkpoints = finished.folder / "checkpoints"
    shutil.rmtree(checkpoints / "12" / "params")
    (checkpoints / "16").mkdir()
    (finished.folder / "metrics.jsonl").write_bytes(
        b'\xff\x00garbage\n[]\n{"step": "x"}\n' + (finished.folder / "metrics.jsonl").read_bytes() + b'{"step": 13, "lo'
    )
    lines = []
    assert sample(finished, log=lines.append)
    assert len(lines) == 2
    console = quiet()
    training.resume(finished, devices=jax.devices("cpu")[:1], console=console)
    output = console.file.getvalue()
    assert f"{finished.folder}: resumed after step 8\n" in output
    assert f"{finished.folder / 'metrics.jsonl'}: removed 3 damaged lines\n" in output
    assert losses(finished) == before
    assert {path.name for path in checkpoints.iterdir()} == {"8", "12"}
    assert {path.name for path in (finished.folder / "damaged").iterdir()} == {"12", "16"}


def test_no_sound_checkpoint_is_one_clear_error(finished):
    for path in (finished.folder / "checkpoints").glob("*/config"):
        shutil.rmtree(path)
    with pytest.raises(
        InputError, match=r"^run: every checkpoint in .*checkpoints is damaged: step 12: .*; step 8: .*\. "
    ):
        sample(finished)


def test_disk_that_is_full_while_saving_loses_nothing(finished, tmp_path, monkeypatch):
    """Files can grow to a few bytes only, at first after the first checkpoint; then again at the last one."""
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    full = functools.partial(resource.setrlimit, resource.RLIMIT_FSIZE)
    save = Checkpoints.save

    def save_to_full_disk(self: Checkpoints, step: int, *state: Any) -> None:
        if step not in full_at:
            return save(self, step, *state)
        self.wait()
        full((4096, limits[1]))
        try:
            save(self, step, *state)
            self.wait()
        finally:
            full(limits)

    monkeypatch.setattr(Checkpoints, "save", save_to_full_disk)
    full_at = {8}
    console = quiet()
    run = train(finished.config, tmp_path / "new", console)
    assert f"{run.folder}: the checkpoint of step 8 could not be written: File too large.\n" in console.file.getvalue()
    assert complete_steps(run.folder / "checkpoints") == [12, 4]
    assert losses(run) == losses(finished)

    full_at = {12}
    with pytest.raises(InputError) as e:
        train(finished.config, tmp_path / "other")
    assert str(e.value) == (
        "run: the checkpoint of step 12 could not be written: File too large. The newest checkpoint is of step 8. "
        "Free some disk space, then continue the run with --resume."
    )
    other = Run.open(tmp_path / "other")
    assert complete_steps(other.folder / "checkpoints") == [8, 4]
    full_at = {}
    training.resume(other, devices=jax.devices("cpu")[:1], console=quiet())
    assert losses(other) == losses(finished)


# One process at a time.


def test_run_that_another_process_trains_is_refused(finished):
    script = (
        "import pathlib, sys, filelock\n"
        "lock = filelock.FileLock(pathlib.Path(sys.argv[1], '.lock'))\n"
        "lock.acquire()\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", script, finished.folder]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "locked\n"
        assert refusal_to_resume(finished.folder) == (
            f"run: another process is training {finished.folder}. Wait until it ends, or stop it. "
            "`jaxkernels sample` works meanwhile."
        )
        assert sample(finished)
    finally:
        process.kill()
        process.communicate()
    training.resume(finished, devices=jax.devices("cpu")[:1], console=quiet())  # A dead process locks nothing.


# Other settings for the same weights.


def test_run_is_prolonged(finished):
    before = losses(finished)
    prolong = functools.partial(training.resume, devices=jax.devices("cpu")[:1], console=quiet())
    run = prolong(finished, steps=20, eval_every=10)
    assert Run.open(run.folder).config == dataclasses.replace(finished.config, steps=20, eval_every=10)
    found = losses(run)
    assert before.items() <= found.items()
    assert sorted(step for step, name in found if name == "loss") == list(range(1, 21))
    rates = {row["step"]: row["learning_rate"] for row in run.metrics().read() if "loss" in row}
    np.testing.assert_allclose(rates[13], float(training.learning_rate(run.config)(12)), rtol=1e-6)
    with pytest.raises(InputError) as e:
        prolong(run, steps=19)
    assert str(e.value) == "train: --steps must be at least 20, the step of the newest checkpoint; got 19."
    with pytest.raises(InputError) as e:
        prolong(run, seed=1)
    assert str(e.value) == "train: only data, steps, eval_every, checkpoint_every can change; got seed."


def test_run_starts_from_the_weights_of_another(finished, tmp_path):
    config = training.warm_config(finished, learning_rate=1e-3, steps=None)
    assert config == dataclasses.replace(finished.config, learning_rate=1e-3, init_from=str(finished.folder))
    config = training.warm_config(finished)
    run = train(config, tmp_path / "warm")
    assert losses(run)[0, "validation_loss"] == losses(finished)[12, "validation_loss"]
    assert losses(run)[12, "validation_loss"] < losses(finished)[12, "validation_loss"]
    with pytest.raises(InputError) as e:
        training.warm_config(finished, tokenizer="bpe", mlp_dim=99)
    assert str(e.value) == (
        f"train: the weights of {finished.folder} are of another model: mlp_dim=48 there, 99 here; "
        "tokenizer='bytes' there, 'bpe' here. Leave these options out, or start without --init-from."
    )


def test_config_that_was_edited_is_refused(finished):
    path = finished.folder / "config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"steps": 20, "model": values["model"] | {"rope_theta": 5.0}}))
    with pytest.raises(InputError) as e:
        Run.open(finished.folder)
    assert str(e.value) == (
        f"run: {path} was changed by hand: it differs from its checksum (steps=12 in the checkpoint, 20 now; "
        "rope_theta=10000.0 in the checkpoint, 5.0 now). Undo the change. `train --resume` can change --steps, --data, "
        "--eval-every and --checkpoint-every. Other settings need a new run (--init-from copies the weights)."
    )
    path.write_text(json.dumps(values, indent=7))  # The same values.
    assert Run.open(finished.folder) == finished


@pytest.mark.parametrize("deterministic", [True, False])
def test_equal_runs_measure_no_backends(deterministic, monkeypatch):
    """Two measurements may find different kernels fastest."""
    kernels = {"matmul", "attention_forward", "attention_backward"}
    estimates = lambda op, spec, names: dict.fromkeys([*names, "cuda"], 1e-3) if op in kernels else {}
    monkeypatch.setattr(dispatch, "_estimates", estimates)
    measured = []
    monkeypatch.setenv("JAXKERNELS_AUTOTUNE", "1")
    monkeypatch.setattr(dispatch, "_compare", lambda op, spec, backends: measured.append(op))
    Trainer(dataclasses.replace(CONFIG, deterministic=deterministic), jax.devices("cpu")[:1])
    assert {*measured} == (set() if deterministic else kernels)


# The program of a GPU.


@needs_aot
def test_scan_runs_no_kernel_twice(monkeypatch):
    """XLA may copy kernels into other computations: the jaxpr does not tell how often one runs."""
    monkeypatch.setattr(memory, "device_bytes", lambda device: None)
    monkeypatch.setattr(calls, "missing", lambda: "needs a compiler of Triton's version")
    kernel = 'custom_call_target="mosaic_gpu_v2"'

    def num_kernels(**layers: Any) -> int:
        sizes = dict(embed_dim=256, num_heads=4, num_kv_heads=2, head_dim=64, mlp_dim=512, dtype="bfloat16")
        model = dataclasses.replace(MODEL, backend="pallas", **sizes, **layers)
        config = dataclasses.replace(CONFIG, model=model, sequence_length=256, deterministic=False)
        return Trainer(config, [h200()]).step.as_text().count(kernel)

    # A loop's body is compiled once.
    unrolled = num_kernels(num_layers=1)
    assert num_kernels(num_layers=4, scan=True, remat="dots_and_attention") == unrolled > 16


# Memory.


def test_step_that_cannot_fit_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "device_bytes", lambda device: 10_000_000)
    monkeypatch.setattr(training, "_load_data", None)
    config = dataclasses.replace(CONFIG, batch_size=1000)
    with pytest.raises(InputError) as e:
        train(config, tmp_path / "new")
    assert str(e.value) == (
        "train: out of memory: a step needs at least 0.0 GB on each device, 0.0 GB of it for 15,968 parameters; cpu "
        "gives JAX 0.0 GB. Use --batch-size 528 or less or a smaller --sequence-length."
    )
    assert not (tmp_path / "new").exists()


def test_compiled_step_that_does_not_fit_names_what_would(monkeypatch):
    step = trainer().step
    monkeypatch.setattr(memory, "device_bytes", lambda device: 10**12)
    memory.check_compiled(CONFIG, trainer().devices, step)
    stats = step.memory_analysis()
    monkeypatch.setattr(memory, "device_bytes", lambda device: stats.temp_size_in_bytes)
    with pytest.raises(
        InputError, match=r"--batch-size [1-7] or less or --remat full \(less memory, more work\) or a smaller"
    ):
        memory.check_compiled(CONFIG, trainer().devices, step)
    monkeypatch.setattr(memory, "device_bytes", lambda device: 1000)
    with pytest.raises(
        InputError, match=r"gives JAX 0\.0 GB\. A batch of one sequence does not fit either: use a smaller --preset\."
    ):
        memory.check_compiled(CONFIG, trainer().devices, step)


@pytest.mark.parametrize(
    ("platform", "share", "needed", "is_named"),
    [("gpu", None, 120, True), ("gpu", None, 130, False), ("gpu", "0.9", 120, False), ("cpu", None, 120, False)],
)
def test_more_of_the_memory_is_named_where_it_is_enough(monkeypatch, platform, share, needed, is_named):
    variable = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    monkeypatch.delenv(variable, raising=False)
    if share is not None:
        monkeypatch.setenv(variable, share)
    stats = types.SimpleNamespace(
        argument_size_in_bytes=needed * 10**9, output_size_in_bytes=0, alias_size_in_bytes=0, temp_size_in_bytes=0
    )
    step: Any = types.SimpleNamespace(memory_analysis=lambda: stats)
    device = types.SimpleNamespace(
        platform=platform, device_kind="NVIDIA H200", memory_stats=lambda: {"bytes_limit": 100 * 10**9}
    )
    with pytest.raises(InputError, match=r"NVIDIA H200 gives JAX 100\.0 GB\. Use ") as e:
        memory.check_compiled(CONFIG, [device], step)
    assert (f"Use the environment variable {variable}=0.95 or --batch-size" in str(e.value)) == is_named


def test_exhausted_memory_is_explained_and_leaves_no_folder(finished, tmp_path, monkeypatch):
    def exhaust(number: int, *result: Any) -> tuple:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\nmore")

    change_steps(monkeypatch, exhaust)
    with pytest.raises(InputError) as e:
        train(finished.config, tmp_path / "new")
    assert str(e.value) == (
        "train: out of memory with --batch-size 8: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes. "
        "Use --batch-size 4 or less or --remat full (less memory, more work) or a smaller --sequence-length."
    )
    assert not (tmp_path / "new").exists()


# The output on a terminal.


def test_waiting_is_for_terminals_only():
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), force_terminal=is_terminal)
        with progress.waiting(console, "compiling"):
            time.sleep(0.15)
        assert ("compiling" in console.file.getvalue()) == is_terminal


# The folders of runs.


def test_new_run_takes_a_free_folder_and_the_latest_is_found(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError) as e:
        latest_run()
    assert str(e.value) == "run: there is no run under ./runs. Start one with `jaxkernels train`."
    for name in ("tiny", "tiny-2", "tiny-3"):
        assert Run.create(None, CONFIG, "key", ByteTokenizer()).folder == pathlib.Path("runs", name)
        os.utime(f"runs/{name}/config.json", ns=(0, 0))
    os.utime("runs/tiny-2/config.json")
    assert latest_run() == pathlib.Path("runs", "tiny-2")
    pathlib.Path("runs/tiny-3/checkpoints/4").mkdir(parents=True)
    assert latest_run() == pathlib.Path("runs", "tiny-3")  # A start that failed does not hide it.


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "config.json",
            "run: {folder} already holds a run. Continue it with --resume, or name another folder with --out.",
        ),
        ("thesis.tex", "run: {folder} is not empty. Name another folder with --out."),
    ],
)
def test_folder_in_use_is_refused_before_any_work(tmp_path, name, message, monkeypatch):
    (tmp_path / name).write_text("")
    monkeypatch.setattr(training, "_load_data", None)
    with pytest.raises(InputError) as e:
        training.train(CONFIG, out=tmp_path, console=quiet())
    assert str(e.value) == message.format(folder=tmp_path)


def test_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError) as e:
        Run.create(tmp_path / "file", CONFIG, "key", ByteTokenizer())
    assert str(e.value) == f"run: {tmp_path / 'file'} is not a folder. Name another one with --out."
    with pytest.raises(InputError) as e:
        Run.create(tmp_path / "file" / "run", CONFIG, "key", ByteTokenizer())
    assert str(e.value) == (
        f"run: cannot write {tmp_path / 'file' / 'run'}: Not a directory. Name another folder with --out."
    )


def test_folder_that_cannot_be_written_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(training, "_load_data", None)
    with pytest.raises(InputError) as e:
        training.train(CONFIG, out="/proc/run", console=quiet())
    assert str(e.value) == "run: cannot write /proc/run: No such file or directory. Name another folder with --out."
    assert not pathlib.Path("/proc/run").exists()


# Configurations.


def test_config_survives_json():
    assert TrainingConfig.from_json(json.loads(json.dumps(CONFIG.to_json()))) == CONFIG


@pytest.mark.parametrize(("old", "new"), [(False, "none"), (True, "full")])
def test_config_of_an_older_run_is_read(old, new):
    """Its remat was a bool, and it had no optimizer."""
    values = CONFIG.to_json()
    values["model"]["remat"] = old
    del values["optimizer"]
    expected = dataclasses.replace(CONFIG, model=dataclasses.replace(CONFIG.model, remat=new))
    assert TrainingConfig.from_json(values) == expected


def test_presets_become_configurations():
    tiny = training_config("tiny", platform="cpu")
    assert (tiny.model.dtype, tiny.tokenizer, tiny.model.vocab_size) == ("float32", "bytes", 256)
    large = training_config("124m", platform="gpu", steps=100, backend="xla")
    assert (large.model.dtype, large.tokenizer, large.model.vocab_size) == ("bfloat16", "bpe", 32768)
    assert (large.eval_every, large.checkpoint_every, large.model.backend) == (10, 25, "xla")
    assert training_config("tiny", platform="cpu", tokenizer="bpe").model.vocab_size == 4096
    assert training_config("124m", platform="gpu", tokenizer="bytes").model.vocab_size == 256
    assert training_config("1b", platform="gpu", scan=False).model.scan is False


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(steps=0), "TrainingConfig: steps must be a positive int; got 0."),
        (dict(optimizer="sgd"), "TrainingConfig: optimizer must be one of adamw, adafactor; got 'sgd'."),
        (
            dict(remat="all"),
            "ModelConfig: remat must be one of none, dots_and_attention, dots, attention, full; got 'all'.",
        ),
        (dict(steps=True), "TrainingConfig: steps must be an int; got True."),
        (dict(seed=-1), "TrainingConfig: seed must be an int from 0 to 2**32 - 1; got -1."),
        (dict(learning_rate=0.0), "TrainingConfig: learning_rate must be positive and finite; got 0.0."),
        (dict(learning_rate=math.inf), "TrainingConfig: learning_rate must be positive and finite; got inf."),
        (dict(learning_rate=math.nan), "TrainingConfig: learning_rate must be positive and finite; got nan."),
        (dict(learning_rate="1e-3"), "TrainingConfig: learning_rate must be a number; got '1e-3'."),
        (dict(weight_decay=-0.1), "TrainingConfig: weight_decay must be finite and not negative; got -0.1."),
        (dict(steps=2**31), "TrainingConfig: steps must be below 2**31; got 2147483648."),
        (
            dict(batch_size=10**9),
            "TrainingConfig: batch_size * (sequence_length + 1) must be below 2**31 tokens; got 1000000000 * 129.",
        ),
        (dict(tokenizer="words"), 'TrainingConfig: tokenizer must be "bytes" or "bpe"; got \'words\'.'),
        (
            dict(vocab_size=512),
            "train: --vocab-size needs --tokenizer bpe, as a byte vocabulary has 256 entries; got 512.",
        ),
    ],
)
def test_impossible_training_is_refused(options, message):
    with pytest.raises(InputError) as e:
        training_config("tiny", platform="cpu", **options)
    assert str(e.value) == message


#: A value that no field of the type takes, and how the message names the type.
WRONG = {
    "int": (2.0, "an int"),
    "float": ("1e-3", "a number"),
    "bool": (1, "True or False"),
    "bool | None": (1, "True or False or None"),
    "str": (3, "a string"),
    "str | None": (3, "a string or None"),
    "ModelConfig": ({}, "a ModelConfig"),
}


@pytest.mark.parametrize("config", [CONFIG, MODEL], ids=["training", "model"])
def test_every_field_refuses_another_type(config):
    for field in dataclasses.fields(config):
        value, expected = WRONG[field.type]
        with pytest.raises(InputError) as e:
            dataclasses.replace(config, **{field.name: value})
        assert str(e.value) == f"{type(config).__name__}: {field.name} must be {expected}; got {value!r}."


@pytest.mark.parametrize("devices", [[], 3, ["cpu"]])
def test_devices_that_are_none_are_refused(devices, tmp_path):
    with pytest.raises(InputError) as e:
        training.train(CONFIG, out=tmp_path / "run", devices=devices, console=quiet())
    assert str(e.value) == (
        f"train: devices must be a sequence of at least one JAX device, or None for all; got {devices!r}."
    )
