"""The strategies that users name. Each only makes Plans."""
