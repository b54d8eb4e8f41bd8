import torch

import mptify
from mptify.nn.scopes import SharedScope
from mptify.registry import scopes


@scopes.register("relative")
class Relative(SharedScope):
    """One threshold for all layers, on |score| over each layer's mean |score|."""

    def select(self, scores, kept):
        sizes = [values.numel() for values in scores]
        ranked = torch.cat([(values.abs() / values.abs().mean()).view(-1) for values in scores])
        mask = torch.zeros(len(ranked), dtype=torch.bool)
        mask[ranked.topk(kept).indices] = True
        return [part.view(values.shape) for part, values in zip(mask.split(sizes), scores)]


ticketed = mptify.transform("mptify:conv4", prune=0.8, scope="relative")
print({name: layer.kept for name, layer in mptify.ticket_layers(ticketed).items()})
