"""Traces of loads and saves (``trace=``), and their drawings (``fastload timeline``)."""
