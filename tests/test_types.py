"""What pyright and mypy, in strict mode, make of code that uses the library."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("typed_script.py")

PREAMBLE = """
from typing import Any, assert_type

import equinox as eqx
import jax
import numpy as np
import optax
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

import eqx_dp as dp


def arguments() -> tuple[eqx.nn.MLP, Float[Array, "n d"]]: ...
def loss(model: eqx.nn.MLP, x: Float[Array, " d"]) -> {loss}: ...
def of_two(model: eqx.nn.MLP, x: Float[Array, " d"], y: Array) -> Array: ...
def keyed(model: eqx.nn.MLP, x: Float[Array, " d"], y: Array, key: PRNGKeyArray) -> Array: ...
def optional(model: eqx.nn.MLP, x: Float[Array, " d"], y: Array | None = None) -> Array: ...
def many(model: eqx.nn.MLP, *xs: Float[Array, " d"]) -> Array: ...


key: PRNGKeyArray = jax.random.key(0)
model, xs = arguments()
plan = dp.PrivacyPlan(0.1, 10, 1.0, 1e-5)
"""

AS_CALL = PREAMBLE + "grad_fn = dp.{function}(loss, {options})\n"
AS_DECORATOR = PREAMBLE.replace("def loss", "@dp.{function}({options})\ndef grad_fn")

# The last line ends a snippet, for every case, with the right result and with a wrong one.
CLAIMS = """
typed: dp.ClippedGrad[Any] = grad_fn
assert_type(grad_fn(model, xs), {result})
"""

LOSS, LOSS_AND_AUX = 'Float[Array, ""]', 'tuple[Float[Array, ""], Array]'
GRADS, GRADS_AND_AUX = "PyTree[Array]", "tuple[PyTree[Array], Array]"
VALUES_AND_GRADS = "tuple[dp.PerExample, PyTree[Array]]"

CASES = {
    "grads": ("filter_clipped_grad", "l2_clip_norm=1.0", LOSS, GRADS, GRADS_AND_AUX),
    "grads, aux": (
        *("filter_clipped_grad", "l2_clip_norm=1.0, has_aux=True", LOSS_AND_AUX),
        *(GRADS_AND_AUX, VALUES_AND_GRADS),
    ),
    "values": (
        *("filter_value_and_clipped_grad", "l2_clip_norm=1.0", LOSS),
        *(VALUES_AND_GRADS, GRADS_AND_AUX),
    ),
    "values, aux": (
        *("filter_value_and_clipped_grad", "l2_clip_norm=1.0, has_aux=True", LOSS_AND_AUX),
        *(VALUES_AND_GRADS, GRADS),
    ),
}
WAYS = {"call": AS_CALL, "decorator": AS_DECORATOR}

VALUES = (
    PREAMBLE.format(loss=LOSS)
    + """
per_example, grads = dp.filter_value_and_clipped_grad(loss, l2_clip_norm=1.0)(model, xs)
assert_type(per_example.loss, Array)


def taken(grad_fn: dp.ClippedGrad[eqx.nn.MLP], batch: np.ndarray[Any, Any]) -> eqx.nn.MLP:
    return grad_fn(model, batch)


taken(dp.filter_clipped_grad(loss, l2_clip_norm=1.0), np.ones((2, 3)))
for y in (xs, np.ones(3)):  # a batch may be numpy's, where an example is JAX's
    dp.filter_clipped_grad(of_two, l2_clip_norm={"layers": 1.0})(model, xs, y)
    dp.filter_clipped_grad(keyed, l2_clip_norm=np.float32(1))(model, xs, y, key=key)
    dp.filter_clipped_grad(optional, l2_clip_norm=1)(model, xs, y)
    dp.filter_clipped_grad(many, l2_clip_norm=1)(model, xs, y, y, y)
dp.filter_clipped_grad(optional, l2_clip_norm=model)(model, xs)
dp.filter_clipped_grad(many, l2_clip_norm=1.0)(model, xs)
assert_type(dp.filter_clipped_grad(loss, l2_clip_norm=1.0).l2_norm_bound, float)
assert_type(dp.load_policy("float32"), dp.Policy)
assert_type(dp.apply_policy(model, None), eqx.nn.MLP)
"""
)

OPTIONS = "num_examples=9, l2_clip_norm=1.0"
STEP = f"dp.make_step(loss, optax.sgd(1.0), plan, {OPTIONS})"
MISUSES = {
    "no batch": "dp.filter_clipped_grad(loss, l2_clip_norm=1.0)(model)",
    "no labels": "dp.filter_clipped_grad(of_two, l2_clip_norm=1.0)(model, xs)",
    "no labels, with a key": "dp.filter_clipped_grad(keyed, l2_clip_norm=1.0)(model, xs, key=key)",
    "no labels, values": "dp.filter_value_and_clipped_grad(of_two, l2_clip_norm=1.0)(model, xs)",
    "labels too many": "dp.filter_clipped_grad(loss, l2_clip_norm=1.0)(model, xs, xs)",
    "no batch of a step": f"{STEP}({STEP}.init(model), is_padding_example=np.zeros(9, bool))",
    "a text for a clip norm": 'dp.filter_clipped_grad(loss, l2_clip_norm="1")',
    "a text for a clip norm of a step": "dp.make_step(loss, optax.sgd(1.0), plan, num_examples=9,"
    ' l2_clip_norm="1")',
    "a batch size for a seed": "plan.sampler(9, 64)",
    "no clip norm": "dp.filter_clipped_grad(loss)",
    "no such option": "dp.filter_clipped_grad(loss, l2_clip_norm=1.0, microbatches=4)",
    "aux that is no bool": 'dp.filter_clipped_grad(loss, l2_clip_norm=1.0, has_aux="yes")',
    "a name for a policy": 'dp.filter_clipped_grad(loss, l2_clip_norm=1.0, policy="float32")',
    "no such method": 'dp.filter_clipped_grad(loss, l2_clip_norm=1.0, method="gost")',
    "no such microbatch": "dp.make_step(loss, optax.sgd(1.0), plan, num_examples=9, seed=1,"
    ' l2_clip_norm=1.0, microbatch_size="best")',
    "no such option of a step": "dp.make_step(loss, optax.sgd(1.0), plan, num_examples=9, seed=1,"
    " l2_clip_norm=1.0, emo=0.9)",
    "no attribute": "dp.filter_clipped_grad(loss, l2_clip_norm=1.0).lower",
}


@pytest.fixture(scope="session")
def pyright() -> list[str]:
    """The command; skips where Node or pyright itself is not to be had."""
    command = [sys.executable, "-m", "pyright"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    if version.returncode:
        pytest.skip(f"pyright cannot be started: {(version.stderr or version.stdout).strip()}")
    return [*command, "--pythonpath", sys.executable, "--outputjson"]


def errors_of(command: list[str], *arguments: str) -> tuple[list[dict[str, Any]], int]:
    """What pyright finds, and how many files it has read for it."""
    environment = os.environ | {"PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr  # else it has not come to an end
    report = json.loads(done.stdout)
    return report["generalDiagnostics"], report["summary"]["filesAnalyzed"]


def test_the_examples_are_strictly_typed(pyright):
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pyright"]
    assert settings["typeCheckingMode"] == "strict"
    assert {"eqx_dp", "examples"} <= set(settings["include"])

    found, files = errors_of(pyright, "examples")
    assert not found, json.dumps(found, indent=2)
    assert files == len(list((ROOT / "examples").glob("*.py")))


@pytest.fixture(scope="module")
def snippets(pyright, tmp_path_factory) -> dict[str, list[tuple[int, str]]]:
    """Line, from the end, and rule of each finding, by snippet: all are read in one run."""
    folder = tmp_path_factory.mktemp("snippets")
    settings = {"extends": str(ROOT / "pyproject.toml"), "include": ["."]}
    settings["reportUnusedImport"] = False  # no snippet needs all that the preamble imports
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    texts = {"values": VALUES, "script": SCRIPT.read_text()}
    for way, text in WAYS.items():
        for case, (function, options, loss, right, wrong) in CASES.items():
            for name, result in (("right", right), ("wrong", wrong)):
                filled = (text + CLAIMS).format(
                    function=function, options=options, loss=loss, result=result
                )
                texts[f"{way}, {case}, {name}"] = filled
    for name, line in MISUSES.items():
        texts[name] = PREAMBLE.format(loss=LOSS) + f"found = {line}\n"

    names = {f"snippet_{number}": name for number, name in enumerate(texts)}
    for stem, name in names.items():
        (folder / f"{stem}.py").write_text(texts[name])
    errors, files = errors_of(pyright, "--project", str(folder))
    assert files == len(texts)
    found: dict[str, list[tuple[int, str]]] = {name: [] for name in texts}
    for error in errors:
        name = names[Path(error["file"]).stem]
        line = error["range"]["start"]["line"] - len(texts[name].splitlines())
        found[name].append((line, error["rule"]))
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_the_type_of_a_result_is_known(snippets, way, case):
    assert snippets[f"{way}, {case}, right"] == []


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("way", WAYS)
def test_a_wrong_claim_about_a_result_is_reported(snippets, way, case):
    rule = "reportAssertTypeFailure"
    assert snippets[f"{way}, {case}, wrong"] == [(-1, rule)]


def test_the_types_of_values_are_known(snippets):
    assert snippets["values"] == []


def test_a_script_of_a_user_has_no_errors(snippets):
    assert snippets["script"] == []


def test_the_script_runs(tmp_path):
    command = [sys.executable, SCRIPT, tmp_path]
    done = subprocess.run(
        command,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_mypy_finds_no_error_in_the_script_and_each_misuse(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT.read_text())
    names = {f"misuse_{number}.py": name for number, name in enumerate(MISUSES)}
    text = PREAMBLE.format(loss=LOSS).replace("import optax", "import optax  # type: ignore")
    for file, name in names.items():
        (tmp_path / file).write_text(f"{text}found = {MISUSES[name]}\n")
    # Of the package itself nothing is reported: other rules hold there.
    options = ("--strict", "--follow-imports=silent", "--output=json", "--cache-dir=cache")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, "script.py", *names],
        cwd=tmp_path,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr  # 2: it has not come to an end
    errors = [json.loads(line) for line in done.stdout.splitlines()]
    found = {(error["file"], error["line"]) for error in errors if error["severity"] == "error"}
    last = len(text.splitlines()) + 1
    bodies = {(file, line) for file, line in found if file in names and line != last}
    assert found - bodies == {(file, last) for file in names}, done.stdout


@pytest.mark.parametrize("name", MISUSES)
def test_a_misuse_is_reported(snippets, name):
    assert {line for line, _ in snippets[name]} == {-1}, snippets[name]
