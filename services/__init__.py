"""The three services, the command line, and what they share."""
