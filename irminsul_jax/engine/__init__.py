"""Serving: requests in, tokens out. Owns the device pool, the host cache and the batch; everything below it is pure."""
