"""The package as users get it: a wheel, a checkout, an sdist; its version and links."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

import eqx_dp

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
POLICIES = {path.name: path.read_bytes() for path in (ROOT / "policies").iterdir()}

# Prints where the package came from and what every preset says, as JSON.
LOAD_EVERY_PRESET = """
import json, eqx_dp
from eqx_dp.precision import available_policies, load_policy
presets = {name: str(load_policy(name)) for name in available_policies()}
print(json.dumps([eqx_dp.__file__, presets]))
"""


def load_every_preset(python: Path, directory: Path):
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "JAX"))}
    environment = {**inherited, "JAX_ENABLE_X64": "1", "JAX_PLATFORMS": "cpu"}
    output = run(python, "-c", LOAD_EVERY_PRESET, cwd=directory, env=environment)
    file, presets = json.loads(output)
    return Path(file), presets


def run(*command: str | Path, **options: Any) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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
def test_wheel_carries_the_package_and_links_that_lead_out_of_the_page_on_pypi(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = (name for name in names if name.endswith("METADATA"))
        links = re.findall(r"\]\(([^)\s]+)\)", archive.read(metadata).decode())
    files = ("py.typed", "precision/policy.schema.json", "report/page.html", "report/page.css")
    assert {f"eqx_dp/{name}" for name in files} <= names
    # Nothing but the package: no tests, no second copy of the presets.
    assert {name.split("/")[0].split("-")[0] for name in names} == {"eqx_dp"}
    assert len(links) > 10
    assert [link for link in links if not link.startswith(("https://", "#"))] == []


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


TOP_LEVEL = {"pyproject.toml", "eqx_dp", "policies", "tests", "examples"}
TOP_LEVEL |= {"README.md", "LICENSE", "CHANGELOG.md"}


def test_sdist_carries_the_sources_and_nothing_else(tmp_path):
    build = [sys.executable, "-m", "build", "--sdist", "--no-isolation"]
    run(*build, "--outdir", tmp_path, ROOT)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        parts = [name.split("/")[1:] for name in archive.getnames()]
    hidden = {".ci", ".docs", ".github", ".gitignore", ".pre-commit-config.yaml", "PKG-INFO"}
    assert {first for first, *_ in parts} == TOP_LEVEL | hidden
    # What tools leave in a checkout.
    assert not {Path(last).suffix for *_, last in parts} & {".pyc", ".whl", ".gz", ".log", ".npz"}
    assert not any(part in ("__pycache__", "build", "dist", "out") for its in parts for part in its)


def test_version_changelog_and_citation_agree():
    installed, version, source = eqx_dp.__version__, PROJECT["version"], PROJECT["urls"]["Source"]
    assert installed == version, "the environment has an older install: pip install -e . again"
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    headings = re.findall(r"^## \[(.*?)\]", changelog, re.MULTILINE)
    links = dict(re.findall(r"^\[(.*)\]: (\S+)$", changelog, re.MULTILINE))
    assert version in headings
    assert list(links) == headings
    assert all(link.startswith(source) for link in links.values())
    readme = (ROOT / "README.md").read_text("utf-8")
    (entry,) = re.findall(r"^```bibtex\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    fields = dict(re.findall(r"^  (\w+)\s*= \{(.*)\},$", entry, re.MULTILINE))
    assert fields["version"] == version
    assert (fields["url"], fields["license"]) == (source, PROJECT["license"])
