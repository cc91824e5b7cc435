"""The error where examples meet."""

from ..programs import own_line, source_line
from . import primitives
from .facts import Meeting


def refusal(meeting: Meeting) -> ValueError:
    """Names the primitive and the line, and says what to do."""
    equation = meeting.equation
    name, axes = equation.primitive.name, primitives.axes_named(equation)
    line = meeting.line or own_line(equation) or source_line(equation)
    over = f" over the axis {', '.join(sorted(map(repr, axes)))}," if axes else ""
    default = _OF_AXES if axes else _OF_ANY
    advice = next((advice for names, advice in _ADVICE.items() if name in names), default)
    return ValueError(
        f"One example's gradient may depend on other examples, by '{name}'{over} at {line}. What "
        f"one example adds to the sum must depend on that example alone. {advice}"
    )


_OF_AXES = (
    "An enclosing vmap or shard_map, or the sharding rules, bind this axis, and examples are "
    "spread over it, so this mixes them. Normalise within the example instead (eqx.nn.GroupNorm, "
    "eqx.nn.LayerNorm, eqx.nn.RMSNorm), or freeze the batch statistics of an eqx.nn.BatchNorm "
    "with eqx.nn.inference_mode(model)."
)
_OF_ANY = (
    "This primitive is not known to keep examples apart. Use other operations; if it is one of "
    "JAX's own, please report it."
)
_ADVICE = {
    ("psum_invariant",): "In a shard_map over this axis the model is the same on all devices while "
    "examples differ, so that JAX sums per-example gradients over devices before they are clipped. "
    "Call the clipped gradient outside of shard_map, with sharding=dp.ShardingRules(mesh, ...); or "
    "give shard_map check_vma=False, and sum the result over the axis yourself.",
    primitives.REDUCTIONS: "It reduces over all examples and may only steer Equinox's own loops "
    "and checks. With EQX_ON_ERROR=nan (or breakpoint) one bad example changes all the others: use "
    "EQX_ON_ERROR=raise, which stops the run, or off.",
    tuple(primitives.GENERATORS): "For a batch of keys of the generators rbg and unsafe_rbg, JAX "
    "draws all numbers from the first key. Use other keys: jax.random.key(seed, "
    "impl='threefry2x32').",
    primitives.ATTENTION: "For a batch, cuDNN adds gradients of a bias that examples share, draws "
    "dropout by place, and finds the maxima of 8-bit values. Use implementation='xla'.",
    ("regularized_incomplete_beta",): "Its loop changes an element until all of the batch have "
    "converged. Write it by a jax.lax.while_loop, which stops for each example alone.",
    primitives.CALLBACKS: "It hands all examples of a batch to a function on the host. With "
    "vmap_method='sequential' the function gets one example at a time.",
    primitives.STATEFUL: "A function on the host may remember one example and give it to another. "
    "Use jax.pure_callback with vmap_method='sequential' for a pure function, and "
    "jax.debug.callback to show values.",
    primitives.REFERENCES: "It reads or writes a mutable array (jax.new_ref), which outlives the "
    "example. Return the value instead, and carry it in a jax.lax.scan.",
    ("custom_vmap_call",): "It has its own batching rule (jax.custom_batching.custom_vmap), which "
    "is given all examples at once. Use the function without the rule, or jax.lax.map for one that "
    "cannot be mapped.",
    ("pallas_call",): "The kernel has scratch memory, scalars in front or whole arrays, which "
    "outlive one example's step of the grid. Use a kernel with blocks only.",
}
