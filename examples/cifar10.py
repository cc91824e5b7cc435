"""The recipe for CIFAR-10 from scratch: a wide residual network, large batches, augmentation.

De et al. (Unlocking High-Accuracy Differentially Private Image Classification through Scale, 2022):
WRN-16-4 with group norm and standardised weights, 4,096 examples a step, 16 augmented views of an
image as **one** example (their mean loss is clipped), and a moving average of the parameters. They
report 79.5 % at epsilon 8, delta 1e-5. No accuracy was measured with this script: it needs a GPU.

The folder holds the files of the binary version (`data_batch_1.bin` to `data_batch_5.bin`, and
`test_batch.bin`). Without it made-up images show that everything runs. The plan of memory is
printed first, for shapes alone; `--only-plan` stops there.

    python examples/cifar10.py --data cifar-10-batches-bin --epsilon 8
"""

import argparse
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray, UInt8
from wide_resnet import WideResNet

import eqx_dp as dp

DELTA, CLIP_NORM, PADDING = 1e-5, 1.0, 4
RECORD = 1 + 3 * 32 * 32  # bytes of a label and an image


def normalised(image: UInt8[Array, "3 32 32"]) -> Float[Array, "3 32 32"]:
    """Numbers between -1 and 1."""
    return image / 127.5 - 1.0


def view(image: Float[Array, "3 32 32"], key: PRNGKeyArray) -> Float[Array, "3 32 32"]:
    """One augmented view: mirrored or not, and moved by up to `PADDING` pixels."""
    flip, move = jax.random.split(key)
    image = jnp.where(jax.random.bernoulli(flip), image[:, :, ::-1], image)
    padded = jnp.pad(image, ((0, 0), (PADDING, PADDING), (PADDING, PADDING)), mode="reflect")
    down, right = jax.random.randint(move, (2,), 0, 2 * PADDING + 1)
    return jax.lax.dynamic_slice(padded, (0, down, right), image.shape)


def loss(
    model: WideResNet, image: UInt8[Array, "3 32 32"], label: Int[Array, ""], *, key: PRNGKeyArray
) -> Float[Array, ""]:
    """The cross-entropy of one view of an image; the step takes the mean over several."""
    return -jax.nn.log_softmax(model(view(normalised(image), key)))[label]


def load_images(folder: Path | None, made_up: int) -> list[Any]:
    """Images and labels, private ones and those of the test set; without a folder made-up ones."""
    if folder is None:
        rng = np.random.default_rng(0)
        labels = rng.integers(0, 10, 2 * made_up).astype(np.int32)
        noise = rng.integers(0, 56, (2 * made_up, 3, 32, 32))
        images = (noise + 20 * labels[:, None, None, None]).astype(np.uint8)
        return [images[:made_up], labels[:made_up], images[made_up:], labels[made_up:]]
    found: list[Any] = []
    for names in ([f"data_batch_{i}.bin" for i in range(1, 6)], ["test_batch.bin"]):
        if missing := [name for name in names if not (folder / name).is_file()]:
            raise SystemExit(
                f"{folder} has no {', '.join(missing)}: give the folder of the binary version."
            )
        rows = np.concatenate([np.fromfile(folder / name, np.uint8) for name in names])
        rows = rows.reshape(-1, RECORD)
        found += [rows[:, 1:].reshape(-1, 3, 32, 32), rows[:, 0].astype(np.int32)]
    return found


@eqx.filter_jit
def classified(model: WideResNet, images: UInt8[Array, "n 3 32 32"]) -> Int[Array, " n"]:
    """The class of each image."""
    return jnp.argmax(jax.vmap(lambda image: model(normalised(image)))(images), axis=1)


def parse_arguments(words: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, help="folder of the binary files")
    parser.add_argument("--made-up", type=int, default=256, help="images without a folder")
    parser.add_argument("--epsilon", type=float, default=8.0, help="privacy budget (default 8)")
    parser.add_argument("--batch", type=int, default=4096, help="expected size (default 4,096)")
    parser.add_argument("--steps", type=int, default=2000, help="training steps (default 2,000)")
    parser.add_argument("--views", type=int, default=16, help="of an image (default 16)")
    parser.add_argument("--rate", type=float, default=4.0, help="learning rate (default 4)")
    parser.add_argument("--depth", type=int, default=16, help="of the network (default 16)")
    parser.add_argument("--width", type=int, default=4, help="of the network (default 4)")
    parser.add_argument("--microbatch", type=int, help="images at once (default: by memory)")
    parser.add_argument("--policy", default="float32", help="a preset, or a .toml file")
    parser.add_argument("--only-plan", action="store_true", help="print the plans, and stop")
    parser.add_argument("--out", type=Path, help="the run's folder: checkpoints, privacy.json")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> float | None:
    """Returns accuracy on the test set."""
    arguments: Any = parse_arguments(words)
    images, labels, test, test_labels = load_images(arguments.data, arguments.made_up)
    batch = min(arguments.batch, len(images))
    plan = dp.PrivacyPlan.calibrate(
        epsilon=arguments.epsilon,
        delta=DELTA,
        sampling_prob=batch / len(images),
        steps=arguments.steps,
    )
    optimizer = optax.sgd(arguments.rate)
    step = dp.make_step(
        loss,
        optimizer,
        plan,
        num_examples=len(images),
        l2_clip_norm=CLIP_NORM,
        policy=dp.load_policy(arguments.policy),
        microbatch_size=arguments.microbatch,
        augmentations=arguments.views,
        ema=0.999,
    )
    model = WideResNet(arguments.depth, arguments.width, jax.random.key(0))
    slots = step.sampler().capacity
    shapes = [jax.ShapeDtypeStruct((slots, *x.shape[1:]), x.dtype) for x in (images, labels)]
    memory = dp.plan_memory(step.grad_fn, model, *shapes, key=jax.random.key(0), compiled=False)
    print(f"plan:   {plan}\n{memory}")
    if arguments.only_plan:
        return None
    trained = dp.Trainer(step, (images, labels), directory=arguments.out).run(model)
    classify = eqx.filter_jit(
        lambda model, x: jnp.argmax(jax.vmap(lambda x: model(normalised(x)))(x), 1)
    )
    found = [classify(trained.averaged, test[i : i + 500]) for i in range(0, len(test), 500)]
    accuracy = float(np.mean(np.concatenate(found) == test_labels))
    print(f"accuracy={accuracy:.3f} epsilon={plan.epsilon():.2f} delta={DELTA:g}")
    return accuracy


if __name__ == "__main__":
    main()
