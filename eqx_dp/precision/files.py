"""Policies in TOML files: one file a policy, and the presets that come with the package."""

import difflib
import os
import tomllib
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path

from ..expected import expect
from ..files import parsed
from .content import merged, policy_of
from .policy import Policy
from .refusals import refusal, refusals_name
from .schema import EXTENDS, Content, checked_content

_SUFFIX = ".toml"


def load_policy(name_or_path: str | os.PathLike[str]) -> Policy:
    """Reads a policy from a preset or a TOML file.

    | entry | holds |
    |---|---|
    | `description` | text, optional |
    | `extends` | a preset, or the path of a file, from this file's folder; optional |
    | `unsafe`, `narrow_optimizer` | true or false, optional |
    | `matmul_precision` | "default", "tensorfloat32" or "highest", optional |
    | `[dtypes]` | `params`, `compute`, `output`, `accumulate`, `noise`: all five, by full name; \
and `optimizer`, optional |
    | `[params]` | `rounding`: "nearest" or "stochastic"; optional |
    | `[loss_scale]` | `kind`: "none", or "static" with its `value`; optional |
    | `[matmul]` | `forward`, and optionally `backward`, `scaling`: see `Matmul`; optional |
    | `[[modules]]` | `match`; at least one of `compute`, `params`, `matmul = "wide"`; `optional`: \
true or false |

    There are as many `[[modules]]` as rules. Without `compute`, a rule leaves the policy's. A rule
    that computes in float32 or float64 keeps products wide without `matmul`. `params` is what the
    parameters of these modules are stored in, also if they are frozen. Without it, what is trained
    is stored as `[dtypes]` says, and what is frozen keeps its dtype.

    A file that `extends` another one needs no entry of its own. The two are merged:

    | entry | what holds |
    |---|---|
    | `description`, `unsafe`, `narrow_optimizer` | the file's own: nothing is inherited |
    | `[dtypes]`, `[params]` | entry by entry, the file's own where it has one |
    | `[loss_scale]`, `[matmul]` | the file's own, if it has one, as a whole |
    | `[[modules]]` | the file's own rules, then the other rules whose patterns it does not name |
    | `matmul_precision` | the file's own, if it has one |

    The extended file may extend a third one. It must be a policy without errors, except for a
    missing `unsafe` or `narrow_optimizer` in a file that it extends.

    Args:
        name_or_path: The name of a preset (see `available_policies`), or the path of a file. A
            path is a path object, or a text that holds a directory separator or ends in `.toml`.

    Returns:
        The policy; its `name` is the preset's name or the path.

    Raises:
        ValueError: If there is no such preset or file; if the file is not TOML in UTF-8; if a table
            or key is unknown or missing; if a value has the wrong type or is not allowed; if files
            extend each other in a circle; or if `Policy` raises an error. The message names the
            file and the key, and says what was found and what is allowed.
    """
    expect("name_or_path", name_or_path, (str, os.PathLike), "a preset's name, or a path")
    name = os.fspath(name_or_path)
    source = _preset(name) if _is_preset_name(name_or_path) else Path(name)
    with refusals_name(str(source)):
        return policy_of(_inherited(source, ()), name)


def available_policies() -> tuple[str, ...]:
    """Returns the names of the presets, sorted."""
    return tuple(sorted(_presets()))


# The places of the files.


def _presets() -> dict[str, Traversable]:
    # The wheel carries the folder inside the package; in a checkout it stands beside the package.
    folder = files("eqx_dp") / "policies"
    if not folder.is_dir():
        folder = Path(__file__).parents[2] / "policies"
    found = [entry for entry in folder.iterdir() if entry.name.endswith(_SUFFIX)]
    return {entry.name.removesuffix(_SUFFIX): entry for entry in found}


def _is_preset_name(name_or_path: str | os.PathLike[str]) -> bool:
    if not isinstance(name_or_path, str) or name_or_path.endswith(_SUFFIX):
        return False
    return not {os.sep, os.altsep or os.sep} & set(name_or_path)


def _preset(name: str) -> Traversable:
    presets = _presets()
    if name in presets:
        return presets[name]
    nearest = difflib.get_close_matches(name.lower(), sorted(presets), n=1, cutoff=0)[0]
    hint = "parse_policy reads such a text" if "=" in name else f"the nearest is {nearest!r}"
    allowed = f"{', '.join(sorted(presets))} ({hint}), or the path of a {_SUFFIX} file"
    raise refusal("policy preset", repr(name), allowed)


# Their content.


def _inherited(source: Traversable, extended_by: tuple[Path, ...]) -> Content:
    """A file's content, with that of the files that it extends."""
    content = _read(source)
    if EXTENDS not in checked_content(content, is_whole=EXTENDS not in content):
        return content
    name, path = str(content[EXTENDS]), Path(str(source))
    chain = (*extended_by, path.resolve())
    with refusals_name(EXTENDS):
        base = _preset(name) if _is_preset_name(name) else path.parent / name
    if Path(str(base)).resolve() in chain:
        circle = " -> ".join(one.name for one in (*chain, Path(str(base))))
        allowed = "a preset, or a file that does not extend this one"
        raise refusal(EXTENDS, f"{name!r}, which closes a circle ({circle})", allowed)
    with refusals_name(f"{EXTENDS} {base}"):
        return merged(_inherited(base, chain), content)


def _read(source: Traversable) -> Content:
    try:
        return parsed(tomllib.loads, source.read_bytes().decode("utf-8"))
    except OSError as error:
        raise refusal("file", f"nothing to read ({error.strerror})", "a TOML file") from None
    except ValueError as error:  # of the parser and of the UTF-8 decoder
        raise refusal("file", f"no TOML ({error})", "a TOML file in UTF-8") from None
