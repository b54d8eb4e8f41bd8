import timm
import timm.optim
import timm.scheduler
import timm.utils
import torch
from timm.loss import LabelSmoothingCrossEntropy

import mptify

model = mptify.transform(timm.create_model("test_resnet", num_classes=10), bits="1/32", prune=0.8)
optimizer = timm.optim.create_optimizer_v2(model, opt="sgd", lr=0.1, weight_decay=1e-4)
schedule = {"sched": "cosine", "num_epochs": 2, "warmup_epochs": 0}
scheduler, epochs = timm.scheduler.create_scheduler_v2(optimizer, **schedule)
loss_of, scale = LabelSmoothingCrossEntropy(0.1), timm.utils.NativeScaler(device="cpu")
average = timm.utils.ModelEmaV3(model, decay=0.9)

generator = torch.Generator().manual_seed(0)
images = torch.randn(64, 3, 64, 64, generator=generator)
labels = torch.randint(10, (64,), generator=generator)
for epoch in range(epochs):
    losses, correct = timm.utils.AverageMeter(), timm.utils.AverageMeter()
    for some, theirs in zip(images.split(16), labels.split(16), strict=True):
        output = model(some)
        loss = loss_of(output, theirs)
        optimizer.zero_grad()
        scale(loss, optimizer, clip_grad=1.0, parameters=timm.models.model_parameters(model))
        average.update(model)
        losses.update(loss.item(), len(some))
        correct.update(timm.utils.accuracy(output, theirs)[0].item(), len(some))
    scheduler.step(epoch + 1)
    print(f"epoch {epoch}: loss {losses.avg:.3f}, {correct.avg:.1f} % right")
