"""From a request to its token ids and block hashes, without doing twice what was done before."""
