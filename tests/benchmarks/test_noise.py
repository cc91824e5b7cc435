"""The command that measures noise; on the tests' eight devices."""

import jax
import numpy as np
import pytest

from tests.benchmarks import noise


@pytest.mark.slow
def test_command(tmp_path):
    path = tmp_path / "table.md"
    noise.main(["--tiny", "--rounds", "1", "--markdown", str(path)])
    written = path.read_text()
    for place in noise.places():
        assert f"## Noise, {place.name}" in written
    for name, tree in noise.trees(is_tiny=True).items():
        assert f"| {name} | {len(jax.tree.leaves(tree))} |" in written


@pytest.mark.slow
def test_what_is_measured_is_noise():
    """The same on one device and on a mesh, and as much of it as is compared with."""
    tree = noise.trees(is_tiny=True)["one leaf"]
    places = [noise.Place("one device", None), *noise.places()]
    found = [noise.noise(tree, place).run()[0] for place in places]
    assert 0.8 < np.std(found[0]) < 1.2
    for place, noisy in zip(places, found, strict=True):
        np.testing.assert_array_equal(noisy, found[0])
        drawn = noise.plain_draw(tree, place).run()
        assert drawn.shape == noisy.shape
        assert drawn.sharding.is_equivalent_to(noisy.sharding, 1)
