"""A wide residual network for private training: group norm, and standardised weights.

De et al. (Unlocking High-Accuracy Differentially Private Image Classification through Scale, 2022)
train it on CIFAR-10, as `cifar10.py` does. A group norm sees one example alone, where a batch norm
mixes examples.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

GROUPS = 16


class Conv(eqx.Module):
    """A convolution whose weight has mean 0 and variance 1 / inputs in each output channel."""

    conv: eqx.nn.Conv2d

    def __init__(self, inputs: int, outputs: int, size: int, stride: int, key: PRNGKeyArray):
        self.conv = eqx.nn.Conv2d(inputs, outputs, size, stride, size // 2, key=key)

    def __call__(self, x: Float[Array, "inputs h w"]) -> Float[Array, "outputs h2 w2"]:
        weight = self.conv.weight - jnp.mean(self.conv.weight, axis=(1, 2, 3), keepdims=True)
        variance = jnp.var(weight, axis=(1, 2, 3), keepdims=True)
        weight *= jax.lax.rsqrt(variance * weight[0].size + 1e-4)
        return eqx.tree_at(lambda conv: conv.weight, self.conv, weight)(x)


class Block(eqx.Module):
    """Two convolutions, and a way around them."""

    norm1: eqx.nn.GroupNorm
    norm2: eqx.nn.GroupNorm
    conv1: Conv
    conv2: Conv
    around: Conv | None

    def __init__(self, inputs: int, outputs: int, stride: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 3)
        self.norm1 = eqx.nn.GroupNorm(min(GROUPS, inputs), inputs)
        self.norm2 = eqx.nn.GroupNorm(min(GROUPS, outputs), outputs)
        self.conv1 = Conv(inputs, outputs, 3, stride, keys[0])
        self.conv2 = Conv(outputs, outputs, 3, 1, keys[1])
        is_same = inputs == outputs and stride == 1
        self.around = None if is_same else Conv(inputs, outputs, 1, stride, keys[2])

    def __call__(self, x: Float[Array, "inputs h w"]) -> Float[Array, "outputs h2 w2"]:
        hidden = jax.nn.relu(self.norm1(x))
        shortcut = x if self.around is None else self.around(hidden)
        return shortcut + self.conv2(jax.nn.relu(self.norm2(self.conv1(hidden))))


class WideResNet(eqx.Module):
    """WRN-depth-width (Zagoruyko and Komodakis, 2016)."""

    first: Conv
    blocks: list[Block]
    norm: eqx.nn.GroupNorm
    head: eqx.nn.Linear

    def __init__(self, depth: int, width: int, key: PRNGKeyArray):
        per_group = (depth - 4) // 6
        sizes = [16 * width] * per_group + [32 * width] * per_group + [64 * width] * per_group
        keys = jax.random.split(key, len(sizes) + 2)
        self.first = Conv(3, 16, 3, 1, keys[0])
        self.blocks, inputs = [], 16
        for i, outputs in enumerate(sizes):
            stride = 2 if i > 0 and i % per_group == 0 else 1
            self.blocks.append(Block(inputs, outputs, stride, keys[i + 2]))
            inputs = outputs
        self.norm = eqx.nn.GroupNorm(GROUPS, inputs)
        self.head = eqx.nn.Linear(inputs, 10, key=keys[1])

    def __call__(self, image: Float[Array, "3 32 32"]) -> Float[Array, " 10"]:
        hidden = self.first(image)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(jnp.mean(jax.nn.relu(self.norm(hidden)), axis=(1, 2)))
