"""What steps are made of: operations on sums, noise, updates, results and side doors.

Each entry is a line of Python with the names of a step: `x` of shape (8, 3), `y` of shape (8,) and
`mask`; `xs`, `ys` and `padding`, what they were; `public` of shape (3, 3), `grads`, `noisy`,
`state`. STREAM and GIVEN are the stream of noise in the state, now and when the step began. A leak
is meant to leak and an honest operation to keep the promise; whether a step does is decided by
`replay.py` and not here. `far` are honest, but not in the language that the check certifies.
"""

from typing import NamedTuple


class Kinds(NamedTuple):
    """Operations of one place in a step."""

    honest: tuple[str, ...]
    leaks: tuple[str, ...]
    far: tuple[str, ...] = ()


GRADS = Kinds(
    honest=(
        "grads = jax.tree.map(lambda g: 0.5 * g, grads)",
        "grads = jax.tree.map(lambda g: g / 4.0, grads)",
        "grads = jax.tree.map(jnp.negative, grads)",
        "grads = jax.tree.map(lambda g: g + 0.0, grads)",
        "grads = {'b': grads['b'], 'w': grads['w'][::-1]}",
        "grads = {'b': grads['b'], 'w': grads['w'].reshape(3, 1).reshape(3)}",
    ),
    leaks=(
        "grads = jax.tree.map(lambda g: 2.0 * g, grads)",
        "grads = jax.tree.map(lambda g: -1.5 * g, grads)",
        "grads = jax.tree.map(lambda g: g + g, grads)",
        "grads = jax.tree.map(lambda g: g * jnp.sum(~padding), grads)",
        "grads = jax.tree.map(lambda g: 12.0 * g / jnp.maximum(1, jnp.sum(~padding)), grads)",
        "grads = {'b': grads['b'], 'w': grads['w'] + xs.sum(0)}",
        "grads = {'b': grads['b'] + jnp.sum(~padding), 'w': grads['w']}",
        "grads = {'b': grads['b'] + ys[0], 'w': grads['w']}",
        "grads = jax.tree.map(jnp.sign, grads)",
        "grads = jax.tree.map(lambda g: jnp.round(4.0 * g) / 4.0, grads)",
        "grads = jax.tree.map(lambda g: g / (1e-3 + jnp.linalg.norm(g)), grads)",
        "grads = jax.tree.map(lambda g: jnp.where(jnp.abs(g) > 0.1, 3.0 * g, g), grads)",
        "grads = jax.tree.map(lambda g: g**3 * 40.0, grads)",
        "grads = jax.tree.map(lambda g: g + jnp.exp(3.0 * g), grads)",
        "grads = jax.tree.map(jnp.add, grads, grad_fn(model, x, y, is_padding_example=mask))",
        "grads = jax.tree.map(jnp.add, grads, grad_fn(model, -x, y, is_padding_example=mask))",
        "grads = {'b': grads['b'], 'w': jnp.cumsum(grads['w'])}",
        "grads = {'b': grads['b'], 'w': 2.0 * public @ grads['w']}",
        "grads = {'b': grads['b'], 'w': grads['w'] + grads['b']}",
        "grads = {'b': grads['b'], 'w': grads['w'][jnp.array([0, 0, 0])] * 1.5}",
        "grads = {'b': grads['b'], 'w': grads['w'] * jnp.array([1.0, 5.0, 1.0])}",
    ),
    far=(
        "grads = {'b': grads['b'], 'w': jnp.sort(grads['w'])}",
        "grads = {'b': grads['b'], 'w': grads['w'] * jnp.array([1.0, 0.5, 1.0])}",
        "grads = jax.tree.map(lambda g: jnp.clip(g, -1.0, 1.0), grads)",
        "grads = jax.tree.map(lambda g: g * jax.nn.sigmoid(public[0, 0]), grads)",
    ),
)

# From `grads` to `noisy`; STDDEV is what the plan asks for.
NOISES = Kinds(
    honest=(
        "noisy, state = dp.add_noise(grads, state, STDDEV)",
        "noisy, state = dp.add_noise(grads, state, 2 * STDDEV)",
        "first, state = dp.add_noise(grads, state, 1.5 * STDDEV)\n"
        "second, state = dp.add_noise(grads, state, 1.5 * STDDEV)\n"
        "noisy = jax.tree.map(lambda a, b: (a + b) / 2, first, second)",
        "noisy_w, state = dp.add_noise(grads['w'], state, 1.5 * STDDEV)\n"
        "noisy_b, state = dp.add_noise(grads['b'], state, 1.5 * STDDEV)\n"
        "noisy = {'b': noisy_b, 'w': noisy_w}",
    ),
    leaks=(
        "noisy = grads",
        "noisy, state = dp.add_noise(grads, state, 0.5 * STDDEV)",
        "noisy, state = dp.add_noise(grads, state, 0.0)",
        "noisy, _ = dp.add_noise(grads, state, STDDEV)",
        "noisy_w, state = dp.add_noise(grads['w'], state, STDDEV)\n"
        "noisy = {'b': grads['b'], 'w': noisy_w}",
        "first, later = dp.add_noise(grads, state, 2 * STDDEV)\n"
        "second, _ = dp.add_noise(jax.tree.map(lambda g: 0.5 * g, grads), state, 2 * STDDEV)\n"
        "state, noisy = later, jax.tree.map(lambda a, b: 2 * (a - b), first, second)",
        "noisy, later = dp.add_noise(grads, state, STDDEV)\n"
        "zeros = jax.tree.map(jnp.zeros_like, grads)\n"
        "noise, _ = dp.add_noise(zeros, state, STDDEV)\n"
        "state, noisy = later, jax.tree.map(jnp.subtract, noisy, noise)",
        "zeros = jax.tree.map(jnp.zeros_like, grads)\n"
        "noise, _ = dp.add_noise(zeros, state, STDDEV)\n"
        "grads = jax.tree.map(jnp.subtract, grads, noise)\n"
        "noisy, state = dp.add_noise(grads, state, STDDEV)",
        "noisy, _ = dp.add_noise(grads, dp.noise_stream(7), STDDEV)",
        "noisy, _ = dp.add_noise(grads, dp.noise_stream(), STDDEV)",
        "first, state = dp.add_noise(grads, state, STDDEV)\n"
        "second, state = dp.add_noise(grads, state, STDDEV)\n"
        "noisy = jax.tree.map(lambda a, b: (a + b) / 2, first, second)",
        "noisy, later = dp.add_noise(grads, state, STDDEV)\n"
        "state = jax.tree.map(lambda a, b: a, state, later)",
        "noisy, later = dp.add_noise(grads, state, STDDEV)\n"
        "state = later._replace(counter=state.counter)",
        "noisy, state = dp.add_noise(grads, state, STDDEV)\n"
        "state = state._replace(counter=jax.tree.map(jnp.zeros_like, state.counter))",
        "noisy_w, later = dp.add_noise(grads['w'], state, STDDEV * 1.5)\n"
        "noisy_b, state = dp.add_noise(grads['b'], state, STDDEV * 1.5)\n"
        "noisy = {'b': noisy_b, 'w': noisy_w}",
        "noisy, state = dp.add_noise(grads, state, STDDEV)\n"
        "noisy = jax.tree.map(lambda a, b: a + 1e-2 * b, noisy, grads)",
        "noisy, state = dp.add_noise(grads, state, STDDEV)\n"
        "noisy = jax.tree.map(lambda a, b: jnp.where(jnp.abs(b) > 0.2, b, a), noisy, grads)",
        "noisy, state = dp.add_noise(grads, state, STDDEV)\n"
        "noisy = jax.tree.map(lambda a: a / jnp.maximum(1, jnp.sum(~padding)), noisy)",
        "noisy, state = dp.add_noise(grads, state, STDDEV)\n"
        "noisy = jax.tree.map(lambda a, b: jnp.minimum(a, 3 * jnp.abs(b)), noisy, grads)",
        "noisy, state = dp.add_noise(grads, state, STDDEV)\n"
        "noisy = {'b': noisy['b'], 'w': noisy['w'] + 0.0 * jnp.log(xs[0])}",
    ),
    far=(
        "noisy, state = dp.add_noise(grads, state, STDDEV)\n"
        "state = jax.tree.map(lambda a: a, state)",
        "unused, state = dp.add_noise(jnp.zeros(3), state, STDDEV)\n"
        "noisy, state = dp.add_noise(grads, state, STDDEV)",
    ),
)

# What adds the noise in place of a line of `NOISES`, by
# `noisy, state = optimizer.update(grads, state, model)`.
OPTIMIZERS = Kinds(
    honest=(
        "plan.privatizer(grad_fn)",
        "optax.chain(plan.privatizer(grad_fn), adam)",
        "optax.chain(plan.privatizer(grad_fn), optax.sgd(0.1, momentum=0.9))",
        "optax.chain(plan.privatizer(grad_fn), optax.clip_by_global_norm(1.0), optax.sgd(0.1))",
        "optax.chain(plan.privatizer(grad_fn), optax.ema(0.9), optax.scale(-0.1))",
        "optax.chain(plan.privatizer(grad_fn), optax.adafactor(0.1))",
    ),
    leaks=(
        "optax.chain(adam, plan.privatizer(grad_fn))",
        "optax.chain(optax.scale(2.0), plan.privatizer(grad_fn))",
        "optax.chain(optax.trace(0.9), plan.privatizer(grad_fn))",
        "optax.chain(optax.ema(0.5), plan.privatizer(grad_fn))",
        "optax.chain(optax.scale_by_rms(), plan.privatizer(grad_fn))",
        "optax.chain(optax.normalize_by_update_norm(), plan.privatizer(grad_fn))",
        "optax.chain(optax.scale_by_sign(), plan.privatizer(grad_fn))",
        "optax.chain(optax.add_noise(1.0, 0.5, 0), optax.sgd(0.1))",
        "optax.chain(optax.apply_every(2), plan.privatizer(grad_fn))",
        "optax.masked(plan.privatizer(grad_fn), {'b': False, 'w': True})",
    ),
    far=(
        "optax.chain(optax.clip_by_global_norm(0.1), plan.privatizer(grad_fn))",
        "optax.chain(optax.scale(0.5), plan.privatizer(grad_fn))",
    ),
)

UPDATES = Kinds(
    honest=(
        "model = jax.tree.map(lambda p, g: p - 0.1 * g, model, noisy)",
        "model = {'b': model['b'] - 0.1 * noisy['b'], 'w': model['w'] - jnp.sign(noisy['w'])}",
        "model = jax.tree.map(lambda p, g: 0.9 * p - 0.1 * jnp.tanh(g), model, noisy)",
        "scale = jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(noisy)))\n"
        "model = jax.tree.map(lambda p, g: p - g / (1.0 + scale), model, noisy)",
        "model = jax.lax.cond(noisy['b'] > 0, lambda m: m, lambda m: jax.tree.map("
        "lambda p, g: p - g, m, noisy), model)",
        "updates, _ = adam.update(noisy, adam.init(model))\n"
        "model = jax.tree.map(jnp.add, model, updates)",
    ),
    leaks=(
        "model = jax.tree.map(lambda p, g: p - 0.1 * g, model, grads)",
        "model = {'b': model['b'] - noisy['b'], 'w': model['w'] - noisy['w'] + 1e-3 * xs.mean(0)}",
        "model = {'b': model['b'] + 1e-3 * jnp.sum(~padding), 'w': model['w'] - noisy['w']}",
        "model = jax.tree.map(lambda p, g: jnp.where(ys.mean() > 0, p - g, p), model, noisy)",
        "model = jax.lax.cond(ys[0] > 0, lambda m: m, lambda m: jax.tree.map("
        "lambda p, g: p - g, m, noisy), model)",
        "model = jax.tree.map(lambda p, g: p - 0.1 * g, model, noisy)\n"
        "model['b'] = jnp.where(jnp.isfinite(xs).all(), model['b'], ys[0])\n"
        "model['b'] = model['b'] + 0.01 * ys[0]",
        "rate = 1.0 / jnp.maximum(1, jnp.sum(~padding))\n"
        "model = jax.tree.map(lambda p, g: p - rate * g, model, noisy)",
        "model = {'b': ys.max(), 'w': model['w'] - noisy['w']}",
        "model = {'b': jnp.linalg.norm(grads['w']), 'w': model['w'] - noisy['w']}",
        "model = jax.tree.map(lambda p, g: p - 0.1 * g, model, noisy)\n"
        "model['w'] = jnp.sort(jnp.concatenate([model['w'], xs[:, 0]]))[:3]",
    ),
)

# What else the step returns: entries of a dictionary, by name.
METRICS = Kinds(
    honest=(
        "metrics['norm'] = jnp.linalg.norm(noisy['w'])",
        "metrics['public'] = public.sum()",
        "metrics['model'] = model['w'] ** 2",
        "metrics['noisy'] = noisy",
        "metrics['shape'] = jnp.float32(x.shape[1])",
        "metrics['finite'] = jnp.isfinite(noisy['w']).all()",
        "metrics['loss'] = jnp.mean(ys)",  # which is disclosed, by this name
        "metrics['loss'] = jnp.sum(jnp.where(padding, 0.0, ys.T))",
    ),
    leaks=(
        "metrics['mean'] = jnp.mean(ys)",
        "metrics['loss_2'] = jnp.mean(ys)",
        "metrics['train.loss'] = {'other': jnp.mean(ys)}",
        "metrics['losses'] = {'loss': jnp.mean(ys), 'norm': jnp.linalg.norm(grads['w'])}",
        "metrics['count'] = jnp.sum(~padding)",
        "metrics['norm'] = jnp.linalg.norm(grads['w'])",
        "metrics['grads'] = grads",
        "metrics['first'] = xs[0, 0]",
        "metrics['padding'] = padding",
        "metrics['any'] = jnp.any(ys > 3.0)",
        "metrics['sign'] = jnp.sign(ys[0])",
        "metrics['difference'] = noisy['w'] - grads['w']",
        "metrics['argmax'] = jnp.argmax(ys)",
        "metrics['zero'] = 0.0 * ys.sum() + jnp.where(ys.sum() > 0, 1.0, 2.0)",
        "metrics['state'] = state",
        "metrics['state'] = jax.tree.leaves(state)[0]",
        "metrics['key'] = jax.random.key_data(STREAM.key)",
        "metrics['next'] = dp.add_noise(jnp.zeros(3), STREAM, 1.0)[0]",
        "metrics['noise'] = dp.add_noise({'b': 0.0 * noisy['b'], 'w': jnp.zeros(3)},"
        " GIVEN, 1.0)[0]",
        "metrics['bits'] = jax.lax.bitcast_convert_type(ys[0].astype(jnp.float32), jnp.int32)",
        "metrics['loop'] = jax.lax.while_loop(lambda i: i < jnp.sum(~padding), lambda i: i + 1, 0)",
        "metrics['cond'] = jax.lax.cond(ys[0] > 0, lambda: 1.0, lambda: 0.0)",
        "metrics['nan'] = jnp.isnan(jnp.where(ys > 1.0, jnp.nan, 0.0)).any()",
        "metrics['moments'] = jax.lax.scan(lambda c, v: (c + v, None), 0.0 * ys[0], ys)[0]",
        "metrics['nearest'] = public[jnp.argmin(jnp.abs(public[:, 0] - ys[0]))]",
        "metrics['correlation'] = jnp.vdot(noisy['w'], grads['w'])",
    ),
    far=(
        "metrics['step'] = STREAM.counter[0]",
        "metrics['zero'] = jnp.zeros_like(ys).sum()",
    ),
)

DOORS = Kinds(
    honest=(
        "jax.debug.print('{}', noisy['b'])",
        "public = eqx.error_if(public, public[0, 0] > 1e9, 'public')",
    ),
    leaks=(
        "jax.debug.print('{}', ys.mean())",
        "jax.debug.callback(lambda value: None, grads['w'])",
        "noisy = eqx.error_if(noisy, ys.max() > 1.0, 'large')",
        "noisy = eqx.error_if(noisy, jnp.linalg.norm(grads['w']) > 0.3, 'large')",
        "turns = jax.lax.while_loop(lambda i: i < jnp.sum(~padding), lambda i: i + 1, 0)",
        "noisy = jax.lax.while_loop(lambda c: c[0] < ys.sum(), lambda c: (c[0] + 0.5, c[1]),"
        " (0.0 * ys[0], noisy))[1]",
        "unused = jax.lax.fori_loop(0, jnp.sum(~padding), lambda i, c: c + 1.0, 0.0)",
        "noisy = jax.lax.cond(ys.sum() > 0, lambda n: n, lambda n: jax.tree.map("
        "lambda a: a + 0.0, n), noisy)",
        "jax.lax.cond(ys.sum() > 0, lambda: jax.debug.print('more'), lambda: None)",
        "noisy = jax.tree.map(lambda a: jax.pure_callback(lambda v, w: v, a, a, ys), noisy)",
    ),
)
