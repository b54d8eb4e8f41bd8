import torchvision

import mptify

plan = mptify.plan(torchvision.models.vgg11_bn(), bits="1/1", prune=0.75, dense="first")
for layer in plan.layers[:4]:
    print(layer.name, layer.kind, layer.shape, layer.kept, layer.input.value)
for left in plan.left_dense:
    print(left.name, "stays dense:", left.reason)
