"""The commands of planning, for the command line."""
