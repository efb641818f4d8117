"""Formats of other programs, asked if no built-in one fits: entry points of ``fastload.formats``."""
