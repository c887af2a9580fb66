"""The tests' tables of cases: of products, attentions and norms (`jaxkernels.core.cases.Case`).

Axes are distinct and greater than 1, so that a wrong order of axes cannot hide. Small cases run
everywhere; real ones are for a GPU.
"""

from __future__ import annotations

import dataclasses

from jaxkernels.core.cases import random_array
from jaxkernels.ops.attention.cases import AttentionCase
from jaxkernels.ops.matmul.cases import MatmulCase
from jaxkernels.ops.norm.cases import NormCase

__all__ = [
    "ATTENTION_CASES", "MATMUL_CASES", "NORM_CASES", "AttentionCase", "MatmulCase", "NormCase", "random_array",
]  # fmt: skip


def _matmul_cases() -> tuple[MatmulCase, ...]:
    case = MatmulCase
    small = [
        # Ragged sizes: 1 in each place, and one less or more than a tile.
        case(1, 7, 63),
        case(63, 1, 100),
        case(100, 63, 1),
        case(63, 100, 7, dtype="float16"),
        case(127, 129, 65, dtype="float32"),
        case(64, 128, 192),
        # The four layouts.
        *(
            case(48, 56, 72, lhs_layout=lhs, rhs_layout=rhs, dtype=dtype)
            for (lhs, rhs), dtype in zip(
                [("mk", "nk"), ("km", "kn"), ("km", "nk"), ("km", "nk")], ["bfloat16", "float16", "bfloat16", "float32"]
            )
        ),
        case(40, 50, 60, batch=(3,), lhs_layout="km", rhs_layout="nk"),
        # Batches, and rows that are not a multiple of 16 bytes.
        case(33, 20, 28, batch=(3,), dtype="float16"),
        case(9, 20, 28, batch=(2, 3)),
        case(9, 20, 36, batch=(2, 3), shared_rhs=True, dtype="float32"),
        # Dtypes of the result.
        case(40, 48, 56, out_dtype="float32"),
        case(40, 48, 56, dtype="float32", out_dtype="bfloat16"),
        case(40, 48, 56, batch=(3,), lhs_layout="km", rhs_layout="nk", dtype="float16", out_dtype="float32"),
        # Epilogues.
        case(40, 48, 56, bias=True),
        case(40, 48, 56, activation="relu", dtype="float16"),
        case(40, 48, 56, activation="relu_squared", multiplier=True),
        case(40, 48, 56, residual=True),
        case(40, 48, 56, activation="silu", multiplier=True),
        case(40, 47, 56, batch=(3,), shared_rhs=True, alpha=0.375, bias=True, multiplier=True, dtype="float16"),
        case(24, 40, 32, bias=True, activation="gelu", multiplier=True, residual=True, out_dtype="float32"),
        case(40, 48, 56, activation="silu", gate=True),
        case(40, 47, 56, bias=True, activation="gelu", residual=True),
        case(40, 48, 55, bias=True, activation="gelu_erf", dtype="float32"),
        case(40, 48, 56, batch=(3,), shared_rhs=True, activation="silu", residual=True, out_dtype="float32"),
        case(1, 48, 56, batch=(3,), bias=True, activation="silu", residual=True, dtype="float16"),
        case(40, 48, 56, alpha=0.375),
        case(40, 47, 56, batch=(3,), shared_rhs=True, alpha=0.375, bias=True, activation="gelu", residual=True),
    ]
    real = [
        case(1024, 1024, 1024),
        case(4096, 4096, 4096),
        case(4096, 4096, 4096, lhs_layout="mk", rhs_layout="nk"),
        case(4096, 4096, 4096, lhs_layout="km", rhs_layout="kn"),
        case(4096, 4096, 4096, lhs_layout="km", rhs_layout="nk", dtype="float16"),
        case(2048, 2048, 2048, dtype="float32"),
        case(1000, 1000, 1000),
        case(4095, 4097, 4093),
        case(799, 1023, 511, dtype="float16"),
        case(16, 4096, 4096),
        case(64, 28672, 4096),
        case(256, 4096, 14336),
        case(2048, 50257, 768),
        case(2048, 768, 50257, lhs_layout="mk", rhs_layout="nk"),
        case(50257, 768, 2048, lhs_layout="km", rhs_layout="kn", out_dtype="float32"),
        case(8192, 3072, 768, bias=True, activation="gelu"),
        case(8192, 768, 3072, bias=True, residual=True),
        case(8192, 3072, 768, bias=True, activation="silu", multiplier=True),
        case(4096, 5632, 2048, activation="silu", gate=True, dtype="float16"),
        case(4095, 1001, 513, activation="gelu", multiplier=True),
        case(8192, 3072, 768, bias=True, activation="gelu_erf", residual=True, dtype="float16"),
        case(8192, 2048, 1024, activation="silu", out_dtype="float32"),
        case(1024, 512, 768, batch=(12,)),
        case(1023, 511, 767, batch=(7,), bias=True, activation="relu"),
        case(512, 768, 768, batch=(16,), shared_rhs=True, residual=True),
        case(1024, 512, 768, alpha=0.375, bias=True, activation="silu", residual=True, out_dtype="float32"),
    ]
    return (*small, *(dataclasses.replace(c, size="real") for c in real))


MATMUL_CASES = _matmul_cases()


def _attention_cases() -> tuple[AttentionCase, ...]:
    case = AttentionCase
    small = [
        # Grouped heads, lengths that differ, length 1.
        case(2, 24, 40, 6, 6, 16),
        case(2, 24, 40, 6, 2, 16, causal=True),
        case(2, 40, 24, 6, 1, 16, causal=True, dtype="float16"),
        case(3, 1, 40, 4, 2, 32),
        case(3, 24, 1, 4, 2, 32, causal=True),
        case(1, 1, 1, 3, 3, 16),
        # Head dimensions.
        case(1, 33, 65, 2, 1, 64, causal=True),
        case(1, 33, 65, 2, 1, 80),
        case(1, 33, 65, 2, 2, 96, dtype="float16"),
        case(1, 65, 33, 2, 1, 128, dtype="float32"),
        case(1, 33, 65, 2, 1, 256, causal=True),
        case(2, 24, 40, 4, 2, 48, value_dim=32, causal=True),
        case(2, 24, 40, 4, 2, 16, value_dim=64, dtype="float32"),
        # Windows.
        case(2, 40, 40, 4, 2, 16, window=(5, 3)),
        case(2, 40, 40, 4, 2, 16, window=(5, None), causal=True, dtype="float32"),
        case(2, 24, 40, 4, 2, 16, window=(None, 2)),
        case(2, 40, 24, 4, 2, 16, window=(3, 0)),  # The last queries see no key.
        # New queries on a cache of keys.
        case(2, 5, 40, 4, 2, 16, causal=True, alignment="bottom_right"),
        case(2, 24, 40, 4, 2, 16, window=(5, 3), alignment="bottom_right", dtype="float32"),
        # Lengths.
        case(3, 24, 40, 4, 2, 16, key_lengths=True),
        case(3, 24, 40, 4, 2, 16, query_lengths=True, dtype="float32"),
        case(3, 24, 40, 4, 2, 16, query_lengths=True, key_lengths=True, causal=True, dtype="float16"),
        # Masks.
        case(2, 24, 40, 4, 2, 16, mask="BNTS", masked_rows=True),
        case(2, 24, 40, 4, 2, 16, mask="B11S", dtype="float32"),
        case(2, 24, 40, 4, 2, 16, mask="11TS", masked_rows=True, causal=True, dtype="float16"),
        case(2, 24, 192, 4, 1, 64, mask="1N1S"),  # 192 % 128 == 64
        # Biases of every kind of broadcast.
        *(
            case(2, 12, 20, 4, 2, 16, bias=letters, dtype=dtype, causal=letters == "1NTS")
            for letters, dtype in [
                ("BNTS", "bfloat16"),
                ("1NTS", "float32"),
                ("B1TS", "float16"),
                ("11TS", "bfloat16"),
                ("B11S", "float32"),
                ("1N1S", "bfloat16"),
                ("BNT1", "float32"),
                ("1111", "float32"),
            ]
        ),
        case(2, 12, 20, 4, 1, 16, bias="1NTS", bias_dtype="float32"),
        # Segments and soft cap.
        case(2, 40, 40, 4, 2, 16, segments=True, causal=True),
        case(2, 24, 40, 4, 2, 16, segments=True, dtype="float32"),
        case(2, 24, 40, 4, 2, 16, soft_cap=2.5),
        case(2, 24, 40, 4, 2, 16, soft_cap=2.5, bias="1NTS", mask="B1TS", causal=True, dtype="float32"),
        # Everything at once.
        case(
            3, 24, 40, 6, 2, 16, value_dim=32, dtype="float32", causal=True, window=(9, None), soft_cap=5.0,
            query_lengths=True, key_lengths=True, segments=True, bias="BNTS", mask="1NTS", masked_rows=True,
        ),
    ]  # fmt: skip
    real = [
        case(4, 1024, 1024, 16, 16, 64, causal=True),
        case(4, 1024, 1024, 16, 16, 128, causal=True, dtype="float16"),
        case(2, 1024, 1024, 8, 8, 256, causal=True),
        case(1, 4096, 4096, 16, 16, 128),
        case(1, 4096, 4096, 16, 4, 128, causal=True),
        case(1, 4096, 4096, 16, 1, 64, causal=True),
        case(2, 799, 1023, 12, 4, 64, causal=True),
        case(2, 1023, 799, 12, 12, 128),
        case(2, 1000, 1000, 8, 8, 80, causal=True),
        case(2, 1000, 1000, 8, 2, 96, dtype="float16"),
        case(8, 1, 4096, 32, 8, 128),
        case(3, 5, 4097, 32, 8, 128, causal=True, alignment="bottom_right"),
        case(2, 3001, 5, 6, 2, 96, dtype="float16"),
        case(2, 900, 60, 12, 4, 128, causal=True),
        case(4, 1000, 101, 6, 6, 64, query_lengths=True, key_lengths=True),
        case(3, 500, 30, 8, 2, 160, mask="B1TS", masked_rows=True),
        case(2, 700, 1100, 8, 2, 64, causal=True, alignment="bottom_right"),
        case(2, 1024, 1024, 16, 8, 192, value_dim=128, causal=True),
        case(2, 2048, 2048, 16, 8, 128, window=(255, 0), causal=True),
        case(2, 1024, 1088, 8, 4, 64, mask="B1TS", masked_rows=True),
        case(4, 1024, 1024, 8, 4, 64, query_lengths=True, key_lengths=True, causal=True),
        case(3, 1024, 1024, 8, 4, 128, key_lengths=True, window=(200, 0)),  # The last queries see no key.
        case(3, 1024, 1024, 8, 4, 256, query_lengths=True, key_lengths=True, window=(200, 100)),
        case(4, 2048, 2048, 8, 4, 128, segments=True, causal=True),
        case(2, 1024, 1024, 8, 4, 256, segments=True, key_lengths=True, soft_cap=30.0, causal=True),
        case(2, 1024, 1024, 8, 4, 128, bias="1NTS", causal=True),
        case(2, 1024, 1024, 8, 4, 64, bias="B11S", bias_dtype="float32"),
        case(2, 1024, 1024, 8, 4, 128, soft_cap=30.0, causal=True),
        case(2, 1024, 1024, 8, 4, 64, dtype="float32", causal=True),
    ]
    return (*small, *(dataclasses.replace(c, size="real") for c in real))


ATTENTION_CASES = _attention_cases()


def _norm_cases() -> tuple[NormCase, ...]:
    case = NormCase
    small = [
        # One row, one feature, rows that are not a multiple of 16 bytes.
        case((1,), 64),
        case((), 7, dtype="float32"),
        case((5,), 1, dtype="float32"),
        case((5,), 1, centered=True, bias=True),
        case((3, 5), 33),
        case((3, 5), 33, centered=True, bias=True, dtype="float16"),
        case((2, 3, 5), 48, centered=True, scale=False, dtype="float32"),
        # What may be given.
        case((6,), 40, scale=False),
        case((6,), 40, residual=True),
        case((6,), 40, residual=True, dtype="float16"),
        case((2, 6), 40, centered=True, bias=True, residual=True),
        case((2, 6), 40, centered=True, scale=False, bias=True, residual=True, dtype="float32"),
        # Other dtypes of the parameters, eps and offset.
        case((6,), 40, parameter_dtype="float32", scale_offset=1.0),
        case((6,), 40, centered=True, bias=True, dtype="float32", parameter_dtype="bfloat16", eps=0.1),
        case((6,), 40, scale_offset=1.0, residual=True, eps=1e-5, dtype="float16"),
        case((67,), 130, centered=True, bias=True, dtype="float16", parameter_dtype="float32"),
    ]
    real = [
        case((16384,), 4096),
        case((16384,), 4096, residual=True),
        case((4, 1000), 5120, dtype="float16", parameter_dtype="float32", scale_offset=1.0),
        case((4096,), 12288, centered=True, bias=True),
        case((8, 512), 768, centered=True, bias=True, residual=True),
        case((2048,), 16384, residual=True),
        case((1000,), 65536, centered=True, bias=True, dtype="float32"),
        case((999,), 1001, centered=True, bias=True, residual=True, dtype="float16"),
        case((100003,), 64),
        case((3,), 8192, dtype="float32"),
    ]
    return (*small, *(dataclasses.replace(c, size="real") for c in real))


NORM_CASES = _norm_cases()
