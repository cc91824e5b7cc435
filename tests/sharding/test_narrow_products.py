"""Products in narrow dtypes on a mesh: parameters spread over devices have one scale each."""

import equinox as eqx
import jax
import numpy as np
import pytest

import eqx_dp as dp
from tests.sharding.losses import GPT, Says, gpt_rules, language_loss, mesh_of, tokens

POLICY = dp.Policy(
    "float32", "float32", "float32", matmul=dp.Matmul("float8_e4m3fn", "float8_e5m2")
)


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("explicit", "per_example"),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in (("auto", "per_example"), ("explicit", "book_keeping"), ("auto", "ghost"))
        ),
    ],
)
@pytest.mark.slow
def test_a_gpt_is_as_on_one_device(kind, method):
    def grad_fn(rules):
        return eqx.filter_jit(
            dp.filter_clipped_grad(
                language_loss,
                l2_clip_norm=0.5,
                keep_batch_dim=True,
                sharding=rules,
                method=method,
                policy=POLICY,
            )
        )

    expected = grad_fn(None)(GPT(Says("auto", False), depth=1), *tokens(8))
    mesh = mesh_of(kind, data=4, model=2)
    rules = gpt_rules(mesh)
    with jax.set_mesh(mesh):
        model = rules.shard(GPT(Says(kind), depth=1))
        found = grad_fn(rules)(model, *rules.shard_batch(tokens(8)))
    pairs = zip(*map(jax.tree.leaves, (found, expected)), strict=True)
    error, size = (
        sum(np.sum(np.square(x)) for x in each)
        for each in zip(
            *((np.asarray(a) - np.asarray(b), np.asarray(b)) for a, b in pairs), strict=True
        )
    )
    # A sum over devices may round an operand the other way.
    assert np.sqrt(error / size) < 1e-3
