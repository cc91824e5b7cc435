"""Every test sees eqx_dp with its jaxtyping annotations checked at run time by beartype."""

from jaxtyping import install_import_hook

install_import_hook("eqx_dp", "beartype.beartype")
