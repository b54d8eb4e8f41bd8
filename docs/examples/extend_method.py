import torch

import mptify
from mptify.models import conv2
from mptify.registry import methods
from mptify.training.methods.biprop import Biprop


@methods.register("biprop_noisy")
class NoisyBiprop(Biprop):
    """biprop that adds noise to the scores before each epoch, so that masks keep changing."""

    description = "biprop with noise on the scores"

    def on_epoch_begin(self, search):
        generator = torch.Generator().manual_seed(search.epoch)
        with torch.no_grad():
            for layer in mptify.ticket_layers(search.model).values():
                noise = torch.randn(layer.scores.shape, generator=generator)
                layer.scores.add_(0.01 * layer.scores.abs().mean().cpu() * noise.to(layer.scores))


images = torch.randint(0, 256, (200, 3, 32, 32), dtype=torch.uint8)
data = (images, torch.arange(200) % 10)
result = mptify.search(conv2(width=0.25), data, data, {"method": "biprop_noisy", "epochs": 1})
print(f"{100 * result.accuracy:.0f} % after {len(result.rows)} epoch")
