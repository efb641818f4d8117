"""Parts of the benchmark scripts."""
