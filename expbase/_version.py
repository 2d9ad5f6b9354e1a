"""The version, on its own: setup.cfg reads it without importing paddle."""

__version__ = "0.2.0"
