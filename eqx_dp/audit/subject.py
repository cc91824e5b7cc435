"""What is audited: how it is called, what of its result is released, and what one call shows."""

import contextlib
import hashlib
import threading
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ..paths import dotted
from ..trees import PyTree, is_key
from .recorded import Recording, recorded

# A function that reads values while it is traced.
_READS_VALUES = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
    jax.errors.NonConcreteBooleanIndexError,
)
_COMPILED = "/jax/core/compile/backend_compile_duration"


class Observation(NamedTuple):
    """What one call shows, on the host.

    Attributes:
        released: what noise was added to; or, where `release` was given, what it gave.
        noise: what was added; empty with `release`.
        outputs: the other arrays of the result by path: dtype, shape, and a digest of the bytes.
        counters: those among them that are single integers, by path.
        rows: values of each example, by path.
        compilations: how many programs were compiled meanwhile.
        digest: of what is released and of the noise.
    """

    released: list[np.ndarray]
    noise: list[np.ndarray]
    outputs: dict[str, tuple[str, tuple[int, ...], bytes]]
    counters: dict[str, int]
    rows: dict[str, np.ndarray]
    compilations: int
    digest: bytes

    @property
    def form(self) -> list[tuple[str, tuple[int, ...]]]:
        """Dtypes and shapes of what is released."""
        return [(str(leaf.dtype), leaf.shape) for leaf in self.released]


class Subject(NamedTuple):
    """A function under audit.

    Attributes:
        fn: the function.
        release: from its result to what is released; None for what noise is added to.
        rows: from its result to the values of each example.
        outputs: from its result to everything else that is kept of it.
        context: entered around every call.
        is_traced: whether it can be traced, and so run with its noise recorded.
    """

    fn: Callable[..., Any]
    release: Callable[[Any], PyTree[Any]] | None
    rows: Callable[[Any], PyTree[Any]] = lambda result: None
    outputs: Callable[[Any], PyTree[Any]] = lambda result: result
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    is_traced: bool = True

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any], gain: float = 1.0) -> Recording:
        """Calls it; the noise, if it is recorded, is multiplied by `gain` before it is added."""
        with self.context():
            if self.is_traced:
                return jax.block_until_ready(_recorded(self.fn, jnp.float32(gain), args, kwargs))
            # It may use them up.
            args, kwargs = jax.tree.map(
                lambda x: jnp.copy(x) if eqx.is_array(x) else x, (args, kwargs)
            )
            return Recording(jax.block_until_ready(self.fn(*args, **kwargs)), [], [], 0)

    def observed(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], gain: float = 1.0
    ) -> Observation:
        """Calls it, and looks at what comes out."""
        with _counted_compilations() as compiled:
            result, sums, noise, _ = self.call(args, kwargs, gain)
        if self.release is not None:
            sums, noise = jax.tree.leaves(self.release(result)), []
        released, noise = list(map(np.asarray, sums)), list(map(np.asarray, noise))
        outputs = _arrays(self.outputs(result))
        return Observation(
            released,
            noise,
            {path: (str(leaf.dtype), leaf.shape, _digest(leaf)) for path, leaf in outputs},
            {
                path: int(leaf)
                for path, leaf in outputs
                if leaf.ndim == 0 and jnp.issubdtype(leaf.dtype, jnp.integer)
            },
            dict(_arrays(self.rows(result))),
            len(compiled),
            b"".join(map(_digest, [*released, *noise])),
        )

    def tried(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple["Subject", Recording]:
        """The same, as it can be run, and a first call of it."""
        try:
            return self, self.call(args, kwargs)
        except _READS_VALUES:
            subject = self._replace(is_traced=False)
            return subject, subject.call(args, kwargs)


@eqx.filter_jit
def _recorded(fn: Callable[..., Any], gain: Any, args: Any, kwargs: Any) -> Recording:
    return recorded(fn, gain, args, kwargs)


def _arrays(tree: PyTree[Any]) -> list[tuple[str, np.ndarray]]:
    """All arrays of a tree on the host, by path; of keys their words."""
    found: list[tuple[str, np.ndarray]] = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if eqx.is_array(leaf):
            leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
        if eqx.is_array_like(leaf):
            found.append((dotted(path), np.asarray(leaf)))
    return found


def _digest(leaf: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(leaf).tobytes(), digest_size=16).digest()


@contextlib.contextmanager
def _counted_compilations() -> Generator[list[float]]:
    """How long each compilation within took that this thread asked for."""
    found: list[float] = []
    thread = threading.get_ident()

    def note(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del kwargs
        if event == _COMPILED and threading.get_ident() == thread:
            found.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)
