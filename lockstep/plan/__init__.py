"""What goes where, as pure data: no torch, no process, no clock."""

from lockstep.plan.pipeline.simulation import Timeline, simulate

__all__ = ["Timeline", "simulate"]
