"""Integrations with libraries that save and load checkpoints in their own way.

Each module needs the library that it is named for. The rest of fastload imports none of them.
"""
