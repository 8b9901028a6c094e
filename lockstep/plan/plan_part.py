"""A part of a Plan."""

import msgspec


class PlanPart(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of a Plan: plain values, which JSON can say."""
