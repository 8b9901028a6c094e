"""How bytes move between the ranks."""
