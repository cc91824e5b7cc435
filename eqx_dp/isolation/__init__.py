"""Examples never meet: shown on the differentiated program of one of them."""

from .dependence import Apart as Apart
from .dependence import Dependence as Dependence
from .dependence import Mixed as Mixed
from .dependence import Shared as Shared
from .dependence import dtype_of as dtype_of
from .dependence import shape_of as shape_of
from .dependence import size_of as size_of
from .follow import Follow as Follow
from .primitives import engines_rule as engines_rule
from .rules import OPERAND_BY_OPERAND as OPERAND_BY_OPERAND
from .rules import RULES as RULES
from .run import run_apart as run_apart
