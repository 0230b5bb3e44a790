"""A cluster under a virtual clock: production's routing, scheduler and cache, a machine's step time."""
