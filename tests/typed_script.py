"""Private training of a small network as a user writes it who runs strict type checkers."""
# pyright: strict
# pyright: reportUnknownMemberType=false
# (eqx.apply_updates is partly unknown in Equinox' own annotations)

import sys
from collections.abc import Mapping
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
PLAN = dp.PrivacyPlan(0.1, 3, 1.0, 1e-5)


class Classifier(eqx.Module):
    """A linear layer behind dropout."""

    dropout: eqx.nn.Dropout
    head: eqx.nn.Linear

    def __call__(
        self, x: Float[Array, " features"], key: PRNGKeyArray | None = None
    ) -> Float[Array, " classes"]:
        logits: Array = self.head(self.dropout(x, key=key, inference=key is None))
        return logits


def loss(
    model: Classifier, x: Float[Array, " features"], y: Int[Array, ""], *, key: PRNGKeyArray
) -> Float[Array, ""]:
    found: Array = optax.softmax_cross_entropy_with_integer_labels(model(x, key), y)
    return found


def by_the_parts(model: Classifier, xs: Rows, ys: Labels, secret: int) -> Classifier:
    policy = dp.load_policy("mixed_bfloat16")
    grad_fn = dp.filter_clipped_grad(loss, l2_clip_norm=1.0, policy=policy, normalize_by=20.0)
    optimizer = optax.chain(PLAN.privatizer(grad_fn, key=secret), optax.adamw(1e-2))
    sampler = PLAN.sampler(len(xs), seed=secret)

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
    for t in range(PLAN.steps):
        (x, y), mask = sampler.take(t, xs, ys)
        model, state = step(model, state, jax.random.key(t), x, y, mask)
    return model


def by_the_trainer(model: Classifier, xs: Rows, ys: Labels, directory: Path) -> Classifier:
    step = dp.make_step(
        loss, optax.adam(1e-2), PLAN, num_examples=len(xs), l2_clip_norm=1.0, ema=0.9
    )

    def evaluate(model: Classifier) -> Mapping[str, float]:
        return {"largest": float(jnp.max(jax.vmap(model)(jnp.asarray(xs))))}

    def is_late(event: dp.Trainer.Event) -> bool:
        return event.seconds > 600.0

    trainer = dp.Trainer(
        step, (xs, ys), directory=directory, evaluate=evaluate, callbacks=[is_late]
    )
    state = trainer.run(model)
    assert_type(state.model, Classifier)
    assert_type(dp.load_model(directory, like=model), Classifier)
    return state.averaged


def main(directory: Path) -> None:
    xs = np.random.default_rng(0).normal(size=(200, 8)).astype(np.float32)
    ys = np.argmax(xs[:, :3], axis=1)
    head = eqx.nn.Linear(8, 3, key=jax.random.key(0))
    model = by_the_parts(Classifier(eqx.nn.Dropout(0.1), head), xs, ys, secret=7)
    print(by_the_trainer(model, xs, ys, directory / "run"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
