import torch
from torch import nn

import mptify


class Dense(nn.Module):
    """A layer whose weight is called `kernel`, and transposed."""

    def __init__(self, width_in, width_out):
        super().__init__()
        self.width_in, self.width_out = width_in, width_out
        self.kernel = nn.Parameter(torch.randn(width_in, width_out))

    def forward(self, x):
        return x @ self.kernel


@mptify.register(Dense)
def describe(layer):
    return mptify.Handler(
        weight="kernel",
        inputs=layer.width_in,
        outputs=layer.width_out,
        axis=-1,
        fan_in=layer.width_in,
        kind="Dense",
    )


model = nn.Sequential(Dense(16, 32), nn.ReLU(), Dense(32, 10))
ticketed = mptify.transform(model, bits="1/1", prune=0.5)
print(ticketed)
print(ticketed(torch.randn(4, 16)).shape)
