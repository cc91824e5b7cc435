"""MNIST, and what the recipes of `mnist.py` train on: each image as a few views, computed once.

A recipe's loss is the mean over an image's views, so an image stays one example however many views
it has (De et al., 2022, augment images in this way). The recipes here make one view of an image:
four more, shifted by a pixel, gave no higher accuracy on held-out images, at five times the work.
"""

import gzip
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Float16, UInt8
from scattering import CHANNELS, scatter
from sklearn.datasets import fetch_openml
from whitening import drawn_digits, whitening

FILES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
GROUPS, KEPT = 27, 600
CHUNK = 500  # images that are transformed at once

Images = UInt8[np.ndarray, "n 28 28"]


def load_images(folder: Path | None) -> list[np.ndarray]:
    """Images (bytes, 28 x 28) and labels, of the training set and of the test set."""
    if folder is not None:
        found: list[np.ndarray] = []
        for file in (folder / f"{name}-ubyte.gz" for name in FILES):
            if not file.is_file():
                raise SystemExit(f"{file} is missing: --data is the folder of MNIST's four files.")
            raw = gzip.decompress(file.read_bytes())
            shape = np.frombuffer(raw, ">i4", raw[3], 4)  # after a word that ends in their number
            found.append(np.frombuffer(raw, np.uint8, offset=4 + 4 * raw[3]).reshape(shape))
    else:
        try:
            data: Any = fetch_openml("mnist_784", version=1, as_frame=False, parser="liac-arff")
        except OSError as error:
            raise SystemExit(
                f"MNIST cannot be fetched from openml.org ({error}). Get its four files, such as "
                f"{FILES[0]}-ubyte.gz, and give their folder: --data FOLDER."
            ) from error
        images = data.data.reshape(-1, 28, 28).astype(np.uint8)
        labels = data.target.astype(np.uint8)
        found = [images[:60_000], labels[:60_000], images[60_000:], labels[60_000:]]
    return [x if x.ndim == 3 else x.astype(np.int32) for x in found]


def scattered(images: Float[np.ndarray, "n 28 28"]) -> Float[np.ndarray, "n features"]:
    """Scattering features of images whose pixels are from 0 to 1."""
    parts = (scatter(images[i : i + CHUNK]) for i in range(0, len(images), CHUNK))
    return np.concatenate([np.asarray(part).reshape(len(part), -1) for part in parts])


def as_images(images: Images) -> Float16[np.ndarray, "n views ..."]:
    """The images themselves, one view of each."""
    return (images[:, None, None] / np.float32(255)).astype(np.float16)


def grouped(images: Images) -> Float16[np.ndarray, "n views ..."]:
    """Scattering features without mean and scale of a group of channels; one view of each image."""
    parts = scattered(images / np.float32(255)).reshape(len(images), GROUPS, -1)
    spread = np.sqrt(parts.var(axis=2, keepdims=True) + 1e-5)
    parts = (parts - parts.mean(axis=2, keepdims=True)) / spread
    return parts.reshape(len(images), 1, -1).astype(np.float16)


def whitened(images: Images) -> Float16[np.ndarray, "n views ..."]:
    """Whitened features; one view of each image."""
    white = whitening(scattered(drawn_digits(4)), CHANNELS, KEPT)
    return white(scattered(images / np.float32(255)))[:, None].astype(np.float16)
