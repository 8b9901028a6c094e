"""Graphs of published architectures, from their layers' shapes: operations, parameters, outputs."""

from collections.abc import Iterable, Iterator

from lockstep.graph.layer_graph import Flow, Layer, LayerCosts, LayerGraph, ParameterInfo

# Operations, parameters and elements of the output, for a sample.
Shape = tuple[str, float, int, int]


def graph_of(shapes: Iterable[Shape]) -> LayerGraph:
    """A chain of layers in float32."""
    layers, outputs = [], []
    for name, operations, parameters, output in shapes:
        weight = ParameterInfo(
            name=f"{name}.weight", shape=(parameters,), dtype="float32", trainable=True
        )
        costs = LayerCosts(
            forward_seconds=0.0,
            backward_seconds=0.0,
            activation_bytes=8 * output,
            operations=operations,
        )
        layers.append(Layer(name=name, kind="Conv2d", parameters=(weight,), costs=costs))
        outputs.append(4 * output)
    flows = tuple(
        Flow(source=source, num_bytes=size, users=(source + 1,))
        for source, size in enumerate(outputs[:-1])
    )
    return LayerGraph(layers=tuple(layers), flows=flows, samples=1)


def convolution(name: str, ins: int, outs: int, kernel: int, side: int, pool: int = 1) -> Shape:
    """A convolution whose output has ``side`` rows, before pooling."""
    parameters = kernel * kernel * ins * outs
    return name, 2.0 * parameters * side * side, parameters + outs, outs * (side // pool) ** 2


def dense(name: str, ins: int, outs: int) -> Shape:
    """A fully connected layer."""
    return name, 2.0 * ins * outs, ins * outs + outs, outs


def vgg16() -> Iterator[Shape]:
    """Simonyan and Zisserman 2014, configuration D."""
    ins, side, number = 3, 224, 0
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for index in range(count):
            pool = 2 if index == count - 1 else 1
            yield convolution(f"conv{number}", ins, width, 3, side, pool)
            ins, number = width, number + 1
        side //= 2
    yield from (
        dense("fc0", 512 * 49, 4096),
        dense("fc1", 4096, 4096),
        dense("fc2", 4096, 1000),
    )


def alexnet() -> Iterator[Shape]:
    """Krizhevsky 2014, in one column."""
    yield convolution("conv0", 3, 64, 11, 55, 2)
    yield convolution("conv1", 64, 192, 5, 27, 2)
    yield convolution("conv2", 192, 384, 3, 13)
    yield convolution("conv3", 384, 256, 3, 13)
    yield convolution("conv4", 256, 256, 3, 13, 2)
    yield from (dense("fc0", 9216, 4096), dense("fc1", 4096, 4096), dense("fc2", 4096, 1000))


def resnet50() -> Iterator[Shape]:
    """He et al. 2015: a layer for each bottleneck."""
    yield convolution("stem", 3, 64, 7, 112, 2)
    ins, side = 64, 56
    for stage, (width, count) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3))):
        side = 56 >> stage
        for block in range(count):
            parts = [
                convolution("", ins, width, 1, side),
                convolution("", width, width, 3, side),
                convolution("", width, 4 * width, 1, side),
            ]
            if block == 0:
                parts.append(convolution("", ins, 4 * width, 1, side))
            operations = sum(part[1] for part in parts)
            parameters = sum(part[2] for part in parts)
            yield f"{stage}.{block}", operations, parameters, 4 * width * side * side
            ins = 4 * width
    yield dense("fc", 2048, 1000)
