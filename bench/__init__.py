"""Measures the service against its own target alone and against transformers: `make bench`."""
