"""Parts of scripts/gpu_check."""
