"""Stubs generated from protos/paceline/v1 by `make proto`."""
