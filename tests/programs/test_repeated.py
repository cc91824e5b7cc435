"""Rows of equal equations become calls of one program, and everything is as it was."""

import linecache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend import core as jex_core

from eqx_dp.programs import evaluated, literal_value, outlined, programs_of

X = jnp.linspace(-1.0, 1.0, 9).reshape(3, 3)
WEIGHTS = [jnp.sin(i + jnp.arange(9.0)).reshape(3, 3) for i in range(4)]
KEY = jax.random.key(0)


def in_layers(layer, flags=(0, 0, 1, 1)):
    """A loss whose layers are told apart by a flag alone."""

    def loss(weights, x):
        for weight, flag in zip(weights, flags, strict=True):
            x = layer(weight, x, flag)
        return jnp.sum(x * x)

    return loss


def block(weight, x, flag=0):
    del flag
    hidden = jax.nn.gelu(x @ weight) - x.mean(axis=-1, keepdims=True)
    return x + jax.nn.softmax(hidden @ weight.T) * jnp.tanh(hidden).sum()


def with_name(weight, x, flag):
    del flag
    hidden = checkpoint_name(jnp.tanh(x @ weight), "hidden")
    return x + jnp.sin(hidden) * jnp.cos(hidden + x) / 2 - jnp.exp(-x)


def with_keys(weight, x, flag):
    del flag
    key = jax.random.fold_in(KEY, jnp.sum(x > 0))
    return block(weight, jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0))


@jax.custom_vjp
def with_rule(x):
    return jnp.tanh(x)


with_rule.defvjp(lambda x: (jnp.tanh(x), x), lambda x, g: (g * 3 * x,))


def ruled(weight, x, flag):
    del flag
    return with_rule(block(weight, x))


def needed_later(weights, x):
    """Of one layer another result is needed behind all than of the others."""
    before = []
    for weight in weights:
        inner = jnp.tanh(x @ weight)
        before.append((inner, jnp.cos(inner)))
        x = block(weight, x) + before[-1][1]
    return jnp.sum(x) + jnp.sum(before[1][0])


def dropped(weights, x):
    """What the other layers drop, the second needs."""
    kept = []
    for weight in weights:
        smallest, largest = SMALLEST_AND_LARGEST(x)
        kept.append(largest)
        x = block(weight, x * smallest)
    return jnp.sum(x) * kept[1]


SMALLEST_AND_LARGEST = jax.jit(lambda x: (jnp.min(x), jnp.max(x)))


WITH_CONSTANTS = [np.arange(9.0, dtype=np.float32).reshape(3, 3) + i for i in range(4)]


def with_constants(weights, x):
    for weight, constant in zip(weights, WITH_CONSTANTS, strict=True):
        x = block(weight, x * constant)
    return jnp.sum(x)


def as_if_from(file, source):
    """A function of a file that is not there."""
    names = {"relu": RELU}
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    exec(compile(source, file, "exec"), names)
    return names["f"]


RELU = jax.jit(jax.nn.relu)  # one program, with a rule, wherever it is called
FROM_FILES = [
    as_if_from(f"/somewhere/{name}.py", "def f(x): return relu(x)") for name in ("one", "other")
]


def from_files(weight, x, flag):
    return block(weight, FROM_FILES[flag](x))


def with_scope(weight, x, flag):
    with jax.named_scope(f"scope{flag}"):
        return block(weight, x)


def with_metadata(weight, x, flag):
    with set_xla_metadata(flag=str(flag)):
        return block(weight, x)


def with_other_source(weight, x, flag):
    first = jnp.sin(x)
    second = jnp.sin(first)
    return block(weight, x + (first - second if flag else second - first))


def with_effect(weight, x, flag):
    return block(weight, TOLD(x) if flag else QUIET(x))


QUIET = jax.jit(lambda x: x + 1)
TOLD = jax.jit(lambda x: (jax.debug.callback(lambda x: None, x), x + 1)[1])


def with_operand(weight, x, flag):
    one, other = OPERANDS[flag]
    return block(weight, x + jax.lax.gt(one, other))


OPERANDS = (
    [np.eye(3, dtype=np.float32), np.ones((3, 3), np.float32)],
    [np.eye(3, dtype=np.int32), np.ones((3, 3), np.int32)],
)


# Layers that one thing alone tells apart: were it not looked at, all would be one program's calls.
LAYERS = {
    "nothing": block,
    "literal": lambda w, x, flag: block(w, x * (2.0 + flag)),
    "sign of a zero": lambda w, x, flag: block(w, x / (-0.0 if flag else 0.0)),
    "param": lambda w, x, flag: block(w, jnp.flip(x, flag)),
    "precision": lambda w, x, flag: block(w, jnp.matmul(x, w, precision=("high", None)[flag])),
    "dtype": lambda w, x, flag: block(w, (x > 0).astype((int, float)[flag]) + x),
    "operand": with_operand,
    "scope": with_scope,
    "metadata": with_metadata,
    "source": with_other_source,
    "effect": with_effect,
    "file": from_files,
    "keys": with_keys,
    "name": with_name,
    "rule": ruled,
}
LOSSES = {name: in_layers(layer) for name, layer in LAYERS.items()} | {
    "needed later": needed_later,
    "dropped": dropped,
    "constants": with_constants,
    "alternating": in_layers(lambda w, x, flag: block(w, jnp.flip(x, flag)), (0, 1, 0, 1)),
}


def program_of(loss, dtype=jnp.float32):
    """The program of a loss, what it takes, with results dropped that nobody needs."""
    weights, x = jax.tree.map(lambda a: a.astype(dtype), (WEIGHTS, X))
    program = jax.make_jaxpr(loss)(weights, x)
    jaxpr = program.jaxpr
    needed = {id(v) for v in (*jaxpr.outvars, *(v for one in jaxpr.eqns for v in one.invars))}
    eqns = [
        one.replace(
            outvars=[v if id(v) in needed else jex_core.DropVar(v.aval) for v in one.outvars]
        )
        for one in jaxpr.eqns
    ]
    return jex_core.ClosedJaxpr(jaxpr.replace(eqns=eqns), program.consts), [*weights, x]


def calls(program):
    """The calls of a program that is called more than once, by that program."""
    found = {}
    for equation in program.jaxpr.eqns:
        if equation.params.get("name") == "repeated":
            found.setdefault(programs_of(equation)[0], []).append(equation)
    return found


def values(program, inputs, around=()):
    """Of every equation, by its address, itself and what it takes and makes."""
    variables = [*program.jaxpr.constvars, *program.jaxpr.invars]
    known = dict(zip(variables, [*program.consts, *inputs], strict=True))
    found = {}
    for index, equation in enumerate(program.jaxpr.eqns):
        taken = [
            literal_value(x) if isinstance(x, jex_core.Literal) else known[x]
            for x in equation.invars
        ]
        if equation.params.get("name") == "repeated":
            (body,) = programs_of(equation)
            inner, made = values(jex_core.ClosedJaxpr(body, ()), taken, (*around, index))
            found |= inner
        else:
            made = evaluated(equation, taken)
            found[(*around, index)] = equation, taken, made
        known |= zip(equation.outvars, made, strict=True)
    results = [
        literal_value(x) if isinstance(x, jex_core.Literal) else known[x]
        for x in program.jaxpr.outvars
    ]
    return found, results


def same_bits(one, other):
    def raw(x):
        is_key = jnp.issubdtype(getattr(x, "dtype", type(x)), jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x)

    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert raw(a).dtype == raw(b).dtype
        assert raw(a).tobytes() == raw(b).tobytes()


def said(equation):
    """All that an equation says but its variables and its line."""
    traceback = equation.source_info.traceback
    files = {f.file_name for f in traceback.frames if f.file_name.startswith("/somewhere")}
    literals = [repr(x) for x in equation.invars if isinstance(x, jex_core.Literal)]
    types = [v.aval for v in (*equation.invars, *equation.outvars)]
    dropped = [repr(v) == "_" for v in equation.outvars]
    params = sorted((name, repr(value)) for name, value in equation.params.items())
    scopes = str(equation.source_info.name_stack)
    here = equation.ctx.xla_metadata, equation.effects, sorted(files)
    return equation.primitive, literals, types, dropped, params, scopes, here


@pytest.mark.parametrize("name", LOSSES)
def test_every_equation_is_where_it_is_said_to_be(name):
    """There it says the same, takes and makes the same."""
    program, inputs = program_of(LOSSES[name])
    new, places = outlined(program)
    before, results = values(program, inputs)
    after, new_results = values(new, inputs)
    same_bits(results, new_results)
    assert len(places) == len(set(places)) == len(program.jaxpr.eqns) == len(after)
    for index, place in enumerate(places):
        (one, *its), (other, *others) = before[(index,)], after[place]
        assert said(one) == said(other)
        same_bits(its, others)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LOSSES)
def test_what_jax_makes_of_it_is_the_same_bit_for_bit(name):
    """Values, gradients and gradients of a batch, compiled."""
    program, inputs = program_of(LOSSES[name])
    batch = [jnp.stack([x, x + 0.25]) for x in inputs]

    def all_of(program, inputs, batch):
        run = jex_core.jaxpr_as_fun(program)
        gradient = jax.value_and_grad(lambda *x: run(*x)[0], argnums=tuple(range(len(inputs))))
        return run(*inputs), gradient(*inputs), jax.vmap(gradient)(*batch)

    found = [
        jax.jit(all_of, static_argnums=0)(program, inputs, batch)
        for program in (program, outlined(program)[0])
    ]
    same_bits(*found)


CALLS = {name: [2, 2] for name in LOSSES} | {
    "effect": [2],  # the two without
    "rule": [],  # each has one of its own
    "dropped": [2],  # the two behind the one that needs more
    "alternating": [2],  # each of two layers
    "nothing": [4],
    "keys": [4],
    "name": [4],
    "needed later": [4],
    "constants": [4],
}


@pytest.mark.parametrize("name", LOSSES)
def test_layers_that_are_equal_are_calls_of_one_program(name):
    program, _ = program_of(LOSSES[name])
    found = calls(outlined(program)[0])
    assert [len(its) for its in found.values()] == CALLS[name]


def test_what_a_checkpoint_saves_by_name_is_not_computed_again():
    program, inputs = program_of(LOSSES["name"])

    def compiled(program, *names):
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        run = jax.checkpoint(jex_core.jaxpr_as_fun(program), policy=policy)
        gradient = jax.jit(jax.grad(lambda *x: run(*x)[0], argnums=tuple(range(len(inputs)))))
        return gradient.lower(*inputs).compile()

    one, other = (compiled(its, "hidden") for its in (program, outlined(program)[0]))
    same_bits(one(*inputs), other(*inputs))
    counts = [run.as_text().count(" tanh(") for run in (one, other)]
    assert counts[0] == counts[1]


def test_calls_are_gone_from_what_is_compiled():
    """As many operations as without them, and as much memory."""
    program, inputs = program_of(LOSSES["nothing"])

    def compiled(program):
        run = jex_core.jaxpr_as_fun(program)
        return jax.jit(jax.grad(lambda *x: run(*x)[0])).lower(*inputs).compile()

    one, other = map(compiled, (program, outlined(program)[0]))
    assert other.as_text().count(" = ") == one.as_text().count(" = ")
    sizes = [run.memory_analysis().temp_size_in_bytes for run in (one, other)]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_numbers_are_rounded_as_they_were(dtype):
    program, inputs = program_of(LOSSES["nothing"], dtype)
    new, _ = outlined(program)
    assert (new is program) == (dtype == jnp.float16)

    def gradients(program, inputs):
        run = jex_core.jaxpr_as_fun(program)
        return jax.value_and_grad(lambda *x: run(*x)[0], argnums=tuple(range(5)))(*inputs)

    run = jax.jit(gradients, static_argnums=0)
    same_bits(run(program, inputs), run(new, inputs))


def test_parameters_that_compare_equal_and_are_not_the_same():
    over = jex_core.Primitive("over")
    over.def_abstract_eval(lambda x, by: x)
    over.def_impl(lambda x, by: x / by)

    def loss(weights, x):
        for weight, by in zip(weights, (0.0, 0.0, -0.0, -0.0), strict=True):
            x = block(weight, over.bind(x, by=by))
        return x

    program, inputs = program_of(loss)
    new, places = outlined(program)
    assert len(calls(new)) == 2
    before, after = (values(its, inputs)[0] for its in (program, new))
    for index, place in enumerate(places):
        assert said(before[(index,)][0]) == said(after[place][0])


def test_a_short_program_stays_what_it_is():
    program = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(X)
    assert outlined(program) == (program, ((0,), (1,)))
