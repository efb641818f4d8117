"""Who reads what, and how it gets to those who want it."""
