"""Digests of the code that each kernel becomes for an H200, to see whether an edit of its source changed it.

    python tests/machine_code.py before.json            # in the first checkout
    python tests/machine_code.py --against before.json  # in the second: prints what differs

Needs no GPU. The problems are those of the benchmark suites and of the test tables, each with the backend and the
configuration that `backend=None` chooses, and again with every backend that takes it.

A Pallas kernel's digest is that of its MLIR, from which the same compiler makes the same machine code. Source
locations, names and the order of constants do not count. A CUDA kernel's digest is that of the machine code (the
cubin's .text sections) and of its launch parameters.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import multiprocessing
import os
import pathlib
import re
import struct
import sys
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).parent))

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir

# What names a kernel or one of its variables; the machine code does not depend on it.
_NAMES = re.compile(r'(sym_name = "[^"]*"|@"?[\w.$<>-]+"?|callee = @\w+)')


def problems() -> dict[str, tuple[Any, str]]:
    """Name -> (case, direction)."""
    from cases import ATTENTION_CASES, MATMUL_CASES

    from jaxkernels.bench.suites import all_suites

    found: dict[str, tuple[Any, str]] = {}
    for suite in all_suites().values():
        if suite.op != "train":
            found |= {f"{p.case.id} {p.direction}": (p.case, p.direction) for p in suite.problems}
    for case in (*MATMUL_CASES, *ATTENTION_CASES):
        found |= {f"{case.id} {direction}": (case, direction) for direction in ("forward", "backward")}
    return found


def lowered(case: Any, direction: str, backend: str | None) -> Any:
    operands = {name: jax.ShapeDtypeStruct(draw.shape, jnp.dtype(draw.dtype)) for name, draw in case.draws.items()}
    masks = case.masks(np.random.default_rng(0))
    operands |= {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in masks.items()}
    f = lambda xs: case.run(xs, backend=backend)
    if direction == "backward":
        forward = f
        moving = {n for n, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}

        def f(xs: dict[str, jax.Array]) -> Any:
            out, pull = jax.vjp(lambda ys: forward(xs | ys), {n: xs[n] for n in moving})
            return pull(jax.tree.map(jnp.ones_like, out))

    return jax.jit(f).trace(operands).lower(lowering_platforms=("cuda",)).compiler_ir()


def calls(op: Any) -> Iterator[Any]:
    """Custom calls of kernels in a module, in order."""
    for region in op.regions:
        for block in region:
            for inner in block:
                if inner.operation.name == "stablehlo.custom_call":
                    yield inner.operation
                yield from calls(inner.operation)


def digest_of(call: Any) -> str | None:
    target = ir.StringAttr(call.attributes["call_target_name"]).value
    if target.startswith("mosaic_gpu"):
        config = ir.DictAttr(call.attributes["mhlo.backend_config"])
        with ir.Context() as ctx:
            ctx.allow_unregistered_dialects = True
            mgpu.dialect.register_dialect(ctx)
            module = ir.Module.parse(ir.StringAttr(config["module"]).value_bytes)
            text = module.operation.get_asm(enable_debug_info=False)
        return "pallas " + _digest(_NAMES.sub("", _with_constants_inlined(text)).encode())
    if target.startswith("jaxkernels_launch"):
        config = ir.DictAttr(call.attributes["mhlo.backend_config"])
        rest, code = [], b""
        for entry in config:
            if entry.name == "cubin":
                is_text = isinstance(entry.attr, ir.StringAttr)
                value = ir.StringAttr(entry.attr).value_bytes if is_text else np.array(entry.attr).tobytes()
                code = b"".join(text_sections(value))
            elif entry.name not in ("name", "kernel", "label"):
                rest.append(f"{entry.name}={entry.attr}")
        assert code, f"no cubin among {[entry.name for entry in config]}"
        return "cuda " + _digest(code + "\n".join(sorted(rest)).encode())
    return None


_CONSTANT = re.compile(r'\s*(%[\w$.-]+) = "[\w.]*arith\.constant"\(\) \{value = (.+)\} : .+')
_DEFINED = re.compile(r"^\s*(%[\w$.-]+)(?::\d+)? =|(%arg\d+):")
_VALUE = re.compile(r"%[\w$.-]+")


def _with_constants_inlined(text: str) -> str:
    """MLIR with each constant where it is used, and values numbered anew: the order of constants no longer shows."""
    lines, names, count = [], {}, 0
    for line in text.splitlines():
        if found := _CONSTANT.fullmatch(line):
            names[found[1]] = f"({found[2]})"
            continue
        for result, argument in _DEFINED.findall(line):
            count += 1
            names[result or argument] = f"%{count}"
        lines.append(_VALUE.sub(lambda value: names.get(value[0], value[0]), line))
    return "\n".join(lines)


def text_sections(elf: bytes) -> Iterator[bytes]:
    """Contents of an ELF file's sections of machine code."""
    (offset,) = struct.unpack_from("<Q", elf, 0x28)
    size, count, names = struct.unpack_from("<HHH", elf, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", elf, offset + i * size) for i in range(count)]
    start_of_names = headers[names][4]
    for name, _, _, _, start, length in headers:
        if elf[start_of_names + name :].startswith(b".text"):
            yield elf[start : start + length]


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def digests(name: str) -> dict[str, list[str]]:
    case, direction = problems()[name]
    found: dict[str, list[str]] = {}
    for backend in (None, "pallas", "cuda"):
        try:
            module = lowered(case, direction, backend)
        except (NotImplementedError, ValueError) as e:
            if backend is None:
                raise
            found[f"{name} {backend}"] = [f"refused: {type(e).__name__}"]
            continue
        found[f"{name} {backend}"] = [d for call in calls(module.operation) if (d := digest_of(call)) is not None]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", nargs="?", help="where to write the digests")
    parser.add_argument("--against", help="digests to compare with")
    parser.add_argument("-k", default="", help="only problems whose name matches this regular expression")
    parser.add_argument("--one-in", type=int, default=1, help="every nth problem only")
    parser.add_argument("--workers", type=int, default=2)
    args = parser.parse_args()
    names = [name for name in problems() if re.search(args.k, name)][:: args.one_in]
    found: dict[str, list[str]] = {}
    with concurrent.futures.ProcessPoolExecutor(args.workers, multiprocessing.get_context("spawn")) as pool:
        for done in pool.map(digests, names, chunksize=4):
            found |= done
    if args.out:
        pathlib.Path(args.out).write_text(json.dumps(found, indent=0))
    if not args.against:
        print(f"{len(names)} problems, {sum(map(len, found.values()))} kernels")
        return 0
    before = json.loads(pathlib.Path(args.against).read_text())
    differing = [name for name, value in found.items() if before.get(name) != value]
    for name in differing:
        print(f"{name}: {before.get(name)} -> {found[name]}")
    print(f"{len(found) - len(differing)} of {len(found)} equal, {sum(map(len, found.values()))} kernels")
    return 1 if differing else 0


if __name__ == "__main__":
    sys.exit(main())
