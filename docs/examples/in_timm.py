import timm

import mptify.models.in_timm  # adds our networks to timm

network = timm.create_model("mptify_vgg_small", width=0.5, num_classes=100)
parameters = sum(parameter.numel() for parameter in network.parameters())
print(type(network).__name__, parameters, mptify.__version__)
