"""The value that says which dtype each stage of a private step uses."""

import dataclasses
import warnings
from collections.abc import Iterable
from typing import Any, Literal, Protocol, TypeAlias, TypeVar, cast, get_args, runtime_checkable

import jax.numpy as jnp
import jmp
import numpy as np
from jax.typing import DTypeLike

from ..shown import shown
from .loss_scale import LossScale
from .matmul import Matmul, MatmulPrecision
from .module_rule import ModuleRule
from .modules import cast_floats, cast_leaf, rebuild, rules_of, stored
from .refusals import DTYPES, float_dtype, one_of, refusal

T = TypeVar("T")
Rounding: TypeAlias = Literal["nearest", "stochastic"]

DTYPE_KEYS = ("params", "compute", "output", "accumulate", "noise")
"""The names of a policy's dtypes in policy files and texts, in the order of `Policy`."""
OPTIMIZER = "optimizer"
"""The name of the sixth, which is optional: the accumulate dtype by default."""
_FLOAT32 = DTYPES["float32"]
_NO_LOSS_SCALE = LossScale()
_DEFAULTS = ("", "None", "none", "False", "default", "nearest")


@runtime_checkable
class JmpPolicy(Protocol):
    """A `jmp.Policy`, for type checkers: jmp itself has no types. It is accepted as a policy."""

    def cast_to_param(self, x: Any) -> Any:
        """As every `jmp.Policy` does."""
        ...


@dataclasses.dataclass(frozen=True, init=False)
class Policy(jmp.Policy):
    """The dtype of every stage of a private training step: a `jmp.Policy` with three more dtypes.

    | dtype | applies to |
    |---|---|
    | param | how trained parameters are stored; frozen ones keep their dtype |
    | compute | what parameters and float inputs are cast to when they enter the loss |
    | output | the loss |
    | accumulate | norms, clip factors, every sum over examples, and the gradient returned |
    | noise | the noisy gradient; integers draw the noise and add it |
    | optimizer | how the optimizer's state is stored between steps |

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
            narrower than the compute dtype. Sums can then move by more than the clip norm: the
            privacy guarantee does not hold. `repr` and `str` show the flag.
        optimizer_dtype: By default the accumulate dtype.
        rounding: How an updated parameter is rounded to the param dtype: `"nearest"`, or
            `"stochastic"` (see `apply_updates`). Both are post-processing and cost no privacy.
        narrow_optimizer: Allows an optimizer dtype narrower than float32. This costs no privacy,
            because the optimizer sees only noisy gradients. It can stop a moment from moving: in
            bfloat16, a second moment that decays by 1/1000 a step is rounded back to itself.
        name: The preset or file that the policy was read from.
        description: The description in the file.
        matmul: What the operands of matrix products are cast to, None for the compute dtype.

    Raises:
        ValueError: If a dtype is not one of the four, or is float64 while `jax_enable_x64` is off;
            if a dtype is narrower than allowed and `unsafe` is not set; if the optimizer dtype is
            narrower than float32, is not the accumulate dtype, and `narrow_optimizer` is not set;
            if two module rules have the same pattern; if the loss scale or its inverse is not exact
            in the output or the accumulate dtype; if another argument is not what is allowed above.
            The message names fields as a policy file does.

    Warns:
        UserWarning: If the policy or a module rule computes in float16 and there is no loss scale.
    """

    accumulate_dtype: np.dtype[Any]
    noise_dtype: np.dtype[Any]
    modules: tuple[ModuleRule, ...] = ()
    loss_scale: LossScale = _NO_LOSS_SCALE
    matmul_precision: MatmulPrecision = "default"
    unsafe: bool = False
    optimizer_dtype: np.dtype[Any] = _FLOAT32
    rounding: Rounding = "nearest"
    narrow_optimizer: bool = False
    name: str | None = dataclasses.field(default=None, compare=False)
    description: str = dataclasses.field(default="", compare=False)
    matmul: Matmul | None = None

    # Written out because it takes any spelling of a dtype, and the fields hold np.dtype.
    def __init__(
        self,
        param_dtype: DTypeLike,
        compute_dtype: DTypeLike,
        output_dtype: DTypeLike,
        accumulate_dtype: DTypeLike | None = None,
        noise_dtype: DTypeLike | None = None,
        modules: Iterable[ModuleRule] = (),
        loss_scale: LossScale = _NO_LOSS_SCALE,
        matmul_precision: MatmulPrecision = "default",
        unsafe: bool = False,
        optimizer_dtype: DTypeLike | None = None,
        rounding: Rounding = "nearest",
        narrow_optimizer: bool = False,
        name: str | None = None,
        description: str = "",
        matmul: Matmul | None = None,
    ):
        compute = float_dtype("dtypes.compute", compute_dtype)
        accumulate = _wider(_FLOAT32, compute) if accumulate_dtype is None else accumulate_dtype
        accumulate = float_dtype("dtypes.accumulate", accumulate)
        noise = _wider(_FLOAT32, accumulate) if noise_dtype is None else noise_dtype
        optimizer = accumulate if optimizer_dtype is None else optimizer_dtype
        vars(self).update(
            param_dtype=float_dtype("dtypes.params", param_dtype),
            compute_dtype=compute,
            output_dtype=float_dtype("dtypes.output", output_dtype),
            accumulate_dtype=accumulate,
            noise_dtype=float_dtype("dtypes.noise", noise),
            modules=tuple(modules),
            loss_scale=loss_scale,
            matmul_precision=one_of(
                "matmul_precision", matmul_precision, get_args(MatmulPrecision)
            ),
            unsafe=one_of("unsafe", unsafe, (True, False)),
            optimizer_dtype=float_dtype("dtypes.optimizer", optimizer),
            rounding=one_of("params.rounding", rounding, get_args(Rounding)),
            narrow_optimizer=one_of("narrow_optimizer", narrow_optimizer, (True, False)),
            name=name,
            description=description,
            matmul=matmul,
        )
        _check_values(self)
        _check_widths(self)
        _check_loss_scale(self)
        _warn(self)

    # jmp's three methods, with types, and one more.

    def cast_to_param(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the dtypes they are stored in.

        Where a module rule with a param dtype governs, that is the dtype; elsewhere the policy's.

        Args:
            x: the PyTree: a model, or what is trained of it.
        """
        return stored(x, self.modules, self.param_dtype)

    def cast_frozen_to_param(self, x: T) -> T:
        """Converts what is not trained to the dtypes of module rules; the rest keeps its own.

        Args:
            x: the PyTree: what a model holds beside its trained parameters.
        """
        return stored(x, self.modules, None)

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

    def __str__(self) -> str:
        scale, same = self.loss_scale, self.optimizer_dtype == self.accumulate_dtype
        parts = {
            **dtypes_of(self),
            OPTIMIZER: "" if same else self.optimizer_dtype,
            "rounding": self.rounding,
            "loss_scale": f"{scale.value:.17g}" if scale.kind == "static" else "none",
            "matmul_precision": self.matmul_precision,
            "matmul": self.matmul,
            "unsafe": "true" if self.unsafe else "",
            "narrow_optimizer": "true" if self.narrow_optimizer else "",
            **{f"module:{rule.match}": rule for rule in self.modules},
        }
        return ",".join(f"{key}={x}" for key, x in parts.items() if str(x) not in _DEFAULTS)


def dtypes_of(policy: Policy) -> dict[str, np.dtype[Any]]:
    """A policy's six dtypes, by the key that policy files have for them."""
    keys = (*DTYPE_KEYS, OPTIMIZER)
    return {key: getattr(policy, f"{key.removesuffix('s')}_dtype") for key in keys}


def cast_parameters(tree: T, policy: Policy) -> T:
    """Converts the floating-point arrays of a model, or of a part of it, to their compute dtypes.

    The dtype of a leaf is that of the innermost module that a rule matches, or the policy's own.
    """
    return rebuild(tree, policy.compute_dtype, rules_of(policy.modules), on_leaf=cast_leaf)


def checked_policy(policy: object) -> Policy | None:
    """Returns a caller's policy, or None; refuses anything else.

    A `jmp.Policy` gets the missing dtypes by default: float32, or its compute dtype if that is
    wider.

    Raises:
        ValueError: If it is something else, such as a name; the message says what to use.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    if isinstance(policy, jmp.Policy):
        return Policy(policy.param_dtype, policy.compute_dtype, policy.output_dtype)
    advice = "read a preset with load_policy, a text with parse_policy"
    raise refusal("policy", shown(policy), f"an eqx_dp Policy, a jmp.Policy, or None ({advice})")


def _wider(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    # For bfloat16 and float16, which hold different numbers, this is float32.
    return jnp.promote_types(a, b)


def _check_values(policy: Policy) -> None:
    if not isinstance(cast(object, policy.loss_scale), LossScale):
        raise refusal("loss_scale", shown(policy.loss_scale), "a LossScale")
    if policy.matmul is not None and not isinstance(cast(object, policy.matmul), Matmul):
        raise refusal("matmul", shown(policy.matmul), "a Matmul, or None")
    for index, rule in enumerate(policy.modules):
        if not isinstance(cast(object, rule), ModuleRule):
            raise refusal("modules", shown(rule), "ModuleRule values")
        if rule.match in [other.match for other in policy.modules[:index]]:
            allowed = "each once, as the first match wins"
            raise refusal("modules.match", f"{rule.match!r} twice", allowed)


def _check_widths(policy: Policy) -> None:
    optimizer, accumulate = policy.optimizer_dtype, policy.accumulate_dtype
    is_narrow = _wider(optimizer, _FLOAT32) != optimizer and optimizer != accumulate
    if is_narrow and not policy.narrow_optimizer:
        raise refusal(
            "dtypes.optimizer",
            f"{optimizer}, narrower than float32, in which moments lose small changes",
            "float32, float64; narrower only with narrow_optimizer = true, which costs no privacy",
        )
    products = {"dtypes.compute": policy.compute_dtype}
    products |= {f"modules.compute of {one.match!r}": one.compute_dtype for one in policy.modules}
    wide = [("accumulate", "float32", _FLOAT32), ("noise", "float32", _FLOAT32)]
    wide += [("accumulate", f"{key} ({dtype})", dtype) for key, dtype in products.items()]
    for key, name, least in wide if not policy.unsafe else ():
        dtype = dtypes_of(policy)[key]
        if _wider(dtype, least) != dtype:
            allowed = ", ".join(str(one) for one in DTYPES.values() if _wider(one, least) == one)
            allowed = f"{allowed}; narrower only with unsafe = true"
            raise refusal(f"dtypes.{key}", f"{dtype}, narrower than {name}", allowed)
    # A product of float64 has digits and a range that no product in float32 has.
    if policy.matmul is not None and policy.compute_dtype == np.float64:
        raise refusal("dtypes.compute", "float64 beside [matmul]", "bfloat16, float16, float32")


def _check_loss_scale(policy: Policy) -> None:
    # The loss is multiplied in the output dtype; the gradient is divided in the accumulate dtype.
    scale, accumulate = policy.loss_scale.value, policy.accumulate_dtype
    by_dtype = (policy.output_dtype, scale), (accumulate, scale), (accumulate, 1 / scale)
    for key, (dtype, value) in zip(("output", "accumulate", "accumulate"), by_dtype, strict=True):
        limits = jnp.finfo(dtype)
        if not float(limits.smallest_normal) <= value <= float(limits.max):
            found = f"{scale!r}, out of range for dtypes.{key} ({dtype})"
            exact = "a power of two that is exact in dtypes.output, and with its inverse in"
            raise refusal("loss_scale.value", found, f"{exact} dtypes.accumulate")


def _warn(policy: Policy) -> None:
    """Warns of float16 without a loss scale."""
    computes = {policy.compute_dtype, *(rule.compute_dtype for rule in policy.modules)}
    if DTYPES["float16"] in computes and policy.loss_scale.kind == "none":
        warnings.warn(
            f"policy {policy.name or str(policy)!r}: it computes in float16 without a loss scale, "
            "so gradients below 6e-8 are lost. Take load_policy('mixed_float16'), a loss scale "
            "such as 1024, or bfloat16.",
            stacklevel=3,
        )
