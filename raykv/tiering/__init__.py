"""A rank's traffic with its node's host tier."""
