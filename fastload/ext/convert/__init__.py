"""Any checkpoint in another format: safetensors, a file of torch.save, or a directory of DCP."""
