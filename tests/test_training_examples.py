"""The examples of training: private, killed and resumed, sharded; and with adapters alone."""

import importlib
import json
import math
import os
import signal
from types import SimpleNamespace

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import eqx_dp as dp
from tests.test_examples import EXAMPLES

STEPS, WIDTH, RANK, BATCH = 4, 16, 2, 128
TINY = [
    *("--steps", str(STEPS), "--width", str(WIDTH), "--depth", "1", "--length", "8"),
    *("--batch", str(BATCH), "--epsilon", "1"),  # more takes longer to calibrate
]


def load(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)


gpt, lora = load("gpt"), load("lora")


@pytest.fixture(scope="module", autouse=True)
def little_text():
    with pytest.MonkeyPatch.context() as patch:
        for name in ("documents_of_topics", "documents_of_sources"):
            beginnings = [text[:100] for text in getattr(gpt, name)()[::4]]
            for module in (gpt, lora):
                patch.setattr(module, name, lambda found=beginnings: found)
        yield


def same(found, expected):
    return all(
        np.array_equal(a, b)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    )


# examples/gpt.py


def terminate_at(step):
    def callback(event):
        if event.step == step:
            os.kill(os.getpid(), signal.SIGTERM)

    return callback


def statement(directory):
    found = json.loads((directory / "privacy.json").read_text())
    return found, dp.PrivacyPlan.from_json(json.dumps(found["plan"]))


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """A run that is terminated in its second step and started again."""
    out, resumed_at = tmp_path_factory.mktemp("gpt"), []
    words = [*TINY, "--out", str(out)]
    with pytest.raises(SystemExit) as stopped:
        gpt.main(words, [terminate_at(2)])
    then = statement(out / "gpt")
    state = gpt.main(words, [lambda event: resumed_at.append(event.step)])
    return SimpleNamespace(
        out=out, status=stopped.value.code, then=then, resumed_at=resumed_at, state=state
    )


# Each run is looked at by one test: the runs take longer than the looking.


@pytest.mark.slow
def test_gpt(private, capsys):
    assert_it_goes_on_where_it_was_terminated(private)
    assert_it_spends_what_its_plan_says(private)
    assert_it_is_spread_over_eight_devices(private)
    assert_it_has_a_twin_without_privacy(private, capsys)


def assert_it_goes_on_where_it_was_terminated(private):
    assert private.status == 143
    assert private.resumed_at == [3, 4]
    assert int(private.state.step) == STEPS
    lines = (private.out / "gpt" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]


def assert_it_spends_what_its_plan_says(private):
    for (found, plan), steps in ((private.then, 2), (statement(private.out / "gpt"), STEPS)):
        assert found["steps_released"] == steps
        assert found["epsilon"] == plan.epsilon(steps)
    assert 0.99 < plan.epsilon() <= 1
    assert plan.sampling_prob * found["num_examples"] == pytest.approx(BATCH)


def assert_it_is_spread_over_eight_devices(private):
    weight = private.state.model.blocks.attend.weight
    expected = NamedSharding(weight.sharding.mesh, P(None, "model"))
    assert weight.sharding.is_equivalent_to(expected, weight.ndim)
    assert len(weight.sharding.device_set) == 8
    assert {shard.data.shape for shard in weight.addressable_shards} == {(1, 3 * WIDTH // 2, WIDTH)}


def assert_it_has_a_twin_without_privacy(private, capsys):
    picture = private.out / "gpt.png"
    before = picture.read_bytes()
    gpt.main([*TINY, "--out", str(private.out), "--non-private"])
    assert before.startswith(b"\x89PNG")
    assert picture.read_bytes() != before  # the twin's line has joined
    found, plan = statement(private.out / "gpt-non-private")
    assert (found["epsilon"], plan.noise_multiplier) == ("inf", 0)
    assert plan.steps == STEPS
    assert "epsilon=inf" in capsys.readouterr().out.splitlines()[-1]


def test_windows_hold_every_character_once():
    documents = ["def f():\n    return 1", "a longer, second text", "ü"]
    found = gpt.windows(documents, 4)
    whole = "\n".join(documents).replace("    ", "\t").replace("ü", "?")
    assert gpt.decoded(np.ravel(found)) == whole[: found.size].expandtabs(4)
    assert found.shape == (len(whole) // 4, 4)


def test_held_out_documents_are_not_trained_on():
    documents = [str(i) for i in range(40)]
    private, held_out = gpt.split(documents)
    assert held_out == ["15", "31"]
    assert sorted(private + held_out) == sorted(documents)


def test_entropy_of_equally_frequent_characters():
    assert gpt.unigram_entropy(np.arange(4).repeat(5).reshape(-1, 2)) == pytest.approx(math.log(4))


def test_gpt_does_not_see_what_it_predicts():
    model = gpt.GPT(8, WIDTH, 2, jax.random.key(0))
    text = jnp.arange(8) + 60
    changed = model(text.at[4].set(100)) != model(text)
    np.testing.assert_array_equal(jnp.any(changed, axis=1), np.arange(8) > 4)


@pytest.mark.slow
def test_what_is_written_begins_with_the_prompt():
    model = gpt.GPT(8, WIDTH, 1, jax.random.key(0))
    assert gpt.written(model, "def", jax.random.key(1)).startswith("def")


# examples/lora.py


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    costs, out = [], tmp_path_factory.mktemp("lora")
    with pytest.MonkeyPatch.context() as patch:
        show = lora.show
        patch.setattr(lora, "show", lambda found: (costs.extend(found), show(found)))
        words = [*TINY, "--base-steps", "3", "--rank", str(RANK), "--out", str(out)]
        base, model = lora.main(words)
    return SimpleNamespace(base=base, model=model, costs=costs, out=out)


@pytest.mark.slow
def test_lora(adapted):
    assert_the_base_is_as_it_was(adapted)
    assert_every_adapter_is_trained(adapted)
    assert_adapters_change_nothing_at_first(adapted)
    assert_only_adapters_cost_anything(adapted)
    found, plan = statement(adapted.out / "adapted")
    assert found["epsilon"] == plan.epsilon(STEPS) == plan.epsilon()
    assert 0.99 < plan.epsilon() <= 1


def assert_the_base_is_as_it_was(adapted):
    layers = [layer.base for layer in lora.linears(adapted.model)]
    assert same(eqx.tree_at(lora.linears, adapted.model, layers), adapted.base)


def assert_every_adapter_is_trained(adapted):
    _, key = jax.random.split(jax.random.key(0))
    before = lora.adapted(adapted.base, RANK, key)
    for layer, first in zip(lora.linears(adapted.model), lora.linears(before), strict=True):
        assert not np.any(first.up)
        assert np.all(layer.up != first.up)
        assert np.all(layer.down != first.down)


def assert_adapters_change_nothing_at_first(adapted):
    text = jnp.arange(8) + 60
    with_adapters = lora.adapted(adapted.base, RANK, jax.random.key(2))
    np.testing.assert_allclose(with_adapters(text), adapted.base(text), atol=1e-5)


def assert_only_adapters_cost_anything(adapted):
    every, few = adapted.costs
    adapters = RANK * (4 + 2 + 5 + 5) * WIDTH
    assert few.trained == adapters
    assert every.trained == sum(leaf.size for leaf in jax.tree.leaves(adapted.base))
    for cost in (every, few):
        assert cost.per_example == lora.MICROBATCH * cost.trained * 4
        assert 0 <= cost.optimizer - 2 * 4 * cost.trained < 100  # two moments, and counters
    assert few.temporary < every.temporary - (every.per_example - few.per_example) / 2
