"""What is asked of a fleet: requests with their times, lengths and shared blocks."""
