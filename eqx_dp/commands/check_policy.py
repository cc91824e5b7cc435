"""A policy file held against the model that it is for, without allocating it."""

import contextlib
import importlib
import sys
from collections.abc import Callable, Generator
from typing import Any, cast

import equinox as eqx
import jax
import numpy as np

from ..planning import Description, describe
from ..precision import dtypes_of, load_policy, refusal, refusals_name

_ALLOWED = "MODULE:FUNCTION, a function without arguments that returns a model"


def checked(file: str, model: str) -> Description:
    """Reads a policy, and tries its rules on the shapes of a model.

    Args:
        file: a preset, or the path of a file.
        model: `module:function`; modules are found in the working folder as well.

    Raises:
        ValueError: the policy is refused, or a rule has no effect on the model; there is no such
            function, or it does not return a model.
    """
    with jax.enable_x64(True):  # a policy may be looked at without the means to run it
        policy = load_policy(file)
    make = _function(model)
    dtypes = [*dtypes_of(policy).values(), *(rule.compute_dtype for rule in policy.modules)]
    with jax.enable_x64(np.dtype("float64") in dtypes or bool(jax.config.read("jax_enable_x64"))):
        shapes = eqx.filter_eval_shape(make)
        if not jax.tree.leaves(eqx.filter(shapes, lambda x: isinstance(x, jax.ShapeDtypeStruct))):
            found = f"{model!r}, which returns a {type(shapes).__name__} without arrays"
            raise refusal("--model", found, _ALLOWED)
        with refusals_name(file):
            return describe(shapes, policy)


def _function(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    if not module or not function:
        raise refusal("--model", repr(name), _ALLOWED)
    try:
        with _working_folder_on_path():
            found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise refusal("--model", f"{name!r} ({error})", _ALLOWED) from None
    if not callable(found):
        raise refusal("--model", f"{name!r}, a {type(found).__name__}", _ALLOWED)
    return cast(Callable[[], Any], found)


@contextlib.contextmanager
def _working_folder_on_path() -> Generator[None]:
    """As `python -m` has it; a console script has its own folder there."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
