"""README.md is correct: its example runs and prints the sample, and its table agrees with the backends."""

from __future__ import annotations

import contextlib
import io
import pathlib
import re

import jax
import jax.numpy as jnp
import pytest

import jaxkernels as jk
from jaxkernels.core import dispatch
from jaxkernels.triton import calls

README = (pathlib.Path(jk.__file__).parent.parent / "README.md").read_text()
FLOATS = ("bfloat16", "float16", "float32", "float8_e4m3fn")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def table() -> list[dict[str, str]]:
    lines = re.findall(r"^\| (.*) \|$", README.split("## Operations")[1].split("\n## ")[0], re.MULTILINE)
    header, *rows = ([cell.strip() for cell in line.split("|")] for line in lines)
    return [dict(zip(header, row, strict=True)) for row in rows]


def call(operation: str, dtype: str, backend: str):
    if operation == "dot_product_attention":
        x = jax.ShapeDtypeStruct((1, 256, 4, 64), dtype)
        return lambda q, k, v: jk.dot_product_attention(q, k, v, backend=backend), (x, x, x)
    x = jax.ShapeDtypeStruct((256, 256), dtype)
    if operation == "linear_cross_entropy":
        labels = jnp.zeros(256, jnp.int32)
        return lambda x, w: jk.linear_cross_entropy(x, w, labels, backend=backend), (x, x)
    if operation == "qkv_projection":
        rotation = jnp.ones((256, 32)), jnp.zeros((256, 32))
        heads = dict(num_heads=2, num_kv_heads=1)  # Of 64 features.
        return lambda x, w: jk.qkv_projection(x, w, rotation, **heads, backend=backend)[0], (x, x)
    if operation == "matmul":
        return lambda a, b: jk.matmul(a, b, backend=backend), (x, x)
    if operation in ("rms_norm", "layer_norm"):
        return lambda x, scale: getattr(jk, operation)(x, scale[0], backend=backend), (x, x)
    return lambda a, b: jk.dot_general(a, b, (((1,), (0,)), ((), ())), backend=backend), (x, x)


def test_example_prints_what_is_shown():
    (example, *_), (shown,) = blocks("python"), blocks("text")
    assert len(example.replace("\n\n", "\n").splitlines()) == 6
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(example, "README.md", "exec"), {})
    assert re.sub(r"triton( [\d.]+ us)?, ", "", printed.getvalue()) == shown  # Triton may be installed.


@pytest.mark.parametrize("snippet", blocks("python")[1:])
def test_snippets_run(snippet):
    exec(compile(snippet, "README.md", "exec"), {})


#: Row of README.md's tables of speed -> suite and backend in the generated table of docs/benchmarks.md.
SUITES = {
    "attention in training": ("attention-train", "pallas"),
    "attention with a sliding window": ("attention-window", "pallas"),
    "attention over packed documents": ("attention-segments", "pallas"),
    "products of Llama 3": ("gemm-llm", "cuda"),
    "products with rows that are not a multiple of 16 bytes": ("gemm-odd", "cuda"),
    "products with a fused epilogue": ("gemm-epilogue", "cuda"),
    "attention of one query on a cache of keys": ("attention-decode", "triton"),
    "attention with a dense bias": ("attention-bias", "triton"),
    "products with few rows (decoding)": ("gemm-decode", "cuda"),
}


def test_speeds_are_those_of_the_results():
    rows = re.findall(r"^\| (.*?) \| `(\w+)` \| ([\d.]+)", README.split("## Speed")[1].split("\n## ")[0], re.MULTILINE)
    results = (pathlib.Path(jk.__file__).parent.parent / "docs" / "benchmarks.md").read_text()
    assert [work for work, _, _ in rows] == list(SUITES)
    for work, backend, quoted in rows:
        suite, expected_backend = SUITES[work]
        assert backend == expected_backend
        measured = re.search(rf"^\| {suite} \| {backend} \| ([\d.]+)", results, re.MULTILINE)[1]
        digits = len(quoted.partition(".")[2])
        assert quoted == f"{float(measured):.{digits}f}", work


def test_training_speeds_are_those_of_the_results():
    rows = re.findall(r"^\| `(\w+)` \| ([\d,]+) \| ([\d,]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    results = (pathlib.Path(jk.__file__).parent.parent / "docs" / "benchmarks.md").read_text()
    measured = re.findall(
        r"^\| (\w+) \d+x\d+ \| bfloat16 \| [\d.]+ ms, ([\d,]+) tokens/s[^|]*\| "
        r"[\d.]+ ms, ([\d,]+) tokens/s[^|]*\(([\d.]+) x\) \|",
        results,
        re.MULTILINE,
    )
    assert rows
    assert sorted(rows) == sorted((preset, ours, cudnn, ratio) for preset, cudnn, ours, ratio in measured)


@pytest.mark.parametrize("row", table(), ids=lambda row: f"{row['operation']}-{row['backend']}")
def test_table_agrees_with_the_backends(row):
    backend = row["backend"].strip("`")
    if backend == "triton" and (reason := calls.missing()):
        pytest.skip(f"the backend triton {reason}")
    for operation in re.findall(r"`(\w+)`", row["operation"]):
        for dtype in FLOATS:
            f, operands = call(operation, dtype, backend)
            named = dtype in row["dtypes"].split(";")[0] or backend == "xla"
            if dtype.startswith("float8") and operation not in ("matmul", "dot_general"):
                # Nor does jax.nn.dot_product_attention take it.
                with pytest.raises(ValueError, match="16 bits"):
                    jk.explain(f, *operands, platform="cuda")
            elif named:
                jk.explain(f, *operands, platform="cuda")
            else:
                with pytest.raises(NotImplementedError):
                    jk.explain(f, *operands, platform="cuda")
        f, operands = call(operation, "bfloat16", backend)
        grad = jax.grad(lambda *xs, f=f: jnp.sum(f(*xs).astype(jnp.float32)))
        jk.explain(grad, *operands, platform="cuda")
        forward = lambda *xs, f=f: jax.jvp(f, xs, xs)
        if row["gradient"] == "reverse mode":
            with pytest.raises(NotImplementedError):
                jk.explain(forward, *operands, platform="cuda")
            continue
        jk.explain(forward, *operands, platform="cuda")
        second = lambda *xs, grad=grad: jax.jvp(grad, xs, xs)
        if row["gradient"] == "both modes, any order":
            jk.explain(second, *operands, platform="cuda")
        else:
            assert row["gradient"] == "both modes, first order"
            with pytest.raises(NotImplementedError, match="second derivatives"):
                jk.explain(second, *operands, platform="cuda")


def test_table_names_every_backend_with_a_kernel():
    assert {row["backend"].strip("`") for row in table()} == set(dispatch.backend_names())


def test_command_lines_are_the_ones_that_ci_runs():
    assert [line.strip() for line in blocks("sh")] == [
        "pip install . && jaxkernels train",
        'pip install -e ".[test]" && pytest -n 2',
    ]
