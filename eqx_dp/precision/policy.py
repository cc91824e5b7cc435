"""The value that says which dtype each stage of a private step uses."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import jax.numpy as jnp
import jmp
import numpy as np
from jax.typing import DTypeLike

from ..shown import shown
from .refusals import DTYPES, float_dtype, one_of, refusal

T = TypeVar("T")
MatmulPrecision: TypeAlias = Literal["default", "tensorfloat32", "highest"]
LossScaleKind: TypeAlias = Literal["none", "static", "per_example"]

MATMUL_PRECISIONS: tuple[MatmulPrecision, ...] = get_args(MatmulPrecision)
LOSS_SCALE_KINDS: tuple[LossScaleKind, ...] = get_args(LossScaleKind)
DTYPE_KEYS = ("params", "compute", "output", "accumulate", "noise")
"""How policy files and texts name a policy's dtypes, in the order in which `Policy` takes them."""
_FLOAT32 = DTYPES["float32"]


@dataclasses.dataclass(frozen=True, init=False)
class ModuleRule:
    """Gives some modules of a model another compute dtype than the policy's.

    Args:
        match: A path in the model's tree (`**.head`) or a class name. One or more printable
            characters without space, comma or equals sign, so that it fits a policy's string form.
        compute_dtype: The dtype that these modules compute in.

    Raises:
        ValueError: If `match` holds a character that is not allowed, or the dtype is not one of
            bfloat16, float16, float32, float64 (the last only while `jax_enable_x64` is on).
    """

    match: str
    compute_dtype: np.dtype[Any]

    def __init__(self, match: str, compute_dtype: DTypeLike):
        dtype = float_dtype("modules.compute", compute_dtype)
        if not match or not match.isprintable() or set(match) & set(" ,="):
            raise refusal(
                "modules.match",
                repr(match),
                "one or more printable characters other than space, comma and equals sign",
            )
        object.__setattr__(self, "match", match)
        object.__setattr__(self, "compute_dtype", dtype)


@dataclasses.dataclass(frozen=True)
class LossScale:
    """A factor of the loss for the backward pass, so that float16 does not underflow.

    jmp's dynamic scale changes after an overflow, and so depends on the private data. Here the
    scale is constant, or it is chosen for each example from that example alone. It is a power of
    two, so undoing it is exact.

    Args:
        kind: `"none"`; `"static"` for a constant scale; or `"per_example"` for a scale that keeps
            the backward pass of each example within the range of float16. The last costs another
            pass, in bfloat16, about as much work as the gradient.
        value: The static scale, a positive power of two; 1 for the other kinds.

    Raises:
        ValueError: If the kind is none of the three; the value is not a finite positive power of
            two; or the kind is not `"static"` and the value is not 1.
    """

    kind: LossScaleKind = "none"
    value: int | float = 1.0

    def __post_init__(self):
        one_of("loss_scale.kind", self.kind, LOSS_SCALE_KINDS)
        if not _is_power_of_two(self.value):
            raise refusal(
                "loss_scale.value", shown(self.value), "a power of two, such as 32768 or 0.5"
            )
        if self.kind != "static" and self.value != 1:
            allowed = f'1 where loss_scale.kind is "{self.kind}"'
            raise refusal("loss_scale.value", repr(self.value), allowed)
        object.__setattr__(self, "value", float(self.value))


def _is_power_of_two(value: int | float) -> bool:
    # frexp writes a number as m * 2**e with 1/2 <= |m| < 1: m is 1/2 for powers of two alone.
    try:
        return math.frexp(value)[0] == 0.5
    except OverflowError:  # an integer that no float holds
        return False


# The policy itself.


@dataclasses.dataclass(frozen=True, init=False)
class Policy(jmp.Policy):
    """The dtype of every stage of a private training step: a `jmp.Policy` with two more dtypes.

    | dtype | governs |
    |---|---|
    | param | how parameters are stored |
    | compute | what parameters and float inputs are cast to when they enter the loss |
    | output | the loss |
    | accumulate | norms, clip factors, every sum over examples, and the gradient returned |
    | noise | the draw of the noise, and its addition |

    A policy is a value: it is hashable, and equal to every policy with the same content. (`name`
    and `description` say where it came from; equality ignores them and `dataclasses.replace` keeps
    them.) `parse_policy` reads its `str`, and returns an equal policy.

    Args:
        param_dtype: One of bfloat16, float16, float32, float64, by name or as a dtype. The same
            holds for all dtypes here.
        compute_dtype: As above.
        output_dtype: As above.
        accumulate_dtype: By default the wider of float32 and `compute_dtype`.
        noise_dtype: By default the wider of float32 and `accumulate_dtype`.
        modules: Module rules in order; the first match wins.
        loss_scale: The loss scale, none by default.
        matmul_precision: `"default"`, `"tensorfloat32"` or `"highest"`, as in
            `jax.default_matmul_precision`; `"default"` does not change JAX's setting.
        unsafe: Allows an accumulate or noise dtype narrower than float32, and an accumulate dtype
            narrower than the compute dtype. Gradients can then exceed the clip norm, and the noise
            is not Gaussian: the privacy guarantee does not hold. `repr` and `str` show the flag.
        name: The preset or file that the policy was read from.
        description: The description in the file.

    Raises:
        ValueError: If a dtype is not one of the four, or is float64 while `jax_enable_x64` is off;
            if a dtype is narrower than allowed and `unsafe` is not set; if two module rules have
            the same pattern; if the loss scale or its inverse is not exact in the output or the
            accumulate dtype; if another argument is not what is allowed above. The message names
            fields as a policy file does.
    """

    accumulate_dtype: np.dtype[Any]
    noise_dtype: np.dtype[Any]
    modules: tuple[ModuleRule, ...] = ()
    loss_scale: LossScale = LossScale()
    matmul_precision: MatmulPrecision = "default"
    unsafe: bool = False
    name: str | None = dataclasses.field(default=None, compare=False)
    description: str = dataclasses.field(default="", compare=False)

    # Written out because it takes any spelling of a dtype where the fields hold np.dtype alone.
    def __init__(
        self,
        param_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        output_dtype: DTypeLike,
        accumulate_dtype: DTypeLike | None = None,
        noise_dtype: DTypeLike | None = None,
        modules: Iterable[ModuleRule] = (),
        loss_scale: LossScale = LossScale(),
        matmul_precision: MatmulPrecision = "default",
        unsafe: bool = False,
        name: str | None = None,
        description: str = "",
    ):
        compute = float_dtype("dtypes.compute", compute_dtype)
        accumulate = _wider(_FLOAT32, compute) if accumulate_dtype is None else accumulate_dtype
        accumulate = float_dtype("dtypes.accumulate", accumulate)
        noise = _wider(_FLOAT32, accumulate) if noise_dtype is None else noise_dtype
        vars(self).update(
            param_dtype=float_dtype("dtypes.params", param_dtype),
            compute_dtype=compute,
            output_dtype=float_dtype("dtypes.output", output_dtype),
            accumulate_dtype=accumulate,
            noise_dtype=float_dtype("dtypes.noise", noise),
            modules=tuple(modules),
            loss_scale=loss_scale,
            matmul_precision=matmul_precision,
            unsafe=unsafe,
            name=name,
            description=description,
        )
        _check_settings(self)
        _check_module_rules(self)
        _check_widths(self)
        _check_loss_scale(self)

    # jmp's three verbs, with the types that jmp leaves out, and two more.

    def cast_to_param(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the param dtype.

        Args:
            x: the PyTree.
        """
        return cast_floats(x, self.param_dtype)

    def cast_to_compute(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the compute dtype.

        Args:
            x: the PyTree.
        """
        return cast_floats(x, self.compute_dtype)

    def cast_to_output(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the output dtype.

        Args:
            x: the PyTree.
        """
        return cast_floats(x, self.output_dtype)

    def cast_to_accumulate(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the accumulate dtype.

        Args:
            x: the PyTree.
        """
        return cast_floats(x, self.accumulate_dtype)

    def cast_to_noise(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the noise dtype.

        Args:
            x: the PyTree.
        """
        return cast_floats(x, self.noise_dtype)

    def __str__(self) -> str:
        parts = [f"{key}={dtype}" for key, dtype in dtypes_of(self).items()]
        if self.loss_scale.kind == "static":
            parts.append(f"loss_scale={self.loss_scale.value:.17g}")
        elif self.loss_scale.kind != "none":
            parts.append(f"loss_scale={self.loss_scale.kind}")
        if self.matmul_precision != "default":
            parts.append(f"matmul_precision={self.matmul_precision}")
        if self.unsafe:
            parts.append("unsafe=true")
        parts += [f"module:{rule.match}={rule.compute_dtype}" for rule in self.modules]
        return ",".join(parts)


def dtypes_of(policy: Policy) -> dict[str, np.dtype[Any]]:
    """A policy's five dtypes, by the key that policy files have for them."""
    fields = (f"{key.removesuffix('s')}_dtype" for key in DTYPE_KEYS)
    return {key: getattr(policy, field) for key, field in zip(DTYPE_KEYS, fields, strict=True)}


def _wider(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    # For bfloat16 and float16, which hold different numbers, this is float32.
    return jnp.promote_types(a, b)


def cast_floats(tree: T, dtype: np.dtype[Any]) -> T:
    """Converts the floating-point arrays of a tree: jmp alone decides which leaves are cast."""
    return jmp.Policy(dtype, dtype, dtype).cast_to_param(tree)


def _check_settings(policy: Policy) -> None:
    one_of("matmul_precision", policy.matmul_precision, MATMUL_PRECISIONS)
    # `unsafe="false"` is true to Python: nothing but a bool may give the guarantee away.
    if policy.unsafe is not True and policy.unsafe is not False:
        raise refusal("unsafe", shown(policy.unsafe), "True, False")
    if not isinstance(cast(object, policy.loss_scale), LossScale):
        raise refusal("loss_scale", shown(policy.loss_scale), "a LossScale")


def _check_module_rules(policy: Policy) -> None:
    seen: set[str] = set()
    for rule in policy.modules:
        if not isinstance(cast(object, rule), ModuleRule):
            raise refusal("modules", shown(rule), "ModuleRule values")
        if rule.match in seen:
            raise refusal(
                "modules.match", f"{rule.match!r} twice", "each once, as the first match wins"
            )
        seen.add(rule.match)


def _check_widths(policy: Policy) -> None:
    if policy.unsafe:
        return
    accumulate, noise = policy.accumulate_dtype, policy.noise_dtype
    computes = [("dtypes.compute", policy.compute_dtype)]
    computes += [(f"modules.compute of {r.match!r}", r.compute_dtype) for r in policy.modules]
    for key, dtype, name, declared in (
        ("dtypes.accumulate", accumulate, "float32", _FLOAT32),
        ("dtypes.noise", noise, "float32", _FLOAT32),
        *(("dtypes.accumulate", accumulate, f"{key} ({dtype})", dtype) for key, dtype in computes),
    ):
        if _wider(dtype, declared) != dtype:
            wide = [str(one) for one in DTYPES.values() if _wider(one, declared) == one]
            raise refusal(
                key,
                f"{dtype}, narrower than {name}",
                f"{', '.join(wide)}; narrower only with unsafe = true",
            )


def _check_loss_scale(policy: Policy) -> None:
    # The loss is multiplied in the output dtype; the gradient is divided in the accumulate dtype.
    scale = policy.loss_scale.value
    for key, dtype, values in (
        ("dtypes.output", policy.output_dtype, (scale,)),
        ("dtypes.accumulate", policy.accumulate_dtype, (scale, 1 / scale)),
    ):
        limits = jnp.finfo(dtype)
        least, most = float(limits.smallest_normal), float(limits.max)
        if not all(least <= value <= most for value in values):
            raise refusal(
                "loss_scale.value",
                f"{scale!r}, out of range for {key} ({dtype})",
                "a power of two that is exact in dtypes.output, and with its inverse in "
                "dtypes.accumulate",
            )


def checked_policy(policy: object) -> "Policy | None":
    """Returns a policy, or None, that a caller handed in; refuses anything else.

    Raises:
        ValueError: If it is a name or jmp's own policy, say, with what to use instead.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    advice = "read a preset with load_policy, a text with parse_policy"
    if isinstance(policy, jmp.Policy):
        advice = f"jmp's policies lack two dtypes: parse_policy({str(policy)!r}) adds them"
    raise refusal("policy", shown(policy), f"an eqx_dp Policy, or None ({advice})")
