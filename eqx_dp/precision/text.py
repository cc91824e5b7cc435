"""Policies as a line of text: jmp's grammar, and as much more as a policy has more to say."""

import json
from typing import Any, cast

import jax.numpy as jnp
import jmp
import numpy as np

from ..expected import expect
from .content import EXTENDS, policy_of
from .loss_scale import LossScale
from .matmul import MODULE_MATMULS, read_matmul
from .module_rule import ModuleRule
from .policy import (
    DTYPE_KEYS,
    MATMUL_PRECISIONS,
    OPTIMIZER,
    ROUNDINGS,
    Content,
    Policy,
)
from .refusals import DTYPES, one_of, refusal, refusals_name, why_not

# jmp's names of dtypes; "half" depends on the backend and is asked of jmp.
_SHORT = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_DTYPE_NAMES = DTYPES | {short: DTYPES[name] for short, name in _SHORT.items()}
_DTYPE_NAMES["full"] = DTYPES["float32"]
_SHORT_KEYS = {key[0]: key for key in DTYPE_KEYS}
_DTYPES = (*DTYPE_KEYS, OPTIMIZER)
_SETTINGS = ("rounding", "loss_scale", "matmul_precision", "matmul", "unsafe", "narrow_optimizer")
_MODULE = "module:"


def parse_policy(text: str) -> Policy:
    """Reads a policy from a line of text, in jmp's grammar and a little more, or from JSON.

    The text is either one dtype for params, compute and output (`bfloat16`, `half`), or
    `key=value` parts separated by commas (`p=f32,c=bf16`). The first three keys and their defaults
    are jmp's. A text that starts with a brace is JSON, as `Policy.to_json` writes it: an object
    with the entries of a policy file, without `extends`.

    | key | value | default |
    |---|---|---|
    | `params` (`p`) | a dtype | float32 |
    | `compute` (`c`) | a dtype | that of params |
    | `output` (`o`) | a dtype | that of compute |
    | `accumulate` (`a`) | a dtype | the wider of float32 and compute |
    | `noise` (`n`) | a dtype | the wider of float32 and accumulate |
    | `optimizer` | a dtype | that of accumulate |
    | `rounding` | `nearest` or `stochastic` | `nearest` |
    | `loss_scale` | `none`, or a power of two | `none` |
    | `matmul_precision` | `default`, `tensorfloat32` or `highest` | `default` |
    | `matmul` | `FORWARD:BACKWARD:SCALING` (the last two optional); or `none` | `none` |
    | `unsafe`, `narrow_optimizer` | `true` or `false` | `false` |
    | `module:PATTERN`, any number of times | a dtype, and `:wide`, `:optional` behind it | |

    Args:
        text: The policy. Dtypes have jmp's names: bfloat16 (bf16), float16 (f16), float32 (f32,
            full), float64 (f64), or half, which is bfloat16 on a TPU and float16 elsewhere.

    Returns:
        The policy, without a name.

    Raises:
        ValueError: If a part is empty or not `key=value`, a key is unknown or given twice, a value
            is not allowed, or `Policy` raises an error; or if the text is not JSON. The message
            holds the text, or says that it is JSON.
    """
    expect("text", text, str, "a text such as 'params=float32,compute=bfloat16'")
    if text.lstrip().startswith("{"):
        with refusals_name("policy in JSON"):
            return policy_of(_of_json(text))
    with refusals_name(f"policy {text!r}"):
        if "=" not in text:
            dtype = _named_dtype("dtype", text.strip())
            return Policy(dtype, dtype, dtype)
        return _policy_of(_split(text))


def _of_json(text: str) -> Content:
    def once(pairs: list[tuple[str, object]]) -> Content:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise refusal(key, "a second value", "each key once")
        return dict(pairs)

    try:
        content = cast(Content, json.loads(text, object_pairs_hook=once))
    except json.JSONDecodeError as error:
        raise refusal("text", f"no JSON ({error})", "an object in JSON") from None
    if EXTENDS in content:
        allowed = "nothing: a text has no folder; load_policy reads files that extend others"
        raise refusal(EXTENDS, repr(content[EXTENDS]), allowed)
    return content


def _split(text: str) -> dict[str, str]:
    parts: dict[str, str] = {}
    for part in text.split(","):
        key, _, value = (piece.strip() for piece in part.partition("="))
        if not key or not value:
            raise refusal("part", repr(part), "key=value parts with commas between them")
        key = _SHORT_KEYS.get(key, key)
        if key not in (*_DTYPES, *_SETTINGS) and not key.startswith(_MODULE):
            dtypes = [f"{full} ({short})" for short, full in _SHORT_KEYS.items()]
            keys = [*dtypes, OPTIMIZER, *_SETTINGS, f"{_MODULE}PATTERN"]
            raise refusal("key", repr(key), ", ".join(keys))
        if key in parts:
            raise refusal(key, f"a second value, {value!r}", "each key once")
        parts[key] = value
    return parts


def _policy_of(parts: dict[str, str]) -> Policy:
    dtypes = {key: _named_dtype(key, parts[key]) for key in _DTYPES if key in parts}
    params = dtypes.get("params", DTYPES["float32"])
    compute = dtypes.get("compute", params)
    rules = [_module_rule(key, value) for key, value in parts.items() if key.startswith(_MODULE)]
    unsafe, narrow_optimizer = (
        one_of(key, parts.get(key, "false"), ("true", "false")) == "true"
        for key in ("unsafe", "narrow_optimizer")
    )
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
        unsafe=unsafe,
        optimizer_dtype=dtypes.get(OPTIMIZER),
        rounding=one_of("rounding", parts.get("rounding", "nearest"), ROUNDINGS),
        narrow_optimizer=narrow_optimizer,
        matmul=read_matmul(parts["matmul"], _dtype_or_name) if "matmul" in parts else None,
    )


def _module_rule(key: str, value: str) -> ModuleRule:
    """A module rule from `DTYPE`, `DTYPE:wide`, `DTYPE:optional` or `DTYPE:wide:optional`."""
    name, *more = value.split(":")
    optional = more[-1:] == ["optional"]
    wide = [one_of(key, one, (*MODULE_MATMULS, "optional")) for one in more[: len(more) - optional]]
    if len(wide) > 1 or "optional" in wide:
        raise refusal(key, repr(value), "DTYPE, and behind it :wide, :optional or :wide:optional")
    matmul = MODULE_MATMULS[0] if wide else None
    return ModuleRule(key.removeprefix(_MODULE), _named_dtype(key, name), matmul, optional)


def _dtype_or_name(key: str, name: str) -> Any:
    """A dtype by jmp's name of it; any other name as it is."""
    del key
    return jnp.dtype(jmp.half_dtype()) if name == "half" else _DTYPE_NAMES.get(name, name)


def _named_dtype(key: str, name: str) -> np.dtype[Any]:
    if name == "half":
        return jnp.dtype(jmp.half_dtype())
    if name not in _DTYPE_NAMES:
        found = f"{name!r}{why_not(key, name)}"
        raise refusal(key, found, ", ".join(sorted([*_DTYPE_NAMES, "half"])))
    return _DTYPE_NAMES[name]


def _loss_scale(number: str) -> LossScale:
    if number == "none":
        return LossScale()
    try:
        value = float(number)
    except ValueError:
        raise refusal("loss_scale", repr(number), "a power of two, none") from None
    return LossScale("static", value)
