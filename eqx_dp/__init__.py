"""Differentially private training for Equinox models in JAX.

A policy declares which dtype each stage uses, an engine clips the gradient of every example, and a
plan keeps sampling, noise and accounting consistent. `help(dp.make_step)` and the like say more.

Precision: what dtype each stage uses
    load_policy, parse_policy, available_policies, Policy, ModuleRule, Matmul,
    LossScale, apply_policy, apply_updates
Clipped gradients: one example moves a sum by so much and no more
    filter_clipped_grad, filter_value_and_clipped_grad, filter_clipped_sum, ClippedGrad,
    PerExample, clipping, explain
Plan, sample, noise: what makes the sum private, and what that costs
    PrivacyPlan, sampling, PoissonSampler, Banded, Users, NeighboringRelation, compose,
    gaussian_privatizer, noise_stream, add_noise, optimizers
Devices
    ShardingRules
Training: a run that can be killed, and the model that leaves it
    make_step, Step, TrainState, Trainer, Records, load_model, save_model,
    CheckpointError, DataError
Checks: the traced step against its declaration, and attacks on it
    check_precision, check_privacy, audit
Planning: the memory of a step before it runs, and the fastest way to take it
    plan_memory, tune
"""

from importlib.metadata import version as _version
from types import ModuleType as _ModuleType

from . import audit as audit
from . import optimizers as optimizers
from .checks import check_precision as check_precision
from .checks import check_privacy as check_privacy
from .gradients import ClippedGrad as ClippedGrad
from .gradients import PerExample as PerExample
from .gradients import clipping as clipping
from .gradients import explain as explain
from .gradients import filter_clipped_grad as filter_clipped_grad
from .gradients import filter_clipped_sum as filter_clipped_sum
from .gradients import filter_value_and_clipped_grad as filter_value_and_clipped_grad
from .planning import plan_memory as plan_memory
from .planning import tune as tune
from .precision import LossScale as LossScale
from .precision import Matmul as Matmul
from .precision import ModuleRule as ModuleRule
from .precision import Policy as Policy
from .precision import apply_policy as apply_policy
from .precision import available_policies as available_policies
from .precision import load_policy as load_policy
from .precision import parse_policy as parse_policy
from .privacy import Banded as Banded
from .privacy import NeighboringRelation as NeighboringRelation
from .privacy import PoissonSampler as PoissonSampler
from .privacy import PrivacyPlan as PrivacyPlan
from .privacy import Users as Users
from .privacy import add_noise as add_noise
from .privacy import compose as compose
from .privacy import gaussian_privatizer as gaussian_privatizer
from .privacy import noise_stream as noise_stream
from .privacy import sampling_kinds as _sampling_kinds
from .sharding import ShardingRules as ShardingRules
from .training import CheckpointError as CheckpointError
from .training import DataError as DataError
from .training import Records as Records
from .training import Step as Step
from .training import Trainer as Trainer
from .training import TrainState as TrainState
from .training import load_model as load_model
from .training import make_step as make_step
from .training import save_model as save_model
from .updates import apply_updates as apply_updates

sampling = _sampling_kinds
"""The kinds of sampling, such as `dp.sampling.BallsInBins(64)`."""

__version__ = _version("eqx-dp")
"""The version of the installed package, as its metadata says."""


# Without `__all__`, which would make help(eqx_dp) a book of thousands of lines.
def __dir__() -> list[str]:
    public = {name: value for name, value in globals().items() if not name.startswith("_")}
    rooms = {name for name, value in public.items() if isinstance(value, _ModuleType)}
    return sorted(
        {*public, "__version__"} - (rooms - {"audit", "clipping", "optimizers", "sampling"})
    )
