"""Hosts that can all read all examples share one draw."""

import dataclasses

import jax
import numpy as np

from tests.training import runs
from tests.training.runs import seeded


def test_hosts_share_what_one_would_draw(monkeypatch):
    """Evenly, so that they need fewer slots; each may read all examples."""
    rules = runs.rules_of("Auto")  # all of its devices are of this host, the first
    whole = seeded(sharding=rules, shared=True).sampler()
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    shared, owned = (seeded(sharding=rules, shared=x).sampler() for x in (True, False))
    assert shared.capacity < owned.capacity
    assert (len(shared.owned), len(owned.owned)) == (64, 16)
    for step in range(5):
        draws = [dataclasses.replace(shared, host=host).batch(step) for host in range(4)]
        parts = [indices[~mask] for indices, mask in draws]
        indices, mask = whole.batch(step)
        np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.sort(indices[~mask]))
        assert max(map(len, parts)) - min(map(len, parts)) <= 1
