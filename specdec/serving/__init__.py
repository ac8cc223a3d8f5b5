"""Serving over HTTP without a page: what stands in front of every route, whoever mounts it."""
