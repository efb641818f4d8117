"""Tensors one by one: out of a checkpoint (``Checkpoint.tensors``), and into one (``save_stream``)."""
