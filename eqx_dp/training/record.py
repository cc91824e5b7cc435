"""What a run is, how it is resumed as that run or as another, and the statement of its privacy."""

import hashlib
import importlib.metadata
import json
import math
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax

from ..paths import dotted_name
from .directory import FORMAT, METRICS, VERSION, RunDirectory
from .events import set_aside
from .files import CheckpointWarning
from .step import Step

_DIGEST = re.compile("[0-9a-f]{32,}")

# What a record says beside what the run is.
_BESIDE = ("format", "version", "made_by", "programs", "is_unsafe")
# What stays as it is while a run lasts: accounting, sample and noise follow from it.
_FIXED = ("plan", "num_examples", "seed", "model", "shared")
_CHANGEABLE = ("policy", "l2_clip_norm", "rescale_to_unit_norm", "ema", "disclose")


class Difference(NamedTuple):
    """In what two records differ: the part of a run, as `allow_changed` names it; and in words."""

    part: str
    line: str


def record_of(
    step: Step[Any], arrays: Mapping[str, Any], identity: Mapping[str, str], salt: bytes
) -> dict[str, Any]:
    """A run, as JSON's types: what may not change unasked, and what may ("made_by").

    `arrays` are saved, `identity` is the step's for the run's model and data, and `salt` is that of
    the seed's fingerprint.
    """
    settings = step.settings
    return {
        "format": FORMAT,
        "version": VERSION,
        "plan": json.loads(settings["plan"]),
        "policy": settings["policy"],
        "is_unsafe": step.policy is not None and step.policy.unsafe,
        "l2_clip_norm": {name: _number(x) for name, x in settings["l2_clip_norm"].items()},
        "rescale_to_unit_norm": step.rescale_to_unit_norm,
        "num_examples": step.num_examples,
        "disclose": list(step.disclose),
        **({} if step.ema is None else {"ema": step.ema}),
        **({"shared": True} if step.shared else {}),
        "seed": {"salt": salt.hex(), "scrypt": step.secret_id(salt)},
        "arrays": {name: f"{leaf.dtype}{list(leaf.shape)}" for name, leaf in arrays.items()},
        "identity": dict(identity),
        "made_by": {
            **versions(),
            "platform": jax.default_backend(),
            "devices": jax.device_count(),
            "hosts": jax.process_count(),
            "microbatch_size": step.microbatch_size,
            "sharding": None if step.sharding is None else repr(step.sharding),
        },
    }


def versions() -> dict[str, str]:
    """The versions of what a run, or a report on it, is computed with."""
    return {
        "eqx_dp": importlib.metadata.version("eqx-dp"),
        "jax": jax.__version__,
        "equinox": importlib.metadata.version("equinox"),
        "dp_accounting": importlib.metadata.version("dp-accounting"),
        "python": platform.python_version(),
    }


def program_of(record: Mapping[str, Any], starts_after: int, begins_from: int) -> dict[str, Any]:
    """An entry of a record's "programs": what a run was from some step on.

    Up to `starts_after` steps may have been released before. It goes on with the model of the
    checkpoint `begins_from`, which is of fewer steps, if some were lost.
    """
    compared = {key: value for key, value in record.items() if key not in (*_BESIDE, "seed")}
    return {
        "starts_after": starts_after,
        "begins_from": begins_from,
        "digest": hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest(),
        "disclose": record["disclose"],
        "is_unsafe": record["is_unsafe"],
    }


def microbatch_of(record: Mapping[str, Any]) -> int | None:
    """The microbatch size that a run had, if it was on as many devices of this kind."""
    made_by = record["made_by"]
    is_alike = (made_by["platform"], made_by["devices"], made_by["hosts"]) == (
        jax.default_backend(),
        jax.device_count(),
        jax.process_count(),
    )
    size = made_by["microbatch_size"]
    return size if is_alike and isinstance(size, int) else None  # not settled: "auto"


def changeable(identity: Mapping[str, str]) -> tuple[str, ...]:
    """The parts of a run that may change while it lasts, where that is asked for."""
    return tuple(dict.fromkeys((*identity, *_CHANGEABLE)))


def part_of_array(name: str) -> str:
    """The part of a run that a saved array belongs to."""
    parts = {".opt_state": "optimizer", ".disclosed": "disclose", ".average": "ema"}
    for start, part in parts.items():
        if name.startswith(start):
            return part
    return "model"


def differences(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[Difference]:
    """In which ways a saved run is another run than the current one."""
    # Digests of programs are keyed by the seed, and tell nothing where that is another.
    beside = _BESIDE if saved["seed"] == current["seed"] else (*_BESIDE, "identity")
    one, other = (_facts(record, beside) for record in (saved, current))
    found: list[Difference] = []
    for name in dict.fromkeys((*one, *other)):
        part = (one.get(name) or other[name])[0]
        was, now = (facts.get(name, (part, None))[1] for facts in (one, other))
        if was == now:
            continue
        name = dotted_name(name)
        if _DIGEST.fullmatch(str(was)):
            line = f"{name}: the checkpoint was made with another {name}"
        else:
            was, now = ("nothing" if value is None else value for value in (was, now))
            line = f"{name}: {was} in the checkpoint, {now} in this run"
        found.append(Difference(part, line))
    return found


def _facts(record: Mapping[str, Any], beside: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """What a record says, by name, with the part of the run that it belongs to."""
    facts: dict[str, tuple[str, Any]] = {}
    for key in [key for key in record if key not in beside]:
        if key == "identity":
            facts |= {name: (name, value) for name, value in record[key].items()}
        elif key == "arrays":
            facts |= {name: (part_of_array(name), value) for name, value in record[key].items()}
        elif key == "seed":
            facts[key] = (key, record[key]["scrypt"])
        else:
            facts |= {name: (key, value) for name, value in _single(key, record[key])}
    return facts


def _single(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The single values of nested mappings, by path."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in cast("Mapping[str, Any]", value).items():
        separator = "" if key.startswith(("[", ".")) or not key else "."
        yield from _single(f"{name}{separator}{key}", inner)


def _number(value: Any) -> float | str:
    number = float(value)
    return number if math.isfinite(number) else str(number)


def privacy_statement(
    step: Step[Any], steps_done: int, programs: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """What has been spent by a number of steps, what it covers and what it does not.

    It depends on the plan, the number of steps and the run's programs, and not on the data. Steps
    that may have been released, and that the model does not come from, count.
    """
    plan = step.plan
    disclosed = dict.fromkeys(name for program in programs for name in program["disclose"])
    epsilon = plan.epsilon(steps_done)
    relation = plan.neighboring_relation.name
    covers = (
        f"The models of steps 1 to {steps_done}, seen together, are (epsilon, delta)-"
        f"differentially private for data sets that are neighbors by {relation}, if seed and "
        "batches stay secret."
        if math.isfinite(epsilon) and steps_done
        else "No step has been taken: nothing was released."
        if not steps_done
        else "No privacy is guaranteed: epsilon is infinite."
    )
    not_covered = [
        f"models after step {steps_done}, which a process may have computed and not saved; the "
        "file released_at_most.NUMBER, in the run's directory, names the last that there can be",
        "how long steps take",
        "choices that were made by looking at private data (hyperparameters, when to stop)",
        *(f"{name} of each batch, which this run discloses" for name in disclosed),
    ]
    if any(program["is_unsafe"] for program in programs):
        not_covered.append("what is lost by sums or noise in narrow dtypes: the policy is unsafe")
    return {
        "plan": json.loads(plan.to_json()),
        "steps_done": steps_done,
        "epsilon": _number(epsilon),
        "delta": plan.delta,
        "num_examples": step.num_examples,
        "l2_norm_bound": _number(step.grad_fn.l2_norm_bound),
        "covers": covers,
        "does_not_cover": not_covered,
    }


# Where a run goes on: as the program that it was, or as another where that is asked for.


class Start(NamedTuple):
    """From where a process goes on, as all hosts have to know it: JSON's types.

    Attributes:
        number: of the checkpoint; None for a run that begins.
        after: how many steps count as taken.
        programs: of the run, the one that goes on included.
        restored: names of the arrays that come from the checkpoint; others are new.
        microbatch_size: with which the checkpoint was made, on as many devices; else None.
    """

    number: int | None
    after: int
    programs: list[dict[str, Any]]
    restored: list[str]
    microbatch_size: int | None


def begun(directory: RunDirectory, record: Mapping[str, Any]) -> Start:
    """Records a run that has no checkpoint yet."""
    set_aside(directory.path / METRICS)  # of another run
    programs = [program_of(record, 0, 0)]
    directory.write_record({**record, "programs": programs})
    return Start(None, 0, programs, [], None)


def resumed(
    directory: RunDirectory,
    describe: Callable[[bytes], dict[str, Any]],
    number: int,
    saved: Mapping[str, Any],
    allowed: Iterable[str],
    is_seed_known: bool = True,
) -> tuple[Start, Callable[[], None]]:
    """How a run goes on from a checkpoint, and how to record that, before its first step.

    | this program, beside the newest of the run | the checkpoint | what happens |
    |---|---|---|
    | the same | is its own, or the one that it began from | it goes on, bit for bit |
    | the same | older, since the newer ones are damaged | counts as another |
    | another | any | refused, unless each difference is allowed |

    Another program goes on from the checkpoint with fresh noise and sample. Its steps are counted
    from the last that may have been released.

    Args:
        directory: of the run.
        describe: the record of this program, for the salt of the seed's fingerprint.
        number: of the newest checkpoint that is whole.
        saved: its record.
        allowed: the parts of a run that may have changed.
        is_seed_known: whether this process was given a seed. Where it was not, a run whose steps
            are all taken is read, since that needs none; another is refused.

    Returns:
        From where it goes on; and what writes that down, and says it, where the program is another:
        to be called once nothing else can refuse the run. (A ValueError refuses it here.)
    """
    record = directory.record()
    current = describe(bytes.fromhex(record["seed"]["salt"]))
    found, steps = differences(record, current), current["plan"]["steps"]
    if not is_seed_known:
        if number < steps:
            raise ValueError(
                f"The run in {directory} is saved up to step {number} of {steps}, and cannot go on "
                "without its seed, with which make_step has to be called again. To read the model "
                "alone: dp.load_model(directory, like=model)."
            )
        found = [x for x in found if x.part != "seed"]
    may_change = set(allowed) - set(_FIXED)
    if refused := [x.line for x in found if x.part not in may_change]:
        raise ValueError(_refusal(directory, number, refused, record, current))
    programs: list[dict[str, Any]] = record["programs"]
    newest = programs[-1]
    is_same = not found and (saved["programs"] == programs or newest["begins_from"] == number)
    if is_same:  # bit for bit: from a state that this program had
        after = number if saved["programs"] == programs else newest["starts_after"]
    else:
        after = max(number, directory.bound(of=current))
        programs = [*programs, program_of(current, after, number)]
        if after >= steps:
            raise ValueError(
                f"The run in {directory} cannot go on as another program: {after} of the plan's "
                f"{steps} steps may have been released already, and none is left. (A process that "
                "is killed may have released all steps up to its next save; one that ends by "
                "itself leaves an exact count.) Resume with what the run was started with: it "
                "takes the steps again that are not saved."
            )

    def settle() -> None:
        if not is_same:
            directory.write_record(current | {"programs": programs})
            _warn(directory, number, after, [x.line for x in found])

    changed = {x.part for x in differences({**saved, "identity": {}}, {**current, "identity": {}})}
    restored = [name for name in current["arrays"] if part_of_array(name) not in changed]
    return Start(number, after, programs, restored, microbatch_of(saved)), settle


def _refusal(
    directory: RunDirectory,
    number: int,
    lines: Sequence[str],
    record: Mapping[str, Any],
    current: Mapping[str, Any],
) -> str:
    was, now = ("eqx_dp {eqx_dp} and JAX {jax}".format(**x["made_by"]) for x in (record, current))
    if was != now:
        lines = [*lines, f"made by {was}, which may trace another program than {now}"]
    return (
        f"The checkpoint of step {number} in {directory} belongs to another run:"
        f"{_listed(lines)}\nResume with what the run was started with; or start another run, in "
        "another directory and WITH ANOTHER SEED; or name the parts that may change, "
        f"Trainer(..., allow_changed=(...)), of {', '.join(changeable(current['identity']))}: the "
        "run then goes on with fresh noise, and every step that it may have released counts."
    )


def _warn(directory: RunDirectory, number: int, after: int, lines: Sequence[str]) -> None:
    why = (
        f"as another program:{_listed(lines)}\n"
        if lines
        else "anew, because the checkpoint that its program began from is damaged. "
    )
    lost = f"Steps {number + 1} to {after} may have been released, and count. "
    warnings.warn(
        f"The run in {directory} goes on from its checkpoint of step {number}, {why}"
        f"{lost if after > number else ''}The next is step {after + 1}, with fresh sample and "
        "noise.",
        CheckpointWarning,
        stacklevel=2,
    )


def _listed(lines: Iterable[str]) -> str:
    return "".join(f"\n  {line}" for line in lines)
