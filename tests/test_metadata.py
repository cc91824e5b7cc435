"""What the package says of itself, in several files: they agree."""

import re
import tomllib
from pathlib import Path
from typing import Any

import eqx_dp

ROOT = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text("utf-8")
README = (ROOT / "README.md").read_text("utf-8")


def test_the_version_is_that_of_pyproject():
    installed, declared = eqx_dp.__version__, PROJECT["version"]
    assert installed == declared, "the environment has an older install: pip install -e . again"


def test_the_changelog_begins_with_what_is_unreleased_and_then_has_the_version():
    first, second, *_ = re.findall(r"^## (.*)$", CHANGELOG, re.MULTILINE)
    assert first == "[Unreleased]"
    assert re.fullmatch(rf"\[{re.escape(PROJECT['version'])}\] - \d{{4}}-\d\d-\d\d", second)


def test_every_version_of_the_changelog_is_a_link():
    versions = re.findall(r"^## \[(.*)\]", CHANGELOG, re.MULTILINE)
    links = dict(re.findall(r"^\[(.*)\]: (\S+)$", CHANGELOG, re.MULTILINE))
    assert list(links) == versions
    assert all(link.startswith(PROJECT["urls"]["Source"]) for link in links.values())


def test_the_changelog_has_the_sections_of_keep_a_changelog_alone():
    kinds = set(re.findall(r"^### (.*)$", CHANGELOG, re.MULTILINE))
    assert kinds <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_citation_in_the_readme_names_the_version_and_the_source():
    (entry,) = re.findall(r"^```bibtex\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    fields = dict(re.findall(r"^  (\w+)\s*= \{(.*)\},$", entry, re.MULTILINE))
    assert fields["version"] == PROJECT["version"]
    assert fields["url"] == PROJECT["urls"]["Source"]
    assert fields["license"] == PROJECT["license"]
