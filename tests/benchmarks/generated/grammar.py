"""Composes steps at random from `parts.py`: `made(seed)` is always the same program."""

import dataclasses
import textwrap

import numpy as np

from . import layouts, parts, rows

LEAK = 0.6
"""How often a step gets one operation that is meant to leak; a fifth of these get a second one."""

FAR = 0.12
"""How often an honest operation is one that the check need not know."""


@dataclasses.dataclass(frozen=True)
class Program:
    """A step as text.

    Attributes:
        seed: what it was made from.
        layout: how batches reach it; a key of `LAYOUTS`.
        source: defines `grad_fn`, `initial(model)` and `step`.
        private: positions of the arguments that hold data.
        plan: "poisson", "fixed" or "users".
        used: the operations, each with "honest", "far" or "leak".
    """

    seed: int
    layout: str
    source: str
    private: tuple[int, ...]
    plan: str
    used: tuple[tuple[str, str], ...]

    @property
    def is_simple(self) -> bool:
        """Whether all operations are honest and in the language of the check."""
        return all(kind == "honest" for kind, _ in self.used)


_MODULE = """
frozen = lambda row: jnp.tanh(row @ FROZEN)
as_bytes = lambda y: jax.lax.bitcast_convert_type(y[:2].astype(jnp.float32), jnp.uint8)
slots = lambda y: as_bytes(y).reshape(8, 1) / 64
adam = optax.adam(1e-2)


def loss({parameters}):
    {loss}

{grad_fn}
STDDEV = plan.noise_multiplier * grad_fn.sensitivity(plan.neighboring_relation)


def initial(model):
    return {initial}


def step(model, state, public, {arguments}):
    given, metrics = state, {{}}
{body}
    return model, state, metrics
"""


def made(seed: int) -> Program:
    """The program of a seed."""
    return _Composer(seed).program()


def _place(optimizer: str) -> str:
    """Where in the optimizer's state the noise is."""
    if optimizer.startswith("optax.masked"):
        return ".inner_state"
    return (
        "[-1]"
        if optimizer.endswith("plan.privatizer(grad_fn))")
        else "[0]" * ("chain" in optimizer)
    )


class _Composer:
    def __init__(self, seed: int):
        self.seed = seed
        self.rng = np.random.default_rng(seed)
        self.used: list[tuple[str, str]] = []
        places = (
            "layout",
            "rows",
            "mask",
            "loss",
            "call",
            "grads",
            "noise",
            "update",
            "metrics",
            "door",
        )
        chance = (1.5, 3, 2.5, 1.5, 1.5, 1.5, 2.5, 1, 2, 1)
        count = int(self.rng.random() < LEAK) * (1 + int(self.rng.random() < 0.2))
        weights = np.array(chance) / np.sum(chance)
        self.leaks = {str(place) for place in self.rng.choice(places, count, p=weights)}

    def pick(self, kinds: parts.Kinds, place: str, *, turn: int = 0) -> str:
        """One operation: a leak, if this place has one."""
        if place in self.leaks and turn == 0 and kinds.leaks:
            kind, options = "leak", kinds.leaks
        elif kinds.far and self.rng.random() < FAR:
            kind, options = "far", kinds.far
        else:
            kind, options = ("honest", kinds.honest) if kinds.honest else ("leak", kinds.leaks)
        found = options[int(self.rng.integers(len(options)))]
        self.used.append((kind, found))
        return found

    def several(self, kinds: parts.Kinds, place: str, most: int) -> list[str]:
        """Some operations, in random order, among them the leak of this place."""
        count = int(self.rng.integers(most + 1))
        count = max(count, 1) if place in self.leaks else count
        found = [self.pick(kinds, place, turn=i) for i in range(count)]
        return [found[i] for i in self.rng.permutation(count)]

    def program(self) -> Program:
        rng = self.rng
        weights = {
            "batch": 10,
            "tree": 1.5,
            "device": 4,
            "closed": 0.6,
            "fixed": 1.5,
            "users": 1.5,
            "two": 1,
            "keyed": 1,
        }
        names, chance = list(weights), np.array(list(weights.values()))
        layout = names[int(rng.choice(len(names), p=chance / chance.sum()))]
        lines = [layouts.PREPARED[layout]] if layout in layouts.PREPARED else []
        first = self.pick(layouts.LAYOUTS[layout], "layout")
        if layout == "tree" and self.used[-1][0] == "honest":  # it has private numbers and text
            self.used[-1] = "far", first
        lines.append(
            first.replace("xs[index], ys[index]", "table[index], labels[index]")
            if layout == "device"
            else first
        )
        doubled = any(
            word in first for word in ("repeat", "concatenate", "xs[:4]", "xs[:7]", "['real']]")
        )
        if layout not in ("users",) and not doubled:
            of_rows = self.several(rows.ROWS, "rows", 3)
            name = "padding" if layout == "fixed" else "mask"  # which is None there
            lines += [line.replace("mask", name) for line in of_rows]
            if layout != "fixed":
                lines += self.several(rows.MASKS, "mask", 1)
        in_loss = "loss" in self.leaks
        body_of_loss = self.pick(rows.LOSSES, "loss")
        if in_loss and layout not in ("users", "two", "keyed"):
            lines.append(f"def local(model, x, y):\n    {body_of_loss}")
            lines.append(
                "grad_fn = dp.filter_clipped_grad(local, l2_clip_norm=0.5, normalize_by=4.0)"
            )
            body_of_loss = rows.LOSSES.honest[0]
        elif in_loss:
            body_of_loss = rows.LOSSES.honest[0]
            self.used[-1] = "honest", body_of_loss
        lines.append(self.call(layout, doubled))
        lines += self.several(parts.GRADS, "grads", 1)
        optimizer = self.noise(lines)
        lines += self.several(parts.DOORS, "door", int(rng.random() < 0.2))
        lines.append(self.pick(parts.UPDATES, "update"))
        lines += self.several(parts.METRICS, "metrics", 2)
        return self.finished(layout, lines, body_of_loss, optimizer)

    def noise(self, lines: list[str]) -> str | None:
        """Adds the line that makes `noisy`: by itself, or with an optimizer, which is returned."""
        if self.rng.random() < 0.6:
            lines.append(self.pick(parts.NOISES, "noise"))
            return None
        lines.append("noisy, state = optimizer.update(grads, state, model)")
        return self.pick(parts.OPTIMIZERS, "noise")

    def call(self, layout: str, doubled: bool) -> str:
        if layout == "users" and "call" in self.leaks:
            self.used.append(("leak", "rows of users, one by one"))
            return str(self.rng.choice([layouts.FLAT, layouts.UNION]))
        if layout in layouts.CALL_OF:
            return layouts.CALL_OF[layout]
        return layouts.CALLS.honest[0] if doubled else self.pick(layouts.CALLS, "call")

    def finished(self, layout: str, lines: list[str], loss: str, optimizer: str | None) -> Program:
        body = "\n".join(lines)
        make = "dp.filter_clipped_grad(loss, l2_clip_norm=0.5, normalize_by=4.0)"
        grad_fn = f"grad_fn = {make}"
        if layout == "users":
            make = make.replace("(loss,", "(plan.unit.loss(loss),")
            grad_fn = f"row_{grad_fn}".replace("grad_", "", 1) + f"\ngrad_fn = {make}"
        if layout == "two":
            grad_fn += (
                "\nunlabelled_fn = dp.filter_clipped_grad(lambda model, u: jnp.cos(u @ model['w'])"
                " + model['b'], l2_clip_norm=0.5, normalize_by=4.0)"
            )
        initial, stream = "dp.noise_stream()", ""
        if optimizer is not None:
            grad_fn += f"\noptimizer = {optimizer}"
            initial = "optimizer.init(grad_fn.trainable(model))"
            stream = f"{_place(optimizer)}.stream"
        body = body.replace("STREAM", f"state{stream}").replace("GIVEN", f"given{stream}")
        arguments = layouts.ARGUMENTS[layout]
        given = (*arguments, *{"device": ("other",), "keyed": ("key",)}.get(layout, ()))
        parameters = "model, x, y"
        if layout == "keyed":
            parameters, loss = (
                "model, x, y, key",
                loss.replace(
                    "return ",
                    "x = jnp.where(jax.random.bernoulli(key, 0.7, (3,)), x, 0.0)\n    return ",
                    1,
                ),
            )
        source = _MODULE.format(
            loss=loss,
            grad_fn=grad_fn,
            initial=initial,
            arguments=", ".join(given),
            parameters=parameters,
            body=textwrap.indent(body, "    "),
        )
        private = tuple(range(3, 3 + len(arguments) + (layout == "device")))
        plan = {"fixed": "fixed", "users": "users"}.get(layout, "poisson")
        return Program(self.seed, layout, source, private, plan, tuple(self.used))
