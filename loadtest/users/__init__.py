"""Scenarios as locust's users. Knows locust; everything below it does not."""
