"""What a policy file may hold, as one table: files and JSON are read by it, the schema says it."""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from .loss_scale import LOSS_SCALE_KINDS, LossScale
from .matmul import MATMUL_DTYPES, MODULE_MATMULS, SCALINGS, Matmul, checked_scaling
from .module_rule import ModuleRule
from .policy import (
    DTYPE_KEYS,
    MATMUL_PRECISIONS,
    OPTIMIZER,
    ROUNDINGS,
    Content,
    Policy,
)
from .refusals import DTYPES, float_dtype, one_of, refusal, refusals_name

EXTENDS = "extends"
_CONSENTS = ("unsafe", "narrow_optimizer")


class Entry(NamedTuple):
    """One entry of a table.

    Attributes:
        told: what it says, for people.
        kind: str, bool, float (any number), dict (a table), list (tables), or np.dtype, by name.
        values: of a text, where not every one is allowed.
        entries: of a table, or of each of several.
        check: refuses a value that is not allowed, where there is more to say than which are.
        required: "here" in every such table; or "in the end", which is in the file or in one that
            it extends.
    """

    told: str
    kind: type = str
    values: tuple[str, ...] = ()
    entries: "Mapping[str, Entry] | None" = None
    required: Literal["", "here", "in the end"] = ""
    check: Callable[[object], object] | None = None


_STAGES = {
    "params": "how parameters are stored",
    "compute": "forward and backward: what parameters and float inputs are cast to",
    "output": "the loss",
    "accumulate": "norms, clip factors, sums over examples and devices; float32 or wider",
    "noise": "the Gaussian, and what it is added in; float32 or wider",
    OPTIMIZER: "how the optimizer's state is stored; accumulate by default",
}

ENTRIES: dict[str, Entry] = {
    "description": Entry("what the policy is for, in a line"),
    EXTENDS: Entry(
        "a preset, or a file (its path starts at this file's folder), whose entries hold where "
        "this file says nothing"
    ),
    "unsafe": Entry(
        "allows sums and noise narrower than float32: the privacy guarantee does not hold; not "
        "inherited",
        bool,
    ),
    "narrow_optimizer": Entry(
        "allows optimizer state narrower than float32: costs no privacy; not inherited", bool
    ),
    "matmul_precision": Entry("as jax.default_matmul_precision", values=MATMUL_PRECISIONS),
    "dtypes": Entry(
        "the dtype of every stage",
        dict,
        entries={
            key: Entry(told, np.dtype, required="in the end" if key in DTYPE_KEYS else "")
            for key, told in _STAGES.items()
        },
        required="in the end",
    ),
    "params": Entry(
        "how stored parameters are updated",
        dict,
        entries={"rounding": Entry("of the updated parameter, when stored", values=ROUNDINGS)},
    ),
    "loss_scale": Entry(
        "a factor of the loss for the backward pass; replaces an inherited one as a whole",
        dict,
        entries={
            "kind": Entry("how it is chosen", values=LOSS_SCALE_KINDS, required="here"),
            "value": Entry("of a static scale: a power of two", float),
        },
    ),
    "matmul": Entry(
        "what matrix products are multiplied in; replaces an inherited one as a whole",
        dict,
        entries={
            "forward": Entry(
                "operands of contractions and convolutions",
                values=tuple(MATMUL_DTYPES),
                required="here",
            ),
            "backward": Entry(
                "the cotangent, in their derivatives; as forward by default",
                values=tuple(MATMUL_DTYPES),
            ),
            "scaling": Entry(
                "of each operand, by a power of two from that operand of one example alone",
                values=SCALINGS,
                check=checked_scaling,
            ),
        },
    ),
    "modules": Entry(
        "rules for modules, the first match wins; in front of inherited ones",
        list,
        entries={
            "match": Entry("a path in the model's tree, or a class name", required="here"),
            "compute": Entry("their compute dtype; the policy's where matmul is given", np.dtype),
            "matmul": Entry("keeps their products in the compute dtype", values=MODULE_MATMULS),
            "optional": Entry("whether the rule may match nothing", bool),
        },
    ),
}


def checked_content(content: Content) -> Content:
    """Refuses what is unknown, missing, of the wrong type, or no allowed value."""
    _check_table("", content, ENTRIES, is_whole=EXTENDS not in content)
    return content


def policy_of(content: Content, name: str | None = None) -> Policy:
    """The policy of a file's content, checked and with all that it inherits."""
    table = cast("dict[str, Any]", checked_content(content))
    rules: list[ModuleRule] = []
    scale, dtypes = table.get("loss_scale", {"kind": "none"}), table["dtypes"]
    for index, rule in enumerate(table.get("modules", ())):
        at, matmul = f"modules[{index}]", rule.get("matmul")
        if "compute" not in rule and matmul is None:
            entry = (ENTRIES["modules"].entries or {})["compute"]
            more = ', which is required without matmul = "wide"'
            raise refusal(f"{at}.compute", "nothing", _allowed(entry, more))
        compute = rule.get("compute", dtypes["compute"])
        with refusals_name(at):
            rules.append(ModuleRule(rule["match"], compute, matmul, rule.get("optional", False)))
    if scale["kind"] == "static" and "value" not in scale:
        raise refusal("loss_scale.value", "nothing", f"{_TOLD[float]}, which is required")
    return Policy(
        *(dtypes[key] for key in DTYPE_KEYS),
        modules=rules,
        loss_scale=LossScale(scale["kind"], scale.get("value", 1.0)),
        matmul_precision=table.get("matmul_precision", "default"),
        unsafe=table.get("unsafe", False),
        optimizer_dtype=dtypes.get(OPTIMIZER),
        rounding=table.get("params", {}).get("rounding", "nearest"),
        narrow_optimizer=table.get("narrow_optimizer", False),
        matmul=Matmul(**table["matmul"]) if "matmul" in table else None,
        name=name,
        description=table.get("description", ""),
    )


def merged(base: Content, content: Content) -> Content:
    """A file's content on top of that of the file that it extends: see `load_policy`."""
    result = {key: base[key] for key in base if key not in (*_CONSENTS, "description")}
    for key, value in content.items():
        if key == "modules":
            own = cast("list[Content]", value)
            told = {rule["match"] for rule in own}
            inherited = cast("list[Content]", base.get(key, []))
            value = [*own, *(rule for rule in inherited if rule["match"] not in told)]
        elif ENTRIES[key].kind is dict and key not in ("loss_scale", "matmul"):
            value = {**cast(Content, base.get(key, {})), **cast(Content, value)}
        result[key] = value
    result.pop(EXTENDS, None)
    return result


# One table against its entries.

_TOLD = {
    str: "a string",
    np.dtype: "a string",
    bool: "true, false",
    float: "a number",
    dict: "a table",
    list: "an array of tables",
}


def _check_table(name: str, content: Content, entries: Mapping[str, Entry], is_whole: bool) -> None:
    for key, value in content.items():
        if key not in entries:
            what = "an unknown table" if _is_table(value) else "an unknown key"
            raise refusal(_path(name, key), what, ", ".join(entries))
    for key, entry in entries.items():
        path = _path(name, key)
        if key in content:
            _check_entry(path, content[key], entry, is_whole)
        elif entry.required == "here" or (entry.required and is_whole):
            raise refusal(path, "nothing", _allowed(entry, ", which is required"))


def _allowed(entry: Entry, more: str = "") -> str:
    values = tuple(DTYPES) if entry.kind is np.dtype else entry.values
    return f"{_TOLD[entry.kind]}{more}{': ' if values else ''}{', '.join(values)}"


def _check_entry(path: str, value: object, entry: Entry, is_whole: bool) -> None:
    kinds = {float: (int, float), np.dtype: (str,)}.get(entry.kind, (entry.kind,))
    # To Python a boolean is a number, to TOML it is not.
    if not isinstance(value, kinds) or (isinstance(value, bool) and entry.kind is not bool):
        raise refusal(path, repr(value), _allowed(entry))
    if entry.kind is np.dtype:
        float_dtype(path, value)
    elif entry.check is not None:
        entry.check(value)
    elif entry.values:
        one_of(path, value, entry.values)
    tables = {path: value}
    if isinstance(value, list):
        tables = {f"{path}[{i}]": table for i, table in enumerate(cast("list[object]", value))}
    for at, table in tables.items() if entry.entries is not None else ():
        if not isinstance(table, dict):
            raise refusal(at, repr(table), "a table")
        _check_table(at, cast(Content, table), entry.entries or {}, is_whole)


def _path(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and all(isinstance(v, dict) for v in cast("list[object]", value))
    )
