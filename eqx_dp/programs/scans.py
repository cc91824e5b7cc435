"""How JAX's releases describe the arguments of a scan."""

from typing import Any


def scan_arity(params: dict[str, Any]) -> tuple[int, int]:
    """How many inputs of a scan are constants, and how many are carried.

    Args:
        params: of an equation whose primitive is ``scan``.
    """
    if "num_consts" in params:  # JAX 0.10
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)
