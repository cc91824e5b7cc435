"""The value that says which dtype each stage of a private step uses."""

import dataclasses
import json
from collections.abc import Iterable
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

import jax.numpy as jnp
import jmp
import numpy as np
from jax.typing import DTypeLike

from ..shown import shown
from .loss_scale import LossScale
from .matmul import Matmul
from .module_rule import ModuleRule, content_of_rule
from .refusals import DTYPES, float_dtype, one_of, refusal
from .toml_text import toml_text

T = TypeVar("T")
MatmulPrecision: TypeAlias = Literal["default", "tensorfloat32", "highest"]
Content: TypeAlias = dict[str, object]
Rounding: TypeAlias = Literal["nearest", "stochastic"]

MATMUL_PRECISIONS: tuple[MatmulPrecision, ...] = get_args(MatmulPrecision)
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
DTYPE_KEYS = ("params", "compute", "output", "accumulate", "noise")
"""How policy files and texts name a policy's dtypes, in the order in which `Policy` takes them."""
OPTIMIZER = "optimizer"
"""How they name a sixth, which they may leave out: it is the accumulate dtype by default."""
_FLOAT32 = DTYPES["float32"]
_NO_LOSS_SCALE = LossScale()


@dataclasses.dataclass(frozen=True, init=False)
class Policy(jmp.Policy):
    """The dtype of every stage of a private training step: a `jmp.Policy` with three more dtypes.

    | dtype | governs |
    |---|---|
    | param | how parameters are stored |
    | compute | what parameters and float inputs are cast to when they enter the loss |
    | output | the loss |
    | accumulate | norms, clip factors, every sum over examples, and the gradient returned |
    | noise | the draw of the noise, and its addition |
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
            narrower than the compute dtype. Gradients can then exceed the clip norm, and the noise
            is not Gaussian: the privacy guarantee does not hold. `repr` and `str` show the flag.
        optimizer_dtype: By default the accumulate dtype.
        rounding: How an updated parameter is rounded to the param dtype: `"nearest"`, or
            `"stochastic"` (see `apply_updates`). Both are post-processing and cost no privacy.
        narrow_optimizer: Allows an optimizer dtype narrower than float32. This costs no privacy,
            because the optimizer sees noisy gradients alone. It can stop a moment from moving: in
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

    # Written out because it takes any spelling of a dtype where the fields hold np.dtype alone.
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
            matmul_precision=matmul_precision,
            unsafe=unsafe,
            optimizer_dtype=float_dtype("dtypes.optimizer", optimizer),
            rounding=rounding,
            narrow_optimizer=narrow_optimizer,
            name=name,
            description=description,
            matmul=matmul,
        )
        _check_settings(self)
        _check_module_rules(self)
        _check_widths(self)
        _check_loss_scale(self)
        _check_matmul(self)

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

    def to_toml(self) -> str:
        """Writes a policy file; `load_policy` reads an equal policy from it.

        The file holds the description, and leaves out what is as by default. It extends nothing.
        """
        return toml_text(_content_of(self))

    def to_json(self) -> str:
        """Writes the entries of `to_toml` as JSON; `parse_policy` reads an equal policy from it."""
        return json.dumps(_content_of(self), indent=2)

    def __str__(self) -> str:
        parts = [f"{key}={dtype}" for key, dtype in named_dtypes(self).items()]
        if self.rounding != "nearest":
            parts.append(f"rounding={self.rounding}")
        if self.loss_scale.kind == "static":
            parts.append(f"loss_scale={self.loss_scale.value:.17g}")
        elif self.loss_scale.kind != "none":
            parts.append(f"loss_scale={self.loss_scale.kind}")
        if self.matmul_precision != "default":
            parts.append(f"matmul_precision={self.matmul_precision}")
        if self.matmul is not None:
            parts.append(f"matmul={self.matmul}")
        if self.unsafe:
            parts.append("unsafe=true")
        if self.narrow_optimizer:
            parts.append("narrow_optimizer=true")
        parts += [f"module:{rule.match}={rule}" for rule in self.modules]
        return ",".join(parts)


def dtypes_of(policy: Policy) -> dict[str, np.dtype[Any]]:
    """A policy's six dtypes, by the key that policy files have for them."""
    keys = (*DTYPE_KEYS, OPTIMIZER)
    return {key: getattr(policy, f"{key.removesuffix('s')}_dtype") for key in keys}


def named_dtypes(policy: Policy) -> dict[str, np.dtype[Any]]:
    """The same without the optimizer's, where it is the default: so texts name it."""
    found = dtypes_of(policy)
    if policy.optimizer_dtype == policy.accumulate_dtype:
        del found[OPTIMIZER]
    return found


def _content_of(policy: Policy) -> Content:
    """What a file says that holds a policy: defaults are left out."""
    found: Content = {
        "description": policy.description,
        "unsafe": policy.unsafe,
        "narrow_optimizer": policy.narrow_optimizer,
        "matmul_precision": policy.matmul_precision,
        "dtypes": {key: str(dtype) for key, dtype in named_dtypes(policy).items()},
        "params": {"rounding": policy.rounding} if policy.rounding != "nearest" else {},
        "loss_scale": _scale_of(policy.loss_scale),
        "matmul": _products_of(policy.matmul),
        "modules": [content_of_rule(rule) for rule in policy.modules],
    }
    return {key: value for key, value in found.items() if value and value != "default"}


def _scale_of(scale: LossScale) -> Content:
    if scale.kind == "none":
        return {}
    return {"kind": scale.kind, **({"value": scale.value} if scale.kind == "static" else {})}


def _products_of(matmul: Matmul | None) -> Content:
    if matmul is None:
        return {}
    return {
        "forward": str(matmul.forward),
        "backward": str(matmul.backward),
        "scaling": matmul.scaling,
    }


def _wider(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    # For bfloat16 and float16, which hold different numbers, this is float32.
    return jnp.promote_types(a, b)


def cast_floats(tree: T, dtype: np.dtype[Any]) -> T:
    """Converts the floating-point arrays of a tree: jmp alone decides which leaves are cast."""
    return jmp.Policy(dtype, dtype, dtype).cast_to_param(tree)


def _check_settings(policy: Policy) -> None:
    one_of("matmul_precision", policy.matmul_precision, MATMUL_PRECISIONS)
    one_of("params.rounding", policy.rounding, ROUNDINGS)
    # `unsafe="false"` is true to Python: nothing but a bool may give the guarantee away.
    for key in ("unsafe", "narrow_optimizer"):
        if (given := getattr(policy, key)) is not True and given is not False:
            raise refusal(key, shown(given), "True, False")
    if not isinstance(cast(object, policy.loss_scale), LossScale):
        raise refusal("loss_scale", shown(policy.loss_scale), "a LossScale")
    if policy.matmul is not None and not isinstance(cast(object, policy.matmul), Matmul):
        raise refusal("matmul", shown(policy.matmul), "a Matmul, or None")


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
    optimizer = policy.optimizer_dtype
    is_narrow = _wider(optimizer, _FLOAT32) != optimizer and optimizer != policy.accumulate_dtype
    if is_narrow and not policy.narrow_optimizer:
        raise refusal(
            "dtypes.optimizer",
            f"{optimizer}, narrower than float32, in which moments lose small changes",
            "float32, float64; narrower only with narrow_optimizer = true, which costs no privacy",
        )
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


def _check_matmul(policy: Policy) -> None:
    # A product of float64 has digits and a range that no product in float32 has.
    narrow = [("dtypes.compute", policy.compute_dtype)]
    narrow += [
        (f"modules.compute of {rule.match!r}", rule.compute_dtype)
        for rule in policy.modules
        if rule.matmul is None
    ]
    for key, dtype in narrow if policy.matmul is not None else ():
        if dtype == np.float64:
            raise refusal(key, "float64 beside [matmul]", "bfloat16, float16, float32")


def checked_policy(policy: object) -> "Policy | None":
    """Returns a policy, or None, that a caller handed in; refuses anything else.

    Raises:
        ValueError: If it is a name or jmp's own policy, say, with what to use instead.
    """
    if policy is None or isinstance(policy, Policy):
        return policy
    advice = "read a preset with load_policy, a text with parse_policy"
    if isinstance(policy, jmp.Policy):
        advice = f"jmp's policies lack dtypes: parse_policy({str(policy)!r}) adds them"
    raise refusal("policy", shown(policy), f"an eqx_dp Policy, or None ({advice})")
