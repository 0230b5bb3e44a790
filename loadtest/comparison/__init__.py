"""Deployments beside each other: started in turn, asked the same, measured alike, one report."""
