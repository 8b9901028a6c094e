"""What the planner says of published results.

PipeDream: Narayanan et al. 2019 (SOSP), Table 1 and section 5: VGG-16 as 7-1 on 8 and 15-1 on 16
GPUs, AlexNet as 15-1 on 16, plain data parallelism for ResNet-50. Profiles are not published, so
layers come from the architectures, their times from V100's float32 operations (NVIDIA 2020), of
which half is reached. A server has one GPU and 10 Gbit/s; a GPU's microbatch is its minibatch there
(64, 256 and 128 images).

Not found: VGG-16 as 3-1 on 4 GPUs, where data parallelism is predicted to be faster.

Megatron-LM: Narayanan et al. 2021 (SC), Table 1, see ``tests.megatron``.
"""

import pytest

from lockstep.cluster.cluster_file import parse_cluster
from lockstep.plan.cost.placement import placement_of
from lockstep.plan.cost.profile import profile_of
from lockstep.plan.search.layouts import best_layouts
from tests.architectures import alexnet, graph_of, resnet50, vgg16
from tests.megatron import ROWS, Constants, predicted_teraflops

SERVERS = """
efficiency = 0.5

[[hosts]]
count = {count}
device = "V100"

[[networks]]
link = "ethernet-10"

[accelerators.V100]
teraflops = 15.7
memory = "16GiB"
"""

ARCHITECTURES = {"vgg16": vgg16, "alexnet": alexnet, "resnet50": resnet50}

# GPUs, images of a GPU's minibatch, and replicas of each stage.
PIPEDREAM = {
    "vgg16 on 8": (8, 64, (7, 1)),
    "vgg16 on 16": (16, 64, (15, 1)),
    "alexnet on 16": (16, 256, (15, 1)),
    "resnet50 on 16": (16, 128, (16,)),
}


@pytest.mark.parametrize("name", PIPEDREAM)
def test_plans_of_pipedream(name: str) -> None:
    gpus, images, replicas = PIPEDREAM[name]
    profile = profile_of(graph_of(ARCHITECTURES[name.split()[0]]()))
    placement = placement_of(parse_cluster(SERVERS.format(count=gpus)))
    found = best_layouts(profile, placement, images * gpus, (gpus - 1, gpus))
    best = min(found.values(), key=lambda one: one.seconds)
    assert best.layout.replicas == replicas


@pytest.mark.parametrize(
    ("name", "operations", "parameters"),
    [("vgg16", 30.9e9, 138.4e6), ("alexnet", 1.4e9, 61.1e6), ("resnet50", 7.7e9, 25.5e6)],
)
def test_the_architectures_are_those(name: str, operations: float, parameters: float) -> None:
    whole = profile_of(graph_of(ARCHITECTURES[name]())).whole
    assert whole.operations == pytest.approx(operations, rel=0.03)
    assert whole.trainable == pytest.approx(parameters, rel=0.01)


# Fitted on rows 1, 4 and 9, on a grid.
FITTED = (0, 3, 8)
CONSTANTS = Constants(reached=0.64, half_width=1000, link=0.7)


def test_teraflops_of_megatron() -> None:
    errors = [
        abs(predicted_teraflops(row, CONSTANTS) / row.teraflops - 1)
        for number, row in enumerate(ROWS)
        if number not in FITTED
    ]
    assert sum(errors) / len(errors) < 0.08
    assert max(errors) < 0.1  # of 39 and 76 billion parameters it predicts too much
