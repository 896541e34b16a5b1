"""The coordinator: owns every sequence, runs the rounds, applies the rule."""
