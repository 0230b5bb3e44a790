"""Streamed bodies, from a Router to Serve's Python proxy over a connection of ours instead of its calls."""
