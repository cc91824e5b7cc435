"""Runs to report on, and pages taken apart."""

import json
import shutil
from html.parser import HTMLParser

import eqx_dp as dp
from tests.training import runs

STEPS = 6


def trained(directory, **options):
    """A run of so many of its plan's ten steps, with a policy and an evaluation."""
    step = runs.make(policy=dp.load_policy("mixed_bfloat16"), **options)
    evaluate = lambda _: {"accuracy": 0.5, "error": float("nan")}  # noqa: E731
    runs.trainer(directory, step, evaluate=evaluate).run(runs.small_model(), steps=STEPS)
    return directory


def copied(directory, to):
    """The same run in another place."""
    return shutil.copytree(directory, to, symlinks=True)


def changed(file, **values):
    """Replaces values of a JSON object in a file, which is made if it is not there."""
    before = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps(before | values))


def ledger_of(directory):
    """The file of a run's only start."""
    (file,) = (directory / "ledger").glob("*.json")
    return file


class Page(HTMLParser):
    """A page taken apart: its elements, their attributes, and its text."""

    VOID = ("meta", "br")

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts, self._open = [], [], []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open += [] if tag in self.VOID else [tag]

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if "style" not in self._open:
            self.texts.append(data)

    def tags(self):
        return {tag for tag, _ in self.elements}

    def text(self):
        return " ".join(" ".join(self.texts).split())
