"""What policies remember: where prompts went, how often, and where a key belongs. All bounded in memory."""
