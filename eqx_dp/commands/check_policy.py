"""A policy file held against the model that it is for, without allocating it."""

import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Generator
from typing import Any, cast

import equinox as eqx
import jax
import numpy as np

from ..precision import Policy, agreed_policy, dtypes_of, load_policy, refusal, refusals_name
from ..trees import is_shape

_ALLOWED = "MODULE:FUNCTION, a function without arguments that returns a model"


def checked(file: str, model: str) -> Policy:
    """Reads a policy, and tries its rules on the shapes of a model.

    The model is given as `module:function`; modules are found in the working folder as well.

    Raises:
        ValueError: the policy is refused, or a rule has no effect on the model; there is no such
            function, it takes arguments, looks at values, or does not return a model.
    """
    with jax.enable_x64(True):  # a policy may be looked at without the means to run it
        policy = load_policy(file)
    make = _function(model)
    dtypes = [*dtypes_of(policy).values(), *(rule.compute_dtype for rule in policy.modules)]
    with jax.enable_x64(np.dtype("float64") in dtypes or bool(jax.config.read("jax_enable_x64"))):
        shapes = _shapes(make, model)
        if not jax.tree.leaves(eqx.filter(shapes, is_shape)):
            found = f"{model!r}, which returns a {type(shapes).__name__} without arrays"
            raise refusal("--model", found, _ALLOWED)
        with refusals_name(file):
            agreed_policy(shapes, policy)
            return policy


def _shapes(make: Callable[[], Any], name: str) -> Any:
    """What a function makes, in shapes. Errors that are its own keep their traceback."""
    try:
        with refusals_name(f"--model {name}"):
            return eqx.filter_eval_shape(make)
    except jax.errors.ConcretizationTypeError as error:
        found = f"{name!r}, which looks at values of arrays ({str(error).splitlines()[0]})"
        raise refusal("--model", found, f"{_ALLOWED} by shapes alone") from None


def _function(name: str) -> Callable[[], Any]:
    module, _, function = name.partition(":")
    if not module or not function:
        raise refusal("--model", repr(name), _ALLOWED)
    try:
        with _working_folder_on_path():
            found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, TypeError) as error:  # the last of relative names
        raise refusal("--model", f"{name!r} ({error})", _ALLOWED) from None
    if not callable(found):
        raise refusal("--model", f"{name!r}, a {type(found).__name__}", _ALLOWED)
    if needed := _needed(found):
        raise refusal("--model", f"{name!r}, which needs {', '.join(needed)}", _ALLOWED)
    return cast(Callable[[], Any], found)


def _needed(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function cannot be called without."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some that are written in C have none
        return []
    kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


@contextlib.contextmanager
def _working_folder_on_path() -> Generator[None]:
    """As `python -m` has it; a console script has its own folder there."""
    sys.path.insert(0, "")
    try:
        yield
    finally:
        sys.path.remove("")
