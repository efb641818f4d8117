"""What any room may need: threads, memory, stopwatches, spans."""
