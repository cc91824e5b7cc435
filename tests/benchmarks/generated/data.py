"""Neighboring data sets for each layout: arguments after `model, state, public`."""

from typing import Any, NamedTuple

import numpy as np

SLOTS, FEATURES, TABLE = 8, 3, 20


class Sets(NamedTuple):
    """A data set and its neighbors; each is the arguments of a step, and what it closes over."""

    base: dict[str, Any]
    neighbors: tuple[dict[str, Any], ...]


def neighboring(layout: str, rng: np.random.Generator, dtype: Any = np.float64) -> Sets:
    """Data sets that differ by one example.

    An example is removed as the sampler removes it: what was in the last slot that is real takes
    its place. Slots that are padding hold finite rows, other ones in every data set: with the
    index -1 they are the last example of the data, which may be the one that is removed.
    """
    return _Maker(layout, rng, dtype).sets()


class _Maker:
    def __init__(self, layout: str, rng: np.random.Generator, dtype: Any):
        self.layout, self.rng, self.dtype = layout, rng, dtype
        size = rng.choice([0.02, 0.3, 3.0, 20.0], (TABLE, 1))
        self.x = rng.normal(size=(TABLE, FEATURES)) * size
        self.y = rng.normal(size=TABLE) * 2
        self.rows = rng.normal(size=(TABLE, 2, FEATURES)) * size[:, :, None]
        self.row_labels = rng.normal(size=(TABLE, 2)) * 2
        self.drawn = rng.permutation(TABLE - 1)[:5]

    def sets(self) -> Sets:
        drawn, others = list(self.drawn), set(range(TABLE - 1)) - set(self.drawn)
        base = self.arguments(drawn)
        if self.layout == "fixed":
            full = drawn + sorted(others)[:3]
            replaced = [[*full[:i], sorted(others)[4], *full[i + 1 :]] for i in (0, 3, 7)]
            return Sets(self.arguments(full), tuple(self.arguments(one) for one in replaced))
        removed = [self._without(drawn, i) for i in (0, 2, 4)]
        neighbors = [
            self.arguments(rows, gone=drawn[i]) for i, rows in zip((0, 2, 4), removed, strict=True)
        ]
        if self.layout == "two":
            neighbors.append(self.arguments(drawn, extra=2))
        return Sets(base, tuple(neighbors))

    @staticmethod
    def _without(drawn: list[int], slot: int) -> list[int]:
        left = list(drawn)
        left[slot] = left[-1]
        return left[:-1]

    def arguments(
        self, drawn: list[int], gone: int | None = None, extra: int = 3
    ) -> dict[str, Any]:
        """The arguments for these examples; the example that is gone is garbage in the tables."""
        x, y = self.x.copy(), self.y.copy()
        rows, row_labels = self.rows.copy(), self.row_labels.copy()
        # The last example fills the slots of padding. It may be in or out of the data set.
        for of in (x, y, rows, row_labels):
            for at in (TABLE - 1,) if gone is None else (gone, TABLE - 1):
                of[at] = self.rng.normal(size=of[at].shape) * 5
        index = np.array([*drawn, *[-1] * (SLOTS - len(drawn))])
        padding = index < 0
        if self.layout == "two":
            us = self.rng.normal(size=(5, FEATURES))
            us[:3] = self.x[:3]
            return self.typed(
                xs=x[index], ys=y[index], padding=padding, us=us, missing=np.arange(5) >= extra
            )
        if self.layout == "users":
            missing = np.zeros((SLOTS, 2), bool)
            missing[:, 1] = index % 3 == 0
            return self.typed(xs=rows[index], ys=row_labels[index], rows=missing, padding=padding)
        if self.layout == "tree":
            batch = self.typed(x=x[index], y=y[index], padding=padding)
            return {"batch": {**batch, "real": len(drawn), "name": "n" * len(drawn)}}
        if self.layout == "device":
            other = np.roll(index, 2)
            return self.typed(table=x, labels=y, index=index, padding=padding, other=other)
        if self.layout == "closed":
            return self.typed(index=index, padding=padding, DATA=x, LABELS=y)
        if self.layout == "fixed":
            return self.typed(xs=x[index], ys=y[index])
        key = {"key": np.array([3, 4], np.uint32)} if self.layout == "keyed" else {}
        return self.typed(xs=x[index], ys=y[index], padding=padding, **key)

    def typed(self, **arrays: np.ndarray) -> dict[str, Any]:
        def cast(a: np.ndarray) -> np.ndarray:
            return (
                a.astype(self.dtype)
                if a.dtype == np.float64
                else a.astype(np.int32)
                if a.dtype == np.int64
                else a
            )

        return {name: cast(array) for name, array in arrays.items()}
