"""Checkpoints come back bit for bit, on any number of devices, or say why they do not."""

import json
import re
import shutil
import threading
import warnings

import equinox as eqx
import jax
import numpy as np
import optax
import orbax.checkpoint
import pytest

import eqx_dp as dp
from eqx_dp.training.checkpoint import Checkpoints
from eqx_dp.training.directory import RunDirectory
from eqx_dp.training.first_model import FirstModel
from eqx_dp.training.identity import key_of
from tests.training import runs
from tests.training.runs import SEED, XS, YS, assert_agrees, assert_same, leaves, make, small_model

STEP = make()  # compiled once for this file
PLAN = STEP.plan


@pytest.fixture(scope="module")
def whole():
    """The model of a run of ten steps that nothing disturbs."""
    STEP.unrecorded.steps = 0
    return runs.trainer(None, STEP).run(small_model())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A directory with checkpoints of steps 2, 4 and 6."""
    directory = tmp_path_factory.mktemp("saved")
    runs.trainer(directory, STEP).run(small_model(), steps=6)
    return directory


@pytest.fixture
def copy(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copy", symlinks=True)


def restored(directory, step=STEP, model=None):
    model = small_model() if model is None else model
    identity = step.identity(model, XS[:1], YS[:1])
    checkpoints = Checkpoints(directory, step, identity=identity)
    try:
        return checkpoints.restore(FirstModel(model))
    finally:
        checkpoints.close()


def begun(directory, model, step=STEP):
    """The state of a run that has been recorded and has taken no step."""
    return restored(directory, step, model)


def quiet(directory, step=STEP):
    """A restore that warns of nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return restored(directory, step)


def test_a_state_comes_back_bit_for_bit(saved):
    STEP.unrecorded.steps = 0
    state = runs.trainer(None, STEP).run(small_model(), steps=6)
    found = quiet(saved)
    assert int(found.step) == 6
    assert_same(found, state)  # the key of the noise as well, which is made again from the seed


def test_a_run_that_is_resumed_ends_like_one_that_is_not(copy, whole):
    assert_same(runs.trainer(copy, STEP).run(small_model()), whole)
    assert assert_agrees(copy, PLAN) == 10
    # And once it is over, it is over.
    assert_same(runs.trainer(copy, STEP).run(small_model()), whole)


def test_a_narrow_model_with_a_key_of_its_own_comes_back(tmp_path):
    class Noisy(eqx.Module):
        weight: jax.Array
        key: jax.Array

    model = Noisy(jax.numpy.arange(3.0), jax.random.key(5))
    step = make(
        policy=dp.load_policy("bfloat16"),
        optimizer=optax.adam(1e-3),
        loss=lambda model, x, y: jax.numpy.sum(model.weight * x[:3]) - y,
    )
    state = begun(tmp_path, model, step)
    found = restored(tmp_path, step, Noisy(jax.numpy.zeros(3), jax.random.key(5)))
    assert_same(found, state)
    assert found.model.weight.dtype == "bfloat16"


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_other_numbers_of_devices(kind, tmp_path, whole):
    many = make(sharding=runs.rules_of(kind))
    state = runs.trainer(tmp_path, many).run(small_model(), steps=4)
    assert len(state.model.weight.sharding.device_set) == 8
    for devices in (4, 1):
        fewer = make(sharding=runs.rules_of(kind, devices))
        found = quiet(tmp_path, fewer)
        assert_same(found, state)
        expected = fewer.init(small_model())
        assert [x.sharding for x in jax.tree.leaves(eqx.filter(found, eqx.is_array))] == [
            x.sharding for x in jax.tree.leaves(eqx.filter(expected, eqx.is_array))
        ]
    assert_same(quiet(tmp_path), state)
    resumed = runs.trainer(tmp_path, STEP).run(small_model())
    for a, b in zip(leaves(resumed.model), leaves(whole.model), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_no_secret_is_in_the_directory(saved):
    words = jax.random.key_data(key_of(SEED, "noise")).tolist()
    assert any(words == x.ravel().tolist() for x in leaves(STEP.init(small_model())))  # it is there

    numbers = {SEED, *words, SEED % 2**64, SEED >> 64}
    needles = {str(n).encode() for n in numbers} | {f"{n:x}".encode() for n in numbers}
    for n in numbers:
        size = -(-n.bit_length() // 8)
        needles |= {n.to_bytes(size, "little"), n.to_bytes(size, "big")}
    files = [file for file in saved.rglob("*") if file.is_file()]
    assert files
    for file in files:
        content = file.read_bytes()
        assert not [needle for needle in needles if needle in content], file

    # Arrays are compressed: what is in them is looked at as well.
    arrays = orbax.checkpoint.StandardCheckpointer().restore(saved / "00000006" / "state")
    stored = jax.tree.leaves(arrays)
    assert len(stored) == len(leaves(STEP.init(small_model()))) - 1
    for array in stored:
        assert not set(words) & set(np.asarray(array).view(np.uint32).ravel().tolist())


# Another run.


def other_plan(**changed):
    fields = {"sampling_prob": 0.25, "steps": 10, "noise_multiplier": 20.0, "delta": 1e-5}
    return make(dp.PrivacyPlan(**(fields | changed)))


OTHERS = {
    "sampling_prob": (
        lambda: other_plan(sampling_prob=0.5),
        "plan.sampling_prob: 0.25 in the checkpoint, 0.5 in this run",
    ),
    "steps": (lambda: other_plan(steps=11), "plan.steps: 10 in the checkpoint, 11 in this run"),
    "noise": (
        lambda: other_plan(noise_multiplier=21.0),
        "plan.noise_multiplier: 20.0 in the checkpoint, 21.0 in this run",
    ),
    "delta": (
        lambda: other_plan(delta=1e-6),
        "plan.delta: 1e-05 in the checkpoint, 1e-06 in this run",
    ),
    "relation": (
        lambda: other_plan(neighboring_relation=dp.NeighboringRelation.REPLACE_SPECIAL),
        "plan.neighboring_relation: ADD_OR_REMOVE_ONE in the checkpoint, REPLACE_SPECIAL in",
    ),
    "policy": (
        lambda: make(policy=dp.load_policy("mixed_bfloat16")),
        "policy: nothing in the checkpoint, params=float32,compute=bfloat16",
    ),
    "clip norm": (
        lambda: make(l2_clip_norm=0.5),
        "l2_clip_norm: 1.0 in the checkpoint, 0.5 in this run",
    ),
    "unit norm": (
        lambda: make(rescale_to_unit_norm=True),
        "rescale_to_unit_norm: False in the checkpoint, True in this run",
    ),
    "num_examples": (
        lambda: make(num_examples=65),
        "num_examples: 64 in the checkpoint, 65 in this run",
    ),
    "seed": (lambda: make(seed=SEED + 1), "seed: the checkpoint was made with another seed"),
    "disclose": (
        lambda: make(disclose=("loss",)),
        "disclose: [] in the checkpoint, ['loss'] in this run",
    ),
    "optimizer": (
        lambda: make(optimizer=optax.sgd(0.1)),
        "opt_state.1.0.mu.weight: float32[2, 4] in the checkpoint, nothing in this run",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_run_is_refused(name, saved):
    other, said = OTHERS[name]
    with pytest.raises(ValueError, match=re.escape(said)) as caught:
        restored(saved, other())
    assert "step 6" in str(caught.value)
    assert str(SEED) not in str(caught.value)
    if name not in ("policy", "disclose", "optimizer"):  # which change the arrays as well
        assert len(str(caught.value).splitlines()) == 3  # one difference, and no other


def test_another_model_is_refused(saved):
    said = "model.weight: float32[2, 4] in the checkpoint, float32[3, 4] in this run"
    with pytest.raises(ValueError, match=re.escape(said)):
        restored(saved, model=small_model(3))


def test_what_is_not_trained_has_to_be_what_it_was(tmp_path):
    model = small_model()
    step = make(
        filter_spec=eqx.tree_at(lambda m: m.bias, jax.tree.map(lambda _: False, model), True)
    )
    begun(tmp_path, model, step)
    restored(tmp_path, step, model)
    restored(tmp_path, step, eqx.tree_at(lambda m: m.bias, model, model.bias + 1))
    other = eqx.tree_at(lambda m: m.weight, model, model.weight.at[0, 0].add(1e-6))
    with pytest.raises(ValueError, match=re.escape("model.weight, which is not trained")):
        restored(tmp_path, step, other)


def test_groups_of_clip_norms_are_compared(tmp_path):
    norms = eqx.tree_at(lambda m: (m.weight, m.bias), small_model(), (1.0, 2.0))
    begun(tmp_path, small_model(), make(l2_clip_norm=norms))
    restored(tmp_path, make(l2_clip_norm=norms))
    other = eqx.tree_at(lambda m: m.bias, norms, 3.0)
    said = "l2_clip_norm.bias: 2.0 in the checkpoint, 3.0 in this run"
    with pytest.raises(ValueError, match=re.escape(said)):
        restored(tmp_path, make(l2_clip_norm=other))


# Damage.


def files_of(directory):
    newest = directory / "00000006"
    return sorted(file.relative_to(newest) for file in newest.rglob("*") if file.is_file())


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file):
    file.write_bytes(file.read_bytes()[:-1])


def empty(folder):
    shutil.rmtree(folder)
    folder.mkdir()


def assert_falls_back(directory, before=4):
    with pytest.warns(CheckpointWarning, match=rf"step 6.*\n?.*step {before}") as caught:
        found = restored(directory)
    assert len(caught) == 1
    assert int(found.step) == before
    assert assert_agrees(directory, PLAN) == before
    assert int(quiet(directory).step) == before  # and is well from then on


CheckpointWarning = dp.CheckpointWarning


def test_damage_to_any_file_is_seen(copy):
    whole, number = copy / "00000006", 0
    identity = STEP.identity(small_model(), XS, YS)
    kept = shutil.copytree(whole, copy.parent / "kept")
    for damage in (flip, truncate, lambda file: file.unlink()):
        for name in files_of(copy):
            if not (whole / name).stat().st_size and damage is not truncate:
                continue  # an empty file has no byte to flip
            damage(whole / name) if (whole / name).stat().st_size else (whole / name).unlink()
            checkpoints = Checkpoints(copy, STEP, identity=identity)
            with pytest.warns(CheckpointWarning, match=r"step 6 .*is damaged.*step 4"):
                assert checkpoints._start(ARRAYS).number == 4
            checkpoints.close()
            assert (copy / "00000006.damaged").is_dir()
            assert assert_agrees(copy, PLAN) == 4
            shutil.copytree(kept, whole, dirs_exist_ok=True)
            (copy / "privacy.json").write_bytes((kept / "privacy.json").read_bytes())
            number += 1
    assert number > 30


ARRAYS = {}


@pytest.fixture(autouse=True, scope="module")
def names():
    from eqx_dp.training.checkpoint import named_arrays

    ARRAYS.update(named_arrays(STEP.init(small_model())))


@pytest.mark.parametrize("damage", [empty, shutil.rmtree])
def test_a_checkpoint_that_is_gone_is_missed(copy, damage):
    damage(copy / "00000006")
    assert_falls_back(copy)


def test_after_damage_the_run_ends_as_it_would_have(copy, whole):
    flip(copy / "00000006" / "state" / "_METADATA")
    flip(copy / "00000004" / "run.json")
    with pytest.warns(CheckpointWarning, match="is damaged") as caught:
        state = runs.trainer(copy, STEP).run(small_model())
    assert [re.findall(r"step (\d)", str(w.message)) for w in caught] == [["6", "4"], ["4", "2"]]
    assert_same(state, whole)
    assert assert_agrees(copy, PLAN) == 10


@pytest.mark.parametrize("left", ["all", "no list", "of an earlier release"])
def test_a_checkpoint_that_was_not_finished_is_removed(copy, whole, left):
    """Killed while writing, or before it counted."""
    name = "00000008.partial" if "earlier" in left else "00000008"
    shutil.copytree(copy / "00000006", copy / name)
    if left != "all":
        (copy / name / "files.json").unlink()
    if "earlier" in left:
        (copy / "latest.partial").symlink_to("00000006")
    with pytest.warns(CheckpointWarning, match=r"step 8 .*ended while.*step 6") as caught:
        assert int(restored(copy).step) == 6
    assert len(caught) == 1
    assert sorted(x.name for x in copy.glob("0*")) == ["00000002", "00000004", "00000006"]
    assert not list(copy.glob("*.partial"))
    assert_same(runs.trainer(copy, STEP).run(small_model()), whole)


def test_when_all_are_damaged_it_says_so(copy):
    for number in (2, 4, 6):
        flip(copy / f"{number:08d}" / "run.json")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(dp.CheckpointError, match=r"None of the checkpoints .* \(steps 6, 4, 2\)"),
    ):
        restored(copy)
    assert (copy / "00000006").is_dir()  # nothing is thrown away


# What a directory holds.


def test_only_so_many_checkpoints_stay(tmp_path):
    runs.trainer(tmp_path, STEP, save_every=1, keep=2).run(small_model(), steps=5)
    assert sorted(x.name for x in tmp_path.glob("0*")) == ["00000004", "00000005"]
    assert assert_agrees(tmp_path, PLAN) == 5


def test_what_is_no_place_for_checkpoints(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="directory is a file"):
        runs.trainer(tmp_path / "file", STEP).run(small_model())
    with pytest.raises(ValueError, match="keep must be at least 2"):
        runs.trainer(tmp_path, STEP, keep=1)


def test_the_statement_says_what_it_covers(saved):
    statement = json.loads((saved / "privacy.json").read_text())
    assert statement["epsilon"] == PLAN.epsilon(6) < PLAN.epsilon()
    assert statement["delta"] == PLAN.delta
    assert "steps 1 to 6" in statement["covers"]
    assert json.loads((saved / "00000002" / "privacy.json").read_text())["steps_done"] == 2


def test_a_write_does_not_see_the_next_step(tmp_path):
    """The buffers of a state are used up while it is still being written."""
    step = make(optimizer=optax.sgd(0.1))
    model = eqx.nn.Linear(1024, 4096, key=jax.random.key(1))  # 16 MiB take a while to write
    checkpoints = Checkpoints(tmp_path, step)
    state = checkpoints.restore(FirstModel(model))
    before = [np.array(leaf, copy=True) for leaf in leaves(state.model)]
    bump = jax.jit(lambda arrays: [x + 1 for x in arrays], donate_argnums=0)
    arrays = jax.tree.leaves(eqx.filter(state.model, eqx.is_array))
    spare = bump([x + 0 for x in arrays])  # compiled before the write begins
    assert checkpoints.save(state, 1)
    for _ in range(50):
        arrays = bump(arrays)
    jax.block_until_ready(arrays)
    assert checkpoints.close()
    assert_same(spare, [x + 1 for x in before])
    assert_same(arrays, [x + 50 * 0 for x in leaves(arrays)])
    found = Checkpoints(tmp_path, step).restore(FirstModel(model))
    for old, new in zip(before, leaves(found.model), strict=True):
        np.testing.assert_array_equal(old, new)


def test_a_save_waits_for_the_one_before(tmp_path, monkeypatch):
    """However slow the disk is, no more than one is under way, and they finish in their order."""
    seen, release = [], threading.Event()
    commit = Checkpoints._commit

    def slow(self, folder, number, save):
        seen.append(("begins", number))
        assert release.wait(timeout=300)
        commit(self, folder, number, save)
        seen.append(("ends", number))

    monkeypatch.setattr(Checkpoints, "_commit", slow)
    checkpoints, state = Checkpoints(tmp_path, STEP), STEP.init(small_model())
    checkpoints.save(state, 1)
    assert RunDirectory(tmp_path).latest() is None
    threading.Timer(0.2, release.set).start()
    checkpoints.save(state, 2)
    assert seen[:2] == [("begins", 1), ("ends", 1)]
    assert RunDirectory(tmp_path).latest() == 1
    assert checkpoints.close()
    assert seen[2:] == [("begins", 2), ("ends", 2)]
    assert RunDirectory(tmp_path).latest() == 2


def test_metrics_have_each_step_once(tmp_path):
    """Lines of steps that are taken again are dropped, and half a line of a killed process."""

    def at_five(event):
        if event.step == 5:
            raise KeyboardInterrupt

    def evaluate(model):
        return {"norm": np.linalg.norm(model.weight)}

    options = {"evaluate": evaluate, "evaluate_every": 1, "save_every": 3}
    with pytest.raises(KeyboardInterrupt):
        runs.trainer(tmp_path, STEP, callbacks=[at_five], **options).run(small_model())
    file = tmp_path / "metrics.jsonl"
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [1, 2, 3, 4, 5]
    file.write_text(file.read_text() + '{"step": 6, "sec')
    runs.trainer(tmp_path, STEP, **options).run(small_model())
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 11))
    assert [line["epsilon"] for line in lines] == [PLAN.epsilon(t) for t in range(1, 11)]
    assert set(lines[0]) == {"step", "seconds", "epsilon", "norm"}


def test_what_others_keep_in_the_directory_stays(tmp_path):
    for name in ("mydata.partial", "2024", "20261121", "99999999"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("precious")
    (tmp_path / "metrics.jsonl.partial").write_text("half a line")
    runs.trainer(tmp_path, STEP).run(small_model(), steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        runs.trainer(tmp_path, STEP).run(small_model(), steps=4)
    assert assert_agrees(tmp_path, PLAN) == 4
    for name in ("mydata.partial", "2024", "20261121", "99999999"):
        assert (tmp_path / name / "file").read_text() == "precious"


def of_an_earlier_release(directory):
    """As it wrote a directory: links name the checkpoint, and lists hold digests alone."""
    for folder in directory.glob("0*"):
        listed = json.loads((folder / "files.json").read_text())["files"]
        old = {name: digest for name, (_, digest) in listed.items()}
        (folder / "files.json").write_text(json.dumps(old))
    (directory / "privacy.json").unlink()
    (directory / "privacy.json").symlink_to("latest/privacy.json")
    (directory / "latest").symlink_to("00000006")


@pytest.mark.parametrize("links", [True, False])
def test_a_directory_of_an_earlier_release_goes_on(copy, tmp_path, whole, links):
    """Also where its links were copied as what they pointed to."""
    of_an_earlier_release(copy)
    directory = copy if links else shutil.copytree(copy, tmp_path / "copied")
    assert int(quiet(directory).step) == 6
    assert not (directory / "latest").is_symlink()
    assert not (directory / "privacy.json").is_symlink()
    assert_same(runs.trainer(directory, STEP).run(small_model()), whole)
    assert assert_agrees(directory, PLAN) == 10


def test_damage_to_a_checkpoint_of_an_earlier_release_is_seen(copy):
    of_an_earlier_release(copy)
    flip(copy / "00000006" / "state" / "_METADATA")
    assert_falls_back(copy)


def test_another_run_needs_another_seed(saved):
    with pytest.raises(ValueError, match="WITH ANOTHER SEED"):
        restored(saved, make(l2_clip_norm=2.0))


@pytest.mark.slow
def test_a_resumed_run_keeps_the_microbatch_size_that_it_found(tmp_path):
    step = make(microbatch_size="auto")
    sizes = []

    def run(memory, steps):
        options = {"device_memory": memory, "save_every": 1}
        runs.trainer(tmp_path, step, **options).run(small_model(), steps=steps)
        sizes.append(json.loads((runs.latest(tmp_path) / "run.json").read_text())["made_by"])

    run(2**40, 1)
    run(1, 2)  # would not hold one example
    found = [made_by["microbatch_size"] for made_by in sizes]
    assert found == [step.sampler().capacity] * 2
