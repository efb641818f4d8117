"""Files of torch.save: their pickles, and the archives that these are in."""
