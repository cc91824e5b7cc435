"""The pages for people: their links lead somewhere, and what they say of the rooms is so."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "examples" / "guides").glob("*.md"))
PAGES = [
    *(ROOT / "README.md", ROOT / "CHANGELOG.md"),
    *sorted((ROOT / ".github").glob("*.md")),
    *GUIDES,
]
ROOMS = re.findall(
    r"^\| `eqx_dp/(\w+)/` \|", (ROOT / ".github/ARCHITECTURE.md").read_text("utf-8"), re.MULTILINE
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_within_the_repository_lead_to_files(page):
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    inside = {link.split("#")[0] for link in links if not link.startswith(("http", "#"))}
    assert [link for link in inside if not (page.parent / link).exists()] == []


def test_every_room_is_in_the_table_of_rooms():
    folders = {path.parent.name for path in (ROOT / "eqx_dp").glob("*/__init__.py")}
    assert folders <= set(ROOMS)


def rooms_above(source: str) -> set[str]:
    """The rooms that a file of a room imports, whatever depth it stands at."""
    modules = [node.module or "" for node in ast.walk(ast.parse(source)) if _goes_up(node)]
    return {module.split(".")[0] for module in modules} & set(ROOMS)


def _goes_up(node: ast.AST) -> bool:
    return isinstance(node, ast.ImportFrom) and node.level > 1


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_the_rooms_above_it_alone(room):
    above = set(ROOMS[: ROOMS.index(room)])
    found = {
        path.name: rooms_above(path.read_text("utf-8")) - above - {room}
        for path in (ROOT / "eqx_dp" / room).rglob("*.py")
    }
    assert {name: rooms for name, rooms in found.items() if rooms} == {}


def test_an_import_of_a_room_below_is_seen():
    source = "from ..training import Step\nfrom ...programs.inside import Scan\nfrom .api import x"
    assert rooms_above(source) == {"training", "programs"}


def paths_named(text: str) -> set[str]:
    """What stands in backticks and looks like a file or a folder of the repository."""
    ticked = re.findall(r"`([\w./-]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return {one for one in ticked if re.fullmatch(r"\.?[\w-]+(/[\w.-]+)*/([\w-]+\.\w+)?", one)}


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_and_folders_that_a_page_names_are_there(name):
    named = paths_named((ROOT / ".github" / name).read_text("utf-8"))
    assert len(named) > 5
    missing = {
        one for one in named if not (ROOT / one).exists() and not (ROOT / "eqx_dp" / one).exists()
    }
    assert missing == set()
