"""Keras's distributions, as users write them for JAX, read as strategies.

On its PyTorch backend Keras makes these objects, and trains on one device. A ``LayoutMap`` says by
names of variables which of their dims lie along an axis of the mesh; here processes divide these
variables along them. Layouts of outputs say where values are computed, not what they are, and
follow from those of the variables.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from lockstep.errors import OptionError, Problems
from lockstep.strategies.base import Strategy
from lockstep.strategies.hybrid import divided_by_hand
from lockstep.strategies.mirrored import MirroredStrategy

# The end of the path of a layer's output.
_OUTPUT = "output"

# Keras's names of kinds of devices, where torch has others.
_KINDS = {"gpu": "cuda"}


def strategy_of(distribution: Any = None, **options: Any) -> Strategy:
    """The strategy that trains Keras models as a distribution of Keras says.

    Make and compile the model in its scope, ``with lockstep.keras.strategy_of(...).scope():``.
    ``DataParallel`` is ``MirroredStrategy``. ``ModelParallel`` is ``TensorParallelStrategy``, or
    ``HybridStrategy(data=..., tensor=...)`` if its mesh has several devices along the batch, in
    which only those variables are divided that its ``LayoutMap`` divides, along these dims.

    Args:
        distribution: a ``keras.distribution.DataParallel`` or ``ModelParallel``; None is the one
            that ``keras.distribution.set_distribution`` was called with. That is set to None: Keras
            itself can distribute nothing on PyTorch.
        options: of the strategy: ``engine``, ``num_shares``, ``num_tensor_shards``,
            ``timeout_seconds``.

    Raises:
        OptionError: there is no distribution, its mesh has three axes with several devices, or a
            layout divides a variable twice, or along the batch. ``fit`` raises one that names
            variables which cannot be divided so.
        DeviceError: this host does not have the mesh's devices.
    """
    import keras

    if distribution is None:
        distribution = keras.distribution.distribution()
    kinds = keras.distribution.DataParallel | keras.distribution.ModelParallel
    if not isinstance(distribution, kinds):
        raise OptionError(
            "A strategy is made of a DataParallel or a ModelParallel of keras.distribution.",
            received=repr(distribution),
            fix="Pass one, or call keras.distribution.set_distribution before.",
        )
    mesh, batch = distribution.device_mesh, distribution.batch_dim_name
    sizes = dict(zip(mesh.axis_names, mesh.shape, strict=True))
    axes = [name for name, size in sizes.items() if size > 1 and name != batch]
    layouts = getattr(distribution, "_layout_map", {})
    _check_axes(axes, sizes, batch, layouts)
    devices = np.moveaxis(mesh.devices, mesh.axis_names.index(batch), 0).reshape(-1)
    options["devices"] = [_device(name) for name in devices]
    if keras.distribution.distribution() is distribution:
        keras.distribution.set_distribution(None)
    if not axes:
        return MirroredStrategy(**options)
    return divided_by_hand(
        sizes[batch], sizes[axes[0]], DividedVariables(layouts, axes[0]), **options
    )


def _check_axes(
    axes: list[str], sizes: Mapping[str, int], batch: str, layouts: Mapping[str, Any]
) -> None:
    """Check that there is one axis at most along which variables are divided.

    Raises:
        OptionError: there are more, or a layout divides otherwise.
    """
    mesh = " x ".join(f"{name} {size}" for name, size in sizes.items())
    problems = Problems()
    if len(axes) > 1 or (axes and not layouts):
        problems.add(
            "Beside the batch, a mesh may have one axis with several devices, which layouts name.",
            received=f"a mesh of {mesh}, with {len(layouts)} layouts",
            fix="Give the other axes the size 1.",
        )
    for key, layout in layouts.items():
        named = [name for name in layout.axes if name is not None and sizes.get(name) != 1]
        if named not in ([], axes[:1]) and not key.endswith(_OUTPUT):
            problems.add(
                "A variable is divided once, among the processes of a replica.",
                received=f"layout_map[{key!r}] = {layout.axes}, with a mesh of {mesh}",
                fix=f"Write None in place of {batch!r}. Processes on cores share one copy of each "
                "variable, and FullyShardedStrategy divides all of them among replicas.",
            )
    problems.raise_if_any(OptionError)


def _device(name: Any) -> str:
    """A device of Keras's, as torch names it."""
    kind, _, number = str(name).lower().partition(":")
    return kind if kind == "cpu" else f"{_KINDS.get(kind, kind)}:{number}"


@dataclass(frozen=True, eq=False)
class DividedVariables:
    """The variables of a model that layouts divide, by the names of their Parameters.

    Attributes:
        layouts: the ``LayoutMap``.
        axis: of the mesh.
    """

    layouts: Any
    axis: str

    def __call__(self, module: Any) -> dict[str, int]:
        """The dim of each divided variable.

        Raises:
            OptionError: a layout has more dims than its variable, the variable is not trained, or
                the model is not of Keras.
        """
        from lockstep.frontends.keras.model import KerasModel

        if not isinstance(module, KerasModel):
            raise OptionError(
                "A LayoutMap names variables of Keras models.",
                received=f"a {type(module).__name__}",
                fix="Use TensorParallelStrategy.",
            )
        names = {id(variable): name for name, variable in module.variables.items()}
        problems, found = Problems(), {}
        for variable in module.model.weights:
            layout = self.layouts[variable.path]
            if layout is None or self.axis not in layout.axes:
                continue
            name, dim = names.get(id(variable)), layout.axes.index(self.axis)
            if name is None or dim >= len(variable.shape):
                problems.add(
                    "A layout cannot divide this variable.",
                    received=f"{layout.axes} for {variable.path!r} of shape {variable.shape}, "
                    f"which {'is trained' if name else 'no gradient changes'}",
                    fix="Leave it out of the LayoutMap.",
                )
            else:
                found[name] = dim
        problems.raise_if_any(OptionError)
        return found
