"""Byte ranges of files, laid end to end and cut into blocks; rectangles of tensors. Pure."""
