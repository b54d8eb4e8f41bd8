import torch

import mptify
from mptify.config import DataConfig
from mptify.models import conv2
from mptify.training.sources import load_data


class Noise(mptify.Callback):
    """Adds noise to the scores, less in each epoch."""

    @torch.no_grad()
    def on_step_end(self, search, metrics):
        generator = torch.Generator().manual_seed(1000 * search.epoch + search.step)
        for layer in mptify.ticket_layers(search.model).values():
            noise = torch.randn(layer.scores.shape, generator=generator)
            layer.scores.add_(noise, alpha=1e-4 * 0.5**search.epoch)

    def on_epoch_end(self, search, row):
        if search.is_main:
            print(row["epoch"], f"{100 * row['val_accuracy']:.1f} %")


train, val = load_data(DataConfig(source="digits", train_images=500))
model = conv2(in_chans=1, input_size=8)
mptify.search(model, train, val, {"epochs": 2}, callbacks=[Noise()])
