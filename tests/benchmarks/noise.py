"""Time and memory of the noise, against adding as many numbers of `jax.random.normal`.

One jitted update of `gaussian_privatizer`, gradients and state donated, against the same with
`jax.random.normal`. All take turns in one process; the fastest turn counts, with the quartiles of
the ratios round by round in parentheses. Memory is the temporary memory of the compiled program.
"""

import argparse
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

import eqx_dp as dp

from .command import Part
from .page import MIB, Table
from .rows import ROWS, tiny
from .step import threaded
from .timing import Contender, Program, compared, measure

PLAIN, CERTIFIED = "plain", "certified"


def trees(is_tiny: bool) -> dict[str, Any]:
    """Gradients, by what they are: leaves of a whole model, or as many entries divided evenly."""
    sizes = {name: tiny(ROWS[name]) if is_tiny else {} for name in ("mlp", "gpt_small")}
    of_mlp, of_gpt = (
        jax.tree.map(jnp.zeros_like, ROWS[name](**its).split()[0]) for name, its in sizes.items()
    )
    entries, pieces = num_entries(of_mlp), 4 if is_tiny else 200
    return {
        "one leaf": jnp.zeros(entries),
        "MLP": of_mlp,
        "GPT": of_gpt,
        "small leaves": [jnp.zeros(entries // pieces) for _ in range(pieces)],
    }


def num_entries(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def plain(state: Any) -> Any:
    """Adds `jax.random.normal`, a draw a leaf."""
    tree, key = state
    leaves, structure = jax.tree.flatten(tree)
    key, *keys = jax.random.split(key, len(leaves) + 1)
    noisy = [x + jax.random.normal(k, x.shape) for x, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(structure, noisy), key


def prepared(name: str, tree: Any) -> Program:
    """The update of a privatizer; gradients and state are donated, as they are within a step."""
    privatizer = dp.gaussian_privatizer(stddev=1.0, key=1)
    add: Callable[[Any], Any] = lambda state: privatizer.update(*state)  # noqa: E731
    state = jax.tree.map(jnp.copy, (tree, privatizer.init(tree)))
    if name == PLAIN:
        add, state = plain, (state[0], jax.random.key(1))
    compiled = jax.jit(add, donate_argnums=0).lower(state).compile()
    memory = compiled.memory_analysis()
    return Program(threaded(compiled, state, [()]), temp_bytes=memory.temp_size_in_bytes)


def tables(options: argparse.Namespace) -> Iterator[Table]:
    """One table, a line a tree."""
    lines: list[dict[str, str]] = []
    for title, tree in trees(options.tiny).items():
        kinds = PLAIN, CERTIFIED
        contenders = [
            Contender(kind, lambda _, kind=kind, tree=tree: prepared(kind, tree)) for kind in kinds
        ]
        found = measure(contenders, options.rounds)
        reference, noise = (found[kind] for kind in kinds)
        lines.append(
            {
                "gradients": title,
                "leaves": str(len(jax.tree.leaves(tree))),
                "entries": str(num_entries(tree)),
                "jax.random.normal added, ms": f"{1e3 * reference.best:.2f}",
                "noise, ms": f"{1e3 * noise.best:.2f}",
                "noise / plain": compared(noise.seconds, reference.seconds),
                "gradients, MiB": f"{4 * num_entries(tree) / MIB:.2f}",
                "temp. of noise, MiB": f"{(noise.program.temp_bytes or 0) / MIB:.2f}",
            }
        )
    yield Table("Noise", lines, "Aim: noise takes at most 1.1 times as long as the plain draw.")


PART = Part(__doc__, tables, rounds=(15, 5))
