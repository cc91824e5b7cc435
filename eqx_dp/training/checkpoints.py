"""Checkpoints of a run, by orbax: `checkpoints/NUMBER/`, one for each number of released steps.

Orbax writes in the background and from all hosts, commits a checkpoint atomically, and keeps the
newest ones. No checkpoint holds a random key, because every start draws its own.
"""

import contextlib
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax

from ..expected import RunPath
from ..extras import extra
from ..paths import dotted_name
from ..trees import PyTree, is_array_or_shape, is_key
from .first_state import Body, FirstModel, Recipe
from .hosts import on_every_host
from .ledger import CheckpointError, CheckpointWarning
from .state import TrainState

T = TypeVar("T")

CHECKPOINTS = "checkpoints"
_STATE, _RECORD = "state", "record"


class Checkpoints:
    """The checkpoints in a directory that all hosts share.

    Args:
        directory: of the run.
        keep: how many are kept; None for reading only.
    """

    def __init__(self, directory: RunPath, keep: int | None = None):
        self.directory, self._folder = directory, directory / CHECKPOINTS
        self._orbax = orbax = extra("orbax.checkpoint")
        # If making a directory in the background fails, threads wait for it, and the process cannot
        # end for 20 minutes.
        now = orbax.AsyncOptions(create_directories_asynchronously=False)
        options = orbax.CheckpointManagerOptions(
            max_to_keep=keep, create=keep is not None, async_options=now
        )
        handlers = {_STATE: orbax.PyTreeCheckpointHandler(), _RECORD: orbax.JsonCheckpointHandler()}
        self._open: Callable[[], Any] = lambda: orbax.CheckpointManager(
            self._folder, options=options, item_handlers=handlers
        )
        # Orbax refuses to read a folder that is not there.
        self._manager: Any = None
        try:
            if keep is not None or self._folder.is_dir():
                self._manager = self._open()
        except OSError as error:
            raise CheckpointError(
                f"{self._folder} cannot be used for checkpoints ({error.strerror}). Make the "
                "directory writable; or name another, and start another run there."
            ) from None

    def numbers(self) -> list[int]:
        """The checkpoints that were committed, newest first."""
        return [] if self._manager is None else sorted(self._manager.all_steps(), reverse=True)

    def newest(self, read: Callable[[int], T]) -> T | None:
        """What `read` returns for the newest readable checkpoint; None if there is no checkpoint.

        Warns of each checkpoint that cannot be read.

        Raises:
            Misfit: `read` refuses a checkpoint that is whole.
            CheckpointError: there are checkpoints, and none can be read.
        """
        numbers, causes = self.numbers(), []
        for number in numbers:
            found, error = None, None
            try:
                found = read(number)
            except (CheckpointError, Misfit):
                raise
            except Exception as damage:  # any error that the libraries raise for damaged files
                error = damage
            if on_every_host(error is None):
                return found
            causes.append(f"{number} ({type(error).__name__})")
            warnings.warn(
                f"The checkpoint {self._folder / str(number)} cannot be read, and the one before "
                f"it is tried. {type(error).__name__}: {str(error)[:300]}",
                CheckpointWarning,
                stacklevel=3,
            )
        if causes:
            raise CheckpointError(
                f"None of the checkpoints in {self._folder} can be read: {', '.join(causes)}. "
                "Restore one from a backup; or remove the folder, to begin with the first model: "
                "the steps that were released still count."
            )
        return None

    def shapes(self, number: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a checkpoint, by name."""
        tree = getattr(self._manager.item_metadata(number), _STATE).tree
        return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in tree.items()}

    def read(
        self, number: int, targets: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Reads arrays of a checkpoint to their targets' places, and the data saved with them."""
        here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        shapes = {
            name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or here)
            for name, x in targets.items()
        }
        args = self._orbax.args
        places = self._orbax.checkpoint_utils.construct_restore_args(shapes)
        state = args.PyTreeRestore(shapes, restore_args=places, partial_restore=True)
        items = {_STATE: state, _RECORD: args.JsonRestore()}
        found = self._manager.restore(number, args=args.Composite(**items))
        return dict(found[_STATE]), dict(found[_RECORD])

    def save(self, number: int, state: TrainState[Any], record: Mapping[str, Any]) -> bool:
        """Starts to save a state; returns when the next step may use up the state.

        Waits for the previous save. A failure is a warning: the run continues, and its last good
        checkpoint stays.

        Returns:
            whether the save could be started.
        """
        if not on_every_host(self.wait()):  # a manager whose save failed keeps its number
            self.close()
            self._manager = self._open()
        logging.getLogger("absl").addFilter(self._is_news)  # there once, until it is closed
        args = self._orbax.args
        arrays = named_arrays(Body(state.model, state.opt_state.optimizer, state.opt_state.average))
        arrays["step"] = state.step
        items = {_STATE: args.PyTreeSave(arrays), _RECORD: args.JsonSave(dict(record))}
        composite = args.Composite(**items)
        return self._succeeds(lambda: self._manager.save(number, args=composite, force=True))

    def wait(self) -> bool:
        """Waits for the save that is under way; whether there was none, or it succeeded."""
        return self._succeeds(lambda: self._manager.wait_until_finished())

    def _succeeds(self, write: Callable[[], object]) -> bool:
        """Whether something is written; else there is a warning, and the run goes on."""
        try:
            write()
        except Exception as error:
            warnings.warn(
                f"A checkpoint could not be written to {self._folder} ({type(error).__name__}: "
                f"{str(error)[:300]}). The run goes on; the checkpoint before stays.",
                CheckpointWarning,
                stacklevel=4,
            )
            return False
        return True

    def close(self) -> None:
        """Ends what writes."""
        if self._manager is not None:
            with contextlib.suppress(Exception):  # which `wait` has reported
                self._manager.close()
        logging.getLogger("absl").removeFilter(self._is_news)

    def _is_news(self, record: logging.LogRecord) -> bool:
        """Whether a record of absl's log is no traceback of orbax: its errors become warnings."""
        return record.exc_info is None or "orbax" not in record.pathname


class Misfit(ValueError):
    """A checkpoint is complete, but does not fit the model."""


def restored(
    checkpoints: Checkpoints, recipe: Recipe, first: FirstModel[Any]
) -> tuple[Body, int, dict[str, Any]] | None:
    """The newest readable state; None if there is no checkpoint.

    Arrays are read directly to their devices, without a second state (except if the optimizer is
    another, or its `init` cannot be traced).

    | of the checkpoint | what happens |
    |---|---|
    | another array in the model, or another shape | `ValueError`, each is named |
    | another dtype | it is cast: the policy may change |
    | other arrays in the optimizer's state or in the average | both are made anew, with a warning |

    Returns:
        the body, the number of steps that the model has taken, and the ledger's counts at that
        time.
    """
    form = recipe.form(first)
    wanted = named_arrays(form)  # refused now, not after the first block of steps
    if not checkpoints.numbers():
        return None

    def read(number: int) -> tuple[Body, int, dict[str, Any]]:
        saved = checkpoints.shapes(number)
        check_fits(f"checkpoint {number}", saved, wanted)
        others = [x for x in ("opt_state", "average") if _shapes(x, saved) != _shapes(x, wanted)]
        targets = {name: x for name, x in wanted.items() if not others or part_of(name) == "model"}
        targets["step"] = jax.ShapeDtypeStruct((), saved["step"].dtype)
        arrays, record = checkpoints.read(number, targets)
        if record.keys() != {"released", "ledger"}:
            raise ValueError("its record is damaged")
        body = with_arrays(form, arrays)
        if others:
            body = Body(body.model, *recipe.beside(form, body.model))
            warnings.warn(
                f"The optimizer's state in checkpoint {number} is of another optimizer, or of a "
                "step with (or without) `ema`: it and the average are initialised again.",
                CheckpointWarning,
                stacklevel=4,
            )
        return body, int(arrays["step"]), record

    return checkpoints.newest(read)


def named_arrays(tree: PyTree[Any]) -> dict[str, Any]:
    """The arrays of a tree, or their shapes, by path.

    Raises:
        ValueError: one is a key of random numbers.
    """
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(tree, is_array_or_shape))
    named = {_name(path): leaf for path, leaf in leaves}
    for name in [dotted_name(name) for name, leaf in named.items() if is_key(leaf)]:
        raise ValueError(
            f"{name} is a key of random numbers. It may be secret, and no file holds one: give the "
            "loss a `key` argument, or put None in its place by eqx.tree_at."
        )
    return named


def with_arrays(tree: T, arrays: Mapping[str, Any]) -> T:
    """The tree, with the arrays of these names replaced."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: arrays.get(_name(path), leaf) if is_array_or_shape(leaf) else leaf, tree
    )


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path).removeprefix(".")


def part_of(name: str) -> str:
    """The part of a state that an array belongs to."""
    return name.split(".")[0].split("[")[0]


def check_fits(where: str, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises a `Misfit` unless the arrays of two models have the same names and shapes."""
    one, other = (_shapes("model", arrays) for arrays in (saved, wanted))
    differences = [
        f"{dotted_name(name)}: {one.get(name, 'nothing')} there, {other.get(name, 'nothing')} here"
        for name in {**one, **other}
        if one.get(name) != other.get(name)
    ]
    if differences:
        raise Misfit(
            f"The model in {where} has other arrays than the one that was given: "
            f"{'; '.join(differences)}. Give a model of the same structure."
        )


def _shapes(part: str, arrays: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(x.shape) for name, x in arrays.items() if part_of(name) == part}
