"""The list of a checkpoint's files, of which each host writes and reads a part.

A test of internal functions, because the hosts of a run would be processes of their own.
"""

import shutil

import pytest

from eqx_dp.training import parts
from eqx_dp.training.parts import problem_of, write_list, write_part

HOSTS, SAVE = 3, 7
FILES = {
    "run.json": 2,
    "privacy.json": 2,
    "state/_METADATA": 5,
    "state/manifest.ocdbt": 5,
    "state/ocdbt.process_0/d/a": 40,
    "state/ocdbt.process_1/d/b": 100,
    "state/ocdbt.process_1/manifest.ocdbt": 3,
    "state/ocdbt.process_2/d/c": 60,
}


@pytest.fixture
def folder(tmp_path):
    """A checkpoint that three hosts have written, without a list."""
    folder = tmp_path / "00000006"
    for name, size in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(bytes(range(size)))
    return folder


def commit(folder, step=6):
    for host in range(1, HOSTS):
        write_part(folder, host, SAVE)
    write_list(folder, HOSTS, SAVE, step)
    return folder


def problems(folder, hosts):
    return [problem_of(folder, host, hosts) for host in range(hosts)]


@pytest.mark.parametrize("hosts", [1, 2, 3, 20])
def test_any_number_of_hosts_compares_each_file_once(folder, hosts, monkeypatch):
    commit(folder)
    listed = {*FILES, "files.json"}
    assert {x.relative_to(folder).as_posix() for x in folder.rglob("*") if x.is_file()} == listed
    read, compute = [], parts.size_and_digest

    def seen(file):
        read.append(file.relative_to(folder).as_posix())
        return compute(file)

    monkeypatch.setattr(parts, "size_and_digest", seen)
    assert problems(folder, hosts) == [None] * hosts
    assert sorted(read) == sorted(FILES)


def test_hosts_read_as_many_bytes(folder):
    known = parts.read_list(commit(folder))
    shares = [sum(known[name].size for name in parts._share(known, host, 2)) for host in range(2)]
    assert max(shares) - min(shares) <= 2


def test_each_host_lists_what_it_wrote(folder, monkeypatch):
    read, compute = {}, parts.size_and_digest

    def as_host(host, function, *arguments):
        def seen(file):
            read.setdefault(host, set()).add(file.relative_to(folder).as_posix())
            return compute(file)

        monkeypatch.setattr(parts, "size_and_digest", seen)
        function(folder, *arguments)

    as_host(1, write_part, 1, SAVE)
    as_host(2, write_part, 2, SAVE)
    as_host(0, write_list, HOSTS, SAVE, 6)
    assert read[1] == {name for name in FILES if "process_1" in name}
    assert read[2] == {name for name in FILES if "process_2" in name}
    assert read[0] == FILES.keys() - read[1] - read[2]


@pytest.mark.parametrize("name", FILES)
def test_a_flipped_bit_is_seen_by_one_host(folder, name):
    content = bytearray(commit(folder).joinpath(name).read_bytes())
    content[-1] ^= 1
    (folder / name).write_bytes(content)
    found = [problem for problem in problems(folder, HOSTS) if problem]
    assert found == [f"{name} has changed since it was written"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_gone_is_seen_by_all(folder, name):
    (commit(folder) / name).unlink()
    assert problems(folder, HOSTS) == [f"{name} is missing"] * HOSTS


def test_a_file_too_many_is_seen(folder):
    (commit(folder) / "state/ocdbt.process_1/d/later").write_text("")
    assert problem_of(folder) == "state/ocdbt.process_1/d/later is not listed in files.json"


def test_a_list_without_its_parts_is_damage(folder):
    shutil.rmtree(commit(folder) / "state/ocdbt.process_1")
    assert problem_of(folder) == "state/ocdbt.process_1/d/b is missing"


def test_a_list_of_another_step_is_damage(folder):
    """Also where all of that step's files are there: they are another step's state."""
    commit(folder, step=4)
    assert problem_of(folder) == "files.json cannot be read: it is of step 4"


def test_a_host_that_is_gone_has_no_list_written(folder, monkeypatch):
    monkeypatch.setattr(parts, "_PATIENCE", 0.3)
    write_part(folder, 1, SAVE)
    with pytest.raises(OSError, match="host 2 did not list what it wrote"):
        write_list(folder, HOSTS, SAVE, 6)
    assert not (folder / "files.json").exists()


def test_a_part_of_another_save_does_not_count(folder, monkeypatch):
    """It was left by a process that was killed, and may vouch for other bytes."""
    monkeypatch.setattr(parts, "_PATIENCE", 0.3)
    write_part(folder, 1, SAVE)
    write_part(folder, 2, SAVE + 1)
    with pytest.raises(OSError, match="host 2 did not list what it wrote"):
        write_list(folder, HOSTS, SAVE, 6)


def test_a_file_that_no_host_lists_stops_the_commit(folder):
    for host in range(1, HOSTS):
        write_part(folder, host, SAVE)
    (folder / "state/ocdbt.process_2/d/late").write_text("")
    with pytest.raises(OSError, match="process_2/d/late was written by no host"):
        write_list(folder, HOSTS, SAVE, 6)
