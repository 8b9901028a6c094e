"""The strategies that users name. Each is a way to get a Plan, nothing more."""
