"""Bad input is refused before any kernel runs, with a message that says what was got and the way out."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from errors import raises_exactly

import jaxkernels as jk
from jaxkernels.core import dispatch
from jaxkernels.ops.matmul.reference import Config

KNOWN = ", ".join(map(repr, dispatch.backend_names()))


def array(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


A, B = array(5, 7), array(7, 3)
Q, K, V = array(2, 5, 4, 8), array(2, 9, 2, 8), array(2, 9, 2, 8)
MATMULS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "unknown backend": (
        (A, B),
        dict(backend="cublas"),
        f"matmul: unknown backend='cublas'; use one of {KNOWN}, or None to let the op choose.",
    ),
    "no array": (("a", B), {}, "matmul[auto]: a must be an array that JAX takes; got str."),
    "None": ((A, None), {}, "matmul[auto]: b must be an array that JAX takes; got NoneType."),
    "array of objects": (
        (A, B.astype(object)),
        {},
        "matmul[auto]: b must be an array that JAX takes; got ndarray of object.",
    ),
    "integer beyond its dtype": (
        ([[2**40]], [[1]]),
        {},
        "matmul[auto]: a must be an array that JAX takes; got list.",
    ),
    "scalar": (
        (A, 2.0),
        {},
        "matmul[auto]: b must have at least one dimension; got a scalar. Multiply with * instead.",
    ),
    "contraction": (
        (A, A),
        dict(backend="xla"),
        "matmul[xla]: a and b must agree in k, a's last and b's second last dimension; got a (5, 7) and b (5, 7).",
    ),
    "contraction with a vector": (
        (A, array(5)),
        {},
        "matmul[auto]: a and b must agree in k, a's last and b's only dimension; got a (5, 7) and b (5,).",
    ),
    "batches": (
        (array(2, 5, 7), array(4, 7, 3)),
        {},
        "matmul[auto]: the batch dimensions of a and b must broadcast; got a (2, 5, 7) and b (4, 7, 3).",
    ),
    "no common dtype": (
        (A.astype(jnp.float8_e4m3fn), B.astype(jnp.float8_e5m2)),
        {},
        "matmul[auto]: a and b have no common dtype; got float8_e4m3fn and float8_e5m2. Cast them with .astype.",
    ),
    "activation": (
        (A, B),
        dict(activation="tanh"),
        "matmul[auto]: unknown activation='tanh'; "
        "use one of 'relu', 'relu_squared', 'silu', 'gelu', 'gelu_erf', or None.",
    ),
    "activation in a list": (
        (A, B),
        dict(activation=["relu"]),
        "matmul[auto]: unknown activation=['relu']; "
        "use one of 'relu', 'relu_squared', 'silu', 'gelu', 'gelu_erf', or None.",
    ),
    "no dtype": ((A, B), dict(out_dtype="tf32"), "matmul[auto]: out_dtype must be a dtype; got 'tf32'."),
    "dtype of objects": (
        (A.astype(np.int8), B.astype(np.int8)),
        dict(out_dtype=object),
        "matmul[auto]: out_dtype must be one of numbers; got object.",
    ),
    "dtype of random keys": (
        (A.astype(np.int8), B.astype(np.int8)),
        dict(out_dtype=jax.eval_shape(lambda: jax.random.key(0)).dtype),
        "matmul[auto]: out_dtype must be a dtype; got key<fry>.",
    ),
    "integer out_dtype": (
        (A, B),
        dict(out_dtype=np.int32),
        "matmul[auto]: out_dtype must be floating, as the operands are (float32); got int32. "
        "Cast the result with .astype.",
    ),
    "real out_dtype": (
        (A.astype(np.complex64), B),
        dict(out_dtype=np.float32),
        "matmul[auto]: out_dtype must be complex, as the operands are (complex64); got float32. "
        "Cast the result with .astype.",
    ),
    "precision": (
        (A, B),
        dict(precision="exact"),
        "matmul[auto]: precision must be None, a jax.lax.Precision, a pair of them, a jax.lax.DotAlgorithmPreset, "
        "or the name of one; got 'exact'.",
    ),
    **{
        f"alpha={alpha!r}": (
            (A, B),
            dict(alpha=alpha),
            f"matmul[auto]: alpha must be a finite real number known at trace time; got {alpha!r}. "
            "Multiply the result instead.",
        )
        for alpha in (True, 2j, float("nan"), float("inf"), "2", None, [2.0, 3.0], np.float32([2]))
    },
    "alpha of integers": (
        (A.astype(np.int8), B.astype(np.int8)),
        dict(alpha=0.5, out_dtype=np.float32),
        "matmul[auto]: alpha=0.5 needs floating operands; got int8. Cast them with .astype, or multiply the result "
        "instead.",
    ),
    "config of no backend": (
        (A, B),
        dict(config=Config()),
        "matmul: config=Config() needs the backend it is for. Name it with backend=.",
    ),
    "config of no kind": (
        (A, B),
        dict(config=dict(num_stages=1), activation="relu", backend="xla"),
        "matmul[xla]: config must be a jaxkernels.ops.matmul.reference.Config; got {'num_stages': 1}.",
    ),
    "bias without columns": (
        (A, array(7)),
        dict(bias=array(5)),
        "matmul[auto]: bias needs columns to add to; got a vector b (7,). Add the bias outside.",
    ),
    "bias of rows": (
        (A, B),
        dict(bias=array(5)),
        "matmul[auto]: bias must have shape (n,) = (3,), one value for each column; got (5,).",
    ),
    "integer bias": (
        (A, B),
        dict(bias=array(3, dtype=np.int32)),
        "matmul[auto]: bias must have a floating dtype; got int32. Cast it with .astype.",
    ),
    "residual of another shape": (
        (A, B),
        dict(residual=array(1, 3)),
        "matmul[auto]: residual must have the result's shape (5, 3); got (1, 3). "
        "Broadcast it with jnp.broadcast_to, or add it outside.",
    ),
    "multiplier of another shape": (
        (A, B),
        dict(multiplier=array(5)),
        "matmul[auto]: multiplier must have the result's shape (5, 3); got (5,). "
        "Broadcast it with jnp.broadcast_to, or multiply by it outside.",
    ),
    "epilogue of integers": (
        (array(5, 7, dtype=np.int8), array(7, 3, dtype=np.int8)),
        dict(activation="relu"),
        "matmul[auto]: bias, activation, multiplier and residual need a floating out_dtype; got int8. "
        "Apply them to the result.",
    ),
}

X, UP, DOWN = array(2, 5, 7), array(7, 3), array(3, 4)
GATED_MLPS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "unknown backend": (
        (X, UP, UP, DOWN),
        dict(backend="cublas"),
        f"gated_mlp: unknown backend='cublas'; use one of {KNOWN}, or None to let the op choose.",
    ),
    "integers": (
        (array(5, 7, dtype=np.int32), UP, UP, DOWN),
        {},
        "gated_mlp[auto]: x must have a floating dtype; got int32. Cast it with .astype.",
    ),
    "scalar": ((array(), UP, UP, DOWN), {}, "gated_mlp[auto]: x must have at least one dimension; got a scalar."),
    "weights in a batch": (
        (X, UP[None], UP, DOWN),
        {},
        "gated_mlp[auto]: w_gate must be a matrix; got shape (1, 7, 3).",
    ),
    "unlike weights": (
        (X, UP, DOWN, DOWN),
        {},
        "gated_mlp[auto]: w_up must have shape (d, f) = (7, 3), as w_gate (d, f) = (7, 3) says; got (3, 4).",
    ),
    "x of another width": (
        (array(5, 6), UP, UP, DOWN),
        {},
        "gated_mlp[auto]: x must have shape (..., d) = (5, 7), as w_gate (d, f) = (7, 3) says; got (5, 6).",
    ),
    "residual of another shape": (
        (X, UP, UP, DOWN),
        dict(residual=array(5, 4)),
        "gated_mlp[auto]: residual must have shape (..., e) = (2, 5, 4), as w_gate (d, f) = (7, 3) and w_down (f, e) = "
        "(3, 4) say; got (5, 4).",
    ),
    "unknown activation": (
        (X, UP, UP, DOWN),
        dict(activation="swish"),
        "gated_mlp[auto]: unknown activation='swish'; "
        "use one of 'relu', 'relu_squared', 'silu', 'gelu', 'gelu_erf', or None.",
    ),
}

ANGLES = array(5, 2)


def heads(num_heads: Any = 4, num_kv_heads: Any = 2, **options: Any) -> dict[str, Any]:
    return dict(num_heads=num_heads, num_kv_heads=num_kv_heads) | options


W = array(7, 32)
_BAD_ANGLES = "qkv_projection[auto]: {} must have shape (T, H/2) = (5, 2); got {}."
QKV_PROJECTIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "unknown backend": (
        (X, W),
        heads(backend="cublas"),
        f"qkv_projection: unknown backend='cublas'; use one of {KNOWN}, or None to let the op choose.",
    ),
    "unknown pairs": (
        (X, W),
        heads(pairs="interleaved"),
        "qkv_projection[auto]: unknown pairs='interleaved'; use 'halves' or 'neighbours'.",
    ),
    "pairs in a list": (
        (X, W),
        heads(pairs=["halves"]),
        "qkv_projection[auto]: unknown pairs=['halves']; use 'halves' or 'neighbours'.",
    ),
    **{
        f"num_heads={num!r}": (
            (X, W),
            heads(num),
            f"qkv_projection[auto]: num_heads must be a positive int; got num_heads={num!r}. It is the number of heads "
            "of queries.",
        )
        for num in (0, -4, True, 1.5, "4", None)
    },
    **{
        f"num_kv_heads={num!r}": (
            (X, W),
            heads(num_kv_heads=num, backend="xla"),
            f"qkv_projection[xla]: num_kv_heads must be a positive int; got num_kv_heads={num!r}. Leave it out for as "
            "many as num_heads.",
        )
        for num in (0, True, 1.5)
    },
    "no array": ((None, W), heads(), "qkv_projection[auto]: x must be an array that JAX takes; got NoneType."),
    "integers": (
        (X.astype(np.int32), W),
        heads(),
        "qkv_projection[auto]: x must have a floating dtype; got int32. Cast it with .astype.",
    ),
    "integer weights": (
        (X, W.astype(np.int8)),
        heads(),
        "qkv_projection[auto]: w must have a floating dtype; got int8. Cast it with .astype.",
    ),
    "8-bit weights": (
        (X, W.astype(jnp.float8_e4m3fn)),
        heads(),
        "qkv_projection[auto]: w must have a floating dtype of 16 bits or more; got float8_e4m3fn. Cast it with "
        ".astype.",
    ),
    "one token": (
        (array(7), W),
        heads(),
        "qkv_projection[auto]: x must have shape (*B, T, D); got (7,). Add a dimension of tokens with x[None].",
    ),
    "w of another width": (
        (X, array(6, 32)),
        heads(),
        "qkv_projection[auto]: w must have shape (D, (N + 2 K) H) with D = 7, as x (2, 5, 7) says; got (6, 32).",
    ),
    "a weight for each head": (
        (X, array(7, 8, 4)),
        heads(),
        "qkv_projection[auto]: w must have shape (D, (N + 2 K) H) with D = 7, as x (2, 5, 7) says; got (7, 8, 4).",
    ),
    "columns": (
        (X, array(7, 31)),
        heads(),
        "qkv_projection[auto]: the columns of w must be a multiple of num_heads + 2 num_kv_heads = 4 + 2 * 2 = 8; got "
        "w (7, 31).",
    ),
    "no columns": (
        (X, array(7, 0)),
        heads(),
        "qkv_projection[auto]: the columns of w must be a multiple of num_heads + 2 num_kv_heads = 4 + 2 * 2 = 8; got "
        "w (7, 0).",
    ),
    "rotation of one array": (
        (X, W, ANGLES),
        heads(),
        "qkv_projection[auto]: rotation must be a pair (cos, sin); got ndarray. None is no rotation.",
    ),
    "rotation of three arrays": (
        (X, W, (ANGLES, ANGLES, ANGLES)),
        heads(),
        "qkv_projection[auto]: rotation must be a pair (cos, sin); got tuple of 3. None is no rotation.",
    ),
    "odd head dimension": (
        (X, array(7, 24), (ANGLES, ANGLES)),
        heads(),
        "qkv_projection[auto]: a rotation needs an even head dimension; got H = 3, the columns of w for each head. "
        "Leave rotation out.",
    ),
    "angles of all features": ((X, W, (array(5, 4), ANGLES)), heads(), _BAD_ANGLES.format("cos", (5, 4))),
    "angles of other tokens": ((X, W, (ANGLES, array(4, 2))), heads(), _BAD_ANGLES.format("sin", (4, 2))),
    "angles of each batch": ((X, W, (array(2, 5, 2), ANGLES)), heads(), _BAD_ANGLES.format("cos", (2, 5, 2))),
    "integer angles": (
        (X, W, (ANGLES.astype(np.int32), ANGLES)),
        heads(),
        "qkv_projection[auto]: cos must have a floating dtype; got int32. Cast it with .astype.",
    ),
    "precision": (
        (X, W),
        heads(precision="exact"),
        "qkv_projection[auto]: precision must be None, a jax.lax.Precision, a pair of them, a "
        "jax.lax.DotAlgorithmPreset, or the name of one; got 'exact'.",
    ),
}

DOT_GENERALS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "unknown backend": (
        (A, B, (((1,), (0,)), ((), ()))),
        dict(backend="cublas"),
        f"dot_general: unknown backend='cublas'; use one of {KNOWN}, or None to let the op choose.",
    ),
    "malformed": (
        (A, B, ((1,), (0,))),
        {},
        "dot_general[auto]: dimension_numbers must be ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), "
        "each a sequence of ints; got ((1,), (0,)).",
    ),
    "dimensions that are no integers": (
        (A, B, (((1.5,), ("0",)), ((), ()))),
        {},
        "dot_general[auto]: dimension_numbers must be ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), "
        "each a sequence of ints; got (((1.5,), ('0',)), ((), ())).",
    ),
    "out of range": (
        (A, B, (((2,), (0,)), ((), ()))),
        {},
        "dot_general[auto]: dimension_numbers must name distinct dimensions of lhs, 0 to 1; got contracting (2,) and "
        "batch () for lhs (5, 7).",
    ),
    "negative": (
        (A, B, (((1,), (-2,)), ((), ()))),
        {},
        "dot_general[auto]: dimension_numbers must name distinct dimensions of rhs, 0 to 1; got contracting (-2,) and "
        "batch () for rhs (7, 3).",
    ),
    "named twice": (
        (A, A, (((0,), (0,)), ((0,), (0,)))),
        {},
        "dot_general[auto]: dimension_numbers must name distinct dimensions of lhs, 0 to 1; got contracting (0,) and "
        "batch (0,) for lhs (5, 7).",
    ),
    "contracted sizes": (
        (A, B, (((0,), (0,)), ((), ()))),
        {},
        "dot_general[auto]: contracting dimensions must have the same sizes in lhs and rhs; got dimensions (0,) of "
        "lhs (5, 7) and (0,) of rhs (7, 3).",
    ),
    "numbers of batch dimensions": (
        (A, A, (((1,), (1,)), ((0,), ()))),
        {},
        "dot_general[auto]: batch dimensions must have the same sizes in lhs and rhs; got dimensions (0,) of "
        "lhs (5, 7) and () of rhs (5, 7).",
    ),
    "dtype of the result": (
        (A, B, (((1,), (0,)), ((), ()))),
        dict(preferred_element_type="tf32"),
        "dot_general[auto]: data type 'tf32' not understood",
    ),
    "precision": (
        (A, B, (((1,), (0,)), ((), ()))),
        dict(precision=3),
        "dot_general[auto]: precision must be None, a jax.lax.Precision, a pair of them, a "
        "jax.lax.DotAlgorithmPreset, or the name of one; got 3.",
    ),
    "config of no backend": (
        (A, B, (((1,), (0,)), ((), ()))),
        dict(config=Config()),
        "matmul: config=Config() needs the backend it is for. Name it with backend=.",
    ),
}

ATTENTIONS: dict[str, tuple[tuple[Any, ...], dict[str, Any], str]] = {
    "unknown backend": (
        (Q, K, V),
        dict(backend="flash"),
        f"dot_product_attention: unknown backend='flash'; use one of {KNOWN}, or None to let the op choose.",
    ),
    "unknown implementation": (
        (Q, K, V),
        dict(implementation="flash"),
        'dot_product_attention[flash]: implementation must be "xla", "cudnn" or None; got \'flash\'. Name other '
        "kernels with backend=.",
    ),
    "implementation and backend": (
        (Q, K, V),
        dict(implementation="xla", backend=dispatch.backend_names()[0]),
        f"dot_product_attention[{dispatch.backend_names()[0]}]: implementation='xla' and "
        f"backend={dispatch.backend_names()[0]!r} disagree. Give one of them.",
    ),
    "both logsumexps": (
        (Q, K, V),
        dict(return_residual=True, return_lse=True),
        "dot_product_attention[auto]: return_residual and return_lse are two forms of one result. Give one of them.",
    ),
    "no array": ((Q, K, None), {}, "dot_product_attention[auto]: value must be an array that JAX takes; got NoneType."),
    "integers": (
        (Q.astype(np.int32), K, V),
        {},
        "dot_product_attention[auto]: query must have a floating dtype; got int32. Cast it with .astype.",
    ),
    "8-bit floats": (
        tuple(x.astype(jnp.float8_e4m3fn) for x in (Q, K, V)),
        {},
        "dot_product_attention[auto]: query must have a floating dtype of 16 bits or more; got float8_e4m3fn. "
        "Cast it with .astype.",
    ),
    "bias of 8-bit floats": (
        (Q, K, V, array(5, 9, dtype=jnp.float8_e5m2)),
        {},
        "dot_product_attention[auto]: bias must have a floating dtype of 16 bits or more; got float8_e5m2. "
        "Cast it with .astype.",
    ),
    "rank of query": (
        (Q[0, 0], K, V),
        {},
        "dot_product_attention[auto]: query must have shape (B, T, N, H) or (T, N, H); got (4, 8).",
    ),
    "rank of key": (
        (Q, K[0], V),
        {},
        "dot_product_attention[auto]: key must have the query's batch 2 and head dimension 8; got key (1, 9, 2, 8) "
        "for query (2, 5, 4, 8).",
    ),
    "rank of value": (
        (Q, K, V[0, 0]),
        {},
        "dot_product_attention[auto]: value must have shape (B, S, K, D) or (S, K, D); got (2, 8).",
    ),
    "dtypes": (
        (Q, K, V.astype(np.float16)),
        {},
        "dot_product_attention[auto]: value must have the query's dtype float32; got float16. Cast it with .astype.",
    ),
    "batch": (
        (Q, K[:1], V[:1]),
        {},
        "dot_product_attention[auto]: key must have the query's batch 2 and head dimension 8; got key (1, 9, 2, 8) "
        "for query (2, 5, 4, 8).",
    ),
    "length of value": (
        (Q, K, V[:, :8]),
        {},
        "dot_product_attention[auto]: value must have the key's batch, length and heads (2, 9, 2); got value "
        "(2, 8, 2, 8).",
    ),
    "heads": (
        (Q[:, :, :3], K, V),
        {},
        "dot_product_attention[auto]: the query heads must be a multiple of the key/value heads; got 3 and 2.",
    ),
    "bias of integers": (
        (Q, K, V, array(5, 9, dtype=np.int32)),
        {},
        "dot_product_attention[auto]: bias must have a floating dtype; got int32. Cast it with .astype.",
    ),
    "bias of key heads": (
        (Q, K, V, array(2, 2, 5, 9)),
        {},
        "dot_product_attention[auto]: bias must be broadcastable to (B, N, T, S) = (2, 4, 5, 9); got (2, 2, 5, 9).",
    ),
    "mask of five dimensions": (
        (Q, K, V),
        dict(mask=array(1, 1, 1, 5, 9, dtype=bool)),
        "dot_product_attention[auto]: mask must be broadcastable to (B, N, T, S) = (2, 4, 5, 9); got (1, 1, 1, 5, 9).",
    ),
    "additive mask": (
        (Q, K, V),
        dict(mask=array(5, 9)),
        "dot_product_attention[auto]: mask must be bool, True where a query sees a key; got float32. "
        "Pass an additive mask as bias, a 0/1 mask as mask.astype(bool).",
    ),
    "lengths that are no array": (
        (Q, K, V),
        dict(query_seq_lengths="all"),
        "dot_product_attention[auto]: query_seq_lengths must be an array that JAX takes; got str.",
    ),
    "dtype of lengths": (
        (Q, K, V),
        dict(query_seq_lengths=array(2)),
        "dot_product_attention[auto]: query_seq_lengths must be int32; got float32. Cast it with .astype(jnp.int32).",
    ),
    "shape of lengths": (
        (Q, K, V),
        dict(key_value_seq_lengths=array(3, dtype=np.int32)),
        "dot_product_attention[auto]: key_value_seq_lengths must have shape (2,); got (3,).",
    ),
    "shape of segments": (
        (Q, K, V),
        dict(query_segment_ids=array(2, 9, dtype=np.int32)),
        "dot_product_attention[auto]: query_segment_ids must have shape (2, 5); got (2, 9).",
    ),
    "shape of segments without batch": (
        (Q[0], K[0], V[0]),
        dict(query_segment_ids=array(1, 5, dtype=np.int32)),
        "dot_product_attention[auto]: query_segment_ids must have shape (5,); got (1, 5).",
    ),
    "segments of queries alone": (
        (Q, K, V),
        dict(query_segment_ids=array(2, 5, dtype=np.int32)),
        "dot_product_attention[auto]: query_segment_ids needs key_value_segment_ids too; got None.",
    ),
    "segments of keys alone": (
        (Q, K, V),
        dict(key_value_segment_ids=array(2, 9, dtype=np.int32)),
        "dot_product_attention[auto]: key_value_segment_ids needs query_segment_ids too; got None.",
    ),
    "window": (
        (Q, K, V),
        dict(local_window_size=(1, 2, 3)),
        "dot_product_attention[auto]: local_window_size must be an int or a pair (left, right) of ints >= 0 or None, "
        "known at trace time; got (1, 2, 3). Give what is traced as a mask.",
    ),
    "negative window": (
        (Q, K, V),
        dict(local_window_size=-1),
        "dot_product_attention[auto]: local_window_size must be an int or a pair (left, right) of ints >= 0 or None, "
        "known at trace time; got -1. Give what is traced as a mask.",
    ),
    "soft cap of zero": (
        (Q, K, V),
        dict(logits_soft_cap=0.0),
        "dot_product_attention[auto]: logits_soft_cap must be positive; got 0.0. None turns it off.",
    ),
    **{
        f"soft cap of {cap}": (
            (Q, K, V),
            dict(logits_soft_cap=cap),
            "dot_product_attention[auto]: logits_soft_cap must be from 2^-126 to 2^100, for float32's division by it; "
            f"got {cap!r}. None turns it off.",
        )
        for cap in (1e39, 1e31, 1e-40)
    },
    "scale beyond float32": (
        (Q, K, V),
        dict(scale=1e39),
        "dot_product_attention[auto]: scale must be finite in float32; got 1e+39. None is 1 / sqrt(H).",
    ),
    "infinite soft cap": (
        (Q, K, V),
        dict(logits_soft_cap=float("inf")),
        "dot_product_attention[auto]: logits_soft_cap must be a finite real number known at trace time; got inf. "
        "None turns it off.",
    ),
    "alignment": (
        (Q, K, V),
        dict(is_causal=True, alignment="bottom"),
        'dot_product_attention[auto]: alignment must be "top_left" or "bottom_right"; got \'bottom\'.',
    ),
    "more queries than keys": (
        (Q, K[:, :3], V[:, :3]),
        dict(is_causal=True, alignment="bottom_right"),
        'dot_product_attention[auto]: alignment="bottom_right" needs no more queries than keys; got 5 and 3. '
        "Pass the mask itself.",
    ),
    **{
        f"scale={scale!r}": (
            (Q, K, V),
            dict(scale=scale),
            f"dot_product_attention[auto]: scale must be a finite real number known at trace time; got {scale!r}. "
            "None is 1 / sqrt(H).",
        )
        for scale in ("small", True, float("nan"), -float("inf"), np.float32([2]))
    },
    **{
        f"{name}={flag!r}": (
            (Q, K, V),
            {name: flag},
            f"dot_product_attention[auto]: {name} must be True or False, known at trace time; got {flag!r}. {way_out}",
        )
        for name, flag, way_out in (
            ("is_causal", "no", "Give what is traced as a mask."),
            ("is_causal", np.array([True]), "Give what is traced as a mask."),
            ("deterministic", 2, "It chooses the kernel."),
            ("return_lse", None, "It decides how many results there are."),
            ("return_residual", 0.0, "It decides how many results there are."),
        )
    },
    "default scale of no head dimension": (
        (Q[..., :0], K[..., :0], V),
        {},
        "dot_product_attention[auto]: scale must be given where the head dimension has no 1 / sqrt(H); got scale=None "
        "for H = 0. Give a number.",
    ),
}

_TABLES = (
    (jk.matmul, MATMULS),
    (jk.gated_mlp, GATED_MLPS),
    (jk.qkv_projection, QKV_PROJECTIONS),
    (jk.dot_general, DOT_GENERALS),
    (jk.dot_product_attention, ATTENTIONS),
)

CALLS: list[Any] = [
    pytest.param(f, args, options, message, id=f"{f.__name__}-{name}")
    for f, table in _TABLES
    for name, (args, options, message) in table.items()
]


@pytest.mark.parametrize(("f", "args", "options", "message"), CALLS)
def test_message(f, args, options, message):
    """The call is only traced, so no kernel can have run."""
    with raises_exactly(ValueError, message):
        jax.eval_shape(lambda: f(*args, **options))


def test_alpha_must_not_be_traced():
    message = r"^matmul\[auto\]: alpha must be a finite real number known at trace time; got .*Tracer"
    with pytest.raises(ValueError, match=message):
        jax.grad(lambda alpha: jnp.sum(jk.matmul(A, B, alpha=alpha)))(0.5)


def test_kernels_take_no_traced_scale(opaque):
    message = (
        r"^dot_product_attention\[opaque\]: scale is a constant of the kernels; got .*Tracer.*\. Give a number known "
        r'at trace time, or use backend="xla"\.'
    )
    with pytest.raises(NotImplementedError, match=message):
        jax.eval_shape(lambda scale: jk.dot_product_attention(Q, K, V, scale=scale, backend=opaque), 1.0)


def test_traced_scale_and_window_are_checked():
    with pytest.raises(ValueError, match=r"^dot_product_attention\[auto\]: scale must be a real number; got "):
        jax.eval_shape(lambda scale: jk.dot_product_attention(Q, K, V, scale=scale), Q)
    with pytest.raises(ValueError, match=r", known at trace time; got .*Tracer.*\. Give what is traced as a mask\."):
        jax.eval_shape(lambda size: jk.dot_product_attention(Q, K, V, local_window_size=(size, 0)), 1)


def test_flags_must_not_be_traced():
    message = (
        r"^dot_product_attention\[auto\]: is_causal must be True or False, known at trace time; got .*Tracer.*\. "
        r"Give what is traced as a mask\."
    )
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda flag: jk.dot_product_attention(Q, K, V, is_causal=flag), True)


def test_strict_promotion_is_kept():
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="a and b have no common dtype"):
        jk.matmul(A, B.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jvp(lambda q: jax.jvp(f, (q,), (q,))[1], (Q,), (Q,)),
        lambda f: jax.grad(lambda q: jnp.sum(jax.jvp(f, (q,), (q,))[1] ** 2))(Q),
    ],
    ids=["of the tangent, forward", "of the tangent, backward"],
)
def test_second_derivative_of_a_tangent_kernel(opaque, transform):
    f = functools.partial(jk.dot_product_attention, key=K, value=V, backend=opaque)
    message = (
        'attention_tangent[opaque]: second derivatives are computed by XLA only. Use backend=None or backend="xla".'
    )
    with raises_exactly(NotImplementedError, message):
        transform(f)


def test_second_derivative_of_a_backward_kernel(opaque):
    f = lambda q: jnp.sum(jk.dot_product_attention(q, K, V, backend=opaque) ** 2)
    message = (
        'attention_backward[opaque]: second derivatives are computed by XLA only. Use backend=None or backend="xla".'
    )
    with raises_exactly(NotImplementedError, message):
        jax.jvp(jax.grad(f), (Q,), (Q,))
