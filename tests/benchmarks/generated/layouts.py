"""How batches reach a step, and how it calls the engine."""

from .parts import Kinds

# Layouts: the arguments after `model, state, public`, and lines that make x, y and mask of them.
# Leaks of a layout are other such lines.

_PLAIN = "x, y, mask = xs, ys, padding"
_GATHER = "x, y, mask = xs[index], ys[index], padding"

LAYOUTS = {
    "batch": Kinds(
        honest=(_PLAIN, _PLAIN, "x, y, mask = xs.astype(jnp.float32), ys, padding"),
        leaks=(
            "x, y, mask = xs, ys, jnp.zeros(8, bool)",
            "x, y, mask = jnp.concatenate([xs, xs]), jnp.concatenate([ys, -ys]), "
            "jnp.concatenate([padding, padding])",
            "x, y, mask = jnp.repeat(xs, 2, 0), jnp.repeat(ys, 2), jnp.repeat(padding, 2)",
            "x, y, mask = xs[:4] + xs[4:], ys[:4], padding[:4]",
            "x, y, mask = xs[:7], ys[1:], padding[:7]",
        ),
        far=("order = jnp.argsort(ys)\nx, y, mask = xs[order], ys[order], padding[order]",),
    ),
    "tree": Kinds(
        honest=("x, y, mask = batch['x'], batch['y'], batch['padding']",),
        leaks=(
            "x, y, mask = batch['x'] / batch['real'], batch['y'], batch['padding']",
            "x, y, mask = batch['x'][:batch['real']], batch['y'][:batch['real']], None",
            "x, y = batch['x'], batch['y']\nmask = jnp.arange(8) > batch['real']",
            "x, y, mask = batch['x'], batch['y'] + len(batch['name']), batch['padding']",
        ),
    ),
    "device": Kinds(
        honest=(
            _GATHER,
            _GATHER,
            "x, y, mask = jnp.take(table, index, axis=0), jnp.take(labels, index, axis=0), padding",
            "x, y, mask = table[index], labels[index], padding",
        ),
        leaks=(
            "x, y, mask = table[index], labels[index[::-1]], padding",
            "x, y, mask = table[index], labels[other], padding",
            "x, y, mask = table[index], labels[(index + 1) % 20], padding",
            "x, y, mask = table[jnp.sort(index)], labels[index], padding",
            "x, y, mask = table[index // 2], labels[index // 2], padding",
            "x, y, mask = table[index], labels[index], jnp.isnan(labels[index])",
            "x, y, mask = table[index], labels[index], index < 0",
            "x, y, mask = table[:8], labels[:8], padding",
            "x, y, mask = table[index], labels[jnp.arange(8)], padding",
            "first = jnp.clip(jnp.abs(labels[index] * 3).astype(int), 0, 19)\n"
            "x, y, mask = table[first], labels[index], padding",
            "x, y, mask = table[index] - table.mean(0), labels[index], padding",
            "x, y, mask = table[index * 0 + index[0]], labels[index], padding",
            "x, y, mask = table[index], labels[index], padding & (index > 3)",
            "x, y, mask = table[jnp.abs(index - 5)], labels[jnp.abs(index - 5)], padding",
            "x, y, mask = table[jnp.roll(index, 1)], labels[jnp.roll(index, 1)], padding",
        ),
        far=("x, y, mask = table[index, :], labels[jnp.abs(index)], padding",),
    ),
    "closed": Kinds(
        honest=(),
        leaks=(
            "x, y, mask = DATA[index], LABELS[index], padding",
            "x, y, mask = jnp.take(DATA, index, axis=0), LABELS[index], padding",
        ),
    ),
    "fixed": Kinds(
        honest=("x, y, mask = xs, ys, None",),
        leaks=(
            "x, y, mask = jnp.repeat(xs, 2, 0), jnp.repeat(ys, 2), None",
            "x, y, mask = jnp.concatenate([xs, xs]), jnp.concatenate([ys, 2 * ys]), None",
        ),
    ),
    "users": Kinds(
        honest=("x, y, mask = xs, ys, padding",),
        leaks=(
            "x, y, mask = xs, ys, (padding | rows[:, 0]) & False",
            "x, y, mask = xs[::-1], ys, padding",
            "x, y, mask = xs, jnp.roll(ys, 1, axis=0), padding",
        ),
    ),
    "two": Kinds(honest=(_PLAIN,), leaks=()),
    "keyed": Kinds(honest=(_PLAIN,), leaks=()),
}

ARGUMENTS = {
    "batch": ("xs", "ys", "padding"),
    "tree": ("batch",),
    "device": ("table", "labels", "index", "padding"),
    "closed": ("index", "padding"),
    "fixed": ("xs", "ys"),
    "users": ("xs", "ys", "rows", "padding"),
    "two": ("xs", "ys", "padding", "us", "missing"),
    "keyed": ("xs", "ys", "padding"),
}

# What `xs`, `ys` and `padding` mean to leaks further on.
PREPARED = {
    "tree": "xs, ys, padding = batch['x'], batch['y'], batch['padding']",
    "device": "xs, ys = table[index], labels[index]",
    "closed": "xs, ys = DATA[index], LABELS[index]",
    "fixed": "padding = jnp.zeros(8, bool)",
}

CALLS = Kinds(
    honest=(
        "grads = grad_fn(model, x, y, is_padding_example=mask)",
        "grads = grad_fn(model, x, y, is_padding_example=mask)",
        "grads = jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total, grad_fn(model,"
        " part[0], part[1], is_padding_example=part[2])), None), jax.tree.map(jnp.zeros_like,"
        " grad_fn.trainable(model)), (x.reshape(4, 2, 3), y.reshape(4, 2), mask.reshape(4, 2)))[0]",
    ),
    leaks=(
        "grads = grad_fn(model, x, y)",
        "grads = jax.grad(lambda m: jax.vmap(loss, (None, 0, 0))(m, x, y).sum())(model)",
        "parts = [grad_fn(model, x[i:i + 6], y[i:i + 6], is_padding_example=mask[i:i + 6])"
        " for i in (0, 2)]\ngrads = jax.tree.map(jnp.add, *parts)",
        "parts = [grad_fn(model, x[i::2], y[1 - i::2], is_padding_example=mask[i::2])"
        " for i in (0, 1)]\ngrads = jax.tree.map(jnp.add, *parts)",
        "parts = [grad_fn(model, x[i::2], y[i::2], is_padding_example=mask[0::2]) for i"
        " in (0, 1)]\n"
        "grads = jax.tree.map(jnp.add, *parts)",
        "grads = grad_fn({'b': ys.mean(), 'w': model['w']}, x, y, is_padding_example=mask)",
        "grads = jax.lax.scan(lambda total, part: (jax.tree.map(jnp.add, total,"
        " grad_fn(jax.tree.map("
        "jnp.add, model, total), part[0], part[1], is_padding_example=part[2])), None),"
        " jax.tree.map("
        "jnp.zeros_like, grad_fn.trainable(model)), (x.reshape(4, 2, 3), y.reshape(4, 2),"
        " mask.reshape(4, 2)))[0]",
        "inner = grad_fn(model, x, y, is_padding_example=mask)\n"
        "grads = grad_fn(jax.tree.map(jnp.add, model, inner), x, y, is_padding_example=mask)",
        "grads = dp.filter_clipped_grad(loss, l2_clip_norm=3.0, normalize_by=4.0)("
        "model, x, y, is_padding_example=mask)",
        "grads = jax.lax.fori_loop(0, 2, lambda i, total: jax.tree.map(jnp.add, total,"
        " grad_fn(model,"
        " x, y, is_padding_example=mask)), jax.tree.map(jnp.zeros_like, grad_fn.trainable(model)))",
    ),
    far=(
        "parts = [grad_fn(model, x[i::2], y[i::2], is_padding_example=mask[i::2]) for i"
        " in (0, 1)]\n"
        "grads = jax.tree.map(jnp.add, *parts)",
    ),
)

CALL_OF = {
    "keyed": "grads = grad_fn(model, x, y, key=key, is_padding_example=mask)",
    "fixed": "grads = grad_fn(model, x, y)",
    "users": "grads = grad_fn(model, x, y, rows, is_padding_example=mask)",
    "two": "grads = grad_fn(model, x, y, is_padding_example=mask)\n"
    "more = unlabelled_fn(model, us, is_padding_example=missing)\n"
    "grads = jax.tree.map(lambda a, b: 0.5 * (a + b), grads, more)",
}

FLAT = (
    "grads = row_fn(model, x.reshape(16, 3), y.reshape(16),"
    " is_padding_example=(rows | mask[:, None]).reshape(16))"
)
UNION = (
    "x, y, mask = x.reshape(16, 3), y.reshape(16), jnp.repeat(mask, 2)\n"
    "grads = row_fn(model, x, y, is_padding_example=mask)"
)
