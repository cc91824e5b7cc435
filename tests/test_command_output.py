"""What commands show beside their tables: whole titles, what they are at, former names."""

import pytest

from eqx_dp.__main__ import main
from eqx_dp.commands import COMMANDS
from eqx_dp.commands.output import Curve, Panel, Table, _figure
from eqx_dp.commands.working import working

# As long as titles of `bench` get on a GPU.
TITLE = "A @ A.T, A of 65536 x 1048576, median of 15, on gpu (NVIDIA H200 NVL WWWW), JAX 0.10.2"
NAMES = ["mixed_bfloat16", "float32"]
PANELS = {
    "one": [Panel("TFLOP/s", NAMES, [1.0, 20.0])],
    "three": [Panel("temporary memory / float32", NAMES, [1.0, None])] * 3,
    "a curve": [Curve("epsilon", "steps", [(1.0, 1.0), (10.0, 3.0)])],
}


@pytest.mark.parametrize("name", PANELS)
def test_no_title_of_a_picture_is_cut_off(name):
    figure = _figure(Table(TITLE, ("", ""), [], [], {}, PANELS[name]))
    figure.draw_without_rendering()
    titles = [figure._suptitle, *(axes._left_title for axes in figure.axes)]
    for title in titles:
        box = title.get_window_extent()
        assert figure.bbox.x0 <= box.x0
        assert box.x1 <= figure.bbox.x1
        assert box.y1 <= figure.bbox.y1
    above = titles[0].get_window_extent().y0
    assert all(title.get_window_extent().y1 <= above for title in titles[1:])
    assert titles[0].get_text().replace("\n", " ") == TITLE


def test_long_work_says_what_it_is_at(capsys):
    with working(2) as begin:
        begin("compiling ghost")
        begin("timing")
    out, error = capsys.readouterr()
    assert error.splitlines() == ["eqx-dp: 1/2 compiling ghost", "eqx-dp: 2/2 timing"]
    assert not out


def test_on_a_terminal_a_bar_says_so(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with working(1) as begin:
        begin("compiling ghost [1]")
    assert "compiling ghost [1]" in capsys.readouterr().err


def test_a_former_name_works_with_a_note(capsys):
    (command,) = (command for command in COMMANDS if command.former)
    assert (command.name, command.former) == ("memory", "plan")
    assert main(["plan", "--model", "mlp", "--width", "8", "--microbatch", "1000000"]) == 2
    note, refusal = capsys.readouterr().err.splitlines()
    assert "`plan` is called `memory` now" in note
    assert "--microbatch: found 1000000" in refusal
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "plan " not in capsys.readouterr().out.split("COMMAND", 2)[2]
