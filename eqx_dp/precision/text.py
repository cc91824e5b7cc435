"""Policies as a line of text: jmp's grammar, with more keys."""

import re
from typing import Any

import jmp
import numpy as np

from ..expected import expect
from .content import policy_of
from .policy import DTYPE_KEYS, OPTIMIZER, Policy
from .refusals import DTYPES, float_dtype, refusal, refusals_name
from .schema import Content

# jmp's names of dtypes; "half" depends on the backend and is asked of jmp.
_NAMES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "f64": "float64"}
_NAMES["full"] = _NAMES["f32"]
_SHORT_KEYS = {key[0]: key for key in DTYPE_KEYS}
_DTYPES = (*DTYPE_KEYS, OPTIMIZER)
_SETTINGS = ("rounding", "loss_scale", "matmul_precision", "matmul", "unsafe", "narrow_optimizer")
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
    | `optimizer` | a dtype | that of accumulate |
    | `rounding` | `nearest` or `stochastic` | `nearest` |
    | `loss_scale` | `none`, or a power of two | `none` |
    | `matmul_precision` | `default`, `tensorfloat32` or `highest` | `default` |
    | `matmul` | `FORWARD:BACKWARD:SCALING` (the last two optional); or `none` | `none` |
    | `unsafe`, `narrow_optimizer` | `true` or `false` | `false` |
    | `module:PATTERN`, any number of times | a dtype, and `:wide`, `:optional`, `:params=DTYPE` \
behind it | |

    Args:
        text: The policy. Dtypes have jmp's names: bfloat16 (bf16), float16 (f16), float32 (f32,
            full), float64 (f64), or half, which is bfloat16 on a TPU and float16 elsewhere.

    Returns:
        The policy, without a name. `Policy` says when there is a warning.

    Raises:
        ValueError: If a part is empty or not `key=value`, a key is unknown or given twice, a value
            is not allowed, or `Policy` raises an error. The message holds the text.
    """
    expect("text", text, str, "a text such as 'params=float32,compute=bfloat16'")
    with refusals_name(f"policy {text!r}"):
        if "=" not in text and _named(text.strip()) not in DTYPES:
            allowed = ", ".join([*DTYPES, *_NAMES, "half"])
            raise refusal("dtype", repr(text), f"{allowed}; KEY=VALUE,...; presets: load_policy")
        parts = _split(text) if "=" in text else {"params": text.strip()}
        return policy_of(_content_of(parts), is_whole=False)


def _named(name: str) -> str:
    """The full name of a dtype; other names stay, and are refused later."""
    return str(np.dtype(jmp.half_dtype())) if name == "half" else _NAMES.get(name, name)


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


def _content_of(parts: dict[str, str]) -> Content:
    """The same as the tables of a policy file, which are then checked."""
    dtypes = {key: _named(parts[key]) for key in _DTYPES if key in parts}
    dtypes.setdefault("params", "float32")
    dtypes.setdefault("compute", dtypes["params"])
    dtypes.setdefault("output", dtypes["compute"])
    content: Content = {"dtypes": dtypes, "modules": []}
    for key, value in parts.items():
        if key.startswith(_MODULE):
            content["modules"].append(_rule(key, value))
        elif key == "rounding":
            content["params"] = {"rounding": value}
        elif key == "loss_scale" and value != "none":
            content[key] = {"kind": "static", "value": _value(value)}
        elif key == "matmul" and value != "none":
            names = ("forward", "backward", "scaling", "more")
            content[key] = {n: _named(x) for n, x in zip(names, value.split(":"), strict=False)}
        elif key in ("matmul_precision", "unsafe", "narrow_optimizer"):
            content[key] = _value(value)
    return content


def _value(text: str) -> str | bool | float:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def _rule(key: str, value: str) -> dict[str, Any]:
    """A module rule from `DTYPE`, and behind it `:wide`, `:optional`, `:params=DTYPE`."""
    form = re.fullmatch(r"([^:]*)(:wide)?(:optional)?(?::params=([^:]*))?", value)
    if form is None:
        raise refusal(key, repr(value), "DTYPE, and behind it :wide, :optional, :params=DTYPE")
    compute, wide, optional, params = form.groups()
    rule: dict[str, Any] = {"match": key.removeprefix(_MODULE), "optional": optional is not None}
    dtypes = {"compute": compute, "params": params}
    rule |= {k: str(float_dtype(key, _named(x))) for k, x in dtypes.items() if x is not None}
    return rule if wide is None else rule | {"matmul": "wide"}
