"""Reports as text: tables, and one line of the log for each event."""
