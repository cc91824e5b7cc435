"""The cipher against the vectors of RFC 8439, and as a generator of JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from eqx_dp.privacy import key_from_secret
from eqx_dp.privacy.chacha import block
from tests.sharding.compiled import collectives
from tests.sharding.losses import mesh_of

KEY = key_from_secret(20240607, "test")


def words_of(text):
    return np.frombuffer(bytes.fromhex(text), np.dtype("<u4")).astype(np.uint32)


# Section 2.3.2, and test vector 5 of appendix A.1.
COUNTING = "".join(f"{i:02x}" for i in range(32))
VECTORS = [
    (
        *(COUNTING, 1, "000000090000004a00000000"),
        "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
        "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e",
    ),
    (
        *("00" * 32, 0, "00" * 11 + "02"),
        "c2c64d378cd536374ae204b9ef933fcd1a8b2288b3dfa49672ab765b54ee27c7"
        "8a970e0e955c14f3a88e741b97c286f75f8fc299e8148362fa198a39531bed6d",
    ),
]


@pytest.mark.parametrize(("key", "counter", "nonce", "expected"), VECTORS)
def test_vectors_of_the_rfc(key, counter, nonce, expected):
    counters = jnp.asarray([counter, 7], jnp.uint32)
    found = block([*words_of(key)], counters, [*words_of(nonce)], rounds=20)
    assert [int(word[0]) for word in found] == words_of(expected).tolist()


def test_12_rounds():
    """Test vector 1 of draft-strombergson-chacha-test-vectors, which has a counter of 64 bits."""
    found = block([*words_of("00" * 32)], jnp.zeros((), jnp.uint32), [np.uint32(0)] * 3, rounds=12)
    expected = words_of("9bf49a6a0755f953811fce125f2683d50429c3bb49e074147e0089a52eae155f")
    assert list(map(int, found[:8])) == expected.tolist()


def test_other_keys_are_half_a_block():
    """The loop over rounds gives what the cipher gives when it is written out."""
    key = key_from_secret(3)
    words = [*jax.random.key_data(key)]
    numbers = jnp.asarray([0, 5, 2**32 - 1], jnp.uint32)
    expected = block(words, numbers, (np.uint32(0), np.uint32(1), np.uint32(0)), rounds=12)[:8]
    for i, number in enumerate(numbers):
        found = jax.random.key_data(jax.random.fold_in(key, number))
        assert found.tolist() == [int(word[i]) for word in expected]
    split = jax.random.key_data(jax.random.split(key, (2, 3)))
    assert split.shape == (2, 3, 8)
    for i in range(6):
        assert (split.reshape(6, 8)[i] == jax.random.key_data(jax.random.fold_in(key, i))).all()


def test_more_than_32_bits_of_positions_do_not_repeat():
    @jax.jit
    def corners():
        bits = jax.random.bits(KEY, (3, 2**16, 2**16))
        return bits[:, 0, 0], bits[:, -1, -1], bits[0, :3, 0]

    found = np.concatenate(corners())
    assert np.unique(found).size == found.size - 1  # the first entry is there twice


@pytest.mark.parametrize("width", [8, 16, 32, 64])
def test_bits(width):
    with jax.enable_x64(True):
        found = np.asarray(jax.random.bits(KEY, (1000, 100), f"uint{width}"))
    assert found.dtype == f"uint{width}"
    for bit in range(width):
        share = np.mean((found >> np.asarray(bit, found.dtype)) & 1)
        assert abs(share - 0.5) < 5 * 0.5 / 10**2.5
    expected = 2.0**width * -np.expm1(-found.size / 2.0**width)
    assert abs(np.unique(found).size - expected) < 5 * np.sqrt(expected)


@pytest.mark.parametrize("spec", [P("data"), P(None, "data")])
def test_every_device_draws_its_own_part(spec):
    mesh = mesh_of("auto", data=8)
    sharding = NamedSharding(mesh, spec)
    drawn = jax.jit(lambda key: jax.random.bits(key, (64, 48)), out_shardings=sharding)
    np.testing.assert_array_equal(drawn(KEY), jax.random.bits(KEY, (64, 48)))
    assert collectives(drawn.lower(KEY).compile().as_text()) == []
