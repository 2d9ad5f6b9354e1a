"""The version, on its own: setup.cfg reads it without importing paddle."""

__version__ = "1.1.0"
