"""From a model to its LayerGraph."""
