"""Arguments of the constructors, and where checkpoints and configurations are found."""
