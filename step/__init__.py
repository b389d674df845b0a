"""The steps: prepare, forward, sample, relay, commit; opening, closing and forking requests."""
