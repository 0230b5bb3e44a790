"""The cache disciplines on the same traffic: what they find again, and what they cost."""
