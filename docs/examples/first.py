import torch
import torchvision

import mptify

model = torchvision.models.resnet18(num_classes=10)
ticketed = mptify.transform(model, bits="1/1", prune=0.75)

layer = mptify.ticket_layers(ticketed)["layer1.0.conv1"]
print(layer)
print(int(layer.mask.sum()), "of", layer.count, "weights survive")
print("effective values:", layer.ticket_weight().unique().tolist())

trained = [parameter for parameter in ticketed.parameters() if parameter.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
images, labels = torch.randn(8, 3, 64, 64), torch.randint(10, (8,))
for step in range(2):
    loss = torch.nn.functional.cross_entropy(ticketed(images), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step}: loss {loss.item():.3f}")
