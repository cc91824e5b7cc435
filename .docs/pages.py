"""Puts guides and reference where mkdocs finds them: each stands once in the repository."""

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
        *(
            "Policy",
            "ModuleRule",
            "Matmul",
            "LossScale",
            "load_policy",
            "parse_policy",
            "available_policies",
        ),
        *("apply_policy", "apply_updates"),
    ),
    "Clipped gradients": (
        *("filter_clipped_grad", "filter_value_and_clipped_grad", "ClippedGrad", "PerExample"),
        *("explain", "Explanation"),
    ),
    "Plan, sample, noise": (
        *("PrivacyPlan", "PoissonSampler", "gaussian_privatizer", "add_noise", "key_from_secret"),
    ),
    "Devices": ("ShardingRules",),
    "Training": (
        *("make_step", "Step", "TrainState", "Trainer", "Records", "Event"),
        *("load_model", "save_model", "CheckpointError", "CheckpointWarning", "DataError"),
    ),
    "Checks": ("check_precision", "PrecisionReport", "check_privacy", "PrivacyReport"),
    "Planning": ("plan_memory", "tune"),
}


def where(name: str) -> str:
    """Where a public name is defined: a module may have the name of what stands in it."""
    found = getattr(eqx_dp, name)
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
    # Audit has a page of its own; the relation is an enum of dp_accounting.
    missing = named ^ ({*dir(eqx_dp)} - {"audit", "NeighboringRelation", "__version__"})
    if missing:
        raise SystemExit(f"GROUPS and dir(eqx_dp) differ: {sorted(missing)}")
    groups = {
        **{title: list(map(where, names)) for title, names in GROUPS.items()},
        "Audit": ["eqx_dp.audit"],
    }
    for title, names in groups.items():
        with mkdocs_gen_files.open(f"reference/{title.split(',')[0].lower()}.md", "w") as file:
            file.write(f"# {title}\n\n" + "\n\n".join(f"::: {name}" for name in names) + "\n")


write_guides()
write_reference()
