"""Stands in for Horovod, which cannot be built here; see ``docs/migrating.md``."""
