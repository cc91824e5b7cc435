"""Examples never meet: shown on the program that runs, differentiated and batched."""

from .dependence import Apart as Apart
from .dependence import Dependence as Dependence
from .dependence import Mixed as Mixed
from .dependence import Shared as Shared
from .dependence import dtype_of as dtype_of
from .dependence import shape_of as shape_of
from .dependence import size_of as size_of
from .follow import Follow as Follow
from .rules import OPERAND_BY_OPERAND as OPERAND_BY_OPERAND
from .rules import RULES as RULES
from .run import Values as Values
from .run import in_halves_apart as in_halves_apart
from .run import run_apart as run_apart
from .run import sum_over_examples as sum_over_examples
