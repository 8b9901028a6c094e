"""Front ends: models of other libraries, trained through the same Plan and Worker."""
