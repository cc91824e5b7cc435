"""The package as users get it: a wheel in a new environment, and a checkout installed editable."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
POLICIES = {path.name: path.read_bytes() for path in (ROOT / "policies").iterdir()}

# Prints where the package came from and what every preset says, as JSON.
LOAD_EVERY_PRESET = """
import json, eqx_dp
from eqx_dp.precision import available_policies, load_policy
presets = {name: str(load_policy(name)) for name in available_policies()}
print(json.dumps([eqx_dp.__file__, presets]))
"""


def load_every_preset(python: Path, directory: Path, **environment: str):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX"))}
    result = subprocess.run(
        [python, "-c", LOAD_EVERY_PRESET],
        cwd=directory,
        env={**inherited, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    file, presets = json.loads(result.stdout)
    return Path(file), presets


def run(*command: str | Path) -> None:
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation"]
    run(*build, "--outdir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture
def new_environment(tmp_path) -> Path:
    """A virtual environment of its own that borrows the dependencies from the running one.

    Its own packages come first, and the running environment's `.pth` files, through which an
    editable install is found, are not read: eqx_dp can only be what is installed here.
    """
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False, symlinks=os.name != "nt")
    borrowed = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (site_packages(folder) / "dependencies.pth").write_text("\n".join(sorted(borrowed)))
    return folder


def site_packages(environment: Path) -> Path:
    return Path(sysconfig.get_path("purelib", "venv", {"base": str(environment)}))


def python_of(environment: Path) -> Path:
    scripts = sysconfig.get_path("scripts", "venv", {"base": str(environment)})
    return Path(scripts) / Path(sys.executable).name


@pytest.mark.slow
def test_wheel_carries_the_policies_and_the_typing_marker(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        carried = {
            name.removeprefix("eqx_dp/policies/"): archive.read(name)
            for name in names
            if "policies/" in name
        }
    assert carried == POLICIES
    assert {"eqx_dp/py.typed", "eqx_dp/privacy/overflow.md"} <= names
    assert "eqx_dp/precision/policy.schema.json" in names
    assert {"eqx_dp/report/page.html", "eqx_dp/report/page.css"} <= names
    # Nothing but the package: no tests, no second copy of the presets.
    assert {name.split("/")[0].split("-")[0] for name in names} == {"eqx_dp"}


@pytest.mark.slow
def test_links_of_the_page_on_pypi_lead_out_of_it(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (one for one in archive.namelist() if one.endswith("METADATA"))
        page = archive.read(name).decode()
    links = re.findall(r"\]\(([^)\s]+)\)", page)
    assert len(links) > 20
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert "](https://raw.githubusercontent.com/eqx-dp/eqx_dp/main/examples/pictures" in page


@pytest.mark.slow
def test_wheel_loads_every_preset_in_a_new_environment(wheel, new_environment, tmp_path):
    python = python_of(new_environment)
    pip = [sys.executable, "-m", "pip", "--python", python]
    run(*pip, "install", "--no-deps", "--no-index", "--disable-pip-version-check", wheel)

    file, presets = load_every_preset(python, tmp_path)

    assert file == site_packages(new_environment) / "eqx_dp" / "__init__.py"
    assert (file.parent / "py.typed").is_file()
    installed = {path.name: path.read_bytes() for path in (file.parent / "policies").iterdir()}
    assert installed == POLICIES
    assert presets.keys() == {name.removesuffix(".toml") for name in POLICIES}


@pytest.mark.slow
def test_checkout_loads_every_preset_from_its_own_folder(new_environment, tmp_path):
    # An editable install is a path to the checkout, and may leave a copy of the policies behind
    # that grows stale: the folder of the checkout is the one that counts.
    stale = site_packages(new_environment) / "eqx_dp" / "policies"
    stale.mkdir(parents=True)
    (stale / "stale.toml").write_text("no policy")
    (site_packages(new_environment) / "editable.pth").write_text(str(ROOT))

    file, presets = load_every_preset(python_of(new_environment), tmp_path)

    assert file == ROOT / "eqx_dp" / "__init__.py"
    assert presets.keys() == {name.removesuffix(".toml") for name in POLICIES}


def test_sdist_carries_the_sources_and_nothing_else(tmp_path):
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    run(*build, "--outdir", tmp_path, ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        parts = [name.split("/")[1:] for name in archive.getnames()]
    assert {first for first, *_ in parts} == {
        *(".ci", ".docs", ".github", ".gitignore", ".pre-commit-config.yaml"),
        *("CHANGELOG.md", "LICENSE", "PKG-INFO", "README.md", "pyproject.toml"),
        *("eqx_dp", "examples", "policies", "tests"),
    }
    # What tools leave in a checkout.
    suffixes = {Path(last).suffix for *_, last in parts}
    assert not suffixes & {".pyc", ".whl", ".gz", ".log", ".db", ".npy", ".npz"}
    assert not any(part in ("__pycache__", "build", "dist", "out") for its in parts for part in its)


TOP_LEVEL = {"pyproject.toml", "eqx_dp", "policies", "tests", "examples", "README.md"}
TOP_LEVEL |= {"LICENSE", "CHANGELOG.md"}


def test_nothing_else_stands_at_the_top_level():
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not a clone")
    listed = subprocess.run(
        [git, "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = {path.split("/")[0] for path in listed.stdout.split("\0") if path}
    assert {name for name in names if not name.startswith(".")} == TOP_LEVEL
