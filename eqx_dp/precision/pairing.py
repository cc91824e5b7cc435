"""Models that cast by themselves: every module casts its inputs and outputs, as a policy says.

A module gets a subclass with its fields and its name, whose public methods cast. So fields, paths,
leaves and isinstance are those of the original model, and equal policies give equal tree
structures.
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
from .matmul import matmul_precision
from .module_rule import ModuleRule
from .modules import ANY, Governed, Matched, cast_floats, cast_leaf, check_rules, rebuild, rules_of
from .policy import JmpPolicy, Policy, checked_policy
from .stages import governed_by

T = TypeVar("T")


def apply_policy(model: T, policy: Policy | JmpPolicy | None) -> T:
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
        policy: The policy to pair it with, a `jmp.Policy`, too; None takes the policy off again.

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
        paired = rebuild(model, ANY, on_module=lambda module, _: _as_class(module, None))
    else:
        agreed_policy(model, policy)

        def pair(module: eqx.Module, governed: Governed) -> eqx.Module:
            return _as_class(module, _casts_for(module, governed, policy, not governed.path))

        paired = rebuild(model, policy.compute_dtype, rules_of(policy.modules), pair)
    same = jax.tree.structure(paired) == jax.tree.structure(model)
    return model if same else cast(T, paired)


def agreed_policy(model: PyTree[Any], policy: Policy | None) -> Policy | None:
    """The policy of a paired model, or the given policy.

    Raises:
        ValueError: Both are there and differ; a module inside the model is paired on its own; a
            part of a paired model comes without the policy; a rule has no effect on the model.
    """
    found: dict[str, Casts] = {}

    def collect(path: str, module: eqx.Module) -> None:
        if (casts := _casts_of(module)) is not None:
            found[path] = casts

    rebuild(model, ANY, collect)
    inner = next((path for path, casts in found.items() if path and casts.is_root), None)
    if inner is not None:
        raise ValueError(
            f"model.{inner} is paired with a policy of its own ({found[inner].policy}), and the "
            f"model around it is not. Take it off with {_TAKE_OFF}, and pair the whole model."
        )
    own = found[""].policy if "" in found and found[""].is_root else None
    if own is not None and policy is not None and own != policy:
        raise ValueError(
            f"Two policies: the model is paired with {_named(own)}, and {_named(policy)} was given "
            f"beside it. Give one of them, or take the model's off with {_TAKE_OFF}."
        )
    policy = policy or own
    if found and policy is None:
        raise ValueError(
            f"model is a part of a paired model, and the policy is for the whole. Give the "
            f"policy as well, or take it off with {_TAKE_OFF}."
        )
    if policy is not None:
        check_rules(model, policy.modules)
    return policy


_TAKE_OFF = "apply_policy(model, None)"


def _named(policy: Policy) -> str:
    return f"{policy.name} ({policy})" if policy.name else str(policy)


def inside_engine(model: T, policy: Policy) -> T:
    """The model for a loss whose parameters, inputs and result the engine casts itself.

    Only modules that rules match cast by themselves; the rest is unpaired.
    """
    return _entered(model, policy, policy.compute_dtype, rules_of(policy.modules))


# The casts of a module.


class Casts(NamedTuple):
    """The casts of a module's methods. Equal casts give equal tree structures.

    Attributes:
        policy: the policy of the whole model.
        is_root: whether the module is that model.
        compute: the dtype of parameters and float inputs.
        outputs: the dtype of float outputs.
        rule: the rule that matched the module, or None.
        governing: the rule that gave `compute`, or None if the policy did.
    """

    policy: Policy
    is_root: bool
    compute: np.dtype[Any]
    outputs: np.dtype[Any]
    rule: ModuleRule | None
    governing: ModuleRule | None


_CASTS, _ORIGINAL = "_eqx_dp_casts", "_eqx_dp_original"


def _casts_of(module: object) -> Casts | None:
    return getattr(type(module), _CASTS, None)


def _rule_of(path: str, module: eqx.Module) -> ModuleRule | None:
    """For `rebuild`: the rule that a module was matched by when the model around it was paired."""
    casts = _casts_of(module)
    return None if casts is None else casts.rule


def _original(module: object) -> type[eqx.Module]:
    return getattr(type(module), _ORIGINAL, cast(type[eqx.Module], type(module)))


def _casts_for(
    module: eqx.Module, governed: Governed, policy: Policy, is_root: bool
) -> Casts | None:
    """The casts of a module; None if a module inside a model has no calls of its own."""
    cls = _original(module)
    # Equinox's wrappers (of jit, vmap, bound methods) call what they hold.
    is_wrapper = cls.__module__.startswith("equinox._") or not _methods(cls)
    is_silent = cls is eqx.nn.StateIndex or (is_wrapper and governed.own is None)
    if is_silent and not is_root:
        return None  # State looks its entries up by modules of exactly that class
    outputs = policy.output_dtype if is_root else governed.around
    return Casts(policy, is_root, governed.compute, outputs, governed.own, governed.rule)


def _entered(model: T, policy: Policy, compute: np.dtype[Any], matched: Matched) -> T:
    """The cast model, as its own methods see it; inside, only modules with rules cast."""

    def enter(module: eqx.Module, governed: Governed) -> eqx.Module:
        rule = governed.rule
        apart = governed.own is not None or governed.compute != compute
        apart |= rule is not None and rule.is_wide  # its products are marked
        return _as_class(module, _casts_for(module, governed, policy, False) if apart else None)

    return rebuild(model, compute, matched, enter, cast_leaf)


# Classes that cast.


def _as_class(module: eqx.Module, casts: Casts | None) -> eqx.Module:
    """The module, with methods that cast as given, or not at all."""
    same = casts == _casts_of(module)
    return module if same else _made(_original(module), casts, vars(module))


def _made(cls: type[eqx.Module], casts: Casts | None, fields: dict[str, Any]) -> eqx.Module:
    """A module that casts, from the fields of one that does or does not, or of a pickled one."""
    module = object.__new__(cls if casts is None else _class_that_casts(cls, casts))
    vars(module).update(fields)
    return module


# The same class for equal arguments: it is a part of tree structures.
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
    if casts.is_root:
        namespace["__repr__"] = _described
    namespace |= {name: _method_that_casts(name, method) for name, method in _methods(cls).items()}
    with warnings.catch_warnings():  # warnings about the class were given for the original
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
        # By the rules again at the root, as the model may have been changed since it was paired.
        matched = rules_of(casts.policy.modules) if casts.is_root else _rule_of
        inside = _as_class(_entered(self, casts.policy, casts.compute, matched), None)
        with matmul_precision(casts.policy.matmul_precision), governed_by(casts.governing):
            outputs = getattr(inside, name)(*args, **kwargs)
        for x in jax.tree.leaves(outputs, is_leaf=lambda x: isinstance(x, _original(self))):
            if isinstance(x, _original(self)):
                kind = _original(self).__name__
                raise ValueError(
                    f"{kind}.{name} returns a {kind}, whose parameters are those that the policy "
                    f"cast for the call. Call it on {_TAKE_OFF}, and pair the result."
                )
        return _cast_values(outputs, casts.outputs)

    return call


def _cast_values(values: T, dtype: np.dtype[Any]) -> T:
    """Casts what enters or leaves a call, but for state and modules that cast by themselves."""
    return jax.tree.map(
        lambda x: x if _is_apart(x) else cast_floats(x, dtype), values, is_leaf=_is_apart
    )


def _is_apart(x: object) -> bool:
    """Whether a value is not the call's to cast: state, and modules that cast by themselves."""
    return isinstance(x, eqx.nn.State) or _casts_of(x) is not None


def _described(module: eqx.Module) -> str:
    """How a paired model is printed: as before, and its policy."""
    casts = _casts_of(module)
    return f"{_original(module).__repr__(module)} with policy {casts and casts.policy}"


def _reduce(module: eqx.Module) -> tuple[Any, ...]:
    return _made, (_original(module), _casts_of(module), dict(vars(module)))
