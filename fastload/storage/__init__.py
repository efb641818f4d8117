"""Storage systems behind one protocol."""
