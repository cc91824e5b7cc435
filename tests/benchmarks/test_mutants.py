"""Mutants are made where a test could find them, and tests that reach them are run on them."""

import ast
import functools
import json
import random
import types

import pytest

from tests.benchmarks.mutants import (
    MODULES,
    ROOT,
    Killers,
    Profile,
    Runner,
    judged,
    row,
    sampled,
    sharing,
    suite,
)
from tests.benchmarks.mutation import runner
from tests.benchmarks.mutation.changes import Mutant, mutants, planted

SOURCE = '''"""A module, of 1 < 2."""
LIMIT = 3


def least(a: "int + 1", b, *, strict=True):
    """The least, if a < b."""
    if not a < b:
        raise ValueError(f"{a + 1}" + "1")
    return max(
        a,
        b,
    )


class Shown:
    def __repr__(self):
        return 7 * "x"
'''


def test_what_is_changed_and_what_is_left_alone():
    found = {one.text for one in mutants(SOURCE)}
    assert found == {
        ": 3  ->  4",
        "least: True  ->  False",
        "least: if not a < b: raise ValueError(f'{a + 1}' + '1')  ->  "
        "if not not a < b: raise ValueError(f'{a + 1}' + '1')",
        "least: not a < b  ->  a < b",
        "least: a < b  ->  a <= b",
        "least: max(a, b)  ->  min(a, b)",
    }


def test_each_mutant_is_one_change_and_lines_stay():
    for one in mutants(SOURCE):
        tree = planted(SOURCE, one.place, one.turn)
        assert ast.unparse(tree) != ast.unparse(ast.parse(SOURCE)), one
        (changed,) = (x for x in tree.body if isinstance(x, ast.FunctionDef))
        assert (changed.lineno, changed.body[-1].end_lineno) == (5, 12)
    assert {(one.line, one.last) for one in mutants(SOURCE) if "max" in one.text} == {(9, 12)}
    assert {one.is_at_import for one in mutants(SOURCE) if one.line in (2, 5)} == {True}
    assert {one.is_at_import for one in mutants(SOURCE) if one.line >= 7} == {False}


def test_functions_take_their_new_code_also_behind_decorators():
    source = "def double(x):\n    return 2 * x\n"
    space: dict[str, types.FunctionType] = {}
    exec(compile(source, "/made/up.py", "exec"), space)
    kept = functools.cache(space["double"])
    (one,) = (one for one in mutants(source) if "2 * x  ->  2 / x" in one.text)
    runner.exchange(compile(planted(source, one.place, one.turn), "/made/up.py", "exec"))
    assert kept(4) == 0.5


def test_tests_that_reach_a_mutant_run_the_best_killers_first():
    file = "eqx_dp/x/a.py"
    tests = [
        Profile("tests/x/slow", 9.0, {file: frozenset([5, 6])}),
        Profile("tests/x/quick", 0.3, {file: frozenset([5])}),
        Profile("tests/x/of other lines", 0.1, {file: frozenset([7])}),
        Profile("tests/x/of another file", 0.1, {"eqx_dp/x/b.py": frozenset([5])}),
        Profile("tests/x/unknown", 5.0, {file: frozenset()}),
        Profile("tests/y/of another room", 0.3, {file: frozenset([5])}),
    ]
    quick, slow, unknown, far = (
        f"tests/{x}" for x in ("x/quick", "x/slow", "x/unknown", "y/of another room")
    )
    killers, mutant = Killers(tests), Mutant(5, 5, "", 0, 0, False)
    assert killers.of(file, mutant) == [quick, far, unknown, slow]
    for _ in range(200):
        killers.count(file, [quick, slow], slow)
    assert killers.of(file, mutant) == [far, slow, unknown, quick]
    assert len(killers.of(file, mutant._replace(is_at_import=True))) == 5


def test_each_case_of_a_test_reaches_what_any_of_them_does():
    """Programs of JAX are traced for the first case; of the third there was no time to know."""
    one, other, unknown = ({"a.py": frozenset(lines)} for lines in ([5, 6], [7], []))
    tests = [Profile("t[1]", 1.0, one), Profile("t[2]", 1.0, other), Profile("u", 1.0, other)]
    found = [test.reached["a.py"] for test in sharing(tests)]
    assert found == [{5, 6, 7}, {5, 6, 7}, {7}]
    assert sharing([*tests, Profile("t[3]", 5.0, unknown)])[0].reached == unknown


def test_a_sample_is_in_proportion_and_the_same_for_the_same_seed():
    made = {name: [Mutant(i, i, name, i, 0, False) for i in range(n)] for name, n in SIZES.items()}
    chosen = sampled(made, 50, seed=3)
    assert {name: len(some) for name, some in chosen.items()} == {"a": 10, "b": 40, "c": 1}
    random.seed(1)
    assert sampled(made, 50, seed=3) == chosen
    assert sampled(made, 50, seed=4) != chosen
    assert sampled(made, None, seed=3).keys() == made.keys()


SIZES = {"a": 100, "b": 400, "c": 2}


def test_a_share_leaves_out_what_no_test_can_find_or_none_had_time_for():
    found = row("x", ["killed"] * 9 + ["survived"] + ["explained", "undecided"] * 3)
    assert (found["run"], found["survive"]) == ("16", "10.0 % (1.8-40.4)")
    assert row("x", ["explained"])["survive"] == "-"


def test_modules_tests_and_explained_mutants_are_there():
    known = suite()
    assert [x for x in (*known.modules, *known.tests) if not (ROOT / x).is_file()] == []
    for file, explained in known.explained.items():
        texts = {one.text for one in mutants((ROOT / file).read_text("utf-8"))}
        assert explained.keys() <= texts, file


@pytest.mark.slow
def test_fixtures_are_there_for_every_part_of_the_tests():
    """Three tests are collected first, then others; all are green without a change."""
    name = "tests/privacy/test_sampling.py::test_step_refused_by_name"
    process = Runner("--warm")
    answer = process.run([f"{name}[{step}]" for step in (-1, 1.0, True, 1, None)], 60, None)
    process.end()
    assert [one["is_green"] for one in answer["tests"]] == [True] * 5


@pytest.mark.slow
@pytest.mark.parametrize("is_at_import", [False, True])
def test_a_fork_tells_a_mutant_from_the_code_as_it_is(is_at_import: bool):
    """One is in a function that was imported, one in a constant, which is imported again."""
    file, test = "eqx_dp/privacy/chacha.py", "tests/privacy/test_chacha.py"
    process = Runner(*([] if is_at_import else ["--warm"]))
    plain = process.run([test], 60, None)["tests"]
    assert all(one["is_green"] for one in plain)
    reaching = [one for one in plain if one["reached"].get(file)]
    lines = set[int]().union(*(one["reached"][file] for one in reaching))
    names = [one["test"] for one in reaching]
    made = mutants((ROOT / file).read_text("utf-8"))
    if is_at_import:
        mutant = next(one for one in made if one.is_at_import and one.line > 20)
    else:
        mutant = next(one for one in made if not one.is_at_import and one.line in lines)
    changed = process.run(names, 60, (file, mutant))
    process.end()
    assert changed["status"] or not changed["tests"][-1]["is_green"], mutant


@pytest.mark.slow
def test_a_hundred_mutants_are_found_by_the_tests_that_found_them():
    """A sample, in `found.jsonl`. What is no longer in the code is passed over."""
    warm, cold = Runner("--warm", "--slow"), Runner("--slow")
    passed_over, survived = [], []
    for known in map(json.loads, FOUND.read_text("utf-8").splitlines()):
        file, text, line = known["file"], known["text"], known["line"]
        made = [one for one in mutants((ROOT / file).read_text("utf-8")) if one.text == text]
        if not made:
            passed_over.append(known)
            continue
        mutant = min(made, key=lambda one, line=line: abs(one.line - line))
        killers = Killers([Profile(known["by"], 1.0, {file: frozenset()})])
        found = judged(warm, cold, file, mutant, killers, limit=60)
        is_red = found["by"] == known["by"] or mutant.is_at_import  # and no error
        if found["status"] != "killed" or not is_red:
            survived.append(known)
    warm.end()
    cold.end()
    assert survived == []
    assert len(passed_over) <= 20, "write it anew by `python -m tests.benchmarks mutants --log`"


FOUND = MODULES.with_name("found.jsonl")
