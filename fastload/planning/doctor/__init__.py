"""Examines the hosts and links of a job, and finds its problems."""
