"""A node's host tier: books, memory, what it gets blocks from, and how it is spoken to."""
