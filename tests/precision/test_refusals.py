"""What is handed to the precision functions by mistake is named by its type, and never printed."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import eqx_dp as dp
from eqx_dp.precision import checked_policy
from eqx_dp.precision.refusals import float_dtype, one_of

SECRET = 12.34375
WEIGHTS = jnp.full((3, 3), SECRET)


class Model(eqx.Module):
    weight: jax.Array = eqx.field(default_factory=lambda: WEIGHTS)

    def __call__(self, x):
        return self.weight @ x


@pytest.mark.parametrize(
    ("call", "type_name"),
    [
        (lambda: checked_policy(Model()), "Model"),
        (lambda: checked_policy([WEIGHTS]), "array of float32"),
        (lambda: float_dtype("dtypes.params", {"w": WEIGHTS}), "dict"),
        (lambda: one_of("loss_scale.kind", (WEIGHTS,), ("none",)), "array of float32"),
        (lambda: checked(Model()), "Model"),
        (lambda: checked(functools.partial(Model(), jnp.ones(3))), "partial"),
    ],
)
def test_no_error_prints_a_model_or_an_array(call, type_name):
    with pytest.raises(ValueError, match=type_name) as error:
        call()
    message = str(error.value)
    assert str(SECRET) not in message
    assert "f32[3,3]" not in message
    assert "rray(" not in message


def checked(fn):
    x = () if isinstance(fn, functools.partial) else (jnp.ones(3),)
    return dp.check_precision(fn, *x, policy=dp.load_policy("float32"))


def test_what_is_short_is_shown():
    for found, text in (("float32", "'float32'"), (3, "3"), (jnp.float32, "float32")):
        with pytest.raises(ValueError, match=text):
            checked_policy(found)
