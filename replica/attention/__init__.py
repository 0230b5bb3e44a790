"""How a step attends over K/V pages: one function for transformers, several backends behind it."""
