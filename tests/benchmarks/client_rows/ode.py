"""A row of diffrax: a neural ordinary differential equation through points in time."""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
from equinox import nn
from jaxtyping import Array

from ..rows import Row


class NeuralODE(eqx.Module):
    """A vector field, solved with steps as long as its accuracy allows."""

    field: nn.MLP

    def __call__(self, times: Array, start: Array) -> Array:
        solution = diffrax.diffeqsolve(
            diffrax.ODETerm(lambda t, y, field: field(y)),
            diffrax.Tsit5(),
            t0=times[0],
            t1=times[-1],
            dt0=times[1] - times[0],
            y0=start,
            args=self.field,
            stepsize_controller=diffrax.PIDController(rtol=1e-3, atol=1e-6),
            saveat=diffrax.SaveAt(ts=times),
        )
        assert solution.ys is not None
        return solution.ys


def _loss(model: NeuralODE, times: Array, path: Array) -> Array:
    return jnp.mean((path - model(times, path[0])) ** 2)


def neural_ode(batch: int = 16, length: int = 20, width: int = 64, depth: int = 2) -> Row:
    """Spirals, of which it sees the start."""
    field = nn.MLP(2, 2, width, depth, activation=jax.nn.softplus, key=jax.random.key(0))
    times = jnp.linspace(0.0, 1.0, length)
    starts = jax.random.uniform(jax.random.key(1), (batch, 1, 2), minval=-1.0, maxval=1.0)
    angles = 6 * times
    turned = jnp.stack([starts[..., 0] * jnp.cos(angles), starts[..., 1] * jnp.sin(angles)], -1)
    title = f"neural ODE (diffrax) at {length} times, MLP 2-{width}-{width}-2, batch {batch}"
    batches = jnp.broadcast_to(times, (batch, length)), turned
    return Row(title, NeuralODE(field), _loss, batches)
