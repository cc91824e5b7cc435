"""GPT-2 as an Equinox model whose paths are the names of the checkpoint's arrays.

Fields are called as GPT-2's arrays are, and products are stored as GPT-2 stores them (inputs
first), so the path of an array in the model is its name in the file: `h.0.attn.c_attn.weight`.
Loading is one loop over the model's paths. `finetune_gpt2.py` fine-tunes it privately.
"""

from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray
from safetensors.flax import load_file


class Conv1D(eqx.Module):
    """A linear layer whose weight has its inputs first, as GPT-2 stores it."""

    weight: Float[Array, "inputs outputs"]
    bias: Float[Array, " outputs"]

    def __init__(self, inputs: int, outputs: int, key: PRNGKeyArray):
        self.weight = 0.02 * jax.random.normal(key, (inputs, outputs))
        self.bias = jnp.zeros(outputs)

    def __call__(self, x: Float[Array, "time inputs"]) -> Float[Array, "time outputs"]:
        return x @ self.weight + self.bias


Product = Callable[[Float[Array, "time inputs"]], Float[Array, "time outputs"]]  # Conv1D, or LoRA


class Attention(eqx.Module):
    """Causal attention of several heads."""

    c_attn: Product
    c_proj: Product
    heads: int = eqx.field(static=True)

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        parts = self.c_attn(x).reshape(len(x), 3, self.heads, -1)
        query, key, value = parts[:, 0], parts[:, 1], parts[:, 2]
        mixed = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        return self.c_proj(mixed.reshape(x.shape))


class MLP(eqx.Module):
    """Two products, and a GELU between them."""

    c_fc: Product
    c_proj: Product

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        return self.c_proj(jax.nn.gelu(self.c_fc(x), approximate=True))


class Block(eqx.Module):
    """Causal attention and an MLP."""

    ln_1: eqx.nn.LayerNorm
    attn: Attention
    ln_2: eqx.nn.LayerNorm
    mlp: MLP

    def __init__(self, width: int, heads: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.ln_1, self.ln_2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        attend, merge = Conv1D(width, 3 * width, keys[0]), Conv1D(width, width, keys[1])
        self.attn = Attention(attend, merge, heads)
        self.mlp = MLP(Conv1D(width, 4 * width, keys[2]), Conv1D(4 * width, width, keys[3]))

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        x = x + self.attn(jax.vmap(self.ln_1)(x))
        return x + self.mlp(jax.vmap(self.ln_2)(x))


class GPT2(eqx.Module):
    """A decoder-only transformer; the embedding of tokens is the head, too."""

    wte: eqx.nn.Embedding  # of tokens
    wpe: eqx.nn.Embedding  # of positions
    h: list[Block]
    ln_f: eqx.nn.LayerNorm

    def __init__(
        self, vocabulary: int, length: int, width: int, depth: int, heads: int, key: PRNGKeyArray
    ):
        first, second, *keys = jax.random.split(key, 2 + depth)
        self.wte = eqx.nn.Embedding(weight=0.02 * jax.random.normal(first, (vocabulary, width)))
        self.wpe = eqx.nn.Embedding(weight=0.02 * jax.random.normal(second, (length, width)))
        self.h = [Block(width, heads, key) for key in keys]
        self.ln_f = eqx.nn.LayerNorm(width)

    def __call__(self, text: Int[Array, " time"]) -> Float[Array, "time vocabulary"]:
        """Logits of every token, given those before it."""
        before = jnp.concatenate([jnp.zeros(1, text.dtype), text[:-1]])
        x = self.wte.weight[before] + self.wpe.weight[: len(text)]
        for block in self.h:
            x = block(x)
        return jax.vmap(self.ln_f)(x) @ self.wte.weight.T


def names_of(model: GPT2) -> dict[str, Array]:
    """The arrays of a model, by the names that they have in a checkpoint."""
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(model, eqx.is_array))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def load_by_name(file: Path, model: GPT2) -> GPT2:
    """The model with the arrays of a file; what else is in the file (masks) is left there.

    Raises:
        ValueError: an array is missing, or has another shape.
    """
    wanted, found = names_of(model), load_file(file)
    for name, array in wanted.items():
        if name not in found or found[name].shape != array.shape:
            there = f"shape {found[name].shape}" if name in found else "no such array"
            raise ValueError(f"{file}: {name} must have shape {array.shape}; found {there}.")
    arrays, rest = eqx.partition(model, eqx.is_array)
    read = [found[name].astype(array.dtype) for name, array in wanted.items()]
    return eqx.combine(jax.tree.unflatten(jax.tree.structure(arrays), read), rest)
