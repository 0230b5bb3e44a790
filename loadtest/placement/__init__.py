"""Placement policies side by side: the grid of cells, what it says, and how sure it is."""
