"""Opacus on the rows: twins of the models in PyTorch, with the same weights and the same batch.

A twin registers its parameters in the order of the Equinox model's leaves, so that the two can be
zipped. Nothing but layers that Opacus has a rule for is used.
"""

import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from equinox import nn as eqx_nn

from .contenders import CLIP_NORM, LEARNING_RATE
from .rows import CNN, GPT, Block, Row, classification_loss, language_loss
from .timing import Program

# Read when torch is imported. PyTorch's threads wait for work by spinning; where other threads want
# the cores that makes it several times slower, and it robs whoever is timed next.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

# As many threads as JAX takes; left alone, PyTorch may count fewer cores.
torch.set_num_threads(len(os.sched_getaffinity(0)))
# Integer inputs have no gradient, which is as it should be; and no key is secret here.
warnings.filterwarnings("ignore", "Full backward hook is firing")
warnings.filterwarnings("ignore", "Secure RNG turned off")


MODES = "hooks", "ghost"


def linear(model: eqx_nn.Linear) -> nn.Module:
    return nn.Linear(model.in_features, model.out_features, bias=model.use_bias)


def mlp(model: eqx_nn.MLP) -> nn.Module:
    layers = [layer for each in model.layers for layer in (linear(each), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def cnn(model: CNN) -> nn.Module:
    def convolution(conv: eqx_nn.Conv2d, norm: eqx_nn.GroupNorm) -> list[nn.Module]:
        return [
            nn.Conv2d(conv.in_channels, conv.out_channels, 3, stride=2, padding=1),
            nn.GroupNorm(norm.groups, norm.channels),
            nn.ReLU(),
        ]

    return nn.Sequential(
        *convolution(model.conv1, model.norm1),
        *convolution(model.conv2, model.norm2),
        nn.Flatten(),
        linear(model.dense),
        nn.ReLU(),
        linear(model.head),
    )


class BlockTwin(nn.Module):
    def __init__(self, model: Block) -> None:
        super().__init__()
        width = model.up.in_features
        self.before = nn.LayerNorm(width)
        self.qkv, self.out = linear(model.qkv), linear(model.out)
        self.after = nn.LayerNorm(width)
        self.up, self.down = linear(model.up), linear(model.down)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        qkv = self.qkv(self.before(hidden)).reshape(batch, length, 3, 4, -1)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        mixed = functional.gelu(self.up(self.after(hidden)), approximate="tanh")
        return hidden + self.down(mixed)


class GPTTwin(nn.Module):
    def __init__(self, model: GPT) -> None:
        super().__init__()
        vocabulary, width = model.embedding.weight.shape
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(*model.positions.shape)
        self.blocks = nn.Sequential(*map(BlockTwin, model.blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1]).repeat(len(tokens), 1)
        hidden = self.embedding(tokens) + self.positions(positions)
        return self.head(self.norm(self.blocks(hidden)))


_TWINS: dict[type, Callable[[Any], nn.Module]] = {eqx_nn.MLP: mlp, CNN: cnn, GPT: GPTTwin}


def has_twin(row: Row) -> bool:
    """Whether model and loss can be built in PyTorch; all of the model is trained there."""
    is_plain = row.loss in (classification_loss, language_loss)
    return is_plain and type(row.model) in _TWINS and row.filter_spec is eqx.is_inexact_array


def twin(row: Row) -> nn.Module:
    """The row's model in PyTorch, with its weights."""
    module = _TWINS[type(row.model)](row.model)
    leaves = jax.tree.leaves(eqx.filter(row.model, eqx.is_inexact_array))
    for parameter, leaf in zip(module.parameters(), leaves, strict=True):
        parameter.data.copy_(torch.from_numpy(np.array(leaf)).reshape(parameter.shape))
    return module.train()


def as_tensors(batch: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = (torch.from_numpy(np.array(array)) for array in batch)
    return x, y.long()


def in_parts(
    batch: tuple[torch.Tensor, torch.Tensor], size: int | None
) -> list[tuple[torch.Tensor, ...]]:
    return list(zip(*(array.split(size or len(array)) for array in batch), strict=True))


class Private(NamedTuple):
    """What Opacus's engine makes: a module, an optimizer that clips, and the loss of logits."""

    module: nn.Module
    optimizer: Any
    loss: Callable[[torch.Tensor, torch.Tensor], Any]

    def clipped(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """The backward pass of a part of a batch, up to where the optimizer takes over."""
        self.optimizer.zero_grad()
        self.loss(self.module(inputs), targets).backward()


def made_private(mode: str, row: Row, noise_multiplier: float) -> Private:
    module, (x, y) = twin(row), as_tensors(row.batch)
    criterion = nn.CrossEntropyLoss()
    module, optimizer, *ghost_criterion, _ = PrivacyEngine().make_private(
        module=module,
        optimizer=torch.optim.Adam(module.parameters(), lr=LEARNING_RATE),
        criterion=criterion,
        data_loader=DataLoader(TensorDataset(x, y), batch_size=len(x)),
        noise_multiplier=noise_multiplier,
        max_grad_norm=CLIP_NORM,
        poisson_sampling=False,
        grad_sample_mode=mode,
    )

    def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> Any:
        flat = logits.flatten(0, -2), targets.flatten()
        if not ghost_criterion:
            return criterion(*flat)
        # With ghost clipping the criterion has to know that the unit is a sequence, not a token.
        return ghost_criterion[0](*flat, **({"shape": logits.shape} if logits.ndim == 3 else {}))

    return Private(module, optimizer, loss_of)


def private(mode: str, row: Row, microbatch_size: int | None) -> Program:
    """The clipped sum by Opacus's engine, up to where it would add noise.

    Parts of a batch are added up in the way of its `BatchMemoryManager`: the optimizer is told
    to skip the step, clips, and keeps the sum.
    """
    made = made_private(mode, row, 0.0)
    optimizer, parts = made.optimizer, in_parts(as_tensors(row.batch), microbatch_size)

    def run() -> list[torch.Tensor]:
        for parameter in optimizer.params:
            parameter.summed_grad = None
        for part in parts:
            made.clipped(*part)
            optimizer.signal_skip_step()
            optimizer.pre_step()
        return [parameter.summed_grad for parameter in optimizer.params]

    return Program(run, _as_arrays)


def step(
    mode: str,
    row: Row,
    batches: list[tuple[np.ndarray, np.ndarray]],
    noise_multiplier: float,
    microbatch_size: int | None,
) -> Program:
    """A whole step on one batch after the other: clipped sum, noise, Adam.

    Batches hold real examples alone: shapes may change from step to step here. The row's own batch
    says how many are expected.
    """
    made = made_private(mode, row, noise_multiplier)
    coming = itertools.cycle([in_parts(as_tensors(batch), microbatch_size) for batch in batches])

    def run() -> list[torch.Tensor]:
        parts = next(coming)
        for number, part in enumerate(parts, 1):
            made.clipped(*part)
            made.optimizer.signal_skip_step(do_skip=number < len(parts))
            made.optimizer.step()
        return [parameter.detach() for parameter in made.optimizer.params]

    return Program(run, _as_arrays)


def _as_arrays(grads: list[torch.Tensor]) -> list[np.ndarray]:
    return [grad.numpy() for grad in grads]
