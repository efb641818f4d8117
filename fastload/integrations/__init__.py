"""Doors: fastload in programs that have a way of their own to save and load.

Each module needs the library that it is named for; nothing here is imported by the rest of fastload.
"""
