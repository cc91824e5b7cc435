"""The page in a browser: drawn, in a window of a desk and of a phone, in light and in dark.

Skipped where there is no Chromium. Each start has a folder of its own, and no network.
"""

import html
import re
import shutil
import subprocess

import matplotlib.image
import numpy as np
import pytest

from eqx_dp.report import description_of, page_of
from tests.report.made import trained
from tests.report.test_page import HOSTILE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
DESK, PHONE = (1200, 900), (390, 844)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """A run with long and hostile names, so that the page has to break lines and to scroll."""
    found = description_of(trained(tmp_path_factory.mktemp("run")))
    long = "a/very/long/path/" * 8 + "model.py:12:3 (loss)"
    rows = [{"rule": "noise", "found": name, "where": long, "advice": long} for name in HOSTILE]
    checks = found["checks"] | {"privacy": {"ok": False, "violations": rows, "x" * 200: long}}
    return found | {"name": "_".join(HOSTILE), "checks": checks, "made_by": {"jax": "1" * 200}}


def browsed(page, folder, size, *options):
    """Opens a page; what the browser printed."""
    file = folder / "page.html"
    file.write_text(page, "utf-8")
    command = [
        CHROMIUM,
        *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"),
        *("--disable-component-update", "--disable-sync", "--no-first-run", "--hide-scrollbars"),
        "--host-resolver-rules=MAP * ~NOTFOUND",
        f"--user-data-dir={folder / 'user'}",
        "--window-size={},{}".format(*size),
        *options,
        file.as_uri(),
    ]
    result = subprocess.run(command, capture_output=True, timeout=400, check=True)
    return result.stdout.decode()


def asked(said, folder, size, question):
    """What a script sees of the page, which itself allows none."""
    page = page_of(said)
    page = re.sub("<meta http-equiv.*?>", "", page)
    script = f"<script>document.body.dataset.answer = JSON.stringify({question})</script></body>"
    dom = browsed(page.replace("</body>", script), folder, size, "--dump-dom")
    (answer,) = re.findall('data-answer="(.*?)"', dom)
    return answer.replace("&quot;", '"')


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_it_fits_the_window_and_wide_tables_scroll_by_themselves(said, tmp_path, size):
    # Windows have a least width, and frames have none.
    width, height = size
    frame = f"<iframe width={width} height={height} style='border:0' srcdoc='{{}}'></iframe>"
    page = re.sub("<meta http-equiv.*?>", "", page_of(said))
    root = "document.querySelector('iframe').contentDocument.documentElement"
    script = f"<script>onload = () => document.title = [{root}.scrollWidth, {root}.clientWidth]"
    dom = browsed(
        frame.format(html.escape(page)) + script + "</script>", tmp_path, DESK, "--dump-dom"
    )
    assert f"<title>{width},{width}</title>" in dom


def test_the_browser_sees_no_element_that_the_page_does_not_have(said, tmp_path):
    """What HTML of others would become is decided by the browser's parser, and no other."""
    question = "[...new Set([...document.body.querySelectorAll('*')].map(x => x.localName))].sort()"
    found = asked(said, tmp_path, DESK, question)
    harmless = "a circle dd details div dl dt figcaption figure footer h1 h2 h3 h4 header li line"
    harmless += " main nav p polyline script section summary svg table tbody td text th thead tr ul"
    assert found == str(sorted(harmless.split())).replace("'", '"').replace(" ", "")


def test_the_policy_of_the_page_forbids_scripts(said, tmp_path):
    page = page_of(said).replace("</body>", "<script>document.title = 'ran'</script></body>")
    assert "<title>ran</title>" not in browsed(page, tmp_path, DESK, "--dump-dom")
    without = re.sub("<meta http-equiv.*?>", "", page)
    assert "<title>ran</title>" in browsed(without, tmp_path, DESK, "--dump-dom")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("size", [DESK, PHONE], ids=["desk", "phone"])
def test_it_is_drawn_in_light_and_in_dark(said, tmp_path, size):
    means = []
    for theme, options in (("light", ()), ("dark", ("--blink-settings=preferredColorScheme=0",))):
        file = tmp_path / f"{theme}.png"
        browsed(page_of(said), tmp_path, size, f"--screenshot={file}", *options)
        picture = matplotlib.image.imread(file)[:, :, :3]
        assert picture.shape[:2] == size[::-1]
        assert len(np.unique((picture * 15).astype(int).reshape(-1, 3), axis=0)) > 10
        means.append(float(np.mean(picture)))
    light, dark = means
    assert dark < 0.3
    assert light > 0.8
