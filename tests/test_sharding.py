"""Operations on meshes of eight virtual devices: values, gradients, shardings, and how much is communicated."""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import random_array
from jax._src.sharding_impls import GSPMDSharding
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from numerics import assert_close, compile_quickly

import jaxkernels as jk
from jaxkernels.core import _jax
from jaxkernels.core.sharding import Factors, assign
from jaxkernels.core.types import ArrayType

_COLLECTIVE = re.compile(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


def arrays(*shapes: tuple[int, ...], seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [random_array(rng, shape, "float32") for shape in shapes]


def collectives(compiled: Any) -> collections.Counter[str]:
    return collections.Counter(_COLLECTIVE.findall(compiled.as_text()))


def with_gradients(f: Callable[..., jax.Array]) -> Callable[..., Any]:
    """(out, gradients in every argument of the sum of sin(out))"""

    def program(*xs: jax.Array) -> Any:
        loss = lambda *xs: (jnp.sum(jnp.sin(out := f(*xs))), out)
        grads, out = jax.grad(loss, tuple(range(len(xs))), has_aux=True)(*xs)
        return out, grads

    return program


def place(mesh: jax.sharding.Mesh, xs: list[np.ndarray], specs: tuple[P, ...]) -> list[jax.Array]:
    return [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(xs, specs, strict=True)]


def collectives_of_jax(f: Callable[..., Any], *xs: jax.Array) -> collections.Counter[str] | None:
    """The collectives of plain JAX; None if it refuses the program on an Explicit mesh."""
    try:
        return collectives(compile_quickly(f).lower(*xs).compile())
    except Exception as e:
        if type(e).__name__ == "ShardingTypeError":  # JAX has no public name for it.
            return None
        raise


def assert_no_worse(
    ours: Callable[..., Any],
    reference: Callable[..., Any],
    mesh: jax.sharding.Mesh,
    xs: list[np.ndarray],
    specs: tuple[P, ...],
    *,
    more: int = 0,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Checks `ours` sharded against `reference` unsharded: values, gradients, and, sharded too, its collectives.

    `more` collectives are allowed in the program that computes the gradients too. Returns `ours`' sharded results.
    """
    placed = place(mesh, xs, specs)
    expected = compile_quickly(with_gradients(reference))(*xs)
    for transform, allowed in ((lambda f: lambda *xs: (f(*xs),), 0), (with_gradients, more)):
        compiled = compile_quickly(transform(ours)).lower(*placed).compile()
        results = compiled(*placed)
        assert_close(results, expected[: len(results)])
        counts = collectives_of_jax(transform(reference), *placed)
        if counts is not None:
            assert collectives(compiled).total() <= counts.total() + allowed, (collectives(compiled), counts)
    return results


# Products.

#: The operands' specs, and the result's on an Explicit mesh.
PRODUCTS = {
    "data parallel": (P(("x", "y"), None), P(None, None), P(("x", "y"), None)),
    "rows and columns": (P("x", None), P(None, "y"), P("x", "y")),
    "columns": (P(None, None), P(None, "x"), P(None, "x")),
    "contracted": (P(None, "x"), P("x", None), P(None, None)),
    "contracted on one side": (P(None, "x"), P(None, None), P(None, None)),
    "rows and contracted": (P("x", "y"), P("y", None), P("x", None)),
    "fsdp": (P("x", None), P("x", None), P("x", None)),
}
#: Collectives that the gradient may have beyond plain JAX's. With the left operand alone sharded along k on an Explicit
#: mesh, JAX gathers it and every device computes the whole product, once for all; we split the product and add up,
#: and gather the right operand's gradient.
MORE = collections.Counter({("explicit", "contracted on one side"): 1})

every_product = pytest.mark.parametrize("name", PRODUCTS)
every_kind = pytest.mark.parametrize("kind", ["auto", "explicit"])


def specs_of(xs: Any) -> list[P]:
    """The arrays' specs, spelled to their full rank."""
    return [P(*x.sharding.spec, *[None] * (x.ndim - len(x.sharding.spec))) for x in jax.tree.leaves(xs)]


@every_product
@every_kind
def test_product(opaque, meshes, kind, name):
    a_spec, b_spec, out_spec = PRODUCTS[name]
    ours = functools.partial(jk.matmul, backend=opaque)
    xs = arrays((16, 32), (32, 8))
    out, grads = assert_no_worse(ours, jnp.matmul, getattr(meshes, kind), xs, (a_spec, b_spec), more=MORE[kind, name])
    if kind == "explicit":
        assert specs_of([out, *grads]) == [out_spec, a_spec, b_spec]


@pytest.mark.sampled(one_in=2)
@every_product
@every_kind
def test_product_with_epilogue(opaque, meshes, kind, name):
    a_spec, b_spec, out_spec = PRODUCTS[name]
    specs = a_spec, b_spec, P(out_spec[1]), out_spec, out_spec
    ours = lambda a, b, bias, multiplier, residual: jk.matmul(
        a, b, alpha=0.3, bias=bias, activation="gelu", multiplier=multiplier, residual=residual, backend=opaque
    )
    reference = lambda a, b, bias, multiplier, residual: jax.nn.gelu(0.3 * (a @ b) + bias) * multiplier + residual
    mesh, xs = getattr(meshes, kind), arrays((16, 32), (32, 8), (8,), (16, 8), (16, 8))
    out, grads = assert_no_worse(ours, reference, mesh, xs, specs, more=MORE[kind, name])
    if kind == "explicit":
        assert specs_of([out, *grads]) == [out_spec, *specs]


@pytest.mark.sampled(one_in=2)
@every_kind
@pytest.mark.parametrize(
    "specs",
    [
        (P("x", None), P(None, None), P(None, None), P(None, None)),
        (P("x", None), P(None, "y"), P(None, "y"), P("y", None)),
        (P("x", None), P("x", None), P("x", None), P(None, "x")),
    ],
    ids=["rows", "hidden", "fsdp"],
)
def test_gated_mlp(opaque, meshes, kind, specs):
    ours = functools.partial(jk.gated_mlp, backend=opaque)
    reference = lambda x, gate, up, down: (jax.nn.silu(x @ gate) * (x @ up)) @ down
    x, *weights = arrays((16, 32), (32, 24), (32, 24), (24, 8))
    xs = x, *(weight / 8 for weight in weights)
    _, grads = assert_no_worse(ours, reference, getattr(meshes, kind), xs, specs)
    if kind == "explicit":
        assert specs_of(grads) == list(specs)


@every_kind
def test_xla_backend(meshes, kind):
    a_spec, b_spec, _ = PRODUCTS["rows and contracted"]
    ours = functools.partial(jk.matmul, backend="xla")
    assert_no_worse(ours, jnp.matmul, getattr(meshes, kind), arrays((16, 32), (32, 8)), (a_spec, b_spec))


@every_kind
@pytest.mark.parametrize(
    "specs", [(P("x"), P("x", None, "y")), (P("x", None, "y"), P("x", "y")), (P(None, "x"), P())], ids=str
)
def test_batch_of_products(opaque, meshes, kind, specs):
    ours = functools.partial(jk.matmul, backend=opaque)
    assert_no_worse(ours, jnp.matmul, getattr(meshes, kind), arrays((4, 8, 6), (4, 6, 2)), specs)


@every_kind
def test_sizes_that_no_axis_divides(opaque, meshes, kind):
    """Eight rows are split by 4 and a contraction of 6 by 2. No other dimension is split."""
    ours = functools.partial(jk.matmul, backend=opaque)
    assert_no_worse(ours, jnp.matmul, getattr(meshes, kind), arrays((8, 6), (6, 7)), (P("x", "y"), P("y", None)))


NUMBERS = (((1,), (0,)), ((), ()))


def ours_and_lax(backend: Any, program: Callable[[Callable[..., jax.Array]], Any]) -> tuple[Any, Any] | None:
    """The results of `program` with our dot_general and with lax's. None: both raise, with the same error."""

    def attempt(dot_general: Callable[..., jax.Array]) -> Any:
        try:
            return program(dot_general)
        except Exception as e:
            return f"{type(e).__name__}: {e}"

    ours, reference = attempt(functools.partial(jk.dot_general, backend=backend)), attempt(jax.lax.dot_general)
    if isinstance(reference, str):
        assert ours == reference
        return None
    return ours, reference


@pytest.mark.parametrize("out_spec", [None, P(None, None), P("x", None), P(None, "y"), P("x", "y")], ids=str)
@every_product
def test_out_sharding(opaque, meshes, name, out_spec):
    """As in lax, errors included; a sum over shards that is wanted scattered is not replicated first."""
    xs = place(meshes.explicit, arrays((16, 32), (32, 8)), PRODUCTS[name][:2])

    def program(dot_general: Callable[..., jax.Array]) -> Any:
        f = lambda lhs, rhs: dot_general(lhs, rhs, NUMBERS, out_sharding=out_spec)
        return compile_quickly(f).lower(*xs).compile()

    with jax.set_mesh(meshes.explicit):
        both = ours_and_lax(opaque, program)
    if both is None:
        return
    ours, reference = both
    out, expected = ours(*xs), reference(*xs)
    assert_close(out, expected)
    assert out.sharding.is_equivalent_to(expected.sharding, 2)
    assert collectives(ours).total() <= collectives(reference).total(), (collectives(ours), collectives(reference))


def test_sum_over_shards_is_scattered(opaque, meshes):
    xs = place(meshes.explicit, arrays((16, 32), (32, 8)), PRODUCTS["contracted"][:2])
    f = lambda lhs, rhs: jk.dot_general(lhs, rhs, NUMBERS, out_sharding=P("x", None), backend=opaque)
    with jax.set_mesh(meshes.explicit):
        assert collectives(compile_quickly(f).lower(*xs).compile()) == {"reduce-scatter": 1}


@pytest.mark.parametrize(
    ("a_spec", "b_spec", "unreduced"),
    [
        (P(None, "x"), P("x", None), {"x"}),
        (P("y", "x"), P("x", None), {"x"}),
        (P(None, ("x", "y")), P(("x", "y"), None), {"x", "y"}),
        (P(None, "x"), P(None, None), {"x"}),  # lax refuses these two.
        (P(None, ("x", "y")), P(("x", "y"), None), {"x"}),
    ],
)
def test_unreduced_out_sharding(opaque, meshes, a_spec, b_spec, unreduced):
    """Every shard keeps its terms of the sum, without communication."""
    xs = place(meshes.explicit, arrays((16, 32), (32, 8)), (a_spec, b_spec))
    spec = P(a_spec[0], None, unreduced=unreduced)

    def program(dot_general: Callable[..., jax.Array]) -> Any:
        product = lambda a, b: dot_general(a, b, NUMBERS, out_sharding=spec)
        reduced = lambda a, b: jax.sharding.reshard(product(a, b), P(*spec.partitions))
        types = [jax.typeof(x) for x in jax.jit(with_gradients(reduced))(*xs)[1]]
        counts = collectives(compile_quickly(product).lower(*xs).compile())
        return jax.typeof(jax.jit(product)(*xs)), types, counts, jax.jit(with_gradients(reduced))(*xs)

    with jax.set_mesh(meshes.explicit):
        both = ours_and_lax(opaque, program)
    if both is None:
        return
    ours, reference = both
    assert ours[:2] == reference[:2]
    assert not ours[2]
    assert_close(ours[3], reference[3])


@pytest.mark.parametrize(
    ("a_spec", "b_spec"),
    [
        (P("x", None), P(None, None, reduced={"x"})),
        (P("x", None, reduced={"y"}), P(None, "y", reduced={"x"})),
        (P(("x", "y"), None), P(None, None, reduced={"x", "y"})),
        (P(("x", "y"), None), P(None, None, reduced={"x"})),  # lax refuses the gradient.
    ],
)
@pytest.mark.parametrize("name", ["product", "dense"])
def test_operands_whose_gradients_stay_unreduced(opaque, meshes, name, a_spec, b_spec):
    make, reference, shapes = OPERATIONS[name]
    xs = arrays(*shapes)
    placed = place(meshes.explicit, xs, (a_spec, b_spec))
    with jax.set_mesh(meshes.explicit):
        compiled = compile_quickly(with_gradients(make(opaque))).lower(*placed).compile()
        out, grads = compiled(*placed)
        assert collectives(compiled).total() == (b_spec.reduced == {"x"} and a_spec.partitions[0] == ("x", "y"))
        for x, grad in zip(placed, grads):
            assert grad.sharding.spec.unreduced == x.sharding.spec.reduced
        summed = [jax.sharding.reshard(x, P(*[None] * x.ndim)) for x in (out, *grads)]
        inside = jax.shard_map(make(opaque), out_specs=P(a_spec.partitions[0], b_spec.partitions[1]))
        by_hand = compile_quickly(with_gradients(inside))(*placed)
        assert [jax.typeof(x) for x in jax.tree.leaves(by_hand)] == [jax.typeof(x) for x in (out, *grads)]
    expected = compile_quickly(with_gradients(reference))(*xs)
    assert_close(summed, jax.tree.leaves(expected))


def test_reduced_operand_inside_shard_map(opaque, meshes):
    """No other operand varies over its axis: the result is no more reduced than plain JAX's is."""
    placed = place(meshes.explicit, arrays((16, 32), (32, 8)), (P(None, None, reduced={"x"}), P(None, None)))
    with jax.set_mesh(meshes.explicit):
        f = jax.shard_map(functools.partial(jk.matmul, backend=opaque), out_specs=P())
        assert_close(compile_quickly(f)(*placed), placed[0] @ placed[1])


def test_axis_of_size_1_stays_in_the_type(opaque):
    """It has no effect on sharding, but it is in the type of plain JAX's result, too."""
    explicit = jax.sharding.AxisType.Explicit
    mesh = jax.make_mesh((8, 1), ("x", "y"), axis_types=(explicit, explicit), devices=jax.devices("cpu"))
    a, b = place(mesh, arrays((16, 32), (32, 8)), (P("x", None), P(None, "y")))
    for f in (functools.partial(jk.matmul, backend=opaque), dense(opaque), jnp.matmul):
        compiled = compile_quickly(f).lower(a, b).compile()
        assert not collectives(compiled)
        assert specs_of(compiled(a, b)) == [P("x", "y")]
    contracted = place(mesh, arrays((16, 32), (32, 8)), (P("x", "y"), P("y", None)))
    compiled = compile_quickly(functools.partial(jk.matmul, backend=opaque)).lower(*contracted).compile()
    assert not collectives(compiled)


# The projection to queries, keys and values.

#: Specs of x (B, T, D), w, and of both cos and sin (T, H/2); that of the parts (B, T, heads, H) on an Explicit mesh.
PROJECTIONS: dict[str, tuple[P, P, P, P]] = {
    "batch": (P("x"), P(), P(), P("x")),
    "tokens": (P(None, "x"), P(), P("x"), P(None, "x")),
    "tokens over both axes": (P(None, ("x", "y")), P(), P(("x", "y")), P(None, ("x", "y"))),
    "tokens, whole angles": (P(None, "x"), P(), P(), P(None, "x")),
    "batch and tokens": (P("x", "y"), P(), P("y"), P("x", "y")),
    "angles alone": (P("x"), P(), P("y"), P("x", "y")),
    "contracted": (P(None, None, "x"), P("x"), P(), P()),
    "batch and contracted": (P("x", None, "y"), P("y"), P(), P("x")),
    "fsdp": (P("x"), P("x"), P(), P("x")),
    "columns": (P("x"), P(None, "y"), P(), P("x")),
}


def project(backend: Any, pairs: Any = "halves") -> Callable[..., jax.Array]:
    """4 + 2 + 2 heads side by side."""

    def f(x: jax.Array, w: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        parts = jk.qkv_projection(x, w, (cos, sin), num_heads=4, num_kv_heads=2, pairs=pairs, backend=backend)
        return jnp.concatenate(parts, axis=-2)

    return f


def plain_project(x: jax.Array, w: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    rotated, value = jnp.split((x @ w).reshape(*x.shape[:-1], 8, -1), (6,), axis=-2)
    first, second = jnp.split(rotated, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned, value], axis=-2)


@pytest.fixture(params=[None, "opaque"])
def kernels(request: pytest.FixtureRequest, opaque: str) -> str | None:
    """The reference as XLA partitions it, and as kernels are split."""
    return request.param


@pytest.mark.sampled(one_in=3)
@pytest.mark.parametrize("name", PROJECTIONS)
@every_kind
def test_qkv_projection(kernels, meshes, kind, name):
    """Values, gradients, shardings and collectives. An Explicit mesh returns whole parts of sharded columns."""
    x_spec, w_spec, angle_spec, out_spec = PROJECTIONS[name]
    specs, mesh = (x_spec, w_spec, angle_spec, angle_spec), getattr(meshes, kind)
    x, w, *angles = arrays((8, 16, 24), (24, 48), (16, 3), (16, 3))
    xs = [x, w / 4, *angles]
    if name == "columns" and kind == "auto":  # Whole parts for the kernels, and heads for XLA: they are not compared.
        results = compile_quickly(with_gradients(project(kernels)))(*place(mesh, xs, specs))
        assert_close(results, compile_quickly(with_gradients(plain_project))(*xs))
        return
    results = assert_no_worse(project(kernels), plain_project, mesh, xs, specs)
    if kind == "explicit":
        full = lambda spec, ndim: P(*spec, *[None] * (ndim - len(spec)))
        assert specs_of(results) == [full(out_spec, 4), full(x_spec, 3), *(full(spec, 2) for spec in specs[1:])]


@every_kind
def test_a_sharded_contraction_of_the_projection_is_one_sum(kernels, meshes, kind):
    """For all three parts: XLA joins their sums."""
    specs = P(None, None, "x"), P("x"), P(), P()
    placed = place(getattr(meshes, kind), arrays((8, 16, 24), (24, 48), (16, 3), (16, 3)), specs)
    f = lambda *xs: jk.qkv_projection(*xs[:2], xs[2:], num_heads=4, num_kv_heads=2, backend=kernels)
    assert collectives(compile_quickly(f).lower(*placed).compile()) == {"all-reduce": 1}


@every_kind
def test_second_derivatives_of_the_projection(kernels, meshes, kind):
    specs = P("x", "y"), P(), P("y"), P("y")
    xs = arrays((8, 16, 6), (6, 48), (16, 3), (16, 3))
    placed = place(getattr(meshes, kind), xs, specs)

    def second(f: Callable[..., jax.Array]) -> Callable[..., Any]:
        gradient = jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs) / 4)), (0, 1, 2, 3))
        return lambda *xs: jax.jvp(gradient, xs, xs)

    assert_close(compile_quickly(second(project(kernels)))(*placed), compile_quickly(second(plain_project))(*xs))


@pytest.mark.parametrize("mapped", ["x", "x and w", "x and angles"])
def test_vmap_of_the_projection_over_a_sharded_axis(kernels, meshes, mapped):
    """Explicit, with sharded tokens inside."""
    axes = 0, 0 if "w" in mapped else None, *[0 if "angles" in mapped else None] * 2
    xs = arrays((4, 2, 16, 6), (6, 48), (16, 3), (16, 3))
    xs = [x if axis is None or i == 0 else np.stack([x, -x, 2 * x, x]) for i, (x, axis) in enumerate(zip(xs, axes))]
    specs = P("x", None, "y"), P("x") if "w" in mapped else P(), *[P("x", "y") if "angles" in mapped else P("y")] * 2
    f = lambda project: compile_quickly(jax.vmap(with_gradients(lambda *xs: project(*xs) / 4), axes))
    results = f(project(kernels))(*place(meshes.explicit, xs, specs))
    assert_close(results, f(plain_project)(*xs))
    assert specs_of(results[:1]) == [P("x", None, "y", None, None)]


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("pairs", ["halves", "neighbours"])
def test_qkv_projection_inside_shard_map(kernels, meshes, pairs, check_vma):
    """Tokens with their own angles on each device, and a replicated weight whose gradient is a sum over shards."""
    in_specs = P("x", "y"), P(), P("y"), P("y")
    f = jax.shard_map(
        project(kernels, pairs), mesh=meshes.auto, in_specs=in_specs, out_specs=P("x", "y"), check_vma=check_vma
    )
    x, w, *angles = arrays((8, 16, 24), (24, 48), (16, 3), (16, 3))
    xs = x, w / 4, *angles
    expected = compile_quickly(with_gradients(project(None, pairs)))(*xs)
    assert_close(compile_quickly(with_gradients(f))(*xs), expected)


# Attention.

CAUSAL_WINDOW = dict(is_causal=True, local_window_size=(5, 3))

#: Query heads, key/value heads, specs of query and of key and value on the axes (B, T, N, H), options.
ATTENTIONS: dict[str, tuple[int, int, P, P, dict[str, Any]]] = {
    "data parallel": (4, 4, P("x"), P("x"), dict()),
    "heads": (4, 4, P(None, None, "x"), P(None, None, "x"), dict()),
    "data and heads": (4, 2, P("x", None, "y"), P("x", None, "y"), CAUSAL_WINDOW),
    "grouped heads": (8, 4, P(None, None, "x"), P(None, None, "x"), dict()),
    "grouped heads over both axes": (8, 2, P(None, None, ("y", "x")), P(None, None, "y"), CAUSAL_WINDOW),
    "heads of one key": (4, 1, P(None, None, "x"), P(), dict()),
    "queries": (4, 2, P(None, "x"), P(), CAUSAL_WINDOW),
    "queries over both axes": (2, 2, P(None, ("x", "y")), P(), CAUSAL_WINDOW),
    "queries of one key": (4, 1, P("y", "x"), P("y"), CAUSAL_WINDOW),
    "keys": (4, 2, P(), P(None, "x"), dict()),
    "queries and keys": (4, 2, P("y", "x"), P("y", "x"), CAUSAL_WINDOW),
}


@pytest.mark.parametrize("name", ATTENTIONS)
@every_kind
@pytest.mark.sampled(one_in=6)
def test_attention(opaque, meshes, kind, name):
    heads, kv_heads, q_spec, kv_spec, options = ATTENTIONS[name]
    xs = arrays((8, 16, heads, 8), *[(8, 24, kv_heads, 8)] * 2)
    ours = functools.partial(jk.dot_product_attention, **options, backend=opaque)
    reference = functools.partial(jax.nn.dot_product_attention, **options)
    results = assert_no_worse(ours, reference, getattr(meshes, kind), xs, (q_spec, kv_spec, kv_spec))
    if kind == "explicit":
        full = [P(*spec, *[None] * (4 - len(spec))) for spec in (q_spec, q_spec, kv_spec, kv_spec)]
        assert specs_of(results) == full


@every_kind
def test_more_shards_than_key_heads(opaque, meshes, kind):
    """Queries split by 4 over 2 key heads: right, with more communication than XLA's own.

    XLA wants to split a mesh axis for it, and `custom_partitioning` fails to decode such a sharding.
    """
    mesh, xs = getattr(meshes, kind), arrays((2, 6, 4, 8), (2, 10, 2, 8), (2, 10, 2, 8))
    placed = place(mesh, xs, (P(None, None, "x"), P(), P()))
    ours = with_gradients(functools.partial(jk.dot_product_attention, backend=opaque))
    assert_close(compile_quickly(ours)(*placed), compile_quickly(with_gradients(jax.nn.dot_product_attention))(*xs))


@pytest.mark.sampled(one_in=2)
@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((8, 4, 16, 24), P("x", None, "y")),
        ((1, 4, 16, 1), P("x")),
        ((1, 4, 1, 24), P("y", "x")),
        ((8, 1, 1, 24), P(None, "x", "y")),
        ((1, 1, 16, 24), P(None, None, "y")),
        ((8, 1, 16, 1), P(None, "x")),
    ],
    ids=str,
)
@every_kind
def test_gradient_of_the_bias(opaque, meshes, kind, shape, spec):
    """Every shard adds a part to the gradient if the bias is broadcast along a sharded dimension."""
    mesh, xs = getattr(meshes, kind), arrays((8, 16, 4, 8), (8, 24, 2, 8), (8, 24, 2, 8), shape)
    kv_spec = P(spec[0], None, *spec[2:])
    placed = place(mesh, xs, (spec, kv_spec, kv_spec, P()))
    loss = lambda attention: lambda *xs: jnp.sum(jnp.sin(attention(*xs, is_causal=True)))
    ours = jax.grad(loss(functools.partial(jk.dot_product_attention, backend=opaque)), 3)
    reference = jax.grad(loss(jax.nn.dot_product_attention), 3)
    assert_close(compile_quickly(ours)(*placed), compile_quickly(reference)(*xs))


@every_kind
def test_masks_count_queries_from_the_start_of_the_sequence(opaque, meshes, kind):
    """Lengths, segments and a mask beside sharded queries."""
    rng = np.random.default_rng(0)
    options = dict(
        query_seq_lengths=np.arange(8, dtype=np.int32) * 2,
        key_value_seq_lengths=np.arange(8, dtype=np.int32)[::-1] * 3,
        mask=rng.random((1, 4, 16, 24)) < 0.8,
        is_causal=True,
    )
    segments = dict(
        query_segment_ids=rng.integers(0, 2, (8, 16), np.int32),
        key_value_segment_ids=rng.integers(0, 2, (8, 24), np.int32),
    )
    same = segments["query_segment_ids"][:, None, :, None] == segments["key_value_segment_ids"][:, None, None, :]
    xs = arrays((8, 16, 4, 8), (8, 24, 2, 8), (8, 24, 2, 8))
    placed = place(getattr(meshes, kind), xs, (P("y", "x"), P("y"), P("y")))
    ours = functools.partial(jk.dot_product_attention, **options, **segments, backend=opaque)
    reference = functools.partial(jax.nn.dot_product_attention, **(options | dict(mask=options["mask"] & same)))
    assert_close(compile_quickly(with_gradients(ours))(*placed), compile_quickly(with_gradients(reference))(*xs))


@every_kind
def test_masks_that_count_from_the_last_query_and_key(opaque, meshes, kind):
    """New queries on a longer cache of keys: the offset of the alignment and of the shard's queries add up."""
    xs = arrays((8, 16, 4, 8), (8, 24, 2, 8), (8, 24, 2, 8))
    placed = place(getattr(meshes, kind), xs, (P("y", "x"), P("y"), P("y")))
    query, key = np.arange(16)[:, None] + 8, np.arange(24)
    mask = (key <= query) & (key >= query - 5)
    options = dict(is_causal=True, local_window_size=(5, None), alignment="bottom_right")
    ours = with_gradients(functools.partial(jk.dot_product_attention, **options, backend=opaque))
    reference = with_gradients(functools.partial(jax.nn.dot_product_attention, mask=mask[None, None]))
    assert_close(compile_quickly(ours)(*placed), compile_quickly(reference)(*xs))
    # Sharded along the batch alone, the alignment's offset is all there is.
    placed = place(getattr(meshes, kind), xs, (P("x"),) * 3)
    assert_close(compile_quickly(ours)(*placed), compile_quickly(reference)(*xs))


# Other ways into a mesh.


def dense(backend: str | None) -> Callable[..., jax.Array]:
    return lambda a, b: jk.matmul(a, b, activation="gelu", backend=backend)


def plain_dense(a: jax.Array, b: jax.Array) -> jax.Array:
    return jax.nn.gelu(a @ b)


def attention(backend: str | None) -> Callable[..., jax.Array]:
    return lambda q, kv: jk.dot_product_attention(q, kv, kv, is_causal=True, backend=backend)


def plain_attention(q: jax.Array, kv: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, kv, kv, is_causal=True)


OPERATIONS = {
    "product": (lambda backend: functools.partial(jk.matmul, backend=backend), jnp.matmul, ((16, 32), (32, 8))),
    "scaled": (
        lambda backend: functools.partial(jk.matmul, alpha=0.3, backend=backend),
        lambda a, b: 0.3 * (a @ b),
        ((16, 32), (32, 8)),
    ),
    "dense": (dense, plain_dense, ((16, 32), (32, 8))),
    "dot_general": (
        lambda backend: lambda a, b: jk.dot_general(a, b, NUMBERS, backend=backend),
        jnp.matmul,
        ((16, 32), (32, 8)),
    ),
    "attention": (attention, plain_attention, ((8, 6, 4, 8), (8, 6, 2, 8))),
}
every_operation = pytest.mark.parametrize("name", OPERATIONS)


@every_operation
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(opaque, meshes, name, check_vma):
    """Data parallel by hand; the second operand is replicated, and its gradient a sum over shards."""
    make, reference, shapes = OPERATIONS[name]
    second = P() if name != "attention" else P("x")
    mapped = lambda f: jax.shard_map(
        f, mesh=meshes.auto, in_specs=(P("x"), second), out_specs=P("x"), check_vma=check_vma
    )
    xs = arrays(*shapes)
    compiled = compile_quickly(with_gradients(mapped(make(opaque)))).lower(*xs).compile()
    assert_close(compiled(*xs), compile_quickly(with_gradients(reference))(*xs))
    counts = collectives(compile_quickly(with_gradients(mapped(reference))).lower(*xs).compile())
    assert collectives(compiled).total() <= counts.total()


@every_operation
def test_shard_map_by_operands_that_vary_differently(opaque, meshes, name):
    """Inside, one operand varies over x and the other over y: so does the result over both, and it is checked."""
    make, reference, shapes = OPERATIONS[name]
    if name == "attention":
        in_specs, out_specs = (P("x", None, "y"), P("x", None, "y")), P("x", None, "y")
    else:
        in_specs, out_specs = (P("x"), P(None, "y")), P("x", "y")
    f = jax.shard_map(make(opaque), mesh=meshes.auto, in_specs=in_specs, out_specs=out_specs)
    xs = arrays(*shapes)
    assert_close(compile_quickly(with_gradients(f))(*xs), compile_quickly(with_gradients(reference))(*xs))


@every_operation
def test_shard_map_refuses_wrong_out_specs(opaque, meshes, name):
    make, _, shapes = OPERATIONS[name]
    f = jax.shard_map(make(opaque), mesh=meshes.auto, in_specs=(P("x"), P()), out_specs=P())
    if name == "attention":
        f = jax.shard_map(make(opaque), mesh=meshes.auto, in_specs=(P("x"), P("x")), out_specs=P())
    with pytest.raises(ValueError, match="out_specs"):
        compile_quickly(f)(*arrays(*shapes))


def test_shard_map_with_psum(opaque, meshes):
    """Tensor parallel by hand: a column parallel and a row parallel product, and one psum."""

    def mlp(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        def shard(x, up, down):
            return jax.lax.psum(product(jax.nn.relu(product(x, up)), down), "y")

        in_specs = P("x", None), P(None, "y"), P("y", None)
        return jax.shard_map(shard, mesh=meshes.auto, in_specs=in_specs, out_specs=P("x", None))

    xs = arrays((16, 8), (8, 12), (12, 6))
    ours, reference = mlp(functools.partial(jk.matmul, backend=opaque)), mlp(jnp.matmul)
    compiled = [compile_quickly(with_gradients(f)).lower(*xs).compile() for f in (ours, reference)]
    assert_close(*(f(*xs) for f in compiled))
    assert collectives(compiled[0]) == collectives(compiled[1])


@every_operation
def test_shard_map_over_one_axis_of_two(opaque, meshes, name):
    """The other axis stays Auto inside, and shards an operand."""
    make, reference, shapes = OPERATIONS[name]
    is_attention = name == "attention"
    in_specs = P("x"), P("x") if is_attention else P()
    f = jax.shard_map(make(opaque), mesh=meshes.auto, in_specs=in_specs, out_specs=P("x"), axis_names={"x"})
    xs = arrays(*shapes)
    placed = place(meshes.auto, xs, (P("x"), P("x", None, "y") if is_attention else P(None, "y")))
    assert_close(compile_quickly(f)(*placed), compile_quickly(reference)(*xs))


@every_operation
def test_mesh_with_explicit_and_auto_axes(opaque, meshes, name):
    make, reference, shapes = OPERATIONS[name]
    xs = arrays(*shapes)
    with jax.set_mesh(meshes.mixed):
        placed = place(meshes.mixed, xs, (P("x"), P("x") if name == "attention" else P()))
        results = compile_quickly(with_gradients(make(opaque)))(*placed)
    assert_close(results, compile_quickly(with_gradients(reference))(*xs))
    assert results[0].sharding.spec[0] == "x"


@every_operation
@pytest.mark.parametrize("axes", ["y", ("x", "y")])
def test_explicit_axes_made_auto(opaque, meshes, name, axes):
    make, reference, shapes = OPERATIONS[name]
    xs = arrays(*shapes)
    with jax.set_mesh(meshes.explicit):
        placed = place(meshes.explicit, xs, (P("x"), P("x") if name == "attention" else P(None, "y")))
        f = jax.sharding.auto_axes(make(opaque), axes=axes, out_sharding=P("x"))
        results = compile_quickly(with_gradients(f))(*placed)
    assert_close(results, compile_quickly(with_gradients(reference))(*xs))


@every_operation
def test_two_meshes_of_the_same_devices(opaque, meshes, name):
    make, reference, shapes = OPERATIONS[name]
    other = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    xs = arrays(*shapes)
    second = P(("a", "b")) if name == "attention" else P(None, ("c", "a"))
    placed = place(meshes.auto, xs[:1], (P("x"),)) + place(other, xs[1:], (second,))
    assert_close(compile_quickly(make(opaque))(*placed), compile_quickly(reference)(*xs))


def test_shardings_are_decoded_without_a_mesh():
    """Each as it was, by axes common to all; one that fits no common mesh counts as replicated."""

    def decode(num_devices: int, *specs: tuple[tuple[int, ...], P]) -> Any:
        shardings = []
        for sizes, spec in specs:
            mesh = jax.sharding.AbstractMesh(sizes, ("a", "b", "c")[: len(sizes)])
            hlo = NamedSharding(mesh, spec)._to_xla_hlo_sharding(2)
            shardings.append(GSPMDSharding((None,) * num_devices, hlo))
        mesh, decoded = _jax.partition_specs(shardings, [2] * len(shardings))
        again = [NamedSharding(mesh, spec)._to_xla_hlo_sharding(2) for spec in decoded]
        return mesh.axis_sizes, [new == old._hlo_sharding for new, old in zip(again, shardings)]

    assert decode(8, ((4, 2), P("b", "a"))) == ((4, 2), [True])
    assert decode(8, ((4, 2), P("b", None)), ((2, 4), P(None, ("b", "a")))) == ((2, 2, 2), [True, True])
    assert decode(8, ((2, 2, 2), P(("c", "a"))), ((8,), P(None, "a"))) == ((2, 2, 2), [True, True])
    assert decode(6, ((2, 3), P("b"))) == ((2, 3), [True])
    assert decode(6, ((3, 2), P("b", "a"))) == ((3, 2), [True])
    assert decode(6, ((3, 2), P("b", "a")), ((2, 3), P("b"))) == ((3, 2), [True, False])
    assert decode(24, ((2, 3, 4), P(("c", "a"), "b")), ((6, 4), P("b"))) == ((2, 3, 4), [True, True])


@every_operation
@every_kind
def test_eager_evaluation(backend, meshes, kind, name):
    make, reference, shapes = OPERATIONS[name]
    xs = arrays(*shapes)
    placed = place(getattr(meshes, kind), xs, (P("x"), P("x") if name == "attention" else P()))
    out = make(backend)(*placed)
    assert_close(out, reference(*xs))
    assert out.sharding.is_equivalent_to(placed[0].sharding, out.ndim)


@pytest.mark.sampled(one_in=9)
@pytest.mark.parametrize("second", [False, True])
@every_operation
def test_eager_evaluation_with_one_operand_on_a_single_device(backend, meshes, name, second):
    """On an Explicit mesh without set_mesh: the other operand must be moved onto the mesh."""
    make, reference, shapes = OPERATIONS[name]
    xs = arrays(*shapes)
    placed = [jnp.asarray(x) for x in xs]
    placed[second] = jax.device_put(xs[second], NamedSharding(meshes.explicit, P("x")))
    out, pull = jax.vjp(make(backend), *placed)
    assert_close(make(backend)(*placed), out)
    expected, reference_pull = jax.vjp(reference, *xs)
    assert_close((out, pull(out)), (expected, reference_pull(expected)))


@every_operation
def test_vmap_over_a_sharded_axis(opaque, meshes, name):
    """Explicit, with another axis inside; the result is sharded as plain JAX's is."""
    make, reference, shapes = OPERATIONS[name]
    xs = arrays(*((8, *shape) for shape in shapes))
    inner = [None] * (2 if name == "attention" else 0)
    specs = P("x", *inner, "y"), P("x", *inner, *([] if name == "attention" else [None]), "y")
    if name != "attention":
        specs = P("x", "y"), P("x")
    placed = place(meshes.explicit, xs, specs)
    results = compile_quickly(jax.vmap(with_gradients(make(opaque))))(*placed)
    assert_close(results, compile_quickly(jax.vmap(with_gradients(reference)))(*xs))
    assert specs_of(results) == [
        P(*spec, *[None] * (x.ndim - len(spec))) for x, spec in zip(jax.tree.leaves(results), (specs[0], *specs))
    ]


@pytest.mark.parametrize("out_spec", [P(None, None), P("y", None), P(None, "y")], ids=str)
def test_vmap_over_a_sharded_axis_with_out_sharding(opaque, meshes, out_spec):
    """A sum over shards of another axis, wanted scattered or not."""
    xs = place(meshes.explicit, arrays((8, 16, 32), (8, 32, 8)), (P("x", None, "y"), P("x", "y", None)))

    def program(dot_general: Callable[..., jax.Array]) -> Any:
        f = lambda lhs, rhs: dot_general(lhs, rhs, NUMBERS, out_sharding=out_spec)
        return compile_quickly(jax.vmap(with_gradients(f))).lower(*xs).compile()

    with jax.set_mesh(meshes.explicit):
        ours, reference = program(functools.partial(jk.dot_general, backend=opaque)), program(jax.lax.dot_general)
    assert_close(ours(*xs), reference(*xs))
    assert specs_of(ours(*xs)) == specs_of(reference(*xs))
    assert collectives(ours).total() <= collectives(reference).total(), (collectives(ours), collectives(reference))


@every_kind
def test_scan_over_sharded_layers(opaque, meshes, kind):
    """Activations sharded by rows, weights by columns."""
    h, ws = arrays((16, 8), (3, 8, 8))
    layer = lambda f: lambda h, w: (jnp.sin(h + f(h, w)), None)
    scan = lambda f: lambda h, ws: jax.lax.scan(layer(f), h, ws)[0]
    placed = place(getattr(meshes, kind), [h, ws], (P("x", None), P()))
    ours, reference = (with_gradients(scan(f)) for f in (dense(opaque), plain_dense))
    assert_close(compile_quickly(ours)(*placed), compile_quickly(reference)(h, ws))


@every_kind
def test_forward_mode_and_second_derivatives(meshes, kind):
    q, kv = arrays((8, 4, 4, 8), (8, 6, 2, 8))
    placed = place(getattr(meshes, kind), [q, kv], (P("x", None, "y"), P("x", None, "y")))

    def derivatives(f: Callable[..., jax.Array]) -> Callable[..., Any]:
        grad = jax.grad(lambda *xs: jnp.sum(jnp.sin(f(*xs))), (0, 1))
        return lambda q, kv: (jax.jvp(f, (q, kv), (q, kv)), jax.jvp(grad, (q, kv), (q, kv)))

    ours, reference = derivatives(attention("xla")), derivatives(plain_attention)
    assert_close(compile_quickly(ours)(*placed), compile_quickly(reference)(q, kv))


# The rule by which axes are chosen.


def test_first_operand_settles_a_factor_and_an_axis_serves_one():
    factors = Factors(operands=(("m", "k"), ("k", "n")), results=(("m", "n"),))
    types = [ArrayType(shape, np.dtype(np.float32)) for shape in ((16, 32), (32, 8), (16, 8))]
    chosen = functools.partial(assign, factors, types[:2], axis_sizes=dict(x=4, y=2), results=types[2:])
    assignment = chosen([P("x", "y"), P("x", "y")])
    assert assignment.axes == dict(m=("x",), k=("y",))
    assert assignment.in_specs == (P("x", "y"), P("y", None))
    assert assignment.out_specs == (P("x", None),)
    assert assignment.sums == (("y",),)
    # The requested result specs decide if no operand does, and scatter sums.
    assignment = chosen([P(None, "y"), P()], result_specs=[P("y", "x")])
    assert assignment.axes == dict(k=("y",), n=("x",))
    assert assignment.scatters == ((("y", 0),),)
    assert assignment.sums == ((),)


def test_axes_divide_a_factor_together():
    """12 rows on 4 x 2 devices: each axis divides them, both together do not."""
    factors = Factors(operands=(("m",),), results=(("m",),))
    types = [ArrayType((12,), np.dtype(np.float32))]
    assignment = assign(factors, types, [P(("x", "y"))], dict(x=4, y=2), types)
    assert assignment.axes == dict(m=("x",))
    assert assignment.in_specs == assignment.out_specs == (P("x"),)


def test_minor_factor_is_sharded_once_its_major_one_is_split_up():
    factors = Factors(operands=(("n g",), ("n",)), results=(("n g",), ("n",)), sizes=dict(g=4))
    types = [ArrayType(shape, np.dtype(np.float32)) for shape in ((8,), (2,))]
    chosen = functools.partial(assign, factors, types, results=types)
    assignment = chosen([P(("y", "x")), P()], dict(x=4, y=2))
    assert assignment.in_specs == assignment.out_specs == (P(("y", "x")), P("y"))
    assert assignment.sums == ((), ("x",))
    assert chosen([P("x"), P()], dict(x=4, y=2)).axes == {}
    assert chosen([P("y"), P()], dict(x=4, y=2)).axes == dict(n=("y",))
    rule, options = factors.shardy_rule()
    assert rule == "(n g), n -> (n g), n"
    assert options == dict(reduction_factors=(), need_replication_factors=(), g=4)


def test_sharding_that_a_result_keeps_takes_precedence():
    """P("y", "x") . P(None, "y") -> P(None, "y"): one operand is gathered, the others do not move."""
    factors = Factors(operands=(("m", "k"), ("k", "n")), results=(("m", "n"),))
    types = [ArrayType(shape, np.dtype(np.float32)) for shape in ((16, 32), (32, 8), (16, 8))]
    chosen = functools.partial(assign, factors, types[:2], axis_sizes=dict(x=4, y=2), results=types[2:])
    specs = [P("y", "x"), P(None, "y")]
    assert chosen(specs, result_specs=[P(None, "y")]).axes == dict(n=("y",), k=("x",))
    assert chosen(specs).axes == dict(m=("y",), k=("x",))
    # A wish of the result alone takes nothing from an operand: its sum is scattered.
    assert chosen([P(None, "x"), P()], result_specs=[P(None, "x")]).scatters == ((("x", 1),),)


def test_gradient_of_attention_gathers_keys_and_values_once(meshes):
    """For the forward and the backward pass together, as jax.nn does."""
    xs = place(meshes.auto, arrays(*[(4, 16, 8, 8)] * 3), (P("x", "y"),) * 3)
    counts = [
        collectives(compile_quickly(with_gradients(f)).lower(*xs).compile())
        for f in (functools.partial(jk.dot_product_attention, backend="xla"), jax.nn.dot_product_attention)
    ]
    assert counts[0] == counts[1]
