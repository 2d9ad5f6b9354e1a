"""Leaves that any project could copy."""
