"""What a step was made with, and what tells its runs apart."""

import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import PRNGKeyArray

from ..gradients import (
    ClippedGrad,
    FilterSpec,
    MethodName,
    filter_clipped_grad,
    filter_value_and_clipped_grad,
    takes_key,
)
from ..precision import Policy
from ..privacy import PoissonSampler, PrivacyPlan
from ..programs import read_apart
from ..sharding import ShardingRules
from ..shown import function_name
from ..trees import PyTree
from .extra import checked_extra
from .identity import Texts, fingerprint, key_of, keyed_digest, probe_text, shape_of, texts_of
from .state import Parameters, Unrecorded

Model = TypeVar("Model")
MicrobatchSize = int | None | Literal["auto", "tune"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class StepSettings(Generic[Model]):
    """What a step was made with, as [`Step`][] describes it, and what follows from that alone."""

    plan: PrivacyPlan
    num_examples: int
    l2_clip_norm: PyTree[Any]
    policy: Policy | None
    sharding: ShardingRules | None
    filter_spec: FilterSpec
    rescale_to_unit_norm: bool
    microbatch_size: MicrobatchSize
    method: MethodName
    ema: float | None
    disclose: tuple[str, ...]
    shared: bool = False
    run: str = ""
    steps_per_call: int = 1
    unrecorded: Unrecorded = dataclasses.field(default_factory=Unrecorded)
    _loss: Callable[..., Any]
    _update: optax.GradientTransformation
    _keep_batch_dim: bool
    _seed: int | bytes
    is_seed_known: bool = True
    """Whether another process can be given the seed: it was not drawn by `make_step`."""

    def __post_init__(self) -> None:
        _ = (
            self._noise,
            self._loss_root,
            self._rounding_root,
        )  # refused now if at all, and made outside of any trace

    def __repr__(self) -> str:
        fields = {"policy": self.policy and str(self.policy), "method": self.method}
        fields |= {"microbatch_size": self.microbatch_size, "ema": self.ema}
        fields |= {"steps_per_call": self.steps_per_call if self.steps_per_call > 1 else None}
        more = "".join(f", {name}={value!r}" for name, value in fields.items() if value is not None)
        return (
            f"{type(self).__name__}({function_name(self._loss)}, {self.plan}, "
            f"num_examples={self.num_examples}{more})"
        )

    @functools.cached_property
    def grad_fn(self) -> ClippedGrad[Any]:
        """The clipped gradient, divided by the expected batch size."""
        make_grad = filter_value_and_clipped_grad if self.disclose else filter_clipped_grad
        size = self.microbatch_size
        grad_fn = make_grad(
            self._loss,
            l2_clip_norm=self.l2_clip_norm,
            policy=self.policy,
            sharding=self.sharding,
            filter_spec=self.filter_spec,
            keep_batch_dim=self._keep_batch_dim,
            rescale_to_unit_norm=self.rescale_to_unit_norm,
            normalize_by=self.plan.sampling_prob * self.num_examples,
            microbatch_size=None if size == "auto" or size == "tune" else size,
            method=self.method,
        )
        return grad_fn.of_samples(self.plan.sampling)

    @functools.cached_property
    def _noise(self) -> optax.GradientTransformation:
        if self.plan.noise_multiplier == 0:  # then clipping may be without a bound as well
            return optax.identity()
        return self.plan.privatizer(self.grad_fn, key=key_of(self._seed, "noise", self.run))

    @functools.cached_property
    def _loss_root(self) -> PRNGKeyArray:
        return key_of(self._seed, "loss", self.run)

    @functools.cached_property
    def _rounding_root(self) -> PRNGKeyArray | None:
        if self.policy is None or self.policy.rounding != "stochastic":
            return None
        return key_of(self._seed, "rounding", self.run)

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """The chain of the noise and the optimizer."""
        return optax.chain(self._noise, self._update)

    def mesh(self) -> AbstractContextManager[Any]:
        """The rules' mesh as a context, for code that works on a state; a step enters it itself."""
        rules = self.sharding
        if rules is None:
            return nullcontext()
        try:
            return jax.set_mesh(rules.mesh)
        except ValueError:  # while a step is traced inside of another program: no devices are named
            return jax.sharding.use_abstract_mesh(rules.mesh.abstract_mesh)

    def sampler(
        self,
        model: Model | None = None,
        /,
        *batch: PyTree[Any],
        extra: Mapping[str, Any] | None = None,
    ) -> PoissonSampler:
        """The sampler of the plan's batches; with sharding rules, of this host's part of them.

        Runs with the same seed and another identity get other batches. `sampler(model, *batch)`
        uses the same identity as the noise (see `identity`). `sampler()` knows no model: its
        identity is everything that the step was made with except the loss, which is plan, data-set
        size, policy, clip norms, method, and the optimizer, if that can be tried on two parameters
        that are not the model's (an optimizer that needs the model's own tree cannot). One run must
        use one of the two forms.

        Args:
            model: arrays or shapes of arrays; or none, and no batch.
            *batch: as for the step, of any length, for instance the data set itself. Only dtypes
                and the shapes of one example count.
            extra: as for the step.
        """
        return self.sampler_of(None if model is None else self.texts(model, batch, extra))

    def sampler_of(self, texts: Texts | None) -> PoissonSampler:
        """As `sampler`, where it is known what a call computes; None for a model is not known."""
        parts = (probe_text(self._update),) if texts is None else texts
        text = "\n".join((self._known, *parts))
        run = json.dumps(["make_step", self.run, keyed_digest(self._seed, text)])
        rules = self.sharding
        if rules is None:
            return self.plan.sampler(self.num_examples, self._seed, run=run)
        hosts, host = jax.process_count(), jax.process_index()
        parts = rules.local_shards()
        return self.plan.sampler(
            *(self.num_examples, self._seed, parts, hosts, host),
            run=run,
            devices=parts,
            shared=self.shared,
        )

    def identity(
        self, model: Model, /, *batch: PyTree[Any], extra: Mapping[str, Any] | None = None
    ) -> dict[str, str]:
        """The identity of a run of this step, to be kept, and compared when the run is resumed.

        It is the same in every process, on any devices, hosts and mesh, at any microbatch size.
        Nothing is computed: the loss and the optimizer are traced once.

        | name | value | another one for |
        |---|---|---|
        | "loss" | 32 hex digits | the program of one example's loss and its derivative rules, the \
values that it closes over, the model's architecture, what is trained, dtypes |
        | "optimizer" | 32 hex digits | the program of its first state and of its update, with the \
numbers that it was made with |
        | "method" | text | another `method` |

        Digests are keyed by the seed (scrypt, RFC 7914; BLAKE2b, RFC 7693), so that nobody without
        the seed can guess values that a loss closes over and compare digests. The values of the
        model and the code of a callback do not enter. Another release of JAX or of a library may
        write the same mathematics as another program.

        Args:
            model: arrays or shapes of arrays, before or while it is trained.
            *batch: as for the step, of any length; only dtypes and the shapes of one example count.
            extra: as for the step.

        Raises:
            ValueError: as the step.
        """
        return self.identity_of(self.texts(model, batch, extra))

    def identity_of(self, texts: Texts) -> dict[str, str]:
        """As `identity`, where it is known what a call computes."""
        digests = {name: keyed_digest(self._seed, text) for name, text in texts._asdict().items()}
        return {**digests, "method": self.method}

    def secret_id(self, salt: bytes) -> str:
        """A digest that tells seeds apart and does not show the seed (scrypt, RFC 7914).

        Args:
            salt: random bytes, kept beside the result; not secret.
        """
        return fingerprint(self._seed, salt)

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        """What tells runs apart before there is a model, as JSON's types."""
        norms = jax.tree_util.tree_leaves_with_path(self.l2_clip_norm)
        blocks = PoissonSampler(self.num_examples, self.plan.sampling_prob, seed=0).blocks
        return {
            "plan": self.plan.to_json(),
            "num_examples": self.num_examples,
            **({} if blocks == 1 else {"blocks": blocks}),
            "policy": None if self.policy is None else str(self.policy),
            "l2_clip_norm": {
                jax.tree_util.keystr(path): float(norm)
                for path, norm in norms
                if not callable(norm)
            },
            "rescale_to_unit_norm": self.rescale_to_unit_norm,
            "method": self.method,
            **({"shared": True} if self.shared else {}),
        }

    @functools.cached_property
    def _known(self) -> str:
        return json.dumps(self.settings)

    @functools.cached_property
    def _takes_key(self) -> Callable[[int], bool]:
        """By the number of parts that a batch has."""
        return functools.cache(lambda parts: takes_key(self._loss, 1 + parts)[0])

    def texts(
        self, model: Model, batch: tuple[PyTree[Any], ...], extra: Mapping[str, Any] | None
    ) -> Texts:
        """What a call computes, from the shapes of its arguments: traced on few examples."""
        return self._texts(model, batch, checked_extra(self._update, extra))

    def _texts(
        self, model: Model, batch: tuple[PyTree[Any], ...], extra: Mapping[str, Any]
    ) -> Texts:
        rules = self.sharding
        length = 1 if rules is None else rules.num_shards

        def of(model: Any, batch: Any, extra: Any) -> Texts:
            model = self._parameters.stored(model)
            key = jax.random.key(0) if takes_key else None
            prepared = self.grad_fn.prepare(model, batch, key, jnp.zeros(length, bool))
            return texts_of(prepared, rules, self._update, self._wide(model), extra)

        takes_key = self._takes_key(len(batch))
        model, extra = (jax.tree.map(shape_of, tree) for tree in (model, extra))
        batch = jax.tree.map(lambda leaf: shape_of(leaf, length), batch)
        with self.mesh(), read_apart(True):
            return eqx.filter_eval_shape(of, model, batch, extra)

    @property
    def _parameters(self) -> Parameters:
        return Parameters(self.policy, self.sharding)

    def _wide(self, model: Model) -> PyTree[Any]:
        """The trained parameters as the optimizer sees them."""
        return self._parameters.wide(self.grad_fn.trainable(model))
