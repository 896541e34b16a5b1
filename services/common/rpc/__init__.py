"""The wire: codec, errors, servers, channels, telemetry, settings. No torch."""
