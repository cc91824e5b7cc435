"""The file in which audits are kept, for `eqx-dp report`."""

from pathlib import Path
from typing import Any

import jax

from ..files import finite_or_none, read_json, write_json

AUDIT = "audit.json"


def save_audit(path: str | Path, found: dict[str, dict[str, Any]]) -> None:
    """Writes the result of an audit into a JSON file; its other content stays.

    Args:
        path: the file, or the directory of a run: then `audit.json` in it.
        found: objects by name; numbers that are not finite become null. Under "canaries" there is
            one for each attack.

    Raises:
        ValueError: there is such a file, and it holds no JSON object, or none at "canaries".
    """
    file = Path(path) / AUDIT if Path(path).is_dir() else Path(path)
    before = read_json(file) if file.exists() else {}
    if "canaries" in found:
        attacks = before.get("canaries") or {}
        if not isinstance(attacks, dict):
            raise ValueError(f"{file} must hold an object at 'canaries'. Name another file.")
        found = found | {"canaries": attacks | found["canaries"]}
    write_json(file, before | jax.tree.map(finite_or_none, found))
