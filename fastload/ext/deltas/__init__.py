"""Delta checkpoints: only what differs from another checkpoint is stored."""
