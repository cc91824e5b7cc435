"""How the tests run: on what devices, and with what programs.

There are eight devices, so that sharding has something to spread over. With `--check-types` every
test sees eqx_dp with its jaxtyping annotations checked at run time by beartype; that takes two
thirds more time. With `--alone` no test meets a program that JAX traced for another one before it:
a test that takes such a program for its own tries nothing. That takes two thirds more time, too.

Most of a test's time is compilation. XLA is therefore asked to compile fast, and a program that
one process has compiled is read by all others. Tests marked `optimized` get the programs that users
get: those that hold the rounding of clipped sums and of noise against a bound, or examples apart
bit for bit. What is left out changes machine code alone: memory, FLOPs and collectives of a program
are the same.

Hypothesis tries the same cases in every run, so that CI repeats what was seen before it. With
`--hypothesis-profile=search` it tries others.
"""

import gc
import itertools
import os
import tempfile
import uuid
from typing import Any, Self

import beartype
import beartype.roar
import hypothesis
import jax
import jaxtyping
import numpy.typing as npt
import pytest
from jax._src import compiler, lru_cache

hypothesis.settings.register_profile("search", derandomize=False)
hypothesis.settings.register_profile("repeatable", derandomize=True)
hypothesis.settings.load_profile("repeatable")

gc.set_threshold(20_000, 20, 20)  # tracing makes many containers, few of them in cycles

jax.config.update("jax_num_cpu_devices", 8)
# Virtual devices that meet share few cores: a busy machine needs longer than the 40 s of XLA.
_PATIENT = "--xla_cpu_collective_call_terminate_timeout_seconds=600"
# The machine code of a program is written by one thread: the other cores have other tests to run.
_ONE_THREAD = "--xla_cpu_parallel_codegen_split_count=1"
os.environ["XLA_FLAGS"] = " ".join([_PATIENT, _ONE_THREAD, os.environ.get("XLA_FLAGS", "")])
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "true"  # of processes that tests start

# One folder for all processes of a session: those that pytest starts get its name.
_PROGRAMS = tempfile.TemporaryDirectory(prefix="compiled-")
_folder = os.environ.setdefault("EQX_DP_TEST_PROGRAMS", _PROGRAMS.name)
jax.config.update("jax_compilation_cache_dir", _folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _put(self: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Writes a program in one step, which JAX does not: other processes read at any time."""
    part = self.path / f"{key}.{uuid.uuid4()}"
    part.write_bytes(value)
    suffix = lru_cache._CACHE_SUFFIX  # pyright: ignore[reportPrivateUsage]
    part.replace(self.path / f"{key}{suffix}")


lru_cache.LRUCache.put = _put
jax.config.update("jax_traceback_in_locations_limit", 0)  # which nobody reads in a program

_started = itertools.count(1)
_is_fast = True  # also for the models that test modules make as they are imported
jax.config.update("jax_disable_most_optimizations", _is_fast)

# What compiles fast beside that. XLA reads XLA_FLAGS once in a process, and `jax.jit` takes options
# where it is called: only here can they change from test to test. Caches of programs see them.
# JAX 0.10 has XLA's older emitters too, which take half the time; JAX 0.12 has no such choice.
_FAST = {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}
_options = compiler.get_compile_options


def _options_of_the_test(*arguments: Any, **named: Any) -> Any:
    if _is_fast:
        named["env_options_overrides"] = {**_FAST, **(named.get("env_options_overrides") or {})}
    return _options(*arguments, **named)


compiler.get_compile_options = _options_of_the_test


def _is_optimized(item: pytest.Item) -> bool:
    return item.get_closest_marker("optimized") is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--check-types", action="store_true", help="check annotations at run time")
    parser.addoption("--alone", action="store_true", help="clear JAX's memory before every test")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--check-types"):  # before any test imports it
        jaxtyping.install_import_hook("eqx_dp", "tests.conftest.checked")


# An int is a float. Functions are decorated one by one: beartype knows `Self` in classes alone.
_UNKNOWN = beartype.FrozenDict({Self: Any, npt.ArrayLike: Any})
_RULES = beartype.BeartypeConf(is_pep484_tower=True, hint_overrides=_UNKNOWN)


def checked(function: Any) -> Any:
    """The function, checked; as it is if beartype has no check for an annotation's form."""
    try:
        return beartype.beartype(conf=_RULES)(function)
    except beartype.roar.BeartypeDecorHintPepException:
        return function


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # The programs of one half are useless to the other: JAX's memory of them is cleared in between.
    items.sort(key=_is_optimized)


def pytest_collection_finish() -> None:
    gc.freeze()  # modules stay


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    global _is_fast
    is_other = _is_fast == _is_optimized(item)
    if is_other:
        _is_fast = not _is_fast
        jax.config.update("jax_disable_most_optimizations", _is_fast)
    # Linux ends a process that maps 65,530 pieces of memory. Each program takes some.
    if is_other or item.config.getoption("--alone") or next(_started) % 100 == 0:
        jax.clear_caches()


@pytest.fixture(scope="session")
def fast() -> dict[str, str]:
    """The environment of a process whose programs are compiled fast, as those of tests are."""
    added = [f"--{name}={value}".lower() for name, value in _FAST.items()]
    return {**os.environ, "XLA_FLAGS": " ".join([os.environ["XLA_FLAGS"], *added])}


@pytest.fixture
def unchecked():
    """Turns the run-time checks of annotations off: what a user of eqx_dp meets without them."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
