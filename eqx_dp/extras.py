"""Libraries of extras, imported only where they are used."""

import importlib
from typing import Any


class MissingExtra(ImportError):
    """A library of an extra is not installed."""


def extra(module: str, *, name: str = "train", instead: str = "") -> Any:
    """Imports a module of an extra; `instead` names the alternative, for the error.

    Raises:
        MissingExtra: it is not installed; the error says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(
            f"{module.partition('.')[0]} is not installed, and this needs it: python -m pip "
            f"install 'eqx-dp[{name}]'{instead}"
        ) from None
