"""Who sends a request, how much they may send, and whose cached prefixes they may find.

    settings      what deploy.yaml says of keys and of the cache's scope
    api_key       a key and its digest
    key_table     the key file's content: names, digests, limits, checked
    key_ring      the keys that work now, read again when their file changes
    token_bucket  a rate and what is left of it
    allowance     one key's limits, and one request's share of them
    gate          from an `authorization` header to a request that may go on
    cache_salts   from tenant and body to the salt of block hashes
    tenancy       these parts, put together

Knows keys, names and numbers; knows neither HTTP nor prompts.
"""
