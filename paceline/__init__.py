"""Paceline: exact speculative decoding as a service. `paceline.v1` holds the generated gRPC stubs."""
