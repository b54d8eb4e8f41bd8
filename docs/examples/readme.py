import timm
import torchvision

import mptify

ticketed = mptify.transform(timm.create_model("resnet18"), bits="1/32", prune=0.8)  # a new module: train it with any loop
plan = mptify.plan(torchvision.models.mobilenet_v3_small(), bits="1/1", prune=0.75)  # look before cutting
print(f"{len(mptify.ticket_layers(ticketed))} ticket layers; {len(plan.layers)} planned, {len(plan.left_dense)} left dense")
