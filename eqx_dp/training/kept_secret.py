"""A secret that a program makes once, and finds again when it is started anew."""

import contextlib
import os
import secrets
import stat
from pathlib import Path
from typing import cast

from .files import sync
from .hosts import from_first_host

_BITS = 128
_FOLDER = Path("eqx_dp") / "secrets"


def kept_secret(name: str | os.PathLike[str]) -> int:
    """A secret for a run: made by the operating system at the first call, and the same ever after.

    ```python
    step = dp.make_step(loss, optimizer, plan, seed=dp.kept_secret("digits-1"), ...)
    ```

    A script with this line can be killed and started again: the run goes on. It must not share the
    secret with another run: **take another name for another run, data set or starting model.**

    The file is made with mode 0600, so that other users cannot read it. It stands apart from the
    directory of the run, which may be handed on. On several hosts the first host reads or makes the
    file, and all get its secret.

    | file | what happens |
    |---|---|
    | is not there | 128 random bits are written to it |
    | is there | it is read |
    | other users can read or write it | refused |
    | is empty or damaged | refused; nothing is made in its place |

    Args:
        name: of a file in `$XDG_DATA_HOME/eqx_dp/secrets` (`~/.local/share/eqx_dp/secrets`); or a
            path, absolute or with a folder in it.

    Raises:
        ValueError: the name is empty; the file is one that is refused above.
        OSError: it cannot be read or written.
    """
    return int(from_first_host(lambda: f"{_of_file(_path_of(name)):x}"), 16)


def new_secret() -> int:
    """A secret that no file keeps: random bits of the first host, for all of them."""
    return int(from_first_host(lambda: f"{secrets.randbits(_BITS):x}"), 16)


def _path_of(name: str | os.PathLike[str]) -> Path:
    if not isinstance(cast(object, name), str | os.PathLike):  # it may be the secret itself
        found = type(name).__name__
        raise ValueError(f"name must be a name, or a path; found a value of type {found}.")
    text = os.fspath(name)
    if not text or text.endswith(os.sep):
        raise ValueError("name must be a name or the path of a file; found none.")
    if "://" in text:
        raise ValueError(
            f"name must be a name or a path on a file system; found {text!r}. A secret is kept in "
            "a file of mode 0600, which an object store does not have. Where hosts share no file "
            "system, give each the same secret by what your cluster keeps secrets with, as seed=."
        )
    if os.sep in text:
        return Path(text).expanduser().absolute()
    home = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(home).expanduser() / _FOLDER / text


def _of_file(path: Path) -> int:
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Name a file in it, in which the secret is kept.")
    with contextlib.suppress(FileExistsError):
        if not path.exists():
            _make(path)
    descriptor = os.open(path, os.O_RDONLY)
    with open(descriptor, encoding="ascii", errors="replace") as file:
        status = os.fstat(descriptor)
        mode = stat.S_IMODE(status.st_mode)
        if os.name == "posix" and status.st_uid != os.geteuid():
            raise ValueError(
                f"{path} belongs to another user, who may know the secret in it. Begin a new run "
                "with a new name."
            )
        if os.name == "posix" and mode & 0o077:
            raise ValueError(
                f"{path} has mode {mode:04o}: other users may know the secret in it, and with it "
                "take the noise away. Begin a new run with a new name; or, if nobody has read it, "
                f"chmod 600 {path}"
            )
        text = file.read().strip()
    # The text itself is in no error: it may be a secret all the same.
    if len(text) != _BITS // 4 or not set(text) <= set("0123456789abcdef"):
        raise ValueError(
            f"{path} does not hold a secret of {_BITS} bits. Restore it from a backup to go on "
            "with its run; or begin a new run, with a new name and in a new directory."
        )
    return int(text, 16)


def _make(path: Path) -> None:
    """Writes a new secret; a file that is there stays as it is, and is a FileExistsError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    beside = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with open(descriptor, "w", encoding="ascii") as file:
            file.write(f"{secrets.randbits(_BITS):0{_BITS // 4}x}\n")
            file.flush()
            os.fsync(descriptor)
        os.link(beside, path)  # whole from the first moment on, and only if there was none
    finally:
        beside.unlink()
    sync(path.parent)
