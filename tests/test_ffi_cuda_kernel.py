"""`jk.ffi.CudaKernel`: plans, JAX's transforms, and refusals before a launch.

JAX's transforms do not depend on a kernel's code, so on the CPU a plain JAX function replaces the kernel. The code
itself, and the example of docs/cuda-engine.md, are tested on a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import re
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.interpreters import mlir
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxkernels as jk
from jaxkernels.core import _jax, hardware
from jaxkernels.ffi import CudaKernel, LaunchPlan, Pointer, TensorMap, compiler, kernel

ROOT = pathlib.Path(__file__).parent.parent

SOURCE = """
template <int kFactor>
__global__ void scaled_sum(const float* x, const float* y, float* out, long long n) {
  const long long i = blockIdx.x * 128LL + threadIdx.x;
  if (i < n) out[i] = kFactor * x[i] + OFFSET + y[i % PERIOD];
}
"""


def plan(x: Any, y: Any, *, factor: int = 3) -> LaunchPlan:
    """out = factor * x + 1 + y, with y repeated to the size of x."""
    return LaunchPlan(
        results={"out": x},
        parameters=[Pointer("x"), Pointer("y"), Pointer("out"), np.int64(x.size)],
        grid=(-(-x.size // 128),),
        block=(128,),
        template=(factor,),
        defines={"PERIOD": y.size},
    )


def scaled_sum(**options: Any) -> CudaKernel:
    return CudaKernel(SOURCE, "scaled_sum", plan, defines={"OFFSET": 1}, **options)


def reference(x: jax.Array, y: jax.Array, factor: int = 3) -> jax.Array:
    return factor * x + 1 + jnp.resize(y, x.shape)


def exactly(message: str) -> str:
    """Matches an error with this message. JAX may append a note about hidden frames of the traceback."""
    return f"^{re.escape(message)}(\\n---|$)"


def lower(fun: Any, *xs: Any) -> str:
    return jax.jit(fun).trace(*xs).lower(lowering_platforms=("cuda",)).as_text()


X = jax.ShapeDtypeStruct((24, 64), jnp.float32)
Y = jax.ShapeDtypeStruct((64,), jnp.float32)


# Into a program.


def test_import_is_lazy_and_needs_no_cuda():
    script = """
import sys, jaxkernels as jk
assert "jaxkernels.ffi" not in sys.modules
jk.ffi.CudaKernel, jk.ffi.tma.load
assert not [name for name in sys.modules if name.partition(".")[0] == "cuda"]
try:
    jk.absent
except AttributeError as e:
    print(e)
"""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path])), "JAX_PLATFORMS": "cpu"}
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=env)
    assert (process.stdout, process.returncode) == ("module 'jaxkernels' has no attribute 'absent'\n", 0), (
        process.stderr
    )


def test_lowers_for_cuda_as_the_plan_says():
    text = lower(functools.partial(scaled_sum(), factor=5), X, Y)
    assert text.count(f"@{jk.ffi.TARGET}(%arg0, %arg1)") == 1
    for attribute in [
        'kernel = "_Z10scaled_sumILi5EEvPKfS1_Pfx"',
        "grid = dense<[12, 1, 1]>",
        "block = dense<[128, 1, 1]>",
        "parameter1.buffer = 1 : i64",
        "parameter2.buffer = 2 : i64",
        "num_parameters = 4 : i64",
    ]:
        assert attribute in text


def test_compile_tells_what_the_code_uses_and_fills_the_cache(monkeypatch):
    compiled = scaled_sum().compile(X, Y, factor=7)
    assert "Li7E" in compiled.name
    assert 0 < compiled.report.registers < 64

    def refuse(self):
        raise AssertionError("compiled again")

    monkeypatch.setattr(compiler._Request, "compile", refuse)
    lower(functools.partial(scaled_sum(), factor=7), X, Y)


@pytest.mark.parametrize("square", [True, np.True_])
def test_booleans_and_types_as_template_arguments(square):
    source = "template <bool kSquare, class T> __global__ void f(T* p) { p[0] = kSquare ? p[0] * p[0] : p[0]; }"
    made = CudaKernel(
        source, "f", lambda x: LaunchPlan({"out": x}, [Pointer("out")], (1,), (1,), template=(square, "float"))
    )
    assert made.compile(X).name == "_Z1fILb1EfEvPT0_"


def test_jit_takes_constants_as_static_arguments():
    text = jax.jit(scaled_sum(), static_argnames="factor").trace(X, Y, factor=2).lower(lowering_platforms=("cuda",))
    assert "scaled_sumILi2E" in text.as_text()


def test_constants_that_are_equal_but_written_otherwise_make_programs_of_their_own():
    """Also for calls outside of jit, which JAX caches by the primitive's parameters."""
    source = "__global__ void half(float* out) { out[0] = 1 / DIV; }"
    made = CudaKernel(
        source, "half", lambda x, *, div: LaunchPlan({"out": x}, [Pointer("out")], (1,), (1,), defines={"DIV": div})
    )
    equations = [jax.make_jaxpr(functools.partial(made, div=div))(X).eqns[0] for div in (1, 1.0, True, -0.0, 0.0)]
    assert len({equation.params["constants"] for equation in equations}) == len(equations)


def test_source_may_be_a_file_with_headers(tmp_path):
    path = tmp_path / "scaled.cu"
    path.write_text('#include "offset.cuh"\n' + SOURCE)
    made = CudaKernel(path, "scaled_sum", plan, headers={"offset.cuh": "#define OFFSET 1\n"})
    lower(made, X, Y)
    path.write_text('#include "offset.cuh"\n' + SOURCE.replace("kFactor *", "missing *"))
    with pytest.raises(jk.ffi.CompileError, match=r"scaled\.cu\(6\): error: identifier \"missing\" is undefined"):
        lower(CudaKernel(path, "scaled_sum", plan, headers={"offset.cuh": "#define OFFSET 1\n"}), X, Y)


def test_compile_error_has_the_lines_of_the_source():
    made = CudaKernel(SOURCE.replace("x[i]", "x[j]"), "scaled_sum", plan, defines={"OFFSET": 1})
    with pytest.raises(jk.ffi.CompileError, match=r"scaled_sum\.cu\(5\): error: identifier \"j\" is undefined"):
        lower(made, X, Y)


def test_own_header_is_found_but_comes_second():
    source = '#include "tma.cuh"\n__global__ void f(const __grid_constant__ tma::TensorMap map) {}'
    assert set(compiler._with_own_headers(source, {})) == {"tma.cuh"}
    assert compiler._with_own_headers(source, {"tma.cuh": "// mine"}) == {"tma.cuh": "// mine"}
    assert set(compiler._with_own_headers('#include "a.cuh"', {"a.cuh": '# include "tma.cuh"'})) == {"a.cuh", "tma.cuh"}
    assert compiler._with_own_headers('#include <tma.cuh>\n#include "../tma.cuh"', {}) == {}


def test_exports_for_cuda_without_a_gpu():
    allowed = [export.DisabledSafetyCheck.custom_call(jk.ffi.TARGET)]
    exported = export.export(jax.jit(scaled_sum()), platforms=["cuda"], disabled_checks=allowed)(X, Y)
    assert f"@{jk.ffi.TARGET}" in export.deserialize(exported.serialize()).mlir_module()


def test_results_may_have_any_shape_and_number():
    made = CudaKernel(
        "__global__ void fill(float* a, int* b) { a[0] = 1; b[0] = 2; }",
        "fill",
        lambda: LaunchPlan(
            {"a": jax.ShapeDtypeStruct((3,), jnp.float32), "b": jax.ShapeDtypeStruct((2, 2), jnp.int32)},
            [Pointer("a"), Pointer("b")], (1,), (1,),
        ),
    )  # fmt: skip
    a, b = jax.eval_shape(made)
    assert (a.shape, a.dtype, b.shape, b.dtype) == ((3,), jnp.float32, (2, 2), jnp.int32)
    assert f"@{jk.ffi.TARGET}()" in lower(made)


# Refusals.


def identity(**changed: Any) -> CudaKernel:
    """out = x by tensor maps, good but for what is changed in its plan."""

    def plan(x: Any) -> LaunchPlan:
        good = LaunchPlan(
            results={"out": x},
            parameters=[TensorMap("x", box=(8, 64)), TensorMap("out", box=(8, 64))],
            grid=(1, 3),
            block=(32,),
            smem_bytes=2048,
        )
        return dataclasses.replace(good, **changed)

    source = """
    struct alignas(64) Map { char opaque[128]; };
    __global__ void identity(const __grid_constant__ Map x, const __grid_constant__ Map out) {
      __shared__ int tile[256];
      tile[threadIdx.x] = threadIdx.x;
      __syncthreads();
      if (tile[0] == 1) asm volatile("prefetch.tensormap [%0];" ::"l"(&x));
    }"""
    return CudaKernel(source, "identity", plan)


REFUSED_PLANS = [
    ({"grid": (1000 / 128,)}, "grid must be whole; got grid=(7.8125,). Divide with //."),
    ({"grid": 4}, "grid must be a tuple; got grid=4. Write (4,)."),
    ({"block": np.array(32)}, "block must be a tuple; got block=32. Write (32,)."),
    ({"cluster": 1}, "cluster must be a tuple; got cluster=1. Write (1,)."),
    ({"parameters": [TensorMap("x", box=64)]}, "parameter 0: box must be a tuple; got box=64. Write (64,)."),
    ({"smem_bytes": 1e3}, "smem_bytes must be whole; got smem_bytes=1000.0. Divide with //."),
    ({"parameters": [TensorMap("x", box=(8, 32.0))]}, "parameter 0: box must be whole; got box=(8, 32.0). Divide "),
    ({"parameters": [Pointer("x", offset=8.0)]}, "parameter 0: offset must be whole; got offset=8.0. Divide with //."),
    ({"smem_bytes": 232449}, "a block has at most 232448 bytes of shared memory on NVIDIA H200; got smem_bytes=232449. "
     "Use smaller tiles or fewer stages."),
    ({"parameters": [TensorMap("x", box=(257, 64))]},
     "parameter 0: box must be from 1 to 256 in each dimension; got box=(257, 64). Copy a larger tile in several "),
    ({"parameters": [Pointer("x"), TensorMap("x", box=(8, 64), shape=(24, 61))]},
     "parameter 1: strides must be multiples of 16 bytes below 2**40; got strides=(244,) for shape=(24, 61) of "
     "float32. Pad the last dimension."),
    ({"parameters": [TensorMap("x", box=(8, 64), shape=(25, 64))]},
     "parameter 0: the tensor reaches outside its buffer of 6144 bytes; got shape=(25, 64), "),
    ({"cluster": (1, 2)}, "the cluster must divide the grid; got grid=(1, 3, 1), cluster=(1, 2, 1). Round the grid up"),
    ({"block": (1025,)}, "block must be from 1 to (1024, 1024, 64); got block=(1025, 1, 1). Use fewer threads."),
    ({"parameters": [Pointer("y")]},
     "parameter 0: buffer must be one of ('x', 'out'); got 'y'. Those are the plan's operands and results."),
    ({"parameters": [Pointer(2)]}, "parameter 0: buffer must name one of the 2 operands and results; got buffer=2."),
    ({"parameters": [2.0]},
     "parameter 0: a parameter must be a TensorMap, a tuple of them, a Pointer or a NumPy scalar; got 2.0 (float)."),
    ({"results": {"x": X}}, "names must be distinct; got ('x', 'x'). Rename a result."),
    ({"aliases": {"x": "in"}}, "aliases: buffer must be one of ('out',); got 'in'."),
    ({"aliases": {"x": "out"}, "results": {"out": Y}, "parameters": []},
     "aliases: x and out must be alike; got ShapeDtypeStruct(shape=(24, 64), dtype=float32) and "),
    ({"results": {"out": np.zeros(3)}},
     "result out must have a type that JAX has; got float64. Set jax_enable_x64, or use a smaller type."),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), REFUSED_PLANS)
def test_plans_no_device_takes_are_refused_when_traced(changed, message):
    with pytest.raises(ValueError, match=f"^{re.escape('identity[cuda]: ' + message)}") as error:
        jax.eval_shape(identity(**changed), X)
    assert re.search(r"; got .*\. [A-Z].*\.$", str(error.value)), "a message ends with a way out"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"results": (X,)},
            "results must be a dict of at least one; got (ShapeDtypeStruct(shape=(24, 64), dtype=float32",
        ),
        ({"results": {}, "parameters": []}, "results must be a dict of at least one; got {}. Write {"),
        ({"results": {"out": (3, 4)}}, "result out must have shape and dtype; got (3, 4). Use jax.ShapeDtypeStruct."),
        ({"parameters": Pointer("x")}, "parameters must be a list or tuple; got Pointer(buffer='x', offset=0). Put it"),
        ({"template": "float"}, "template must be a list or tuple; got 'float'. Put it into one."),
    ],
)
def test_plans_of_other_types_are_refused(changed, message):
    with pytest.raises(TypeError, match=f"^{re.escape('identity[cuda]: ' + message)}"):
        jax.eval_shape(identity(**changed), X)


def test_plans_that_return_nothing_are_refused():
    with pytest.raises(TypeError, match=r"^f\[cuda\]: plan must return a LaunchPlan; got None\. Give it a return\."):
        jax.eval_shape(CudaKernel("", "f", lambda x: None), X)


def test_a_result_is_the_copy_of_one_operand():
    plan = lambda x, y: LaunchPlan({"out": x}, [], (1,), (1,), aliases={"x": "out", "y": "out"})
    message = "f[cuda]: aliases: out can start out as the copy of one operand; got {'x': 'out', 'y': 'out'}. Leave one "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(CudaKernel("", "f", plan), X, X)


def test_arrays_of_keys_are_refused():
    made = CudaKernel("", "f", lambda keys: LaunchPlan({"out": X}, [Pointer("keys")], (1,), (1,)))
    message = "f[cuda]: parameter 0: an array of keys has no memory of its own; got key<fry>. Use jax.random.key_data."
    with pytest.raises(ValueError, match=exactly(message)):
        jax.eval_shape(made, jax.random.key(0))


@pytest.mark.parametrize(
    ("parameters", "got"), [([TensorMap("x", box=(8, 64))], "(128)"), ([Pointer("x"), Pointer("out")], "(8, 8)")]
)
def test_parameters_must_be_those_of_the_signature(parameters, got):
    message = f"identity[cuda]: the kernel takes parameters of (128, 128) bytes; got {got}. Give them in the order of "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        lower(identity(parameters=parameters), X)


def test_static_shared_memory_counts_too():
    message = (
        "identity[cuda]: a block has at most 232448 bytes of shared memory on NVIDIA H200; "
        "got smem_bytes=232448 beside 1024 static ones. Use smaller tiles or fewer stages."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        lower(identity(smem_bytes=232448), X)
    lower(identity(smem_bytes=232448 - 1024), X)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda f: f(X), ValueError, "takes 2 operands (x, y); got 1. Constants are given by keyword."),
        (lambda f: f(X, Y, Y), ValueError, "takes 2 operands (x, y); got 3. Constants are given by keyword."),
        (lambda f: f(X, Y, factor=[2]), TypeError, "constants must be hashable; got factor=[2]. Use tuples for lists."),
        (lambda f: f(X, y=np.zeros(64)), TypeError, "constants must be hashable; got y, an array of float64[64]. "
         "Operands are given by position; of constants, tell jax.jit: static_argnames."),
        (lambda f: jax.jit(lambda n: f(X, Y, factor=n))(2), TypeError, "constants must be hashable; got factor, an "
         "array of int32[]. Operands are given by position; of constants, tell jax.jit: static_argnames."),
        (lambda f: f(X, Y, scale=2), TypeError, "constants must be those of the plan: got an unexpected keyword "
         "argument 'scale'; got scale. Check names."),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(call, error, message):
    arrays = lambda *xs, **constants: scaled_sum()(*(jnp.zeros(x.shape) for x in xs), **constants)
    with pytest.raises(error, match=exactly("scaled_sum[cuda]: " + message)):
        call(arrays)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"vmap_method": "parallel"},
            "vmap_method must be one of ('sequential', 'expand_dims', 'broadcast_all', None)",
        ),
        ({"arch": "compute_90"}, "arch must be of the form sm_90 or sm_90a; got 'compute_90'."),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"^{re.escape('scaled_sum[cuda]: ' + message)}"):
        scaled_sum(**options)


def test_other_platforms_are_refused():
    message = (
        "scaled_sum[cuda]: runs on CUDA devices; got platform 'cpu'. "
        "Choose by platform with jax.lax.platform_dependent, or lower for CUDA."
    )
    for run in (scaled_sum(), jax.jit(scaled_sum())):
        with pytest.raises(NotImplementedError, match=exactly(message)):
            run(jnp.zeros(X.shape), jnp.zeros(Y.shape))


def test_platform_dependent_chooses():
    choose = lambda x, y: jax.lax.platform_dependent(x, y, cuda=scaled_sum(), default=reference)
    x, y = np.ones(X.shape, np.float32), np.ones(Y.shape, np.float32)
    np.testing.assert_array_equal(jax.jit(choose)(x, y), reference(x, y))
    assert f"@{jk.ffi.TARGET}" in lower(choose, x, y)


def test_other_chips_get_their_own_code_or_an_error(monkeypatch):
    monkeypatch.setenv("JAXKERNELS_TARGET", "NVIDIA A100-SXM4-80GB")
    assert scaled_sum()._arch_for(hardware.cuda_target()) == "sm_80"
    lower(scaled_sum(), X, Y)
    lower(scaled_sum(arch="sm_80"), X, Y)
    a100 = "got NVIDIA A100-SXM4-80GB (compute capability 8.0)."
    refused = [
        (identity(), "identity[cuda]: parameter 0: tensor maps need compute capability 9.0; " + a100),
        (identity(parameters=[], cluster=(1, 3)), "identity[cuda]: clusters need compute capability 9.0; " + a100),
    ]
    for made, message in refused:
        with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}"):
            jax.eval_shape(made, X)
    message = "scaled_sum[cuda]: code for sm_90a needs a device of that architecture; " + a100
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}"):
        lower(scaled_sum(arch="sm_90a"), X, Y)


@pytest.mark.parametrize(
    ("arch", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (10, 0), False),
        ("sm_90", (9, 0), True),
        ("sm_80", (8, 6), True),
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("sm_100f", (10, 3), True),
        ("sm_100a", (10, 3), False),
        ("sm_120", (12, 0), True),
    ],
)
def test_arch_runs_where_cuda_says(arch, capability, runs):
    # CUDA C++ programming guide, binary compatibility: the same major version, the same or a later minor one.
    chip = hardware.Chip("a chip", "cuda", capability)
    if runs:
        assert scaled_sum(arch=arch)._arch_for(chip) == arch
    else:
        with pytest.raises(NotImplementedError):
            scaled_sum(arch=arch)._arch_for(chip)


# Transforms.


@pytest.fixture
def on_cpu():
    """Has the CPU compute `scaled_sum` by its reference; the rules of the primitive stay as they are."""

    def compute(ctx, *values, kernel, constants):
        run = lambda x, y: [reference(x, y, **{name: value for name, _, value in constants})]
        return _jax.lower_traced(ctx, run, values, multiple_results=True)

    jax.clear_caches()
    mlir.register_lowering(kernel._cuda_kernel_p, compute, platform="cpu")
    yield
    mlir.register_lowering(kernel._cuda_kernel_p, functools.partial(kernel._lower, platform="cpu"), platform="cpu")
    jax.clear_caches()


def draw(*shape: int, seed: int = 0) -> jax.Array:
    """Small whole numbers: sums and products of them are exact."""
    return jax.random.randint(jax.random.key(seed), shape, -99, 99).astype(jnp.float32)


def differentiable(**options: Any) -> CudaKernel:
    """`scaled_sum` with a derivative that is not the one of its reference, so that one can tell who was asked."""
    made = scaled_sum(**options)
    made.defvjp(
        lambda x, y, *, factor=3: (made(x, y, factor=factor), None),
        lambda _, dout, *, factor=3: (10 * factor * dout, 100 * dout.sum(0)),
    )
    return made


def check_transforms() -> None:
    """Values and derivatives of `scaled_sum` under jit and vmap, on any device."""
    same = np.testing.assert_array_equal
    x, y = draw(24, 64), draw(64, seed=1)
    same(scaled_sum()(x, y), reference(x, y))
    same(jax.jit(scaled_sum(), static_argnames="factor")(x, y, factor=2), reference(x, y, 2))
    xs, ys = draw(5, 24, 64), draw(5, 64, seed=1)
    for axes in [(0, None), (0, 0), (1, None), (None, 1)]:
        mapped = [jnp.moveaxis(v, 0, d) if d is not None else v[0] for v, d in zip((xs, ys), axes)]
        same(jax.vmap(scaled_sum(), axes)(*mapped), jax.vmap(reference, axes)(*mapped))
    for method in ("expand_dims", "broadcast_all"):
        same(jax.vmap(scaled_sum(vmap_method=method), (0, None))(xs, y), reference(xs, y))
    f = lambda x, y: differentiable()(x, y, factor=4).sum()
    dx, dy = jax.jit(jax.grad(f, (0, 1)))(x, y)
    same(dx, np.full(x.shape, 40))
    same(dy, np.full(y.shape, 2400))
    dx, dy = jax.jit(jax.vmap(jax.grad(f, (0, 1)), (0, None)))(xs, y)
    same(dx, np.full(xs.shape, 40))
    same(dy, np.full((5, 64), 2400))
    dx = jax.grad(jax.checkpoint(f))(x, y)
    same(dx, np.full(x.shape, 40))


def test_transforms_by_reference(on_cpu):
    check_transforms()


def test_vmap_may_be_refused_and_must_be_answered(on_cpu):
    xs, ys = draw(5, 24, 64), draw(5, 64, seed=1)
    message = 'scaled_sum[cuda]: has no rule for vmap; got a mapped dimension of size 5. Make it with vmap_method="seq'
    with pytest.raises(NotImplementedError, match=f"^{re.escape(message)}"):
        jax.vmap(scaled_sum(vmap_method=None))(xs, ys)

    def forgets(x, y):
        return LaunchPlan({"out": X}, [], (1,), (1,))

    made = CudaKernel(SOURCE, "scaled_sum", forgets, vmap_method="expand_dims")
    message = (
        "scaled_sum[cuda]: under vmap_method='expand_dims' results must have the mapped dimension of size 5 first; "
        "got result 0 of shape (24, 64)."
    )
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(jax.vmap(made), xs, ys)


@pytest.mark.parametrize(
    ("method", "shapes"), [("expand_dims", [(5, 24, 64), (1, 64)]), ("broadcast_all", [(5, 24, 64), (5, 64)])]
)
def test_plans_see_the_mapped_dimension(method, shapes):
    seen = []

    def watch(x, y):
        seen.append([x.shape, y.shape])
        return LaunchPlan({"out": x}, [], (1,), (1,))

    made = CudaKernel(SOURCE, "scaled_sum", watch, vmap_method=method)
    out = jax.eval_shape(jax.vmap(made, (1, None), out_axes=2), jax.ShapeDtypeStruct((24, 5, 64), jnp.float32), Y)
    assert seen[-1] == shapes
    assert out.shape == (24, 64, 5)


@pytest.mark.parametrize("transform", [jax.grad, jax.jacfwd])
def test_without_a_derivative_is_an_error(transform):
    message = "scaled_sum[cuda]: has no derivative; got jax.grad or jax.jvp. Give it one: defvjp."
    with pytest.raises(NotImplementedError, match=exactly(message)):
        jax.eval_shape(transform(lambda x, y: scaled_sum()(x, y).sum()), X, Y)


def test_shard_map_checks_what_results_vary_over(on_cpu, meshes):
    x, y = draw(24, 64), draw(64, seed=1)
    run = lambda f, **specs: jax.jit(jax.shard_map(f, mesh=meshes.auto, **specs))(x, y)
    f = differentiable()
    out = run(f, in_specs=(P("x"), P()), out_specs=P("x"))
    np.testing.assert_array_equal(out, reference(x, y))
    with pytest.raises(ValueError, match="out_specs"):
        run(f, in_specs=(P("x"), P()), out_specs=P())
    # The gradient of an operand that every shard shares is the sum over the shards.
    sharded = jax.shard_map(f, mesh=meshes.auto, in_specs=(P("x"), P()), out_specs=P("x"))
    dx, dy = jax.jit(jax.grad(lambda x, y: sharded(x, y).sum(), (0, 1)))(x, y)
    np.testing.assert_array_equal(dx, np.full(x.shape, 30))
    np.testing.assert_array_equal(dy, np.full(y.shape, 2400))


def test_explicit_axes_are_refused_and_shard_map_is_the_way_out(on_cpu, meshes):
    x = jax.device_put(draw(24, 64), NamedSharding(meshes.explicit, P("x")))
    y = jax.device_put(draw(64, seed=1), NamedSharding(meshes.explicit, P()))
    message = (
        "scaled_sum[cuda]: a kernel does not know how to split its operands over a mesh; "
        "got operands sharded over Explicit axes ('x', 'y'). Call it inside jax.shard_map."
    )
    with jax.set_mesh(meshes.explicit):
        with pytest.raises(ValueError, match=exactly(message)):
            jax.jit(scaled_sum())(x, y)
        out = jax.jit(jax.shard_map(scaled_sum(), in_specs=(P("x"), P()), out_specs=P("x")))(x, y)
    np.testing.assert_array_equal(out, reference(np.asarray(x), np.asarray(y)))


@pytest.mark.parametrize("method", ["sequential", "expand_dims", "broadcast_all"])
def test_vmap_on_meshes(on_cpu, meshes, method):
    xs, y = draw(8, 24, 64), draw(64, seed=1)
    f = jax.vmap(scaled_sum(vmap_method=method), (0, None))
    out = jax.jit(jax.shard_map(f, mesh=meshes.auto, in_specs=(P("x"), P()), out_specs=P("x")))(xs, y)
    np.testing.assert_array_equal(out, reference(xs, y))
    # If an Explicit axis shards the mapped dimension, every device maps over its own part.
    with jax.set_mesh(meshes.explicit):
        out = jax.jit(f)(jax.device_put(xs, NamedSharding(meshes.explicit, P("x"))), jax.device_put(y, P()))
    assert out.sharding.spec[0] == "x"
    np.testing.assert_array_equal(out, reference(xs, y))


def test_auto_axes_compute_the_whole(on_cpu, meshes):
    x = jax.device_put(draw(24, 64), NamedSharding(meshes.auto, P("x")))
    y = jax.device_put(draw(64, seed=1), NamedSharding(meshes.auto, P()))
    np.testing.assert_array_equal(jax.jit(scaled_sum())(x, y), reference(np.asarray(x), np.asarray(y)))


# The example of the documentation.

_PAGE = (ROOT / "docs" / "cuda-engine.md").read_text()
_BLOCKS = re.findall(r"^```python\n(.*?)^```$", _PAGE, re.MULTILINE | re.DOTALL)
_ON_GPU = "# on a GPU\n"


def test_documented_example_compiles_and_lowers(capsys):
    names: dict[str, Any] = {}
    for block in _BLOCKS:
        if not block.startswith(_ON_GPU):
            exec(block, names)
    assert re.fullmatch(r"\d+ registers, 0 bytes of stack, .*\n", capsys.readouterr().out)
    f = functools.partial(names["squared_relu"], scale=0.5)
    x = jax.ShapeDtypeStruct((1000, 200), jnp.float32)
    assert f"@{jk.ffi.TARGET}" in lower(f, x)
    assert f"@{jk.ffi.TARGET}" in lower(jax.value_and_grad(lambda x: f(x).sum()), x)
    assert any(block.startswith(_ON_GPU) for block in _BLOCKS)


@pytest.mark.gpu
def test_documented_example_runs():
    names: dict[str, Any] = {}
    for block in _BLOCKS:
        exec(block, names)


# On the GPU.


@pytest.mark.gpu
def test_transforms_on_the_gpu():
    check_transforms()


@pytest.mark.gpu
def test_shard_map_on_the_gpu():
    x, y = draw(24, 64), draw(64, seed=1)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices("cuda")[:1])
    f = jax.jit(jax.shard_map(scaled_sum(), mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x")))
    np.testing.assert_array_equal(f(x, y), reference(x, y))


@pytest.mark.gpu
def test_aliases_leave_the_operand_alone_unless_it_is_donated():
    source = "__global__ void first(float* out) { out[threadIdx.x] = -1; }"
    made = CudaKernel(
        source, "first", lambda x: LaunchPlan({"out": x}, [Pointer("out")], (1,), (4,), aliases={"x": "out"})
    )
    x = draw(64)
    before = np.asarray(x)
    expected = np.concatenate([np.full(4, -1, np.float32), before[4:]])
    np.testing.assert_array_equal(jax.jit(made)(x), expected)
    np.testing.assert_array_equal(x, before)
    np.testing.assert_array_equal(jax.jit(made, donate_argnums=0)(x), expected)


# Arguments of another type.

NOT_TEXT = "Give a str that is not empty."
NOT_A_LITERAL = "must be a finite number, True, False or text without NUL; got {}. Leave out a macro that is not set."
ARGUMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "source=None": (
        dict(source=None),
        "source must be CUDA C++ as text, or the pathlib.Path of a file; got None. Read a file with pathlib.Path(...).",
    ),
    "a NUL in source": (
        dict(source="int x; \0 int y;"), "source must have no NUL; got 'int x; \\x00'. Remove it."
    ),
    "plan=None": (dict(plan=None), "plan must be a function; got None. It returns a LaunchPlan."),
    "options=3": (dict(options=3), 'options must be a list of texts; got 3. Write ["--use_fast_math"].'),
    "options as text": (dict(options="-"), """options must be a list of texts; got '-'. Write ["--use_fast_math"]."""),
    "options=[None]": (dict(options=[None]), f"an option must be text; got None. {NOT_TEXT}"),
    "headers=3": (dict(headers=3), "headers must be a dict; got 3. None is none."),
    "headers of None": (dict(headers={"a.cuh": None}), "header a.cuh must be text; got None. Give a str."),
    "defines=[]": (dict(defines=[]), "defines must be a dict; got []. None is none."),
    "defines of None": (dict(defines={"A": None}), "macro A " + NOT_A_LITERAL.format("None")),
    "defines of NaN": (dict(defines={"A": float("nan")}), "macro A " + NOT_A_LITERAL.format("nan")),
    "defines with a NUL": (dict(defines={"A": "1\0"}), "macro A " + NOT_A_LITERAL.format("'1\\x00'")),
    "strict=1": (dict(strict=1), "strict must be True or False; got 1. It judges the compiled code."),
    "arch=90": (dict(arch=90), "arch must be of the form sm_90 or sm_90a; got 90. None is yours."),
    "vmap_method=[]": (
        dict(vmap_method=[]), "vmap_method must be one of ('sequential', 'expand_dims', 'broadcast_all', None); got []."
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_arguments_of_another_type_are_refused(options, message):
    with pytest.raises(ValueError, match=exactly(f"f[cuda]: {message}")):
        CudaKernel(**(dict(source=SOURCE, name="f", plan=plan) | options))


@pytest.mark.parametrize("name", [None, "", 3])
def test_name_must_be_text(name):
    with pytest.raises(ValueError, match=exactly(f"CudaKernel: kernel must be text; got {name!r}. {NOT_TEXT}")):
        CudaKernel(SOURCE, name, plan)


def test_derivative_must_be_functions():
    with pytest.raises(ValueError, match=exactly("scaled_sum[cuda]: bwd must be a function; got None. Give both.")):
        scaled_sum().defvjp(plan, None)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (dict(aliases=None), TypeError, "aliases must be a dict; got None. Write {} for none."),
        (dict(aliases=3), TypeError, "aliases must be a dict; got 3. Write {} for none."),
        (dict(aliases={"x": []}), ValueError, "aliases: buffer must be one of ('out',); got []. Those are the plan's "
                                              "operands and results."),
        (dict(defines=None), TypeError, "defines must be a dict; got None. Write {} for none."),
        (dict(defines={"PERIOD": None}), ValueError, "macro PERIOD " + NOT_A_LITERAL.format("None")),
        (dict(template=(None,)), ValueError, "a template argument " + NOT_A_LITERAL.format("None")),
        (dict(results={3: X}), TypeError, """names of results must be text; got 3. Write {"out": x}."""),
    ],
    ids=str,
)  # fmt: skip
def test_plans_of_another_type_are_refused(changes, error, message):
    f = CudaKernel(SOURCE, "f", lambda x, y: dataclasses.replace(plan(x, y), **changes))
    with pytest.raises(error, match=exactly(f"f[cuda]: {message}")):
        jax.eval_shape(f, X, Y)


WRONG = [None, "x", 1.5, float("nan"), -1, 2**70, [], {}, object(), [None], ["x"]]


def refusal_of(changed: Any) -> str:
    """The message with which a kernel with this plan is refused; empty if it is accepted."""
    try:
        jax.eval_shape(CudaKernel(SOURCE, "f", lambda x, y: changed(plan(x, y))), X, Y)
    except (ValueError, TypeError) as e:
        return str(e)
    return ""


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(TensorMap)])
def test_no_field_of_a_tensor_map_fails_obscurely(field):
    for value in WRONG:
        tensor_map = dataclasses.replace(TensorMap("x", box=(8, 64)), **{field: value})
        parameters = [tensor_map, Pointer("y"), Pointer("out"), np.int64(1)]
        refusal = refusal_of(lambda plan, p=parameters: dataclasses.replace(plan, parameters=p))
        assert not refusal or re.match(r"f\[cuda\]: parameter 0: .*; got ", refusal)


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(LaunchPlan)])
def test_no_field_of_a_plan_fails_obscurely(field):
    for value in WRONG:
        refusal = refusal_of(lambda plan, value=value: dataclasses.replace(plan, **{field: value}))
        assert not refusal or re.match(r"f\[cuda\]: .*; got ", refusal)
