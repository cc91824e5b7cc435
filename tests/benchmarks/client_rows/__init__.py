"""The models of others that are measured: as their documentation has them, or their libraries."""

import functools
from collections.abc import Callable

from ..rows import Row
from . import images, language, plain, sequences, unet

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
    "experts": language.experts,
    # As many tokens in each: what differs is how long the sequences are.
    **{
        f"{name}_{length}": functools.partial(make, batch=2048 // length, length=length)
        for name, make in (("gpt_untied", language.gpt_untied), ("gpt_tied", language.gpt_tied))
        for length in (256, 512, 1024)
    },
}

_TINY_GPT = {"batch": 4, "length": 5, "width": 8, "depth": 1, "vocabulary": 11}
_TINY_MLP = {"batch": 4, "inputs": 6, "width": 8, "depth": 1}
# Sizes at which every row runs in no time: to see that everything works, not to measure.
TINY: dict[str, dict[str, int]] = {
    "mlp_l2": _TINY_MLP,
    "mlp_target": _TINY_MLP,
    "mlp_masked": _TINY_MLP,
    "cnn_weight_norm": {"batch": 4, "side": 8, "channels": 4},
    "bag": {"batch": 4, "length": 5, "vocabulary": 11, "width": 4},
    "vit": {"batch": 4, "side": 8, "width": 8, "hidden": 8, "heads": 2, "depth": 1},
    "mixer": {"batch": 4, "side": 8, "channels": 4, "hidden": 8, "depth": 1},
    "unet": {"batch": 4, "side": 8, "width": 4, "blocks": 1},
    "gru": {"batch": 4, "length": 5, "width": 4},
    "bert": {**_TINY_GPT, "hidden": 8},
    "experts": {**_TINY_GPT, "experts": 2},
    **{name: _TINY_GPT for name in CLIENTS if name.startswith("gpt")},
    "maf": {"batch": 4, "size": 3, "width": 6, "layers": 2},
    "neural_ode": {"batch": 4, "length": 3, "width": 4, "depth": 1},
    "gpt_named": _TINY_GPT,
}

# Rows that are left out here, and why: their libraries are extras.
MISSING: dict[str, str] = {}

try:
    from .flow import maf
except ImportError as error:
    MISSING["maf"] = f"flowjax: {error}"
else:
    CLIENTS["maf"] = maf
try:
    from .ode import neural_ode
except ImportError as error:
    MISSING["neural_ode"] = f"diffrax: {error}"
else:
    CLIENTS["neural_ode"] = neural_ode
try:
    from .named import gpt_named
except ImportError as error:
    MISSING["gpt_named"] = f"haliax: {error}"
else:
    CLIENTS["gpt_named"] = gpt_named
