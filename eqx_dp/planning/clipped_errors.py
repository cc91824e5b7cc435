"""Errors of a clipped sum, by policy, against the same sum in a wide policy."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from jaxtyping import Float, PyTree

from ..gradients import ClippedGrad
from ..precision import Policy, refusal
from .layers import Layer, Level, assembled
from .sensitivity_table import LayerError

_Leaves = list[Float[np.ndarray, "..."]]
_FLOAT32 = np.dtype(np.float32)


class Costs(NamedTuple):
    """What a policy costs.

    Attributes:
        label: what the table calls it.
        policy: the policy.
        rows: of each layer, if that one alone follows it; the rest is the last of them.
        floor: the error of what no rule keeps wide, as long as the policy's `[matmul]` holds.
        error: of all layers together.
    """

    label: str
    policy: Policy
    rows: tuple[LayerError, ...]
    floor: float
    error: float

    @property
    def bits(self) -> tuple[int, int]:
        """Of the operands of products, and of all else."""
        compute = self.policy.compute_dtype
        narrow = compute if self.policy.matmul is None else self.policy.matmul.forward
        return 8 * narrow.itemsize, 8 * compute.itemsize


class ClippedErrors:
    """Runs the same call (model, batch, key) by many policies; each is compiled once."""

    def __init__(
        self,
        grad_fn: ClippedGrad[Any],
        call: tuple[PyTree[Any], tuple[PyTree[Any], ...], Any],
        wide: np.dtype[Any],
        tell: Callable[[str], None],
    ):
        self._grad_fn, self._call, self._tell = grad_fn, call, tell
        self.exact = Policy(wide, wide, wide, wide, wide, matmul_precision="highest")
        self._reference: _Leaves = []
        self._errors: dict[Policy, float] = {}

    def of(self, label: str, policy: Policy, layers: Sequence[Layer]) -> Costs:
        """What a policy costs each layer, and all of them."""
        exact = self.exact.compute_dtype
        # Beside [matmul] nothing may be float64: what is around a layer is float32 there.
        around = _FLOAT32 if policy.matmul is not None else exact
        precision = policy.matmul_precision
        base = dataclasses.replace(
            policy,
            **dict.fromkeys(("param_dtype", "output_dtype", "optimizer_dtype"), around),
            **dict.fromkeys(("accumulate_dtype", "noise_dtype"), around),
            matmul_precision="highest" if precision == "default" else precision,
        )
        narrow = Level(policy.compute_dtype)
        wide = Level(around, policy.matmul is not None)

        def sums(narrow_layer: int | None, what: str) -> _Leaves:
            levels = [narrow if i == narrow_layer else wide for i in range(len(layers))]
            return self._sums(assembled(base, layers, levels), f"{label}, {what}")

        reference, last = self._of_reference(), len(layers) - 1
        whole = self._sums(policy, f"{label} everywhere")
        floor = sums(None, "nowhere")
        rows: list[LayerError] = []
        for index, layer in enumerate(layers):
            found = sums(index, f"{layer.path} alone ({index + 1} of {len(layers)})")
            # Of what stays narrow whatever is wide, the rest alone bears the error.
            start = reference if index == last else floor
            rows.append(
                LayerError(
                    layer.path,
                    layer.size,
                    label,
                    _relative(found, start, reference),
                    _relative(found, start, reference, layer.leaves),
                    _relative(whole, reference, reference, layer.leaves),
                )
            )
        error = self._errors[policy] = _relative(whole, reference, reference)
        return Costs(label, policy, tuple(rows), _relative(floor, reference, reference), error)

    def error(self, policy: Policy) -> float:
        """The error of the whole sum by a policy."""
        if policy not in self._errors:
            reference = self._of_reference()
            found = self._sums(policy, "what is recommended")
            self._errors[policy] = _relative(found, reference, reference)
        return self._errors[policy]

    def _of_reference(self) -> _Leaves:
        """The sum that others are compared with; it is refused if it is zero."""
        if not self._reference:
            found = self._run(self.exact, "reference")
            if _norm(found) == 0:
                raise refusal(
                    "public_batch",
                    "examples whose clipped gradients add up to zero",
                    "examples with a gradient: a finite loss, a clip norm above zero",
                )
            self._reference = found
        return self._reference

    def _sums(self, policy: Policy, what: str) -> _Leaves:
        """The clipped sum by a policy, leaf by leaf, in float64 on the host."""
        return self._of_reference() if policy == self.exact else self._run(policy, what)

    def _run(self, policy: Policy, what: str) -> _Leaves:
        self._tell(what)
        model, batch, key = self._call
        fixed = self._grad_fn.with_policy(policy)
        arrays, static = eqx.partition(model, eqx.is_array)

        def run(arrays: Any, batch: Any, key: Any) -> Any:
            return fixed(eqx.combine(arrays, static), *batch, key=key)

        # Compiled by hand: the program is forgotten when it has run.
        program = jax.jit(run).lower(arrays, batch, key).compile()
        return [np.asarray(x, np.float64) for x in jax.tree.leaves(program(arrays, batch, key))]


def _norm(leaves: Iterable[Float[np.ndarray, "..."]]) -> float:
    return float(np.sqrt(sum(float(np.vdot(x, x)) for x in leaves)))


def _relative(
    found: _Leaves, start: _Leaves, reference: _Leaves, of: Sequence[int] | None = None
) -> float:
    """The norm of a difference in the unit of the reference; NaN where that is zero."""
    leaves = range(len(reference)) if of is None else of
    unit = _norm(reference[leaf] for leaf in leaves)
    difference = _norm(found[leaf] - start[leaf] for leaf in leaves)
    return difference / unit if unit > 0 else float("nan")
