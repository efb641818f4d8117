"""Who takes part, and how they agree."""
