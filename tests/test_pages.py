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
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    modules = [node.module or "" for node in nodes if node.level > 1]
    return {module.split(".")[0] for module in modules} & set(ROOMS)


def test_a_room_imports_the_rooms_above_it_alone():
    for i, room in enumerate(ROOMS):
        for path in (ROOT / "eqx_dp" / room).rglob("*.py"):
            found = rooms_above(path.read_text("utf-8")) - set(ROOMS[: i + 1])
            assert not found, f"{path} imports {found}, which are below {room}"


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_and_folders_that_a_page_names_are_there(name):
    text = re.sub(r"```.*?```", "", (ROOT / ".github" / name).read_text("utf-8"), flags=re.DOTALL)
    # What stands in backticks and looks like a file or a folder.
    named = set(re.findall(r"`(\.?[\w-]+(?:/[\w.-]+)*/(?:[\w-]+\.\w+)?)`", text))
    assert len(named) > 5
    missing = {x for x in named if not (ROOT / x).exists() and not (ROOT / "eqx_dp" / x).exists()}
    assert missing == set()
