"""The wgmma instructions as C++ text: each shape needs an operand list of its own, which no template can write.

wgmma.cuh includes this text under the name `NAME` and offers the instructions as one template.
"""

from __future__ import annotations

import dataclasses
import functools

__all__ = ["NAME", "instructions"]

NAME = "wgmma_instructions.cuh"

_COLUMNS = range(8, 257, 8)


@dataclasses.dataclass(frozen=True)
class _Type:
    """A type of operands.

    Attributes:
      name: in ptx.cuh.
      ptx: in PTX.
      num_bytes: of an element.
      accumulator: the type of the sums, in C++.
    """

    name: str
    ptx: str
    num_bytes: int
    accumulator: str = "float"

    @property
    def is_float(self) -> bool:
        return self.accumulator == "float"

    @property
    def columns(self) -> list[int]:
        """The values of n. Above 32, products of integers have multiples of 16 only."""
        return [n for n in _COLUMNS if self.is_float or n < 32 or n % 16 == 0]


_TYPES = (
    _Type("BFloat16", "bf16", 2),
    _Type("Float16", "f16", 2),
    _Type("Float8E4M3", "e4m3", 1),
    _Type("Float8E5M2", "e5m2", 1),
    _Type("Int8", "s8", 1, "int"),
)


@functools.cache
def instructions(type_name: str | None = None, *columns: int) -> str:
    """Returns specialisations of `WgmmaInstruction`, as wgmma.cuh describes them.

    Args:
      type_name: the one type of operands, or None for all of them. A short text compiles faster.
      columns: values of n; without them, all.
    """
    structs = "".join(
        _struct(t, n)
        for t in _TYPES
        for n in t.columns
        if type_name in (None, t.name) and (not columns or n in columns)
    )  # fmt: skip
    return f"#pragma once\n\nnamespace jaxkernels {{\n\n{structs}}}  // namespace jaxkernels\n"


def _struct(t: _Type, n: int) -> str:
    functions = "".join(_function(t, n, lhs_is_in_registers) for lhs_is_in_registers in (False, True))
    return f"template <>\nstruct WgmmaInstruction<{t.name}, {n}> {{\n{functions}}};\n\n"


def _function(t: _Type, n: int, lhs_is_in_registers: bool) -> str:
    count = n // 2  # Accumulators of one thread: 64 n / 128.
    lhs = [f"lhs{i}" for i in range(4)] if lhs_is_in_registers else ["lhs"]
    inputs = {name: f'"r"(lhs[{i}])' if lhs_is_in_registers else '"r"(lhs)' for i, name in enumerate(lhs)}
    inputs |= {"rhs": '"r"(rhs)', "accumulate": '"r"(accumulate)', "high": '"n"(kDescriptorHigh)'}
    in_memory = ["rhs"] if lhs_is_in_registers else ["lhs", "rhs"]
    transposed = [f"k{name.title()}IsTransposed" for name in in_memory]
    if t.num_bytes == 2:
        inputs |= {name: f'"n"(int({name}))' for name in transposed}
    number = {name: f"%{count + i}" for i, name in enumerate(inputs)}

    outputs = [f'"{"+f" if t.is_float else "+r"}"(acc[{i}])' for i in range(count)]
    descriptors = {name: f"mov.b64 {name}, {{{number[name]}, {number['high']}}};" for name in in_memory}
    # Sums of floats: neither operand is negated. 16-bit types: which operands in shared memory are transposed.
    immediates = (["1", "1"] if t.is_float else []) + [number[name] for name in transposed if name in number]
    operands = [
        "{" + ", ".join(f"%{i}" for i in range(count)) + "}",
        "{" + ", ".join(number[name] for name in lhs) + "}" if lhs_is_in_registers else "lhs",
        "rhs",
        "accumulate",
        *immediates,
    ]
    types = f"{'f32' if t.is_float else 's32'}.{t.ptx}.{t.ptx}"
    lines = [
        "{",
        f".reg .b64 {', '.join(descriptors)};",
        ".reg .pred accumulate;",
        f"setp.ne.b32 accumulate, {number['accumulate']}, 0;",
        *descriptors.values(),
        f"wgmma.mma_async.sync.aligned.m64n{n}k{32 // t.num_bytes}.{types} {', '.join(operands)};",
        "}",
    ]
    text = "\n".join(f'        "{line}\\n"' for line in lines)
    lhs_parameter = "const u32 (&lhs)[4]" if lhs_is_in_registers else "u32 lhs"
    return f"""  template <{", ".join(f"bool {name}" for name in transposed)}>
  static __device__ __forceinline__ void run(
      {t.accumulator} (&acc)[{count}], {lhs_parameter}, u32 rhs, int accumulate) {{
    asm volatile(
{text}
        : {", ".join(outputs)}
        : {", ".join(inputs.values())});
  }}
"""
