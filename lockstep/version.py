"""The version, for whoever must not import all of the package."""

__version__ = "0.1.0"
