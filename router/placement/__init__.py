"""The decision: where a request goes, when it leaves, and what is expected of it."""
