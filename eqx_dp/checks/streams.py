"""Streams of noise, and keys of losses: what nothing else may read.

Each state of a stream gives one noise, and the state after the last draw goes out at the place
where the stream came in. A key of a loss is a root, an argument of the step, followed by the
numbers that were folded in. `jax.random.split(key, n)[i]` is `fold_in(key, i)`. Keys of different
roots are independent, and so are keys of one root whose paths have different constants at some
place and agree before it. A key that is a prefix of another one reveals it.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from jax.extend.core import JaxprEqn

from ..programs import UNCHANGED
from .facts import Fact, whole_number
from .flow import Context, Loop, dtype_of, shape_of

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


class Draw(NamedTuple):
    """What uses a state of a stream up: noise, or a loop that carries it.

    Attributes:
        path: where.
        line: the source line.
        is_again: whether a loop does it in each turn, with the same state.
    """

    path: Hashable
    line: str
    is_again: bool


class Streams:
    """Which states of streams were used up, and where."""

    def __init__(self) -> None:
        self.drawn: defaultdict[tuple[int, Hashable], dict[Draw, None]] = defaultdict(dict)

    def use(self, context: Context, token: Stream) -> None:
        """Notes that noise, or a loop, uses a state up."""
        if context.is_final:
            is_again = loops_of(context) != token.loops
            draw = Draw(context.path, context.line, is_again)
            self.drawn[token.root, token.at][draw] = None

    def twice(self) -> list[tuple[Draw, Draw]]:
        """Pairs that have the same noise; a loop is a pair with itself."""
        found: list[tuple[Draw, Draw]] = []
        for draws in map(list, self.drawn.values()):
            found += [(draw, draw) for draw in draws if draw.is_again]
            found += [(a, b) for i, a in enumerate(draws) for b in draws[:i]]
        return found


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

EVERY = "each number"
Fold: TypeAlias = int | str | tuple[str, int]


class Counter(NamedTuple):
    """An integer argument, plus a constant."""

    root: int
    plus: int = 0


class Key(NamedTuple):
    """A key of random numbers.

    Attributes:
        root: the argument.
        path: what was folded in: constants, `("counter", argument)`; `EVERY` at the end of several
            keys from `split`.
    """

    root: int
    path: tuple[Fold, ...] = ()

    @property
    def is_many(self) -> bool:
        """Whether it is several keys from `split`."""
        return self.path[-1:] == (EVERY,)

    def one(self, i: int) -> "Key":
        """One of several."""
        return Key(self.root, (*self.path[:-1], i))


class Use(NamedTuple):
    """A use of a key.

    Attributes:
        what: `"loss"`, or anything else.
        key: the key.
        line: the source line.
        is_fresh: whether it may be another one in each turn of the loops around.
    """

    what: str
    key: Key
    line: str
    is_fresh: bool = True


def token_of(equation: JaxprEqn, inputs: Sequence[Fact]) -> Key | Counter | None:
    """The key or the counter that a result is; None if it is none, or not known."""
    name, first = equation.primitive.name, inputs[0].token if inputs else None
    if isinstance(first, Key):
        return first if name in UNCHANGED else _key(name, equation, first, inputs)
    dtype = dtype_of(equation.outvars[0])
    if (
        not isinstance(first, Counter)
        or dtype is None
        or dtype.itemsize < 4
        or dtype.kind not in "iu"
    ):
        return None
    by = whole_number(inputs[1]) if name == "add" else None
    if by is not None:
        return first._replace(plus=first.plus + by)
    return first if name in UNCHANGED | {"convert_element_type"} else None


def _key(name: str, equation: JaxprEqn, key: Key, inputs: Sequence[Fact]) -> Key | None:
    params, shape = equation.params, shape_of(equation.outvars[0])
    if name == "random_fold_in" and not key.is_many and not shape:
        number, counter = whole_number(inputs[1]), inputs[1].token
        is_counter = isinstance(counter, Counter) and not counter.plus
        fold = ("counter", counter.root) if is_counter else number
        return None if fold is None else Key(key.root, (*key.path, fold))
    if name == "random_split" and not key.is_many and len(params["shape"]) == len(shape) == 1:
        return Key(key.root, (*key.path, EVERY))
    if name == "slice" and key.is_many and shape == (1,):
        return key.one(params["start_indices"][0])
    is_moved = name in ("squeeze", "reshape", "broadcast_in_dim") and not key.is_many
    return key if is_moved and shape in ((), (1,)) else None


def parted(a: Key, b: Key) -> bool:
    """Whether two keys of one root are proven to be independent: no path begins with the other."""
    folds = zip(a.path, b.path, strict=False)
    return any(isinstance(one, int) and isinstance(two, int) and one != two for one, two in folds)


def is_another(key: Key, back: Mapping[int, object]) -> bool:
    """Whether a key is another one in the next call, given the tokens that come back."""
    if key.root not in back:  # then the caller gives another one in each call
        return True
    after = back[key.root]
    if not isinstance(after, Key) or after.root != key.root:
        return False
    if after.path:
        return parted(key, after)
    roots = [fold[1] for fold in key.path if isinstance(fold, tuple)]
    grown = (back.get(root) for root in roots)
    return any(isinstance(one, Counter) and one.plus > 0 and one.root in roots for one in grown)
