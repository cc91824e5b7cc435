"""Clipped gradients of models of 1 to 124 million parameters.

As the first section; every contender is tried at every power of two as microbatch, as far as
memory goes: 2 GiB of gradients of single examples at most. `per_example` and `ours, best` are the
engine at its fastest microbatch, which was searched in the same way. Aims: `auto` takes at most 1.3
times as long as the ordinary gradient where the best microbatch does, and at most 1.1 times as long
as the best microbatch; no peer is faster. `--short` leaves out 32 million parameters and more at
batch 512, and the GPT: a peer takes minutes there.
"""

import argparse
import functools
from collections.abc import Callable, Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn
from jaxtyping import Array

from .client_rows.sequences import bert
from .clipped_gradients import choice, times
from .command import Part
from .contenders import (
    AUTO,
    BOOK_KEEPING,
    GHOST,
    JAX_PRIVACY,
    NON_PRIVATE,
    OPTAX,
    PER_EXAMPLE,
    compiled,
    powers_of_two,
)
from .page import Table
from .rows import Row, classification_loss, gpt, image_batch, mlp, tiny
from .timing import Contender, measure, median_turn, once

_FORMED_BYTES = 2 * 2**30
# Where a gradient takes this long, a turn is one run.
_LONG = 5e7


class Bag(eqx.Module):
    """The mean of the rows of some words, and a linear layer."""

    words: nn.Embedding
    head: nn.Linear

    def __call__(self, words: Array) -> Array:
        return self.head(jnp.mean(jax.vmap(self.words)(words), axis=0))


def bag(batch: int = 64, length: int = 20, width: int = 16, vocabulary: int = 1_000_000) -> Row:
    keys = jax.random.split(jax.random.key(0), 4)
    model = Bag(nn.Embedding(vocabulary, width, key=keys[0]), nn.Linear(width, 10, key=keys[1]))
    words = jax.random.randint(keys[2], (batch, length), 0, vocabulary)
    labels = jax.random.randint(keys[3], (batch,), 0, 10)
    title = f"embedding of {vocabulary:,} rows of {width}, {length} words, batch {batch}"
    return Row(title, model, classification_loss, (words, labels))


class Residual(eqx.Module):
    """Two convolutions behind group norms, added to their input."""

    first: nn.Conv2d
    second: nn.Conv2d
    norms: tuple[nn.GroupNorm, nn.GroupNorm]
    shortcut: nn.Conv2d | None

    def __init__(self, channels_in: int, channels: int, stride: int, key: Array) -> None:
        keys = jax.random.split(key, 3)
        self.first = nn.Conv2d(channels_in, channels, 3, stride, 1, use_bias=False, key=keys[0])
        self.second = nn.Conv2d(channels, channels, 3, 1, 1, use_bias=False, key=keys[1])
        self.norms = nn.GroupNorm(8, channels_in), nn.GroupNorm(8, channels)
        is_same = stride == 1 and channels_in == channels
        self.shortcut = (
            None if is_same else nn.Conv2d(channels_in, channels, 1, stride, key=keys[2])
        )

    def __call__(self, image: Array) -> Array:
        hidden = self.first(jax.nn.relu(self.norms[0](image)))
        hidden = self.second(jax.nn.relu(self.norms[1](hidden)))
        return hidden + (image if self.shortcut is None else self.shortcut(image))


class ResNet(eqx.Module):
    """Eighteen layers in four stages."""

    stem: nn.Conv2d
    blocks: list[Residual]
    norm: nn.GroupNorm
    head: nn.Linear

    def __init__(self, channels: int, key: Array) -> None:
        keys = jax.random.split(key, 10)
        self.stem = nn.Conv2d(3, channels, 3, 1, 1, use_bias=False, key=keys[0])
        widths = [channels * 2**stage for stage in (0, 0, 0, 1, 1, 2, 2, 3, 3)]
        self.blocks = [
            Residual(widths[i], widths[i + 1], 1 + (widths[i] < widths[i + 1]), keys[1 + i])
            for i in range(8)
        ]
        self.norm = nn.GroupNorm(8, widths[-1])
        self.head = nn.Linear(widths[-1], 10, key=keys[9])

    def __call__(self, image: Array) -> Array:
        hidden = self.stem(image)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(jnp.mean(jax.nn.relu(self.norm(hidden)), axis=(1, 2)))


def resnet(batch: int = 16, side: int = 32, channels: int = 64) -> Row:
    model = ResNet(channels, jax.random.key(0))
    title = f"ResNet-18 {side} x {side}, {channels} channels, group norm, batch {batch}"
    return Row(title, model, classification_loss, image_batch(batch, 3, side, side))


_WIDTHS = {"1M": 540, "4M": 1240, "8M": 1810, "32M": 3800, "100M": 6880}
LARGE: dict[str, Callable[..., Row]] = {
    **{
        f"mlp_{size}_{batch}": functools.partial(mlp, batch=batch, width=width)
        for size, width in _WIDTHS.items()
        for batch in (64, 512)
    },
    "bag_100k": functools.partial(bag, vocabulary=100_000),
    "bag_1M": bag,
    "resnet": resnet,
    "bert": functools.partial(bert, batch=8, width=512, depth=4),
    "gpt2": functools.partial(gpt, batch=8, length=256, width=768, depth=12, vocabulary=50_257),
}
_SLOW = ("mlp_32M_512", "mlp_100M_512", "gpt2")


def line(row: Row, rounds: int) -> dict[str, str]:
    """A row of the table; `-` where one of the two does not run."""
    params, _, _ = row.split()
    entries = sum(leaf.size for leaf in jax.tree.leaves(params))
    most = _FORMED_BYTES // (4 * entries)
    sizes = powers_of_two(row)
    formed = [size for size in sizes if (size or row.batch_size) <= most] or [1]
    contenders = [
        Contender(name, functools.partial(compiled, name, row), its)
        for name, its in {
            NON_PRIVATE: (None,),
            AUTO: (None,),
            GHOST: (None,),
            BOOK_KEEPING: sizes,
            PER_EXAMPLE: formed,
            JAX_PRIVACY: formed,
            OPTAX: formed,
        }.items()
    ]
    turn = once if entries * row.batch[0].size > _LONG * row.batch_size else median_turn
    refused = dict[str, str]()
    found = measure(contenders, rounds, turn, turn, refused)
    auto, best, ordinary = (found.get(name) for name in (AUTO, BOOK_KEEPING, NON_PRIVATE))
    peers = {name: found.get(name) for name in (PER_EXAMPLE, JAX_PRIVACY, OPTAX)}
    return {
        "model": row.title,
        "parameters": f"{entries / 1e6:.1f}M",
        "non-private, ms": "-" if ordinary is None else f"{1e3 * ordinary.best:.1f}",
        "its choice": choice(row),
        "auto / non-private": times(auto, ordinary),
        "ghost / non-private": times(found.get(GHOST), ordinary),
        "auto / ours, best": times(auto, best) + f" ({best.at if best else '-'})",
        **{
            f"{name.removeprefix('eqx_dp ')} / auto": times(its, auto)
            + f" ({its.at if its else '-'})"
            for name, its in peers.items()
        },
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    """Which rows."""
    parser.add_argument("--rows", nargs="+", choices=LARGE, help="which models")


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """One table, a line a model."""
    names = options.rows or [name for name in LARGE if not (options.short and name in _SLOW)]
    lines: list[dict[str, str]] = []
    for name in names:
        row = LARGE[name](**(tiny(LARGE[name]) if options.tiny else {}))
        lines.append(line(row, options.rounds))
        print("  ".join(lines[-1].values()), flush=True)
    yield Table("1 to 124 million parameters", lines)


PART = Part(__doc__, tables, add_options, rounds=(5, 3))
