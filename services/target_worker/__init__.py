"""The target worker: returns the target's distribution after each drafted token."""
