"""The command line: what it prints, writes and refuses."""

import json
import pathlib
import re
import subprocess
import sys
from pathlib import Path

import pytest

import eqx_dp as dp
from eqx_dp.__main__ import main
from eqx_dp.commands import COMMANDS
from eqx_dp.precision import schema_text
from tests.report.made import Page, copied, trained

ROOT = Path(__file__).parents[1]


def printed(capsys, *arguments):
    assert main(arguments) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments, status=2):
    assert main(arguments) == status
    out, error = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in error
    return error


def test_every_command_has_help(capsys):
    for arguments in (["--help"], *([name, "--help"] for name in COMMANDS)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert len(capsys.readouterr().out) > 200


# eqx-dp policies


def test_policies_lists_every_preset(capsys):
    text = printed(capsys, "policies")
    head, *rows = text.split("\n\n")[0].splitlines()
    assert head.split()[:3] == ["policy", "params", "compute"]
    assert [row.split()[0] for row in rows] == list(dp.available_policies())
    (row,) = (row.split() for row in rows if row.startswith("mixed_bfloat16"))
    assert row[1:] == ["float32", "bfloat16", "float32", "float32", "float32", "float32"]
    assert dp.load_policy("bfloat16").description in text


def test_policies_shows_and_checks_one(tmp_path, capsys):
    shown = f"in full: {dp.load_policy('mixed_float8')}"
    for arguments in (("mixed_float8",), ("--check", "mixed_float8")):
        assert shown in printed(capsys, "policies", *arguments)
    file = tmp_path / "mine.toml"
    file.write_text("[dtypes]\nparams = 3\n")
    error = refused(capsys, "policies", "--check", str(file))
    assert error.startswith(f"eqx-dp: {file}: dtypes.params: found 3")
    assert "the nearest is 'float32'" in refused(capsys, "policies", "flaot32")
    assert printed(capsys, "policies", "--schema") == schema_text()


# eqx-dp epsilon

RUN = ("epsilon", "--examples", "6000", "--batch", "60", "--epochs", "2")
BUDGET = (*RUN, "--epsilon=2", "--delta=1e-5", "--relation=replace-one")


@pytest.mark.slow
def test_epsilon_of_a_noise_multiplier_is_the_plan_s(capsys, tmp_path):
    found = json.loads(printed(capsys, *RUN, "--noise-multiplier", "1.1", "--json"))
    plan = dp.PrivacyPlan(sampling_prob=0.01, steps=200, noise_multiplier=1.1, delta=1 / 60_000)
    assert dp.PrivacyPlan.from_json(json.dumps(found["plan"])) == plan
    assert found["spent"][-1] == {"steps": 200, "epsilon": plan.epsilon()}
    assert found["spent"][4]["epsilon"] == plan.epsilon(100)
    mine = "epsilon", "--plan", str(file := tmp_path / "plan.json")
    bins, users = dp.sampling.BallsInBins(1), dp.Users(None, 2)
    other = dp.PrivacyPlan(None, 2, 1, 0.1, sampling=bins, noise=dp.Banded.bisr(2), unit=users)
    file.write_text(other.to_json())
    for words, known in (((*RUN, "--noise-multiplier", "1.1"), plan), (mine, other)):
        text = printed(capsys, *words)
        (line,) = (line for line in text.splitlines() if line.startswith("dp.PrivacyPlan"))
        assert eval(line, {"dp": dp, "pathlib": pathlib}) == known
        assert f"{100 * known.trade_off().right:.1f} of 100 cases" in text
    assert "each user is in a step" in text
    assert "the plan alone" in refused(capsys, *mine, "--delta", "1e-9")
    file.write_text("[" * 10_000)
    assert f"{file}: a plan must be JSON" in refused(capsys, *mine)


def test_epsilon_refuses_what_no_run_can_be(capsys):
    words = (*RUN, "--noise-multiplier", "1")
    assert "--batch: found 7000; allowed: at most 6000" in refused(capsys, *words, "--batch=7000")
    assert "delta" in refused(capsys, *words, "--delta", "2")
    for wrong in ("0", "-1", "nan", "inf", "much"):
        with pytest.raises(SystemExit):
            main((*RUN, "--epsilon", wrong))
        assert f"found '{wrong}'; allowed: a number greater than 0" in capsys.readouterr().err


# eqx-dp report


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("run"))


@pytest.mark.slow
def test_report_replaces_nothing_but_reports(trained_run, tmp_path, capsys):
    run = copied(trained_run, tmp_path / "run")
    page = run / "report.html"
    for _ in range(2):  # a report is replaced
        assert printed(capsys, "report", str(run)) == f"{page}\n"
    assert "Privacy report: run" in Page(page.read_text("utf-8")).text()
    mine = tmp_path / "mine.html"
    mine.write_text("my own")
    link = tmp_path / "link.html"
    link.symlink_to(tmp_path / "elsewhere.html")
    for output in (mine, link):
        error = refused(capsys, "report", str(trained_run), "--output", str(output))
        assert "is no report. Name another file, by --output." in error
    nowhere = str(tmp_path / "nowhere" / "page.html")
    assert "No such file" in refused(capsys, "report", str(trained_run), "--output", nowhere)
    assert mine.read_text() == "my own"
    assert not (tmp_path / "elsewhere.html").exists()


# Without the extras, and as it is installed.

BASE_INSTALL = """
import importlib.abc, sys
class Missing(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] in ("rich", "matplotlib", "orbax", "jax_privacy", "safetensors"):
            raise ModuleNotFoundError(name)
sys.meta_path.insert(0, Missing())
from eqx_dp.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (BUDGET, 0, r"(?s)epsilon 2\.000, delta 1e-05, after 200 steps.*Relation\.REPLACE_ONE"),
        (["report", "RUN"], 1, "matplotlib is not installed"),
    ],
)
def test_a_base_install_prints_plain_text(trained_run, arguments, status, message):
    arguments = [str(trained_run) if word == "RUN" else word for word in arguments]
    command = [sys.executable, "-c", BASE_INSTALL, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == status, result.stderr
    assert re.search(message, result.stderr if status else result.stdout)
