"""Programs rewritten into programs of the same inputs and results, for what compilers do."""

from .channels_last import channels_last as channels_last
from .compiled import fit_for_compiler as fit_for_compiler
from .once import computed_once as computed_once
from .once import not_repeated as not_repeated
from .ones import without_ones as without_ones
from .ragged import with_masked_products as with_masked_products
from .stacks import apart as apart
from .stacks import side_by_side as side_by_side
from .stacks import together as together
from .thin_products import safe_in_conditionals as safe_in_conditionals
