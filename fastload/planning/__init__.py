"""What checkpoints will cost on a site, and what stands in their way there."""
