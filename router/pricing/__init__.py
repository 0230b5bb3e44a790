"""What each replica has to do, and what a request would cost there, in seconds."""
