"""`conv_general_dilated` with every option."""

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from jax import lax

from tests.gradients.engine.kinds import check, examples, normal

SMALL = st.integers(1, 3)


@st.composite
def convolutions(draw):
    rank = draw(st.integers(1, 2))

    def each(numbers):
        return tuple(draw(numbers) for _ in range(rank))

    options = {
        "window_strides": each(SMALL),
        "padding": tuple((draw(st.integers(-1, 3)), draw(st.integers(-1, 3))) for _ in range(rank)),
        "lhs_dilation": each(SMALL),
        "rhs_dilation": each(SMALL),
        "feature_group_count": draw(SMALL),
    }
    groups = options["feature_group_count"]
    channels, outputs = draw(st.integers(1, 2)), groups * draw(st.integers(1, 2))
    image = (draw(st.integers(1, 2)), groups * channels, *each(st.integers(2, 5)))
    kernel = (outputs, channels, *each(SMALL))
    return image, kernel, options


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(convolutions())
def test_options(convolution):
    image, kernel, options = convolution
    output = jax.eval_shape(
        lambda x, w: lax.conv_general_dilated(x, w, **options), np.zeros(image), np.zeros(kernel)
    )
    assume(output.size > 0)
    check(
        lambda w, x: lax.conv_general_dilated(x, w, **options),
        normal(*kernel),
        examples(*image),
        kinds=["convolution"],
        ghost=True,
    )


@pytest.mark.parametrize(
    ("layout", "image", "kernel"),
    [
        (("NHWC", "HWIO", "NHWC"), (2, 4, 3, 2), (2, 2, 2, 3)),
        (("HWNC", "OHWI", "CNWH"), (4, 3, 2, 2), (3, 2, 2, 2)),
    ],
    ids=str,
)
def test_layouts(layout, image, kernel):
    check(
        lambda w, x: lax.conv_general_dilated(
            x, w, (1, 2), "SAME", rhs_dilation=(2, 1), dimension_numbers=layout
        ),
        normal(*kernel),
        examples(*image),
        kinds=["convolution"],
        ghost=True,
    )


def test_three_dimensions():
    check(
        lambda w, x: lax.conv_general_dilated(
            x, w, (1, 2, 1), [(1, 0), (0, 2), (-1, 1)], (2, 1, 1), (1, 1, 2), feature_group_count=2
        ),
        normal(4, 1, 2, 1, 2),
        examples(1, 2, 2, 3, 4),
        kinds=["convolution"],
        ghost=True,
    )


def test_transposed():
    check(
        lambda w, x: lax.conv_transpose(x, w, (2, 1), "SAME", transpose_kernel=True),
        normal(2, 3, 3, 2),
        examples(1, 3, 2, 2),
        kinds=["convolution"],
        ghost=True,
    )


@pytest.mark.parametrize(
    ("low", "dilation", "steps"), [(1, (2, 1), 3 * 4), (1, (1, 1), 3 * 4), (0, (1, 1), 2 * 3)]
)
def test_steps_are_the_positions_of_the_smaller_side(low, dilation, steps):
    options = {"lhs_dilation": dilation, "feature_group_count": 2}
    found = check(
        lambda w, x: lax.conv_general_dilated(x, w, (1, 1), [(low, 0), (low, 0)], **options),
        normal(4, 1, 2, 2),
        examples(1, 2, 3, 4),
        kinds=["convolution"],
        ghost=True,
    )
    assert [use.steps for use in found.at.values()] == [steps]


def test_inside_vmap():
    """One kernel for many images, and a kernel for each: the latter becomes groups."""
    check(
        lambda w, x: jax.vmap(lambda x: lax.conv(x, w, (1,), "SAME"))(x),
        normal(3, 2, 2),
        examples(2, 1, 2, 4),
        kinds=["convolution"],
        ghost=True,
    )
    check(
        lambda w, x: jax.vmap(lambda w, x: lax.conv(x, w, (1,), "SAME"))(w, x),
        normal(2, 3, 2, 2),
        examples(2, 1, 2, 4),
        kinds=["convolution"],
        ghost=True,
    )
