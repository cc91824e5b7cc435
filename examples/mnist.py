"""Trains on all 60,000 images of MNIST privately, by recipes that can be compared with papers.

- `tanh`: the convolutional network of Papernot et al. (Tempered Sigmoid Activations, 2021), with
  the numbers of Tramer and Boneh (Differentially Private Learning Needs Better Features, 2021).
- `scatter`: a linear layer on scattering features, each normalised in groups of channels, as Tramer
  and Boneh do.
- `ours`: see `whitening.py`.

Rates and all other numbers were chosen with `--choose`: it trains on 55,000 images and measures
accuracy on the other 5,000 training images. Test images are for the last measurement alone. On
data that are private, each such run costs its epsilon (guide: Choose the numbers).

The folder holds the four original files (`train-images-idx3-ubyte.gz` and so on). Without `--data`
scikit-learn fetches the set from openml.org.

    python examples/mnist.py --recipe ours --epsilon 3 --seeds 5 --data FOLDER
"""
