"""Programs as XLA compiles them well."""

import jax.extend.core as jex_core

from .channels_last import channels_last
from .thin_products import safe_in_conditionals


def fit_for_compiler(program: jex_core.ClosedJaxpr) -> jex_core.ClosedJaxpr:
    """A differentiated and batched program, written as the compiler of this platform needs it."""
    return safe_in_conditionals(channels_last(program))
