"""Features that are whitened by public images: every direction gets a like share of the clip norm.

Scattering features of digits have most of their variance in few directions, so most of a clipped
gradient points there, and noise covers the rest. Whitening makes the directions alike. Its mean and
its directions come from public images alone: scikit-learn's digits of 8 x 8 pixels, enlarged, drawn
sharply, turned and slanted at random. Their labels are not used.
"""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from scipy.ndimage import affine_transform
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA

FLOOR = 1e-3  # of the total variance: directions with less are not enlarged further

Rows = Float[np.ndarray, "n features"]


def drawn_digits(copies: int, size: int = 28) -> Float[np.ndarray, "n size size"]:
    """Public digits at the size and with the strokes of MNIST's, from 0 to 1."""
    rng: Any = np.random.default_rng(0)

    def drawn(image: Float[np.ndarray, "8 8"]) -> Float[np.ndarray, "size size"]:
        angle, slant = 0.15 * rng.normal(), 0.1 * rng.normal()
        turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
        matrix = 8 / rng.uniform(19, 23) * turn @ np.array([[1, slant], [0, 1]])
        centre = (size - 1) / 2 + 0.7 * rng.normal(size=2)
        large: Any = affine_transform(image, matrix, 3.5 - matrix @ centre, (size, size), order=3)
        return np.clip(rng.uniform(2.5, 6) * (large - rng.uniform(0.35, 0.65)) + 0.5, 0, 1)

    data: Any = load_digits()
    images = data.images / 16
    return np.stack([drawn(image) for image in images for _ in range(copies)]).astype(np.float32)


def unit(rows: Rows) -> Rows:
    """Each row, divided by its norm."""
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


class Whitening(NamedTuple):
    """Unit rows, minus a mean, times a matrix, and unit again."""

    scale: Float[np.ndarray, " features"]
    mean: Float[np.ndarray, " features"]
    matrix: Float[np.ndarray, "features kept"]

    def __call__(self, rows: Rows) -> Float[np.ndarray, "n kept"]:
        return unit((unit(rows / self.scale) - self.mean) @ self.matrix)


def whitening(public: Rows, channels: int, kept: int) -> Whitening:
    """Measures mean, scales of the channels and principal directions of public features."""
    scale = public.reshape(len(public), channels, -1).std(axis=(0, 2))
    scale = np.repeat(scale, public.shape[1] // channels)
    kept = min(kept, *public.shape)
    found: Any = PCA(kept, svd_solver="randomized", random_state=0).fit(unit(public / scale))
    total = found.explained_variance_.sum() / found.explained_variance_ratio_.sum()
    stretch = (found.explained_variance_ + FLOOR * total) ** -0.5
    parts = scale, found.mean_, found.components_.T * stretch
    return Whitening(*(part.astype(np.float32) for part in parts))
