"""A secret that is made once: kept apart, closed to others, and never made twice."""

import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

import eqx_dp as dp
from tests.training.runs import assert_same, make, small_model, trainer


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return tmp_path / "data" / "eqx_dp" / "secrets"


def test_it_is_made_once_and_for_its_owner_alone(home):
    secret = dp.kept_secret("mine")
    assert dp.kept_secret("mine") == secret != dp.kept_secret("other")
    assert 2**64 < secret < 2**128
    assert stat.S_IMODE((home / "mine").stat().st_mode) == 0o600
    assert sorted(path.name for path in home.iterdir()) == ["mine", "other"]


def test_a_path_says_where(tmp_path, home):
    secret = dp.kept_secret(tmp_path / "keys" / "mine")
    assert dp.kept_secret(str(tmp_path / "keys" / "mine")) == secret
    assert not home.exists()


def test_two_that_make_it_at_once_get_one(home):
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: dp.kept_secret("mine"), range(64)))
    assert len(found) == 1
    assert [path.name for path in home.iterdir()] == ["mine"]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620])
def test_a_file_that_is_open_to_others_is_refused(home, mode):
    dp.kept_secret("mine")
    os.chmod(home / "mine", mode)
    with pytest.raises(ValueError, match=f"has mode {mode:04o}"):
        dp.kept_secret("mine")


@pytest.mark.parametrize("content", [b"", b"abcde", b"\xff" * 33, b"g" * 32, b"0" * 31 + b"X"])
def test_a_damaged_file_is_refused_and_stays(home, content):
    dp.kept_secret("mine")
    (home / "mine").write_bytes(content)
    with pytest.raises(ValueError, match="does not hold a secret of 128 bits") as refusal:
        dp.kept_secret("mine")
    assert (home / "mine").read_bytes() == content
    assert not content or content.decode("ascii", "replace") not in str(refusal.value)


@pytest.mark.parametrize("name", ["", "folder/"])
def test_a_name_is_needed(name):
    with pytest.raises(ValueError, match="name must be"):
        dp.kept_secret(name)


@pytest.mark.slow
def test_a_script_that_is_started_again_goes_on(tmp_path):
    def script(steps):
        step = make(seed=dp.kept_secret("run"))
        return trainer(tmp_path / "run", step).run(small_model(), steps=steps)

    script(4)
    whole = make(seed=dp.kept_secret("run"))
    assert_same(script(10).model, trainer(tmp_path / "other", whole).run(small_model()).model)


def test_a_file_of_another_user_is_refused(monkeypatch):
    dp.kept_secret("mine")
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(ValueError, match="belongs to another user"):
        dp.kept_secret("mine")


@pytest.mark.usefixtures("unchecked")
def test_a_secret_in_the_place_of_a_name_is_not_shown():
    with pytest.raises(ValueError, match="found a value of type int") as refused:
        dp.kept_secret(12345678)
    assert "12345678" not in str(refused.value)
