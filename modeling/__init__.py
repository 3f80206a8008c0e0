"""What a model computes: towers, projectors, full models."""
