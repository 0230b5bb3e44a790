"""A request done: sent where it was placed, gone on with elsewhere when that fails, and charged.

job              what is to be generated, and for whom
dispatcher       what all generations share; starts them
generation       one job over all its attempts
replica_calls    the border to a replica
deadline         a stream of deltas that nobody awaits for ever
failed_attempts  whether another attempt is worth making
token_accounts   which tokens are charged, each once
bill             whom they are charged to
"""
