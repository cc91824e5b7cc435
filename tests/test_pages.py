"""The pages for people: their links lead somewhere, and what they say of the rooms is so."""

import ast
import functools
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


def test_a_room_imports_the_rooms_above_it_alone():
    for i, room in enumerate(ROOMS):
        for path in (ROOT / "eqx_dp" / room).rglob("*.py"):
            nodes = ast.walk(ast.parse(path.read_text("utf-8")))
            above = [x.module or "" for x in nodes if isinstance(x, ast.ImportFrom) and x.level > 1]
            found = {module.split(".")[0] for module in above} & set(ROOMS[i + 1 :])
            assert not found, f"{path} imports {found}, which are below {room}"


@functools.cache
def floors(path: Path) -> int:
    """The longest chain of imports, not those for types alone, from a module within its room."""
    nodes = [x for x in ast.parse(path.read_text("utf-8")).body if isinstance(x, ast.ImportFrom)]
    names = {x.module or name.name for x in nodes if x.level == 1 for name in x.names}
    return 1 + max([floors(path.with_name(f"{name}.py")) for name in names], default=0)


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_at_most_26_modules_on_7_floors(room):
    modules = set((ROOT / "eqx_dp" / room).glob("*.py"))
    assert len(modules) <= 26
    # The roof of all is `__init__.py`. One room is still to be brought down.
    assert max(map(floors, modules)) - 1 <= {"privacy": 8}.get(room, 7)


@pytest.mark.parametrize("name", ["ARCHITECTURE.md", "CONTRIBUTING.md"])
def test_files_and_folders_that_a_page_names_are_there(name):
    text = re.sub(r"```.*?```", "", (ROOT / ".github" / name).read_text("utf-8"), flags=re.DOTALL)
    # What stands in backticks and looks like a file or a folder.
    named = set(re.findall(r"`(\.?[\w-]+(?:/[\w.-]+)*/(?:[\w-]+\.\w+)?)`", text))
    assert len(named) > 5
    missing = {x for x in named if not (ROOT / x).exists() and not (ROOT / "eqx_dp" / x).exists()}
    assert missing == set()
