"""Policies as a line of text: jmp's grammar, and as much more as a policy has more to say."""

from typing import Any, cast

import jax.numpy as jnp
import jmp
import numpy as np

from .policy import DTYPE_KEYS, MATMUL_PRECISIONS, LossScale, LossScaleKind, ModuleRule, Policy
from .refusals import DTYPES, one_of, refusal, refusals_name

# jmp's names of dtypes; "half" depends on the backend and is asked of jmp.
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_DTYPE_NAMES = DTYPES | {short: DTYPES[name] for short, name in _SHORT.items()}
_DTYPE_NAMES["full"] = DTYPES["float32"]
_SHORT_KEYS = {key[0]: key for key in DTYPE_KEYS}
_SETTINGS = ("loss_scale", "matmul_precision", "unsafe")
_MODULE = "module:"


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
        if key not in (*DTYPE_KEYS, *_SETTINGS) and not key.startswith(_MODULE):
            dtypes = [f"{full} ({short})" for short, full in _SHORT_KEYS.items()]
            raise refusal("key", repr(key), ", ".join([*dtypes, *_SETTINGS, f"{_MODULE}PATTERN"]))
        if key in parts:
            raise refusal(key, f"a second value, {value!r}", "each key once")
        parts[key] = value
    return parts


def _policy_of(parts: dict[str, str]) -> Policy:
    dtypes = {key: _named_dtype(key, parts[key]) for key in DTYPE_KEYS if key in parts}
    params = dtypes.get("params", DTYPES["float32"])
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
