"""What makes a sum of clipped gradients private: sampling, noise, and the plan that ties them."""
