"""The command that compiles steps of a large GPT, on a small one."""

import pytest

from tests.benchmarks import large_gpt

SMALL = (
    *("--layers", "3", "--width", "64", "--heads", "4", "--length", "64", "--vocabulary", "128"),
    *("--batch", "2", "--microbatch", "1"),
)


@pytest.mark.slow
def test_command(tmp_path, capsys):
    path, kept = tmp_path / "table.md", tmp_path / "rows.jsonl"
    contenders = ["non-private", "ghost", "jax_privacy"]
    arguments = [*SMALL, "--mesh", "4x2", "--contenders", *contenders, "--rows", str(kept)]
    large_gpt.main([*arguments, "--markdown", str(path)])
    rows = [large_gpt.decoded(line) for line in kept.read_text().splitlines()]
    plain, ghost, peer = rows
    assert [row.contender for row in rows] == contenders
    assert not any(row.failed for row in rows)
    assert plain.flops == pytest.approx(plain.ideal, rel=0.02)
    assert peer.flops == pytest.approx(plain.flops, rel=0.02)
    # Two passes, and the norms; formed leaves are not differentiated in the second.
    assert 1.5 * plain.flops < ghost.flops < 2.2 * plain.flops
    assert ghost.sent["reduce-scatter"].size == pytest.approx(plain.sent["reduce-scatter"].size)
    assert all(0 < row.host < large_gpt.HOST for row in rows)
    assert "| 4x2 | ghost | 1 |" in path.read_text()
    # A command that goes on from its rows compiles nothing again.
    large_gpt.main(arguments)
    assert kept.read_text().count("\n") == 3
    assert "jax_privacy" in capsys.readouterr().out


@pytest.mark.slow
def test_what_cannot_be_compiled_says_why(capsys):
    large_gpt.main([*SMALL, "--width", "60", "--mesh", "8", "--contenders", "non-private"])
    assert "none: ValueError" in " ".join(capsys.readouterr().out.split())
