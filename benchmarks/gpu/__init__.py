"""`make bench-gpu`: the engine on a card, beside transformers' own and beside the card's limits."""
