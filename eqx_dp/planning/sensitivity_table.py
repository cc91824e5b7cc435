"""What was measured of narrower policies, as a table, and the policy that follows from it."""

import math
from collections.abc import Iterator
from typing import NamedTuple

from ..precision import Policy
from ..tables import Part, tabular


class LayerError(NamedTuple):
    """What it costs if one layer follows a policy and all else is as in the reference.

    Attributes:
        layer: where it stands, dotted; `(rest)` for what is in no layer.
        size: how many numbers its trained leaves are.
        policy: the policy's name.
        error: of the whole clipped sum, as a share of its norm.
        own_error: of the part of the sum that is this layer's leaves, as a share of that part.
        own_error_of_all: the same where all layers follow the policy.
    """

    layer: str
    size: int
    policy: str
    error: float
    own_error: float
    own_error_of_all: float


@tabular
class PrecisionSensitivity(NamedTuple):
    """What [`precision_sensitivity`][] returns; `str()` is a table. **Not private.**

    Attributes:
        rows: one for each policy and layer: `layer`, `size`, `policy`, `error`, `own_error`,
            `own_error_of_all`.
        errors: of each policy, by name, where all layers follow it.
        formats: what each layer is multiplied in, by the recommended policy.
        recommended: the policy; None where nothing is within the tolerance.
        error: that was measured of it.
        tolerance: the largest error that was allowed.
        reference: the dtype that errors are measured against.
        num_examples: of the public batch.
    """

    rows: tuple[LayerError, ...]
    errors: tuple[tuple[str, float], ...]
    formats: tuple[tuple[str, str], ...]
    recommended: Policy | None
    error: float
    tolerance: float
    reference: str
    num_examples: int

    def to_toml(self) -> str:
        """The recommended policy as a policy file; `load_policy` reads an equal policy from it.

        Raises:
            ValueError: none is recommended.
        """
        if self.recommended is None:
            raise ValueError(f"No policy is recommended: {self._outcome()}.")
        return self.recommended.to_toml()

    def _outcome(self) -> str:
        if self.recommended is None:
            return (
                f"none is within the tolerance of {self.tolerance:g}; float32 has an error of "
                f"{decibels(self.error)}"
            )
        return f"error {decibels(self.error)}, within the tolerance of {self.tolerance:g}"

    def _parts(self) -> Iterator[Part]:
        names = [name for name, _ in self.errors]
        heads = [(f"{name} alone", "its own part") for name in names]
        lines = [("layer", "parameters", *(x for head in heads for x in head), "recommended")]
        formats = dict(self.formats)
        found = {(row.policy, row.layer): row for row in self.rows}
        for layer in formats:
            rows = [found[name, layer] for name in names]
            cells = [(decibels(row.error), decibels(row.own_error)) for row in rows]
            own = (layer, f"{rows[0].size:,}", *(x for cell in cells for x in cell))
            lines.append((*own, formats[layer]))
        total = sum(found[names[0], layer].size for layer in formats)
        all_ = [x for _, error in self.errors for x in (decibels(error), "")]
        last = "-" if self.recommended is None else decibels(self.error)
        lines.append(("all together", f"{total:,}", *all_, last))
        yield lines
        yield (
            f"errors of the clipped sum of {self.num_examples} public examples against "
            f"{self.reference}, as a share of its norm"
        )
        yield f"recommended: {self._outcome()}"
        yield "not private: the figures, and the choice, show something of these examples"
        if self.recommended is not None:
            yield ""
            yield self.recommended.to_toml()


def decibels(error: float) -> str:
    """An error, and the signal-to-noise ratio that it means: `0.01 (40 dB)`."""
    if math.isnan(error):
        return "-"
    return "0" if error == 0 else f"{error:.1e} ({-20 * math.log10(error):.0f} dB)"
