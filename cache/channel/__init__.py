"""Streams of numbered pieces between two processes, all of them over one TCP connection."""
