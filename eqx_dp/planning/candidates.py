"""Which methods and microbatches are worth a try, and what the outcome depends on."""

import hashlib
import importlib.metadata
import itertools
import os
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from ..gradients import METHODS, ClippedGrad, Prepared
from ..precision import agreed_policy
from ..shown import shown

Candidate = tuple[str, int]
"""A method, and how many examples at once on a device."""

# Microbatches to try lie this far apart: time changes slowly with them, and each is compiled.
_FAR = 4


def candidates(
    grad_fn: ClippedGrad[Any],
    call: Prepared,
    methods: Iterable[str] | None,
    sizes: Iterable[int] | None,
) -> list[Candidate]:
    """What to try, the function's own choice first.

    What the function was made with stays as it is: a method that is not "auto", a microbatch that
    is a number.

    Raises:
        ValueError: there are no examples, no methods or no sizes, or one of them is unknown.
    """
    if call.of_device == 0:
        raise ValueError(
            "There are no examples in the batch, so that there is nothing to time. Give a batch."
        )
    method, size = grad_fn.asked_for
    own = call.choice.method, call.at_once
    if methods is None:
        methods = METHODS if method == "auto" else (method,)
    if sizes is None:
        sizes = sizes_around(call.at_once, call.of_device) if size is None else (size,)
    if isinstance(methods, str):
        raise ValueError(f"methods must be a tuple of methods, found {shown(methods)}.")
    tried = [
        (found.asked_for[0], min(found.asked_for[1] or call.of_device, call.of_device))
        for found in itertools.starmap(grad_fn.with_choice, itertools.product(methods, sizes))
    ]
    if not tried or any(name == "auto" for name, _ in tried):
        raise ValueError(
            f"methods must name at least one of {', '.join(METHODS)}, and microbatch_sizes at "
            "least one number, to be tried."
        )
    return list(dict.fromkeys([own, *tried]))


def sizes_around(own: int, slots: int) -> list[int]:
    """Microbatches to try: the engine's own, fewer and more by factors of four, and all slots."""
    fewer = (_FAR, _FAR**2) if own == slots else (_FAR,)
    powers = [2 ** int(np.log2(x)) for x in (*(own / far for far in fewer), own * _FAR) if x >= 1]
    return list(dict.fromkeys([own, *(x for x in powers if x <= slots), slots]))


def measured_for(
    grad_fn: ClippedGrad[Any],
    call: Prepared,
    model: PyTree[Any],
    batch: tuple[PyTree[Any], ...],
    has_mask: bool,
    tried: list[Candidate],
) -> tuple[tuple[str, str], ...]:
    """What a choice depends on, by name: shapes, the program, the machine. No value of an array."""
    sample, rules = call.choice.batch.sample, grad_fn.sharding
    devices = jax.local_devices() if rules is None else list(rules.mesh.devices.flat)
    cores = f" of {os.cpu_count()} cores" if devices[0].platform == "cpu" else ""
    return (
        ("loss", _digest(call.costs, call.activations, call.choice.work.gradient)),
        ("model", _digest(*itertools.starmap(_told, jax.tree_util.tree_leaves_with_path(model)))),
        ("batch", ", ".join(_told((), x) for x in jax.tree.leaves(batch))),
        (
            "padding",
            f"{sample.num_examples} examples sampled with {sample.sampling_prob:g}"
            if sample
            else "a mask"
            if has_mask
            else "none",
        ),
        ("policy", str(agreed_policy(model, grad_fn.policy))),
        ("sharding", str(rules)),
        ("tried", ", ".join(f"{method} {size}" for method, size in tried)),
        ("devices", f"{1 if rules is None else len(devices)} {devices[0].device_kind}{cores}"),
        ("versions", f"eqx_dp {importlib.metadata.version('eqx-dp')}, jax {jax.__version__}"),
    )


def _digest(*parts: Any) -> str:
    return hashlib.sha256("\n".join(map(str, parts)).encode()).hexdigest()[:32]


def _told(path: Any, leaf: Any) -> str:
    if not hasattr(leaf, "dtype"):
        return f"{jax.tree_util.keystr(path)}{type(leaf).__name__}"
    is_number = isinstance(leaf.dtype, np.dtype)  # and no key
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype) if is_number else leaf.dtype
    return f"{jax.tree_util.keystr(path)}{dtype}{list(leaf.shape)}"
