"""The command that measures what a loss scale for each example costs."""

import pytest

from tests.benchmarks import loss_scale
from tests.benchmarks.rows import TINY, mlp


@pytest.mark.slow
def test_command(tmp_path, capsys):
    path = tmp_path / "table.md"
    told = ["--models", "mlp", "--methods", "per_example", "--repeats", "1", "--tiny"]
    loss_scale.main([*told, "--markdown", str(path)])
    printed, written = capsys.readouterr().out, path.read_text()
    for name in loss_scale.policies():
        assert name in printed
        assert f"| {name} |" in written


def test_a_probe_is_a_forward_and_a_backward_pass():
    """6 x 8 and 8 x 10 for each of 4 examples, 2 FLOPs an entry, forward, back, and for the sum.

    Back to activations alone, and so not through the first layer.
    """
    row, policies = mlp(**TINY["mlp"]), loss_scale.policies()
    static, per_example = (
        loss_scale.traced(row, policies[name], "book_keeping").flops
        for name in (loss_scale.STATIC, loss_scale.PER_EXAMPLE)
    )
    first, second = 2 * 4 * 6 * 8, 2 * 4 * 8 * 10
    assert static == 2 * first + 3 * second
    assert per_example - static == first + 2 * second
