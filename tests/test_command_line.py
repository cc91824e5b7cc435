"""The command line, at sizes that take no time: what it prints, writes and refuses."""

import json
import math
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eqx_dp.commands.command import x64
from eqx_dp.commands.models import WORKLOADS

import eqx_dp as dp
from eqx_dp.__main__ import main
from eqx_dp.commands import COMMANDS, bench_dtypes, bench_policies
from eqx_dp.report import page_of
from tests.report.made import copied, trained
from tests.training.runs import make, small_model, trainer

ROOT = Path(__file__).parents[1]
PNG = b"\x89PNG\r\n\x1a\n"


def printed(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def as_json(capsys, *arguments):
    return json.loads(printed(capsys, *arguments, "--json"))


def refused(capsys, *arguments):
    assert main(arguments) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in error
    return error


# eqx-dp policies


def test_policies_lists_every_preset(capsys):
    found = {one["name"]: one for one in as_json(capsys, "policies")["policies"]}
    assert tuple(found) == dp.available_policies()
    assert found["mixed_bfloat16"]["dtypes"] == {
        "params": "float32",
        "compute": "bfloat16",
        "output": "float32",
        "accumulate": "float32",
        "noise": "float32",
        "optimizer": "float32",
    }
    text = printed(capsys, "policies")
    assert all(name in text for name in dp.available_policies())
    assert dp.load_policy("bfloat16").description in text


@pytest.mark.parametrize("name", dp.available_policies())
def test_policies_shows_one(name, capsys):
    found = as_json(capsys, "policies", name)
    with jax.enable_x64(True):
        assert found["text"] == str(dp.load_policy(name))
    assert found["text"] in printed(capsys, "policies", name)


def test_policies_shows_a_file_in_full(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(
        'unsafe = true\nmatmul_precision = "highest"\n[dtypes]\nparams = "float32"\n'
        'compute = "float16"\noutput = "float32"\naccumulate = "float32"\nnoise = "bfloat16"\n'
        '[loss_scale]\nkind = "static"\nvalue = 64\n[[modules]]\nmatch = "**.head"\n'
        'compute = "float32"\n'
    )
    found = as_json(capsys, "policies", str(file))
    assert found["loss_scale"] == {"kind": "static", "value": 64}
    assert found["modules"] == [{"match": "**.head", "compute": "float32"}]
    assert found["unsafe"] is True
    text = printed(capsys, "policies", str(file))
    for part in ("highest", "**.head", "static 64", "too narrow", "bfloat16"):
        assert part in text


def test_policies_refuses_in_plain_words(tmp_path, capsys):
    assert "the nearest is 'float32'" in refused(capsys, "policies", "flaot32")
    file = tmp_path / "bad.toml"
    file.write_text("[dtypes]\nparams = 3\n")
    error = refused(capsys, "policies", str(file))
    assert error.startswith(f"eqx-dp: {file}: dtypes.params: found 3")
    assert "allowed: one of them" in refused(capsys, "policies", "float32", "--schema")
    assert "allowed: with --check FILE" in refused(capsys, "policies", "--model", "a:b")


# eqx-dp policies --check

RULE = 'extends = "mixed_bfloat16"\n[[modules]]\nmatch = "{}"\ncompute = "float32"\n'
MODEL = "tests.training.runs:small_model"


def test_policies_check(tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(RULE.format("Linear"))
    assert "module Linear" in printed(capsys, "policies", "--check", str(file))
    check = "policies", "--check", str(file), "--model", MODEL
    assert "module Linear" in printed(capsys, *check)
    assert "float64" in printed(capsys, "policies", "--check", "float64", "--model", MODEL)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (MODEL, "found 'head', which matches no module of the model"),
        ("nowhere_at_all:make", r"--model: found .*No module named.*; allowed: MODULE:FUNCTION"),
        ("tests.training.runs:nothing", "no attribute 'nothing'"),
        ("tests.training.runs:XS", "XS', a ndarray"),
        ("tests.training.runs", "allowed: MODULE:FUNCTION"),
        ("os:getcwd", "returns a str without arrays"),
        ("os.path:join", "'os.path:join', which needs a; allowed: MODULE:FUNCTION"),
        (".runs:small_model", "'.runs:small_model'.*relative import"),
    ],
)
def test_policies_check_refuses(model, message, tmp_path, capsys):
    file = tmp_path / "mine.toml"
    file.write_text(RULE.format("head"))
    error = refused(capsys, "policies", "--check", str(file), "--model", model)
    assert re.search(message, error)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise ValueError('no vocabulary')", "--model mine:make: no vocabulary"),
        ("return jnp.ones(2) if jnp.ones(()) > 0 else None", "'mine:make', which looks at values"),
    ],
)
def test_policies_check_says_whose_error_it_is(body, message, tmp_path, capsys, monkeypatch):
    (tmp_path / "mine.py").write_text(f"import jax.numpy as jnp\ndef make():\n    {body}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    assert message in refused(capsys, "policies", "--check", "float32", "--model", "mine:make")


def test_a_model_that_is_checked_is_not_allocated(tmp_path, capsys, monkeypatch):
    (tmp_path / "huge.py").write_text(
        "import equinox, jax\n"
        "def make():\n    return equinox.nn.Linear(2**20, 2**20, key=jax.random.key(0))\n"
    )
    monkeypatch.chdir(tmp_path)  # where modules are found
    as_json(capsys, "policies", "--check", "float32", "--model", "huge:make")


def test_policies_schema(capsys):
    assert printed(capsys, "policies", "--schema") == dp.precision.schema_text()


# eqx-dp epsilon

RUN = ("epsilon", "--examples", "6000", "--batch", "60", "--epochs", "2")


def test_epsilon_of_a_noise_multiplier_is_the_plan_s(capsys):
    found = as_json(capsys, *RUN, "--noise-multiplier", "1.1")
    plan = dp.PrivacyPlan(sampling_prob=0.01, steps=200, noise_multiplier=1.1, delta=1 / 60_000)
    assert dp.PrivacyPlan.from_json(found["plan"]) == plan
    assert found["spent"][-1] == {"steps": 200, "epochs": 2.0, "epsilon": plan.epsilon()}
    assert found["spent"][4]["epsilon"] == plan.epsilon(100)


@pytest.mark.slow
def test_epsilon_finds_the_noise_of_a_budget_and_draws_it(tmp_path, capsys):
    picture = tmp_path / "spent.png"
    text = printed(
        *(capsys, *RUN, "--epsilon", "2", "--delta", "1e-5", "--plot", str(picture)),
        *("--relation", "replace-one"),
    )
    assert "epsilon 2.000, delta 1e-05, after 200 steps" in text
    assert picture.read_bytes().startswith(PNG)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (("--batch", "7000"), "--batch: found 7000; allowed: at most 6000"),
        (("--delta", "2"), "delta"),
    ],
)
def test_epsilon_refuses_what_no_run_can_be(changed, told, capsys):
    assert told in refused(capsys, *RUN, "--noise-multiplier", "1", *changed)


@pytest.mark.parametrize("wrong", ["0", "-1", "nan", "inf", "much"])
def test_epsilon_takes_numbers_above_zero(wrong, capsys):
    with pytest.raises(SystemExit):
        main((*RUN, "--epsilon", wrong))
    assert f"found '{wrong}'; allowed: a number greater than 0" in capsys.readouterr().err


# eqx-dp bench dtypes


def test_bench_dtypes(tmp_path, capsys):
    arguments = ("bench", "dtypes", "--size", "32", "64", "--repeats", "1")
    found = as_json(capsys, *arguments, "--plot", str(tmp_path / "dtypes.png"))
    assert (tmp_path / "dtypes.png").read_bytes().startswith(PNG)
    by_name = {one["dtype"]: one for one in found["dtypes"]}
    assert set(by_name) - {"tensorfloat32"} == {
        *("float64", "float32", "float16", "bfloat16"),
        *("float8_e4m3fn", "float8_e5m2"),
    }
    base = by_name["float32"]
    assert (base["ratio_to_float32"], base["native"]) == (1, None)
    for one in by_name.values():
        assert (one["rows"], one["columns"], one["sized_down"]) == (32, 64, None)
        assert one["tflops"] == pytest.approx(2 * 32**2 * 64 / one["seconds"] / 1e12)
        assert one["ratio_to_float32"] == pytest.approx(one["tflops"] / base["tflops"])
    text = printed(capsys, *arguments)
    assert all(name in text for name in by_name)
    assert not jax.config.read("jax_enable_x64")


@pytest.mark.parametrize(
    ("seconds", "memory", "why"), [(0.0, None, "time"), (1e9, 10_000, "memory")]
)
def test_a_product_that_is_too_large_is_sized_down(seconds, memory, why):
    kind = bench_dtypes.ProductKind("float32", "float32")
    found = bench_dtypes.measure(kind, 8, 4096, 1, seconds, memory)
    assert found.columns == 512
    assert found.shortened == f"512 of 4,096 columns, for want of {why}"
    whole = bench_dtypes.measure(kind, 8, 4096, 1, 1e9, 10**9)
    assert (whole.columns, whole.shortened) == (4096, "")


def test_a_product_of_the_dtype_asked_for():
    for name, size in (("float64", 8), ("bfloat16", 2)):
        kind = bench_dtypes.ProductKind(name, name)
        with x64(kind.dtype):
            run, _ = bench_dtypes._product(kind, 4, 8)
            assert (run().dtype.name, run().dtype.itemsize) == (name, size)


def test_conversion_is_read_off_the_compiled_program():
    def text_of(dtype, function):
        a = jax.ShapeDtypeStruct((16, 128), dtype)
        return jax.jit(function).lower(a).compile().as_text()

    widens = lambda text, dtype: bench_dtypes.widens(text, 16, 128, dtype)  # noqa: E731
    for dtype in ("bfloat16", "float16"):
        wide = lambda a: a.astype(jnp.float32) @ a.T.astype(jnp.float32)  # noqa: E731
        assert widens(text_of(dtype, wide), dtype)
    assert not widens(text_of("float32", lambda a: a @ a.T), "float32")
    native = "%a = bf16[16,128]{1,0} parameter(0)\nROOT %dot = bf16[16,16]{1,0} dot(%a, %a)"
    assert not widens(native, "bfloat16")
    result_only = native + "\n%c = f32[16,16]{1,0} convert(%dot)"
    assert not widens(result_only, "bfloat16")


@pytest.mark.parametrize(
    ("dtype", "name", "ratio", "widened", "native"),
    [
        ("float32", "float32", 1.0, False, None),
        ("bfloat16", "bfloat16", 1.0, True, False),
        ("bfloat16", "bfloat16", 9.0, False, True),
        ("float16", "float16", 0.05, False, False),
        ("float32", "tensorfloat32", 6.0, False, True),
        ("float32", "tensorfloat32", 1.0, False, False),
        ("float64", "float64", 0.5, False, True),
        ("float64", "float64", 1 / 64, False, False),
    ],
)
def test_native_support_is_told_by_rate_and_program(dtype, name, ratio, widened, native):
    found, reason = bench_dtypes.support(dtype, name, ratio, widened)
    assert found is native
    assert reason


# eqx-dp bench policies


@pytest.mark.exhaustive
def test_bench_policies(tmp_path, capsys):
    arguments = ("bench", "policies", "--batch", "4", "--width", "8", "--repeats", "3")
    found = as_json(capsys, *arguments, "--plot", str(tmp_path / "policies.png"))
    assert (tmp_path / "policies.png").read_bytes().startswith(PNG)
    by_name = {one["policy"]: one for one in found["policies"]}
    assert tuple(by_name) == dp.available_policies()
    assert by_name["float32"]["time_ratio_to_float32"] == {"low": 1, "median": 1, "high": 1}
    assert by_name["float32"]["memory_ratio_to_float32"] == 1
    assert all(one["seconds"] > 0 and one["temporary_bytes"] > 0 for one in by_name.values())
    error = {name: one["gradient_error"] for name, one in by_name.items()}
    assert error["float64"] < 1e-12 < error["float32"] < 1e-4
    assert error["float32"] < error["mixed_float16"] < error["mixed_bfloat16"] < 0.05
    assert not jax.config.read("jax_enable_x64")


@pytest.mark.exhaustive
@pytest.mark.parametrize("model", ["cnn", "gpt"])
def test_bench_policies_on_other_models(model):
    make, _, _ = WORKLOADS[model]
    workload = make(2, 4)
    oracle = bench_policies.oracle_of(workload)
    # Each of two examples adds no more than the clip norm, and the gradient is there.
    assert 0.1 < math.sqrt(sum(np.sum(leaf**2) for leaf in oracle)) <= 2
    assert all(leaf.dtype == np.float64 for leaf in oracle)
    for name in dp.available_policies():
        with x64(name):
            policy = dp.load_policy(name)
            grad_fn = dp.filter_clipped_grad(workload.loss, l2_clip_norm=1.0, policy=policy)
            stored = policy.cast_to_param(workload.model)
            assert dp.explain(grad_fn, stored, *workload.batch).num_examples == 2


def test_gradient_error_is_relative():
    oracle = [np.array([3.0, 0.0]), np.array([[4.0]])]
    found = [np.array([3.0, 0.3]), np.array([[4.4]])]
    assert bench_policies.relative_error(found, oracle) == pytest.approx(0.1)


# eqx-dp report


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_report_writes_a_page_and_json(trained_run, tmp_path, capsys):
    run = copied(trained_run, tmp_path / "run")
    before = set(run.rglob("*"))
    page, data = run / "report.html", run / "report.json"
    for _ in range(2):  # a report is replaced
        assert printed(capsys, "report", str(run)) == f"{page}\n{data}\n"
    assert set(run.rglob("*")) - before == {page, data}
    found = json.loads(data.read_text())
    assert (found["format"], found["name"]) == ("eqx_dp.report", "run")
    assert page.read_text() == page_of(found) + "\n"
    trainer(run, make(policy=dp.load_policy("mixed_bfloat16"))).run(small_model())
    assert "report.html" in printed(capsys, "report", str(run))
    assert json.loads(data.read_text())["steps_released"] == 10


def test_report_goes_where_it_is_asked_to(trained_run, tmp_path, capsys):
    page = tmp_path / "mine.html"
    printed(capsys, "report", str(trained_run), "--output", str(page))
    assert {file.name for file in tmp_path.iterdir()} == {"mine.html", "mine.json"}
    assert not (trained_run / "report.html").exists()


def test_report_refuses_in_plain_words(trained_run, tmp_path, capsys):
    def output(name):
        return refused(capsys, "report", str(trained_run), "--output", str(tmp_path / name))

    assert "found no folder" in refused(capsys, "report", str(tmp_path / "nowhere"))
    assert "it has no ledger" in refused(capsys, "report", str(tmp_path))
    assert "found the ending '.pdf'; allowed: '.html'" in output("a.pdf")
    assert "found no folder" in output("nowhere/a.html")
    (tmp_path / "folder.html").mkdir()
    assert "cannot be replaced" in output("folder.html")


@pytest.mark.parametrize("name", ["privacy", "checks"])
def test_report_replaces_nothing_but_reports(trained_run, tmp_path, capsys, name):
    """The JSON file beside `privacy.html` would be the statement of the run."""
    run = copied(trained_run, tmp_path / "run")
    before = {file: file.read_bytes() for file in run.rglob("*") if file.is_file()}
    error = refused(capsys, "report", str(run), "--output", str(run / f"{name}.html"))
    assert f"{name}.json is there, and is no report" in error
    assert {file: file.read_bytes() for file in run.rglob("*") if file.is_file()} == before


# What is refused, and what is needed.


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_measured(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(bench_dtypes, "measure", None)
    missing = tmp_path / "nowhere" / "a.png"
    assert "found no folder" in refused(capsys, "bench", "dtypes", "--plot", str(missing))
    ending = tmp_path / "a.nothing"
    assert "found the ending '.nothing'" in refused(
        capsys, "bench", "dtypes", "--plot", str(ending)
    )


@pytest.mark.parametrize(
    "arguments", [(), ("nothing",), ("bench",), ("bench", "dtypes", "--repeats", "0")]
)
def test_what_is_no_command(arguments, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: eqx-dp" in capsys.readouterr().err


def test_every_command_has_a_page_of_help(capsys):
    assert len({command.name for command in COMMANDS}) == len(COMMANDS)
    for command in COMMANDS:
        with pytest.raises(SystemExit) as exit_:
            main([*command.name.split(), "--help"])
        assert exit_.value.code == 0
        assert command.description[:30] in " ".join(capsys.readouterr().out.split())


def test_without_the_extra_it_says_which_to_install(capsys, monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["policies"]) == 1
    assert "pip install 'eqx-dp[train]'" in capsys.readouterr().err
    assert as_json(capsys, "policies", "float32")["name"] == "float32"
    monkeypatch.setattr(bench_policies, "oracle_of", None)
    assert main(["bench", "policies", "--json", "--plot", str(tmp_path / "a.png")]) == 1
    assert "matplotlib is not installed" in capsys.readouterr().err


@pytest.mark.slow
def test_neither_the_package_nor_the_command_line_imports_an_extra():
    source = "import sys, eqx_dp.__main__; print({'rich', 'matplotlib'} & set(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", source], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == "set()"


@pytest.mark.slow
def test_it_is_installed_as_eqx_dp_and_runs_as_a_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"eqx-dp": "eqx_dp.__main__:main"}
    command = [sys.executable, "-m", "eqx_dp", "policies", "nope"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert result.stderr.startswith("eqx-dp: policy preset: found 'nope'")
