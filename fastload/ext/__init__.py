"""Optional features. Each imports the core; none imports another one, and the core imports none."""
