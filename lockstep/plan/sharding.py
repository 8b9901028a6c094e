"""Sharding: the parts of a training that a data parallel Plan divides over its ranks."""

from lockstep.plan.plan_part import PlanPart

# What may lie in the memory of an accelerator's host. Where cores compute, it does so anyway.
IN_HOST_MEMORY = ("slots", "parameters")


def is_in(layer: str, module: str) -> bool:
    """True if a layer is a module, or a part of it."""
    return layer == module or layer.startswith(f"{module}.")


class Sharding(PlanPart, frozen=True, kw_only=True):
    """What is divided over ranks: each keeps its part.

    Attributes:
        level: ``"slots"``, the optimizer's; ``"gradients"`` and slots; or ``"parameters"``,
            gradients and slots.
        units: names of the modules whose parameters are gathered together, unit by unit.
            Parameters in no unit stay on every rank.
        recompute: names of modules whose activations are computed again in backward.
        shares_parameters: ranks have one copy of the parameters, in memory that they share; each
            updates its part.
        offload: ``"slots"``: they lie in host memory, each rank's part, and come to its accelerator
            piece by piece while they are stepped. ``"parameters"``: so do these, in one copy, and
            gradients; units come to the accelerators while they are used. The directory of a file:
            slots lie there. None: all lies where it is used.
        is_small: what a device gathers stays until the update, and the memory of gradients from
            step to step: it is so little that to free it and gather it again costs more.
    """

    level: str
    units: tuple[tuple[str, ...], ...] = ()
    recompute: tuple[str, ...] = ()
    shares_parameters: bool = False
    offload: str | None = None
    is_small: bool = False

    @property
    def directory(self) -> str | None:
        """That of the file with the slots; None if they are in memory."""
        return None if self.offload in IN_HOST_MEMORY else self.offload

    def unit_of(self, layer: str) -> str:
        """The first name of the unit that a layer is in; "" for none."""
        return next(
            (unit[0] for unit in self.units if any(is_in(layer, name) for name in unit)), ""
        )

    @property
    def streams_parameters(self) -> bool:
        """Whether parameters lie in host memory, from which accelerators copy units for use."""
        return self.offload == "parameters"

    @property
    def divides_gradients(self) -> bool:
        """Whether gradients are divided."""
        return self.level != "slots"

    @property
    def divides_parameters(self) -> bool:
        """Whether a rank has only its part of the parameters, and gathers the others for use."""
        return self.level == "parameters" and not self.shares_parameters
