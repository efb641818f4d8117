"""Byte ranges of files, laid end to end and cut into blocks; rectangles of tensors, and who holds them."""
