"""Streams of noise, and keys of losses: what nothing else may read.

Each state of a stream gives one noise, and the state after the last draw goes out at the place
where the stream came in. A key of a loss is a root, an argument of the step, followed by the
numbers that were folded in, or of the child that was taken. Keys of different roots are
independent, and so are keys of one root whose paths have different constants at some place. A key
that is a prefix of another one reveals it.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from jax.extend.core import JaxprEqn

from ..programs import UNCHANGED, Context, Loop
from .facts import Fact
from .variables import shape_of, size_of

KEY, PAST = 0, 3
"""Of the parts of a stream, its key, and the first of what a privatizer keeps: both are secret."""


class Stream(NamedTuple):
    """A part of the state of a stream: its key, two words of its counter, and what is kept.

    Attributes:
        root: which of the streams among the arguments it is.
        part: which part of its state.
        at: where the state was made; "argument" for the one that comes in.
        loops: the loops around that place.
    """

    root: int
    part: int
    at: Hashable = "argument"
    loops: tuple[Hashable, ...] = ()

    @property
    def is_secret(self) -> bool:
        """Whether anyone who sees it can subtract noise."""
        return self.part == KEY or self.part >= PAST


def loops_of(context: Context) -> tuple[Hashable, ...]:
    """The loops around an equation."""
    return tuple(loop.path for loop in context.loops)


def state_of(tokens: Sequence[object], count: int) -> Stream | None:
    """The stream whose whole state some operands are; None if they are none, or of several."""
    first = tokens[0] if tokens else None
    if not isinstance(first, Stream):
        return None
    return first if [*tokens] == [first._replace(part=part) for part in range(count)] else None


def after_loop(token: Stream, end: object, loop: Loop, outer: Context) -> Stream | None:
    """What a loop carries, after its last turn; None unless each turn takes it on."""
    inside = token._replace(at=("turn", loop.path), loops=(*loops_of(outer), loop.path))
    if not isinstance(end, Stream) or end._replace(at=inside.at) != inside:
        return None
    return token if end == inside else token._replace(at=("after", loop.path))


# Keys of losses, and the counters that are folded into them.

CALL = "call"
"""Among the loops in whose turns a value differs: the calls of the step."""


class Given(NamedTuple):
    """An argument that is no key and is not private."""

    root: int


class Key(NamedTuple):
    """A key of random numbers.

    Attributes:
        root: the argument.
        path: what was folded in: constants, arguments as they came, or `EVERY` number.
    """

    root: int
    path: tuple[int | str | Given, ...] = ()


EVERY = "each number"


class Use(NamedTuple):
    """A use of a key.

    Attributes:
        key: the key.
        turns: the loops in whose turns it differs.
        line: the source line.
        of_loss: the call of the engine that draws with it; None for anything else.
    """

    key: Key
    turns: frozenset[Hashable]
    line: str
    of_loss: Hashable = None


def token_of(equation: JaxprEqn, inputs: Sequence[Fact]) -> Key | Given | None:
    """The key or the argument that a result is; None if it is none, or not known."""
    name, (first, *others) = equation.primitive.name, [fact.token for fact in inputs] or [None]
    is_one = size_of(equation.outvars[0]) == 1
    match first:
        case Key() | Given() if name in UNCHANGED | {"squeeze"}:
            return first
        case Given() if name == "convert_element_type":
            return first
        case Key() if name == "random_fold_in" and is_one and inputs[1].is_public:
            fold = others[0] if isinstance(others[0], Given) else EVERY
            fold = fold if inputs[1].value is None else inputs[1].value
            return Key(first.root, (*first.path, fold))
        case Key() if name == "random_split":
            return Key(first.root, (*first.path, EVERY))
        case Key(root, (*path, fold)) if name == "slice" and fold == EVERY:  # a child of split
            is_child = shape_of(equation.outvars[0]) == (1,)
            return Key(root, (*path, equation.params["start_indices"][0])) if is_child else None
        case _:
            return None


def parted(a: Key, b: Key) -> bool:
    """Whether two keys of one root are proven to be independent: no path begins with the other."""
    folds = zip(a.path, b.path, strict=False)
    return any(isinstance(one, int) and isinstance(two, int) and one != two for one, two in folds)


def is_another(use: Use, back: Mapping[int, object]) -> bool:
    """Whether a key is another one in the next call, given the tokens that come back."""
    root, token = use.key.root, back.get(use.key.root)
    counters = [fold for fold in use.key.path if isinstance(fold, Given)]
    is_counted = not counters or any(back.get(one.root) != one for one in counters)
    if token == Key(root):  # the same key, with numbers of the call
        return CALL in use.turns and is_counted
    return root not in back or (isinstance(token, Key) and token.root == root)
