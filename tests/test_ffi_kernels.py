"""The CUDA engine on a Hopper GPU: TMA copies and multicast under jit, in command buffers and exported."""

from __future__ import annotations

import os
import pathlib
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from jaxkernels import ffi
from jaxkernels.core import hardware
from jaxkernels.ffi.cubin import parameter_bytes

ROOT = pathlib.Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def launcher_is_built(request):
    if request.node.get_closest_marker("gpu"):
        assert ffi.status().library is not None, f"install the package first; its launcher is {ffi.status()}"


def compile_file(filename: str, kernel: str, **kwargs: Any) -> ffi.CompiledKernel:
    return ffi.compile_kernel(
        (ROOT / "tests" / "cuda" / filename).read_text(), kernel, filename=filename, strict=True, **kwargs
    )


def tile_copy(
    x: jax.Array, box: tuple[int, ...], *, out_shape: tuple[int, ...] | None = None, **fields: Any
) -> jax.Array:
    """Copies `x` with tests/cuda/tile_copy.cu into an array of its own or another shape."""
    result = jax.ShapeDtypeStruct(out_shape or x.shape, x.dtype)
    compiled = compile_file("tile_copy.cu", f"tile_copy<{x.ndim}>")
    tiles = [-(-size // tile) for size, tile in zip(result.shape, box)][::-1]
    sizes = [*box[::-1], 1, 1][:3]
    box_bytes = int(np.prod(box)) * x.dtype.itemsize
    (out,) = ffi.launch(
        compiled.cubin,
        compiled.name,
        [x],
        [result],
        parameters=[
            ffi.TensorMap(0, box=box, **fields),
            ffi.TensorMap(1, box=box, **{k: v for k, v in fields.items() if k != "fill"}),
            *map(np.int32, sizes),
            np.int32(box_bytes),
        ],
        grid=tiles,
        block=(32,),
        smem_bytes=box_bytes + 1024,
    )
    return out


def random(shape: tuple[int, ...], dtype: Any, seed: int = 0) -> jax.Array:
    if jnp.issubdtype(dtype, jnp.floating):
        return jax.random.normal(jax.random.key(seed), shape, dtype)
    return jax.random.randint(jax.random.key(seed), shape, 0, 127, jnp.int32).astype(dtype)


TILES = [
    ((4096,), (256,), jnp.float32, {}),
    ((1000,), (256,), jnp.bfloat16, {}),
    ((7,), (16,), jnp.uint8, {}),
    ((1280, 64), (64, 64), jnp.bfloat16, {"swizzle": "128B"}),
    ((1000, 200), (64, 64), jnp.bfloat16, {"swizzle": "128B"}),
    ((130, 72), (128, 32), jnp.float16, {"swizzle": "64B"}),
    ((130, 72), (256, 16), jnp.float16, {"swizzle": "32B"}),
    ((77, 100), (32, 64), jnp.float32, {}),
    ((33, 48), (8, 256), jnp.int8, {}),
    ((3, 50, 40), (2, 16, 32), jnp.bfloat16, {}),
    ((5, 127, 136), (1, 64, 64), jnp.bfloat16, {"swizzle": "128B"}),
    ((5, 17, 20), (4, 8, 8), jnp.float32, {"swizzle": "32B", "l2_promotion": "none"}),
]


def lower(fun: Callable[[jax.Array], jax.Array], shape: tuple[int, ...], dtype: Any) -> str:
    x = jax.ShapeDtypeStruct(shape, dtype)
    return jax.jit(fun).trace(x).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(("shape", "box", "dtype", "fields"), TILES)
def test_tile_copy_lowers_without_a_gpu(shape, box, dtype, fields):
    assert f"@{ffi.TARGET}" in lower(lambda x: tile_copy(x, box, **fields), shape, dtype)


@pytest.mark.parametrize("cluster", [2, 4])
def test_multicast_copy_lowers_without_a_gpu(cluster):
    text = lower(lambda x: multicast_copy(x, cluster), (1000, 64), jnp.bfloat16)
    assert f"cluster = dense<[{cluster}, 1, 1]>" in text


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "box", "dtype", "fields"), TILES)
def test_tile_copy(shape, box, dtype, fields):
    x = random(shape, dtype)
    out = jax.jit(lambda x: tile_copy(x, box, **fields))(x)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))


@pytest.mark.gpu
@pytest.mark.parametrize(("fill", "outside"), [("zeros", 0.0), ("nan", np.nan)])
@pytest.mark.parametrize("shape", [(100,), (70, 72), (3, 20, 24)])
def test_what_hangs_over_the_edge_is_filled(shape, fill, outside):
    box = (2, 16, 16)[-len(shape) :]
    whole = tuple(-(-size // tile) * tile for size, tile in zip(shape, box))
    x = random(shape, jnp.float32)
    out = jax.jit(lambda x: tile_copy(x, box, out_shape=whole, fill=fill))(x)
    expected = np.full(whole, outside, np.float32)
    expected[tuple(map(slice, shape))] = np.asarray(x)
    np.testing.assert_array_equal(np.asarray(out), expected)


@pytest.mark.gpu
def test_tensor_map_over_a_part_of_an_array():
    x = random((96, 192), jnp.bfloat16)
    part = dict(shape=(50, 64), strides=(2 * 192,), offset=2 * (10 * 192 + 64))
    result = jax.ShapeDtypeStruct((50, 64), x.dtype)
    compiled = compile_file("tile_copy.cu", "tile_copy<2>")

    def copy(x):
        parameters = [ffi.TensorMap(0, box=(16, 64), **part), ffi.TensorMap(1, box=(16, 64))]
        parameters += [np.int32(64), np.int32(16), np.int32(1), np.int32(2048)]
        shape = dict(grid=(1, 4), block=(32,), smem_bytes=3072)
        return ffi.launch(compiled.cubin, compiled.name, [x], [result], parameters=parameters, **shape)

    (out,) = jax.jit(copy)(x)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x)[10:60, 64:128])


def multicast_copy(x: jax.Array, cluster: int) -> jax.Array:
    slice_rows = 128 // cluster
    compiled = compile_file("multicast_copy.cu", f"multicast_copy<{cluster}, {slice_rows}, 128>")
    tensor_map = dict(box=(slice_rows, 64), swizzle="128B")
    (out,) = ffi.launch(
        compiled.cubin,
        compiled.name,
        [x],
        [jax.ShapeDtypeStruct(x.shape, x.dtype)],
        parameters=[ffi.TensorMap(0, **tensor_map), ffi.TensorMap(1, **tensor_map)],
        grid=(cluster * -(-x.shape[0] // 128),),
        block=(32,),
        cluster=(cluster,),
        smem_bytes=128 * 128 + 1024,
    )
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1280, 1000, 1])
@pytest.mark.parametrize("cluster", [2, 4])
def test_multicast_copy(cluster, rows):
    x = random((rows, 64), jnp.bfloat16)
    out = jax.jit(lambda x: multicast_copy(x, cluster))(x)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(x))


@pytest.mark.gpu
def test_addresses_and_numbers():
    x, y = random((1000,), jnp.float32), random((1000,), jnp.float32, seed=1)
    compiled = compile_file("axpby.cu", "axpby")

    def axpby(x, y):
        parameters = [ffi.Pointer(0), ffi.Pointer(1, offset=400), ffi.Pointer(2)]
        parameters += [np.float32(2), np.float64(-0.5), np.int64(900)]
        aliases = {0: 0}
        shape = dict(grid=(8,), block=(128,), input_output_aliases=aliases)
        return ffi.launch(compiled.cubin, compiled.name, [x, y], [x], parameters=parameters, **shape)[0]

    out = np.asarray(jax.jit(axpby)(x, y))
    x, y = np.asarray(x), np.asarray(y)
    np.testing.assert_array_equal(out[:900], 2 * x[:900] - 0.5 * y[100:])
    np.testing.assert_array_equal(out[900:], x[900:])


@pytest.mark.gpu
def test_command_buffers_replay_with_changing_buffers():
    @jax.jit
    def eight_copies(x):
        for cluster in (2, 4) * 4:
            # Something of XLA's own between the launches, which it cannot simplify away.
            x = multicast_copy(x, cluster) * jnp.bfloat16(-1)
        return x

    launches = ffi.launch_count()
    for seed in range(20):
        x = random((1280, 64), jnp.bfloat16, seed)
        np.testing.assert_array_equal(np.asarray(eight_copies(x)), np.asarray(x))
    assert 0 < ffi.launch_count() - launches < 160, "the launches were not replayed from a command buffer"


@pytest.mark.gpu
def test_export_round_trip_in_another_process(tmp_path):
    x = random((1000, 64), jnp.bfloat16)
    allowed = [export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
    exported = export.export(jax.jit(lambda x: multicast_copy(x, 2)), disabled_checks=allowed)(x)
    (tmp_path / "program").write_bytes(exported.serialize())
    np.save(tmp_path / "x.npy", np.asarray(x.view(jnp.uint16)))
    script = textwrap.dedent(f"""
        import faulthandler, pathlib
        faulthandler.enable()
        import jax.numpy as jnp, numpy as np
        from jax import export
        from jaxkernels import ffi
        ffi.register()
        program = export.deserialize(bytearray(pathlib.Path({str(tmp_path / "program")!r}).read_bytes()))
        x = np.load({str(tmp_path / "x.npy")!r})
        out = program.call(jnp.asarray(x).view(jnp.bfloat16))
        print(np.array_equal(np.asarray(out.view(jnp.uint16)), x))
    """)
    env = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path])), "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=os.environ | env)
    assert (process.returncode, process.stdout) == (0, "True\n"), process.stderr


SIGNATURES = """
struct Odd { char bytes[5]; };
struct Large { int numbers[5000]; };
struct Maps { alignas(64) char bytes[256]; };
template <int N>
__global__ void many(float* x, const __grid_constant__ Maps maps, short n, long long m, Odd odd, double y) {
  x[m] = maps.bytes[n] + odd.bytes[N] + y;
}
__global__ void large(int i, const __grid_constant__ Large large, float* x) { x[i] = large.numbers[i]; }
__global__ void none() {}
"""
MAP = ffi.TensorMap(0, box=(8, 64))
H200 = hardware.lookup("NVIDIA H200")


@pytest.mark.parametrize(
    ("name", "parameters", "got"),
    [
        ("none", [], None),
        ("none", [ffi.Pointer(0)], "() bytes; got (8)."),
        ("many<3>", [ffi.Pointer(0), (MAP, MAP), np.int16(1), np.int64(2), np.bytes_(b"12345"), np.float64(0)], None),
        ("many<3>", [ffi.Pointer(0), MAP], "(8, 256, 2, 8, 5, 8) bytes; got (8, 128)."),
        ("many<3>", [ffi.Pointer(0)] * 6, "(8, 256, 2, 8, 5, 8) bytes; got (8, 8, 8, 8, 8, 8)."),
        ("large", [np.int32(1), np.void(bytes(20000)), ffi.Pointer(0)], None),
        ("large", [np.int32(1), ffi.Pointer(0)], "(4, 20000, 8) bytes; got (4, 8)."),
    ],
)
def test_parameters_are_those_of_the_signature(name, parameters, got):
    """The driver copies as many bytes as the kernel takes from wherever they are said to be."""
    compiled = ffi.compile_kernel(SIGNATURES, name)
    x = jax.ShapeDtypeStruct((16, 64), jnp.bfloat16)
    result = [jax.ShapeDtypeStruct((1,), jnp.float32)]
    launch = lambda x: ffi.launch(
        compiled.cubin, compiled.name, [x], result, parameters=parameters, grid=(1,), block=(1,), target=H200
    )
    if got is None:
        jax.eval_shape(launch, x)
        return
    message = f"{compiled.name}[cuda]: the kernel takes parameters of {got} Give them in the order of the kernel's "
    with pytest.raises(ValueError, match=f"^{re.escape(message)}"):
        jax.eval_shape(launch, x)


def test_a_damaged_image_tells_no_signature():
    good = ffi.compile_kernel(SIGNATURES, "large")
    damaged = lambda at, number: good.cubin[:at] + number.to_bytes(8, "little") + good.cubin[at + 8 :]
    assert parameter_bytes(good.cubin, good.name) == (4, 20000, 8)
    sections_at = 0x28
    for cubin in (b"", good.cubin[:64], *(damaged(sections_at, n) for n in (len(good.cubin), 2**63 - 1, 2**64 - 1))):
        assert parameter_bytes(cubin, good.name) is None


@pytest.mark.gpu
def test_wrong_launches_are_exceptions_and_leave_the_device_usable():
    x = random((128, 64), jnp.bfloat16)
    good = compile_file("multicast_copy.cu", "multicast_copy<2, 64, 128>")
    other_chip = compile_file("multicast_copy.cu", "multicast_copy<2, 64, 128>", arch="sm_100a")
    maps = [ffi.TensorMap(i, box=(64, 64), swizzle="128B") for i in (0, 1)]
    right: dict[str, Any] = dict(parameters=maps, grid=(2,), block=(32,), cluster=(2,), smem_bytes=17408)
    wrong = [
        (good, dict(name="absent"), "the cubin has no kernel absent; got CUDA_ERROR_NOT_FOUND"),
        (good, dict(smem_bytes=232448), "cannot have 232448 bytes of dynamic shared memory beside "),
        (good, dict(block=(1024,)), "the launch failed with grid=(2, 1, 1) block=(1024, 1, 1)"),
        (other_chip, {}, "cannot load the cubin of"),
    ]

    def launch(compiled, changed):
        kwargs = {"name": compiled.name} | right | changed
        result = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.jit(lambda x: ffi.launch(compiled.cubin, operands=[x], results=[result], **kwargs)[0])(x)

    for compiled, changed, message in wrong:
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
            launch(compiled, changed).block_until_ready()
    np.testing.assert_array_equal(np.asarray(launch(good, {})), np.asarray(x))


@pytest.mark.gpu
def test_nvrtcs_own_cache_does_not_take_the_report_away(tmp_path, monkeypatch):
    source = (ROOT / "tests" / "cuda" / "axpby.cu").read_text() + f"// {tmp_path}"
    for folder in ("first", "second"):
        monkeypatch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path / folder))
        assert ffi.compile_kernel(source, "axpby", strict=True).report is not None


@pytest.mark.gpu
def test_every_device_runs_the_same_program():
    devices = jax.devices("cuda")
    if len(devices) < 2:
        pytest.skip("needs two CUDA devices")
    f = jax.jit(lambda x: multicast_copy(x, 4))
    x = random((1000, 64), jnp.bfloat16)
    for device in (*devices, *devices[::-1]):
        out = f(jax.device_put(x, device))
        assert out.devices() == {device}
        np.testing.assert_array_equal(np.asarray(out), np.asarray(x))
