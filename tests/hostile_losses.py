"""What one example adds, measured in float64, for random losses on hostile numbers.

A random loss is a composition of layers, wrappers and terms. One compiled program serves many draws
of parameters and data: zeros, subnormal numbers, 1e-30 to 1e30, NaN, infinities, terms that cancel.
Clip norms go from 1e-9 to 1e9. A batch holds one real example, and padding of worse numbers still.
"""

import collections
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import eqx_dp as dp

METHODS = ("book_keeping", "ghost", "per_example")
T, D, ROWS, LAYERS = 5, 6, 7, 2

Model = dict[str, Any]
Example = dict[str, Any]
Block = Callable[[dict[str, Any], Any, Example], Any]


def _linear(p, s, e):
    return s @ p["w"] + p["b"]


def _rows(p, s, e):
    return jax.vmap(lambda row: p["w"].T @ row)(s)


def _transposed(p, s, e):
    return jnp.tanh(s @ p["w"]) @ p["w"].T


def _two_layers(p, s, e):
    return jax.nn.gelu(s @ p["w"]) @ p["v"]


def _embedding(p, s, e):
    return s + p["table"][e["tokens"]]


def _tied(p, s, e):
    return (s + p["table"][e["tokens"]]) @ p["table"].T @ jnp.ones((ROWS, D), s.dtype)


def _row_by_row(p, s, e):
    return s * lax.map(lambda i: lax.dynamic_index_in_dim(p["table"], i, 0, False), e["tokens"])


def _convolution(p, s, e):
    image = s.T[None]
    return lax.conv_general_dilated(image, p["kernel"], (1,), "SAME")[0].T


def _strided(p, s, e):
    numbers = ("NHWC", "HWIO", "NHWC")
    image = jnp.tile(s[None, :, :, None], (1, 1, 1, 2))
    made = lax.conv_general_dilated(
        image, p["image_kernel"], (2, 1), "SAME", dimension_numbers=numbers, feature_group_count=2
    )
    return s + jnp.sum(made)


def _attention(p, s, e):
    q, k, v = (s @ p[name] for name in ("w", "v", "u"))
    return jax.nn.softmax(q @ k.T) @ v


def _layer_norm(p, s, e):
    centred = s - jnp.mean(s, -1, keepdims=True)
    return centred * lax.rsqrt(jnp.mean(centred**2, -1, keepdims=True) + 1e-5) * p["b"] + p["c"]


def _scanned(p, s, e):
    return lax.scan(lambda s, w: (jnp.tanh(s @ w), None), s, p["stacked"])[0]


def _scanned_remat(p, s, e):
    step = jax.checkpoint(lambda s, w: (s + jnp.sin(s @ w), None))
    return lax.scan(step, s, p["stacked"])[0]


def _recurrent(p, s, e):
    def step(h, x):
        h = jnp.tanh(h @ p["w"] + x @ p["v"] + p["b"])
        return h, h

    return lax.scan(step, jnp.zeros(D, s.dtype), s)[1]


def _weight_norm(p, s, e):
    return s @ (p["w"] / jnp.sqrt(jnp.sum(p["w"] ** 2, 0) + 1e-12)) * p["b"]


def _masked(p, s, e):
    return s @ jnp.where(jnp.arange(D) < 4, p["w"], 0)


def _stopped(p, s, e):
    return s @ (p["w"] - lax.stop_gradient(p["w"]) * 0.5) + p["b"]


def _low_rank(p, s, e):
    return s @ lax.stop_gradient(p["w"]) + (s @ p["down"]) @ p["up"]


def _cond(p, s, e):
    return lax.cond(e["h"] > 0, lambda s: s @ p["w"], lambda s: s * p["b"], s)


def _cancelling(p, s, e):
    return s @ p["w"] - (s * (1 + 1e-6)) @ p["w"]


def _sliced(p, s, e):
    return jnp.concatenate([s @ p["w"][:, :4], s @ p["w"][:, 2:4]], axis=1)


def _per_head(p, s, e):
    return jnp.einsum("thd,hde->the", s.reshape(T, 2, 3), p["heads"]).reshape(T, D)


SHAPES = {
    "w": (D, D), "v": (D, D), "u": (D, D), "b": (D,), "c": (D,), "table": (ROWS, D),
    "kernel": (D, D, 3), "image_kernel": (3, 2, 1, 4), "stacked": (LAYERS, D, D),
    "down": (D, 2), "up": (2, D), "heads": (2, 3, 3),
}  # fmt: skip
BLOCKS: dict[Block, tuple[str, ...]] = {
    _linear: ("w", "b"), _rows: ("w",), _transposed: ("w",), _two_layers: ("w", "v"),
    _embedding: ("table",), _tied: ("table",), _row_by_row: ("table",), _convolution: ("kernel",),
    _strided: ("image_kernel",), _attention: ("w", "v", "u"), _layer_norm: ("b", "c"),
    _scanned: ("stacked",), _scanned_remat: ("stacked",), _recurrent: ("w", "v", "b"),
    _weight_norm: ("w", "b"), _masked: ("w",), _stopped: ("w", "b"), _cond: ("w", "b"),
    _low_rank: ("w", "down", "up"), _cancelling: ("w",), _sliced: ("w",), _per_head: ("heads",),
}  # fmt: skip
BETWEEN: tuple[Callable[[Any], Any], ...] = (
    lambda s: s, jnp.tanh, jax.nn.relu, jnp.exp, jnp.square, jnp.sin, jnp.abs, jnp.sqrt,
    lambda s: s * 1e20, lambda s: s * 1e-20, lambda s: 1 / s, lambda s: s - jnp.roll(s, 1, 0),
    lambda s: s.astype(jnp.bfloat16).astype(s.dtype), jax.nn.log_softmax, lambda s: s[::-1],
)  # fmt: skip
WRAPPERS: tuple[Callable[[Block], Block], ...] = (
    lambda block: block,
    jax.jit,
    jax.checkpoint,
    lambda block: lambda p, s, e: s + block(p, s, e),
    lambda block: lambda p, s, e: block(p, block(p, s, e), e),
    lambda block: lambda p, s, e: jnp.where(e["h"] > 1, s, block(p, s, e)),
)
HEADS: tuple[Callable[[Any, Example], Any], ...] = (
    lambda s, e: jnp.sum(s * e["g"]),
    lambda s, e: jnp.sum((s - e["g"]) ** 2),
    lambda s, e: jax.nn.logsumexp(s) * e["h"],
    lambda s, e: jnp.max(s) - jnp.min(s),
    lambda s, e: -jnp.mean(jax.nn.log_softmax(s)[jnp.arange(T), e["tokens"] % D]),
    lambda s, e: jnp.sum(s * e["g"]) - jnp.sum(s * e["g"] * (1 + 1e-6)),
    lambda s, e: jnp.sqrt(jnp.sum(s**2)),
)
TERMS: tuple[Callable[[Model, Example], Any], ...] = (
    lambda m, e: 0.0,
    lambda m, e: 0.0,
    lambda m, e: 0.5 * sum(jnp.sum(x**2) for x in jax.tree.leaves(m)),
    lambda m, e: e["h"] * sum(jnp.sum(jnp.abs(x)) for x in jax.tree.leaves(m)),
)


class Loss(NamedTuple):
    """A random loss, and how it is clipped."""

    blocks: tuple[Block, ...]
    between: tuple[Callable[[Any], Any], ...]
    head: Callable[[Any, Example], Any]
    term: Callable[[Model, Example], Any]
    names: tuple[tuple[str, ...], ...]
    clip_norm: Any
    options: dict[str, Any]
    slots: int

    def __call__(self, model: Model, example: Example) -> Any:
        s = example["x"]
        for i, (block, between) in enumerate(zip(self.blocks, self.between, strict=True)):
            s = between(block(model[f"block{i}"], s, example))
        return self.head(s, example) + self.term(model, example)


def random_loss(rng: np.random.Generator) -> Loss:
    def one_of(choices: Sequence[Any]) -> Any:
        return choices[rng.integers(len(choices))]

    depth = int(rng.integers(1, 4))
    kinds = [one_of(list(BLOCKS)) for _ in range(depth)]
    norm = float(10.0 ** rng.uniform(-9, 9))
    groups = {f"block{i}": float(norm * 10.0 ** rng.uniform(-2, 2)) for i in range(depth)}
    return Loss(
        tuple(one_of(WRAPPERS)(kind) for kind in kinds),
        tuple(one_of(BETWEEN) for _ in kinds),
        one_of(HEADS),
        one_of(TERMS),
        tuple(BLOCKS[kind] for kind in kinds),
        groups if rng.uniform() < 0.2 else norm,
        {
            "rescale_to_unit_norm": bool(rng.uniform() < 0.3),
            "normalize_by": float(one_of([1.0, 1.0, 3.0, 1e3])),
            "microbatch_size": one_of([None, None, 1, 2]),
        },
        int(one_of([1, 1, 3])),
    )


def hostile(rng: np.random.Generator, shape: tuple[int, ...], mildness: float) -> np.ndarray:
    """Numbers of one array; ordinary ones with the given probability."""
    x = rng.normal(size=shape)
    if rng.uniform() < mildness:
        return (x / math.sqrt(shape[-1]) if len(shape) > 1 else x).astype(np.float32)
    kind = rng.integers(9)
    with np.errstate(over="ignore", under="ignore"):
        match kind:
            case 0:
                x = 0 * x
            case 1:
                x = x * 1e-40
            case 2:
                x = x * 10.0 ** rng.uniform(-30, 30)
            case 3:
                x = x * 10.0 ** rng.uniform(-30, 30, shape)
            case 4 | 5:
                x.flat[rng.integers(x.size)] = np.nan if kind == 4 else np.inf
            case 6:  # each row but for a rounding the negative of the one before
                x = x[..., :1, :] if x.ndim > 1 else x[:1]
                signs = (-1.0) ** np.arange(shape[-2] if len(shape) > 1 else shape[0])
                x = x * (signs[:, None] if len(shape) > 1 else signs)
                x = x * (1 + 1e-7 * rng.normal(size=shape))
            case 7:
                x = np.full(shape, 0.1)
            case _:
                x = x * np.where(rng.uniform(size=shape) < 0.1, 1e18, 1e-18)
        return np.broadcast_to(x, shape).astype(np.float32)


def draw(rng: np.random.Generator, loss: Loss) -> tuple[Model, Example, np.ndarray]:
    """Parameters, a batch, and which slots are padding: all but one."""
    mildness = float(rng.choice([0.0, 0.5, 0.9, 1.0]))
    model = {
        f"block{i}": {name: hostile(rng, SHAPES[name], mildness) for name in names}
        for i, names in enumerate(loss.names)
    }
    real = rng.integers(loss.slots)
    mild = [mildness if slot == real else 0.0 for slot in range(loss.slots)]

    def stacked(*shape: int) -> np.ndarray:
        return np.stack([hostile(rng, shape or (1,), m).reshape(shape) for m in mild])

    tokens = rng.integers(0, ROWS, (loss.slots, T)).astype(np.int32)
    batch = {"x": stacked(T, D), "g": stacked(T, D), "h": stacked(), "tokens": tokens}
    return model, batch, np.arange(loss.slots) != real


def shares(loss: Loss, grads: Model) -> tuple[float, bool]:
    """The exact norm of what was added, by its bound, at most over groups; whether it is zero."""
    options, worst, is_zero = loss.options, 0.0, True
    for name, part in _groups(loss.clip_norm, grads):
        flat = np.concatenate([np.ravel(np.asarray(x, np.float64)) for x in jax.tree.leaves(part)])
        clip_norm = loss.clip_norm if name is None else loss.clip_norm[name]
        bound = (1.0 if options["rescale_to_unit_norm"] else clip_norm) / options["normalize_by"]
        norm = math.sqrt(math.fsum(flat * flat))
        worst = max(worst, norm / bound) if math.isfinite(norm) else math.inf
        is_zero &= not flat.any()
    return worst, is_zero


def _groups(clip_norm: Any, grads: Model) -> Iterator[tuple[str | None, Any]]:
    if isinstance(clip_norm, dict):
        yield from grads.items()
    else:
        yield None, grads


def measure(programs: int, draws: int, seed: int) -> dict[tuple[str, str], list[Any]]:
    """By method and policy, for each draw: its share of the bound, and whether it is zero."""
    found = collections.defaultdict(list)
    for program in range(programs):
        rng = np.random.default_rng((seed, program))
        loss = random_loss(rng)
        drawn = [draw(rng, loss) for _ in range(draws)]
        narrow = "mixed_bfloat16" if program % 2 else "bfloat16"
        for method, policy in itertools.product(METHODS, ("float32", narrow)):
            grad_fn = dp.filter_clipped_grad(
                loss,
                l2_clip_norm=loss.clip_norm,
                policy=dp.load_policy(policy),
                method=method,
                **loss.options,
            )
            run = jax.jit(functools.partial(_called, grad_fn))
            for model, batch, mask in drawn:
                share, is_zero = shares(loss, run(model, batch, mask))
                found[method, policy].append((share, is_zero))
        jax.clear_caches()
    return found


def _called(grad_fn: Any, model: Model, batch: Example, mask: Any) -> Any:
    model = jax.tree.map(jnp.asarray, model)
    return grad_fn(model, batch, is_padding_example=mask)
