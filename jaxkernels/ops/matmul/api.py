"""Matrix products: `matmul`, `dot_general`, and the two primitives behind them.

`dot_general_op` is the product times a constant, bilinear in its operands. `matmul_op` adds the epilogue
(bias, activation, residual); its derivative is written with plain products, so that every order of
derivative in both modes follows from the two rules of the bilinear primitive.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.interpreters import ad
from jaxtyping import Array, ArrayLike

from jaxkernels.core import _jax, dispatch, hardware
from jaxkernels.core.arguments import as_array, as_number
from jaxkernels.core.kernel_op import KernelOp, usual_promotion
from jaxkernels.core.sharding import Assignment, Factors
from jaxkernels.core.types import ArrayType
from jaxkernels.ops.matmul.epilogue import ACTIVATIONS, apply_epilogue
from jaxkernels.ops.matmul.spec import Activation, DimensionNumbers, MatmulSpec, free_dims

__all__ = ["dot_general", "matmul"]


@dataclasses.dataclass(frozen=True)
class Product:
    """The static part of a product and its epilogue."""

    dimension_numbers: DimensionNumbers
    out_dtype: np.dtype
    precision: Any = None
    alpha: float = 1.0
    bias: bool = False
    activation: Activation | None = None
    residual: bool = False
    save_preactivation: bool = False

    @property
    def fused(self) -> bool:
        """Whether there is an epilogue."""
        return self.bias or self.activation is not None or self.residual

    @property
    def product(self) -> Product:
        """The product alone, times alpha."""
        return Product(self.dimension_numbers, self.out_dtype, self.precision, self.alpha)


class _MatmulOp(KernelOp):
    """Operands lhs, rhs, then bias and residual where given; results out, then the pre-activation.

    An operand of the plain product may be a Python scalar: JAX passes literals of a program to the rules as such.
    """

    keeps_weak_types = True

    def spec(self, static: Product, operands: Sequence[ArrayType], target: hardware.Chip) -> MatmulSpec:
        lhs, rhs, *epilogue = operands
        return MatmulSpec(
            lhs=lhs,
            rhs=rhs,
            dimension_numbers=static.dimension_numbers,
            out_dtype=static.out_dtype,
            target=target,
            precision=static.precision,
            alpha=static.alpha,
            bias=epilogue.pop(0) if static.bias else None,
            activation=static.activation,
            residual=epilogue.pop(0) if static.residual else None,
            save_preactivation=static.save_preactivation,
        )

    def results(self, static: Product, operands: Sequence[ArrayType]) -> list[ArrayType]:
        out = ArrayType(self.spec(static, operands, hardware.host()).out_shape, static.out_dtype)
        return [out, out] if static.save_preactivation else [out]

    def factors(self, static: Product, operands: Sequence[ArrayType]) -> Factors:
        (lhs_k, rhs_k), (lhs_b, rhs_b) = static.dimension_numbers
        lhs = [f"m{d}" for d in range(operands[0].ndim)]
        rhs = [f"n{d}" for d in range(operands[1].ndim)]
        for i, (d, e) in enumerate(zip(lhs_b, rhs_b)):
            lhs[d] = rhs[e] = f"b{i}"
        for i, (d, e) in enumerate(zip(lhs_k, rhs_k)):
            lhs[d] = rhs[e] = f"k{i}"
        batch = [lhs[d] for d in lhs_b]
        out = tuple(batch + [f for f in lhs if f[0] == "m"] + [f for f in rhs if f[0] == "n"])
        epilogue = [(out[-1],)] * static.bias + [out] * static.residual
        return Factors(
            operands=(tuple(lhs), tuple(rhs), *epilogue),
            results=(out,) * (2 if static.save_preactivation else 1),
            scatter=not static.fused,
        )

    def local(self, static: Product, assignment: Assignment, **params: Any) -> Callable[..., list[jax.Array]]:
        if not static.fused or not assignment.sums[0]:
            return super().local(static, assignment, **params)
        # The shards' partial products must be added up before the activation sees them.
        return _unfused(static, params, add_up=lambda out: jax.lax.psum(out, assignment.sums[0]))

    def batch(
        self, args: Sequence[jax.Array], dims: Sequence[int | None], *, static: Product, **params: Any
    ) -> tuple[list[jax.Array], list[int]]:
        lhs, rhs, *epilogue = args
        lhs_dim, rhs_dim, *epilogue_dims = dims
        if not static.fused:
            numbers, out_dim = _batched(static.dimension_numbers, np.ndim(lhs), np.ndim(rhs), lhs_dim, rhs_dim)
            static = dataclasses.replace(static, dimension_numbers=numbers)
            return [self.bind(lhs, rhs, static=static, **params)], [out_dim]
        if lhs_dim is None or rhs_dim is not None or (static.bias and epilogue_dims[0] is not None):
            # A weight or a bias of its own for each element: the kernels fuse one bias for all.
            outs = jax.vmap(_unfused(static, params), in_axes=tuple(dims), out_axes=0)(*args)
            return outs, [0] * len(outs)
        numbers, out_dim = _batched(static.dimension_numbers, lhs.ndim, rhs.ndim, lhs_dim, None)
        if static.residual:
            residual, dim = epilogue[-1], epilogue_dims[-1]
            if dim is None:
                shape = (*residual.shape[:out_dim], lhs.shape[lhs_dim], *residual.shape[out_dim:])
                epilogue[-1] = jnp.broadcast_to(jnp.expand_dims(residual, out_dim), shape)
            else:
                epilogue[-1] = jnp.moveaxis(residual, dim, out_dim)
        outs = self.bind(lhs, rhs, *epilogue, static=dataclasses.replace(static, dimension_numbers=numbers), **params)
        return outs, [out_dim] * len(outs)


dot_general_op = _MatmulOp("matmul", "jk_dot_general", multiple_results=False)
matmul_op = _MatmulOp("matmul", "jk_matmul", multiple_results=True)


# Rules of the plain product.


def _cotangent(
    ct: jax.Array,
    mine: Any,
    other: jax.Array,
    *,
    mine_k: tuple[int, ...],
    mine_b: tuple[int, ...],
    other_k: tuple[int, ...],
    other_b: tuple[int, ...],
    ct_other: tuple[int, ...],
    static: Product,
    backend: str | None,
    config: Any,
) -> jax.Array:
    """The cotangent of one operand: ct contracted with the other over the other's free dimensions.

    It is a product of other sizes than `config` was given for, and chooses its own.

    dot_general(ct, other) has the dimensions (batch, mine's free, k) and dot_general(other, ct) has
    (batch, k, mine's free): the order is taken that leaves the result in mine's own layout.
    """
    mine_free = free_dims(mine.aval.ndim, mine_k, mine_b)
    other_free = free_dims(np.ndim(other), other_k, other_b)
    ct_b = tuple(range(len(mine_b)))
    k = tuple(mine_k[i] for i in np.argsort(other_k, kind="stable"))  # as the other operand orders them
    order = (*mine_b, *k, *mine_free)
    if order == tuple(range(mine.aval.ndim)):
        operands, dims = (other, ct), ((other_free, ct_other), (other_b, ct_b))
    else:
        order = (*mine_b, *mine_free, *k)
        operands, dims = (ct, other), ((ct_other, other_free), (ct_b, other_b))
    static = dataclasses.replace(static, dimension_numbers=dims, out_dtype=mine.aval.dtype)
    return jnp.transpose(dot_general_op.bind(*operands, static=static, backend=backend), np.argsort(order).tolist())


def _transpose_lhs(ct: jax.Array, lhs: Any, rhs: jax.Array, *, static: Product, **params: Any) -> jax.Array:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = static.dimension_numbers
    num_n = np.ndim(rhs) - len(rhs_k) - len(rhs_b)
    return _cotangent(
        ct, lhs, rhs, mine_k=lhs_k, mine_b=lhs_b, other_k=rhs_k, other_b=rhs_b,
        ct_other=tuple(range(np.ndim(ct) - num_n, np.ndim(ct))), static=static, **params,
    )  # fmt: skip


def _transpose_rhs(ct: jax.Array, lhs: jax.Array, rhs: Any, *, static: Product, **params: Any) -> jax.Array:
    (lhs_k, rhs_k), (lhs_b, rhs_b) = static.dimension_numbers
    num_m = np.ndim(lhs) - len(lhs_k) - len(lhs_b)
    return _cotangent(
        ct, rhs, lhs, mine_k=rhs_k, mine_b=rhs_b, other_k=lhs_k, other_b=lhs_b,
        ct_other=tuple(range(len(lhs_b), len(lhs_b) + num_m)), static=static, **params,
    )  # fmt: skip


ad.defbilinear(dot_general_op.primitive, _transpose_lhs, _transpose_rhs)
_jax.register_bilinear_taylor(dot_general_op.primitive)


def _batched(
    dimension_numbers: DimensionNumbers, lhs_ndim: int, rhs_ndim: int, lhs_dim: int | None, rhs_dim: int | None
) -> tuple[DimensionNumbers, int]:
    """The dimension numbers with a mapped dimension added, and its place in the result.

    Mapped in both operands it becomes a batch dimension; in one, a free dimension of that operand.
    The ranks include the mapped dimensions.
    """
    (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers

    def shifted(dims: tuple[int, ...], inserted: int | None) -> tuple[int, ...]:
        return dims if inserted is None else tuple(d + (d >= inserted) for d in dims)

    lhs_k, lhs_b = shifted(lhs_k, lhs_dim), shifted(lhs_b, lhs_dim)
    rhs_k, rhs_b = shifted(rhs_k, rhs_dim), shifted(rhs_b, rhs_dim)
    if lhs_dim is not None and rhs_dim is not None:
        return ((lhs_k, rhs_k), ((lhs_dim, *lhs_b), (rhs_dim, *rhs_b))), 0
    numbers = ((lhs_k, rhs_k), (lhs_b, rhs_b))
    lhs_free = free_dims(lhs_ndim, lhs_k, lhs_b)
    if lhs_dim is not None:
        return numbers, len(lhs_b) + lhs_free.index(lhs_dim)
    rhs_free = free_dims(rhs_ndim, rhs_k, rhs_b)
    return numbers, len(lhs_b) + len(lhs_free) + rhs_free.index(rhs_dim)


# Rules of the product with an epilogue.


def _unfused(
    static: Product, params: dict[str, Any], add_up: Callable[[jax.Array], jax.Array] = lambda out: out
) -> Callable[..., list[jax.Array]]:
    """The fused function as a plain product, summed over shards by `add_up`, followed by jnp operations."""

    def product_then_epilogue(lhs: jax.Array, rhs: jax.Array, *epilogue: jax.Array) -> list[jax.Array]:
        out = add_up(dot_general_op.bind(lhs, rhs, static=static.product, **params))
        spec = matmul_op.spec(static, [ArrayType.of(x) for x in (lhs, rhs, *epilogue)], hardware.host())
        with usual_promotion():
            return apply_epilogue(spec, out, *epilogue)

    return product_then_epilogue


def _fused_jvp(primals: Any, tangents: Any, *, static: Product, **params: Any) -> tuple[list, list]:
    lhs, rhs, *_ = primals
    dlhs, drhs, *depilogue = tangents
    saving = dataclasses.replace(static, save_preactivation=static.activation is not None)
    outs = matmul_op.bind(*primals, static=saving, **params)
    out, preactivation = outs[0], outs[-1]

    product = functools.partial(dot_general_op.bind, static=static.product, **params)
    terms = []
    if type(dlhs) is not ad.Zero:
        terms.append(product(dlhs, rhs))
    if type(drhs) is not ad.Zero:
        terms.append(product(lhs, drhs))
    if static.bias and type(dbias := depilogue.pop(0)) is not ad.Zero:
        terms.append(jnp.broadcast_to(dbias.astype(out.dtype), out.shape))
    dpre = functools.reduce(jnp.add, terms) if terms else None

    dout = dpre
    if static.activation is not None and dpre is not None:
        # Checkpointed, so that the pre-activation is all the backward pass keeps of the activation.
        activation = jax.checkpoint(ACTIVATIONS[static.activation], prevent_cse=False)
        _, dout = jax.jvp(activation, (preactivation,), (dpre,))
    if static.residual and type(dresidual := depilogue.pop(0)) is not ad.Zero:
        dresidual = dresidual.astype(out.dtype)
        dout = dresidual if dout is None else dout + dresidual

    zero = ad.Zero(jax.typeof(out).to_tangent_aval())
    tangent = lambda t: zero if t is None else t
    if static.save_preactivation:
        return [out, preactivation], [tangent(dout), tangent(dpre)]
    return [out], [tangent(dout)]


def _fused_taylor(primals: Any, series: Any, *, static: Product, backend: str | None, config: Any) -> Any:
    return _jax.taylor(_unfused(static, dict(backend=backend, config=config)), primals, series)


ad.primitive_jvps[matmul_op.primitive] = _fused_jvp
_jax.register_taylor(matmul_op.primitive, _fused_taylor)


# The public functions.


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    alpha: float = 1.0,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
    out_dtype: Any = None,
    precision: Any = None,
    backend: str | None = None,
    config: Any = None,
) -> Array:
    """Multiplies two matrices, or batches of them, and applies an epilogue to the product.

    out = activation(alpha * (a @ b) + bias) + residual, each part where given. `a` and `b` are combined as
    `jnp.matmul` does: vectors are promoted to matrices and lose the added axis again, leading axes are
    batches and broadcast. Products of 16-bit operands are accumulated, and multiplied by alpha, in float32.

    Args:
      a: left operand, shape (..., m, k) or (k,); any real dtype.
      b: right operand, shape (..., k, n) or (k,). Operands of different dtypes are promoted as jnp does.
      alpha: factor of the product, a real number that is not traced; other than 1 for floating operands only.
      bias: shape (n,), floating; added to every row.
      activation: "relu", "silu", "gelu" (tanh approximation, as `jax.nn.gelu`), "gelu_erf" (exact), or None.
      residual: array of the result's shape, floating; added last.
      out_dtype: dtype of the result; default: the promoted dtype of `a` and `b`, weak if both are weakly typed.
      precision: as in `jnp.matmul`. For 16-bit operands every setting gives the same result.
      backend: name of the backend that must run it, or None for the fastest that can.
      config: a configuration of the named backend, an instance of its module's `Config` (such as
        `jaxkernels.ffi.matmul.gemm.Config(num_stages=1)` for "cuda"); default: the fastest that was measured, else
        the one that its cost model chooses. Gradients choose their own.

    Returns:
      Array of shape (..., m, n) and dtype `out_dtype`.

    Raises:
      ValueError: shapes, dtypes, alpha, activation, backend name or config are wrong.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in all four arrays. With an activation the
    forward pass saves the pre-activation in `out_dtype`. For an `out_dtype` wider than the operands the
    cotangent keeps its width. `jaxkernels.checkpoint_policies` has `dots_saveable` and its like for `jax.checkpoint`:
    JAX's own do not know this function.

    Sharding: on a mesh the result is sharded as the operands' free dimensions are; contracted
    dimensions that are sharded are summed over the mesh before bias and activation.
    """
    op = f"matmul[{backend or 'auto'}]"
    dispatch.check_backend("matmul", backend)
    a, b = as_array(op, "a", a), as_array(op, "b", b)
    for name, x in (("a", a), ("b", b)):
        if x.ndim == 0:
            raise ValueError(f"{op}: {name} must have at least one dimension; got a scalar. Multiply with * instead.")
    try:
        dtype = jnp.result_type(a, b)
    except ValueError as e:  # TypePromotionError: two different 8-bit floats, or strict promotion.
        raise ValueError(
            f"{op}: a and b have no common dtype; got {a.dtype} and {b.dtype}. Cast them with .astype."
        ) from e
    is_weak = out_dtype is None and all(jax.typeof(x).weak_type for x in (a, b))
    a, b = (_jax.convert(x, dtype, weak_type=is_weak) for x in (a, b))
    out_dtype = _out_dtype(op, out_dtype, dtype)
    k_b = b.shape[0] if b.ndim == 1 else b.shape[-2]
    if a.shape[-1] != k_b:
        raise ValueError(
            f"{op}: a and b must agree in k, a's last and b's {'only' if b.ndim == 1 else 'second last'} dimension; "
            f"got a {a.shape} and b {b.shape}."
        )
    if activation is not None and not (isinstance(activation, str) and activation in ACTIVATIONS):
        known = ", ".join(map(repr, ACTIVATIONS))
        raise ValueError(f"{op}: unknown activation={activation!r}; use one of {known}, or None.")
    if a.ndim > 2 and b.ndim > 2:
        try:
            batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        except ValueError:
            raise ValueError(
                f"{op}: the batch dimensions of a and b must broadcast; got a {a.shape} and b {b.shape}."
            ) from None
        a, b = jnp.broadcast_to(a, (*batch, *a.shape[-2:])), jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    elif b.ndim > 2:  # One matrix or vector times a batch: dot_general would put the batch after m.
        a = jnp.broadcast_to(a, (*b.shape[:-2], *a.shape))
    num_batch = b.ndim - 2 if b.ndim > 2 else 0
    lead = tuple(range(num_batch))
    numbers = (((a.ndim - 1,), (b.ndim - 2 if b.ndim > 1 else 0,)), (lead, lead))
    static = Product(numbers, out_dtype, _precision(op, precision), _alpha(op, alpha, dtype))
    if bias is None and activation is None and residual is None:
        return dot_general_op(a, b, static=static, backend=backend, config=config)

    (out,) = dot_general_op.results(static, [ArrayType.of(a), ArrayType.of(b)])
    epilogue = []
    if bias is not None:
        bias = as_array(op, "bias", bias, floating=True)
        if b.ndim == 1:
            raise ValueError(f"{op}: bias needs columns to add to; got a vector b {b.shape}. Add the bias outside.")
        if bias.shape != b.shape[-1:]:
            raise ValueError(
                f"{op}: bias must have shape (n,) = {b.shape[-1:]}, one value for each column; got {bias.shape}."
            )
        epilogue.append(bias)
    if residual is not None:
        residual = as_array(op, "residual", residual, floating=True)
        if residual.shape != out.shape:
            raise ValueError(
                f"{op}: residual must have the result's shape {out.shape}; got {residual.shape}. "
                "Broadcast it with jnp.broadcast_to, or add it outside."
            )
        epilogue.append(residual)
    if not jnp.issubdtype(out_dtype, jnp.floating):
        raise ValueError(
            f"{op}: bias, activation and residual need a floating out_dtype; got {out_dtype}. Apply them to the result."
        )
    static = dataclasses.replace(static, bias=bias is not None, activation=activation, residual=residual is not None)
    return matmul_op(a, b, *epilogue, static=static, backend=backend, config=config)[0]


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    backend: str | None = None,
    config: Any = None,
) -> Array:
    """General product of two arrays over chosen dimensions: a drop-in for `jax.lax.dot_general`.

    The result has the batch dimensions, then the lhs's free ones, then the rhs's. Flax layers take the
    function as their `dot_general`, and `lambda: dot_general` as their `dot_general_cls`.

    Args:
      lhs, rhs: the operands, any rank.
      dimension_numbers: ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), sequences of ints.
      precision: as in `jax.lax.dot_general`. For 16-bit operands every setting gives the same result.
      preferred_element_type: dtype of the result; default: what `jax.lax.dot_general` returns.
      out_sharding: on a mesh with Explicit axes, the result's `PartitionSpec` or `NamedSharding`;
        needed where both operands are sharded along contracting dimensions.
      backend: name of the backend that must run it, or None for the fastest that can.
      config: a configuration of the named backend, an instance of its module's `Config` (such as
        `jaxkernels.ffi.matmul.gemm.Config(num_stages=1)` for "cuda"); default: the fastest that was measured, else
        the one that its cost model chooses. Gradients choose their own.

    Returns:
      The product, with shape and dtype of `jax.lax.dot_general`.

    Raises:
      ValueError: shapes, dimension numbers, backend name or config are wrong.
      JAX's ShardingTypeError: as from `jax.lax.dot_general`, where the result's sharding is ambiguous.
      NotImplementedError: the named backend cannot compute this; the message says why.

    Differentiability: in both modes, any number of times, in both operands. `jaxkernels.checkpoint_policies` has
    `dots_saveable` and its like for `jax.checkpoint`: JAX's own do not know this function.

    One result differs from lax's on purpose. With complex operands and a real `preferred_element_type`, lax drops
    the operands' imaginary parts. Here the product is complex, and its real part is returned.

    Layouts: contracting over the first or the last dimension of either operand costs no copy. Where
    batch, free and contracting dimensions interleave, XLA transposes the operand first.
    """
    op = f"dot_general[{backend or 'auto'}]"
    dispatch.check_backend("dot_general", backend)
    lhs, rhs = as_array(op, "lhs", lhs), as_array(op, "rhs", rhs)
    numbers = _check_dimension_numbers(op, lhs, rhs, dimension_numbers)
    precision = _precision(op, precision)
    # lax's own rule decides the dtype, and on a mesh the sharding (or that it is ambiguous).
    product = functools.partial(
        jax.lax.dot_general,
        dimension_numbers=numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    try:
        like: Any = jax.make_jaxpr(product)(lhs, rhs).out_avals[0]
    except TypeError as e:  # The dtypes; a mistake in the sharding has an error class of its own.
        raise ValueError(f"{op}: {e}") from e
    static = Product(numbers, jnp.dtype(like.dtype), precision)
    _, explicit = _jax.explicit_axes_of(lhs, rhs)
    result_specs = (like.sharding.spec,) if explicit else ()
    out = dot_general_op(lhs, rhs, static=static, backend=backend, config=config, result_specs=result_specs)
    return out if out_sharding is None and not explicit else jax.sharding.reshard(out, like.sharding)


def _check_dimension_numbers(op: str, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> DimensionNumbers:
    try:
        (lhs_k, rhs_k), (lhs_b, rhs_b) = dimension_numbers
        dims = [tuple(map(operator.index, group)) for group in (lhs_k, rhs_k, lhs_b, rhs_b)]
    except (TypeError, ValueError):
        raise ValueError(
            f"{op}: dimension_numbers must be ((lhs contracting, rhs contracting), (lhs batch, rhs batch)), "
            f"each a sequence of ints; got {dimension_numbers!r}."
        ) from None
    lhs_k, rhs_k, lhs_b, rhs_b = dims
    for name, array, groups in (("lhs", lhs, (lhs_k, lhs_b)), ("rhs", rhs, (rhs_k, rhs_b))):
        used = [d for group in groups for d in group]
        if len(set(used)) != len(used) or any(not 0 <= d < array.ndim for d in used):
            raise ValueError(
                f"{op}: dimension_numbers must name distinct dimensions of {name}, 0 to {array.ndim - 1}; got "
                f"contracting {groups[0]} and batch {groups[1]} for {name} {array.shape}."
            )
    for kind, left, right in (("contracting", lhs_k, rhs_k), ("batch", lhs_b, rhs_b)):
        if [lhs.shape[d] for d in left] != [rhs.shape[d] for d in right]:
            raise ValueError(
                f"{op}: {kind} dimensions must have the same sizes in lhs and rhs; got dimensions {left} of "
                f"lhs {lhs.shape} and {right} of rhs {rhs.shape}."
            )
    return (lhs_k, rhs_k), (lhs_b, rhs_b)


def _out_dtype(op: str, out_dtype: Any, dtype: np.dtype) -> np.dtype:
    """The dtype of a product of `dtype` operands; None asks for theirs."""
    if out_dtype is None:
        return dtype
    try:
        requested = jax.dtypes.canonicalize_dtype(out_dtype)
    except (TypeError, ValueError):  # A ValueError where it is that of random keys.
        raise ValueError(f"{op}: out_dtype must be a dtype; got {out_dtype!r}.") from None
    if not (jnp.issubdtype(requested, jnp.number) or requested == jnp.bool_):
        raise ValueError(f"{op}: out_dtype must be one of numbers; got {requested}.")
    for kind, name in ((jnp.floating, "floating"), (jnp.complexfloating, "complex")):
        if jnp.issubdtype(dtype, kind) and not jnp.issubdtype(requested, kind):
            raise ValueError(
                f"{op}: out_dtype must be {name}, as the operands are ({dtype}); got {requested}. "
                "Cast the result with .astype."
            )
    return requested


def _alpha(op: str, alpha: Any, dtype: np.dtype) -> float:
    """The factor of a product of `dtype` operands."""
    value = as_number(op, "alpha", alpha, "Multiply the result instead.")
    if value != 1 and not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{op}: alpha={alpha!r} needs floating operands; got {dtype}. Cast them with .astype, or multiply the "
            "result instead."
        )
    return value


def _precision(op: str, precision: Any) -> Any:
    try:
        return _jax.canonical_precision(precision)
    except ValueError:
        raise ValueError(
            f"{op}: precision must be None, a jax.lax.Precision, a pair of them, a jax.lax.DotAlgorithmPreset, or the "
            f"name of one; got {precision!r}."
        ) from None
