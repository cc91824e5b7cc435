"""The value that says which dtype each stage of a private step uses, and its string form."""

import contextlib
import dataclasses
import math
from collections.abc import Generator, Iterable, Sequence
from typing import Any, Literal, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from jax.typing import DTypeLike

from ..shown import shown

T = TypeVar("T")
MatmulPrecision: TypeAlias = Literal["default", "tensorfloat32", "highest"]
LossScaleKind: TypeAlias = Literal["none", "static", "per_example"]

MATMUL_PRECISIONS: tuple[MatmulPrecision, ...] = ("default", "tensorfloat32", "highest")
LOSS_SCALE_KINDS: tuple[LossScaleKind, ...] = ("none", "static", "per_example")
DTYPES: dict[str, np.dtype[Any]] = {
    name: jnp.dtype(name) for name in ("bfloat16", "float16", "float32", "float64")
}
_FLOAT32 = DTYPES["float32"]


# How a policy refuses: every message says where, what was found there and what is allowed.


def refusal(key: str, found: str, allowed: str) -> ValueError:
    """The error for one bad entry, written the same way wherever the policy comes from."""
    return ValueError(f"{key}: found {found}; allowed: {allowed}")


@contextlib.contextmanager
def refusals_name(source: str) -> Generator[None, None, None]:
    """Puts the file or the text that is being read in front of every refusal inside the block."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def one_of(key: str, found: object, allowed: Sequence[T]) -> T:
    """Returns the member of `allowed` that equals `found`, or refuses."""
    for choice in allowed:
        if choice == found:
            return choice
    raise refusal(key, shown(found), ", ".join(map(str, allowed)))


def float_dtype(key: str, found: object) -> np.dtype[Any]:
    """Returns `found` as one of the four dtypes a policy may name, or refuses."""
    dtype = DTYPES.get(found) if isinstance(found, str) else _dtype_of(found)
    if dtype is None or dtype not in DTYPES.values():
        raise refusal(key, shown(found) if dtype is None else str(dtype), ", ".join(DTYPES))
    if dtype == DTYPES["float64"] and not jax.config.read("jax_enable_x64"):
        raise refusal(
            key,
            "float64 while jax_enable_x64 is off",
            "bfloat16, float16, float32; float64 only after "
            'jax.config.update("jax_enable_x64", True) or with JAX_ENABLE_X64=1 in the environment',
        )
    return dtype


def _dtype_of(found: object) -> np.dtype[Any] | None:
    if found is None:  # which numpy reads as float64
        return None
    try:
        return np.dtype(cast(Any, found))
    except (TypeError, ValueError):
        return None


# The parts of a policy.


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
        if accumulate_dtype is None:
            accumulate_dtype = _wider(_FLOAT32, compute)
        accumulate = float_dtype("dtypes.accumulate", accumulate_dtype)
        if noise_dtype is None:
            noise_dtype = _wider(_FLOAT32, accumulate)
        fields: dict[str, object] = {
            "param_dtype": float_dtype("dtypes.params", param_dtype),
            "compute_dtype": compute,
            "output_dtype": float_dtype("dtypes.output", output_dtype),
            "accumulate_dtype": accumulate,
            "noise_dtype": float_dtype("dtypes.noise", noise_dtype),
            "modules": tuple(modules),
            "loss_scale": loss_scale,
            "matmul_precision": matmul_precision,
            "unsafe": unsafe,
            "name": name,
            "description": description,
        }
        for field, value in fields.items():
            object.__setattr__(self, field, value)
        self.__post_init__()

    def __post_init__(self):
        _check_settings(self)
        _check_module_rules(self)
        _check_widths(self)
        _check_loss_scale(self)

    # jmp's three verbs, with the types that jmp leaves out, and two more.

    def cast_to_param(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the param dtype.

        Args:
            x: any tree; its other leaves stay as they are.
        """
        return _cast_floats(x, self.param_dtype)

    def cast_to_compute(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the compute dtype.

        Args:
            x: any tree; its other leaves stay as they are.
        """
        return _cast_floats(x, self.compute_dtype)

    def cast_to_output(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the output dtype.

        Args:
            x: any tree; its other leaves stay as they are.
        """
        return _cast_floats(x, self.output_dtype)

    def cast_to_accumulate(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the accumulate dtype.

        Args:
            x: any tree; its other leaves stay as they are.
        """
        return _cast_floats(x, self.accumulate_dtype)

    def cast_to_noise(self, x: T) -> T:
        """Converts the floating-point arrays of a PyTree to the noise dtype.

        Args:
            x: any tree; its other leaves stay as they are.
        """
        return _cast_floats(x, self.noise_dtype)

    def __str__(self) -> str:
        parts = [
            f"params={self.param_dtype}",
            f"compute={self.compute_dtype}",
            f"output={self.output_dtype}",
            f"accumulate={self.accumulate_dtype}",
            f"noise={self.noise_dtype}",
        ]
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


def _wider(a: np.dtype[Any], b: np.dtype[Any]) -> np.dtype[Any]:
    # For bfloat16 and float16, which hold different numbers, this is float32.
    return jnp.promote_types(a, b)


def _narrower(a: np.dtype[Any], b: np.dtype[Any]) -> bool:
    return _wider(a, b) != a


def _cast_floats(tree: T, dtype: np.dtype[Any]) -> T:
    # jmp alone decides which leaves are cast.
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
    for key, dtype in (
        ("dtypes.accumulate", policy.accumulate_dtype),
        ("dtypes.noise", policy.noise_dtype),
    ):
        if _narrower(dtype, _FLOAT32):
            raise refusal(
                key,
                f"{dtype}, narrower than float32",
                "float32, float64; narrower only with unsafe = true",
            )
    computes = [("dtypes.compute", policy.compute_dtype)]
    computes += [(f"modules.compute of {r.match!r}", r.compute_dtype) for r in policy.modules]
    for key, compute in computes:
        if _narrower(policy.accumulate_dtype, compute):
            raise refusal(
                "dtypes.accumulate",
                f"{policy.accumulate_dtype}, narrower than {key} ({compute})",
                f"{_wider(policy.accumulate_dtype, compute)}; narrower only with unsafe = true",
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


# The string form: jmp's grammar, and as much more as a policy has more to say.

# jmp's names of dtypes; "half" depends on the backend and is asked of jmp.
_DTYPE_NAMES = {
    **DTYPES,
    "bf16": DTYPES["bfloat16"],
    "f16": DTYPES["float16"],
    "f32": DTYPES["float32"],
    "full": DTYPES["float32"],
    "f64": DTYPES["float64"],
}
_SHORT_KEYS = {"p": "params", "c": "compute", "o": "output", "a": "accumulate", "n": "noise"}
_KEYS = (*_SHORT_KEYS.values(), "loss_scale", "matmul_precision", "unsafe")
_MODULE = "module:"
_ALLOWED_KEYS = (
    "params (p), compute (c), output (o), accumulate (a), noise (n), loss_scale, "
    "matmul_precision, unsafe, module:PATTERN"
)


def parse_policy(text: str) -> Policy:
    """Reads a policy from a line of text, in jmp's grammar and a little more.

    The text is either one dtype for params, compute and output (`bfloat16`, `half`), or
    `key=value` parts separated by commas (`p=f32,c=bf16`). The first three keys and their defaults
    are jmp's.

    | key | value | default |
    |---|---|---|
    | `params` (`p`) | a dtype | float32 |
    | `compute` (`c`) | a dtype | that of params |
    | `output` (`o`) | a dtype | that of compute |
    | `accumulate` (`a`) | a dtype | the wider of float32 and compute |
    | `noise` (`n`) | a dtype | the wider of float32 and accumulate |
    | `loss_scale` | `none`, a power of two, or `per_example` | `none` |
    | `matmul_precision` | `default`, `tensorfloat32` or `highest` | `default` |
    | `unsafe` | `true` or `false` | `false` |
    | `module:PATTERN`, any number of times | a dtype: a module rule | |

    Args:
        text: The policy. Dtypes have jmp's names: bfloat16 (bf16), float16 (f16), float32 (f32,
            full), float64 (f64), or half, which is bfloat16 on a TPU and float16 elsewhere.

    Returns:
        The policy, without a name.

    Raises:
        ValueError: If a part is empty or not `key=value`, a key is unknown or given twice, a value
            is not allowed, or `Policy` raises an error. The message holds the text.
    """
    with refusals_name(f"policy {text!r}"):
        if "=" not in text:
            dtype = _named_dtype("dtype", text.strip())
            return Policy(dtype, dtype, dtype)
        return _policy_of(_split(text))


def _split(text: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise refusal("part", repr(part), "key=value parts with commas between them")
        key = _SHORT_KEYS.get(key, key)
        if key not in _KEYS and not key.startswith(_MODULE):
            raise refusal("key", repr(key), _ALLOWED_KEYS)
        if key in parts:
            raise refusal(key, f"a second value, {value!r}", "each key once")
        parts[key] = value
    return parts


def _policy_of(parts: dict[str, str]) -> Policy:
    dtypes = {key: _named_dtype(key, parts[key]) for key in _SHORT_KEYS.values() if key in parts}
    params = dtypes.get("params", _FLOAT32)
    compute = dtypes.get("compute", params)
    rules = [
        ModuleRule(key.removeprefix(_MODULE), _named_dtype(key, value))
        for key, value in parts.items()
        if key.startswith(_MODULE)
    ]
    unsafe = one_of("unsafe", parts.get("unsafe", "false"), ("true", "false"))
    precision = parts.get("matmul_precision", "default")
    return Policy(
        params,
        compute,
        dtypes.get("output", compute),
        dtypes.get("accumulate"),
        dtypes.get("noise"),
        modules=rules,
        loss_scale=_loss_scale(parts["loss_scale"]) if "loss_scale" in parts else LossScale(),
        matmul_precision=one_of("matmul_precision", precision, MATMUL_PRECISIONS),
        unsafe=unsafe == "true",
    )


def _named_dtype(key: str, name: str) -> np.dtype[Any]:
    if name == "half":
        return jnp.dtype(jmp.half_dtype())
    if name not in _DTYPE_NAMES:
        raise refusal(key, repr(name), ", ".join(sorted([*_DTYPE_NAMES, "half"])))
    return _DTYPE_NAMES[name]


def _loss_scale(number: str) -> LossScale:
    if number in ("none", "per_example"):
        return LossScale(cast(LossScaleKind, number))
    try:
        value = float(number)
    except ValueError:
        raise refusal("loss_scale", repr(number), "a power of two, none, per_example") from None
    return LossScale("static", value)
