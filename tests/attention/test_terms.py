"""Terms that the package does not have: the reference and the kernels take them as they take their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from interpreted_attention import FUSED, TWO_KERNELS, WIDE, attention_backward, check, make_spec, random_operands
from jax import lax

from jaxkernels.ops.attention import reference, visibility
from jaxkernels.ops.attention.rules import forward_op
from jaxkernels.ops.attention.spec import AttentionSpec, Extras
from jaxkernels.ops.attention.terms import Band, MaskTerm, ScoreTerm, least
from jaxkernels.pallas.attention import forward


@dataclasses.dataclass(frozen=True)
class StridedBand(MaskTerm):
    """A query sees every `stride`-th key among the `reach` on either side of it, itself included."""

    reach: int
    stride: int

    def visible(self, query: Any, key: Any) -> Any:
        distance = jnp.maximum(query - key, key - query)
        return (distance <= self.reach) & (lax.rem(distance, jnp.full_like(distance, self.stride)) == 0)

    def keys_seen_by_any(self, query_start: Any, query_end: Any, key_end: Any) -> tuple[Any, Any]:
        return Band(self.reach, self.reach).keys_seen_by_any(query_start, query_end, key_end)

    def queries_that_see_any(self, key_start: Any, key_end: Any, query_start: Any, query_end: Any) -> tuple[Any, Any]:
        return Band(self.reach, self.reach).queries_that_see_any(key_start, key_end, query_start, query_end)


@dataclasses.dataclass(frozen=True)
class Checkers(MaskTerm):
    """A query sees keys of the other parity only; no block may be skipped. With a single key, even queries see none."""

    def visible(self, query: Any, key: Any) -> Any:
        return lax.rem(query + key, jnp.full_like(query + key, 2)) == 1


@dataclasses.dataclass(frozen=True)
class FarSquash(ScoreTerm):
    """Logits stay within a bound that falls with the distance, and fall with it themselves."""

    bound: float

    def _bound(self, query: Any, key: Any) -> Any:
        distance = jnp.maximum(query - key, key - query).astype(jnp.float32)
        return self.bound / (1 + distance / 64)

    def change(self, logit: Any, query: Any, key: Any) -> Any:
        bound = self._bound(query, key)
        return bound * logit / (bound + jnp.abs(logit)) + bound

    def slope(self, logit: Any, query: Any, key: Any) -> Any:
        bound = self._bound(query, key)
        return (bound / (bound + jnp.abs(logit))) ** 2


TERMS = {
    "mask": (StridedBand(70, 3),),
    "mask of all blocks": (Checkers(),),
    "score": (FarSquash(2.0),),
    "both": (StridedBand(40, 2), FarSquash(3.0)),
}


def independent(spec: AttentionSpec, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The output, in numpy's float64, one logit after the other; for the terms above alone."""
    batch, num_queries, num_heads, _ = q.shape
    out = np.zeros((*q.shape[:3], v.shape[3]))
    for b, n in np.ndindex(batch, num_heads):
        kv_head = n // spec.group_size
        logits = q[b, :, n].astype(np.float64) @ k[b, :, kv_head].astype(np.float64).T * spec.scale
        for i in range(num_queries):
            seen = np.ones(k.shape[1], bool)
            for j in range(k.shape[1]):
                far = abs(i - j)
                for term in spec.terms:
                    if isinstance(term, FarSquash):
                        bound, x = term.bound / (1 + far / 64), logits[i, j]
                        logits[i, j] = bound * x / (bound + abs(x)) + bound
                    elif isinstance(term, StridedBand):
                        seen[j] &= far <= term.reach and far % term.stride == 0
                    else:
                        seen[j] &= (i + j) % 2 == 1
                if spec.causal:
                    seen[j] &= j <= i
            values = v[b, :, kv_head].astype(np.float64)
            weights = np.exp(logits[i] - logits[i].max()) * seen
            out[b, i, n] = weights @ values / weights.sum() if seen.any() else values.mean(0)
    return out


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=list(TERMS))
def test_reference(terms: Any, causal: bool) -> None:
    spec = make_spec(40, 37, causal=causal, terms=terms, dtype="float32")
    q, k, v = random_operands(spec)
    out, _ = reference.attend(spec, *map(jnp.asarray, (q, k, v)), Extras())
    np.testing.assert_allclose(out, independent(spec, q, k, v), rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("terms", TERMS.values(), ids=list(TERMS))
def test_gradient_of_the_reference(terms: Any) -> None:
    """Against JAX's derivative of `change`: that is what `slope` must be."""
    spec = make_spec(12, 9, causal=True, terms=terms, dtype="float32")
    query, key = jnp.arange(12)[:, None], jnp.arange(9)[None, :]

    def plain(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        k, v = (jnp.repeat(x, spec.group_size, axis=2) for x in (k, v))
        logits, seen = jnp.einsum("btnh,bsnh->bnts", q, k) * spec.scale, key <= query
        for term in terms:
            if isinstance(term, ScoreTerm):
                logits = term.change(logits, query, key)
            else:
                seen &= term.visible(query, key)
        p = jax.nn.softmax(jnp.where(seen, logits, -1e30), axis=-1)
        return jnp.einsum("bnts,bsnd->btnd", p, v)

    op = lambda q, k, v: forward_op(spec, dict(q=q, k=k, v=v), backend=None)[0]
    arrays = [jnp.asarray(x) for x in random_operands(spec)]
    squares = lambda f: lambda *xs: (f(*xs) ** 2).sum()
    gradients = [jax.grad(squares(f), argnums=(0, 1, 2))(*arrays) for f in (op, plain)]
    tangents = [jax.jvp(f, arrays, [jnp.cos(x) for x in arrays])[1] for f in (op, plain)]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), *gradients)
    np.testing.assert_allclose(*tangents, rtol=1e-4, atol=1e-4)


@pytest.mark.sampled(one_in=10)
@pytest.mark.one_version
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("terms", TERMS.values(), ids=list(TERMS))
@pytest.mark.parametrize("backward", [FUSED[64], WIDE], ids=["fused", "wide"])
def test_kernels(backward: Any, terms: Any, causal: bool) -> None:
    check(make_spec(200, 264, causal=causal, terms=terms, batch=2), backward=backward)


@pytest.mark.one_version
def test_fixed_order_of_the_sum() -> None:
    check(make_spec(264, 200, terms=TERMS["both"], deterministic=True), None, FUSED[64])


@pytest.mark.one_version
def test_terms_beside_a_soft_cap_lengths_and_a_shard_of_the_queries() -> None:
    spec = make_spec(136, 264, causal=True, soft_cap=3.0, key_lengths=True, query_offset=True, terms=TERMS["both"])
    check(spec, backward=FUSED[64], key_lengths=[200], query_offset=70)


def test_blocks_that_no_query_sees_are_not_visited() -> None:
    spec = make_spec(512, 512, terms=TERMS["mask"])
    assert visibility.keys_seen_by_any(spec, 256, 320, 512) == (186, 390)
    assert visibility.queries_that_see_any(spec, 256, 320, 0, 512) == (186, 390)
    steps = forward._steps(spec, forward.Config(block_kv=64))
    assert steps == (4, 6, 6, 4)
    assert (
        forward._steps(make_spec(512, 512, terms=TERMS["mask of all blocks"]), forward.Config(block_kv=64)) == (8,) * 4
    )
    assert least(3, np.int32(4)) == 3


def test_the_two_kernels_refuse_terms() -> None:
    spec = make_spec(72, 72, terms=TERMS["mask"])
    with pytest.raises(NotImplementedError, match="backward_two_kernels does not handle the term StridedBand"):
        attention_backward.run(spec, TWO_KERNELS, *[jnp.zeros((1, 8, 2, 64))] * 9)


def test_a_term_that_hides_too_little_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above is one: here the kernels take every block for one that needs no mask."""
    monkeypatch.setattr(StridedBand, "keys_seen_by_all", lambda self, start, end, key_end: (0, key_end))
    with pytest.raises(AssertionError, match="from the reference"):
        check(make_spec(200, 264, terms=TERMS["mask"]), backward=None)
