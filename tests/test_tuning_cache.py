"""Winners on disk: other processes find them; they are written atomically; damaged ones are ignored, with a warning."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxkernels.core import dispatch, hardware, winners
from jaxkernels.core.dispatch import Entry
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.attention.spec import AttentionSpec
from jaxkernels.ops.matmul.spec import MatmulSpec

ROOT = pathlib.Path(winners.__file__).parent.parent.parent
H200 = hardware.lookup("NVIDIA H200")


def make_spec(m: int = 5, target: hardware.Chip = H200, **options: Any) -> MatmulSpec:
    array = lambda *shape: ArrayType(shape, jnp.dtype(jnp.bfloat16))
    return MatmulSpec(array(m, 7), array(7, 3), (((1,), (0,)), ((), ())), jnp.dtype(jnp.bfloat16), target, **options)


@dataclasses.dataclass(frozen=True)
class Config:
    block: int = 64
    order: str = "m"

    def __post_init__(self) -> None:
        if self.block % 64:
            raise ValueError(f"matmul[fake]: block must be a multiple of 64; got {self.block}.")


@pytest.fixture
def fake(registry, monkeypatch, tmp_path) -> types.ModuleType:
    """A backend that stands before the others, whose model prefers small blocks; and an empty cache."""
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path))
    module = types.ModuleType("backend_fake")
    module.Config = Config
    module.VERSION = 3
    module.unsupported = lambda spec: None
    module.search_space = lambda spec: [Config(block, order) for block in (64, 128, 256) for order in "mn"]
    module.estimate = lambda spec, config: config.block * 1e-6
    monkeypatch.setitem(sys.modules, module.__name__, module)
    others = dict(registry)
    registry.clear()
    registry.update({("matmul", "fake"): Entry((module.__name__,))} | others)
    monkeypatch.setattr(winners, "_memo", {})
    return module


@pytest.fixture
def forget(monkeypatch) -> Callable[[], None]:
    """Makes this process one that has just started."""
    return lambda: monkeypatch.setattr(winners, "_memo", {})


def chosen(spec: MatmulSpec | None = None, backend: str | None = "fake") -> tuple[Any, str]:
    choice = dispatch.choose("matmul", spec or make_spec(), backend)
    return choice.config, choice.source


def files(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


WINNER = Config(256, "n")


def store(spec: MatmulSpec | None = None, config: Config = WINNER) -> None:
    dispatch.store_winner("matmul", "fake", spec or make_spec(), config, 1e-6)


def test_winner_is_taken_instead_of_the_default(fake, forget):
    assert chosen() == (Config(64, "m"), "default")
    store()
    assert chosen() == (WINNER, "tuned")
    forget()
    assert chosen() == (WINNER, "tuned")
    given = dispatch.choose("matmul", make_spec(), "fake", Config(128))
    assert (given.config, given.source) == (Config(128), "given")


def test_a_process_keeps_to_its_first_choice(fake, forget, tmp_path):
    """Later changes by other processes have no effect: the same call gets the same kernel."""
    store()
    (path,) = files(tmp_path)
    text = path.read_text()
    forget()
    assert chosen() == (WINNER, "tuned")
    path.unlink()
    assert chosen() == (WINNER, "tuned")
    forget()
    assert chosen()[1] == "default"
    path.write_text(text)
    assert chosen()[1] == "default"


def test_alpha_of_one_leaves_keys_as_they_were():
    key = lambda **options: winners.Key(H200, "matmul", make_spec(**options), "fake", 3).describe()["spec"]
    assert key(alpha=1.0) == key() == {name: value for name, value in key(alpha=0.5).items() if name != "alpha"}
    assert key(alpha=0.5)["alpha"] == 0.5


def test_entry_says_in_clear_what_it_is(fake, tmp_path):
    store(make_spec(bias=ArrayType((3,), jnp.dtype(jnp.float32)), activation="gelu"))
    (path,) = files(tmp_path)
    assert path.parent == tmp_path / "tuning" / "nvidia_h200" / "matmul-fake-v3"
    assert json.loads(path.read_text()) == {
        "key": {
            "device": "NVIDIA H200",
            "num_sms": 132,
            "op": "matmul",
            "backend": "fake",
            "version": 3,
            "spec": {
                "lhs": "bf16[5,7]",
                "rhs": "bf16[7,3]",
                "dimension_numbers": [[[1], [0]], [[], []]],
                "out_dtype": "bfloat16",
                "bias": "f32[3]",
                "activation": "gelu",
            },
        },
        "winner": {"block": 256, "order": "n"},
        "seconds": 1e-6,
    }


def test_every_part_of_the_key_counts(fake):
    store()
    others = {
        "size": make_spec(m=6),
        "epilogue": make_spec(activation="gelu"),
        "precision": make_spec(precision=(jax.lax.Precision.HIGHEST,) * 2),
        "device": make_spec(target=dataclasses.replace(H200, name="NVIDIA H100 PCIe")),
        "part of a device": make_spec(target=dataclasses.replace(H200, num_sms=60)),
    }
    for what, spec in others.items():
        assert chosen(spec)[1] == "default", what
    fake.VERSION = 4
    assert chosen()[1] == "default"


def test_keys_of_all_kinds_of_specs():
    """Precisions and attentions have a form too; a size that is not known yet has none."""
    key = lambda spec: winners.Key(H200, "op", spec, "fake", 1).describe()
    pair = make_spec(precision=(jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST))
    preset = make_spec(precision=jax.lax.DotAlgorithmPreset.DEFAULT)
    algorithm = make_spec(precision=jax.lax.DotAlgorithm(jnp.float16, jnp.float16, jnp.float32))
    assert key(pair)["spec"]["precision"] == ["Precision.DEFAULT", "Precision.HIGHEST"]
    assert key(preset)["spec"]["precision"] == "DotAlgorithmPreset.DEFAULT"
    assert key(algorithm)["spec"]["precision"][0] == "float16"
    heads = ArrayType((2, 5, 4, 8), jnp.dtype(jnp.float16))
    attention = AttentionSpec(heads, heads, heads, scale=0.125, target=H200, window=(None, 3), segments=True)
    assert key(attention)["spec"] == {
        **dict.fromkeys("qkv", "f16[2,5,4,8]"),
        "scale": 0.125,
        "window": [None, 3],
        "segments": True,
    }
    (size,) = jax.export.symbolic_shape("b")
    assert key(make_spec(m=size)) is None
    with pytest.raises(ValueError, match="has a symbolic size; only specs of static shapes can be kept"):
        dispatch.store_winner("matmul", "xla", make_spec(m=size), dispatch.default_config("matmul", "xla", pair), 1.0)


def replaced(change: Callable[[dict[str, Any]], Any]) -> Callable[[str], str]:
    def corrupt(text: str) -> str:
        entry = json.loads(text)
        change(entry)
        return json.dumps(entry)

    return corrupt


DAMAGE: dict[str, tuple[Callable[[str], str], str]] = {
    "empty": (lambda text: "", "it is not JSON"),
    "truncated": (lambda text: text[: len(text) // 2], "it is not JSON"),
    "deeply nested": (lambda text: "[" * 100_000, "it is not JSON"),
    "foreign JSON": (lambda text: '{"block": 64}', "it is not an entry of this cache"),
    "a list": (lambda text: f"[{text}]", "it is not an entry of this cache"),
    "a further field": (replaced(lambda e: e.update(more=1)), "it is not an entry of this cache"),
    "another key": (
        replaced(lambda e: e["key"]["spec"].update(lhs="bf16[5,8]")), "it is for another key than its name says"
    ),
    "another version": (replaced(lambda e: e["key"].update(version=2)), "it is for another key than its name says"),
    "no winner": (replaced(lambda e: e.update(winner=None)), "it holds no configuration"),
    "unknown knob": (
        replaced(lambda e: e["winner"].update(unroll=2)),
        "{'block': 256, 'order': 'n', 'unroll': 2} are not the fields of backend_fake.Config",
    ),
    "missing knob": (
        replaced(lambda e: e["winner"].pop("order")), "{'block': 256} are not the fields of backend_fake.Config"
    ),
    "knob out of range": (
        replaced(lambda e: e["winner"].update(block=65)), "matmul[fake]: block must be a multiple of 64; got 65."
    ),
    "knob of another type": (
        replaced(lambda e: e["winner"].update(block="256")), "not all arguments converted during string formatting"
    ),
    "unhashable knob": (replaced(lambda e: e["winner"].update(order=[])), "unhashable type: 'list'"),
    "not in the search space": (
        replaced(lambda e: e["winner"].update(block=512)),
        "Config(block=512, order='n') is not in the search space of this spec",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("corrupt", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_damaged_entry_is_ignored_with_one_warning(corrupt, reason, fake, forget, tmp_path):
    store()
    (path,) = files(tmp_path)
    path.write_text(corrupt(path.read_text()))
    forget()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [chosen() for _ in range(3)] == [(Config(64, "m"), "default")] * 3
    (warning,) = caught
    expected = f"tuning: ignored {path}: {reason.rstrip('.')}. Delete it, or tune again to replace it."
    assert str(warning.message) == expected
    store()
    forget()
    assert chosen() == (WINNER, "tuned")


def test_entry_that_cannot_be_read_is_ignored_with_one_warning(fake, forget, tmp_path):
    store()
    (path,) = files(tmp_path)
    path.write_bytes(b"\xff\xfe")
    forget()
    with pytest.warns(UserWarning, match="it is not text"):
        assert chosen()[1] == "default"
    path.unlink()
    path.mkdir()
    forget()
    with pytest.warns(UserWarning, match="it is not a regular file"):
        assert chosen()[1] == "default"


def test_winner_is_a_member_of_the_space(fake, forget, tmp_path):
    """A value from JSON may be equal but have another type, which a kernel must not get."""
    store()
    (path,) = files(tmp_path)
    path.write_text(path.read_text().replace("256", "256.0"))
    forget()
    config, source = chosen()
    assert (config, source) == (WINNER, "tuned")
    assert isinstance(config.block, int)


def test_cache_that_cannot_be_written_keeps_the_winner_in_memory(fake, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match=r"holds for this process only; set JAXKERNELS_CACHE_DIR to a folder that can"):
        store()
    assert chosen() == (WINNER, "tuned")


@pytest.mark.timeout(60)
def test_entry_that_others_may_have_written_is_ignored_with_one_warning(fake, forget, tmp_path):
    """`open_entry` has the rules: tests/test_folders.py. A pipe in an entry's place must not block."""
    store()
    (path,) = files(tmp_path)
    path.chmod(0o666)
    expected = "other users may write to it (mode 0666)"
    for _ in range(2):
        forget()
        with pytest.warns(UserWarning, match="^tuning: ") as caught:
            assert [chosen()[1], chosen()[1]] == ["default"] * 2
        assert [str(w.message) for w in caught] == [
            f"tuning: ignored {path}: {expected}. Delete it, or tune again to replace it."
        ]
        assert winners.entries(H200) == []
        path.unlink()
        os.mkfifo(path)
        expected = "it is not a regular file"
    store()
    forget()
    assert chosen() == (WINNER, "tuned")


def test_environment_names_the_folder(fake, forget, tmp_path, monkeypatch):
    store()
    monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / "other"))
    assert chosen()[1] == "default"
    monkeypatch.delenv("JAXKERNELS_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    store()
    assert [path.relative_to(tmp_path).parts[:3] for path in files(tmp_path / "home")] == [
        ("home", "jaxkernels", "tuning")
    ]


# The package's own table.


@pytest.fixture
def table(monkeypatch, tmp_path) -> pathlib.Path:
    folder = tmp_path / "tables"
    folder.mkdir()
    monkeypatch.setattr(winners, "_TABLES", folder)
    winners._from_table.cache_clear()
    return folder / "nvidia_h200.json"


def test_table_stands_behind_the_users_cache(fake, forget, table, tmp_path):
    store(config=Config(128))
    table.write_text(json.dumps(winners.entries(H200)))
    (path,) = [path for path in files(tmp_path) if path != table]
    path.unlink()
    forget()
    assert chosen() == (Config(128), "tuned")
    store()
    forget()
    assert chosen() == (WINNER, "tuned")
    path.write_text("damaged")
    forget()
    with pytest.warns(UserWarning, match="it is not JSON"):
        assert chosen() == (Config(128), "tuned")


@pytest.mark.parametrize("text", ["", "{}", '[{"key": 1}]', "[1]", '[{"key": {}, "winner": 1, "seconds": 1}]'])
def test_damaged_table_is_ignored_with_one_warning(text, fake, table):
    table.write_text(text)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [chosen(make_spec(m=m))[1] for m in (5, 6)] == ["default"] * 2
    expected = (
        [] if text == "{}" else [f"tuning: ignored {table}: it is not a list of entries. Install jaxkernels anew."]
    )
    assert [str(warning.message) for warning in caught] == expected


def test_shipped_tables_are_sound():
    """Each entry is for the chip of its file, and a member of its kernel's space."""
    tables = list((pathlib.Path(winners.__file__).parent / "tables").glob("*.json"))
    assert tables
    for path in tables:
        for entry in json.loads(path.read_text()):
            assert winners.slug(entry["key"]["device"]) == path.stem
            assert winners._check(entry, entry["key"])
            backend = entry["key"]["backend"]
            if backend != winners.AUTO:
                kernel = dispatch.load(entry["key"]["op"], backend)
                assert entry["key"]["version"] == kernel.version
                kernel.decode(entry["winner"])


def test_entries_are_those_that_are_sound(fake, tmp_path):
    store(make_spec(m=5))
    store(make_spec(m=6))
    store(make_spec(target=dataclasses.replace(H200, num_sms=60)))
    first, *_ = files(tmp_path)
    damaged = first.with_name("0" * 32 + ".json")
    damaged.write_text(first.read_text())
    (first.parent / "x.json").write_text("damaged")
    found = winners.entries(H200)
    assert sorted(entry["key"]["spec"]["lhs"] for entry in found) == ["bf16[5,7]", "bf16[6,7]"]


# The fastest backend.


def test_fastest_backend_is_taken_where_none_is_named(fake, forget):
    spec = make_spec(target=hardware.host())
    assert dispatch.choose("matmul", spec, None).backend == "fake"
    dispatch.store_fastest("matmul", "xla", spec, 1e-6)
    forget()
    choice = dispatch.choose("matmul", spec, None)
    assert (choice.backend, choice.source) == ("xla", "tuned")
    assert choice.passed_over[0] == ("fake", "measured slower than xla")
    assert dispatch.choose("matmul", spec, "fake").backend == "fake"
    assert str(choice).splitlines()[1:3] == ["  -> xla  Config()  (tuned)", "     not fake: measured slower than xla"]


@pytest.mark.parametrize("change", ["version", "newcomer", "refusal"])
def test_fastest_backend_is_measured_anew_when_the_field_changes(change, fake, registry):
    spec = make_spec(target=hardware.host())
    dispatch.store_fastest("matmul", "xla", spec, 1e-6)
    assert dispatch.is_tuned("matmul", spec, None)
    if change == "version":
        fake.VERSION += 1
    elif change == "newcomer":
        registry["matmul", "newcomer"] = registry["matmul", "xla"]
    else:
        fake.unsupported = lambda spec: "it is Monday"
        registry["matmul", "newcomer"] = registry["matmul", "xla"]
    choice = dispatch.choose("matmul", spec, None)
    assert (choice.backend, choice.source) == ("xla" if change == "refusal" else "fake", "default")
    assert not dispatch.is_tuned("matmul", spec, None)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"backend": "fake"}, "{'backend': 'fake'} do not name a backend and the versions of those measured"),
        ({"backend": "gone", "versions": {"fake": 3, "xla": 1}}, "its backend 'gone' is not among those measured"),
    ],
    ids=["no versions", "unknown backend"],
)
def test_damaged_fastest_backend_is_ignored(values, reason, fake, forget, tmp_path):
    spec = make_spec(target=hardware.host())
    dispatch.store_fastest("matmul", "xla", spec, 1e-6)
    (path,) = files(tmp_path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"winner": values}))
    forget()
    with pytest.warns(UserWarning, match="^tuning: ") as caught:
        assert dispatch.choose("matmul", spec, None).backend == "fake"
    assert [str(w.message) for w in caught] == [
        f"tuning: ignored {path}: {reason}. Delete it, or tune again to replace it."
    ]


# Several processes.

_WRITER = """
import sys, dataclasses
from jaxkernels.core import hardware
from jaxkernels.core.types import ArrayType
from jaxkernels.core import winners

@dataclasses.dataclass(frozen=True)
class Spec:
    x: int

chip = hardware.lookup("NVIDIA H200")
number = int(sys.argv[1])
for i in range(150):
    for x in (-1, number):  # One key that all fight for, and one of our own.
        values = {"writer": number, "count": i, "padding": "p" * 5000}
        winners.store(winners.Key(chip, "op", Spec(x), "fake", 1), None, values, 1.0)
    winners._memo.clear()
    found = winners.lookup(winners.Key(chip, "op", Spec(-1), "fake", 1), dict)
    assert set(found) == {"writer", "count", "padding"} and len(found["padding"]) == 5000
"""


def test_processes_store_and_read_at_once(tmp_path):
    """No process reads half an entry (which would warn), and no entry is lost."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "JAXKERNELS_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "error::UserWarning", "-c", _WRITER]
    processes = [subprocess.Popen([*command, str(i)], env=env, stderr=subprocess.PIPE, text=True) for i in range(3)]
    for process in processes:
        _, stderr = process.communicate(timeout=120)
        assert process.returncode == 0, stderr
    found = files(tmp_path)
    assert len(found) == 4
    entries = [json.loads(path.read_text()) for path in found]
    assert sorted(entry["key"]["spec"]["x"] for entry in entries) == [-1, 0, 1, 2]
    for entry in entries:
        assert entry["winner"]["count"] == 149 or entry["key"]["spec"]["x"] == -1


def test_lookups_cost_microseconds(fake, monkeypatch):
    """The disk is read once for each key, even if it has no entry."""
    reads = []
    original = winners._from_file
    monkeypatch.setattr(winners, "_from_file", lambda *args: reads.append(args) or original(*args))
    store(make_spec(m=6))
    for _ in range(5):
        chosen(make_spec(m=5))
        chosen(make_spec(m=6))
    assert len(reads) == 1
