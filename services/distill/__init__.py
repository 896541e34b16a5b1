"""Makes a draft for a target: the target writes, and a small model learns the target's own distributions."""
