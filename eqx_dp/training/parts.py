"""What a checkpoint consists of: each host lists its own files, and one list is written last.

    00000200/files.json   {"step": 200, "files": {"state/d/0a1b...": [BYTES, SHA-256], ...}}

Orbax has each host write the parts of arrays that its devices hold, into a folder of that host's
own. The host reads them back and hands its list to the first one, in a file; that one adds its own
part and the files that belong to no host, and writes the whole list. The list knows nothing of
arrays, so it can be compared on any number of devices and hosts; each then reads a share of the
files, of about as many bytes.

**Guarantee.** A checkpoint of which `problem_of` finds none holds the bytes that were there when it
was written, of the save that wrote its list.

| case | what happens |
|---|---|
| a byte of any file changes | a problem, which names the file |
| a file is missing, or there is one more | the same |
| the list is missing, empty, damaged, or of another step | a problem |
| a host ends before it has listed its part | no list is written; the first host says so |
| a host's list is of another save of this step | it does not count, and is waited for |
| files of an earlier release, without bytes and step | they are compared by digest alone |
"""

import re
import time
from typing import Any, NamedTuple, cast

from ..expected import RunPath
from .files import files_below, read_json, remove, size_and_digest, write_json

FILES = "files.json"
_PART = re.compile(r"files\.\d+\.json(\.partial)?")
_OF_HOST = re.compile(r"ocdbt\.process_(?:replica_)?(\d+)")
# How long the first host waits for the lists of others. A host that is gone ends all before.
_PATIENCE, _PERIOD = 1800.0, 0.1


class Known(NamedTuple):
    """What a list says of a file."""

    size: int | None
    digest: str


def write_part(folder: RunPath, host: int, save: int) -> None:
    """Lists the files that a host wrote, for the first one; once all hosts have written theirs.

    `save` is a number that tells this save from others of the same step.
    """
    write_json(_part(folder, host), {"save": save, "files": _listed(folder, host, host + 1)})


def write_list(folder: RunPath, hosts: int, save: int, step: int) -> None:
    """Lists all files of a checkpoint: those of the other hosts by their lists, and the rest.

    Raises:
        OSError: a host did not list its part; a file is in no list.
    """
    found = _listed(folder, 0, hosts)
    for host in range(1, hosts):
        found |= _awaited(folder, host, save)
        remove(_part(folder, host))
    if unlisted := files_below(folder) ^ found.keys():
        raise OSError(f"{min(unlisted)} was written by no host, or is gone")
    write_json(folder / FILES, {"step": step, "files": found})


def problem_of(folder: RunPath, host: int = 0, hosts: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, as far as one of some hosts reads them.

    The name of the folder is the number of the step.

    Returns:
        None if all is well with this host's share.
    """
    try:
        known = read_list(folder)
        found = files_below(folder) - {FILES}
        if missing := known.keys() - found:
            return f"{min(missing)} is missing"
        if unknown := found - known.keys():
            return f"{min(unknown)} is not listed in {FILES}"
        if not found:
            return "it is empty"
        for name in _share(known, host, hosts):
            size, digest = size_and_digest(folder / name)
            if known[name] not in ((size, digest), (None, digest)):
                return f"{name} has changed since it was written"
    except (OSError, ValueError) as error:
        return f"{FILES} cannot be read: {error}"
    return None


def read_list(folder: RunPath) -> dict[str, Known]:
    """What the list of a checkpoint says of its files; a ValueError if it is none."""
    content = read_json(folder / FILES)
    files = content.get("files", content)  # earlier releases: file and digest, and nothing else
    if not isinstance(files, dict):
        raise ValueError("it holds no files")
    if "files" in content and content.get("step") != int(folder.name):
        raise ValueError(f"it is of step {content.get('step')}")
    entries = cast("dict[str, Any]", files)
    known = {
        name: entry if isinstance(entry, list) else (None, entry) for name, entry in entries.items()
    }
    if not all(len(entry) == 2 and isinstance(entry[1], str) for entry in known.values()):
        raise ValueError("it holds no digests")
    return {name: Known(size, str(digest)) for name, (size, digest) in known.items()}


def _listed(folder: RunPath, host: int, hosts: int) -> dict[str, list[Any]]:
    """The files of a host: those in its own folder, and for the first one those in nobody's."""
    found: dict[str, list[Any]] = {}
    for name in sorted(files_below(folder)):
        match = _OF_HOST.search(name)
        owner = int(match[1]) if match and int(match[1]) < hosts else 0
        if owner == host and not _PART.fullmatch(name):
            found[name] = list(size_and_digest(folder / name))
    return found


def _awaited(folder: RunPath, host: int, save: int) -> dict[str, list[Any]]:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        try:
            part = read_json(_part(folder, host))
            if part.get("save") == save:
                return part["files"]
        except (OSError, ValueError):  # not there yet
            pass
        time.sleep(_PERIOD)
    raise OSError(f"host {host} did not list what it wrote within {_PATIENCE:g} seconds")


def _part(folder: RunPath, host: int) -> RunPath:
    return folder / f"files.{host}.json"


def _share(known: dict[str, Known], host: int, hosts: int) -> list[str]:
    """The files that a host reads: the largest first, each to who has the fewest bytes so far."""
    shares: list[tuple[int, list[str]]] = [(0, []) for _ in range(hosts)]
    for name in sorted(known, key=lambda name: (-(known[name].size or 1), name)):
        least = min(range(hosts), key=lambda one: (shares[one][0], one))
        bytes_so_far, names = shares[least]
        shares[least] = (bytes_so_far + (known[name].size or 1), [*names, name])
    return shares[host][1]
