"""What a textbook says of a transformer's memory."""

import dataclasses

from ..expected import whole_number


@dataclasses.dataclass(frozen=True)
class TransformerShape:
    """The sizes of a transformer that the textbook's formula needs.

    Args:
        heads: attention heads of a layer, N.
        width: entries of a token's vector. The formula's D is that of a head, `width / heads`.
        length: tokens of an example, T.

    Raises:
        ValueError: one of them is not positive, or the heads do not divide the width.
    """

    heads: int
    width: int
    length: int

    def __post_init__(self) -> None:
        for name in ("heads", "width", "length"):
            whole_number(name, getattr(self, name), least=1, most=2**53)
        if self.width % self.heads:
            raise ValueError(
                f"heads must divide the width: found {self.heads} heads and width {self.width}."
            )

    def activation_bytes(self, model_bytes: int, num_examples: int) -> float:
        """M_model B T^2 / (4 N D^2), with D the width of a head.

        The formula is from an introduction to data parallelism in JAX ("Parallelizing a 300M GPT
        model"). It follows if a layer holds three tables of T x T numbers for each head (scores,
        weights, one more), 3 N T^2, and has the 12 (ND)^2 parameters of attention and network: the
        quotient is T^2 / (4 N D^2). So D is the width of a head; with the whole width instead, the
        figure is N^2 times smaller. It counts attention alone, without rematerialisation. (For
        T = 1024, N = 8, D = 128 the quotient is 2; the introduction says 8.)

        Args:
            model_bytes: of the parameters, in the dtype that activations have.
            num_examples: B.
        """
        width = self.width // self.heads
        return model_bytes * num_examples * self.length**2 / (4 * self.heads * width**2)
