"""What people do with a model, as text: each scenario asks, reads the answers, and asks on.

The lengths, popularities and pauses are drawn with the simulator's own distributions (`loadtest.workloads`).
"""
