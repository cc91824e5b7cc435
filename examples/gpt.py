"""Trains a character GPT on Python's standard library with differential privacy.

The text is what every Python installation carries: the documentation topics behind `help()` and
the library's sources. **One example, the unit of privacy, is a window of 32 characters**; windows
do not overlap. Every sixteenth topic and file is held out whole and taken to be public: the loss on
it is shown while training runs, at no cost in privacy.

Training is spread over eight devices (virtual ones where there are no eight accelerators), examples
over the mesh's axis `data` and the blocks' weights over `model`. It is checkpointed in
`out/gpt`: a run that was interrupted goes on, with fresh noise, when it is started again. At the
end the model writes some text, and the validation loss is drawn against epsilon.

    python examples/gpt.py
    python examples/gpt.py --non-private    # its twin: the same without clipping and noise
"""

import argparse
import json
import math
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8
from matplotlib import pyplot as plt

import eqx_dp as dp

DEVICES = 8
VOCABULARY = 128  # ASCII; a window begins after character 0
DELTA = 1e-6
CLIP_NORM = 0.5
HEADS = 4
HELD_OUT = 16  # one topic and file of so many
EVALUATED = 1024  # windows of held-out text

# Modules and packages of the standard library, of all versions of Python since 3.11.
MODULES = """
    _collections_abc _pydecimal _pyio _strptime argparse ast asyncio base64 bdb calendar cmd codecs
    collections compileall concurrent configparser contextlib copy csv ctypes dataclasses datetime
    _pydatetime difflib dis doctest email enum filecmp fileinput fractions ftplib functools gettext
    glob graphlib gzip hashlib heapq html http imaplib importlib inspect ipaddress json locale
    logging mailbox mimetypes modulefinder multiprocessing ntpath numbers operator optparse os
    pathlib pdb pickle pickletools pkgutil platform plistlib poplib posixpath pprint profile pstats
    pyclbr pydoc queue random re runpy sched selectors shelve shlex shutil site smtplib socket
    socketserver ssl statistics string subprocess symtable sysconfig tarfile tempfile textwrap
    threading timeit tokenize tomllib trace traceback tracemalloc types typing unittest urllib uuid
    warnings wave weakref webbrowser wsgiref xml xmlrpc zipfile zipimport zoneinfo
"""


# Text.


def documents_of_topics() -> list[str]:
    return [topics[name] for name in sorted(topics)]


def documents_of_sources() -> list[str]:
    library = Path(os.__file__).parent
    found: list[Path] = []
    for name in MODULES.split():
        files = [library / f"{name}.py", *sorted((library / name).rglob("*.py"))]
        found += [file for file in files if file.exists() and "test" not in file.parent.parts[-2:]]
    return [file.read_text("utf-8", errors="replace") for file in found]


def encoded(text: str) -> UInt8[np.ndarray, " characters"]:
    """Characters as numbers; four spaces are one, a tab."""
    packed = re.sub(" {4}", "\t", text).encode("ascii", errors="replace")
    return np.frombuffer(packed, np.uint8)


def decoded(characters: Int[np.ndarray, " characters"]) -> str:
    return bytes(characters.tolist()).decode("ascii").expandtabs(4)


def windows(documents: list[str], length: int) -> UInt8[np.ndarray, "windows length"]:
    """Documents end to end, cut into examples."""
    text = encoded("\n".join(documents))
    count = len(text) // length
    return text[: count * length].reshape(count, length)


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """Private documents, and held-out ones."""
    private = [text for i, text in enumerate(documents) if i % HELD_OUT != HELD_OUT - 1]
    return private, documents[HELD_OUT - 1 :: HELD_OUT]


def spread(data: UInt8[np.ndarray, "n length"], count: int) -> UInt8[np.ndarray, "m length"]:
    """At most so many of the windows, from all over them, and as many for every device."""
    count = min(count, len(data)) // DEVICES * DEVICES
    return data[:: len(data) // count][:count]


def unigram_entropy(data: UInt8[np.ndarray, "windows length"]) -> float:
    """Nats a character, for who knows nothing but how frequent each one is."""
    shares = np.bincount(np.ravel(data), minlength=VOCABULARY) / data.size
    return float(-np.sum(shares * np.log(np.maximum(shares, 1e-30))))


# Model.


class Block(eqx.Module):
    """Causal attention and an MLP."""

    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attend: eqx.nn.Linear
    merge: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, width: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attend = eqx.nn.Linear(width, 3 * width, use_bias=False, key=keys[0])
        self.merge = eqx.nn.Linear(width, width, use_bias=False, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, use_bias=False, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, use_bias=False, key=keys[3])

    def __call__(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        x = x + self.attention(jax.vmap(self.norm1)(x))
        hidden = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(hidden)

    def attention(self, x: Float[Array, "time width"]) -> Float[Array, "time width"]:
        time, width = x.shape
        # Heads in front, so that weights that are spread over devices are spread by heads.
        parts = jax.vmap(self.attend)(x).reshape(time, HEADS, 3, width // HEADS)
        query, key, value = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
        scores = jnp.einsum("qhs,khs->hqk", query, key) / math.sqrt(width // HEADS)
        is_past = jnp.tril(jnp.ones((time, time), bool))
        weights = jax.nn.softmax(jnp.where(is_past, scores, -jnp.inf))
        mixed = jnp.einsum("hqk,khs->qhs", weights, value)
        return jax.vmap(self.merge)(mixed.reshape(time, width))


class GPT(eqx.Module):
    """A decoder-only transformer on one window of text."""

    embedding: Float[Array, "vocabulary width"]
    position: Float[Array, "length width"]
    blocks: Block  # all of them: every array has the blocks along its leading axis
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, length: int, width: int, depth: int, key: PRNGKeyArray):
        keys = jax.random.split(key, 4)
        self.embedding = 0.1 * jax.random.normal(keys[0], (VOCABULARY, width))
        self.position = 0.1 * jax.random.normal(keys[1], (length, width))
        self.blocks = eqx.filter_vmap(lambda key: Block(width, key))(
            jax.random.split(keys[2], depth)
        )
        self.norm = eqx.nn.LayerNorm(width)
        self.head = eqx.nn.Linear(width, VOCABULARY, use_bias=False, key=keys[3])

    def __call__(self, text: Int[Array, " length"]) -> Float[Array, "length vocabulary"]:
        """Logits of every character, given those before it."""
        before = jnp.concatenate([jnp.zeros(1, text.dtype), text[:-1]])
        x = self.embedding[before] + self.position
        arrays, static = eqx.partition(self.blocks, eqx.is_array)

        def through(x: Float[Array, "time width"], arrays: Block) -> tuple[Array, None]:
            return eqx.combine(arrays, static)(x), None

        x, _ = jax.lax.scan(through, x, arrays)
        return jax.vmap(self.head)(jax.vmap(self.norm)(x))


def loss(model: Callable[[Array], Array], text: Int[Array, " length"]) -> Float[Array, ""]:
    """Cross-entropy of one window: nats a character."""
    text = text.astype(jnp.int32)
    logits = model(text)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, text))


# Training.


def make_rules() -> dp.ShardingRules:
    devices = jax.devices() if len(jax.devices()) >= DEVICES else jax.devices("cpu")
    mesh = jax.make_mesh(
        (DEVICES // 2, 2), ("data", "model"), (AxisType.Auto,) * 2, devices=devices[:DEVICES]
    )
    params = (
        ("blocks.attend.weight", P(None, "model")),
        ("blocks.merge.weight", P(None, None, "model")),
        ("blocks.up.weight", P(None, "model")),
        ("blocks.down.weight", P(None, None, "model")),
    )
    return dp.ShardingRules(mesh, examples=("data",), params=params, accumulators="examples")


def make_plan(arguments: Any, num_examples: int) -> dp.PrivacyPlan:
    sampling_prob = arguments.batch / num_examples
    if arguments.non_private:
        return dp.PrivacyPlan(sampling_prob, arguments.steps, noise_multiplier=0.0, delta=DELTA)
    return dp.PrivacyPlan.calibrate(
        epsilon=arguments.epsilon, delta=DELTA, sampling_prob=sampling_prob, steps=arguments.steps
    )


def make_optimizer(rate: float, steps: int) -> optax.GradientTransformation:
    return optax.adam(
        optax.warmup_cosine_decay_schedule(0.0, rate, max(1, steps // 10), steps, 0.05 * rate)
    )


def make_step(
    plan: dp.PrivacyPlan, policy: dp.Policy, num_examples: int, rate: float
) -> dp.Step[GPT]:
    is_private = plan.noise_multiplier > 0
    return dp.make_step(
        loss,
        make_optimizer(rate, plan.steps),
        plan,
        num_examples=num_examples,
        l2_clip_norm=CLIP_NORM if is_private else math.inf,
        policy=policy,
        sharding=make_rules(),
        method="per_example",  # the fastest where windows are short and weights are small
        microbatch_size=16,
    )


def make_evaluation(
    step: dp.Step[GPT], held_out: UInt8[np.ndarray, "n length"]
) -> Callable[[GPT], dict[str, Array]]:
    """Measures the loss on held-out windows; like batches, they are spread over the devices."""
    data, policy = step.shard_batch(held_out), step.grad_fn.policy

    @eqx.filter_jit
    def mean_loss(model: GPT, data: UInt8[Array, "n length"]) -> Float[Array, ""]:
        model = model if policy is None else policy.cast_to_compute(model)
        return jnp.mean(jax.vmap(loss, (None, 0))(model, data), dtype=jnp.float32)

    return lambda model: {"validation_loss": mean_loss(model, data)}


def on_one_device(model: GPT) -> GPT:
    arrays, static = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, jax.devices()[0]), static)


@eqx.filter_jit
def write(
    model: GPT, prompt: Int[Array, " length"], start: int, temperature: float, key: PRNGKeyArray
) -> Int[Array, " length"]:
    """Draws the characters from `start` on, each given all before it."""

    def draw(text: Int[Array, " length"], place: Array) -> tuple[Array, None]:
        logits = model(text)[place] / temperature
        # The newest character goes where it is due; before `start` the prompt stays.
        drawn = jax.random.categorical(jax.random.fold_in(key, place), logits)
        return text.at[place].set(jnp.where(place < start, text[place], drawn)), None

    return jax.lax.scan(draw, prompt, jnp.arange(len(prompt)))[0]


def written(model: GPT, prompt: str, key: PRNGKeyArray, temperature: float = 0.7) -> str:
    """A prompt and what the model makes of it; its last half window is the next one's beginning."""
    length = len(model.position)
    text, found = encoded(prompt)[: length // 2], ""
    for window_key in jax.random.split(key, 6):
        window = jnp.zeros(length, jnp.int32).at[: len(text)].set(text)
        window = np.asarray(write(model, window, len(text), temperature, window_key))
        found, text = found + decoded(window[: length // 2]), window[length // 2 :]
    return found


# Figures.


def read_metrics(directory: Path) -> list[dict[str, Any]]:
    file = directory / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def plot(out: Path, entropy: float) -> Path:
    """Draws validation loss against epsilon, beside what is known of the twin."""
    matplotlib.use("agg")
    figure, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    private, twin = read_metrics(out / "gpt"), read_metrics(out / "gpt-non-private")
    if private:
        points = [(line["epsilon"], line["validation_loss"]) for line in private]
        axes.plot(*zip(*points, strict=True), marker="o", label="private")
    if twin:
        axes.axhline(twin[-1]["validation_loss"], color="C1", label="non-private, at its end")
    axes.axhline(entropy, color="grey", linestyle=":", label="unigram entropy")
    axes.set(
        xlabel=f"epsilon (delta = {DELTA:g})",
        ylabel="validation loss, nats a character",
        title="A character GPT on Python's standard library",
    )
    axes.grid(alpha=0.3)
    axes.legend()
    picture = out / "gpt.png"
    figure.savefig(picture, dpi=150)
    plt.close(figure)
    return picture


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--non-private", action="store_true", help="no clipping, no noise")
    parser.add_argument("--epsilon", type=float, default=8.0, help="privacy budget (default 8)")
    parser.add_argument("--steps", type=int, default=300, help="training steps (default 300)")
    parser.add_argument("--batch", type=int, default=768, help="expected size (default 768)")
    parser.add_argument("--rate", type=float, default=6e-3, help="learning rate (default 0.006)")
    parser.add_argument("--width", type=int, default=48, help="of the model (default 48)")
    parser.add_argument("--depth", type=int, default=2, help="blocks (default 2)")
    parser.add_argument("--length", type=int, default=32, help="of a window (default 32)")
    parser.add_argument("--policy", default="mixed_bfloat16", help="a preset, or a .toml file")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder (default out)")
    return parser.parse_args(words)


def main(words: list[str] | None = None, callbacks: Sequence[Any] = ()) -> dp.TrainState[GPT]:
    arguments: Any = parse_arguments(words)
    documents = documents_of_topics() + documents_of_sources()
    private, held_out = (windows(part, arguments.length) for part in split(documents))
    held_out = spread(held_out, EVALUATED)
    policy, plan = dp.load_policy(arguments.policy), make_plan(arguments, len(private))
    print(f"policy: {policy}\nplan:   {plan}\n{len(private)} windows of {arguments.length}")

    model_key, text_key = jax.random.split(jax.random.key(0))  # of the first model and the text
    directory = arguments.out / ("gpt-non-private" if arguments.non_private else "gpt")
    step = make_step(plan, policy, len(private), arguments.rate)
    trainer = dp.Trainer(
        step,
        private,
        directory=directory,
        save_every=50,
        evaluate=make_evaluation(step, held_out),
        callbacks=callbacks,
    )
    state = trainer.run(GPT(arguments.length, arguments.width, arguments.depth, model_key))

    print(f"\n{written(on_one_device(state.model), 'def ', text_key)}\n")
    entropy = unigram_entropy(held_out)
    print(f"picture: {plot(arguments.out, entropy)}")
    measured = read_metrics(directory)[-1]
    print(
        f"validation_loss={measured['validation_loss']:.3f} unigram_entropy={entropy:.3f} "
        f"epsilon={plan.epsilon():.2f} delta={plan.delta:g}"
    )
    return state


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", DEVICES)  # before JAX starts its devices
    main()
