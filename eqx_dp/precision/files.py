"""Policies in TOML files: one file a policy, and the presets that come with the package."""

import difflib
import os
import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np

from .policy import DTYPE_KEYS, LOSS_SCALE_KINDS, MATMUL_PRECISIONS, LossScale, ModuleRule, Policy
from .refusals import float_dtype, one_of, refusal, refusals_name

T = TypeVar("T")

_SUFFIX = ".toml"


def load_policy(name_or_path: str | os.PathLike[str]) -> Policy:
    """Reads a policy from a preset or a TOML file.

    | entry | holds |
    |---|---|
    | `description` | text, optional |
    | `unsafe` | true or false, optional |
    | `matmul_precision` | "default", "tensorfloat32" or "highest", optional |
    | `[dtypes]` | `params`, `compute`, `output`, `accumulate`, `noise`: all five, by full name |
    | `[loss_scale]` | `kind`: "none", "static" with its `value`, or "per_example"; optional |
    | `[[modules]]` | `match` and `compute`, as often as there are rules; optional |

    Args:
        name_or_path: The name of a preset (see `available_policies`), or the path of a file. A
            path is a path object, or a text that holds a directory separator or ends in `.toml`.

    Returns:
        The policy; its `name` is the preset's name or the path.

    Raises:
        ValueError: If there is no such preset or file; if the file is not TOML in UTF-8; if a table
            or key is unknown or missing; if a value has the wrong type or is not allowed; or if
            `Policy` raises an error. The message names the file and the key, and says what was
            found and what is allowed.
    """
    name = os.fspath(name_or_path)
    source = _preset(name) if _is_preset_name(name_or_path) else Path(name)
    with refusals_name(str(source)):
        return _policy(_read(source), name)


def available_policies() -> tuple[str, ...]:
    """Returns the names of the presets, sorted."""
    return tuple(sorted(_presets()))


# Where the files are.


def _presets() -> dict[str, Traversable]:
    # The wheel carries the folder inside the package; in a checkout it stands beside the package.
    folder = files("eqx_dp") / "policies"
    if not folder.is_dir():
        folder = Path(__file__).parents[2] / "policies"
    return {
        entry.name.removesuffix(_SUFFIX): entry
        for entry in folder.iterdir()
        if entry.name.endswith(_SUFFIX)
    }


def _is_preset_name(name_or_path: str | os.PathLike[str]) -> bool:
    if not isinstance(name_or_path, str) or name_or_path.endswith(_SUFFIX):
        return False
    return not any(separator in name_or_path for separator in (os.sep, os.altsep) if separator)


def _preset(name: str) -> Traversable:
    presets = _presets()
    if name not in presets:
        nearest = difflib.get_close_matches(name.lower(), sorted(presets), n=1, cutoff=0)
        raise ValueError(
            f"policy preset: found {name!r}; allowed: {', '.join(sorted(presets))} (the nearest is "
            f"{nearest[0]!r}), or the path of a {_SUFFIX} file"
        )
    return presets[name]


def _read(source: Traversable) -> dict[str, object]:
    try:
        return tomllib.loads(source.read_bytes().decode("utf-8"))
    except OSError as error:
        raise refusal("file", f"nothing to read ({error.strerror})", "a TOML file") from None
    except ValueError as error:  # of tomllib and of the UTF-8 decoder
        raise refusal("file", f"no TOML ({error})", "a TOML file in UTF-8") from None


# What they say.


def _policy(content: dict[str, object], name: str) -> Policy:
    keys = ("description", "unsafe", "matmul_precision", "dtypes", "loss_scale", "modules")
    top = _Table("", content, keys)
    dtypes = top.table("dtypes", DTYPE_KEYS)
    precision = top.get("matmul_precision", str, "default")
    return Policy(
        *map(dtypes.dtype, DTYPE_KEYS),
        modules=[_module_rule(rule) for rule in top.tables("modules", ("match", "compute"))],
        loss_scale=_loss_scale(top),
        matmul_precision=one_of("matmul_precision", precision, MATMUL_PRECISIONS),
        unsafe=top.get("unsafe", bool, False),
        name=name,
        description=top.get("description", str, ""),
    )


def _module_rule(rule: "_Table") -> ModuleRule:
    match, compute = rule.get("match", str), rule.dtype("compute")
    with refusals_name(rule.name):
        return ModuleRule(match, compute)


def _loss_scale(top: "_Table") -> LossScale:
    if "loss_scale" not in top:
        return LossScale()
    scale = top.table("loss_scale", ("kind", "value"))
    kind = one_of("loss_scale.kind", scale.get("kind", str), LOSS_SCALE_KINDS)
    return LossScale(kind, scale.get("value", float, None if kind == "static" else 1.0))


class _Table:
    """One table of the file: hands out entries by key and type, and refuses in its own name."""

    def __init__(self, name: str, content: dict[str, object], keys: tuple[str, ...]):
        self.name = name
        self._content = content
        for key, value in content.items():
            if key not in keys:
                what = "an unknown table" if _is_table(value) else "an unknown key"
                raise refusal(self._path(key), what, ", ".join(keys))

    def __contains__(self, key: str) -> bool:
        return key in self._content

    def get(self, key: str, kind: type[T], default: T | None = None) -> T:
        """Returns the entry, or `default`; without a default the entry must be there."""
        if key not in self and default is not None:
            return default
        return cast(T, self._entry(key, kind))

    def dtype(self, key: str) -> np.dtype[Any]:
        return float_dtype(self._path(key), self.get(key, str))

    def table(self, key: str, keys: tuple[str, ...]) -> "_Table":
        return _Table(self._path(key), cast(dict[str, object], self._entry(key, dict)), keys)

    def tables(self, key: str, keys: tuple[str, ...]) -> "list[_Table]":
        if key not in self:
            return []
        found: list[_Table] = []
        for index, entry in enumerate(cast(list[object], self._entry(key, list))):
            name = f"{self._path(key)}[{index}]"
            if not isinstance(entry, dict):
                raise refusal(name, repr(entry), "a table")
            found.append(_Table(name, cast(dict[str, object], entry), keys))
        return found

    def _entry(self, key: str, kind: type) -> object:
        if key not in self:
            raise refusal(self._path(key), "nothing", f"{_TOML_TYPES[kind]}, which is required")
        value = self._content[key]
        fits = isinstance(value, (int, float) if kind is float else kind)
        # To Python a boolean is a number, to TOML it is not.
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise refusal(self._path(key), repr(value), _TOML_TYPES[kind])
        return value

    def _path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


_TOML_TYPES = {
    str: "a string",
    bool: "true, false",
    float: "a number",
    dict: "a table",
    list: "an array of tables",
}


def _is_table(value: object) -> bool:
    return isinstance(value, dict) or (
        isinstance(value, list) and all(isinstance(v, dict) for v in cast(list[object], value))
    )
