"""Models that keep to their policy by themselves: every module casts what enters and leaves it.

A module is given a class made from its own, with its fields and its name, in which public methods
cast. So whatever looks at fields, paths, leaves or isinstance sees the model that was there before,
and equal policies give equal tree structures.
"""

import dataclasses
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar, cast

import equinox as eqx
import jax
import numpy as np

from ..trees import PyTree
from .module_rule import ModuleRule
from .modules import (
    Governed,
    Matched,
    cast_leaf,
    check_rules,
    matmul_precision,
    rebuild,
    rules_of,
)
from .policy import MatmulPrecision, Policy, cast_floats, checked_policy
from .stages import governed_by

T = TypeVar("T")


def apply_policy(model: T, policy: Policy | None) -> T:
    """Pairs a model with its policy, for any use: inference, training without privacy, the engine.

    A call of the model, or of a public method of it, casts its parameters and float inputs to the
    compute dtype and its float outputs to the output dtype. Matrix products run in the policy's
    `matmul_precision`. A call of a module inside the model (from a loss that uses the parts of the
    model one by one) casts in the same way, and its outputs have the dtype that is in force around
    that module. If a rule matches a module, its parameters and float inputs are cast to the rule's
    dtype, and its float outputs are cast back to the dtype around it. `eqx.nn.State` and arrays
    that are not floating-point are not cast.

    The leaves do not change. Attributes, paths, `isinstance`, `eqx.tree_at`, `eqx.partition`,
    serialisation and pickling work as before. A leaf that is read (`model.weight`) has its storage
    dtype (see `policy.cast_to_param`), because only a call casts. Properties, and methods whose
    names start with an underscore (except `__call__`), do not cast when they are used from outside.
    The rules also apply to modules that `eqx.tree_at` puts in later.

    Args:
        model: An `eqx.Module`.
        policy: The policy to pair it with; None takes the policy off again.

    Returns:
        The model, with the same leaves; the given model itself if nothing changes. Two models of
        one structure that are paired with equal policies have equal structures.

    Raises:
        ValueError: If the model is not an `eqx.Module`, is paired with another policy, or holds a
            module that is paired with a policy of its own; if a rule matches no module of the
            model, or only modules that an earlier rule matches. At a call: if a method returns a
            module of the model's own class, because its parameters would be the cast ones.
    """
    policy = checked_policy(policy)
    if not isinstance(model, eqx.Module):
        raise ValueError(
            f"model is a {type(model).__name__}: only an eqx.Module can be paired with a policy, "
            "because its methods do the casting. Pair the modules in it one by one, or give the "
            "policy to the engine (filter_clipped_grad(..., policy=policy)), which takes any tree."
        )
    if policy is None:
        paired = rebuild(model, _ANY, on_module=lambda module, _: _as_class(module, None))
    else:
        agreed_policy(model, policy)
        paired = _paired(model, policy)
    same = jax.tree.structure(paired) == jax.tree.structure(model)
    return model if same else cast(T, paired)


def agreed_policy(model: PyTree[Any], policy: Policy | None) -> Policy | None:
    """The policy of a paired model, or the one that was given beside it.

    Raises:
        ValueError: Both are there and differ; a module inside the model is paired on its own; a
            part of a paired model comes without the policy; a rule has no effect on the model.
    """
    found: list[tuple[str, Casts]] = []

    def collect(path: str, module: eqx.Module) -> None:
        casts = _casts_of(module)
        if casts is not None:
            found.append((path, casts))

    rebuild(model, _ANY, collect)
    for path, casts in found:
        if casts.policy is not None and path:
            raise ValueError(
                f"model.{path} is paired with a policy of its own ({casts.policy}), and the model "
                f"around it is not. Take it off with {_TAKE_OFF}, and pair the whole model."
            )
    own = next((casts.policy for path, casts in found if not path), None)
    if own is not None and policy is not None and own != policy:
        raise ValueError(
            f"Two policies: the model is paired with {_named(own)}, and {_named(policy)} was given "
            f"beside it. Give one of them, or take the model's off with {_TAKE_OFF}."
        )
    if found and own is None and policy is None:
        where = found[0][0] and f".{found[0][0]}"
        raise ValueError(
            f"model{where} is a part of a paired model and does not know the whole policy. Give "
            f"the policy as well, or take it off with {_TAKE_OFF}."
        )
    policy = policy if own is None else own
    if policy is not None:
        check_rules(model, policy)
    return policy


_TAKE_OFF = "apply_policy(model, None)"


def _named(policy: Policy) -> str:
    return f"{policy.name} ({policy})" if policy.name else str(policy)


def inside_engine(model: T, policy: Policy) -> T:
    """The model for a loss whose parameters, inputs and result the engine casts itself.

    Only modules that rules match cast by themselves; the rest is as if it had never been paired.
    """
    precision, compute = policy.matmul_precision, policy.compute_dtype
    return _entered(model, compute, rules_of(policy), precision, compute)


# What a module of a paired model casts.


class Casts(NamedTuple):
    """What the methods of a module cast. Equal ones give equal tree structures.

    Attributes:
        compute: what parameters and float inputs enter in.
        outputs: what float outputs leave in.
        rule: the rule that matched the module, or None.
        governing: the rule that gave `compute`, or None where the policy did.
        precision: of matrix products.
        policy: the policy of the whole, at the root of a paired model; else None.
    """

    compute: np.dtype[Any]
    outputs: np.dtype[Any]
    rule: ModuleRule | None
    governing: ModuleRule | None
    precision: MatmulPrecision
    policy: Policy | None


_CASTS, _ORIGINAL = "_eqx_dp_casts", "_eqx_dp_original"


def _casts_of(module: object) -> Casts | None:
    return getattr(type(module), _CASTS, None)


def _rule_of(path: str, module: eqx.Module) -> ModuleRule | None:
    """For `rebuild`: the rule that a module was matched by when the model around it was paired."""
    casts = _casts_of(module)
    return None if casts is None else casts.rule


def _original(module: object) -> type[eqx.Module]:
    return getattr(type(module), _ORIGINAL, cast(type[eqx.Module], type(module)))


def _paired(model: eqx.Module, policy: Policy) -> eqx.Module:
    """The model with every module casting by itself, and the policy at the root."""
    rules, precision = rules_of(policy), policy.matmul_precision

    def pair(module: eqx.Module, governed: Governed) -> eqx.Module:
        casts = _casts_for(module, governed, precision)
        if not governed.path:
            own, outputs = governed.own, policy.output_dtype
            casts = Casts(governed.compute, outputs, own, own, precision, policy)
        return _as_class(module, casts)

    return rebuild(model, policy.compute_dtype, rules, pair)


def _entered(
    model: T,
    around: np.dtype[Any],
    matched: Matched,
    precision: MatmulPrecision,
    compute: np.dtype[Any],
) -> T:
    """The model, cast, as its own methods see it; only what rules match casts by itself."""

    def enter(module: eqx.Module, governed: Governed) -> eqx.Module:
        rule = governed.rule
        apart = governed.own is not None or governed.compute != compute
        apart |= rule is not None and rule.matmul is not None  # its products are marked
        return _as_class(module, _casts_for(module, governed, precision) if apart else None)

    return rebuild(model, around, matched, enter, cast_leaf)


_ANY = np.dtype(np.float32)  # where nothing is cast


def _casts_for(module: eqx.Module, governed: Governed, precision: MatmulPrecision) -> Casts | None:
    """What a module inside a model has to cast; None where it has no calls of its own."""
    cls = _original(module)
    # Equinox's wrappers (of jit, vmap, bound methods) hand on to what they hold.
    is_wrapper = cls.__module__.startswith("equinox._") or not _methods(cls)
    if cls is eqx.nn.StateIndex or (is_wrapper and governed.own is None):
        return None  # State looks its entries up by modules of exactly that class
    compute, around = governed.compute, governed.around
    return Casts(compute, around, governed.own, governed.rule, precision, None)


# Classes that cast.


def _as_class(module: eqx.Module, casts: Casts | None) -> eqx.Module:
    """The module, its methods casting as told, or not at all."""
    cls = _original(module)
    if casts is not None:
        cls = _class_that_casts(cls, casts)
    if cls is type(module):
        return module
    copy = object.__new__(cls)
    vars(copy).update(vars(module))
    return copy


# One class for equal arguments, always the same: it is a part of tree structures.
@functools.cache
def _class_that_casts(cls: type[eqx.Module], casts: Casts) -> type[eqx.Module]:
    namespace: dict[str, Any] = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "__reduce__": _reduce,
        _CASTS: casts,
        _ORIGINAL: cls,
    }
    namespace |= {name: _method_that_casts(name, method) for name, method in _methods(cls).items()}
    with warnings.catch_warnings():  # what there is to say of the class was said of the original
        warnings.simplefilter("ignore")
        made = types.new_class(cls.__name__, (cls,), exec_body=lambda body: body.update(namespace))
    return cast(type[eqx.Module], made)


def _methods(cls: type[eqx.Module]) -> dict[str, Any]:
    """`__call__` and the public methods of a class, however they are decorated."""
    fields = {field.name for field in dataclasses.fields(cast(Any, cls))}
    found: dict[str, Any] = {}
    for parent in reversed(cls.__mro__[: cls.__mro__.index(eqx.Module)]):
        found |= vars(parent)
    return {
        name: value
        for name, value in found.items()
        if (name == "__call__" or not name.startswith("_"))
        and name not in fields
        and callable(value)
        and hasattr(type(value), "__get__")
        and not isinstance(value, type | staticmethod | classmethod)
    }


def _method_that_casts(name: str, method: Any) -> Callable[..., Any]:
    @functools.wraps(method, updated=())
    def call(self: eqx.Module, /, *args: Any, **kwargs: Any) -> Any:
        casts = _casts_of(self)
        assert casts is not None
        args, kwargs = _cast_values((args, kwargs), casts.compute)
        with matmul_precision(casts.precision), governed_by(casts.governing):
            outputs = getattr(_inside(self, casts), name)(*args, **kwargs)
        _refuse_own_class(outputs, _original(self), name)
        return _cast_values(outputs, casts.outputs)

    return call


def _inside(module: eqx.Module, casts: Casts) -> eqx.Module:
    """What a call of a module runs on: the module in its own class, its contents entered."""
    if casts.policy is None:
        around, matched = casts.compute, _rule_of
    else:  # by the rules again, as the model may have been changed since it was paired
        around, matched = casts.policy.compute_dtype, rules_of(casts.policy)
    return _as_class(_entered(module, around, matched, casts.precision, casts.compute), None)


def _cast_values(values: T, dtype: np.dtype[Any]) -> T:
    """Casts what enters or leaves a call, but for state and modules that cast by themselves."""
    return jax.tree.map(
        lambda x: x if _is_apart(x) else cast_floats(x, dtype), values, is_leaf=_is_apart
    )


def _is_apart(x: object) -> bool:
    """Whether a value is not the call's to cast: state, and modules that cast by themselves."""
    return isinstance(x, eqx.nn.State) or _casts_of(x) is not None


def _refuse_own_class(outputs: Any, cls: type[eqx.Module], name: str) -> None:
    for x in jax.tree.leaves(outputs, is_leaf=lambda x: _is_apart(x) or isinstance(x, cls)):
        if isinstance(x, cls):
            raise ValueError(
                f"{cls.__name__}.{name} returns a {cls.__name__}, whose parameters are those that "
                f"the policy cast for the call. Call it on {_TAKE_OFF}, and pair the result."
            )


def _reduce(module: eqx.Module) -> tuple[Any, ...]:
    return _restored, (_original(module), _casts_of(module), dict(vars(module)))


def _restored(cls: type[eqx.Module], casts: Casts, fields: dict[str, Any]) -> eqx.Module:
    """A paired module from a pickle or a copy."""
    module = object.__new__(_class_that_casts(cls, casts))
    vars(module).update(fields)
    return module
