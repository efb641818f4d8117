"""Files of safetensors, one or several."""
