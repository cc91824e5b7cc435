"""Policies as the tables of a policy file: reading and writing."""

from typing import Any

from .loss_scale import LossScale
from .matmul import Matmul
from .module_rule import ModuleRule
from .policy import DTYPE_KEYS, OPTIMIZER, Policy
from .refusals import refusal
from .schema import EXTENDS, Content, checked_content

_NOT_INHERITED = ("unsafe", "narrow_optimizer", "description")


def policy_of(content: Content, name: str | None = None, *, is_whole: bool = True) -> Policy:
    """The policy of a file's content, checked, with everything that it inherits.

    If it is not whole, accumulate and noise dtype may be left out.
    """
    table = checked_content(content, is_whole)
    rules: list[ModuleRule] = []
    scale, dtypes = table.get("loss_scale", {"kind": "none"}), table["dtypes"]
    for index, rule in enumerate(table.get("modules", ())):
        try:
            if not {"compute", "params", "matmul"} & rule.keys():
                allowed = 'a dtype, which is required without params and matmul = "wide"'
                raise refusal("modules.compute", "nothing", allowed)
            more: Content = {"compute": dtypes["compute"], "params": None, **rule}
            of_rule = {"param_dtype": more.pop("params"), **more}
            rules.append(ModuleRule(of_rule.pop("match"), of_rule.pop("compute"), **of_rule))
        except ValueError as error:
            raise ValueError(str(error).replace("modules", f"modules[{index}]", 1)) from None
    if scale["kind"] == "static" and "value" not in scale:
        raise refusal("loss_scale.value", "nothing", "a number, which is required")
    return Policy(
        *(dtypes.get(key) for key in DTYPE_KEYS),
        modules=rules,
        loss_scale=LossScale(scale["kind"], scale.get("value", 1.0)),
        matmul_precision=table.get("matmul_precision", "default"),
        unsafe=table.get("unsafe", False),
        optimizer_dtype=dtypes.get(OPTIMIZER),
        rounding=table.get("params", {}).get("rounding", "nearest"),
        narrow_optimizer=table.get("narrow_optimizer", False),
        matmul=Matmul(**table["matmul"]) if "matmul" in table else None,
        name=name,
        description=table.get("description", ""),
    )


def merged(base: Content, content: Content) -> Content:
    """A file's content, merged with that of the file that it extends: see `load_policy`."""
    result: dict[str, Any] = {key: base[key] for key in base if key not in _NOT_INHERITED}
    for key, value in content.items():
        if key == "modules":
            matched = {rule["match"] for rule in value}
            value = [*value, *(rule for rule in base.get(key, ()) if rule["match"] not in matched)]
        elif key in ("dtypes", "params"):
            value = {**base.get(key, {}), **value}
        result[key] = value
    result.pop(EXTENDS, None)
    return result
