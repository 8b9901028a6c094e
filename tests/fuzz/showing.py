"""How cases are printed."""

from dataclasses import fields


class Repr:
    """Dataclasses that show what differs from the defaults: an expression that makes them again."""

    def __repr__(self) -> str:
        plain = type(self)()
        told = [
            f"{one.name}={getattr(self, one.name)!r}"
            for one in fields(self)  # type: ignore[arg-type]
            if getattr(self, one.name) != getattr(plain, one.name)
        ]
        return f"{type(self).__name__}({', '.join(told)})"
