"""What the proxy and the Router add to calling a replica directly: time to first token, and CPU."""
