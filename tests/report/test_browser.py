"""The page in a browser: what its parser makes of hostile names, and that no script runs.

Skipped where there is no Chromium. Each start has a folder of its own, and no network.
"""

import re
import shutil
import subprocess

import pytest

from eqx_dp.report import page_of
from tests.report.made import changed, ledger_of, trained
from tests.report.test_page import HOSTILE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DESK = (1200, 900)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Of a run with long and hostile names, so that lines have to be broken and tables scroll."""
    run = trained(tmp_path_factory.mktemp("run"))
    long = "a/very/long/path/" * 8 + "model.py:12:3 (loss)"
    rows = [
        {"rule": "noise", "found": name, "where": long, "advice": long} for name in HOSTILE.values()
    ]
    changed(run / "checks.json", privacy={"ok": False, "violations": rows, "x" * 200: long})
    changed(ledger_of(run), made_by={"jax": "1" * 200}, policy="_".join(HOSTILE.values()))
    return page_of(run)


def browsed(page, folder, *options):
    """Opens a page; what the browser printed."""
    file = folder / "page.html"
    file.write_text(page, "utf-8")
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"),
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'user'}",
        "--window-size={},{}".format(*DESK),
        *options,
        file.as_uri(),
    ]
    result = subprocess.run(command, capture_output=True, timeout=400, check=True)
    return result.stdout.decode()


def test_the_browser_sees_no_element_that_the_page_does_not_have(page, tmp_path):
    """What HTML of others would become is decided by the browser's parser, and no other."""
    question = "[...new Set([...document.body.querySelectorAll('*')].map(x => x.localName))].sort()"
    script = f"<script>document.body.dataset.answer = {question}.join(' ')</script></body>"
    without = re.sub("<meta http-equiv.*?>", "", page)
    dom = browsed(without.replace("</body>", script), tmp_path, "--dump-dom")
    (answer,) = re.findall('data-answer="(.*?)"', dom)
    harmless = (
        "a clippath dd defs details div dl dt figcaption figure footer g h1 h2 h3 h4 header i"
    )
    harmless += " li main nav p path rect script section style summary svg table tbody td text th"
    assert set(answer.lower().split()) <= {*harmless.split(), "thead", "tr", "ul", "use"}


def test_the_policy_of_the_page_forbids_scripts(page, tmp_path):
    page = page.replace("</body>", "<script>document.title = 'ran'</script></body>")
    assert "<title>ran</title>" not in browsed(page, tmp_path, "--dump-dom")
    without = re.sub("<meta http-equiv.*?>", "", page)
    assert "<title>ran</title>" in browsed(without, tmp_path, "--dump-dom")
