"""The `paceline` command."""
