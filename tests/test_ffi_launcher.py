"""The launcher of the CUDA engine: the checks before a launch, the handler itself, and its registration.

The handler runs on XLA's CPU backend, against a stand-in for the driver that writes down what it is
asked for (tests/cuda/stand_in_driver.cc); nothing else of the path is replaced. The real driver has
its turn in test_ffi_kernels.py.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from stand_ins import FFI, StandIn, build

from jaxkernels import ffi
from jaxkernels.core import hardware
from jaxkernels.ffi import custom_call, handler

ROOT = pathlib.Path(__file__).parent.parent
H200 = hardware.lookup("NVIDIA H200")

# Checks before a launch.


@pytest.fixture(scope="module")
def any_cubin(tmp_path_factory) -> bytes:
    """Real code, which the stand-in takes for any kernel it is asked for."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAXKERNELS_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        return ffi.compile_kernel("__global__ void store(float* p) { p[threadIdx.x] = 1; }", "store").cubin


X = jax.ShapeDtypeStruct((24, 64), jnp.bfloat16)


def lower(cubin: bytes, *, operands=(X,), results=(X,), name="kernel_128", **changed: Any) -> str:
    """Lowers one launch for CUDA, good but for what is changed."""
    call: dict[str, Any] = {"parameters": [ffi.TensorMap(0, box=(8, 64))], "grid": (4, 6), "block": (128,)} | changed
    fun = jax.jit(lambda *xs: ffi.launch(cubin, name, xs, results, target=H200, **call))
    return fun.trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


def test_lowers_for_cuda_without_a_gpu(any_cubin):
    text = lower(any_cubin, cluster=(2,), smem_bytes=1024)
    assert "stablehlo.custom_call @jaxkernels_launch_v1(%arg0)" in text
    for attribute in [
        'kernel = "kernel_128"',
        "grid = dense<[4, 6, 1]> : tensor<3xi64>",
        "block = dense<[128, 1, 1]> : tensor<3xi64>",
        "cluster = dense<[2, 1, 1]> : tensor<3xi64>",
        "smem_bytes = 1024 : i64",
        "num_parameters = 1 : i64",
        'parameter0.kind = "tensor_map"',
        'parameter0.dtype = "bfloat16"',
        "parameter0.sizes = dense<[64, 24]> : tensor<2xi64>",
    ]:
        assert attribute in text
    assert f"tensor<{len(any_cubin)}xui8>" in text


def test_exports_for_cuda_without_a_gpu(any_cubin):
    fun = jax.jit(lambda x: ffi.launch(any_cubin, "k", [x], [X], parameters=[], grid=(1,), block=(1,), target=H200)[0])
    allowed = [export.DisabledSafetyCheck.custom_call(ffi.TARGET)]
    exported = export.export(fun, platforms=["cuda"], disabled_checks=allowed)(X)
    again = export.deserialize(exported.serialize())
    assert again.platforms == ("cuda",)
    assert "@jaxkernels_launch_v1" in again.mlir_module()


def test_aliases_operands_and_results(any_cubin):
    text = lower(any_cubin, input_output_aliases={0: 0})
    assert "output_operand_alias<output_tuple_indices = [], operand_index = 0" in text


REFUSED = [
    ({"grid": (4, 6, 1, 1)}, "grid must have one to three dimensions; got grid=(4, 6, 1, 1). Fold the rest into x."),
    (
        {"grid": (0, 6)},
        "grid must be from 1 to (2147483647, 65535, 65535); got grid=(0, 6, 1). "
        "An empty result needs no launch, a large one a loop in the kernel.",
    ),
    ({"grid": (4, 65536)}, "grid must be from 1 to (2147483647, 65535, 65535); got grid=(4, 65536, 1)."),
    ({"block": (2048,)}, "block must be from 1 to (1024, 1024, 64); got block=(2048, 1, 1)."),
    (
        {"block": (1024, 2)},
        "a block has at most 1024 threads; got block=(1024, 2, 1) (2048 threads). Use fewer threads.",
    ),
    (
        {"cluster": (4, 6)},
        "a cluster has at most 16 blocks (8 on every device); got cluster=(4, 6, 1). Use fewer blocks.",
    ),
    (
        {"cluster": (3,)},
        "the cluster must divide the grid; got grid=(4, 6, 1), cluster=(3, 1, 1). "
        "Round the grid up and let the kernel skip what is too much.",
    ),
    ({"smem_bytes": -1}, "smem_bytes must not be negative; got smem_bytes=-1. Use 0 for none."),
    (
        {"smem_bytes": 232449},
        "a block has at most 232448 bytes of shared memory on NVIDIA H200; got smem_bytes=232449. "
        "Use smaller tiles or fewer stages.",
    ),
    (
        {"parameters": [3]},
        "parameter 0: a parameter must be a TensorMap, a tuple of them, a Pointer or a NumPy scalar; got 3 (int). "
        "Give a number its C type: np.int32(n), np.float32(alpha).",
    ),
    (
        {"parameters": [np.int32(3), ffi.Pointer(2)]},
        "parameter 1: buffer must name one of the 2 operands and results; got buffer=2. "
        "Operands count from 0, results follow them.",
    ),
    (
        {"parameters": [ffi.Pointer("x")]},
        "parameter 0: buffer must name one of the 2 operands and results; got buffer='x'.",
    ),
    (
        {"parameters": [ffi.Pointer(-1)]},
        "parameter 0: buffer must name one of the 2 operands and results; got buffer=-1.",
    ),
    (
        {"parameters": [()]},
        "parameter 0: a parameter must be a TensorMap, a tuple of them, a Pointer or a NumPy scalar; got () (tuple). "
        "Give a number its C type: np.int32(n), np.float32(alpha).",
    ),
    (
        {"parameters": [(ffi.TensorMap(0, box=(8, 64)), ffi.TensorMap(0, box=(8, 64), offset=8))]},
        "parameter 0: map 1: offset must be a multiple of 16 bytes; got offset=8.",
    ),
    (
        {"parameters": [ffi.Pointer(1, offset=3073)]},
        "parameter 0: offset must lie in the buffer of 3072 bytes; got offset=3073. Offsets count bytes.",
    ),
    (
        {"operands": [jax.ShapeDtypeStruct((32,), jnp.int4)], "parameters": [ffi.Pointer(0)]},
        "parameter 0: dtypes of less than a byte are not supported: XLA packs them; got int4. Bitcast to uint8.",
    ),
]
TENSOR_MAPS_REFUSED = [
    (dict(box=(257, 64)), "box must be from 1 to 256 in each dimension; got box=(257, 64). Copy a larger tile"),
    (dict(box=(0, 64)), "box must be from 1 to 256 in each dimension; got box=(0, 64)."),
    (dict(box=(64,)), "box must have 2 elements for a tensor of rank 2; got box=(64,)."),
    (dict(box=(8, 64), element_strides=(1,)), "element_strides must have 2 elements for a tensor of rank 2; got"),
    (dict(box=(8, 64), element_strides=(9, 1)), "element_strides must be from 1 to 8; got element_strides=(9, 1)."),
    (dict(box=(8, 64), strides=(128, 2)), "strides must have 1 elements for a tensor of rank 2; got strides=(128, 2)."),
    (
        dict(box=(8, 64), shape=(24, 60)),
        "strides must be multiples of 16 bytes below 2**40; got strides=(120,) for shape=(24, 60) of bfloat16. "
        "Pad the last dimension.",
    ),
    (dict(box=(8, 64), strides=(2**40,)), "strides must be multiples of 16 bytes below 2**40; got strides=(10995"),
    (dict(box=(8, 64), strides=(-128,)), "strides must be multiples of 16 bytes below 2**40; got strides=(-128,)"),
    (dict(box=(), shape=()), "the tensor must have 1 to 5 dimensions; got shape=(), interleave='none'."),
    (dict(box=(8,) * 6, shape=(2,) * 5 + (8,)), "the tensor must have 1 to 5 dimensions; got shape=(2, 2, 2, 2, 2, 8)"),
    (dict(box=(8, 64), interleave="16B"), "the tensor must have 3 to 5 dimensions; got shape=(24, 64)"),
    (dict(box=(8, 64), shape=(0, 64)), "sizes must be from 1 to 2147483648; got shape=(0, 64)."),
    (dict(box=(8, 64), offset=8), "offset must be a multiple of 16 bytes; got offset=8."),
    (
        dict(box=(8, 4)),
        "a row of the box must be a multiple of 16 bytes; got box=(8, 4) of bfloat16 (8 bytes). "
        "Widen the box; what hangs over the edge is cut off.",
    ),
    (
        dict(box=(8, 64), swizzle="64B"),
        "a row of the box must fit the swizzle of 64B; got box=(8, 64) of bfloat16 (128 bytes). "
        "Copy it in several boxes.",
    ),
    (dict(box=(8, 64), swizzle="256B"), "swizzle must be one of ('none', '32B', '64B', '128B'); got swizzle='256B'."),
    (dict(box=(8, 64), l2_promotion="all"), "l2_promotion must be one of ('none', '64B', '128B', '256B'); got"),
    (dict(box=(8, 64), fill="ones"), "fill must be one of ('zeros', 'nan'); got fill='ones'."),
    (dict(box=(8, 64), dtype="float8"), "dtype must be one of ('uint8', "),
    (dict(box=(8, 64), dtype="uint16", fill="nan"), 'fill="nan" needs floating point; got dtype=\'uint16\'.'),
    (
        dict(box=(8, 64), shape=(25, 64)),
        "the tensor reaches outside its buffer of 3072 bytes; "
        "got shape=(25, 64), strides=(128,), offset=0 of bfloat16. "
        "Check shape and strides, which count bytes.",
    ),
    (
        dict(box=(8, 64), shape=(24, 65), strides=(128,)),  # By one element.
        "the tensor reaches outside its buffer of 3072 bytes; got shape=(24, 65), strides=(128,), offset=0 of bf",
    ),
    (dict(box=(8, 64), offset=16), "the tensor reaches outside its buffer of 3072 bytes; got shape=(24, 64),"),
    (dict(box=(8, 64), dtype="float32"), "the tensor reaches outside its buffer of 3072 bytes; got shape=(24, 64),"),
    (
        dict(box=(2, 8, 8), shape=(2, 8, 32), interleave="32B"),
        'interleave="32B" needs swizzle="32B"; got swizzle=\'none\'. Set it.',
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "message"),
    REFUSED
    + [
        ({"parameters": [ffi.TensorMap(0, **fields)]}, f"parameter 0: {message}")
        for fields, message in TENSOR_MAPS_REFUSED
    ],
)
def test_refuses_what_no_device_takes(any_cubin, changed, message):
    with pytest.raises(ValueError, match=f"^{re.escape('kernel_128[cuda]: ' + message)}") as error:
        lower(any_cubin, **changed)
    assert re.search(r"; got .*\. [A-Z].*\.$", str(error.value)), "a message ends with a way out"


def test_takes_what_is_just_within_the_limits(any_cubin):
    tall = jax.ShapeDtypeStruct((300, 8), jnp.bfloat16)
    lower(
        any_cubin,
        operands=[tall],
        parameters=[
            ffi.TensorMap(0, box=(256, 8), element_strides=(8, 1), swizzle="32B"),
            ffi.TensorMap(0, box=(2, 1, 2, 2, 8), shape=(2, 5, 3, 5, 8), swizzle="32B"),
            ffi.TensorMap(0, box=(1, 8), shape=(299, 8), strides=(16,), offset=16),
            ffi.TensorMap(0, box=(256,), shape=(2400,), dtype="uint16"),
            ffi.Pointer(1, offset=3072),
        ],
        grid=(2**31 - 16, 65535, 65535),
        cluster=(16,),
        block=(16, 1, 64),
        smem_bytes=232448,
    )


def test_numpys_integers_do_not_overflow(any_cubin):
    sizes = np.array([3, 2**16, 2**16], np.int32)
    large = jax.ShapeDtypeStruct(tuple(map(int, sizes)), jnp.bfloat16)
    maps = [ffi.TensorMap(0, box=np.array([1, 1, 128], np.uint8), shape=tuple(sizes), offset=np.int32(0))]
    text = lower(any_cubin, operands=[large], parameters=maps)
    assert "parameter0.byte_strides = dense<[131072, 8589934592]> : tensor<2xi64>" in text
    wide = ffi.TensorMap(0, box=np.array([1, 1, 128], np.uint8), shape=tuple(sizes), swizzle="128B")
    with pytest.raises(ValueError, match=r"must fit the swizzle of 128B; got box=\(1, 1, 128\) of bfloat16 \(256 b"):
        lower(any_cubin, operands=[large], parameters=[wide])


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (jnp.bfloat16, "bfloat16"), (jnp.float16, "float16"), (jnp.float32, "float32"), (jnp.int32, "int32"),
        (jnp.int8, "uint8"), (jnp.float8_e4m3fn, "uint8"), (jnp.bool_, "uint8"), (jnp.int16, "uint16"),
        (jnp.complex64, "uint64"),
    ],
)  # fmt: skip
def test_tensor_map_takes_the_arrays_dtype_or_its_bits(dtype, name):
    assert custom_call._tensor_map_dtype(dtype) == name


# The launcher, on the CPU backend and the stand-in for the driver.


@pytest.fixture(scope="session")
def built(tmp_path_factory) -> StandIn:
    return StandIn.of_process(tmp_path_factory)


@pytest.fixture
def stand_in(built):
    built.events()
    return built


_serial = itertools.count()


@pytest.fixture
def new_cubin(any_cubin) -> bytes:
    """A cubin the launcher has not seen yet: it keeps what it has loaded for the life of the process."""
    return any_cubin + f"{os.getpid()} {next(_serial)}".encode()


def run(cubin: bytes, name: str, *operands: jax.Array, results=(X,), **kwargs: Any) -> list[jax.Array]:
    call: dict[str, Any] = {"parameters": [], "grid": (1,), "block": (32,)} | kwargs
    return jax.block_until_ready(
        jax.jit(lambda *xs: ffi.launch(cubin, name, xs, results, target=H200, **call))(*operands)
    )


def test_library_exports_what_it_should_and_no_more(tmp_path):
    library = build(tmp_path / "liblauncher.so", FFI / "launcher.cc", FFI / "cublaslt.cc")
    loaded = handler.load(library)
    for stage in ("instantiate", "initialize", "execute"):
        assert getattr(loaded, f"jaxkernels_{stage}")
    assert loaded.jaxkernels_launch_type_id() != loaded.jaxkernels_launch_type_info()
    assert loaded.jaxkernels_launch_count() == 0
    needed = subprocess.run(["readelf", "-d", library], check=True, capture_output=True, text=True).stdout
    assert "libcuda" not in needed


def test_launch_reaches_the_driver_as_it_was_asked_for(stand_in, new_cubin):
    x = jnp.arange(24 * 64, dtype=jnp.bfloat16).reshape(24, 64)
    run(
        new_cubin,
        "kernel_128_8_4_8_2_128",
        x,
        parameters=[
            ffi.TensorMap(0, box=(8, 64), swizzle="128B", fill="nan", l2_promotion="64B"),
            ffi.Pointer(0, offset=48),
            np.int32(-2),
            np.float64(0.5),
            jnp.bfloat16(1.5).dtype.type(1.5),
            ffi.TensorMap(
                0, box=(2, 4, 16), shape=(2, 12, 16), strides=(1536, 128), offset=32, dtype="uint16",
                element_strides=(1, 2, 1), interleave="32B", swizzle="32B",
            ),
        ],
        grid=(4, 6, 2),
        block=(8, 4, 2),
        cluster=(2, 3),
        smem_bytes=100_000,
    )  # fmt: skip
    address = x.unsafe_buffer_pointer()
    little_endian = lambda value: value.to_bytes(8, "little").hex()
    parameters = [little_endian(address), little_endian(address + 48), "feffffff", np.float64(0.5).tobytes().hex()]
    parameters += ["c03f", little_endian(address + 32)]
    assert stand_in.events() == [
        "load context=0x1",
        "attribute 8=100000",
        f"encode dtype=9 address={address:#x} sizes=64,24 strides=128 box=64,8 element_strides=1,1 "
        "interleave=0 swizzle=3 l2_promotion=1 fill=1",
        f"encode dtype=1 address={address + 32:#x} sizes=16,12,2 strides=128,1536 box=16,4,2 element_strides=1,2,1 "
        "interleave=2 swizzle=1 l2_promotion=3 fill=0",
        "launch stream=0x1 grid=4,6,2 block=8,4,2 smem=100000 cluster=2,3,1 parameters=" + ",".join(parameters),
    ]


def test_several_tensor_maps_are_one_parameter(stand_in, new_cubin):
    x = jnp.zeros((24, 64), jnp.bfloat16)
    maps = tuple(ffi.TensorMap(0, box=(8, 64), shape=(rows, 64), offset=128 * (24 - rows)) for rows in (24, 16))
    run(new_cubin, "kernel_256_4", x, parameters=[maps, np.int32(7)], grid=(1,), block=(1,))
    encoded = [event.split()[2:4] for event in stand_in.events() if event.startswith("encode")]
    address = x.unsafe_buffer_pointer()
    assert encoded == [[f"address={address:#x}", "sizes=64,24"], [f"address={address + 1024:#x}", "sizes=64,16"]]


def test_results_are_buffers_after_the_operands(stand_in, new_cubin):
    x, y = jnp.zeros((8,)), jnp.ones((8,))
    result = jax.ShapeDtypeStruct((8,), jnp.float32)
    outs = run(
        new_cubin, "kernel_8_8_8_8", x, y, results=[result, result], parameters=[ffi.Pointer(i) for i in range(4)]
    )
    (launched,) = [event for event in stand_in.events() if event.startswith("launch")]
    addresses = [int.from_bytes(bytes.fromhex(p), "little") for p in launched.rpartition("=")[2].split(",")]
    assert addresses == [array.unsafe_buffer_pointer() for array in (x, y, *outs)]
    assert "cluster" not in launched, "one block is no cluster: the launch is an ordinary one"


def test_large_clusters_are_opted_in_to(stand_in, new_cubin):
    run(new_cubin, "kernel", grid=(16,), cluster=(16,))
    run(new_cubin, "kernel", grid=(32,), cluster=(16,))
    assert [event for event in stand_in.events() if not event.startswith("launch")] == [
        "load context=0x1",
        "attribute 8=0",
        "attribute 14=1",
    ]


def test_shared_memory_limit_only_rises(stand_in, new_cubin):
    for smem_bytes in (1000, 500, 2000, 1500):
        run(new_cubin, "kernel", smem_bytes=smem_bytes)
    assert [e for e in stand_in.events() if e.startswith("attr")] == ["attribute 8=1000", "attribute 8=2000"]


def test_programs_and_threads_share_one_loaded_cubin(stand_in, new_cubin):
    x = jax.device_put(jnp.zeros((64,)), stand_in.device)  # threads do not inherit the default device
    result = [jax.ShapeDtypeStruct(x.shape, x.dtype)]
    start = threading.Barrier(8)
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            parameters = [ffi.Pointer(0), ffi.Pointer(1), np.int32(number)]
            call = dict(parameters=parameters, grid=(1,), block=(32,), target=H200)
            fun = jax.jit(lambda x: ffi.launch(new_cubin, "kernel_8_8_4", [x], result, **call))
            compiled = fun.lower(x).compile()
            start.wait(60)
            for _ in range(50):
                jax.block_until_ready(compiled(x))
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not errors
    events = stand_in.events()
    assert [event for event in events if not event.startswith("launch")] == ["load context=0x1", "attribute 8=0"]
    last = [event.rpartition(",")[2] for event in events if event.startswith("launch")]
    assert {number: last.count(number) for number in set(last)} == {f"{n:02x}000000": 50 for n in range(8)}


def python(script: str, **env: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, [ROOT, *sys.path])), **env},
    )


def test_each_device_gets_its_own_copy(stand_in, new_cubin):
    devices = jax.devices("cpu")[1:4]
    for device in [*devices, *devices]:
        run(new_cubin, "kernel", jax.device_put(jnp.zeros(8), device))
    launched = "launch stream={} grid=1,1,1 block=32,1,1 smem=0 parameters="
    first = ["load context={}", "attribute 8=0", launched]
    streams = [f"{device.local_hardware_id + 1:#x}" for device in devices]
    assert stand_in.events() == [e.format(n) for n in streams for e in first] + [launched.format(n) for n in streams]


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        ("/nowhere/libcuda.so.1", "kernel[cuda]: the CUDA driver cannot be opened; got: /nowhere/libcuda.so.1: "),
        ("libm.so.6", "kernel[cuda]: the CUDA driver is too old; it has no cuCtxGetCurrent. Install a driver of"),
    ],
)  # fmt: skip
def test_a_missing_or_old_driver_is_an_exception(built, any_cubin, tmp_path, driver, message):
    script = textwrap.dedent(f"""
        import pathlib
        import jax, jax.numpy as jnp
        from jaxkernels import ffi
        from jaxkernels.ffi import handler
        jax.devices()
        handler.register_library(pathlib.Path({str(built.library)!r}), "cpu")
        cubin = pathlib.Path({str(tmp_path / "cubin")!r}).read_bytes()
        f = jax.jit(lambda x: ffi.launch(cubin, "kernel", [x], [x], parameters=[], grid=(1,), block=(1,)))
        try:
            jax.block_until_ready(f(jnp.zeros(8)))
        except jax.errors.JaxRuntimeError as e:
            print(e)
    """)
    (tmp_path / "cubin").write_bytes(any_cubin)
    process = python(script, JAX_PLATFORMS="cpu", STAND_IN_DRIVER=driver)
    assert message in process.communicate(timeout=120)[0]
    assert process.returncode == 0


ON_DRIVER_FAILURE = [
    ({"smem_bytes": 232448}, None,
     "cannot have 232448 bytes of dynamic shared memory beside 16 static ones, the device allows 232448 together; "
     "got CUDA_ERROR_INVALID_VALUE (says the stand-in)."),
    ({"smem_bytes": 232448, "label": "copy"}, None, "copy[cuda]: cannot have 232448 bytes of dynamic shared memory"),
    ({"name": "absent"}, None, "absent[cuda]: the cubin has no kernel absent; got CUDA_ERROR_NOT_FOUND"),
    ({"name": "absent", "label": "copy"}, None, "copy[cuda]: the cubin has no kernel absent; got CUDA_ERROR_NOT_FOUND"),
    ({}, ("cuModuleLoadData", 209),
     "the driver (CUDA 13.5) cannot load the cubin of {cubin_bytes} bytes on this device; "
     "got CUDA_ERROR_NO_BINARY_FOR_GPU (says the stand-in). Compile it for the device's architecture, "),
    ({}, ("cuModuleLoadData", 2), "RESOURCE_EXHAUSTED"),
    ({}, ("cuStreamGetCtx", 201), "the stream's context cannot be entered; got CUDA_ERROR_INVALID_CONTEXT"),
    ({"grid": (4,), "cluster": (2,), "smem_bytes": 64}, ("cuLaunchKernelEx", 1),
     "the launch failed with grid=(4, 1, 1) block=(32, 1, 1) cluster=(2, 1, 1) smem_bytes=64; "
     "got CUDA_ERROR_INVALID_VALUE (says the stand-in)."),
    ({}, ("cuLaunchKernelEx", 999), "smem_bytes=0; got CUDA error 999. Compare it with the kernel's "),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "failure", "message"), ON_DRIVER_FAILURE)
def test_what_the_driver_refuses_is_an_exception_and_no_more(stand_in, new_cubin, changed, failure, message):
    good: dict[str, Any] = {"name": "kernel_4", "parameters": [np.int32(1)]}
    if failure is not None:
        stand_in.fail(*failure)
    try:
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message.format(cubin_bytes=len(new_cubin)))):
            run(new_cubin, **good | changed)
    finally:
        if failure is not None:
            stand_in.fail(failure[0], 0)
    stand_in.events()
    run(new_cubin, **good)
    assert any(event.startswith("launch") for event in stand_in.events())


#: What the launcher reads, spelled out: programs that were exported carry it, so it may not change. The oldest of them
#: have no label.
ATTRIBUTES: dict[str, Any] = {
    "kernel": "kernel_128_8_4",
    "grid": np.array([1, 1, 1]),
    "block": np.array([32, 1, 1]),
    "cluster": np.array([1, 1, 1]),
    "smem_bytes": np.int64(0),
    "num_parameters": np.int64(3),
    "parameter0.kind": "tensor_map",
    "parameter0.buffer": np.int64(0),
    "parameter0.byte_offset": np.int64(0),
    "parameter0.dtype": "bfloat16",
    "parameter0.sizes": np.array([64, 24]),
    "parameter0.byte_strides": np.array([128]),
    "parameter0.box": np.array([64, 8]),
    "parameter0.element_strides": np.array([1, 1]),
    "parameter0.swizzle": "none",
    "parameter0.interleave": "none",
    "parameter0.l2_promotion": "256B",
    "parameter0.fill": "zeros",
    "parameter1.kind": "pointer",
    "parameter1.buffer": np.int64(1),
    "parameter1.byte_offset": np.int64(16),
    "parameter2.kind": "value",
    "parameter2.value": np.array([7, 0, 0, 0], np.uint8),
}


def call(image: bytes, /, **changed: Any) -> jax.Array:
    attributes = ATTRIBUTES | {"cubin": np.frombuffer(image, np.uint8)} | changed
    attributes = {name: value for name, value in attributes.items() if value is not None}
    fun = jax.jit(lambda x: jax.ffi.ffi_call(handler.TARGET, X)(x, **attributes))
    return fun(jnp.zeros(X.shape, X.dtype)).block_until_ready()


def test_launch_writes_these_attributes(stand_in, any_cubin, monkeypatch):
    written = {}

    def ffi_call(target, results, **kwargs):
        assert target == "jaxkernels_launch_v1"
        return lambda *operands, **attributes: written.update(attributes) or results

    monkeypatch.setattr(jax.ffi, "ffi_call", ffi_call)
    parameters = [ffi.TensorMap(0, box=(8, 64)), ffi.Pointer(1, offset=16), np.int32(7)]
    launch = dict(parameters=parameters, grid=(1,), block=(32,), target=H200, label="copy")
    ffi.launch(any_cubin, "kernel_128_8_4", [X], [X], **launch)
    expected = ATTRIBUTES | {"cubin": np.frombuffer(any_cubin, np.uint8), "label": "copy"}
    assert written.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(written[name], value, err_msg=name)
        assert getattr(written[name], "dtype", str) == getattr(value, "dtype", str), name


def test_launcher_takes_these_attributes(stand_in, new_cubin):
    call(new_cubin)
    assert stand_in.events()[-1].endswith(",07000000")


WRONG_ATTRIBUTES = [
    ({"kernel": None}, "launch[cuda]: attribute kernel is missing or of another type; got: Unexpected attribute"),
    ({"kernel": np.int64(1)}, "launch[cuda]: attribute kernel is missing or of another type; got: "),
    ({"label": np.int64(1)}, "kernel_128_8_4[cuda]: attribute label is missing or of another type; got: "),
    ({"grid": None}, "attribute grid is missing or of another type"),
    ({"grid": np.array([1, 1], np.int64)}, "attribute grid must have 3 elements; got 2."),
    ({"grid": np.array([1, 1, 1], np.int32)}, "attribute grid is missing or of another type"),
    ({"grid": np.array([1, 0, 1])}, "attribute grid must be from 1 to 2147483647; got 0."),
    ({"block": np.array([2**31, 1, 1])}, "attribute block must be from 1 to 2147483647; got 2147483648."),
    ({"cluster": np.array([1, 1, -1])}, "attribute cluster must be from 1 to 2147483647; got -1."),
    ({"smem_bytes": np.int64(-4)}, "attribute smem_bytes must be from 0 to 2147483647; got -4."),
    ({"num_parameters": np.int64(4)}, "attribute parameter3.kind is missing or of another type"),
    ({"num_parameters": np.int64(32765)}, "attribute num_parameters must be from 0 to 32764; got 32765."),
    ({"cubin": None}, "attribute cubin is missing or of another type"),
    ({"parameter0.kind": "texture"},
     'attribute parameter0.kind must be one of (value, pointer, tensor_map, tensor_maps); got "texture".'),
    ({"parameter0.buffer": np.int64(-1)}, "attribute parameter0.buffer must be from 0 to 9223372036854775807; got -1."),
    ({"parameter0.dtype": "float8"}, 'attribute parameter0.dtype must be one of (uint8, uint16, '),
    ({"parameter0.sizes": np.zeros(0, np.int64)}, "attribute parameter0.sizes must have 1 to 5 elements; got 0."),
    ({"parameter0.sizes": np.ones(6, np.int64)}, "attribute parameter0.sizes must have 1 to 5 elements; got 6."),
    ({"parameter0.sizes": np.array([64, 0])}, "attribute parameter0.sizes must be from 1 to"),
    ({"parameter0.byte_strides": np.array([128, 8])}, "attribute parameter0.byte_strides must have 1 elements; got 2."),
    ({"parameter0.box": np.array([64, 2**32])}, "attribute parameter0.box must be from 1 to 4294967295; got 4294967"),
    ({"parameter0.element_strides": np.array([0, 1])}, "attribute parameter0.element_strides must be from 1"),
    ({"parameter0.swizzle": "256B"}, 'attribute parameter0.swizzle must be one of (none, 32B, 64B, 128B); got "256B"'),
    ({"parameter0.interleave": "8B"}, 'attribute parameter0.interleave must be one of (none, 16B, 32B); got "8B".'),
    ({"parameter0.l2_promotion": "1B"}, "attribute parameter0.l2_promotion must be one of (none, 64B, 128B, 256B)"),
    ({"parameter0.fill": "ones"}, 'attribute parameter0.fill must be one of (zeros, nan); got "ones".'),
    ({"parameter1.byte_offset": None}, "attribute parameter1.byte_offset is missing or of another type"),
    ({"parameter2.value": np.zeros(0, np.uint8)}, "attribute parameter2.value must have bytes; got none."),
    ({"parameter2.value": np.array([7])}, "attribute parameter2.value is missing or of another type"),
]  # fmt: skip
OUTSIDE_THE_BUFFERS = [
    ({"parameter1.buffer": np.int64(2)}, "parameter 1 names a buffer the call has not; got buffer 2 of 2."),
    ({"parameter0.buffer": np.int64(2**62)}, "parameter 0 names a buffer the call has not; got buffer 46116860184273"),
    ({"parameter1.byte_offset": np.int64(3073)},
     "parameter 1 reaches outside buffer 1 of 3072 bytes; got byte_offset=3073."),
    ({"parameter0.sizes": np.array([64, 25])},
     "parameter 0 reaches outside buffer 0 of 3072 bytes; got sizes=(64, 25) byte_strides=(128) box=(64, 8) "),
    ({"parameter0.sizes": np.array([65, 24])},
     "parameter 0 reaches outside buffer 0 of 3072 bytes; got sizes=(65, 24) byte_strides=(128) box=(64, 8) "),
    ({"parameter0.byte_offset": np.int64(16)}, "parameter 0 reaches outside buffer 0 of 3072 bytes"),
    ({"parameter0.byte_offset": np.int64(4096)}, "parameter 0 reaches outside buffer 0 of 3072 bytes"),
    ({"parameter0.dtype": "float32"}, "parameter 0 reaches outside buffer 0 of 3072 bytes"),
    ({"parameter0.sizes": np.array([2**63 - 1, 2**63 - 1]), "parameter0.byte_strides": np.array([2**63 - 1])},
     "parameter 0 reaches outside buffer 0 of 3072 bytes"),
    ({"parameter0.box": np.array([64, 257])},
     "parameter 0 is no valid tensor map: sizes=(64, 24) byte_strides=(128) box=(64, 257) element_strides=(1, 1) "
     "element_bytes=2 byte_offset=0 swizzle=0 interleave=0; got CUDA_ERROR_INVALID_VALUE (says the stand-in)."),
]  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), WRONG_ATTRIBUTES)
def test_wrong_attributes_are_exceptions_when_the_program_is_compiled(stand_in, any_cubin, changed, message):
    way_out = " Have jaxkernels.ffi.launch write the attributes."
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)) as error:
        call(any_cubin, **changed)
    assert "[cuda]: " in str(error.value)
    assert way_out in str(error.value)


@pytest.mark.parametrize(("changed", "message"), OUTSIDE_THE_BUFFERS)
def test_reaching_outside_the_buffers_is_an_exception(stand_in, any_cubin, changed, message):
    with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape("kernel_128_8_4[cuda]: " + message)):
        call(any_cubin, **changed)


def test_a_cubin_that_was_cut_short_is_an_exception(stand_in, any_cubin):
    sections = int.from_bytes(any_cubin[0x28:0x30], "little")
    for kept in (0, 3, 63, 64, len(any_cubin) // 2, sections, len(any_cubin) - 1):
        message = f"attribute cubin must be a whole ELF image; got {kept} bytes that are none."
        with pytest.raises(jax.errors.JaxRuntimeError, match=re.escape(message)):
            call(any_cubin[:kept])
    size_of_first = sections + 64 + 0x20  # of 64 bytes per section header; the first describes no section
    enlarged = any_cubin[:size_of_first] + (2**63).to_bytes(8, "little") + any_cubin[size_of_first + 8 :]
    with pytest.raises(jax.errors.JaxRuntimeError, match="must be a whole ELF image"):
        call(enlarged)
    with pytest.raises(jax.errors.JaxRuntimeError, match="must be a whole ELF image"):
        call(b".version 8.7\n.target sm_90a\n" + bytes(1000))


# status() and register().


@pytest.fixture
def package_path(monkeypatch, tmp_path):
    """Has the package look for what was built in a folder of the test's, before its sources."""
    monkeypatch.setattr(ffi, "__path__", [str(tmp_path), str(FFI)])
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


def test_status_of_a_bare_checkout(package_path):
    assert ffi.status() == ffi.Status(None, "not built: install the package (pip install -e .)")
    assert str(ffi.status()) == "not built: install the package (pip install -e .)"


def test_status_says_why_nothing_was_built(package_path):
    (package_path / "launcher.txt").write_text("not built: cuda.h was not found\n")
    assert str(ffi.status()) == "not built: cuda.h was not found; install the package again once that is mended"


def test_status_says_what_was_built(package_path):
    (package_path / "launcher.txt").write_text("built with GNU 12.2.0\n")
    library = package_path / "libjaxkernels_launcher.so"
    library.write_bytes(b"")
    assert ffi.status() == ffi.Status(library, "built with GNU 12.2.0")
    assert str(ffi.status()) == f"built with GNU 12.2.0 ({library})"


def test_status_elsewhere_than_on_linux(package_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert str(ffi.status()) == "not built: CUDA kernels run on Linux only, this is darwin"


@pytest.mark.skipif(handler.has_cuda(), reason="this machine has a CUDA device or JAX's plugin")
def test_register_needs_a_device():
    with pytest.raises(RuntimeError, match=r"^register\[cuda\]: JAX has no CUDA device here; got cpu devices\.$"):
        ffi.register()


def test_register_and_launch_say_that_the_launcher_is_missing(package_path, any_cubin, monkeypatch):
    monkeypatch.setattr(handler, "has_cuda", lambda: True)
    monkeypatch.delitem(handler._libraries, "CUDA", raising=False)
    message = f"register[cuda]: the launcher of the CUDA kernels is missing; {ffi.status()}."
    for attempt in (ffi.register, lambda: lower(any_cubin)):
        with pytest.raises(RuntimeError) as error:
            attempt()
        assert str(error.value) == message


def test_registration_happens_once(stand_in):
    library = handler.register_library(stand_in.library, "cpu")
    assert handler.register_library(pathlib.Path("/not/looked/at.so"), "cpu") is library


def test_a_launcher_jaxlib_refuses_is_an_exception(stand_in, monkeypatch):
    def refuse(*args, **kwargs):
        raise RuntimeError("the handler's API version (0.9) is incompatible with the framework's")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    monkeypatch.setattr(jax.ffi, "register_ffi_type", lambda *args, **kwargs: None)
    with pytest.raises(
        RuntimeError, match=r"does not take the launcher; got .*API version \(0\.9\).*Install the package again"
    ):
        handler.register_library(stand_in.library, "another platform")
