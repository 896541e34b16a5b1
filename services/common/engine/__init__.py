"""Models, KV caches and logit processors: torch and transformers. No grpc."""
