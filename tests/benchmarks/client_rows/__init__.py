"""The models of others that are measured: as their documentation has them, or their libraries."""

import functools
import importlib
from collections.abc import Callable

from ..rows import Row, gpt
from . import images, language, plain, sequences, unet

_SIZES = {"width": 128, "depth": 2}
CLIENTS: dict[str, Callable[..., Row]] = {
    "mlp_l2": plain.mlp_l2,
    "mlp_target": plain.mlp_target,
    "mlp_masked": plain.mlp_masked,
    "cnn_weight_norm": plain.cnn_weight_norm,
    "bag": plain.bag,
    "vit": images.vit,
    "mixer": images.mixer,
    "unet": unet.unet,
    "gru": sequences.gru,
    "bert": sequences.bert,
    # As many tokens in each: what differs is how long the sequences are.
    **{
        f"{name}_{length}": functools.partial(make, batch=2048 // length, length=length, **_SIZES)
        for name, make in (("gpt", gpt), ("gpt_tied", language.gpt_tied))
        for length in (256, 512, 1024)
    },
}

# Rows that are left out here, and why: their libraries are extras.
MISSING: dict[str, str] = {}

for _name, _module, _library in (
    ("maf", "flow", "flowjax"),
    ("neural_ode", "ode", "diffrax"),
    ("gpt_named", "named", "haliax"),
):
    try:
        CLIENTS[_name] = getattr(importlib.import_module(f".{_module}", __package__), _name)
    except ImportError as error:
        MISSING[_name] = f"{_library}: {error}"
