"""Formats of other programs: read, and some of them written by ``fastload convert``."""
