"""What there is to train on, as pure data, and how it is found."""
