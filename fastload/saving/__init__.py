"""From tensors to files: layout, partition, snapshot, write, commit."""
