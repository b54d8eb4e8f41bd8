import timm
import torchvision

import mptify

# A new module, which any training loop can train: 1-bit weights, 32-bit activations, 80 % pruned.
ticketed = mptify.transform(timm.create_model("resnet18"), bits="1/32", prune=0.8)
print(len(mptify.ticket_layers(ticketed)), "ticket layers")

# What transform would do, as data:
plan = mptify.plan(torchvision.models.mobilenet_v3_small(), bits="1/1", prune=0.75)
print(len(plan.layers), "layers would be converted,", len(plan.left_dense), "left dense")
