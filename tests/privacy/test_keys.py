import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import eqx_dp as dp
from eqx_dp.privacy import digest, fold_text, key_from_secret
from eqx_dp.privacy.keys import fold_texts

KEY = jax.random.key(987654321)
secrets_ = st.integers(0, 2**300) | st.binary(min_size=1, max_size=80)
purposes = st.lists(st.text(max_size=4) | st.binary(max_size=4), max_size=3).map(tuple)


def words(key):
    return jax.random.key_data(key).tolist()


def test_keys_stay_what_they_are():
    # A run that is resumed under a later release has to find its keys again.
    assert words(key_from_secret(2**127 + 5, "noise"))[:3] == [582283318, 2850876921, 2386976278]
    assert words(key_from_secret(b"a secret", "noise", b"\0"))[:2] == [3342301626, 1123943928]
    assert words(key_from_secret(0))[6:] == [343892476, 4026206610]
    folded = fold_text(key_from_secret(0), ".layers[0].weight")
    assert words(folded)[:2] == [3776973953, 932000950]
    assert words(fold_text(jax.random.key(0), ".layers[0].weight")) == [2548772679, 1040606977]


@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg", "unsafe_rbg"])
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("texts", [[], ["a", "", b"a", "a" * 100, "b"]])
def test_texts_folded_together_give_the_keys_of_each(implementation, make_key, texts):
    with jax.default_prng_impl(implementation):
        key = make_key(3)
        expected = [words(fold_text(key, text)) for text in texts]
        assert [words(found) for found in fold_texts(key, texts)] == expected
        together = jax.jit(lambda key: fold_texts(key, texts))(key)
        assert [words(found) for found in together] == expected


@settings(max_examples=100, deadline=None)
@given(secrets_, secrets_, purposes, purposes)
def test_what_differs_gives_keys_that_differ(one, other, for_one, for_other):
    def text(part):
        return part.encode() if isinstance(part, str) else part

    def told(secret, purpose):
        return type(secret), secret, [text(part) for part in purpose]

    is_same = told(one, for_one) == told(other, for_other)
    assert (digest(one, for_one, size=16) == digest(other, for_other, size=16)) == is_same


@pytest.mark.parametrize("bit", [0, 63, 64, 1000])
def test_every_bit_of_a_secret_counts(bit):
    assert words(key_from_secret(2**2000)) != words(key_from_secret(2**2000 + 2**bit))
    assert words(key_from_secret(np.uint8(3))) == words(key_from_secret(jnp.asarray(3)))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "secret", [-987654321, b"", True, "987654321", None, 987654321.0, np.ones(3)]
)
def test_what_is_no_secret_is_refused_and_not_shown(secret):
    with pytest.raises(ValueError, match=r"^a secret must ") as error:
        key_from_secret(secret)
    assert "98765432" not in str(error.value)
    assert error.value.__cause__ is None
    with pytest.raises(ValueError, match="purpose must be a text or bytes; found a int"):
        key_from_secret(3, 4)


def test_a_key_is_of_the_cipher_whatever_is_configured():
    with jax.default_prng_impl("rbg"):
        key = key_from_secret(3)
    assert str(key.dtype) == "key<chacha12>"
    assert words(key) == words(key_from_secret(3))


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    "key", [987654321, "987654321", np.arange(987654321, 987654324), jax.random.split(KEY, 3)]
)
def test_a_key_of_the_loss_that_is_none_is_not_shown(key):
    grad_fn = dp.filter_clipped_grad(lambda w, x, key: w * x, l2_clip_norm=1.0)
    with pytest.raises(ValueError, match="key must be a single JAX key") as error:
        grad_fn(jnp.ones(()), jnp.ones(4), key=key)
    assert "98765432" not in str(error.value)
    assert error.value.__suppress_context__  # nor what JAX said of it
