"""State that does not depend on who computed it."""
