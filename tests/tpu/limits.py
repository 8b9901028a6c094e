"""How long a test may take: the stand-in compiles for a minute, on a busy machine for many."""

LIMIT_SECONDS = 3600.0
