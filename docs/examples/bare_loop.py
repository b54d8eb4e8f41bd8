import torch
from sklearn.datasets import load_digits
from torch.nn import functional as F

import mptify
from mptify.models import conv2

digits = load_digits()
images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 8 - 1
labels = torch.tensor(digits.target)
shuffled = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
train, test = shuffled.split([1400, 397])

model = mptify.transform(conv2(in_chans=1, input_size=8), bits="1/32", prune=0.8, bn="insert")
trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9, weight_decay=1e-4)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
for _ in range(8):
    for batch in train[torch.randperm(len(train))].split(64):
        loss = F.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    schedule.step()

model.eval()
right = (model(images[test]).argmax(1) == labels[test]).float().mean().item()
print(f"{100 * right:.1f} % right with a fifth of the weights, none of them trained")
