"""A compiled function of trees that takes little work to call, and that is not waited for."""

import collections
import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Generator
from typing import Any, Generic, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.extend.core as jex_core
from jax.core import Tracer
from jaxtyping import Array

Kept = TypeVar("Kept")
Tree = TypeVar("Tree")

_MOST_UNDER_WAY = 2
# In the names of primitives: pure_callback, io_callback, debug_callback, debug_print.
_CALLS_HOST = ("callback", "debug_print")


class _Rest(NamedTuple):
    """What a tree is, but for its arrays.

    Attributes:
        structure: of the tree.
        others: its leaves; None where there is an array.
    """

    structure: Any
    others: tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Flat(Generic[Tree]):
    """A tree that is taken apart.

    To do so, and to put it together again, takes longer than to call a compiled function: modules
    are flattened by Python.
    """

    rest: _Rest
    arrays: list[Any]

    @property
    def tree(self) -> Tree:
        """The tree."""
        arrays = iter(self.arrays)
        leaves = [next(arrays) if other is None else other for other in self.rest.others]
        return self.rest.structure.unflatten(leaves)


def flat(tree: Tree) -> Flat[Tree]:
    """Takes a tree apart."""
    leaves, structure = jax.tree.flatten(tree)
    arrays: list[Any] = []
    others: list[Any] = []
    for leaf in leaves:
        is_array = eqx.is_array(leaf)
        others.append(None if is_array else leaf)
        if is_array:
            arrays.append(leaf)
    return Flat(_Rest(structure, tuple(others)), arrays)


@jax.tree_util.register_static
class _Form:
    """What a program depends on beside its arrays. Its hash is worked out once."""

    def __init__(self, *rests: _Rest):
        self.rests = rests
        self._hash = hash(rests)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, _Form) and self.rests == other.rests)


class Dispatch(Generic[Kept, Tree]):
    """`function(kept, carry) -> (carry, array)`, compiled, called without waiting for it.

    As `eqx.filter_jit(function, donate="all-except-first")`: arrays are traced, all else is static,
    it is compiled once for what is static and for shapes and dtypes, and the buffers of a carry go
    to the next. `eqx.filter_jit` waits for every result, to tell what `eqx.error_if` has to say.
    This waits where a program calls the host back, as `eqx.error_if` does, and nowhere else.

    Args:
        function: of two trees.
    """

    def __init__(self, function: Callable[[Kept, Tree], tuple[Tree, Array]]):
        self._function = function
        self._jitted: Any = jax.jit(self._of_arrays, donate_argnums=2)
        self._waited_for: Any = eqx.filter_jit(function, donate="all-except-first")
        self._form: _Form | None = None
        self._calls_host: dict[Any, bool] = {}
        self._under_way = _UnderWay()

    def __call__(self, kept: Kept, carry: Flat[Tree]) -> tuple[Flat[Tree], Array]:
        """Calls the function, once fewer than two calls are under way.

        Args:
            kept: a tree.
            carry: of the call before, or made by `flat`. Used up.

        Returns:
            The next carry; and the array, which is there when the call has ended.
        """
        arguments = self._arguments(kept, carry)
        if self._has_to_wait(arguments):
            tree, array = self._waited_for(kept, carry.tree)
            return flat(tree), array
        self._under_way.make_room()
        form, arrays, array = self._jitted(*arguments)
        self._under_way.add(array)
        return Flat(form.rests[0], arrays), array

    def lower(self, kept: Kept, carry: Flat[Tree]) -> jax.stages.Lowered:
        """Lowers the function for these arguments; nothing is computed."""
        with _unused_donations_untold():
            return self._jitted.lower(*self._arguments(kept, carry))

    def _arguments(self, kept: Kept, carry: Flat[Tree]) -> tuple[_Form, list[Any], list[Any]]:
        beside, form = flat(kept), self._form
        # One object for equal forms, since that is compared fast.
        if form is None or form.rests != (beside.rest, carry.rest):
            self._form = form = _Form(beside.rest, carry.rest)
        return form, beside.arrays, carry.arrays

    def _of_arrays(self, form: _Form, kept: list[Any], carry: list[Any]) -> Any:
        arguments = (Flat(*parts).tree for parts in zip(form.rests, (kept, carry), strict=True))
        tree, array = self._function(*arguments)
        result = flat(tree)
        return _Form(result.rest), result.arrays, array

    def _has_to_wait(self, arguments: tuple[_Form, list[Any], list[Any]]) -> bool:
        form, kept, carry = arguments
        program = (form, *[(array.shape, array.dtype) for array in (*kept, *carry)])
        known = self._calls_host.get(program)
        if known is None:  # a program that is called for the first time
            traced = self._jitted.trace(*arguments)
            with _unused_donations_untold():
                traced.lower()
            known = self._calls_host[program] = _calls_host(traced.jaxpr.jaxpr)
        return known


class _UnderWay:
    """The calls that have not ended: two at most, so that memory stays flat.

    While one runs the host prepares the other, which begins when the first has ended.
    """

    def __init__(self) -> None:
        self._results: collections.deque[Array] = collections.deque(maxlen=_MOST_UNDER_WAY)

    def make_room(self) -> None:
        """Waits until there is room for another call."""
        if len(self._results) == _MOST_UNDER_WAY:
            # What went wrong there is told to those who read the result.
            with contextlib.suppress(Exception):
                jax.block_until_ready(self._results.popleft())

    def add(self, result: Array) -> None:
        """Adds a call, by an array of its result that is not donated."""
        if not isinstance(result, Tracer):
            self._results.append(result)


def is_gone(leaf: Any) -> bool:
    """Whether it is an array whose buffer was donated, or deleted."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer) and leaf.is_deleted()


def _calls_host(program: jex_core.Jaxpr) -> bool:
    return any(
        any(word in equation.primitive.name for word in _CALLS_HOST)
        or any(map(_calls_host, jex_core.jaxprs_in_params(equation.params)))
        for equation in program.eqns
    )


@contextlib.contextmanager
def _unused_donations_untold() -> Generator[None]:
    """A context in which JAX says nothing of donated buffers that no result can use."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield
