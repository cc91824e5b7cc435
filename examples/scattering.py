"""Features of images by fixed wavelets: nothing is learned, so they cost no privacy.

A scattering transform (Bruna and Mallat, Invariant Scattering Convolution Networks, 2013) takes the
moduli of wavelet transforms, twice, and averages each over a neighbourhood. Tramer and Boneh
(Differentially Private Learning Needs Better Features, 2021) found that a linear layer on such
features beats a private convolutional network. `mnist.py` trains one.

The wavelets here are Morlet's: two scales, eight angles. 28 x 28 pixels give 81 channels of 7 x 7:
the averaged image, 16 first moduli, and 64 moduli of moduli. Images are taken to be periodic, which
is harmless where their border is empty.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Complex64, Float

SCALES, ANGLES = 2, 8
STRIDE = 2**SCALES
CHANNELS = 1 + SCALES * ANGLES + ANGLES**2


def wavelets(size: int) -> Complex64[np.ndarray, "scales angles size size"]:
    """Morlet wavelets, as the discrete Fourier transform sees them: waves under a Gaussian."""
    place = (np.arange(size) + size // 2) % size - size // 2
    found = np.empty((SCALES, ANGLES, size, size), np.complex64)
    for scale, angle in np.ndindex(SCALES, ANGLES):
        cosine, sine = np.cos(np.pi * angle / ANGLES), np.sin(np.pi * angle / ANGLES)
        along = place[:, None] * cosine + place * sine
        across = place * cosine - place[:, None] * sine
        width = 0.8 * 2**scale
        gaussian = np.exp(-(along**2 + across**2 / 4) / (2 * width**2))
        wave = np.exp(0.75j * np.pi / 2**scale * along)
        wave -= np.sum(gaussian * wave) / np.sum(gaussian)  # a constant image gives zero
        found[scale, angle] = np.fft.fft2(gaussian * wave / (4 * np.pi * width**2))
    return found


def averages(size: int) -> Float[np.ndarray, "cells size"]:
    """The weights of the pixels of a line in its averages, one for every `STRIDE` pixels."""
    centre = STRIDE * np.arange(size // STRIDE)[:, None] + (STRIDE - 1) / 2
    distance = (np.arange(size) - centre + size / 2) % size - size / 2
    weights = np.exp(-(distance**2) / (2 * (0.8 * STRIDE) ** 2))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)


@jax.jit
def scatter(images: Float[Array, "n size size"]) -> Float[Array, "n channels cells cells"]:
    """The features of images; `size` is a multiple of `STRIDE`."""
    count, size, _ = images.shape
    filters, weights = wavelets(size), averages(size)

    def average(maps: Float[Array, "n *channels size size"]) -> Float[Array, "n c cells cells"]:
        cells = jnp.einsum("ai,...ij,bj->...ab", weights, maps, weights)
        return cells.reshape(count, -1, *cells.shape[-2:])

    first = jnp.abs(jnp.fft.ifft2(jnp.fft.fft2(images)[:, None, None] * filters))
    # A second wavelet sees more only if it is wider than the first.
    narrow = jnp.fft.fft2(first[:, 0])[:, :, None]
    second = jnp.abs(jnp.fft.ifft2(narrow * filters[1]))
    return jnp.concatenate([average(images), average(first), average(second)], axis=1)
