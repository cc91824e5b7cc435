"""Puts guides and reference where mkdocs finds them: each stands once in the repository."""

import importlib
import posixpath
import re
from pathlib import Path

import mkdocs_gen_files

import eqx_dp

ROOT = Path(__file__).parents[1]
SOURCE = "https://github.com/eqx-dp/eqx_dp/blob/main"
# What a group of the reference is about, and what is in it, in the order of a training step.
GROUPS = {
    "Precision": (
        *("Policy", "ModuleRule", "Matmul", "LossScale"),
        *("load_policy", "parse_policy", "available_policies", "apply_policy", "apply_updates"),
    ),
    "Clipped gradients": (
        *("filter_clipped_grad", "filter_value_and_clipped_grad", "ClippedGrad", "PerExample"),
        *("filter_clipped_sum", "explain"),
    ),
    "Plan, sample, noise": (
        *("PrivacyPlan", "PoissonSampler", "Banded", "Users", "NeighboringRelation", "compose"),
        *("gaussian_privatizer", "noise_stream", "add_noise"),
    ),
    "Devices": ("ShardingRules",),
    "Training": (
        *("make_step", "Step", "TrainState", "Trainer", "Records"),
        *("load_model", "save_model", "CheckpointError", "DataError"),
    ),
    "Checks": ("check_precision", "check_privacy"),
    "Planning": ("plan_memory", "tune"),
}
# What users get as results and do not make, by the page that it stands on.
RESULTS = {
    "Clipped gradients": (
        "eqx_dp.gradients.Explanation",
        *(f"eqx_dp.gradients.clipping.{name}" for name in ("AutoS", "PerLayer", "Quantile")),
    ),
    "Plan, sample, noise": (
        *(
            f"eqx_dp.privacy.sampling_kinds.{name}"
            for name in ("Poisson", "CyclicPoisson", "FixedSize")
        ),
        *(f"eqx_dp.privacy.sampling_kinds.{name}" for name in ("BallsInBins", "RandomAllocation")),
        *(
            "eqx_dp.privacy.Sampler",
            "eqx_dp.privacy.composition.Composition",
            "eqx_dp.trade_off.TradeOff",
            "eqx_dp.privacy.selection.Tuned",
        ),
        *(f"eqx_dp.optimizers.{name}" for name in ("adam_corrected", "disk", "adam_scaled")),
    ),
    "Training": ("eqx_dp.training.Event", "eqx_dp.training.CheckpointWarning"),
    "Checks": ("eqx_dp.checks.PrecisionReport", "eqx_dp.checks.PrivacyReport"),
    "Planning": ("eqx_dp.planning.MemoryPlan", "eqx_dp.planning.Tuning"),
}
OF_OTHERS = {"NeighboringRelation"}  # an enum of dp_accounting
MODULES = {"audit", "clipping", "optimizers", "sampling", "__version__"}  # their names stand above


def where(path: str) -> str:
    """Where a name is defined: a module may have the name of what stands in it."""
    module, _, name = path.rpartition(".")
    found = getattr(importlib.import_module(module), name)
    return f"{found.__module__}.{found.__qualname__}"


def of_source(match: re.Match[str]) -> str:
    """A link of a guide, to the source where it leads out of guides and pictures."""
    target = posixpath.normpath(posixpath.join("examples/guides", match[1]))
    if target.startswith(("examples/guides/", "examples/pictures/")):
        return match[0]
    return f"]({SOURCE}/{target})"


def write_guides() -> None:
    """Guides and their pictures, from examples/."""
    for page in sorted((ROOT / "examples/guides").glob("*.md")):
        text = re.sub(r"\]\((?!https?:|#)([^)\s]+)\)", of_source, page.read_text("utf-8"))
        with mkdocs_gen_files.open(f"guides/{page.name}", "w") as file:
            file.write(text)
    for picture in sorted((ROOT / "examples/pictures").glob("*.png")):
        with mkdocs_gen_files.open(f"pictures/{picture.name}", "wb") as file:
            file.write(picture.read_bytes())


def write_reference() -> None:
    """A page for each group of public names; mkdocstrings fills it from docstrings."""
    named = {name for names in GROUPS.values() for name in names}
    missing = named ^ ({*dir(eqx_dp)} - MODULES)
    if missing:
        raise SystemExit(f"GROUPS and dir(eqx_dp) differ: {sorted(missing)}")
    groups = {"Audit": ["eqx_dp.audit"]}
    for title, names in GROUPS.items():
        public = [f"eqx_dp.{name}" for name in names if name not in OF_OTHERS]
        groups[title] = list(map(where, [*public, *RESULTS.get(title, ())]))
    for title, names in groups.items():
        with mkdocs_gen_files.open(f"reference/{title.split(',')[0].lower()}.md", "w") as file:
            file.write(f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n")


write_guides()
write_reference()
