"""Plans, transports and the pipeline of loads: which rank reads which bytes, and how they move."""
