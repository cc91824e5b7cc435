"""Calls of the engine in a traced step: what goes in, and the clipped sums that come out."""

from collections.abc import Hashable

import jax.extend.core as jex_core

from ..gradients import Mark
from ..isolation import shape_of
from ..programs import Call, inside, open_jaxpr
from . import rows
from .doors import Doors
from .flow import Context
from .record import Record
from .releases import Drawn, Source
from .terms import UNKNOWN, Key
from .values import (
    Cut,
    Linear,
    Private,
    Public,
    Random,
    Rows,
    Sum,
    Value,
    as_public,
    keys_of,
    made_of,
    unknown,
)


class Engine:
    """Calls of the engine, as its marks tell of them."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def call(
        self, context: Context, equation: jex_core.JaxprEqn, mark: Mark, inputs: list[Value]
    ) -> list[Value]:
        """What a call's results are: clipped sums, and values of single examples."""
        ranks = [len(shape_of(variable)) for variable in equation.outvars]
        count = len(equation.outvars)
        is_plain = (len(inputs), count) == (mark.num_operands, mark.num_results)
        if not is_plain or tuple(ranks[: len(mark.ranks)]) != mark.ranks:
            if context.is_final:
                self.record.note(
                    "release",
                    "the clipped gradient is mapped (vmap) or differentiated",
                    context.line,
                    "Its sensitivity is only known of a plain call. Loop over calls instead.",
                    is_decided=False,
                )
            return [unknown(inputs, "nonlinear", context.line)] * count
        end = mark.num_shared
        shared, batch = inputs[:end], inputs[end : end + mark.num_batched]
        keys = inputs[end + mark.num_batched :][: mark.has_keys]
        mask = inputs[len(inputs) - mark.has_mask :] if mark.has_mask else []
        private = [x for x in (*shared, *batch, *mask) if isinstance(x, Private | Sum)]
        if context.is_final:
            self._walk_loss(context, equation, inputs)
            public = [x for x in (*shared, *batch) if isinstance(x, Public)]
            held = [x for x in public if x.words or keys_of(x)]
            for i, value in enumerate((*keys, *held)):
                key = value.term if isinstance(value, Public) else None
                key = key if isinstance(key, Key) else Key(UNKNOWN)
                self.record.of_losses[(*context.path, i)] = Drawn(key, context)
        self._check_constants(context, batch)
        if not private:
            public = [as_public(x) for x in inputs if isinstance(x, Public | Random)]
            return [made_of(public)] * count
        self.record.meet(context, inputs)
        examples = self._examples(context, mark, batch, mask)
        if examples is None or not self._has_public_model(context, shared):
            back = frozenset[int]().union(
                *(value.arguments for value in private if isinstance(value, Private))
            )
            return [Private(reason="mixed", where=context.line, arguments=back)] * count
        own, cuts = examples
        if not mark.has_mask and context.is_final:
            self.record.unmasked[context.line] = None
        spread = frozenset(
            axis
            for cut in cuts
            if isinstance(cut.start, tuple) and cut.start[:1] == ("devices",)
            for axis in cut.start[1]
        )
        for group, bound in enumerate(mark.bounds):
            function: Hashable = None
            if any(isinstance(cut.start, int) for cut in cuts):
                body = open_jaxpr(equation.params["jaxpr"])
                function = group, str(body), tuple(map(id, equation.invars[:end]))
            self.record.sources[context.path, group] = Source(bound, cuts, context.line, function)
        turning = {loop.path for loop in context.loops} & {cut.start for cut in cuts}
        changes = made_of([x for x in (*shared, *batch) if isinstance(x, Public)]).changes
        is_even = not turning & changes  # else parts of a batch meet other models
        sums = [
            Sum(
                frozenset({Linear((context.path, group), frozenset({leaf}), 1.0)}),
                spread=spread,
                is_even=is_even,
            )
            for leaf, group in enumerate(mark.groups)
        ]
        values = Private(frozenset({own}), cuts, "data", context.line)
        return [*sums, *[values] * (count - len(sums))]

    def _walk_loss(
        self, context: Context, equation: jex_core.JaxprEqn, inputs: list[Value]
    ) -> None:
        held = inside(equation)
        assert isinstance(held, Call)
        is_private = [isinstance(value, Private | Sum) for value in inputs]
        Doors(self.record.door).program(held.body, is_private, context)

    def _check_constants(self, context: Context, batch: list[Value]) -> None:
        if context.is_final and any(isinstance(x, Public) and 0 in x.along for x in batch):
            self.record.note(
                "examples apart",
                "examples of filter_clipped_grad are constants, and no private argument",
                context.line,
                "Do not close over private data: pass it as an argument that private= names.",
                is_decided=False,
            )

    def _examples(
        self, context: Context, mark: Mark, batch: list[Value], mask: list[Value]
    ) -> tuple[Rows, frozenset[Cut]] | None:
        """Which rows the engine's examples are; None, and a finding, where they are not apart."""
        private = [x for x in (*batch, *mask) if isinstance(x, Private | Sum)]
        axes: list[Rows] = []
        for value in private:
            own = [
                row
                for row in (value.rows if isinstance(value, Private) else ())
                if row.dim == 0 and row.inner == 1 and row.num_rows == mark.num_examples
            ]
            if not own:
                self._meet(context, value)
                return None
            axes.append(own[0])
        cuts = frozenset[Cut].intersection(
            *(value.cuts for value in private if isinstance(value, Private))
        )
        if len({row.axis for row in axes}) > 1 or not rows.is_of_examples(axes[0], cuts):
            self._meet(context, None)
            return None
        return axes[0], rows.of_batch(cuts, axes[0])

    def _meet(self, context: Context, value: Value | None) -> None:
        found, where, is_decided = "arguments of filter_clipped_grad hold other rows", "", True
        if isinstance(value, Private) and value.reason == "taken":
            found = "rows are taken by indices that the step computes: one may be taken twice"
            where, is_decided = value.where, False
        elif isinstance(value, Private) and value.reason == "slots":
            found = "rows are combined with constants of their slots: a row may get another slot"
            where, is_decided = value.where, False
        elif value is not None:
            found = "rows of the data meet before filter_clipped_grad clips them"
            where = value.where if isinstance(value, Private) else ""
        if context.is_final:
            self.record.note(
                "examples apart",
                found,
                where or context.line,
                "What one example adds to the clipped sum must depend on that example alone, and "
                "count once. Use constants that are known without the data, work within the "
                "example, and pass the sampler's indices as an argument.",
                is_decided,
            )

    def _has_public_model(self, context: Context, shared: list[Value]) -> bool:
        private = [value for value in shared if isinstance(value, Private | Sum)]
        if private and context.is_final:
            for value in private:
                self.record.models |= value.arguments if isinstance(value, Private) else set()
            self.record.note(
                "release",
                "the model that is differentiated is not released: private data is in it "
                "without noise, so the noise multiplier of its clipped sum is unbounded",
                context.line,
                "Add the plan's noise to every clipped sum before it reaches the model, or "
                "anything else that the loss reads.",
            )
        return not private
