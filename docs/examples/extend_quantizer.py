import torch

import mptify
from mptify.models import conv4
from mptify.registry import quantizers


class Clipped(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, width):
        ctx.save_for_backward(x)
        ctx.width = width
        return torch.where(x < 0, -1.0, 1.0).to(x.dtype)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * (x.abs() <= ctx.width), None


@quantizers.register("sign_clipped")
def sign_clipped(x, *, width=1.0):
    """Forward: sign(x). Backward: the gradient passes unchanged where |x| <= width."""
    return Clipped.apply(x, width)


ticketed = mptify.transform(conv4(), bits="1/1", quantizer="sign_clipped")
print(sum(isinstance(module, mptify.Sign) for module in ticketed.modules()), "quantizers")
