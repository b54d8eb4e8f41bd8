"""Surgery, files and packed programs in a process where other threads build, train and draw random numbers."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import timm
import torch
from torch import nn

import mptify
from mptify.models import registry
from mptify.models.init_mode import InitMode
from mptify.ticket.codec import to_bytes

NAMES = [
    "mptify:conv2",
    "timm:test_resnet",
    "timm:test_vit",
    "torchvision:squeezenet1_1",
    "timm:test_efficientnet",
]


@contextmanager
def in_background(*works):
    """Each of `works` again and again in a thread of its own; what one of them raises is raised at the end."""
    stop, raised = threading.Event(), []

    def loop(work):
        try:
            while not stop.is_set():
                work()
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=loop, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    if raised:
        raise raised[0]


def draw():
    random.random()
    np.random.rand()
    torch.rand(1)


def build():
    layer = nn.Linear(512, 512)
    assert not layer.weight.is_meta
    assert layer.weight.std() > 0.01


def train():
    network = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
    )
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for mode in (True, False, True):
        network.train(mode)
        assert [part.training for part in network.modules()] == [mode] * len(
            list(network.modules())
        )
        network(torch.ones(2, 3, 8, 8)).sum().backward()
        optimizer.step()


def ticket_bytes(name, bits):
    """What a network of this name becomes; BatchNorms of a fresh network are all alike, so only the surgery counts."""
    with InitMode(seed=0):
        network = registry.build(registry.resolve(name), num_classes=5)
    return to_bytes(mptify.ticket_of(mptify.transform(network, bits=bits, prune=0.7)))


def test_other_threads_that_draw_random_numbers_change_nothing(tmp_path):
    network = timm.create_model("test_resnet", num_classes=5).eval()
    image = torch.randn(2, 3, 64, 64)
    alone = mptify.transform(network, bits="1/1", prune=0.5).eval()
    path = tmp_path / "a.ticket"
    mptify.save(alone, path, "timm:test_resnet", arguments={"num_classes": 5})
    with in_background(draw):
        for _ in range(6):
            beside = mptify.transform(network, bits="1/1", prune=0.5).eval()
            assert type(beside).__name__ == type(alone).__name__
            assert torch.equal(beside(image), alone(image))
        assert torch.equal(mptify.load(path)(image), alone(image))


def test_eight_threads_give_the_bytes_of_one_while_others_build_train_and_draw(tmp_path):
    work = [(name, bits) for name in NAMES for bits in ("1/1", "1/32")]
    alone = [ticket_bytes(*one) for one in work]

    def everything(number):
        name, bits = work[number % len(work)]
        data = ticket_bytes(name, bits)
        path = tmp_path / f"{threading.get_ident()}.ticket"
        with InitMode(seed=0):
            network = registry.build(registry.resolve(name), num_classes=5)
        ticketed = mptify.transform(network, bits=bits, prune=0.7).eval()
        mptify.save(ticketed, path, name, arguments={"num_classes": 5})
        loaded = mptify.load(path)
        image = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        image = image[..., :32, :32] if name == "mptify:conv2" else image
        if bits == "1/1":
            torch.testing.assert_close(
                mptify.pack(loaded, image)(image), ticketed(image), rtol=1e-4, atol=1e-5
            )
        assert torch.equal(loaded(image), ticketed(image))
        return data

    with in_background(draw, build, train), ThreadPoolExecutor(8) as pool, torch.no_grad():
        beside = list(pool.map(everything, range(2 * len(work))))
    assert beside == alone * 2
    assert nn.Linear(4, 4).weight.device.type == "cpu"
    nn.Sequential(nn.Linear(4, 4))(torch.ones(1, 4))  # torch's modules can still be called


def test_loading_leaves_the_global_generator_and_the_default_type_alone(tmp_path):
    path = tmp_path / "a.ticket"
    network = timm.create_model("test_vit", num_classes=5)
    mptify.save(
        mptify.transform(network, prune=0.5), path, "timm:test_vit", arguments={"num_classes": 5}
    )
    before = torch.get_rng_state()
    wanted = {name: tensor.clone() for name, tensor in mptify.load(path).state_dict().items()}
    assert torch.equal(torch.get_rng_state(), before)
    torch.set_default_dtype(torch.float64)
    try:
        found = mptify.load(path).state_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype
        for name, tensor in wanted.items()
    )


class Draws(nn.Module):
    def __init__(self, draw):
        super().__init__()
        self.conv, self.last, self.draw = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), draw
        self.generator = random.Random(0)

    def forward(self, x):
        x = torch.relu(self.conv(x))
        return self.last(x) * self.draw(self)


DRAWS = {
    "python": lambda net: random.random(),
    "a generator of its own": lambda net: net.generator.random(),
    "numpy": lambda net: float(np.random.rand()),
    "a numpy generator": lambda net: np.random.default_rng().random(),
    "torch": lambda net: torch.rand(()),
}


@pytest.mark.parametrize("which", DRAWS)
def test_numbers_that_a_forward_draws_are_not_frozen(which):
    net = Draws(DRAWS[which])
    plan = mptify.plan(net, bits="1/1")
    assert "draws random numbers" in plan.untraced[""]
    ticketed = mptify.transform(net, bits="1/1").eval()
    image = torch.randn(1, 3, 8, 8)
    assert not torch.equal(ticketed(image), ticketed(image))
