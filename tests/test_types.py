"""What pyright and mypy, in strict mode, make of code that uses the library."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("typed_script.py")

PREAMBLE = """
from typing import Any, assert_type

import equinox as eqx
import jax
import numpy as np
import optax  # type: ignore
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

import eqx_dp as dp


def arguments() -> tuple[eqx.nn.MLP, Float[Array, "n d"]]: ...
def loss(model: eqx.nn.MLP, x: Float[Array, " d"]) -> Float[Array, ""]: ...
def with_aux(model: eqx.nn.MLP, x: Float[Array, " d"]) -> tuple[Float[Array, ""], Array]: ...
def of_two(model: eqx.nn.MLP, x: Float[Array, " d"], y: Array) -> Array: ...
def keyed(model: eqx.nn.MLP, x: Float[Array, " d"], y: Array, key: PRNGKeyArray) -> Array: ...
def optional(model: eqx.nn.MLP, x: Float[Array, " d"], y: Array | None = None) -> Array: ...
def named(model: eqx.nn.MLP, x: Float[Array, " d"], y: Array, *, key: PRNGKeyArray) -> Array: ...
def of_tree(model: dict[str, Array], x: Float[Array, " d"]) -> Array: ...
def many(model: eqx.nn.MLP, *xs: Float[Array, " d"]) -> Array: ...
def taken(grad_fn: dp.ClippedGrad[eqx.nn.MLP], batch: np.ndarray[Any, Any]) -> object:
    return grad_fn(model, batch, is_padding_example=mask)


key: PRNGKeyArray = jax.random.key(0)
model, xs = arguments()
y, mask = np.ones(9), np.zeros(9, bool)
plan = dp.PrivacyPlan(0.1, 10, 1.0, 1e-5)
step = dp.make_step(loss, optax.sgd(1.0), plan, num_examples=9, l2_clip_norm=1.0)
"""

# Calls, and the type of the result.
GRADS, GRADS_AND_AUX = "PyTree[Array]", "tuple[PyTree[Array], Array]"
VALUES_AND_GRADS = "tuple[dp.PerExample, PyTree[Array]]"
RESULTS = {
    "dp.filter_clipped_grad(loss, l2_clip_norm=1.0)": GRADS,
    "dp.filter_clipped_grad(l2_clip_norm=1.0)(loss)": GRADS,
    "dp.filter_clipped_grad(with_aux, l2_clip_norm=1.0, has_aux=True)": GRADS_AND_AUX,
    "dp.filter_value_and_clipped_grad(loss, l2_clip_norm=1.0)": VALUES_AND_GRADS,
    "dp.filter_value_and_clipped_grad(l2_clip_norm=1.0)(loss)": VALUES_AND_GRADS,
    "dp.filter_value_and_clipped_grad(with_aux, l2_clip_norm=1.0, has_aux=True)": VALUES_AND_GRADS,
}

RIGHT = """
taken(dp.filter_clipped_grad(loss, l2_clip_norm=1.0), np.ones((2, 3)))
for y in (xs, np.ones(3)):  # a batch may be numpy's, where an example is JAX's
    dp.filter_clipped_grad(of_two, l2_clip_norm={"layers": 1.0})(model, xs, y)
    dp.filter_clipped_grad(keyed, l2_clip_norm=np.float32(1))(model, xs, y, key=key)
    dp.filter_clipped_grad(optional, l2_clip_norm=1)(model, xs, y)
    dp.filter_clipped_grad(named, l2_clip_norm=1)(model, xs, y, key=key, is_padding_example=mask)
    dp.filter_clipped_grad(many, l2_clip_norm=1)(model, xs, y, y, y)
optax.sgd(1.0).update(dp.filter_clipped_grad(loss, l2_clip_norm=1)(model, xs), optax.EmptyState())
dp.filter_clipped_grad(lambda model, x: model(x).sum(), l2_clip_norm=1)(model, xs)
dp.filter_clipped_grad(optional, l2_clip_norm=model)(model, xs)
assert_type(dp.filter_clipped_grad(loss, l2_clip_norm=1.0).l2_norm_bound, float)
assert_type(dp.load_policy("float32"), dp.Policy)
assert_type(dp.apply_policy(model, None), eqx.nn.MLP)
"""

MISTAKES = tomllib.loads(Path(__file__).with_name("typed_mistakes.toml").read_text())

CLAIM = "assert_type({}(model, xs), {})\n"
FILES = {
    "script": SCRIPT.read_text(),
    "right": PREAMBLE + RIGHT + "".join(CLAIM.format(call, it) for call, it in RESULTS.items()),
    "misuses": PREAMBLE + MISTAKES["seen"] + MISTAKES["unseen"],
}


def lines_with_errors(name):
    """The lines of a file in each of which an error is expected."""
    before, seen = len(PREAMBLE.splitlines()), len(MISTAKES["seen"].splitlines())
    return set(range(before + 1, before + seen + 1)) if name == "misuses" else set()


def checked(command, folder, **environment):
    """The output of a type checker that has come to an end."""
    options = {"cwd": folder, "env": os.environ | environment, "capture_output": True}
    done = subprocess.run([sys.executable, "-m", *command], text=True, check=False, **options)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def folder(tmp_path):
    settings = {"extends": str(ROOT / "pyproject.toml"), "include": ["."]}
    settings["reportUnusedImport"] = False  # no file needs all that the preamble imports
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    for name, text in FILES.items():
        (tmp_path / f"{name}.py").write_text(text)
    return tmp_path


def test_pyright(folder):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["typeCheckingMode"] == "strict"
    command = ["pyright", "--pythonpath", sys.executable, "--outputjson", "--project", str(folder)]
    report = json.loads(checked(command, ROOT, PYRIGHT_PYTHON_IGNORE_WARNINGS="1"))
    assert report["summary"]["filesAnalyzed"] == len(FILES)
    for name in FILES:
        its = [e for e in report["generalDiagnostics"] if Path(e["file"]).stem == name]
        found = {error["range"]["start"]["line"] + 1 for error in its}
        assert found == lines_with_errors(name), its


def test_mypy(folder):
    # Of the package itself nothing is reported: other rules hold there.
    options = ("--strict", "--follow-imports=silent", "--output=json", "--cache-dir=cache")
    output = checked(["mypy", *options, "script.py", "misuses.py"], folder, MYPYPATH=str(ROOT))
    errors = [json.loads(line) for line in output.splitlines()]
    for name in ("script", "misuses"):
        found = {e["line"] for e in errors if (e["file"], e["severity"]) == (f"{name}.py", "error")}
        # The preamble's functions have no bodies.
        behind = {line for line in found if name == "script" or "def " not in of_line(name, line)}
        # It misses two of arguments too many, and one by optax, which has no types for it.
        assert len(behind ^ lines_with_errors(name)) <= 3 * (name == "misuses"), output


def of_line(name, line):
    return FILES[name].splitlines()[line - 1]


def test_the_script_runs(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, SCRIPT, tmp_path], env=environment, check=True)
