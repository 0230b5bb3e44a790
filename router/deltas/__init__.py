"""Replicas' deltas, over a connection of ours to each of them instead of items of Ray's calls."""
