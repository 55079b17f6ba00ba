"""Plans that are derived from a model, where none was written for its architecture."""
