"""Which replica holds how many leading blocks of a prompt: exact, predicted and approximate entries."""
