"""What a narrower policy costs each layer, in error of the clipped gradient of public data."""

import os
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax
import jax.core
import numpy as np

from ..expected import entries, expect, real_number
from ..gradients import ClippedGrad, checked_grad_fn, described
from ..precision import Policy, apply_policy, load_policy, refusal, refusals_name
from ..shown import shown
from ..trees import PyTree
from .clipped_errors import ClippedErrors
from .layers import layers_of
from .progress import told_on_terminal
from .recommended import recommended
from .sensitivity_table import PrecisionSensitivity
from .step import on_mesh

_PUBLIC = (
    "precision_sensitivity is for public data: what it returns shows something of every example, "
    "and no noise covers that"
)


def precision_sensitivity(
    grad_fn: ClippedGrad[Any],
    model: PyTree[Any],
    *public_batch: PyTree[Any],
    key: Any = None,
    policies: Iterable[str | os.PathLike[str] | Policy] = ("mixed_bfloat16", "mixed_float8"),
    modules: Iterable[str] | None = None,
    tolerance: float = 0.05,
    progress: bool = False,
    is_padding_example: None = None,
) -> PrecisionSensitivity:
    """Measures what a narrower policy costs, layer by layer, and recommends a policy.

    ```python
    found = dp.precision_sensitivity(grad_fn, model, public_xs, public_ys)
    print(found)  # a table, and a policy as TOML text
    ```

    **Public data only.** The result depends on every value of the batch, without noise: it is not
    private. So there is no mask of examples that a plan sampled, and one that is given is refused.

    The clipped sum of the batch is computed once in float64 if `jax_enable_x64` is on, else in
    float32 (the table says which): the reference. It is then computed again with one layer after
    the other by a narrower policy, all else as in the reference. An error is the L2 norm of the
    difference from the reference, divided by that of the reference.

    | layer | consists of |
    |---|---|
    | a module with trained leaves, as far in as there are at most 16; or each that is named | its \
calls, without those of layers in it |
    | `(rest)` | all else: leaves that the model holds itself, the loss, code between layers, \
modules without trained leaves that are not named |

    A policy of the table gives a layer its compute dtype and its `[matmul]`. How parameters are
    stored is no part of a gradient: the model is taken as it is.

    The recommended policy begins with the narrowest policy everywhere. As long as the errors of
    single layers, added as if they were independent, are above the tolerance, the layer that costs
    most goes to the next wider policy, in the end to float32. Then the error of that policy as a
    whole is measured; where it is above the tolerance, more layers go. If that does not help, the
    next wider policy is the beginning. What is measured of it is in the table: `error`.

    It compiles a program for each layer and policy, one or two more for each policy, and a few for
    what is recommended: about 40 for a model of 16 layers. The same call gives the same result.

    | case | what happens |
    |---|---|
    | an example's gradient is finite in the reference, not by a policy | it adds zero: an error |
    | a layer has no trained leaves, or its gradient is zero | NaN as error of its own part |
    | products of the loss itself, outside of all modules | no rule can keep them wide: see below |
    | no policy and not float32 is within the tolerance | `recommended` is None |
    | the compiler keeps digits between two operations | a larger program may round otherwise |

    The rest is often the loss: a softmax in bfloat16 loses the gradient of an example that the
    model is sure of. `logits.astype(jnp.float32)` in the loss keeps it, by every policy.

    Products outside of modules are narrow wherever a policy has `[matmul]`. Their error is measured
    apart, is not counted for a layer, and remains in `(rest)` whatever is kept wide.

    Args:
        grad_fn: what `filter_clipped_grad` returned; its policy plays no part.
        model: the model, its parameters public or released.
        *public_batch: as for `grad_fn`: **public** examples.
        key: as for `grad_fn`; the same in all runs.
        policies: the narrower policies: names, paths of files, or policies, without module rules.
        modules: patterns of paths or names of classes, as in module rules: the layers, in place of
            those that are found. One may be in another. Name the layer where a weight is a module
            of its own (a weight norm of flowjax), whose calls multiply nothing.
        tolerance: the largest error that the recommended policy may have; public.
        progress: whether to show on a terminal what is being done.
        is_padding_example: refused.

    Returns:
        A [`PrecisionSensitivity`][]: a table for `str()`, `recommended`, `to_toml()`.

    Raises:
        ValueError: a mask is given; there are no examples, no policies, or none of a policy's
            dtypes is narrower than the reference; a policy is `unsafe`, has module rules (which
            those of the result would replace), or is there twice; a pattern matches no module; the
            gradient of the batch is zero; it is called while a program is traced, on shapes, or on
            several hosts; and as for `grad_fn`.
    """
    checked_grad_fn(grad_fn)
    if is_padding_example is not None:
        raise ValueError(
            f"is_padding_example must be left out; found {shown(is_padding_example)}. {_PUBLIC}. "
            "A mask marks the slots of a private sample. Give public examples alone."
        )
    tolerance = real_number(
        "tolerance", tolerance, lambda real: 0 < real < 1, "greater than 0 and less than 1"
    )
    wide = np.dtype(np.float64 if jax.config.read("jax_enable_x64") else np.float32)
    candidates = _candidates(policies, wide)
    patterns = None if modules is None else _patterns(modules)
    _check_place((model, public_batch, key))
    if isinstance(model, eqx.Module):
        model = apply_policy(model, None)
    with on_mesh(grad_fn.sharding), told_on_terminal("precision", progress) as tell:
        errors = ClippedErrors(grad_fn, (model, public_batch, key), wide, tell)
        call = described(grad_fn.with_policy(errors.exact), model, public_batch, key)
        if call.examples.num_examples == 0:
            raise refusal("public_batch", "no examples", "at least one public example")
        layers = layers_of(model, grad_fn.trainable(model), patterns)
        costs = [errors.of(label, policy, layers) for label, policy in candidates.items()]
        policy, error, levels = recommended(costs, layers, tolerance, errors.error)
    return PrecisionSensitivity(
        tuple(row for cost in costs for row in cost.rows),
        tuple((cost.label, cost.error) for cost in costs),
        tuple((layer.path, level) for layer, level in zip(layers, levels, strict=True)),
        policy,
        error,
        tolerance,
        str(wide),
        call.examples.num_examples,
    )


def _candidates(policies: object, wide: np.dtype[Any]) -> dict[str, Policy]:
    """The narrower policies, by what the table calls them."""
    of = "names, paths or policies, such as ('mixed_bfloat16', 'mixed_float8')"
    if isinstance(policies, str | os.PathLike | Policy):
        raise ValueError(f"policies must be a tuple of {of}; found {shown(policies)}.")
    found: dict[str, Policy] = {}
    for index, given in enumerate(entries("policies", policies, of)):
        at = f"policies[{index}]"
        expect(at, given, (str, os.PathLike, Policy), "a name, a path or a dp.Policy")
        if isinstance(given, Policy):
            policy = given
        else:
            with refusals_name(at):
                policy = load_policy(given)
        label = policy.name or at
        _check_candidate(at, policy, wide)
        if label in found or policy in found.values():
            raise refusal(at, f"{label!r} again", "each policy once")
        found[label] = policy
    if not found:
        raise refusal("policies", "none", of)
    return found


def _check_candidate(at: str, policy: Policy, wide: np.dtype[Any]) -> None:
    if policy.unsafe:
        raise refusal(at, "unsafe = true", "policies that keep the privacy guarantee")
    if policy.modules:
        rules = ", ".join(repr(rule.match) for rule in policy.modules)
        raise refusal(
            f"{at}.modules",
            f"rules for {rules}, which the result would replace by its own",
            "policies without module rules; modules=(...) says which modules are measured",
        )
    if policy.matmul is None and policy.compute_dtype.itemsize >= wide.itemsize:
        raise refusal(
            f"{at}.dtypes.compute",
            f"{policy.compute_dtype} and no [matmul], not narrower than the reference ({wide})",
            "a narrower compute dtype, or a [matmul] table",
        )


def _patterns(modules: object) -> tuple[str, ...]:
    of = "patterns, such as ('**.head',)"
    if isinstance(modules, str):
        raise ValueError(f"modules must be a tuple of {of}; found {shown(modules)}.")
    found = entries("modules", modules, of)
    if not found:
        raise refusal("modules", "none", f"{of}; None for the layers that are found")
    with refusals_name("modules"):
        for pattern in found:
            expect("a pattern", pattern, str, "a text: a path pattern or a class name")
    return found


def _check_place(given: Any) -> None:
    leaves = jax.tree.leaves(given)
    if any(isinstance(x, jax.core.Tracer) for x in leaves):
        raise ValueError(
            "precision_sensitivity runs programs, and was called while one is traced: call it "
            "outside."
        )
    if any(isinstance(x, jax.ShapeDtypeStruct) for x in leaves):
        raise ValueError(
            "model and public_batch must hold arrays, as the error is measured; found shapes of "
            "arrays (jax.ShapeDtypeStruct)."
        )
    if jax.process_count() > 1:
        raise ValueError(
            f"There are {jax.process_count()} processes: measure in one of them, and load the "
            "policy that it recommends on all."
        )
