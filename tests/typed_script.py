"""Private training of a small network as a user writes it who runs strict type checkers."""
# pyright: strict
# pyright: reportUnknownMemberType=false
# (eqx.apply_updates and jnp.argmax are partly unknown in Equinox' and JAX' own annotations)

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import assert_type, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax  # type: ignore[import-untyped]
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import eqx_dp as dp

Rows = Float[np.ndarray, "batch features"]
Labels = Int[np.ndarray, " batch"]
Mask = Bool[np.ndarray, " batch"]


class Classifier(eqx.Module):
    """Two layers with dropout between them."""

    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __init__(self, width: int, *, key: PRNGKeyArray) -> None:
        first, second = jax.random.split(key)
        self.hidden = eqx.nn.Linear(8, width, key=first)
        self.dropout = eqx.nn.Dropout(0.1)
        self.head = eqx.nn.Linear(width, 3, key=second)

    def __call__(
        self, x: Float[Array, " features"], key: PRNGKeyArray | None = None
    ) -> Float[Array, " classes"]:
        hidden = jax.nn.relu(self.hidden(x))
        logits: Array = self.head(self.dropout(hidden, key=key, inference=key is None))
        return logits


def loss(
    model: Classifier, x: Float[Array, " features"], y: Int[Array, ""], *, key: PRNGKeyArray
) -> Float[Array, ""]:
    found: Array = optax.softmax_cross_entropy_with_integer_labels(model(x, key), y)
    return found


def loss_and_hit(
    model: Classifier, x: Float[Array, " features"], y: Int[Array, ""]
) -> tuple[Float[Array, ""], Bool[Array, ""]]:
    logits = model(x)
    found: Array = optax.softmax_cross_entropy_with_integer_labels(logits, y)
    return found, jnp.argmax(logits) == y


def data(num_examples: int) -> tuple[Rows, Labels]:
    xs = np.random.default_rng(0).normal(size=(num_examples, 8)).astype(np.float32)
    return xs, np.argmax(xs[:, :3], axis=1)


def accuracy(model: Classifier, xs: Rows, ys: Labels) -> float:
    logits = jax.vmap(model)(jax.device_put(xs))
    return float(jnp.mean(jnp.argmax(logits, -1) == ys))


def by_the_parts(model: Classifier, xs: Rows, ys: Labels, secret: int) -> Classifier:
    policy = dp.load_policy("mixed_bfloat16")
    plan = dp.PrivacyPlan.calibrate(epsilon=8.0, delta=1e-5, sampling_prob=0.1, steps=3)
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, policy=policy, normalize_by=20.0)
    optimizer = optax.chain(plan.privatizer(grad_fn, key=secret), optax.adamw(1e-2))
    sampler = plan.sampler(len(xs), seed=secret)

    @eqx.filter_jit
    def step(
        model: Classifier, state: optax.OptState, key: PRNGKeyArray, x: Rows, y: Labels, mask: Mask
    ) -> tuple[Classifier, optax.OptState]:
        grads = grad_fn(model, x, y, key=key, is_padding_example=mask)
        of_model: Classifier = grads  # the model's type, where it is wanted
        assert_type(of_model.head.weight, Array)
        updates, state = optimizer.update(grads, state, grad_fn.trainable(model))
        return cast(Classifier, eqx.apply_updates(model, updates)), state

    state = optimizer.init(grad_fn.trainable(model))
    for t in range(plan.steps):
        (x, y), mask = sampler.take(t, xs, ys)
        model, state = step(model, state, jax.random.key(t), x, y, mask)
    print(f"epsilon {plan.epsilon():.2f}")
    return model


def by_the_trainer(
    model: Classifier, xs: Rows, ys: Labels, secret: int, directory: Path
) -> Classifier:
    plan = dp.PrivacyPlan(0.1, 3, 1.0, 1e-5)
    step = dp.make_step(
        loss,
        optax.adam(1e-2),
        plan,
        num_examples=len(xs),
        seed=secret,
        l2_clip_norm=1.0,
        method="book_keeping",
        ema=0.9,
    )

    def evaluate(model: Classifier) -> Mapping[str, float]:
        return {"accuracy": accuracy(model, xs, ys)}

    def is_late(event: dp.Trainer.Event) -> bool:
        return event.seconds > 600.0

    trainer = dp.Trainer(
        step, (xs, ys), directory=directory, evaluate=evaluate, callbacks=[is_late]
    )
    state = trainer.run(model)
    assert_type(state.model, Classifier)
    assert_type(dp.load_model(directory, like=model), Classifier)
    return state.averaged


def losses(model: Classifier, xs: Rows, ys: Labels) -> Iterator[float]:
    grad_fn = dp.filter_value_and_clipped_grad(loss_and_hit, has_aux=True, l2_clip_norm=1.0)
    print(dp.explain(grad_fn, model, xs, ys))
    per_example, _ = grad_fn(model, xs, ys)
    yield from map(float, per_example.loss)


def main(directory: Path) -> None:
    model, (xs, ys) = Classifier(16, key=jax.random.key(0)), data(200)
    secret = 7
    print(accuracy(by_the_parts(model, xs, ys, secret), xs, ys))
    print(accuracy(by_the_trainer(model, xs, ys, secret, directory / "run"), xs, ys))
    print(sum(losses(model, xs, ys)))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
