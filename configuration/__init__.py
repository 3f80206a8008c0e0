"""What a model is: one configuration class per family."""
