"""The replicas' KV events, from the socket into the index."""
