"""The load path: plan → read → exchange → place."""
