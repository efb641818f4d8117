"""Features that the core does without: each may import the core, and none of the others."""
