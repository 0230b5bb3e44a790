"""What a client of an OpenAI-compatible server sends, and what it sees of the answer."""
