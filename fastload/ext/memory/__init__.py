"""Recent checkpoints in the memory of the hosts: each host has its share of them, and copies of others'."""
