"""What `python -m loadtest` can be asked to do: one module per command, with its options and its help."""
