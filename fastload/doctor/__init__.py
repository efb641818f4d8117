"""What a new site needs to know: what its ranks have, how fast its links are, and what stands in the way."""
