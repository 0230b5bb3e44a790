"""Prefixes that clients had computed before their traffic, and held.

    prefix      what is held, in whose turn it is computed, and what a listing tells of it
    holdings    who holds what, as the replicas' reports say
    copies      one replica made to hold a prefix, or to give it back
    kept_pin    one that this Router keeps, as it knows it
    copy_maker  a pin's missing copies, made: on which replicas
    keeper      the pins that this Router keeps: how long, and lost copies made again
    succession  pins whose Router has gone, adopted by another
    directory   all pins, whichever Router is asked: also those that only another Router knows
    kept_report what a Router tells another of those that it keeps

The replicas are the truth: each tells every Router what it holds, so whichever is asked knows all of it, but
what is being made.
Knows tokens, hashes, replicas and time; knows neither HTTP nor keys.
"""
